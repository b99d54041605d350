/* Receives as a sender meets them: one is taken, its buffers are checked, and it is completed. */
#define _GNU_SOURCE
#include "job.h"

/* From a queue of which we are the only taker, as long as we hold R's exec lock. */
static enum verdict take_in_turn(struct job *j, struct sn_rq *rq, uint32_t *item)
{
	uint32_t head = atomic_load_explicit(&rq->head, memory_order_relaxed), posted = SN_RWQE_POSTED;
	if ((int32_t)(rq->tail_seen - head) <= 0) {
		rq->tail_seen = atomic_load_explicit(&rq->tail, memory_order_acquire);
		if (head == rq->tail_seen) { /* say so, then look again: the other way round than who posts */
			atomic_store_explicit(&rq->waiting, 1, memory_order_relaxed);
			atomic_thread_fence(memory_order_seq_cst);
			rq->tail_seen = atomic_load_explicit(&rq->tail, memory_order_acquire);
			if (head == rq->tail_seen)
				return WAIT_RNR;
		}
	}
	*item = head & (rq->size - 1);
	struct sn_rslot *slot = sn_rslot_at(j->t->seg, rq, *item);
	bool ours = atomic_compare_exchange_strong(&slot->state, &posted, SN_RWQE_TAKEN);
	uint32_t next = (head + 1) & (rq->size - 1);
	__builtin_prefetch(sn_rwqe_at(j->t->seg, rq, next));
	sn_prefetch_write(sn_rslot_at(j->t->seg, rq, next));
	/* Who flushes moves it too, and this may move it back: then entries are looked at that are out already. */
	atomic_store_explicit(&rq->head, head + 1, memory_order_release);
	return ours ? DONE : WAIT_PEER; /* it was flushed */
}

enum verdict sn_take_receive(struct job *j, uint32_t *item)
{
	struct sn_seg *seg = j->t->seg;
	struct sn_qp *qp = j->t->qp;
	struct sn_rq *rq = sn_rq_of(seg, qp);
	uint32_t index = qp->qpn & (SN_QPS - 1), limit = 0;

	if (rq->ordered)
		return take_in_turn(j, rq, item);

	if (!sn_lock(j->ctx, &rq->lock))
		return WAIT_PEER;
	if (!can_receive(atomic_load(&qp->state))) {
		sn_unlock(&rq->lock);
		return WAIT_PEER;
	}
	uint32_t head = atomic_load_explicit(&rq->head, memory_order_relaxed);
	if ((int32_t)(rq->tail_seen - head) <= 0) {
		rq->tail_seen = atomic_load_explicit(&rq->tail, memory_order_acquire);
		if (head == rq->tail_seen) { /* say so, then look again: the other way round than who posts */
			if (qp->srq >= 0)
				atomic_fetch_or(&sn_srq_at(seg, qp->srq)->waiters[index / 64], 1ULL << index % 64);
			atomic_store(&rq->waiting, 1);
			atomic_thread_fence(memory_order_seq_cst);
			rq->tail_seen = atomic_load_explicit(&rq->tail, memory_order_acquire);
		}
		if (head == rq->tail_seen) {
			sn_unlock(&rq->lock);
			return WAIT_RNR;
		}
	}
	*item = sn_rq_item(seg, rq, head);
	struct sn_rslot *slot = sn_rslot_at(seg, rq, *item);
	atomic_store_explicit(&slot->qp, index, memory_order_relaxed);
	atomic_store_explicit(&slot->state, SN_RWQE_TAKEN, memory_order_release);
	atomic_store_explicit(&rq->head, head + 1, memory_order_release);
	if (qp->srq >= 0) {
		struct sn_srq *srq = sn_srq_at(seg, qp->srq);
		limit = atomic_load_explicit(&srq->limit, memory_order_relaxed);
		if (limit && atomic_load_explicit(&rq->tail, memory_order_relaxed) - head - 1 < limit)
			atomic_store(&srq->limit, 0); /* armed once */
		else
			limit = 0;
	}
	sn_unlock(&rq->lock);
	if (limit)
		sn_async_raise(j->ctx, j->t, IBV_EVENT_SRQ_LIMIT_REACHED, (uint32_t)qp->srq,
			       atomic_load(&sn_srq_at(seg, qp->srq)->epoch));
	return DONE;
}

int sn_complete_receive(struct job *j, uint32_t item, enum ibv_wc_status status, uint32_t length, uint32_t kind)
{
	struct sn_qp *qp = j->t->qp;
	struct sn_swqe *w = j->w;
	bool write = w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	bool imm = write || w->opcode == IBV_WR_SEND_WITH_IMM, inv = w->opcode == IBV_WR_SEND_WITH_INV;
	struct sn_rwqe *rw = sn_rwqe_at(j->t->seg, sn_rq_of(j->t->seg, qp), item);
	struct sn_cqe e = {
		.wr_id = rw->wr_id,
		.serial = rw->serial,
		.qpn = qp->qpn,
		.epoch = atomic_load_explicit(&qp->epoch, memory_order_relaxed),
		.byte_len = length,
		.imm = imm || inv ? w->imm : 0,
		.src_qp = j->r->qp->qpn,
		.wc_flags = (uint16_t)((imm ? IBV_WC_WITH_IMM : inv ? IBV_WC_WITH_INV : 0) | (qp->type == IBV_QPT_UD ? IBV_WC_GRH : 0)),
		.status = (uint8_t)status,
		.opcode = write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
		.entry = item,
		.srq = qp->srq,
		.srq_epoch = qp->srq >= 0 ? atomic_load(&sn_srq_at(j->t->seg, qp->srq)->epoch) : 0,
		.kind = (uint16_t)(SN_CQE_RECV | kind),
	};
	return sn_cq_push(j->ctx, j->t, qp->recv_cq, &e, w->flags & IBV_SEND_SOLICITED);
}

/* T's buffers for `length` bytes: checked, and described in `far`. */
enum ibv_wc_status sn_scatter(struct job *j, struct sn_rwqe *rw, uint64_t length, struct sn_piece *far, int *num_far)
{
	uint64_t room = 0, left = length;
	bool more = false;
	*num_far = 0;
	if (rw->num_sge > SN_MAX_SGE)
		return IBV_WC_LOC_QP_OP_ERR;
	for (uint32_t i = 0; i < rw->num_sge; i++)
		if (rw->sge[i].length) {
			room += rw->sge[i].length;
			more |= sn_claim_name(j->claim, 1, j->r->qp->sq.last_key = rw->sge[i].lkey);
		}
	if (room < length)
		return IBV_WC_LOC_LEN_ERR;
	if (more)
		sn_claim_publish();
	for (uint32_t i = 0; i < rw->num_sge && left; i++) {
		struct sn_sge s = rw->sge[i];
		struct sn_mr mr;
		if (!s.length)
			continue;
		/* the whole element is checked, not only the part that this message fills */
		if (!sn_mr_covers(j->t->seg, s.lkey, j->t->qp, IBV_ACCESS_LOCAL_WRITE, s.addr, s.length, &mr))
			return IBV_WC_LOC_PROT_ERR;
		uint64_t len = s.length < left ? s.length : left;
		sn_piece_of(&far[(*num_far)++], j->t, &mr, s.addr, len);
		left -= len;
	}
	return IBV_WC_SUCCESS;
}
