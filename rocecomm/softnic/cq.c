/* Completion queues. Producers of several processes push under a lock; the owner consumes without
 * it: an entry is valid once its own sequence number says so, which costs one cache line. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>

#include "softnic.h"

/* Empty polls before the CPU is offered to others, about 5 ns each. Who then waited found that others
 * want it, most likely our peer, and offers it sooner; who came back at once need not have asked. */
#define PATIENCE 300u
#define MIN_PATIENCE 50u
#define MAX_PATIENCE 4096u
#define WAITED_NS 1000u
#define KICK_EVERY 8u

/* Place and size of the ring in one word, and a count of its changes: an empty poll looks without a
 * lock, and looks again if the ring was another one meanwhile. */
static void set_glance(struct sn_priv_cq *cq)
{
	uint64_t change = (atomic_load_explicit(&cq->glance, memory_order_relaxed) >> 38) + 1;
	atomic_store_explicit(&cq->glance, change << 38 | cq->cq->ring << 8 | (uint64_t)__builtin_ctz(cq->cq->size),
			      memory_order_release);
}

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
		atomic_store(&cq->patience, PATIENCE);
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

/* With the producers' lock held: one that died may have published an entry and not counted it. */
static uint32_t repaired_tail(struct sn_seg *seg, struct sn_cq *cq)
{
	uint32_t tail = atomic_load_explicit(&cq->tail, memory_order_relaxed);
	struct sn_cqe *ring = sn_at(seg, cq->ring);
	if (atomic_load_explicit(&ring[tail & (cq->size - 1)].seq, memory_order_relaxed) == tail + 1)
		atomic_store_explicit(&cq->tail, ++tail, memory_order_relaxed);
	return tail;
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

/* The receive entry of a completion goes back to the program. False: it was given back before, the
 * completion is a duplicate (its producer died or was stopped between two steps). */
static bool give_back(struct sn_ctx *ctx, const struct sn_cqe *e, struct sn_priv_qp *qp)
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
	struct sn_rslot *slot = sn_rslot_at(ctx->seg, rq, e->entry);
	uint32_t state = atomic_load_explicit(&slot->state, memory_order_relaxed);
	if (w->serial != e->serial || state == SN_RWQE_FREE)
		return false;
	if (rq->ordered) { /* of one QP, so nobody else gives it back: the poll lock is held */
		uint32_t count = atomic_load_explicit(&qp->given_back, memory_order_relaxed);
		atomic_store_explicit(&slot->state, SN_RWQE_FREE, memory_order_release);
		atomic_store_explicit(&qp->given_back, count + 1, memory_order_release);
		return true;
	}
	if (!atomic_compare_exchange_strong(&slot->state, &state, SN_RWQE_FREE))
		return false;
	sn_free_list_put(srq ? &srq->free : &qp->free, e->entry);
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
	if (valid && e->kind & SN_CQE_LAZY) {
		struct sn_rq *rq = sn_rq_of(ctx->seg, qp);
		sn_prefetch_write(sn_rslot_at(ctx->seg, rq, e->entry));
		sn_prefetch_write(sn_rwqe_at(ctx->seg, rq, e->entry)); /* it is posted anew soon */
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
		else if (!give_back(ctx, e, valid ? priv : NULL))
			return SKIP;
	} else if (valid) {
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
				give_back(ctx, e, NULL);
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
