/* Claims: what a process touches in two contexts' memory right now. A claim is published before any
 * key or state is looked at, so whoever revokes a key or resets a QP knows whom to wait for. */
#define _GNU_SOURCE
#include <sched.h>

#include "softnic.h"

/* A claim on both ends, to be followed by the keys (sn_claim_name) and, before any of these ends' keys
 * and states is looked at, by sn_claim_publish. It may then serve one request after the other. */
struct sn_claim *sn_claim_begin(struct sn_ctx *ctx, const struct sn_side *r, const struct sn_side *t)
{
	static _Thread_local uint32_t hint __attribute__((tls_model("initial-exec")));
	for (;; sched_yield())
		for (uint32_t i = 0; i < SN_CLAIMS; i++) {
			uint32_t at = (hint + i) % SN_CLAIMS, zero = 0;
			struct sn_claim *c = &ctx->seg->claims[at];
			if (!atomic_compare_exchange_strong(&c->active, &zero, 1))
				continue;
			hint = at;
			uint32_t limit = atomic_load_explicit(&ctx->seg->claim_limit, memory_order_relaxed);
			while (limit <= at && !atomic_compare_exchange_weak(&ctx->seg->claim_limit, &limit, at + 1))
				;
			atomic_store_explicit(&c->id[0], r->seg->id, memory_order_relaxed);
			atomic_store_explicit(&c->id[1], t ? t->seg->id : 0, memory_order_relaxed);
			atomic_store_explicit(&c->qpn[0], r->qp->qpn, memory_order_relaxed);
			atomic_store_explicit(&c->qpn[1], t ? t->qp->qpn : 0, memory_order_relaxed);
			atomic_store_explicit(&c->num_keys[0], 0, memory_order_relaxed);
			atomic_store_explicit(&c->num_keys[1], 0, memory_order_relaxed);
			uint32_t serial = atomic_load_explicit(&c->serial, memory_order_relaxed);
			atomic_store_explicit(&c->serial, serial + 1, memory_order_relaxed);
			return c;
		}
}

bool sn_claim_another(struct sn_claim *c, int side, uint32_t key)
{
	uint32_t n = atomic_load_explicit(&c->num_keys[side], memory_order_relaxed);
	if (n > SN_CLAIM_KEYS)
		return false; /* it covers every key already */
	for (uint32_t i = 1; i < n; i++)
		if (atomic_load_explicit(&c->key[side][i], memory_order_relaxed) == key)
			return false;
	if (n < SN_CLAIM_KEYS)
		atomic_store_explicit(&c->key[side][n], key, memory_order_relaxed);
	atomic_store_explicit(&c->num_keys[side], n + 1, memory_order_release);
	return true;
}

void sn_claim_publish(void)
{
	atomic_thread_fence(memory_order_seq_cst);
}

void sn_claim_key(struct sn_claim *c, int side, uint32_t key)
{
	if (sn_claim_name(c, side, key))
		sn_claim_publish();
}

void sn_claim_end(struct sn_claim *c)
{
	atomic_store_explicit(&c->active, 0, memory_order_release);
}

static bool touches(struct sn_claim *c, sn_id me, uint32_t qpn, uint32_t key)
{
	if (!atomic_load(&c->active))
		return false;
	for (int side = 0; side < 2; side++) {
		if (atomic_load(&c->id[side]) != me)
			continue;
		if (qpn) {
			if (atomic_load(&c->qpn[side]) == qpn)
				return true;
			continue;
		}
		uint32_t n = atomic_load(&c->num_keys[side]);
		if (n > SN_CLAIM_KEYS)
			return true;
		for (uint32_t i = 0; i < n; i++)
			if (atomic_load(&c->key[side][i]) == key)
				return true;
	}
	return false;
}

static bool wait_one(struct sn_ctx *ctx, struct sn_claim *c, sn_id holder, uint32_t qpn, uint32_t key)
{
	uint32_t serial = atomic_load(&c->serial);
	uint64_t start = 0;
	for (uint32_t tries = 0; touches(c, ctx->id, qpn, key) && atomic_load(&c->serial) == serial; tries++) {
		sched_yield();
		if (tries % 64 != 63)
			continue;
		if (holder != ctx->id && !sn_alive(holder))
			return true;
		uint64_t now = sn_now();
		if (!start)
			start = now;
		else if (now - start > SN_LOCK_WAIT_NS)
			return false;
	}
	return true;
}

static bool wait_all(struct sn_ctx *ctx, struct sn_seg *seg, sn_id holder, uint32_t qpn, uint32_t key)
{
	for (uint32_t i = 0; i < atomic_load(&seg->claim_limit); i++)
		if (touches(&seg->claims[i], ctx->id, qpn, key) && !wait_one(ctx, &seg->claims[i], holder, qpn, key))
			return false;
	return true;
}

/* Everybody who is or was at `slot` and may still touch us. */
static bool wait_slot(struct sn_ctx *ctx, uint32_t slot, uint32_t qpn, uint32_t key)
{
	_Atomic uint64_t *users = &ctx->seg->users[slot / 64];
	uint64_t bit = 1ULL << slot % 64;
	int err = 0;
	pthread_mutex_lock(&ctx->peer_lock); /* somebody else may be getting to know it */
	struct sn_peer *p = ctx->peers[slot];
	pthread_mutex_unlock(&ctx->peer_lock);
	/* the one we know is still the one at that slot: no need to ask whether it lives */
	if (!p || p->id != sn_slot_id(slot))
		p = sn_peer_get(ctx, slot, &err);
	if (!p && err != ENOENT)
		return false; /* no descriptor or memory to look with: nobody can say that it is gone */
	if (!p) {
		/* Gone: do not look for it again. A newcomer that maps us sets the bit first and is
		 * found by the second look, or finds the key revoked. */
		atomic_fetch_and(users, ~bit);
		p = sn_peer_get(ctx, slot, &err);
		if (!p && err == ENOENT)
			return true;
		atomic_fetch_or(users, bit);
		if (!p)
			return false;
	}
	for (; p; p = p->retired)
		if (!p->dead && !wait_all(ctx, p->seg, p->id, qpn, key))
			return false;
	return true;
}

/* Waits until nobody touches QP `qpn` of this context (or, with qpn 0, the region `key`). */
bool sn_wait_claims(struct sn_ctx *ctx, uint32_t qpn, uint32_t key)
{
	atomic_thread_fence(memory_order_seq_cst);
	if (!wait_all(ctx, ctx->seg, ctx->id, qpn, key))
		return false;
	for (uint32_t w = 0; w < SN_SLOTS / 64; w++) {
		uint64_t users = atomic_load(&ctx->seg->users[w]);
		for (; users; users &= users - 1)
			if (!wait_slot(ctx, w * 64 + (uint32_t)__builtin_ctzll(users), qpn, key))
				return false;
	}
	sn_stage_settle(ctx);
	return true;
}
