/* Lazy receives: a small payload waits in the receive entry's slot until its completion is polled,
 * which saves the sender a system call. Whatever could tell the difference puts it in place first:
 * a later write, read or atomic on the same QP, deregistration, RESET. */
#define _GNU_SOURCE
#include <sched.h>

#include "softnic.h"

static enum sn_copy_result place(struct sn_ctx *ctx, const struct sn_side *t, const struct sn_rwqe *w,
				 struct sn_rslot *slot)
{
	struct sn_piece far[SN_MAX_SGE], payload = { .ptr = (char *)slot->small, .len = slot->lazy_len };
	uint64_t left = slot->lazy_len;
	int n = 0;

	for (uint32_t i = 0; i < w->num_sge && i < SN_MAX_SGE && left; i++) {
		struct sn_sge s = w->sge[i];
		struct sn_mr mr;
		uint64_t len = s.length < left ? s.length : left;
		if (!len)
			continue;
		/* The region was checked when the message came; if it is gone since, its owner has
		 * placed this payload itself before it let go. */
		struct sn_mr *e = sn_mr_at(t->seg, s.lkey >> 16);
		mr.iova = e->iova;
		mr.host = e->host;
		mr.pool = e->pool;
		mr.pool_offset = e->pool_offset;
		mr.pool_serial = e->pool_serial;
		sn_piece_of(&far[n++], t, &mr, s.addr, len);
		left -= len;
	}
	return sn_copy(ctx, t, true, &payload, 1, far, n, slot->lazy_len - left);
}

/* `mover` is the lock on the state from LAZY to PLACED; a dead holder loses it. Without `wait`
 * somebody else's placing is not waited for. `claim` is told which regions are touched; the entry may
 * be looked at for that only with the lock held, else its owner may be posting it anew. */
enum sn_placed sn_place_one(struct sn_ctx *ctx, const struct sn_side *t, uint32_t item, struct sn_claim *claim, bool wait)
{
	struct sn_rq *rq = sn_rq_of(t->seg, t->qp);
	struct sn_rwqe *w = sn_rwqe_at(t->seg, rq, item);
	struct sn_rslot *slot = sn_rslot_at(t->seg, rq, item);
	uint64_t start = 0;
	for (uint32_t tries = 0;; tries++) {
		sn_id holder = 0;
		if (atomic_load_explicit(&slot->state, memory_order_acquire) != SN_RWQE_LAZY)
			return SN_PLACED;
		if (atomic_compare_exchange_strong(&slot->mover, &holder, ctx->id)) {
			enum sn_copy_result r = SN_COPY_OK;
			if (atomic_load(&slot->state) == SN_RWQE_LAZY) {
				for (uint32_t i = 0; claim && i < w->num_sge && i < SN_MAX_SGE; i++)
					sn_claim_key(claim, 1, w->sge[i].lkey);
				r = place(ctx, t, w, slot);
				if (r == SN_COPY_OK)
					atomic_store_explicit(&slot->state, SN_RWQE_PLACED, memory_order_release);
			}
			atomic_store_explicit(&slot->mover, 0, memory_order_release);
			return r == SN_COPY_OK ? SN_PLACED : SN_NOT_PLACED;
		}
		if (tries < 64) {
			sn_pause();
			continue;
		}
		if (holder != ctx->id && tries % 64 == 0 && !sn_alive(holder)) {
			atomic_compare_exchange_strong(&slot->mover, &holder, 0);
			continue;
		}
		if (!wait)
			return SN_PLACED_LATER;
		sched_yield();
		uint64_t now = sn_now();
		if (!start)
			start = now;
		else if (now - start > SN_LOCK_WAIT_NS)
			return SN_PLACED_LATER;
	}
}

/* `claim` is told which regions are touched, for their owner to wait for. */
bool sn_place_lazy(struct sn_ctx *ctx, const struct sn_side *t, struct sn_claim *claim)
{
	uint32_t made = atomic_load_explicit(&t->qp->lazy_made, memory_order_acquire);
	uint32_t polled = atomic_load_explicit(&t->qp->lazy_polled, memory_order_acquire);
	bool ok = true;
	for (; polled != made; polled++)
		ok &= sn_place_one(ctx, t, t->qp->lazy[polled % SN_LAZY], claim, true) == SN_PLACED;
	return ok;
}

/* All of this context, with ctx->lock held. */
bool sn_place_all(struct sn_ctx *ctx)
{
	bool ok = true;
	for (uint32_t i = 0; i < atomic_load(&ctx->seg->qp_limit); i++)
		if (ctx->qps[i]) {
			struct sn_side t = sn_own_side(ctx->qps[i]);
			ok &= sn_place_lazy(ctx, &t, NULL);
		}
	return ok;
}
