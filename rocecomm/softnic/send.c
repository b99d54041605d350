/* Posting: the work request is written into the shared send queue, then carried out at once if it
 * can be. */
#define _GNU_SOURCE
#include <sched.h>

#include "softnic.h"

bool sn_sq_takes(uint32_t type, uint32_t opcode)
{
	switch (opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
		return true;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_BIND_MW:
	case IBV_WR_LOCAL_INV:
		return type != IBV_QPT_UD;
	case IBV_WR_RDMA_READ:
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
	case IBV_WR_ATOMIC_WRITE:
		return type == IBV_QPT_RC;
	default:
		return false;
	}
}

bool sn_sq_inlines(uint32_t opcode) /* may the entry carry its payload? */
{
	return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_SEND_WITH_INV ||
	       opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM || opcode == IBV_WR_ATOMIC_WRITE;
}

static int fill(struct sn_priv_qp *priv, uint32_t pos, const struct ibv_send_wr *wr)
{
	struct sn_qp *qp = priv->qp;
	struct sn_swqe *w = sn_swqe_at(priv->ctx->seg, &qp->sq, pos);
	uint64_t length = 0;

	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->sq.max_sge || !sn_sq_takes(qp->type, wr->opcode))
		return EINVAL;
	for (int i = 0; i < wr->num_sge; i++) {
		w->sge[i] = (struct sn_sge){ wr->sg_list[i].addr, wr->sg_list[i].length, wr->sg_list[i].lkey };
		length += wr->sg_list[i].length;
	}
	w->wr_id = wr->wr_id;
	w->opcode = wr->opcode;
	w->flags = wr->send_flags;
	w->imm = wr->imm_data;
	w->num_sge = (uint32_t)wr->num_sge;
	/* atomic: take_back() looks at the head of a queue that it does not hold */
	__atomic_store_n(&w->length, length > UINT32_MAX ? UINT32_MAX : (uint32_t)length, __ATOMIC_RELAXED);
	w->staged = 0;
	switch (wr->opcode) {
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		w->remote_addr = wr->wr.atomic.remote_addr;
		w->rkey = wr->wr.atomic.rkey;
		w->compare_add = wr->wr.atomic.compare_add;
		w->swap = wr->wr.atomic.swap;
		break;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_RDMA_READ:
	case IBV_WR_ATOMIC_WRITE:
		w->remote_addr = wr->wr.rdma.remote_addr;
		w->rkey = wr->wr.rdma.rkey;
		break;
	case IBV_WR_BIND_MW:
		if (!wr->bind_mw.mw || wr->num_sge)
			return EINVAL;
		sn_mw_describe(w, wr->bind_mw.mw, wr->bind_mw.rkey, &wr->bind_mw.bind_info);
		break;
	default:
		if (qp->type == IBV_QPT_UD) {
			if (!wr->wr.ud.ah)
				return EINVAL;
			sn_ah_address(qp, w, wr->wr.ud.ah, wr->wr.ud.remote_qpn, wr->wr.ud.remote_qkey);
		}
	}
	if (wr->send_flags & IBV_SEND_INLINE) {
		if (!sn_sq_inlines(wr->opcode) || length > qp->sq.max_inline)
			return EINVAL;
		char *to = (char *)w + w->data;
		for (int i = 0; i < wr->num_sge; i++) {
			memcpy(to, (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
			to += wr->sg_list[i].length;
		}
		w->staged = 1;
	}
	return 0;
}

#define ROOM_WAIT_NS (SN_LOCK_WAIT_NS / 4)

/* Room in the queue, in entries: a signaled entry keeps its place until its completion is polled, so a completion queue
 * made to measure does not overrun. The program may have polled the completion of an entry that its
 * executor, in another process, is just about to take out: then there is room in a moment, or when that
 * process has its CPU back. */
uint32_t sn_sq_room(struct sn_priv_qp *priv, uint32_t tail)
{
	struct sn_sq *sq = &priv->qp->sq;
	uint64_t start = 0;
	for (uint32_t tries = 0;; tries++) {
		/* in this order: what changes in between makes the queue look fuller, never emptier */
		uint32_t reaped = atomic_load_explicit(&priv->reaped, memory_order_acquire);
		uint32_t head = atomic_load_explicit(&sq->head, memory_order_acquire);
		uint32_t unpolled = atomic_load_explicit(&sq->reported, memory_order_acquire) - reaped;
		uint32_t used = tail - head + unpolled;
		if (used < priv->init.cap.max_send_wr)
			return priv->init.cap.max_send_wr - used;
		if (atomic_load_explicit(&sq->head, memory_order_acquire) != head ||
		    atomic_load_explicit(&priv->reaped, memory_order_acquire) != reaped)
			continue; /* then look again */
		if (atomic_load_explicit(&sq->completing, memory_order_relaxed) != head + 1 ||
		    !priv->init.cap.max_send_wr)
			return 0;
		sched_yield();
		if (tries % 64 != 63)
			continue;
		uint64_t now = sn_now();
		if (!start)
			start = now;
		else if (now - start > ROOM_WAIT_NS)
			return 0;
	}
}

/* With the post lock held: may anything be posted in this state? */
int sn_sq_ready(struct sn_priv_qp *priv)
{
	uint32_t state = atomic_load_explicit(&priv->qp->state, memory_order_relaxed);
	return state == IBV_QPS_RESET || state == IBV_QPS_INIT || state == IBV_QPS_RTR ? EINVAL : 0;
}

/* Entries before `tail` are written: they become visible, the post lock is free, and they run. */
void sn_sq_publish(struct sn_priv_qp *priv, uint32_t tail)
{
	struct sn_qp *qp = priv->qp;
	bool more = tail != atomic_load_explicit(&qp->sq.tail, memory_order_relaxed);
	if (more)
		atomic_store_explicit(&qp->sq.tail, tail, memory_order_release);
	sn_unspin(&priv->post_lock);
	if (!more)
		return;
	sn_drive(priv);
	if (sn_qp_busy(qp)) {
		struct sn_priv_cq *cq = sn_container(priv->ibv.send_cq, struct sn_priv_cq, ibv);
		atomic_store_explicit(&cq->pending, 1, memory_order_relaxed);
		atomic_thread_fence(memory_order_seq_cst);
		sn_channel_watch(priv);
	}
}

int sn_post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct sn_priv_qp *priv = sn_container(ibv, struct sn_priv_qp, ibv);
	int err;

	if (sn_foreign(priv->ctx)) {
		*bad = wr;
		return EPERM;
	}
	sn_spin(&priv->post_lock);
	err = sn_sq_ready(priv);
	uint32_t tail = atomic_load_explicit(&priv->qp->sq.tail, memory_order_relaxed);
	for (uint32_t room = 0; !err && wr; wr = wr->next, tail++, room--) {
		if (!room)
			room = sn_sq_room(priv, tail);
		err = room ? fill(priv, tail, wr) : ENOMEM;
		if (err)
			break;
	}
	if (err)
		*bad = wr;
	sn_sq_publish(priv, tail);
	return err;
}
