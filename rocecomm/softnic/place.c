/* Lazy receives: a small payload waits in the receive entry's slot until its completion is polled,
 * which saves the sender a system call. Whatever could tell the difference puts it in place first:
 * a later write, read or atomic on the same QP, deregistration, RESET. */
#define _GNU_SOURCE
#include <sched.h>

#include "softnic.h"

static enum sn_copy_result place(const struct sn_side *t, struct sn_rwqe *w)
{
	struct sn_piece far[SN_MAX_SGE], slot = { .ptr = (char *)w->small, .len = w->lazy_len };
	uint64_t left = w->lazy_len;
	int n = 0;

	for (uint32_t i = 0; i < w->num_sge && left; i++) {
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
		sn_piece_of(&far[n++], t, &mr, s.addr, len);
		left -= len;
	}
	return sn_copy(t->seg->pid, true, &slot, 1, far, n, w->lazy_len - left);
}

/* True when the payload lies in its place on return. */
bool sn_place_one(struct sn_ctx *ctx, const struct sn_side *t, struct sn_rwqe *w)
{
	uint64_t start = 0;
	for (uint32_t tries = 0;; tries++) {
		uint32_t state = SN_RWQE_LAZY;
		if (atomic_compare_exchange_strong(&w->state, &state, SN_RWQE_MOVING)) {
			atomic_store(&w->mover, ctx->id);
			enum sn_copy_result r = place(t, w);
			atomic_store(&w->mover, 0);
			atomic_store_explicit(&w->state, SN_RWQE_PLACED, memory_order_release);
			return r == SN_COPY_OK;
		}
		if (state != SN_RWQE_MOVING)
			return true;
		if (tries < 64) {
			sn_pause();
			continue;
		}
		sched_yield();
		if (tries % 64 == 63) {
			sn_id mover = atomic_load(&w->mover);
			uint64_t now = sn_now();
			if (!start)
				start = now;
			if (mover && mover != ctx->id && !sn_alive(mover)) {
				state = SN_RWQE_MOVING;
				atomic_compare_exchange_strong(&w->state, &state, SN_RWQE_LAZY);
			} else if (now - start > SN_LOCK_WAIT_NS) {
				return false;
			}
		}
	}
}

bool sn_place_lazy(struct sn_ctx *ctx, const struct sn_side *t)
{
	uint32_t made = atomic_load_explicit(&t->qp->lazy_made, memory_order_acquire);
	uint32_t polled = atomic_load_explicit(&t->qp->lazy_polled, memory_order_acquire);
	struct sn_rq *rq = sn_rq_of(t->seg, t->qp);
	bool ok = true;
	for (; polled != made; polled++)
		ok &= sn_place_one(ctx, t, sn_rwqe_at(t->seg, rq, t->qp->lazy[polled % SN_LAZY]));
	return ok;
}

/* All of this context, with ctx->lock held. */
bool sn_place_all(struct sn_ctx *ctx)
{
	bool ok = true;
	for (uint32_t i = 0; i < atomic_load(&ctx->seg->qp_limit); i++)
		if (ctx->qps[i]) {
			struct sn_side t = sn_own_side(ctx->qps[i]);
			ok &= sn_place_lazy(ctx, &t);
		}
	return ok;
}
