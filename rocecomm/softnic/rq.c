/* Receive queues, of a QP or shared: posted by the owner, consumed by whoever executes a send. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "softnic.h"

uint32_t sn_round_pow2(uint32_t n)
{
	uint32_t p = 1;
	while (p < n)
		p *= 2;
	return p;
}

static uint32_t rwqe_head(uint32_t max_sge)
{
	return (uint32_t)((sizeof(struct sn_rwqe) + max_sge * sizeof(struct sn_sge) + 63) & ~63UL);
}

static uint32_t rwqe_stride(uint32_t max_sge)
{
	return rwqe_head(max_sge) + (uint32_t)sizeof(struct sn_rslot);
}

uint64_t sn_rq_bytes(uint32_t size, uint32_t max_sge)
{
	return size ? (uint64_t)size * rwqe_stride(max_sge) + ((size * sizeof(uint32_t) + 63) & ~63UL) : 0;
}

void sn_rq_init(struct sn_seg *seg, struct sn_rq *rq, uint64_t at, uint32_t size, uint32_t max_sge, bool ordered)
{
	rq->size = size;
	rq->max_sge = max_sge;
	rq->slot = rwqe_head(max_sge);
	rq->stride = rwqe_stride(max_sge);
	rq->ordered = ordered;
	rq->wqes = at;
	rq->ring = at + (uint64_t)size * rq->stride;
	sn_rq_empty(seg, rq);
}

void sn_rq_empty(struct sn_seg *seg, struct sn_rq *rq)
{
	atomic_store(&rq->head, 0);
	atomic_store(&rq->tail, 0);
	atomic_store(&rq->waiting, 0);
	rq->tail_seen = 0;
	for (uint32_t i = 0; i < rq->size; i++)
		atomic_store(&sn_rslot_at(seg, rq, i)->state, SN_RWQE_FREE);
}

int sn_free_list_init(struct sn_free_list *f, uint32_t size, uint32_t usable)
{
	if (size > f->size) {
		uint32_t *item = realloc(f->item, size * sizeof(*item));
		if (!item)
			return ENOMEM;
		f->item = item;
		f->size = size;
	}
	f->count = usable;
	for (uint32_t i = 0; i < usable; i++)
		f->item[i] = usable - 1 - i;
	return 0;
}

void sn_free_list_put(struct sn_free_list *f, uint32_t item)
{
	sn_spin(&f->lock);
	if (f->count < f->size)
		f->item[f->count++] = item;
	sn_unspin(&f->lock);
}

static void fill(struct sn_seg *seg, struct sn_rq *rq, const struct ibv_recv_wr *wr, uint32_t item, uint32_t qp)
{
	struct sn_rwqe *w = sn_rwqe_at(seg, rq, item);
	struct sn_rslot *slot = sn_rslot_at(seg, rq, item);
	/* in this order: flush_taken() may be looking at the entry's earlier life */
	atomic_store_explicit(&w->serial, atomic_load_explicit(&w->serial, memory_order_relaxed) + 1, memory_order_relaxed);
	atomic_store_explicit(&w->wr_id, wr->wr_id, memory_order_release);
	w->num_sge = (uint32_t)wr->num_sge;
	for (int i = 0; i < wr->num_sge; i++)
		w->sge[i] = (struct sn_sge){ wr->sg_list[i].addr, wr->sg_list[i].length, wr->sg_list[i].lkey };
	slot->lazy_len = 0;
	atomic_store_explicit(&slot->qp, qp, memory_order_relaxed);
	atomic_store_explicit(&slot->state, SN_RWQE_POSTED, memory_order_release);
}

static int check(const struct sn_rq *rq, const struct ibv_recv_wr *wr)
{
	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > rq->max_sge)
		return EINVAL;
	return rq->size ? 0 : ENOMEM;
}

/* Is somebody waiting for what was just posted? Asked after a full fence. */
static bool was_waited_for(struct sn_rq *rq)
{
	if (!atomic_load_explicit(&rq->waiting, memory_order_relaxed))
		return false;
	/* exchanged: who came to wait meanwhile is found by what is looked at after this */
	return atomic_exchange(&rq->waiting, 0);
}

/* `wr` and what follows, into a queue of several takers. They have a lock of their own, which is not needed
 * here: its line stays with them. */
static int post_shared(struct sn_ctx *ctx, struct sn_rq *rq, struct sn_free_list *free, struct ibv_recv_wr **wr,
		       bool *waited)
{
	int err = 0;
	sn_spin(&free->lock);
	uint32_t tail = atomic_load_explicit(&rq->tail, memory_order_relaxed), from = tail;
	for (; *wr; *wr = (*wr)->next) {
		err = check(rq, *wr);
		if (!err && !free->count)
			err = ENOMEM;
		if (err)
			break;
		uint32_t item = free->item[--free->count];
		fill(ctx->seg, rq, *wr, item, SN_QPS);
		atomic_store_explicit((_Atomic uint32_t *)sn_at(ctx->seg, rq->ring) + (tail & (rq->size - 1)), item,
				      memory_order_relaxed);
		tail++;
	}
	if (tail != from)
		atomic_store_explicit(&rq->tail, tail, memory_order_release);
	/* the entries first, then the look: a sender says that it waits, and then looks for entries */
	atomic_thread_fence(memory_order_seq_cst);
	*waited = was_waited_for(rq);
	sn_unspin(&free->lock);
	return err;
}

static void flush_one(struct sn_ctx *ctx, const struct sn_side *side, uint32_t item, uint64_t wr_id, uint32_t serial)
{
	struct sn_qp *qp = side->qp;
	struct sn_cqe e = {
		.wr_id = wr_id,
		.serial = serial,
		.qpn = qp->qpn,
		.epoch = atomic_load(&qp->epoch),
		.status = IBV_WC_WR_FLUSH_ERR,
		.opcode = IBV_WC_RECV,
		.entry = item,
		.srq = qp->srq,
		.srq_epoch = qp->srq >= 0 ? atomic_load(&sn_srq_at(side->seg, qp->srq)->epoch) : 0,
		.kind = SN_CQE_RECV,
	};
	sn_cq_push(ctx, side, qp->recv_cq, &e, true);
}

/* With the queue's lock held: what is posted comes out again, but for what a sender took. */
static void flush_posted(struct sn_ctx *ctx, const struct sn_side *side)
{
	struct sn_rq *rq = &side->qp->rq;
	uint32_t head;
	while ((head = atomic_load(&rq->head)) != atomic_load(&rq->tail) && atomic_load(&side->qp->state) == IBV_QPS_ERR) {
		uint32_t item = sn_rq_item(side->seg, rq, head), posted = SN_RWQE_POSTED;
		struct sn_rwqe *w = sn_rwqe_at(side->seg, rq, item);
		/* in this order: if we die in between, it looks like one that a sender took */
		struct sn_rslot *slot = sn_rslot_at(side->seg, rq, item);
		atomic_store_explicit(&slot->qp, side->qp->qpn & (SN_QPS - 1), memory_order_relaxed);
		if (atomic_compare_exchange_strong(&slot->state, &posted, SN_RWQE_TAKEN))
			flush_one(ctx, side, item, w->wr_id, w->serial);
		atomic_compare_exchange_strong(&rq->head, &head, head + 1);
	}
}

/* Every receive of a QP in error completes with a flush status. Shared queues keep theirs. */
void sn_rq_flush(struct sn_ctx *ctx, const struct sn_side *side)
{
	struct sn_qp *qp = side->qp;
	if (qp->srq >= 0) {
		sn_async_raise(ctx, side, IBV_EVENT_QP_LAST_WQE_REACHED, qp->qpn & (SN_QPS - 1),
			       atomic_load(&qp->epoch));
		return;
	}
	if (!qp->rq.size || !sn_lock(ctx, &qp->rq.lock))
		return;
	flush_posted(ctx, side);
	sn_unlock(&qp->rq.lock);
}

static bool in_hands(struct sn_priv_srq *srq, uint32_t i, const struct sn_rslot *slot, uint32_t serial)
{
	uint32_t state = atomic_load(&slot->state);
	return state != SN_RWQE_FREE && state != SN_RWQE_POSTED && !(srq && sn_srq_given(srq, i, serial));
}

static bool visit_taken(struct sn_priv_qp *priv, bool flush)
{
	struct sn_side own = sn_own_side(priv);
	struct sn_rq *rq = sn_rq_of(own.seg, own.qp);
	struct sn_priv_srq *srq = priv->init.srq ? sn_container(priv->init.srq, struct sn_priv_srq, ibv) : NULL;
	for (uint32_t i = 0; i < rq->size; i++) {
		struct sn_rwqe *w = sn_rwqe_at(own.seg, rq, i);
		struct sn_rslot *slot = sn_rslot_at(own.seg, rq, i);
		uint32_t serial = atomic_load(&w->serial);
		uint64_t wr_id = atomic_load(&w->wr_id);
		if (!in_hands(srq, i, slot, serial) || slot->qp != priv->index ||
		    sn_cq_has_receive(priv->ctx, own.qp->recv_cq, own.qp->qpn, i, serial) ||
		    !in_hands(srq, i, slot, serial) || atomic_load(&w->serial) != serial)
			continue;
		if (!flush)
			return true;
		flush_one(priv->ctx, &own, i, wr_id, serial);
	}
	return false;
}

/* Receives of this context's QP that a sender took and will never complete: it died with them, or
 * nobody is inside any more. They are flushed; most entries that look so have their completion in the
 * queue, not polled yet. Another thread may poll one meanwhile and post the entry anew: then its serial
 * has changed, and a flush with the old one would be dropped at the poll. */
void sn_rq_flush_taken(struct sn_priv_qp *priv)
{
	sn_stage_settle(priv->ctx);
	visit_taken(priv, true);
}

/* Does somebody have receives of this QP in his hands? */
bool sn_rq_has_taken(struct sn_priv_qp *priv)
{
	return visit_taken(priv, false);
}

/* At RESET and destroy: entries of a shared queue that this QP had taken go back to it. */
void sn_srq_reclaim(struct sn_priv_qp *priv)
{
	if (!priv->init.srq)
		return;
	struct sn_priv_srq *srq = sn_container(priv->init.srq, struct sn_priv_srq, ibv);
	struct sn_rq *rq = &srq->srq->rq;
	for (uint32_t i = 0; i < rq->size; i++) {
		struct sn_rslot *slot = sn_rslot_at(priv->ctx->seg, rq, i);
		uint32_t state = atomic_load(&slot->state), serial = atomic_load(&sn_rwqe_at(priv->ctx->seg, rq, i)->serial);
		if (in_hands(srq, i, slot, serial) && (slot->qp & ~SN_RWQE_REPORTED) == priv->index &&
		    atomic_compare_exchange_strong(&slot->state, &state, SN_RWQE_FREE) && sn_srq_give(srq, i, serial))
			sn_free_list_put(&srq->free, i);
	}
}

/* In a queue in error an entry that a sender took may come back later than one that was posted after it,
 * so that the next in turn is in use although there is room: its flush goes without an entry. */
static int post_in_error(struct sn_priv_qp *priv, const struct sn_side *side, uint64_t wr_id)
{
	struct sn_rq *rq = &side->qp->rq;
	if (atomic_load(&side->qp->state) != IBV_QPS_ERR)
		return ENOMEM; /* a stopped sender keeps it */
	if (!sn_lock(priv->ctx, &rq->lock))
		return EBUSY;
	flush_posted(priv->ctx, side);
	atomic_fetch_add(&priv->without_entry, 1);
	flush_one(priv->ctx, side, SN_NO_ENTRY, wr_id, 0);
	sn_unlock(&rq->lock);
	return 0;
}

static int post_in_turn(struct sn_priv_qp *priv, const struct sn_side *side, struct ibv_recv_wr **wr, bool *waited)
{
	struct sn_rq *rq = &side->qp->rq;
	int err = 0;
	sn_spin(&priv->free.lock);
	uint32_t tail = atomic_load_explicit(&rq->tail, memory_order_relaxed);
	for (; *wr; *wr = (*wr)->next) {
		uint32_t item = tail & (rq->size - 1);
		if ((err = check(rq, *wr)))
			break;
		if (tail - atomic_load_explicit(&priv->given_back, memory_order_acquire) +
			    atomic_load_explicit(&priv->without_entry, memory_order_relaxed) >= rq->size) {
			err = ENOMEM;
			break;
		}
		if (atomic_load_explicit(&sn_rslot_at(side->seg, rq, item)->state, memory_order_acquire) == SN_RWQE_FREE) {
			fill(side->seg, rq, *wr, item, priv->index);
			atomic_store_explicit(&rq->tail, ++tail, memory_order_release);
		} else if ((err = post_in_error(priv, side, (*wr)->wr_id))) {
			break;
		}
	}
	/* the entry first, then the look: a sender says that it waits, and then looks for entries */
	atomic_thread_fence(memory_order_seq_cst);
	*waited = was_waited_for(rq);
	if (atomic_load(&side->qp->state) == IBV_QPS_ERR)
		sn_rq_flush(priv->ctx, side);
	sn_unspin(&priv->free.lock);
	return err;
}

int sn_post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct sn_priv_qp *priv = sn_container(ibv, struct sn_priv_qp, ibv);
	struct sn_qp *qp = priv->qp;
	struct sn_side side = sn_own_side(priv);
	bool waited = false;
	int err = 0;

	if (sn_foreign(priv->ctx)) {
		err = EPERM;
	} else if (qp->srq >= 0 || atomic_load(&qp->state) == IBV_QPS_RESET) {
		err = EINVAL;
	} else if (qp->rq.ordered) {
		err = post_in_turn(priv, &side, &wr, &waited);
	} else {
		err = post_shared(priv->ctx, &qp->rq, &priv->free, &wr, &waited);
		if (atomic_load(&qp->state) == IBV_QPS_ERR)
			sn_rq_flush(priv->ctx, &side);
	}
	if (err)
		*bad = wr;
	if (waited)
		sn_drive_peer(priv); /* its sends were waiting for this, and it may be asleep */
	return err;
}

static void drive_waiters(struct sn_ctx *ctx, struct sn_srq *srq)
{
	for (uint32_t w = 0; w < SN_QPS / 64; w++) {
		uint64_t bits = atomic_load_explicit(&srq->waiters[w], memory_order_relaxed);
		if (!bits)
			continue;
		bits = atomic_exchange(&srq->waiters[w], 0);
		for (; bits; bits &= bits - 1) {
			struct sn_priv_qp *qp = ctx->qps[w * 64 + (uint32_t)__builtin_ctzll(bits)];
			if (qp && !qp->destroying)
				sn_drive_peer(qp);
		}
	}
}

int sn_post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct sn_priv_srq *priv = sn_container(ibv, struct sn_priv_srq, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	bool waited = false;
	int err = sn_foreign(ctx) ? EPERM : 0;

	if (!err)
		err = post_shared(ctx, &priv->srq->rq, &priv->free, &wr, &waited);
	if (err)
		*bad = wr;
	if (waited) {
		pthread_mutex_lock(&ctx->lock); /* keeps the QPs that are found there */
		drive_waiters(ctx, priv->srq);
		pthread_mutex_unlock(&ctx->lock);
	}
	return err;
}
