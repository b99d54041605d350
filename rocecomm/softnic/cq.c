/* Completion queues. Producers of several processes push under a lock; the owner consumes without
 * it: an entry is valid once its own sequence number says so, which costs one cache line. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>

#include "softnic.h"

#define YIELD_AFTER 40u /* empty polls; both ends may share one CPU */
#define KICK_EVERY 8u

SN_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				       struct ibv_comp_channel *channel, int comp_vector)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_priv_cq *cq = NULL;
	uint64_t ring = 0;
	uint32_t i, size;
	int err = 0;

	if (sn_foreign(ctx))
		err = EPERM;
	else if (cqe < 1 || cqe > SN_MAX_CQE || comp_vector < 0 || comp_vector >= context->num_comp_vectors)
		err = EINVAL;
	size = sn_round_pow2(err ? 1 : (uint32_t)cqe);
	if (!err && !(cq = calloc(1, sizeof(*cq))))
		err = ENOMEM;
	pthread_mutex_lock(&ctx->lock);
	if (!err) {
		for (i = 0; i < SN_CQS && ctx->cqs[(ctx->next_cq + i) % SN_CQS]; i++)
			;
		if (i == SN_CQS)
			err = ENOMEM;
		i = (ctx->next_cq + i) % SN_CQS;
	}
	if (!err)
		err = sn_seg_grow(ctx, &ctx->seg->cq_limit, SN_CQ_TABLE, sizeof(struct sn_cq), i + 1);
	if (!err)
		err = sn_heap_get(ctx, size * sizeof(struct sn_cqe), &ring);
	if (!err) {
		cq->index = i;
		cq->cq = sn_cq_at(ctx->seg, i);
		cq->cq->size = size;
		cq->cq->ring = ring;
		cq->cq->epoch++;
		cq->cq->channel = channel ? sn_container(channel, struct sn_channel, ibv)->number : 0;
		atomic_store(&cq->cq->overrun, 0);
		atomic_store(&cq->cq->armed, SN_ARM_NONE);
		atomic_store(&cq->cq->head, 0);
		atomic_store(&cq->cq->tail, 0);
		ctx->cqs[i] = cq;
		ctx->next_cq = (i + 1) % SN_CQS < 64 ? (i + 1) % 64 : 0; /* stay in the pages that have memory */
		if (channel)
			channel->refcnt++;
		atomic_fetch_add(&ctx->objects, 1);
	}
	pthread_mutex_unlock(&ctx->lock);
	if (err) {
		free(cq);
		errno = err;
		return NULL;
	}
	cq->ibv.context = context;
	cq->ibv.channel = channel;
	cq->ibv.cq_context = cq_context;
	cq->ibv.handle = i;
	cq->ibv.cqe = (int)size;
	pthread_mutex_init(&cq->ibv.mutex, NULL);
	pthread_cond_init(&cq->ibv.cond, NULL);
	return &cq->ibv;
}

SN_EXPORT int ibv_resize_cq(struct ibv_cq *ibv, int cqe)
{
	struct sn_priv_cq *cq = sn_container(ibv, struct sn_priv_cq, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	struct sn_cq *c = cq->cq;
	uint64_t fresh, old;
	uint32_t size, old_size;
	int err;

	if (sn_foreign(ctx) || cqe < 1 || cqe > SN_MAX_CQE)
		return EINVAL;
	size = sn_round_pow2((uint32_t)cqe);
	pthread_mutex_lock(&ctx->lock);
	sn_spin(&cq->poll_lock);
	err = sn_lock(ctx, &c->lock) ? 0 : EBUSY;
	if (!err) {
		uint32_t head = atomic_load(&c->head), tail = atomic_load(&c->tail);
		old = c->ring;
		old_size = c->size;
		err = tail - head > size ? EINVAL : sn_heap_get(ctx, size * sizeof(struct sn_cqe), &fresh);
		if (!err) {
			struct sn_cqe *from = sn_at(ctx->seg, old), *to = sn_at(ctx->seg, fresh);
			for (uint32_t i = head; i != tail; i++)
				to[i & (size - 1)] = from[i & (old_size - 1)];
			c->ring = fresh;
			c->size = size;
		}
		sn_unlock(&c->lock);
		if (!err) {
			sn_heap_put(ctx, old, old_size * sizeof(struct sn_cqe));
			ibv->cqe = (int)size;
		}
	}
	sn_unspin(&cq->poll_lock);
	pthread_mutex_unlock(&ctx->lock);
	return err;
}

SN_EXPORT int ibv_destroy_cq(struct ibv_cq *ibv)
{
	struct sn_priv_cq *cq = sn_container(ibv, struct sn_priv_cq, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	if (sn_foreign(ctx))
		return 0;
	if (atomic_load(&cq->users))
		return EBUSY;
	/* every event that was handed out must have been acknowledged */
	pthread_mutex_lock(&ibv->mutex);
	while (ibv->comp_events_completed != cq->events_seen || ibv->async_events_completed != cq->async_seen)
		pthread_cond_wait(&ibv->cond, &ibv->mutex);
	pthread_mutex_unlock(&ibv->mutex);
	pthread_mutex_lock(&ctx->lock);
	cq->cq->epoch++; /* events still in the FIFO are void */
	sn_heap_put(ctx, cq->cq->ring, cq->cq->size * sizeof(struct sn_cqe));
	ctx->cqs[cq->index] = NULL;
	if (ibv->channel)
		ibv->channel->refcnt--;
	pthread_mutex_unlock(&ctx->lock);
	atomic_fetch_sub(&ctx->objects, 1);
	free(cq);
	return 0;
}

/* Into the completion queue `index` of a side. ENOSPC: it overran, and is of no use any more. */
int sn_cq_push(struct sn_ctx *ctx, const struct sn_side *side, uint32_t index, const struct sn_cqe *cqe, bool solicited)
{
	struct sn_cq *cq = sn_cq_at(side->seg, index);
	if (!sn_lock(ctx, &cq->lock))
		return EBUSY;
	uint32_t tail = atomic_load_explicit(&cq->tail, memory_order_relaxed);
	if (tail - atomic_load_explicit(&cq->head, memory_order_acquire) >= cq->size) {
		bool first = !atomic_exchange(&cq->overrun, 1);
		uint32_t epoch = cq->epoch;
		sn_unlock(&cq->lock);
		if (first)
			sn_async_raise(ctx, side, IBV_EVENT_CQ_ERR, index, epoch);
		return ENOSPC;
	}
	struct sn_cqe *e = (struct sn_cqe *)sn_at(side->seg, cq->ring) + (tail & (cq->size - 1));
	memcpy(e, cqe, offsetof(struct sn_cqe, seq));
	atomic_store_explicit(&cq->tail, tail + 1, memory_order_relaxed);
	atomic_store_explicit(&e->seq, tail + 1, memory_order_release);
	sn_unlock(&cq->lock);

	if (cq->channel) {
		atomic_thread_fence(memory_order_seq_cst); /* against req_notify: entry first, then look */
		uint32_t armed = atomic_load_explicit(&cq->armed, memory_order_relaxed);
		if ((armed == SN_ARM_NEXT || (armed == SN_ARM_SOLICITED && (solicited || cqe->status))) &&
		    atomic_exchange(&cq->armed, SN_ARM_NONE) != SN_ARM_NONE)
			sn_channel_notify(ctx, side, cq->channel, index, cq->epoch);
	}
	return 0;
}

/* Work that waits in the send queues of this CQ's QPs: try again, look at deadlines and deaths. */
bool sn_cq_kick(struct sn_priv_cq *cq)
{
	bool moved = false, pending = false;
	sn_spin(&cq->poll_lock);
	for (struct sn_priv_qp *qp = cq->senders; qp; qp = qp->next_sender)
		if (sn_qp_busy(qp->qp)) {
			moved |= sn_drive(qp);
			pending |= sn_qp_busy(qp->qp);
		}
	if (!pending)
		atomic_store_explicit(&cq->pending, 0, memory_order_relaxed);
	sn_unspin(&cq->poll_lock);
	return moved;
}

static void give_back(struct sn_ctx *ctx, const struct sn_cqe *e, struct sn_priv_qp *qp)
{
	if (e->srq < 0) {
		if (qp)
			sn_free_list_put(&qp->free, e->rwqe);
	} else {
		struct sn_priv_srq *srq = ctx->srqs[e->srq];
		if (srq && atomic_load(&srq->srq->epoch) == e->srq_epoch)
			sn_free_list_put(&srq->free, e->rwqe);
	}
}

/* False: the completion is of a QP that was reset or destroyed since. */
static bool consume(struct sn_ctx *ctx, const struct sn_cqe *e, struct ibv_wc *wc)
{
	struct sn_qp *qp = sn_qp_at(ctx->seg, e->qpn & (SN_QPS - 1));
	struct sn_priv_qp *priv = ctx->qps[e->qpn & (SN_QPS - 1)];
	bool valid = priv && atomic_load_explicit(&qp->epoch, memory_order_relaxed) == e->epoch;

	if (e->kind & SN_CQE_RECV) {
		if (valid && e->kind & SN_CQE_LAZY) {
			struct sn_side t = { ctx->seg, qp, NULL };
			sn_place_one(ctx, &t, sn_rwqe_at(ctx->seg, sn_rq_of(ctx->seg, qp), e->rwqe));
			atomic_fetch_add_explicit(&qp->lazy_polled, 1, memory_order_release);
		}
		give_back(ctx, e, valid ? priv : NULL);
	}
	if (!valid)
		return false;
	wc->wr_id = e->wr_id;
	wc->status = e->status;
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
	return true;
}

static int take(struct sn_ctx *ctx, struct sn_priv_cq *cq, int n, struct ibv_wc *wc)
{
	struct sn_cq *c = cq->cq;
	uint32_t head = atomic_load_explicit(&c->head, memory_order_relaxed), from = head;
	int got = 0;
	struct sn_cqe *ring = sn_at(ctx->seg, c->ring);
	while (got < n) {
		struct sn_cqe *e = &ring[head & (c->size - 1)];
		if (atomic_load_explicit(&e->seq, memory_order_acquire) != head + 1)
			break;
		if (consume(ctx, e, &wc[got]))
			got++;
		head++;
	}
	if (head != from)
		atomic_store_explicit(&c->head, head, memory_order_release);
	return got;
}

int sn_poll_cq(struct ibv_cq *ibv, int n, struct ibv_wc *wc)
{
	struct sn_priv_cq *cq = sn_container(ibv, struct sn_priv_cq, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	int got;

	if (sn_foreign(ctx))
		return -EPERM;
	sn_spin(&cq->poll_lock);
	got = take(ctx, cq, n, wc);
	sn_unspin(&cq->poll_lock);
	if (got) {
		cq->empty_polls = 0;
		return got;
	}
	if (atomic_load_explicit(&cq->cq->overrun, memory_order_relaxed))
		return -EOVERFLOW; /* completions were lost: the queue is dead, as on a NIC */
	uint32_t empty = ++cq->empty_polls;
	if (atomic_load_explicit(&cq->pending, memory_order_relaxed) && empty % KICK_EVERY == 1 && sn_cq_kick(cq)) {
		sn_spin(&cq->poll_lock);
		got = take(ctx, cq, n, wc);
		sn_unspin(&cq->poll_lock);
	}
	if (!got && empty >= YIELD_AFTER)
		sched_yield();
	return got;
}

int sn_req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
	struct sn_priv_cq *cq = sn_container(ibv, struct sn_priv_cq, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	uint32_t was, want = solicited_only ? SN_ARM_SOLICITED : SN_ARM_NEXT;

	if (sn_foreign(ctx))
		return EPERM;
	was = atomic_load(&cq->cq->armed);
	while (was != SN_ARM_NEXT && !atomic_compare_exchange_weak(&cq->cq->armed, &was, want))
		; /* "next" is the wider request and stays */
	atomic_thread_fence(memory_order_seq_cst);
	if (atomic_load(&cq->pending)) {
		sn_spin(&cq->poll_lock);
		for (struct sn_priv_qp *qp = cq->senders; qp; qp = qp->next_sender)
			if (sn_qp_busy(qp->qp))
				sn_channel_watch(qp);
		sn_unspin(&cq->poll_lock);
	}
	return 0;
}
