/* Polling: from the ring of a completion queue to the program. What an empty poll reads, producers do not
 * write. */
#define _GNU_SOURCE
#include <sched.h>

#include "softnic.h"

/* Empty polls before the CPU is offered to others, about 5 ns each. Who then waited found that others
 * want it, most likely our peer, and offers it sooner; who came back at once need not have asked. */
#define MIN_PATIENCE 50u
#define MAX_PATIENCE 4096u
#define WAITED_NS 1000u
#define KICK_EVERY 8u

static struct sn_cqe *glanced_ring(struct sn_ctx *ctx, uint64_t glance)
{
	return sn_at(ctx->seg, glance >> 8 & ((1u << 30) - 1));
}

static uint32_t glanced_mask(uint64_t glance)
{
	return (1u << (glance & 63)) - 1;
}

#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread"))) /* what was read is not used if the ring had gone */
#endif
static bool looks_empty(struct sn_ctx *ctx, struct sn_priv_cq *cq)
{
	uint64_t glance = atomic_load_explicit(&cq->glance, memory_order_acquire);
	uint32_t head = atomic_load_explicit(&cq->cq->head, memory_order_relaxed);
	struct sn_cqe *e = glanced_ring(ctx, glance) + (head & glanced_mask(glance));
	if (atomic_load_explicit(&e->seq, memory_order_acquire) == head + 1)
		return false;
	return atomic_load_explicit(&cq->glance, memory_order_relaxed) == glance;
}

/* The receive entry of a completion goes back to the program. False: it was given back before, the
 * completion is a duplicate (its producer died or was stopped between two steps). */
bool sn_cq_give_back(struct sn_ctx *ctx, const struct sn_cqe *e, struct sn_priv_qp *qp)
{
	struct sn_priv_srq *srq = e->srq < 0 ? NULL : ctx->srqs[e->srq];
	struct sn_rq *rq = srq ? &srq->srq->rq : qp ? &qp->qp->rq : NULL;
	if (srq ? atomic_load(&srq->srq->epoch) != e->srq_epoch : e->srq >= 0 || !qp)
		return true; /* the queue is gone or was emptied */
	if (e->entry == SN_NO_ENTRY) {
		atomic_fetch_sub(&qp->without_entry, 1);
		return true;
	}
	struct sn_rwqe *w = sn_rwqe_at(ctx->seg, rq, e->entry);
	if (w->serial != e->serial)
		return false;
	if (srq) {
		if (!sn_srq_give(srq, e->entry, e->serial))
			return false;
		sn_free_list_put(&srq->free, e->entry);
		return true;
	}
	struct sn_rslot *slot = sn_rslot_at(ctx->seg, rq, e->entry);
	uint32_t state = atomic_load_explicit(&slot->state, memory_order_relaxed);
	if (state == SN_RWQE_FREE)
		return false;
	if (rq->ordered) { /* of one QP, so nobody else gives it back: the poll lock is held */
		uint32_t count = atomic_load_explicit(&qp->given_back, memory_order_relaxed);
		atomic_store_explicit(&slot->state, SN_RWQE_FREE, memory_order_release);
		atomic_store_explicit(&qp->given_back, count + 1, memory_order_release);
		return true;
	}
	if (!atomic_compare_exchange_strong(&slot->state, &state, SN_RWQE_FREE))
		return false;
	sn_free_list_put(&qp->free, e->entry);
	return true;
}

enum fate { REPORT, SKIP, LATER };

/* The payload of a lazy receive must be in place before the program hears of it. */
static enum fate place_now(struct sn_ctx *ctx, struct sn_priv_cq *cq, struct sn_qp *qp, const struct sn_cqe *e,
			   struct ibv_wc *wc, bool *kept)
{
	struct sn_side t = { ctx->seg, qp, NULL };
	enum sn_placed placed = sn_place_one(ctx, &t, e->entry, NULL, false);
	if (placed == SN_PLACED_LATER) {
		/* Its sender is placing it. If it is stopped there, the program hears of it in the end;
		 * the sender's claim holds the memory as long as it may still write. */
		uint64_t now = sn_now();
		if (!cq->late_since)
			cq->late_since = now;
		if (now - cq->late_since < SN_LOCK_WAIT_NS)
			return LATER;
		*kept = true;
	}
	cq->late_since = 0;
	if (placed != SN_PLACED)
		wc->status = IBV_WC_LOC_PROT_ERR;
	uint32_t polled = atomic_load_explicit(&qp->lazy_polled, memory_order_relaxed);
	atomic_store_explicit(&qp->lazy_polled, polled + 1, memory_order_release);
	return REPORT;
}

static enum fate consume(struct sn_ctx *ctx, struct sn_priv_cq *cq, const struct sn_cqe *e, struct ibv_wc *wc)
{
	struct sn_qp *qp = sn_qp_at(ctx->seg, e->qpn & (SN_QPS - 1));
	struct sn_priv_qp *priv = ctx->qps[e->qpn & (SN_QPS - 1)];
	/* else: of a QP that was reset or destroyed since */
	bool valid = priv && atomic_load_explicit(&qp->epoch, memory_order_relaxed) == e->epoch;

	wc->status = e->status;
	if (valid && e->kind & SN_CQE_RECV && e->entry != SN_NO_ENTRY) {
		struct sn_rq *rq = sn_rq_of(ctx->seg, qp);
		struct sn_rwqe *w = sn_rwqe_at(ctx->seg, rq, e->entry);
		if (e->kind & SN_CQE_LAZY) {
			sn_prefetch_write(sn_rslot_at(ctx->seg, rq, e->entry));
			sn_prefetch_write(w); /* it is posted anew soon */
		} else if (w->num_sge) { /* the program looks at it next; its sender had it last */
			__builtin_prefetch((void *)(uintptr_t)w->sge[0].addr);
		}
	}
	if (e->status != IBV_WC_SUCCESS) {
		sn_stage_settle(ctx); /* the program may use the memory again */
		if (valid && atomic_load(&qp->state) == IBV_QPS_ERR && !atomic_exchange(&priv->mourned, true)) {
			atomic_store(&priv->mourning, true);
			atomic_store(&sn_container(priv->init.send_cq, struct sn_priv_cq, ibv)->pending, 1);
		}
	}
	if (e->kind & SN_CQE_RECV) {
		bool kept = false; /* a stopped sender still has its hands on the entry */
		if (valid && e->kind & SN_CQE_LAZY && place_now(ctx, cq, qp, e, wc, &kept) == LATER)
			return LATER;
		if (kept)
			atomic_fetch_or(&sn_rslot_at(ctx->seg, sn_rq_of(ctx->seg, qp), e->entry)->qp, SN_RWQE_REPORTED);
		else if (!sn_cq_give_back(ctx, e, valid ? priv : NULL))
			return SKIP;
	} else if (valid) {
		uint32_t reaped = atomic_load_explicit(&priv->reaped, memory_order_relaxed);
		atomic_store_explicit(&priv->reaped, reaped + 1, memory_order_release);
		if ((int32_t)(e->entry - qp->sq.polled) < 0)
			return SKIP;
		qp->sq.polled = e->entry + 1;
	}
	if (!valid)
		return SKIP;
	if (sn_faulty() && e->kind & SN_CQE_RECV && wc->status == IBV_WC_SUCCESS)
		wc->status = sn_fault_receive(priv);
	cq->stamp = e->stamp;
	wc->wr_id = e->wr_id;
	wc->opcode = e->opcode;
	wc->vendor_err = e->vendor_err;
	wc->byte_len = e->byte_len;
	wc->imm_data = e->imm;
	wc->qp_num = e->qpn;
	wc->src_qp = e->src_qp;
	wc->wc_flags = e->wc_flags;
	wc->pkey_index = 0;
	wc->slid = 0;
	wc->sl = 0;
	wc->dlid_path_bits = 0;
	return REPORT;
}

/* With the poll lock held: up to n completions. */
int sn_cq_take(struct sn_ctx *ctx, struct sn_priv_cq *cq, int n, struct ibv_wc *wc)
{
	struct sn_cq *c = cq->cq;
	uint32_t head = atomic_load_explicit(&c->head, memory_order_relaxed), from = head;
	uint64_t glance = atomic_load_explicit(&cq->glance, memory_order_relaxed); /* c->ring's line is the producers' */
	struct sn_cqe *ring = glanced_ring(ctx, glance);
	uint32_t mask = glanced_mask(glance);
	int got = 0;
	while (got < n) {
		struct sn_cqe *e = &ring[head & mask];
		if (atomic_load_explicit(&e->seq, memory_order_acquire) != head + 1)
			break;
		if (e->status == IBV_WC_RETRY_EXC_ERR) {
			/* A peer that left is told at once, a NIC takes its time. Programs rely on that:
			 * what completed before comes alone, so that it may be all they waited for. */
			atomic_store(&cq->held_back, got > 0);
			if (got)
				break;
		}
		enum fate fate = consume(ctx, cq, e, &wc[got]);
		if (fate == LATER)
			break;
		got += fate == REPORT;
		head++;
	}
	if (head != from)
		atomic_store_explicit(&c->head, head, memory_order_release);
	return got;
}

static void offer_cpu(struct sn_priv_cq *cq)
{
	uint32_t patience = atomic_load_explicit(&cq->patience, memory_order_relaxed);
	uint64_t start = sn_now();
	sched_yield();
	if (sn_now() - start > WAITED_NS)
		patience = patience / 2 > MIN_PATIENCE ? patience / 2 : MIN_PATIENCE;
	else if (patience < MAX_PATIENCE)
		patience *= 2;
	atomic_store_explicit(&cq->patience, patience, memory_order_relaxed);
}

/* After an empty poll, without the poll lock. True: something moved, look again. */
bool sn_cq_was_empty(struct sn_priv_cq *cq)
{
	struct sn_ctx *ctx = sn_ctx_of(cq->ibv.context);
	uint32_t empty = atomic_load_explicit(&cq->empty_polls, memory_order_relaxed) + 1;
	atomic_store_explicit(&cq->empty_polls, empty, memory_order_relaxed);
	if (atomic_load_explicit(&cq->pending, memory_order_relaxed) && empty % KICK_EVERY == 1 && sn_cq_kick(cq))
		return true;
	if (sn_faulty() && empty % KICK_EVERY == 1 && sn_fault_kick(ctx))
		return true;
	if (atomic_load_explicit(&ctx->seg->calls, memory_order_relaxed) && sn_help_peers(ctx)) {
		atomic_store_explicit(&cq->empty_polls, 0, memory_order_relaxed);
		return true;
	}
	if (empty >= atomic_load_explicit(&cq->patience, memory_order_relaxed)) {
		sn_stage_look(ctx);
		offer_cpu(cq);
	}
	return false;
}

int sn_poll_cq(struct ibv_cq *ibv, int n, struct ibv_wc *wc)
{
	struct sn_priv_cq *cq = sn_container(ibv, struct sn_priv_cq, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);

	if (sn_foreign(ctx))
		return -EPERM;
	for (int again = 0; again < 2; again++) {
		int got = 0;
		if (!looks_empty(ctx, cq)) {
			sn_spin(&cq->poll_lock);
			got = sn_cq_take(ctx, cq, n, wc);
			sn_unspin(&cq->poll_lock);
		}
		if (got) {
			atomic_store_explicit(&cq->empty_polls, 0, memory_order_relaxed);
			return got;
		}
		if (atomic_load_explicit(&cq->cq->overrun, memory_order_relaxed)) {
			errno = EOVERFLOW; /* completions were lost: the queue is dead, as on a NIC */
			return -EOVERFLOW;
		}
		if (again || !sn_cq_was_empty(cq))
			break;
	}
	return 0;
}
