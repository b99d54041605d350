/* Completion queues. Producers of several processes push under a lock; the owner consumes without
 * it: an entry is valid once its own sequence number says so, which costs one cache line. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>

#include "softnic.h"

/* Place and size of the ring in one word, and a count of its changes: an empty poll looks without a
 * lock, and looks again if the ring was another one meanwhile. */
static void set_glance(struct sn_priv_cq *cq)
{
	uint64_t change = (atomic_load_explicit(&cq->glance, memory_order_relaxed) >> 38) + 1;
	atomic_store_explicit(&cq->glance, change << 38 | cq->cq->ring << 8 | (uint64_t)__builtin_ctz(cq->cq->size),
			      memory_order_release);
}

/* With the producers' lock held: one that died may have published an entry and not counted it. */
static uint32_t repaired_tail(struct sn_seg *seg, struct sn_cq *cq)
{
	uint32_t tail = atomic_load_explicit(&cq->tail, memory_order_relaxed);
	struct sn_cqe *ring = sn_at(seg, cq->ring);
	if (atomic_load_explicit(&ring[tail & (cq->size - 1)].seq, memory_order_relaxed) == tail + 1)
		atomic_store_explicit(&cq->tail, ++tail, memory_order_relaxed);
	return tail;
}

struct sn_priv_cq *sn_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				struct ibv_comp_channel *channel, int comp_vector, uint32_t kind)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_priv_cq *cq = NULL;
	uint64_t ring = 0;
	uint32_t i, size;
	int err = 0;

	if (sn_foreign(ctx)) {
		errno = EPERM; /* at once: a thread of the parent may have held the lock at the fork */
		return NULL;
	}
	if (cqe < 1 || cqe > SN_MAX_CQE || comp_vector < 0 || comp_vector >= context->num_comp_vectors ||
		 (channel && channel->context != context))
		err = EINVAL;
	if (!err)
		err = sn_refused(ctx, SN_CREATE_CQ);
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
		set_glance(cq);
		atomic_store(&cq->patience, SN_PATIENCE);
		cq->cq->kind = kind;
		cq->cq->epoch++;
		cq->cq->channel = channel ? sn_container(channel, struct sn_channel, ibv)->number : 0;
		atomic_store(&cq->cq->overrun, 0);
		atomic_store(&cq->cq->armed, SN_ARM_NONE);
		atomic_store(&cq->cq->head, 0);
		cq->cq->head_seen = 0;
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
	return cq;
}

SN_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				       struct ibv_comp_channel *channel, int comp_vector)
{
	struct sn_priv_cq *cq = sn_create_cq(context, cqe, cq_context, channel, comp_vector, 0);
	return cq ? &cq->ibv : NULL;
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
		uint32_t head = atomic_load(&c->head), tail = repaired_tail(ctx->seg, c);
		old = c->ring;
		old_size = c->size;
		err = tail - head > size ? EINVAL : sn_heap_get(ctx, size * sizeof(struct sn_cqe), &fresh);
		if (!err) {
			struct sn_cqe *from = sn_at(ctx->seg, old), *to = sn_at(ctx->seg, fresh);
			for (uint32_t i = head; i != tail; i++)
				to[i & (size - 1)] = from[i & (old_size - 1)];
			c->ring = fresh;
			c->size = size;
			set_glance(cq);
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
	int refused = sn_refused(ctx, SN_DESTROY_CQ);
	if (refused)
		return refused;
	/* every event that was handed out must have been acknowledged */
	pthread_mutex_lock(&ibv->mutex);
	while (ibv->comp_events_completed != cq->events_seen || ibv->async_events_completed != cq->async_seen)
		pthread_cond_wait(&ibv->cond, &ibv->mutex);
	pthread_mutex_unlock(&ibv->mutex);
	pthread_mutex_lock(&ctx->lock);
	sn_spin(&cq->poll_lock);
	sn_cq_purge(ctx, cq, 0);
	sn_unspin(&cq->poll_lock);
	cq->cq->epoch++; /* events still in the FIFO are void */
	sn_heap_put(ctx, cq->cq->ring, cq->cq->size * sizeof(struct sn_cqe));
	ctx->cqs[cq->index] = NULL;
	if (ibv->channel)
		ibv->channel->refcnt--;
	pthread_mutex_unlock(&ctx->lock);
	free(cq);
	sn_object_gone(ctx);
	return 0;
}

/* Into the completion queue `index` of a side. ENOSPC: it overran, and is of no use any more. */
int sn_cq_push(struct sn_ctx *ctx, const struct sn_side *side, uint32_t index, const struct sn_cqe *cqe, bool solicited)
{
	struct sn_cq *cq = sn_cq_at(side->seg, index);
	if (!sn_lock(ctx, &cq->lock)) {
		/* A stopped process sits on it. A lost completion must be heard of. */
		if (!atomic_exchange(&cq->overrun, 1))
			sn_async_raise(ctx, side, IBV_EVENT_CQ_ERR, index, cq->epoch);
		return EBUSY;
	}
	uint32_t tail = repaired_tail(side->seg, cq);
	bool dead = atomic_load_explicit(&cq->overrun, memory_order_relaxed);
	if (tail - cq->head_seen >= cq->size)
		cq->head_seen = atomic_load_explicit(&cq->head, memory_order_acquire);
	if (dead || tail - cq->head_seen >= cq->size) {
		bool lossy = !dead && cq->kind & SN_CQ_LOSSY; /* its program knows that nothing is lost */
		bool first = !lossy && !atomic_exchange(&cq->overrun, 1);
		uint32_t epoch = cq->epoch;
		sn_unlock(&cq->lock);
		if (lossy)
			return 0;
		if (first)
			sn_async_raise(ctx, side, IBV_EVENT_CQ_ERR, index, epoch);
		return ENOSPC;
	}
	struct sn_cqe *e = (struct sn_cqe *)sn_at(side->seg, cq->ring) + (tail & (cq->size - 1));
	memcpy(e, cqe, offsetof(struct sn_cqe, seq));
	if (cq->kind & SN_CQ_STAMPED)
		e->stamp = sn_now();
	atomic_store_explicit(&e->seq, tail + 1, memory_order_release); /* this publishes it */
	atomic_store_explicit(&cq->tail, tail + 1, memory_order_relaxed);
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
	/* cleared before looking: a send that comes to wait meanwhile sets it again */
	atomic_store(&cq->pending, 0);
	atomic_thread_fence(memory_order_seq_cst);
	sn_spin(&cq->poll_lock);
	for (struct sn_priv_qp *qp = cq->senders; qp; qp = qp->next_sender)
		if (sn_qp_busy(qp->qp)) {
			moved |= sn_drive(qp);
			pending |= sn_qp_busy(qp->qp);
		}
	for (struct sn_priv_qp *qp = cq->senders; qp; qp = qp->next_sender)
		if (atomic_load_explicit(&qp->mourning, memory_order_relaxed)) {
			bool still = sn_qp_mourn(qp);
			moved |= !still;
			pending |= still;
		}
	if (pending)
		atomic_store(&cq->pending, 1);
	sn_unspin(&cq->poll_lock);
	return moved;
}

/* Takes the completions of QP number `qpn` out of the queue (of all, with 0), as a NIC's driver does
 * at RESET: their receive entries go back, the room is free. With the poll lock held. */
void sn_cq_purge(struct sn_ctx *ctx, struct sn_priv_cq *cq, uint32_t qpn)
{
	struct sn_cq *c = cq->cq;
	struct sn_cqe *ring = sn_at(ctx->seg, c->ring);
	if (!sn_lock(ctx, &c->lock))
		return; /* they are void all the same, and skipped when they are polled */
	uint32_t head = atomic_load(&c->head), tail = repaired_tail(ctx->seg, c), to = head;
	for (uint32_t i = head; i != tail; i++) {
		struct sn_cqe *e = &ring[i & (c->size - 1)], *d = &ring[to & (c->size - 1)];
		if (!qpn || e->qpn == qpn) {
			if (e->kind & SN_CQE_RECV)
				sn_cq_give_back(ctx, e, NULL);
			continue;
		}
		if (d != e)
			memcpy(d, e, offsetof(struct sn_cqe, seq));
		atomic_store(&d->seq, ++to);
	}
	for (uint32_t i = to; i != tail; i++)
		atomic_store(&ring[i & (c->size - 1)].seq, 0);
	atomic_store(&c->tail, to);
	sn_unlock(&c->lock);
}

/* Does a CQ of this context hold the completion of that posting of a receive entry, not polled yet? */
bool sn_cq_has_receive(struct sn_ctx *ctx, uint32_t index, uint32_t qpn, uint32_t entry, uint32_t serial)
{
	struct sn_cq *c = sn_cq_at(ctx->seg, index);
	bool found = false;
	if (!sn_lock(ctx, &c->lock))
		return false; /* then there may be two, and the second is dropped when it is polled */
	struct sn_cqe *ring = sn_at(ctx->seg, c->ring);
	uint32_t tail = repaired_tail(ctx->seg, c);
	for (uint32_t i = atomic_load(&c->head); i != tail && !found; i++) {
		const struct sn_cqe *e = &ring[i & (c->size - 1)];
		found = e->kind & SN_CQE_RECV && e->qpn == qpn && e->entry == entry && e->serial == serial;
	}
	sn_unlock(&c->lock);
	return found;
}

int sn_req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
	struct sn_priv_cq *cq = sn_container(ibv, struct sn_priv_cq, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	uint32_t was, want = solicited_only ? SN_ARM_SOLICITED : SN_ARM_NEXT;

	if (sn_foreign(ctx))
		return EPERM;
	sn_stage_look(ctx);
	was = atomic_load(&cq->cq->armed);
	while (was != SN_ARM_NEXT && !atomic_compare_exchange_weak(&cq->cq->armed, &was, want))
		; /* "next" is the wider request and stays */
	atomic_thread_fence(memory_order_seq_cst);
	if (atomic_load(&cq->held_back) && atomic_exchange(&cq->cq->armed, SN_ARM_NONE) != SN_ARM_NONE) {
		struct sn_side own = { ctx->seg, NULL, NULL };
		sn_channel_notify(ctx, &own, cq->cq->channel, cq->index, cq->cq->epoch);
	}
	if (atomic_load(&cq->pending)) {
		sn_cq_kick(cq);
		sn_spin(&cq->poll_lock);
		for (struct sn_priv_qp *qp = cq->senders; qp; qp = qp->next_sender)
			if (sn_qp_busy(qp->qp) || atomic_load(&qp->mourning))
				sn_channel_watch(qp);
		sn_unspin(&cq->poll_lock);
	}
	if (sn_faulty() && ibv->channel) {
		pthread_mutex_lock(&ctx->lock);
		sn_fault_before_sleep(sn_container(ibv->channel, struct sn_channel, ibv));
		pthread_mutex_unlock(&ctx->lock);
	}
	return 0;
}
