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
	case IBV_WR_ATOMIC_WRITE:
		return IBV_WC_ATOMIC_WRITE;
	case IBV_WR_BIND_MW:
		return IBV_WC_BIND_MW;
	case IBV_WR_LOCAL_INV:
		return IBV_WC_LOCAL_INV;
	default:
		return IBV_WC_SEND;
	}
}

static int complete_send(struct sn_ctx *ctx, const struct sn_side *r, struct sn_swqe *w, uint32_t pos,
			 enum ibv_wc_status status)
{
	struct sn_cqe e = {
		.wr_id = w->wr_id,
		.qpn = r->qp->qpn,
		.epoch = atomic_load_explicit(&r->qp->epoch, memory_order_relaxed),
		.byte_len = w->length,
		.status = (uint8_t)status,
		.opcode = (uint8_t)wc_opcode(w->opcode),
		.entry = pos,
		.srq = -1,
	};
	if (status == IBV_WC_SUCCESS && !(w->flags & IBV_SEND_SIGNALED) && !r->qp->sq_sig_all)
		return 0;
	uint32_t reported = atomic_load_explicit(&r->qp->sq.reported, memory_order_relaxed);
	atomic_store_explicit(&r->qp->sq.reported, reported + 1, memory_order_relaxed);
	return sn_cq_push(ctx, r, r->qp->send_cq, &e, false);
}

uint64_t sn_rnr_timer_ns(uint8_t code)
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
			deadline = now + qp->rnr_retry * sn_rnr_timer_ns(t->qp->min_rnr_timer);
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
	uint32_t pos = atomic_load(&qp->sq.head);
	if ((int32_t)(qp->sq.staged_to - pos) > 0)
		pos = qp->sq.staged_to;
	for (; pos != tail; pos++) {
		struct sn_swqe *w = sn_swqe_at(r->seg, &qp->sq, pos);
		char *to = (char *)w + w->data;
		if (is_inbound(w->opcode))
			break; /* what is behind, with a fence, may send what this one fetches */
		bool ok = !w->staged && w->length && w->length <= SN_SMALL;
		for (uint32_t i = 0; i < w->num_sge && ok; i++) {
			struct sn_mr mr;
			struct sn_sge s = w->sge[i];
			if (!s.length)
				continue;
			ok = sn_mr_covers(r->seg, s.lkey, qp, 0, s.addr, s.length, &mr);
			if (ok)
				memcpy(to, (char *)(uintptr_t)(mr.host + (s.addr - mr.iova)), s.length);
			to += s.length;
		}
		if (ok)
			w->staged = 1;
	}
	qp->sq.staged_to = pos;
}

/* The entry at the head is over: its completion, and on to the next. */
static int finish(struct sn_ctx *ctx, const struct sn_side *r, struct sn_swqe *w, uint32_t head,
		  enum ibv_wc_status status)
{
	struct sn_sq *sq = &r->qp->sq;
	atomic_store_explicit(&sq->wait, SN_WAIT_NOTHING, memory_order_relaxed);
	atomic_store_explicit(&sq->deadline, 0, memory_order_relaxed);
	atomic_store_explicit(&sq->completing, head + 1, memory_order_relaxed);
	int err = complete_send(ctx, r, w, head, status);
	if (!r->peer) /* compared: R takes the queue from an executor that was stopped too long */
		atomic_store_explicit(&sq->head, head + 1, memory_order_release);
	else
		atomic_compare_exchange_strong_explicit(&sq->head, &(uint32_t){ head }, head + 1, memory_order_release,
							memory_order_relaxed);
	return err;
}

/* The same for `num` entries that all went well. EOWNERDEAD: we were stopped, and R has gone on without us. */
static int finish_batch(struct sn_ctx *ctx, const struct sn_side *r, uint32_t head, uint32_t num)
{
	struct sn_sq *sq = &r->qp->sq;
	int err = 0;
	for (uint32_t pos = head, end = head + num; pos != end && !err; pos++) {
		struct sn_swqe *w = sn_swqe_at(r->seg, sq, pos);
		if (pos + 1 != end && !(w->flags & IBV_SEND_SIGNALED) && !r->qp->sq_sig_all)
			continue; /* it frees its entry together with a later one */
		if (atomic_load_explicit(&sq->exec.owner, memory_order_relaxed) != ctx->id)
			return EOWNERDEAD;
		if (head != pos && !r->peer)
			atomic_store_explicit(&sq->head, pos, memory_order_release);
		else if (head != pos && !atomic_compare_exchange_strong(&sq->head, &head, pos))
			return EOWNERDEAD;
		err = finish(ctx, r, w, pos, IBV_WC_SUCCESS);
		head = pos + 1;
	}
	return err;
}

struct failed {
	bool r, t;
};

/* R fails by a request of its own; drive() flushes its receives. A completion that was lost (`err`) is
 * heard of in another way. */
static bool fatal(struct sn_ctx *ctx, const struct sn_side *r, int err)
{
	bool first = sn_qp_set_error(r);
	if (first && err)
		sn_async_raise(ctx, r, IBV_EVENT_QP_FATAL, r->qp->qpn & (SN_QPS - 1), atomic_load(&r->qp->epoch));
	return first;
}

#define CLAIM_MESSAGES 32u /* one claim serves so many requests of a run, or so many bytes: */
#define CLAIM_BYTES (256u << 10)

static void let_go(struct sn_claim **claim)
{
	if (*claim)
		sn_claim_end(*claim);
	*claim = NULL;
}

static bool run(struct sn_ctx *ctx, const struct sn_side *r, const struct sn_side *t, struct failed *failed)
{
	struct sn_qp *qp = r->qp;
	struct sn_claim *claim = NULL;
	uint32_t messages = 0;
	uint64_t bytes = 0;
	bool moved = false;

	for (;;) {
		uint32_t head = atomic_load_explicit(&qp->sq.head, memory_order_relaxed);
		uint32_t state = atomic_load(&qp->state);
		struct sn_swqe *w = sn_swqe_at(r->seg, &qp->sq, head);
		enum verdict v = DONE;
		struct job j; /* not zeroed as a whole: near[] is large */

		if (head == atomic_load_explicit(&qp->sq.tail, memory_order_acquire))
			break;
		if (state == IBV_QPS_ERR || state == IBV_QPS_SQE) {
			let_go(&claim);
			finish(ctx, r, w, head, IBV_WC_WR_FLUSH_ERR);
			moved = true;
			continue;
		}
		if (state != IBV_QPS_RTS || (r->peer && qp->dest_qpn != t->qp->qpn))
			break; /* SQD: later; or R was connected to somebody else meanwhile */
		if (r->peer && (is_local(w->opcode) || (sn_faulty() && sn_fault_leave_to(r, t)))) {
			atomic_store(&qp->sq.wait, SN_WAIT_OWNER);
			break;
		}
		if (is_local(w->opcode))
			let_go(&claim); /* it waits for the claims on a key: not for our own */
		bool fresh = !claim;
		if (fresh) {
			claim = sn_claim_begin(ctx, r, t);
			messages = 0;
			bytes = 0;
		}
		j.ctx = ctx;
		j.r = r;
		j.t = t;
		j.w = w;
		j.num_near = 0;
		j.fail_t = false;
		j.claim = claim;
		j.fresh = fresh;
		if (sn_name_keys(&j) || fresh)
			sn_claim_publish();
		/* whoever changed the state before it saw the claim did not wait for us */
		if (atomic_load(&qp->state) != state) {
			let_go(&claim);
			continue;
		}
		if (goes_in_batches(w->opcode) && !sn_faulty()) {
			uint32_t tail = atomic_load_explicit(&qp->sq.tail, memory_order_acquire);
			uint32_t done = tail - head > 1 && sn_swqe_at(r->seg, &qp->sq, head + 1)->opcode == w->opcode
						? sn_batch(&j, head, tail)
						: 0;
			if (done) {
				int err = finish_batch(ctx, r, head, done);
				let_go(&claim);
				moved = true;
				if (err == EOWNERDEAD)
					break;
				if (err)
					failed->r |= fatal(ctx, r, err);
				continue;
			}
		}
		enum sn_fault_do fault = sn_faulty() ? sn_fault(&j, head) : SN_FAULT_NONE;
		bool wait = fault == SN_FAULT_WAIT;
		if (fault == SN_FAULT_NONE) {
			v = sn_execute(&j);
			wait = v != DONE && keep_waiting(r, t, v);
		}
		claim = j.claim;
		if (wait && !r->peer)
			stage(r);
		if (j.fail_t)
			failed->t |= sn_qp_fail(ctx, t); /* before the claim ends: a RESET of T waits for it */
		bytes += w->length;
		if (++messages >= CLAIM_MESSAGES || bytes >= CLAIM_BYTES || v != DONE || j.status != IBV_WC_SUCCESS ||
		    qp->type == IBV_QPT_UD)
			let_go(&claim);
		if (wait)
			break;
		if (v != DONE)
			j.status = v == WAIT_RNR && !(t->peer && t->peer->dead) ? IBV_WC_RNR_RETRY_EXC_ERR
										 : IBV_WC_RETRY_EXC_ERR;
		if (atomic_load_explicit(&qp->sq.exec.owner, memory_order_relaxed) != ctx->id)
			break; /* we were stopped, and R has gone on without us */
		int err = finish(ctx, r, w, head, j.status);
		moved = true;
		if (j.status != IBV_WC_SUCCESS || err) {
			if (qp->type == IBV_QPT_RC || err)
				failed->r |= fatal(ctx, r, err);
			else
				atomic_compare_exchange_strong(&qp->state, &state, IBV_QPS_SQE);
		}
	}
	let_go(&claim);
	return moved;
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
	if (wait == SN_WAIT_PEER && t && ((sn_staged(t) && !atomic_load(&t->seg->staging)) || (sn_staged(r) && !atomic_load(&r->seg->staging))))
		return false;
	if (wait == SN_WAIT_PEER && t) { /* it may have come up, or gone, just now */
		uint32_t there = atomic_load(&t->qp->state);
		return t->qp->dest_qpn == r->qp->qpn && r->qp->dest_qpn == t->qp->qpn && t->qp->type == r->qp->type &&
		       (there == IBV_QPS_RTR || there == IBV_QPS_RTS || there == IBV_QPS_ERR) &&
		       !(r->peer && r->peer->dead);
	}
	return wait == SN_WAIT_NOTHING || (wait == SN_WAIT_OWNER && !r->peer);
}

/* What comes next R must do itself, and it may be asleep. */
static void call_owner(struct sn_ctx *ctx, const struct sn_side *r)
{
	struct sn_cq *cq = sn_cq_at(r->seg, r->qp->send_cq);
	if (!r->peer || atomic_load(&r->qp->sq.wait) != SN_WAIT_OWNER)
		return;
	if (sn_faulty())
		sn_fault_wake(r->seg); /* it may sleep on any queue */
	else if (cq->channel && atomic_exchange(&cq->armed, SN_ARM_NONE) != SN_ARM_NONE)
		sn_channel_notify(ctx, r, cq->channel, r->qp->send_cq, cq->epoch);
}

/* R's own queue is in the hands of an executor that makes no headway: stopped, most likely. R takes
 * it back, gives up the connection, and what the executor still touches stays under its claim. */
static bool take_back(struct sn_ctx *ctx, struct sn_priv_qp *own, const struct sn_side *r, sn_id holder)
{
	uint32_t zero = 0;
	bool taken = false;

	if (!own || holder == ctx->id || !holder || !atomic_compare_exchange_strong(&own->stuck_lock, &zero, 1))
		return false;
	uint32_t head = atomic_load(&r->qp->sq.head);
	uint64_t now = sn_now();
	struct sn_swqe *w = sn_swqe_at(r->seg, &r->qp->sq, head);
	if (own->stuck_holder != holder || own->stuck_head != head || !own->stuck_since) {
		own->stuck_holder = holder;
		own->stuck_head = head;
		own->stuck_since = now;
	} else if (sn_qp_busy(r->qp) && now - own->stuck_since >= 2 * SN_LOCK_WAIT_NS +
							     10ULL * __atomic_load_n(&w->length, __ATOMIC_RELAXED)) {
		own->stuck_since = 0;
		taken = atomic_compare_exchange_strong(&r->qp->sq.exec.owner, &holder, ctx->id);
	}
	sn_unspin(&own->stuck_lock);
	if (!taken)
		return false;
	if (atomic_load(&r->qp->state) != IBV_QPS_ERR)
		finish(ctx, r, w, head, IBV_WC_RETRY_EXC_ERR);
	sn_qp_fail(ctx, r);
	return true;
}

/* `own`: the QP whose owner this is, who alone may take its queue back. */
static bool try_exec(struct sn_ctx *ctx, struct sn_priv_qp *own, struct sn_lock *l)
{
	if (!sn_try_lock(ctx, l))
		return false;
	if (own && atomic_load_explicit(&own->stuck_since, memory_order_relaxed))
		atomic_store_explicit(&own->stuck_since, 0, memory_order_relaxed); /* nobody is stuck */
	return true;
}

static bool lock_exec(struct sn_ctx *ctx, struct sn_priv_qp *own, const struct sn_side *r, const struct sn_side *t)
{
	struct sn_lock *l = &r->qp->sq.exec;
	if (try_exec(ctx, own, l))
		return true;
	/* What we posted must be visible before we look whether somebody holds the queue: the holder
	 * looks for it after it has let go. */
	atomic_thread_fence(memory_order_seq_cst);
	if (try_exec(ctx, own, l))
		return true;
	/* the peer held it and died */
	const struct sn_side *other = r->peer ? r : t;
	sn_id holder = atomic_load(&l->owner);
	if (other && other->peer && holder == other->peer->id && sn_peer_dead(other->peer, sn_now()) &&
	    atomic_compare_exchange_strong(&l->owner, &holder, ctx->id))
		return true;
	return take_back(ctx, own, r, holder);
}

static bool drive(struct sn_ctx *ctx, struct sn_priv_qp *own, const struct sn_side *r, const struct sn_side *t)
{
	struct failed failed = { false, false };
	bool moved = false;

	if (sn_faulty() && r->peer && sn_fault_leave_to(r, t)) {
		sn_fault_wake(r->seg);
		return false;
	}
	do {
		if (!lock_exec(ctx, own, r, t))
			break; /* whoever holds it looks again after giving it up */
		sn_helper_seen(ctx);
		moved |= run(ctx, r, t, &failed);
		sn_helper_done(ctx);
		sn_unlock_mine(ctx, &r->qp->sq.exec);
		sn_fence_after_rmw();
	} while (runnable(r, t));
	call_owner(ctx, r);
	if (failed.r) {
		/* without a claim or a queue of ours: who has a receive of R's in hand completes it before the ones behind it */
		if (!r->peer)
			sn_wait_claims(ctx, r->qp->qpn, 0);
		if (atomic_load(&r->qp->state) == IBV_QPS_ERR)
			sn_flush_receives(ctx, r);
	}
	/* a failed QP's own sends are flushed, and its peer's have nobody to wait for any more */
	if ((failed.t || failed.r) && t && t->qp->dest_qpn == r->qp->qpn && sn_qp_busy(t->qp))
		drive(ctx, NULL, t, r);
	return moved;
}

bool sn_drive(struct sn_priv_qp *qp)
{
	struct sn_side r = sn_own_side(qp), t;
	bool connected = qp->qp->type != IBV_QPT_UD && sn_peer_side(qp, &t);
	return drive(qp->ctx, qp, &r, connected ? &t : NULL);
}

bool sn_drive_peer(struct sn_priv_qp *qp)
{
	struct sn_side own = sn_own_side(qp), peer;
	if (qp->qp->type == IBV_QPT_UD || !sn_peer_side(qp, &peer) ||
	    (peer.peer && sn_peer_dead(peer.peer, sn_now_coarse())) || peer.qp->dest_qpn != qp->qp->qpn ||
	    peer.qp->type != qp->qp->type || !sn_qp_busy(peer.qp))
		return false;
	return drive(qp->ctx, NULL, &peer, &own);
}
