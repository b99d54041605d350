/* What becomes of one work request: the requester's checks, then the responder's as a pipeline with
 * one exit per rule, then the bytes and the completion of the receive. */
#define _GNU_SOURCE
#include "job.h"

/* ---- the requester's own checks ---------------------------------------------------------- */

/* Which regions the request is going to touch, as far as R can tell: known up front they cost one
 * fence together. A send most likely goes where the last one went. */
bool sn_name_keys(struct job *j)
{
	struct sn_swqe *w = j->w;
	bool more = false;
	if (!(w->flags & IBV_SEND_INLINE))
		for (uint32_t i = 0; i < w->num_sge && i < SN_MAX_SGE; i++)
			if (w->sge[i].length)
				more |= sn_claim_name(j->claim, 0, w->sge[i].lkey);
	if (is_send(w->opcode)) {
		if (j->r->qp->sq.last_key)
			more |= sn_claim_name(j->claim, 1, j->r->qp->sq.last_key);
	} else if (w->length) {
		more |= sn_claim_name(j->claim, 1, w->rkey);
	}
	return more;
}

static enum ibv_wc_status gather(struct job *j)
{
	struct sn_swqe *w = j->w;
	struct sn_qp *qp = j->r->qp;
	uint32_t need = is_inbound(w->opcode) ? IBV_ACCESS_LOCAL_WRITE : 0;

	if (w->num_sge > SN_MAX_SGE)
		return IBV_WC_LOC_QP_OP_ERR;
	if (qp->type == IBV_QPT_UD && w->length > sn_mtu_bytes())
		return IBV_WC_LOC_LEN_ERR; /* a datagram is one packet */
	if (w->length > sn_max_message() || ((is_atomic(w->opcode) || w->opcode == IBV_WR_ATOMIC_WRITE) && w->length != 8))
		return IBV_WC_LOC_LEN_ERR;
	if (is_inbound(w->opcode) && !qp->max_rd_atomic)
		return IBV_WC_LOC_QP_OP_ERR;
	if (!(w->flags & IBV_SEND_INLINE)) {
		for (uint32_t i = 0; i < w->num_sge; i++) {
			struct sn_sge s = w->sge[i];
			struct sn_mr mr;
			if (!s.length)
				continue;
			if (!sn_mr_covers(j->r->seg, s.lkey, qp, need, s.addr, s.length, &mr))
				return IBV_WC_LOC_PROT_ERR;
			if (!w->staged)
				sn_piece_of(&j->near[j->num_near++], j->r, &mr, s.addr, s.length);
		}
	}
	if (w->staged) {
		char *data = (char *)w + w->data;
		j->near[0] = (struct sn_piece){ .ptr = data, .addr = (uintptr_t)data, .len = w->length };
		j->num_near = w->length ? 1 : 0;
	}
	return IBV_WC_SUCCESS;
}

/* A peer that is gone is told from an address that is bad. */
static enum ibv_wc_status outcome(struct job *j, enum sn_copy_result r)
{
	if (r == SN_COPY_OK)
		return IBV_WC_SUCCESS;
	bool gone = r == SN_COPY_DEAD || (j->t->peer && !sn_staged(j->t) && !sn_may_read(j->t->seg));
	return gone ? IBV_WC_RETRY_EXC_ERR : IBV_WC_REM_OP_ERR;
}

static enum ibv_wc_status transfer(struct job *j, bool to_t, struct sn_piece *far, int num_far, uint64_t length)
{
	enum sn_copy_result r;
	if (!length)
		return IBV_WC_SUCCESS;
	bool at_r = !j->r->peer; /* this is R's process: R's memory is near */
	const struct sn_side *other = at_r ? j->t : j->r;
	struct sn_piece *near = at_r ? j->near : far;
	int num_near = at_r ? j->num_near : num_far;
	if (!at_r) {
		far = j->near;
		num_far = j->num_near;
	}
	if (length >= SN_BIG && other->peer && !other->peer->staged && j->r->qp->type == IBV_QPT_RC)
		r = sn_copy_together(j, other, to_t == at_r, near, num_near, far, num_far, length);
	else
		r = sn_copy(j->ctx, other, to_t == at_r, near, num_near, far, num_far, length);
	return outcome(j, r);
}

/* ---- the responder, one step after the other ---------------------------------------------- */

static enum verdict refuse(struct job *j, enum ibv_wc_status status, enum ibv_event_type event)
{
	j->status = status;
	if (j->t->qp->type == IBV_QPT_UC) {
		j->status = IBV_WC_SUCCESS; /* dropped without a word */
		return DONE;
	}
	j->fail_t = true;
	if (event != IBV_EVENT_COMM_EST)
		sn_async_raise(j->ctx, j->t, event, j->t->qp->qpn & (SN_QPS - 1), atomic_load(&j->t->qp->epoch));
	return DONE;
}

/* Is T there, and connected to R? */
enum verdict sn_check_peer(struct job *j)
{
	struct sn_qp *r = j->r->qp, *t;
	uint32_t epoch, state;

	j->status = IBV_WC_RETRY_EXC_ERR;
	if (!j->t)
		return WAIT_PEER;
	uint64_t now = j->fresh ? sn_now_coarse() : 0; /* requests under one claim follow at once */
	if (j->r->peer && (j->fresh ? sn_peer_dead(j->r->peer, now) : j->r->peer->dead))
		return WAIT_PEER; /* its process is gone, and its pid may be somebody else's by now */
	t = j->t->qp;
	state = atomic_load(&t->state);
	epoch = atomic_load(&t->epoch);
	/* A copy into mapped memory or a slot would succeed with nobody there to see it. */
	if (j->t->peer && (j->fresh ? sn_peer_dead(j->t->peer, now) : j->t->peer->dead))
		return DONE;
	if (r->sq.peer_epoch && r->sq.peer_epoch != epoch + 1)
		return DONE; /* it was reset or destroyed since we met */
	if (t->dest_qpn != r->qpn || r->dest_qpn != t->qpn || t->type != r->type)
		return WAIT_PEER;
	if (state == IBV_QPS_ERR)
		return DONE;
	if (!can_receive(state))
		return WAIT_PEER;
	if ((sn_staged(j->t) || sn_staged(j->r)) && j->w->length &&
	    (sn_stage_missing(j->ctx, j->t) || sn_stage_missing(j->ctx, j->r)))
		return WAIT_PEER;
	if (state == IBV_QPS_RTR && !atomic_load_explicit(&t->comm_est, memory_order_relaxed) &&
	    !atomic_exchange(&t->comm_est, 1))
		sn_async_raise(j->ctx, j->t, IBV_EVENT_COMM_EST, t->qpn & (SN_QPS - 1), epoch);
	r->sq.peer_epoch = epoch + 1;
	j->status = IBV_WC_SUCCESS;
	return DONE;
}

static bool reachable(const struct sn_piece *p, int n)
{
	for (int i = 0; i < n; i++)
		if (!p[i].ptr)
			return false;
	return true;
}

/* May the payload wait in the entry's slot until T polls? */
static bool put_lazily(struct job *j, uint32_t item)
{
	struct sn_qp *qp = j->t->qp;
	struct sn_rslot *slot = sn_rslot_at(j->t->seg, sn_rq_of(j->t->seg, qp), item);
	uint32_t made = atomic_load_explicit(&qp->lazy_made, memory_order_relaxed);
	uint64_t at = 0;
	if (j->w->length > SN_SMALL || j->r->peer)
		return false;
	if (made - qp->lazy_seen >= SN_LAZY)
		qp->lazy_seen = atomic_load_explicit(&qp->lazy_polled, memory_order_acquire);
	if (made - qp->lazy_seen >= SN_LAZY)
		return false;
	for (int i = 0; i < j->num_near; i++) {
		memcpy(slot->small + at, j->near[i].ptr, j->near[i].len);
		at += j->near[i].len;
	}
	slot->lazy_len = j->w->length;
	qp->lazy[made % SN_LAZY] = item;
	atomic_store_explicit(&slot->state, SN_RWQE_LAZY, memory_order_release);
	atomic_store_explicit(&qp->lazy_made, made + 1, memory_order_release);
	return true;
}

/* What came earlier on this QP is in memory before what comes now. */
void sn_place_before(struct job *j)
{
	struct sn_qp *qp = j->t->qp;
	if (atomic_load_explicit(&qp->lazy_made, memory_order_acquire) !=
	    atomic_load_explicit(&qp->lazy_polled, memory_order_acquire))
		sn_place_lazy(j->ctx, j->t, j->claim);
}

/* The receive that the next send will find, and the memory behind it, which most likely lies beside this
 * one's: between CPUs that share no cache each of these lines costs more than all else that a send does.
 * Others may take the entry meanwhile; then this was for nothing. */
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread")))
#endif
static void prefetch_next(struct job *j, uint32_t item, const struct sn_piece *to)
{
	struct sn_seg *seg = j->t->seg;
	struct sn_rq *rq = sn_rq_of(seg, j->t->qp);
	const struct sn_rwqe *rw = sn_rwqe_at(seg, rq, item), *next;
	uint32_t head = atomic_load_explicit(&rq->head, memory_order_relaxed);
	if ((int32_t)(rq->tail_seen - head) <= 0)
		return;
	item = sn_rq_item(seg, rq, head);
	if (item >= rq->size)
		return;
	sn_prefetch_write(sn_rslot_at(seg, rq, item));
	next = sn_rwqe_at(seg, rq, item);
	if (next->num_sge && next->sge[0].lkey == rw->sge[0].lkey)
		sn_prefetch_write((void *)((uintptr_t)to->ptr + (next->sge[0].addr - rw->sge[0].addr)));
}

static enum verdict do_send(struct job *j)
{
	struct sn_piece far[SN_MAX_SGE];
	enum ibv_wc_status at_t;
	uint32_t item, kind = 0;
	int num_far;
	enum verdict v = sn_take_receive(j, &item);

	if (v != DONE)
		return v;
	j->item = item;
	struct sn_rwqe *rw = sn_rwqe_at(j->t->seg, sn_rq_of(j->t->seg, j->t->qp), item);
	at_t = sn_scatter(j, rw, j->w->length, far, &num_far);
	if (at_t != IBV_WC_SUCCESS) {
		sn_complete_receive(j, item, at_t, 0, 0);
		return refuse(j, at_t == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR,
			      IBV_EVENT_COMM_EST);
	}
	if (!reachable(far, num_far) && put_lazily(j, item)) {
		kind = SN_CQE_LAZY;
	} else {
		sn_place_before(j);
		j->status = transfer(j, true, far, num_far, j->w->length);
		if (j->status != IBV_WC_SUCCESS) {
			sn_complete_receive(j, item, IBV_WC_LOC_PROT_ERR, 0, 0);
			return refuse(j, j->status, IBV_EVENT_COMM_EST);
		}
	}
	if (j->w->opcode == IBV_WR_SEND_WITH_INV && !sn_mw_invalidate_remote(j->t, j->w->imm)) {
		sn_complete_receive(j, item, IBV_WC_REM_INV_REQ_ERR, 0, 0);
		return refuse(j, IBV_WC_REM_OP_ERR, IBV_EVENT_QP_ACCESS_ERR);
	}
	if (sn_complete_receive(j, item, IBV_WC_SUCCESS, j->w->length, kind))
		return refuse(j, IBV_WC_REM_OP_ERR, IBV_EVENT_QP_FATAL);
	if (!kind && num_far == 1 && far[0].ptr && j->t->qp->srq >= 0)
		prefetch_next(j, item, far);
	return DONE;
}

static enum verdict check_remote(struct job *j, uint32_t right, struct sn_piece *far)
{
	struct sn_swqe *w = j->w;
	struct sn_mr mr;

	if (!(atomic_load_explicit(&j->t->qp->access, memory_order_relaxed) & right))
		return refuse(j, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
	if (right != IBV_ACCESS_REMOTE_WRITE && !j->t->qp->max_dest_rd_atomic)
		return refuse(j, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
	if (!w->length)
		return DONE; /* nothing is touched, so no key is looked at */
	if (!sn_mr_claim(j->claim, j->t, w->rkey, right, w->remote_addr, w->length, &mr))
		return refuse(j, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
	sn_piece_of(far, j->t, &mr, w->remote_addr, w->length);
	return DONE;
}

static enum verdict do_write(struct job *j, bool imm)
{
	struct sn_piece far = { 0 };
	uint32_t item;
	enum verdict v;

	check_remote(j, IBV_ACCESS_REMOTE_WRITE, &far);
	if (j->status != IBV_WC_SUCCESS || (j->t->qp->type == IBV_QPT_UC && j->w->length && !far.len))
		return DONE;
	if (imm && (v = sn_take_receive(j, &item)) != DONE)
		return v;
	sn_place_before(j);
	j->status = transfer(j, true, &far, 1, j->w->length);
	if (imm) {
		int err = sn_complete_receive(j, item, j->status ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS, j->w->length, 0);
		if (!j->status && err)
			return refuse(j, IBV_WC_REM_OP_ERR, IBV_EVENT_QP_FATAL);
	}
	return j->status ? refuse(j, j->status, IBV_EVENT_QP_ACCESS_ERR) : DONE;
}

static enum verdict do_read(struct job *j)
{
	struct sn_piece far = { 0 };
	check_remote(j, IBV_ACCESS_REMOTE_READ, &far);
	if (j->status != IBV_WC_SUCCESS)
		return DONE;
	sn_place_before(j);
	j->status = transfer(j, false, &far, 1, j->w->length);
	return j->status ? refuse(j, j->status, IBV_EVENT_QP_ACCESS_ERR) : DONE;
}

static enum verdict do_atomic(struct job *j)
{
	struct sn_piece far = { 0 }, result;
	struct sn_swqe *w = j->w;
	uint64_t old = 0;

	check_remote(j, IBV_ACCESS_REMOTE_ATOMIC, &far);
	if (j->status != IBV_WC_SUCCESS)
		return DONE;
	if (w->remote_addr % 8)
		return refuse(j, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
	sn_place_before(j);
	enum ibv_wc_status status = outcome(j, sn_atomic(j->ctx, j->t, &far, w->opcode, w->compare_add, w->swap, &old));
	if (status != IBV_WC_SUCCESS)
		return refuse(j, status, IBV_EVENT_QP_ACCESS_ERR);
	result = (struct sn_piece){ .ptr = (char *)&old, .len = 8 };
	if (sn_copy(j->ctx, j->r, true, &result, 1, j->near, j->num_near, 8) != SN_COPY_OK)
		j->status = IBV_WC_LOC_PROT_ERR;
	return DONE;
}

/* Eight bytes that nobody sees half written. */
static enum verdict do_atomic_write(struct job *j)
{
	struct sn_piece far = { 0 }, payload;
	uint64_t value = 0, old;

	check_remote(j, IBV_ACCESS_REMOTE_WRITE, &far);
	if (j->status != IBV_WC_SUCCESS)
		return DONE;
	if (j->w->remote_addr % 8)
		return refuse(j, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
	payload = (struct sn_piece){ .ptr = (char *)&value, .len = 8 };
	if (sn_copy(j->ctx, j->r, false, &payload, 1, j->near, j->num_near, 8) != SN_COPY_OK) {
		j->status = IBV_WC_LOC_PROT_ERR;
		return DONE;
	}
	sn_place_before(j);
	j->status = outcome(j, sn_atomic(j->ctx, j->t, &far, IBV_WR_ATOMIC_WRITE, 0, value, &old));
	return j->status ? refuse(j, j->status, IBV_EVENT_QP_ACCESS_ERR) : DONE;
}

static void datagram_to(void *arg, uint32_t qpn)
{
	struct job *j = arg;
	struct sn_piece far[SN_MAX_SGE], *grh;
	struct sn_peer *_Atomic found = NULL;
	struct sn_side t;
	uint8_t header[40];
	uint32_t item;
	int num_far;

	/* whatever does not fit, or finds nobody, is dropped: that is what a datagram is */
	if (!sn_side_of(j->ctx, qpn, &found, &t) || t.qp->type != IBV_QPT_UD || t.qp->qpn != qpn ||
	    t.qp->qkey != j->w->ud_qkey)
		return;
	sn_claim_end(j->claim);
	j->t = &t;
	j->claim = sn_claim_begin(j->ctx, j->r, j->t);
	sn_name_keys(j);
	sn_claim_publish();
	j->num_near = 0;
	j->status = gather(j); /* again, under the new claim */
	if (j->status != IBV_WC_SUCCESS)
		return;
	if (sn_stage_missing(j->ctx, &t) || !can_receive(atomic_load(&t.qp->state)) || sn_take_receive(j, &item) != DONE)
		return;
	struct sn_rwqe *rw = sn_rwqe_at(t.seg, sn_rq_of(t.seg, t.qp), item);
	enum ibv_wc_status at_t = sn_scatter(j, rw, j->w->length + sizeof(header), far, &num_far);
	if (at_t == IBV_WC_SUCCESS) {
		sn_ah_header(j->w, header);
		memmove(j->near + 1, j->near, (size_t)j->num_near * sizeof(*j->near));
		grh = j->near;
		*grh = (struct sn_piece){ .ptr = (char *)header, .len = sizeof(header) };
		j->num_near++;
		at_t = transfer(j, true, far, num_far, j->w->length + sizeof(header));
	}
	sn_complete_receive(j, item, at_t, at_t ? 0 : j->w->length + (uint32_t)sizeof(header), 0);
}

static void to_member(void *arg, uint32_t qpn)
{
	struct job *j = arg;
	if (qpn != j->r->qp->qpn && j->status == IBV_WC_SUCCESS)
		datagram_to(j, qpn);
}

static enum verdict do_datagram(struct job *j)
{
	const struct sn_side *t = j->t;
	if (!sn_mcast_each(j->ctx, j->w, to_member, j))
		datagram_to(j, j->w->ud_qpn);
	j->t = t; /* what it was set to is gone */
	return DONE;
}

enum verdict sn_execute(struct job *j)
{
	enum verdict v;
	if (is_local(j->w->opcode)) {
		j->status = sn_mw_execute(j);
		return DONE;
	}
	j->status = gather(j);
	if (j->status != IBV_WC_SUCCESS)
		return DONE;
	if (j->r->qp->type == IBV_QPT_UD)
		return do_datagram(j);
	v = sn_check_peer(j);
	if (v == DONE && j->status == IBV_WC_SUCCESS)
		switch (j->w->opcode) {
		case IBV_WR_SEND:
		case IBV_WR_SEND_WITH_IMM:
		case IBV_WR_SEND_WITH_INV:
			v = do_send(j);
			break;
		case IBV_WR_RDMA_WRITE:
		case IBV_WR_RDMA_WRITE_WITH_IMM:
			v = do_write(j, j->w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM);
			break;
		case IBV_WR_ATOMIC_WRITE:
			v = do_atomic_write(j);
			break;
		case IBV_WR_RDMA_READ:
			v = do_read(j);
			break;
		default:
			v = do_atomic(j);
		}
	if (j->r->qp->type == IBV_QPT_UC && (v != DONE || j->status == IBV_WC_RETRY_EXC_ERR)) {
		j->status = IBV_WC_SUCCESS; /* nobody there, or no receive: lost, and nobody is told */
		v = DONE;
	}
	return v;
}
