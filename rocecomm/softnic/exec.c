/* Carrying out send queues. There is no engine thread: the poster executes its own queue, and
 * where the head has to wait, whoever removes the reason (the peer that posts a receive) goes on
 * in its place. Both run the code below; the exec lock of the queue says whose turn it is. */
#define _GNU_SOURCE
#include "job.h"

struct sn_side sn_own_side(struct sn_priv_qp *qp)
{
	return (struct sn_side){ qp->ctx->seg, qp->qp, NULL };
}

/* The side at the end of QP number `qpn`, if its context is there. */
bool sn_side_of(struct sn_ctx *ctx, uint32_t qpn, struct sn_peer *_Atomic *cached, struct sn_side *side)
{
	uint32_t slot = qpn >> SN_SLOT_BITS, index = qpn & (SN_QPS - 1);
	int err;
	if (slot == 0 || slot >= SN_SLOTS)
		return false;
	if (slot == (ctx->id & (SN_SLOTS - 1))) {
		side->seg = ctx->seg;
		side->peer = NULL;
	} else {
		struct sn_peer *peer = atomic_load_explicit(cached, memory_order_acquire);
		if (!peer) {
			peer = sn_peer_get(ctx, slot, &err);
			if (!peer)
				return false;
			atomic_store_explicit(cached, peer, memory_order_release);
		}
		side->seg = peer->seg;
		side->peer = peer;
	}
	if (index >= atomic_load_explicit(&side->seg->qp_limit, memory_order_relaxed))
		return false;
	side->qp = sn_qp_at(side->seg, index);
	return true;
}

bool sn_peer_side(struct sn_priv_qp *qp, struct sn_side *side)
{
	return sn_side_of(qp->ctx, qp->qp->dest_qpn, &qp->peer, side);
}

bool sn_qp_busy(struct sn_qp *qp)
{
	return atomic_load_explicit(&qp->sq.head, memory_order_relaxed) !=
	       atomic_load_explicit(&qp->sq.tail, memory_order_relaxed);
}

/* To the error state, once: the receive queue is flushed here, the send queue by its next drive. */
void sn_qp_fail(struct sn_ctx *ctx, const struct sn_side *side)
{
	uint32_t state = atomic_load(&side->qp->state);
	while (state != IBV_QPS_ERR && state != IBV_QPS_RESET && state != SN_QP_FREE)
		if (atomic_compare_exchange_weak(&side->qp->state, &state, IBV_QPS_ERR)) {
			sn_rq_flush(ctx, side);
			return;
		}
}

/* ---- the send queue ----------------------------------------------------------------------- */

static enum ibv_wc_opcode wc_opcode(uint32_t opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return IBV_WC_RDMA_WRITE;
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		return IBV_WC_COMP_SWAP;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return IBV_WC_FETCH_ADD;
	default:
		return IBV_WC_SEND;
	}
}

static int complete_send(struct sn_ctx *ctx, const struct sn_side *r, struct sn_swqe *w, enum ibv_wc_status status)
{
	struct sn_cqe e = {
		.wr_id = w->wr_id,
		.qpn = r->qp->qpn,
		.epoch = atomic_load_explicit(&r->qp->epoch, memory_order_relaxed),
		.byte_len = w->length,
		.status = (uint8_t)status,
		.opcode = (uint8_t)wc_opcode(w->opcode),
		.srq = -1,
	};
	if (status == IBV_WC_SUCCESS && !(w->flags & IBV_SEND_SIGNALED) && !r->qp->sq_sig_all)
		return 0;
	return sn_cq_push(ctx, r, r->qp->send_cq, &e, false);
}

static uint64_t rnr_timer_ns(uint8_t code)
{
	/* IB spec 9.7.5.2.8, in units of 10 us */
	static const uint32_t unit[32] = { 65536, 1,  2,  3,  4,   6,   8,   12,  16,  24,  32,	  48,	64,   96,   128,  192,
					   256,	  384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576,
					   32768, 49152 };
	return (uint64_t)unit[code & 31] * 10000;
}

/* The head cannot go on. False: it has waited long enough, or nobody is left to wait for. */
static bool keep_waiting(const struct sn_side *r, const struct sn_side *t, enum verdict v)
{
	struct sn_qp *qp = r->qp;
	enum sn_wait why = v == WAIT_RNR ? SN_WAIT_RNR : SN_WAIT_PEER;
	uint64_t now = sn_now(), deadline = atomic_load(&qp->sq.deadline);

	if (t && t->peer && sn_peer_dead(t->peer, now))
		return false;
	if (atomic_load(&qp->sq.wait) != why) {
		deadline = 0;
		if (why == SN_WAIT_RNR && qp->rnr_retry == 0)
			return false;
		if (why == SN_WAIT_RNR && qp->rnr_retry < 7)
			deadline = now + qp->rnr_retry * rnr_timer_ns(t->qp->min_rnr_timer);
		else if (why == SN_WAIT_PEER && qp->timeout)
			deadline = now + (qp->retry_cnt + 1) * (4096ULL << (qp->timeout & 31));
		atomic_store(&qp->sq.deadline, deadline);
		atomic_store(&qp->sq.wait, why);
	}
	return !deadline || now < deadline;
}

/* Small payloads of what has to wait go beside the entries, so that the peer needs no system call
 * to fetch them. Allowed: the program leaves the buffer alone until the completion. */
static void stage(const struct sn_side *r)
{
	struct sn_qp *qp = r->qp;
	uint32_t tail = atomic_load(&qp->sq.tail);
	for (uint32_t pos = atomic_load(&qp->sq.head); pos != tail; pos++) {
		struct sn_swqe *w = sn_swqe_at(r->seg, &qp->sq, pos);
		char *to = (char *)w + w->data;
		bool ok = !w->staged && w->length && w->length <= SN_SMALL && !is_inbound(w->opcode);
		for (uint32_t i = 0; i < w->num_sge && ok; i++) {
			struct sn_mr mr;
			struct sn_sge s = w->sge[i];
			if (!s.length)
				continue;
			ok = sn_mr_covers(r->seg, s.lkey, qp->pd, 0, s.addr, s.length, &mr);
			if (ok)
				memcpy(to, (char *)(uintptr_t)(mr.host + (s.addr - mr.iova)), s.length);
			to += s.length;
		}
		if (ok)
			w->staged = 1;
	}
}

static bool run(struct sn_ctx *ctx, const struct sn_side *r, const struct sn_side *t, bool *fail_t)
{
	struct sn_qp *qp = r->qp;
	bool moved = false;

	for (;;) {
		uint32_t head = atomic_load_explicit(&qp->sq.head, memory_order_relaxed);
		uint32_t state = atomic_load(&qp->state);
		struct sn_swqe *w = sn_swqe_at(r->seg, &qp->sq, head);
		enum verdict v = DONE;
		struct job j; /* not zeroed as a whole: near[] is large */

		if (head == atomic_load_explicit(&qp->sq.tail, memory_order_acquire))
			return moved;
		j.ctx = ctx;
		j.r = r;
		j.t = t;
		j.w = w;
		j.num_near = 0;
		j.fail_t = false;
		if (state == IBV_QPS_ERR || state == IBV_QPS_SQE) {
			j.status = IBV_WC_WR_FLUSH_ERR;
		} else if (state == IBV_QPS_RTS) {
			j.claim = sn_claim_begin(ctx, r, t);
			v = sn_execute(&j);
			sn_claim_end(j.claim);
			if (v != DONE) {
				if (keep_waiting(r, t, v)) {
					if (!r->peer)
						stage(r);
					return moved;
				}
				j.status = v == WAIT_RNR && !(t->peer && t->peer->dead) ? IBV_WC_RNR_RETRY_EXC_ERR
											 : IBV_WC_RETRY_EXC_ERR;
			}
		} else {
			return moved; /* SQD: later */
		}
		atomic_store_explicit(&qp->sq.wait, SN_WAIT_NOTHING, memory_order_relaxed);
		atomic_store_explicit(&qp->sq.deadline, 0, memory_order_relaxed);
		atomic_store_explicit(&qp->sq.completing, head + 1, memory_order_relaxed);
		int err = complete_send(ctx, r, w, j.status);
		atomic_store_explicit(&qp->sq.head, head + 1, memory_order_release);
		moved = true;
		if (j.fail_t) {
			sn_qp_fail(ctx, t);
			*fail_t = true;
		}
		if (state == IBV_QPS_RTS && (j.status != IBV_WC_SUCCESS || err)) {
			if (qp->type == IBV_QPT_RC || err)
				sn_qp_fail(ctx, r);
			else
				atomic_compare_exchange_strong(&qp->state, &state, IBV_QPS_SQE);
		}
	}
}

/* Would a run get anywhere? Asked after the lock was given up, against work that came meanwhile. */
static bool runnable(const struct sn_side *r, const struct sn_side *t)
{
	uint32_t state = atomic_load(&r->qp->state), wait = atomic_load(&r->qp->sq.wait);
	if (!sn_qp_busy(r->qp))
		return false;
	if (state == IBV_QPS_ERR || state == IBV_QPS_SQE)
		return true;
	if (state != IBV_QPS_RTS)
		return false;
	if (wait == SN_WAIT_RNR && t) {
		struct sn_rq *rq = sn_rq_of(t->seg, t->qp);
		return atomic_load(&rq->head) != atomic_load(&rq->tail);
	}
	return wait == SN_WAIT_NOTHING;
}

static bool lock_exec(struct sn_ctx *ctx, const struct sn_side *r, const struct sn_side *t)
{
	struct sn_lock *l = &r->qp->sq.exec;
	if (sn_try_lock(ctx, l))
		return true;
	/* the peer held it and died */
	const struct sn_side *other = r->peer ? r : t;
	sn_id holder = atomic_load(&l->owner);
	return other && other->peer && holder == other->peer->id && sn_peer_dead(other->peer, sn_now()) &&
	       atomic_compare_exchange_strong(&l->owner, &holder, ctx->id);
}

static bool drive(struct sn_ctx *ctx, const struct sn_side *r, const struct sn_side *t)
{
	bool moved = false, fail_t = false;
	do {
		if (!lock_exec(ctx, r, t))
			break; /* whoever holds it looks again after giving it up */
		moved |= run(ctx, r, t, &fail_t);
		sn_unlock(&r->qp->sq.exec);
		atomic_thread_fence(memory_order_seq_cst);
	} while (runnable(r, t));
	if (fail_t && sn_qp_busy(t->qp))
		drive(ctx, t, r);
	return moved;
}

bool sn_drive(struct sn_priv_qp *qp)
{
	struct sn_side r = sn_own_side(qp), t;
	bool connected = qp->qp->type != IBV_QPT_UD && sn_peer_side(qp, &t);
	return drive(qp->ctx, &r, connected ? &t : NULL);
}

bool sn_drive_peer(struct sn_priv_qp *qp)
{
	struct sn_side own = sn_own_side(qp), peer;
	if (qp->qp->type == IBV_QPT_UD || !sn_peer_side(qp, &peer) || peer.qp->dest_qpn != qp->qp->qpn ||
	    peer.qp->type != qp->qp->type || !sn_qp_busy(peer.qp))
		return false;
	return drive(qp->ctx, &peer, &own);
}
