/* Shared receive queues. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "softnic.h"

SN_EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
	struct sn_ctx *ctx = sn_ctx_of(pd->context);
	struct sn_priv_srq *srq = NULL;
	uint32_t i = 0, size = 0, sge = init->attr.max_sge;
	uint64_t at = 0, len = 0;
	int err = 0;

	if (sn_foreign(ctx)) {
		errno = EPERM; /* at once: a thread of the parent may have held the lock at the fork */
		return NULL;
	}
	if (!init->attr.max_wr || init->attr.max_wr > SN_MAX_WR || sge > SN_MAX_SGE)
		err = EINVAL;
	else if ((err = sn_refused(ctx, SN_CREATE_SRQ)))
		;
	else if (!(srq = calloc(1, sizeof(*srq))))
		err = ENOMEM;
	if (!err) {
		size = sn_round_pow2(init->attr.max_wr);
		len = sn_rq_bytes(size, sge);
		err = sn_free_list_init(&srq->free, size, size);
		if (!err && !(srq->given = calloc(size, sizeof(*srq->given))))
			err = ENOMEM;
	}
	pthread_mutex_lock(&ctx->lock);
	if (!err) {
		for (i = 0; i < SN_SRQS && ctx->srqs[i]; i++)
			;
		err = i == SN_SRQS ? ENOMEM : 0;
	}
	if (!err)
		err = sn_seg_grow(ctx, &ctx->seg->srq_limit, SN_SRQ_TABLE, sizeof(struct sn_srq), i + 1);
	if (!err)
		err = sn_heap_get(ctx, len, &at);
	if (!err) {
		srq->index = i;
		srq->heap = at;
		srq->heap_len = len;
		srq->srq = sn_srq_at(ctx->seg, i);
		srq->srq->pd = pd->handle;
		atomic_store(&srq->srq->limit, init->attr.srq_limit);
		for (uint32_t w = 0; w < SN_QPS / 64; w++)
			atomic_store(&srq->srq->waiters[w], 0);
		sn_rq_init(ctx->seg, &srq->srq->rq, at, size, sge, false);
		for (uint32_t w = 0; w < size; w++)
			atomic_store(&srq->given[w], atomic_load(&sn_rwqe_at(ctx->seg, &srq->srq->rq, w)->serial));
		ctx->srqs[i] = srq;
	}
	pthread_mutex_unlock(&ctx->lock);
	if (err) {
		if (srq) {
			free(srq->free.item);
			free(srq->given);
		}
		free(srq);
		errno = err;
		return NULL;
	}
	init->attr.max_wr = size;
	srq->ibv.context = pd->context;
	srq->ibv.srq_context = init->srq_context;
	srq->ibv.pd = pd;
	srq->ibv.handle = i;
	pthread_mutex_init(&srq->ibv.mutex, NULL);
	pthread_cond_init(&srq->ibv.cond, NULL);
	sn_pd_get(pd);
	return &srq->ibv;
}

SN_EXPORT int ibv_modify_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr, int mask)
{
	struct sn_priv_srq *srq = sn_container(ibv, struct sn_priv_srq, ibv);
	if (sn_foreign(sn_ctx_of(ibv->context)))
		return EPERM;
	if (mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT))
		return EINVAL;
	if (mask & IBV_SRQ_MAX_WR)
		return EOPNOTSUPP; /* not advertised: IBV_DEVICE_SRQ_RESIZE is clear */
	if (mask & IBV_SRQ_LIMIT) {
		if (attr->srq_limit > srq->srq->rq.size)
			return EINVAL;
		atomic_store(&srq->srq->limit, attr->srq_limit);
	}
	return 0;
}

SN_EXPORT int ibv_query_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr)
{
	struct sn_priv_srq *srq = sn_container(ibv, struct sn_priv_srq, ibv);
	if (sn_foreign(sn_ctx_of(ibv->context)))
		return EPERM;
	attr->max_wr = srq->srq->rq.size;
	attr->max_sge = srq->srq->rq.max_sge;
	attr->srq_limit = atomic_load(&srq->srq->limit);
	return 0;
}

SN_EXPORT int ibv_destroy_srq(struct ibv_srq *ibv)
{
	struct sn_priv_srq *srq = sn_container(ibv, struct sn_priv_srq, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	if (sn_foreign(ctx))
		return 0;
	if (atomic_load(&srq->users))
		return EBUSY;
	int refused = sn_refused(ctx, SN_DESTROY_SRQ);
	if (refused)
		return refused;
	pthread_mutex_lock(&ibv->mutex);
	while (ibv->events_completed != srq->async_seen)
		pthread_cond_wait(&ibv->cond, &ibv->mutex);
	pthread_mutex_unlock(&ibv->mutex);
	pthread_mutex_lock(&ctx->lock);
	atomic_fetch_add(&srq->srq->epoch, 1); /* completions that are still to be polled give nothing back */
	ctx->srqs[srq->index] = NULL;
	for (uint32_t i = 0; i < SN_CQS && i < atomic_load(&ctx->seg->cq_limit); i++) {
		struct sn_priv_cq *cq = ctx->cqs[i]; /* a poll may be about to give an entry back to it */
		if (cq) {
			sn_spin(&cq->poll_lock);
			sn_unspin(&cq->poll_lock);
		}
	}
	sn_heap_put(ctx, srq->heap, srq->heap_len);
	pthread_mutex_unlock(&ctx->lock);
	sn_pd_put(ibv->pd);
	free(srq->free.item);
	free(srq->given);
	free(srq);
	return 0;
}
