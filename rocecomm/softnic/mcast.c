/* Multicast groups of datagram queue pairs: each context's segment lists who of it is in which group;
 * a sender goes through the segments of all contexts. */
#define _GNU_SOURCE
#include "softnic.h"

/* ff00::/8, or 224.0.0.0/4 written as ::ffff:a.b.c.d */
static bool is_group(const union ibv_gid *gid)
{
	static const uint8_t v4[12] = { [10] = 0xff, [11] = 0xff };
	return memcmp(gid->raw, v4, sizeof(v4)) == 0 ? (gid->raw[12] & 0xf0) == 0xe0 : gid->raw[0] == 0xff;
}

static int check(struct sn_ctx *ctx, struct ibv_qp *qp, const union ibv_gid *gid)
{
	if (sn_foreign(ctx))
		return EPERM;
	return qp->qp_type != IBV_QPT_UD || !is_group(gid) ? EINVAL : 0;
}

static bool is_member(const struct sn_member *m, uint32_t qpn, const union ibv_gid *gid)
{
	return atomic_load(&m->qpn) == qpn && memcmp(m->gid, gid->raw, sizeof(m->gid)) == 0;
}

SN_EXPORT int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	struct sn_ctx *ctx = sn_ctx_of(qp->context);
	struct sn_member *empty = NULL;
	int err = check(ctx, qp, gid);

	(void)lid; /* RoCE has none */
	if (err)
		return err;
	pthread_mutex_lock(&ctx->lock);
	for (uint32_t i = 0; i < SN_MEMBERS; i++) {
		struct sn_member *m = &ctx->seg->members[i];
		if (is_member(m, qp->qp_num, gid)) { /* once is enough */
			pthread_mutex_unlock(&ctx->lock);
			return 0;
		}
		if (!empty && !atomic_load(&m->qpn))
			empty = m;
	}
	if (empty) {
		memcpy(empty->gid, gid->raw, sizeof(empty->gid));
		atomic_store(&empty->qpn, qp->qp_num);
		atomic_fetch_add(&ctx->seg->num_members, 1);
	}
	pthread_mutex_unlock(&ctx->lock);
	return empty ? 0 : ENOMEM;
}

SN_EXPORT int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	struct sn_ctx *ctx = sn_ctx_of(qp->context);
	int err = check(ctx, qp, gid);

	(void)lid;
	if (err)
		return err;
	err = EINVAL;
	pthread_mutex_lock(&ctx->lock);
	for (uint32_t i = 0; i < SN_MEMBERS && err; i++)
		if (is_member(&ctx->seg->members[i], qp->qp_num, gid)) {
			atomic_store(&ctx->seg->members[i].qpn, 0);
			atomic_fetch_sub(&ctx->seg->num_members, 1);
			err = 0;
		}
	pthread_mutex_unlock(&ctx->lock);
	return err;
}

/* With ctx->lock held. A queue pair in a group cannot be destroyed. */
bool sn_mcast_has(struct sn_ctx *ctx, uint32_t qpn)
{
	if (!atomic_load(&ctx->seg->num_members))
		return false;
	for (uint32_t i = 0; i < SN_MEMBERS; i++)
		if (atomic_load(&ctx->seg->members[i].qpn) == qpn)
			return true;
	return false;
}

static void visit_members(struct sn_seg *seg, const union ibv_gid *gid, void (*visit)(void *arg, uint32_t qpn), void *arg)
{
	if (!atomic_load(&seg->num_members))
		return;
	for (uint32_t i = 0; i < SN_MEMBERS; i++) {
		uint32_t qpn = atomic_load(&seg->members[i].qpn);
		if (qpn && is_member(&seg->members[i], qpn, gid))
			visit(arg, qpn);
	}
}

/* Is the datagram for a group? Then every member but its sender is visited. */
bool sn_mcast_each(struct sn_ctx *ctx, const struct sn_swqe *w, void (*visit)(void *arg, uint32_t qpn), void *arg)
{
	union ibv_gid gid;
	if (w->ud_qpn != 0xffffff)
		return false;
	memcpy(gid.raw, &w->remote_addr, 8);
	memcpy(gid.raw + 8, &w->compare_add, 8);
	if (!is_group(&gid))
		return false;
	for (uint32_t slot = 1; slot < SN_SLOTS; slot++) {
		sn_id id = sn_slot_id(slot);
		struct sn_peer *peer = NULL;
		int err;
		if (id >> SN_SLOT_BITS == 0)
			continue; /* nobody was ever there */
		if (slot == (ctx->id & (SN_SLOTS - 1)))
			visit_members(ctx->seg, &gid, visit, arg);
		else if ((peer = sn_peer_get(ctx, slot, &err)))
			visit_members(peer->seg, &gid, visit, arg);
	}
	return true;
}
