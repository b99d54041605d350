/* Queue pairs: create, modify, query, destroy. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "job.h"

static uint32_t swqe_data(uint32_t max_sge)
{
	return (uint32_t)((sizeof(struct sn_swqe) + max_sge * sizeof(struct sn_sge) + 63) & ~63UL);
}

static struct sn_priv_cq *priv_cq(struct ibv_cq *cq)
{
	return sn_container(cq, struct sn_priv_cq, ibv);
}

static int check_init(struct sn_ctx *ctx, struct ibv_pd *pd, const struct ibv_qp_init_attr *a)
{
	if (sn_foreign(ctx))
		return EPERM;
	if (a->qp_type != IBV_QPT_RC && a->qp_type != IBV_QPT_UC && a->qp_type != IBV_QPT_UD)
		return EOPNOTSUPP;
	if (!a->send_cq || !a->recv_cq || a->send_cq->context != pd->context || a->recv_cq->context != pd->context ||
	    (a->srq && a->srq->context != pd->context))
		return EINVAL;
	if (a->cap.max_send_wr > SN_MAX_WR || a->cap.max_recv_wr > SN_MAX_WR || a->cap.max_send_sge > SN_MAX_SGE ||
	    a->cap.max_recv_sge > SN_MAX_SGE || a->cap.max_inline_data > SN_MAX_INLINE)
		return EINVAL;
	return 0;
}

/* Where the rings lie in the heap. Sizes are at least one entry, so that no ring is a special case. */
static uint64_t layout(struct sn_priv_qp *priv, uint32_t *sq_size, uint32_t *rq_size, uint32_t *stride)
{
	const struct ibv_qp_cap *cap = &priv->init.cap;
	uint32_t inl = cap->max_inline_data > SN_SMALL ? cap->max_inline_data : SN_SMALL;
	*sq_size = sn_round_pow2(cap->max_send_wr ? cap->max_send_wr : 1);
	*rq_size = priv->init.srq || !cap->max_recv_wr ? 0 : sn_round_pow2(cap->max_recv_wr);
	*stride = swqe_data(cap->max_send_sge) + ((inl + 63) & ~63U);
	return (uint64_t)*sq_size * *stride + sn_rq_bytes(*rq_size, cap->max_recv_sge);
}

/* Empty queues, as after creation and RESET. */
static int empty_queues(struct sn_priv_qp *priv)
{
	struct sn_qp *qp = priv->qp;
	atomic_store(&qp->sq.head, 0);
	atomic_store(&qp->sq.tail, 0);
	atomic_store(&qp->sq.wait, SN_WAIT_NOTHING);
	atomic_store(&qp->sq.deadline, 0);
	atomic_store(&qp->sq.completing, 0);
	atomic_store(&qp->sq.help.ticket, 0);
	qp->sq.polled = qp->sq.staged_to = 0;
	atomic_store(&qp->sq.reported, 0);
	atomic_store(&priv->reaped, 0);
	atomic_store(&priv->stuck_since, 0);
	atomic_store(&priv->mourning, false);
	atomic_store(&priv->mourned, false);
	priv->mourn_at = 0;
	qp->sq.peer_epoch = 0;
	atomic_store(&qp->comm_est, 0);
	atomic_store(&qp->lazy_made, 0);
	atomic_store(&qp->lazy_polled, 0);
	qp->lazy_seen = 0;
	qp->sq.last_key = 0;
	sn_rq_empty(priv->ctx->seg, &qp->rq);
	atomic_store(&priv->given_back, 0);
	atomic_store(&priv->without_entry, 0);
	return sn_free_list_init(&priv->free, qp->rq.size, qp->rq.size);
}

static int place_in_table(struct sn_ctx *ctx, struct sn_priv_qp *priv)
{
	uint32_t sq_size, rq_size, stride, i, limit = atomic_load(&ctx->seg->qp_limit);
	uint64_t len = layout(priv, &sq_size, &rq_size, &stride), at;
	int err;

	for (i = 0; i < limit && (ctx->qps[(ctx->next_qp + i) % limit] || (ctx->next_qp + i) % limit < 2); i++)
		;
	if (i < limit && limit >= 64)
		i = (ctx->next_qp + i) % limit;
	else if (limit < SN_QPS) /* numbers are not used again soon: the table first grows */
		i = limit < 2 ? 2 : limit;
	else
		return ENOMEM;
	if ((err = sn_seg_grow(ctx, &ctx->seg->qp_limit, SN_QP_TABLE, sizeof(struct sn_qp), i + 1)) ||
	    (err = sn_heap_get(ctx, len, &at)))
		return err;
	struct sn_qp *qp = priv->qp = sn_qp_at(ctx->seg, i);
	if (!sn_lock(ctx, &qp->sq.exec)) { /* the peer of the one that was here before may look in once more */
		sn_heap_put(ctx, at, len);
		return EBUSY;
	}
	priv->index = i;
	priv->heap = at;
	priv->heap_len = len;
	ctx->next_qp = i + 1;

	const struct ibv_qp_init_attr *a = &priv->init;
	atomic_store(&qp->state, IBV_QPS_RESET);
	if (!qp->qpn)
		qp->qpn = (ctx->id & (SN_SLOTS - 1)) << SN_SLOT_BITS | i;
	qp->type = a->qp_type;
	qp->pd = priv->ibv.pd->handle;
	qp->send_cq = priv_cq(a->send_cq)->index;
	qp->recv_cq = priv_cq(a->recv_cq)->index;
	qp->srq = a->srq ? (int32_t)sn_container(a->srq, struct sn_priv_srq, ibv)->index : -1;
	qp->dest_qpn = 0;
	qp->sq_sig_all = a->sq_sig_all != 0;
	qp->sq.size = sq_size;
	qp->sq.stride = stride;
	qp->sq.max_sge = a->cap.max_send_sge;
	qp->sq.max_inline = a->cap.max_inline_data;
	qp->sq.wqes = at;
	for (uint32_t pos = 0; pos < sq_size; pos++)
		sn_swqe_at(ctx->seg, &qp->sq, pos)->data = swqe_data(a->cap.max_send_sge);
	sn_rq_init(ctx->seg, &qp->rq, at + (uint64_t)sq_size * stride, rq_size, a->cap.max_recv_sge,
		   a->qp_type != IBV_QPT_UD);
	if ((err = empty_queues(priv))) {
		atomic_store(&qp->state, SN_QP_FREE);
		sn_heap_put(ctx, at, len);
	} else {
		ctx->qps[i] = priv;
	}
	sn_unlock_mine(ctx, &qp->sq.exec);
	return err;
}

static void enlist(struct sn_priv_qp *priv)
{
	struct sn_priv_cq *cq = priv_cq(priv->init.send_cq);
	sn_spin(&cq->poll_lock);
	priv->next_sender = cq->senders;
	cq->senders = priv;
	sn_unspin(&cq->poll_lock);
}

static void delist(struct sn_priv_qp *priv)
{
	struct sn_priv_cq *cq = priv_cq(priv->init.send_cq);
	sn_spin(&cq->poll_lock);
	for (struct sn_priv_qp **p = &cq->senders; *p; p = &(*p)->next_sender)
		if (*p == priv) {
			*p = priv->next_sender;
			break;
		}
	sn_unspin(&cq->poll_lock);
}

SN_EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct sn_ctx *ctx = sn_ctx_of(pd->context);
	struct sn_priv_qp *priv = NULL;
	int err = check_init(ctx, pd, attr);
	if (!err)
		err = sn_refused(ctx, SN_CREATE_QP);

	if (!err && !(priv = calloc(1, sizeof(*priv))))
		err = ENOMEM;
	if (!err) {
		priv->ctx = ctx;
		priv->init = *attr;
		priv->ibv.pd = pd;
		pthread_mutex_lock(&ctx->lock);
		err = place_in_table(ctx, priv);
		pthread_mutex_unlock(&ctx->lock);
	}
	if (err) {
		if (priv)
			free(priv->free.item);
		free(priv);
		errno = err;
		return NULL;
	}
	if (attr->srq)
		priv->init.cap.max_recv_wr = priv->init.cap.max_recv_sge = 0;
	else if (priv->init.cap.max_recv_wr)
		priv->init.cap.max_recv_wr = priv->qp->rq.size;
	attr->cap = priv->init.cap;
	priv->ibv.context = pd->context;
	priv->ibv.qp_context = attr->qp_context;
	priv->ibv.send_cq = attr->send_cq;
	priv->ibv.recv_cq = attr->recv_cq;
	priv->ibv.srq = attr->srq;
	priv->ibv.handle = priv->index;
	priv->ibv.qp_num = priv->qp->qpn;
	priv->ibv.state = IBV_QPS_RESET;
	priv->ibv.qp_type = attr->qp_type;
	pthread_mutex_init(&priv->ibv.mutex, NULL);
	pthread_cond_init(&priv->ibv.cond, NULL);
	sn_pd_get(pd);
	atomic_fetch_add(&priv_cq(attr->send_cq)->users, 1);
	atomic_fetch_add(&priv_cq(attr->recv_cq)->users, 1);
	if (attr->srq)
		atomic_fetch_add(&sn_container(attr->srq, struct sn_priv_srq, ibv)->users, 1);
	enlist(priv);
	return &priv->ibv;
}

/* Empties the queues of a QP that nobody touches any more; its completions are taken back. */
static void make_empty(struct sn_priv_qp *priv, uint32_t state)
{
	struct sn_ctx *ctx = priv->ctx;
	struct sn_priv_cq *cq[2] = { priv_cq(priv->init.send_cq), priv_cq(priv->init.recv_cq) };
	int n = cq[0] == cq[1] ? 1 : 2;

	if (n == 2 && cq[0] > cq[1]) { /* one order for everybody */
		struct sn_priv_cq *first = cq[1];
		cq[1] = cq[0];
		cq[0] = first;
	}
	for (int i = 0; i < n; i++)
		sn_spin(&cq[i]->poll_lock); /* no poll may be in the middle of an old completion */
	for (int i = 0; i < n; i++)
		sn_cq_purge(ctx, cq[i], priv->qp->qpn);
	sn_srq_reclaim(priv);
	atomic_fetch_add(&priv->qp->epoch, 1);
	empty_queues(priv);
	atomic_store(&priv->qp->state, state);
	for (int i = n; i-- > 0;)
		sn_unspin(&cq[i]->poll_lock);
}

/* Nobody executes, receives or copies for this QP any more, and its completions are void.
 * EBUSY: a peer is stopped in the middle of a copy; the state is left so that nothing new starts. */
static int quiesce(struct sn_priv_qp *priv, uint32_t state)
{
	struct sn_ctx *ctx = priv->ctx;
	struct sn_qp *qp = priv->qp;
	struct sn_side own = sn_own_side(priv);
	struct sn_rq *rq = sn_rq_of(ctx->seg, qp);

	priv->dirty = true;
	if (!sn_lock(ctx, &qp->sq.exec))
		return EBUSY;
	atomic_store(&qp->state, IBV_QPS_RESET);
	if (!sn_lock(ctx, &rq->lock)) { /* whoever took a receive before saw the old state */
		sn_unlock_mine(ctx, &qp->sq.exec);
		return EBUSY;
	}
	sn_unlock(&rq->lock);
	if (sn_wait_claims(ctx, qp->qpn, 0) && sn_place_lazy(ctx, &own, NULL)) {
		make_empty(priv, state);
		priv->dirty = false;
	}
	sn_unlock_mine(ctx, &qp->sq.exec);
	return priv->dirty ? EBUSY : 0;
}

/* The device closes over the program's head: no peer touches its memory from here on. */
int sn_qp_abandon(struct sn_priv_qp *priv)
{
	int err = quiesce(priv, IBV_QPS_RESET);
	sn_drive_peer(priv);
	return err;
}

static int to_error(struct sn_priv_qp *priv)
{
	struct sn_side own = sn_own_side(priv);
	bool changed = sn_qp_set_error(&own);
	/* From the return on nobody reads or writes our memory through this QP. And who has a receive in
	 * hands completes it before the ones behind it are flushed. */
	bool quiet = sn_wait_claims(priv->ctx, priv->qp->qpn, 0);
	if (changed || priv->qp->srq < 0)
		sn_rq_flush(priv->ctx, &own);
	if (!quiet)
		return EBUSY;
	sn_rq_flush_taken(priv);
	return 0;
}

static int check_values(const struct ibv_qp_attr *a, int mask)
{
	if ((mask & IBV_QP_PORT && a->port_num != 1) || (mask & IBV_QP_PKEY_INDEX && a->pkey_index != 0) ||
	    (mask & IBV_QP_PATH_MTU && (a->path_mtu < IBV_MTU_256 || a->path_mtu > IBV_MTU_4096)) ||
	    (mask & IBV_QP_DEST_QPN && a->dest_qp_num > 0xffffff) ||
	    (mask & IBV_QP_MAX_QP_RD_ATOMIC && a->max_rd_atomic > SN_MAX_RD_ATOM) ||
	    (mask & IBV_QP_MAX_DEST_RD_ATOMIC && a->max_dest_rd_atomic > SN_MAX_RD_ATOM) ||
	    (mask & IBV_QP_TIMEOUT && a->timeout > 31) || (mask & IBV_QP_RETRY_CNT && a->retry_cnt > 7) ||
	    (mask & IBV_QP_RNR_RETRY && a->rnr_retry > 7) || (mask & IBV_QP_MIN_RNR_TIMER && a->min_rnr_timer > 31) ||
	    (mask & IBV_QP_AV &&
	     (!a->ah_attr.is_global || a->ah_attr.grh.sgid_index >= SN_GIDS || a->ah_attr.port_num > 1)))
		return EINVAL;
	return 0;
}

static void apply(struct sn_priv_qp *priv, const struct ibv_qp_attr *a, int mask)
{
	struct sn_qp *qp = priv->qp;
	struct ibv_qp_attr *k = &priv->attr;
#define TAKE(bit, field) \
	if (mask & (bit)) \
	k->field = a->field
	TAKE(IBV_QP_ACCESS_FLAGS, qp_access_flags);
	TAKE(IBV_QP_PKEY_INDEX, pkey_index);
	TAKE(IBV_QP_PORT, port_num);
	TAKE(IBV_QP_QKEY, qkey);
	TAKE(IBV_QP_AV, ah_attr);
	TAKE(IBV_QP_PATH_MTU, path_mtu);
	TAKE(IBV_QP_TIMEOUT, timeout);
	TAKE(IBV_QP_RETRY_CNT, retry_cnt);
	TAKE(IBV_QP_RNR_RETRY, rnr_retry);
	TAKE(IBV_QP_RQ_PSN, rq_psn);
	TAKE(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
	TAKE(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
	TAKE(IBV_QP_SQ_PSN, sq_psn);
	TAKE(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
	TAKE(IBV_QP_DEST_QPN, dest_qp_num);
#undef TAKE
	atomic_store(&qp->access, k->qp_access_flags);
	qp->qkey = k->qkey;
	qp->dest_qpn = sn_reachable(&k->ah_attr.grh.dgid) ? k->dest_qp_num : 0; /* 0 is nobody's */
	qp->timeout = k->timeout;
	qp->retry_cnt = k->retry_cnt;
	qp->rnr_retry = k->rnr_retry;
	qp->min_rnr_timer = k->min_rnr_timer;
	qp->max_rd_atomic = k->max_rd_atomic;
	qp->max_dest_rd_atomic = k->max_dest_rd_atomic;
	qp->path_mtu = k->path_mtu;
}

/* The program wants to hear when the send queue stands still: when whoever executes it has let go. */
static void drained(struct sn_priv_qp *priv)
{
	struct sn_side own = sn_own_side(priv);
	if (!sn_lock(priv->ctx, &priv->qp->sq.exec))
		return; /* a stopped peer holds it: it does not */
	sn_unlock_mine(priv->ctx, &priv->qp->sq.exec);
	sn_async_raise(priv->ctx, &own, IBV_EVENT_SQ_DRAINED, priv->index, atomic_load(&priv->qp->epoch));
}

static int modify(struct sn_priv_qp *priv, const struct ibv_qp_attr *a, int mask)
{
	struct sn_qp *qp = priv->qp;
	enum ibv_qp_state from = atomic_load(&qp->state), to = mask & IBV_QP_STATE ? a->qp_state : from;
	struct sn_side peer;
	int err;

	if (mask & IBV_QP_CUR_STATE && a->cur_qp_state != from)
		return EINVAL;
	if ((err = sn_qp_check_attr(qp->type, from, to, mask)) || (err = check_values(a, mask)))
		return err;
	if (to == IBV_QPS_RESET)
		return from == IBV_QPS_RESET && !priv->dirty ? 0 : quiesce(priv, IBV_QPS_RESET);
	if (priv->dirty)
		return EBUSY;
	if (to == IBV_QPS_ERR)
		return to_error(priv);
	if (to == IBV_QPS_RTR) {
		/* May we reach the peer's memory at all? Better found now than at the first message. */
		struct sn_peer *_Atomic found = NULL;
		bool known = qp->type != IBV_QPT_UD && sn_side_of(priv->ctx, a->dest_qp_num, &found, &peer);
		if ((err = sn_stage_connect(priv->ctx, known ? &peer : NULL)))
			return err;
		if (known && peer.peer)
			sn_channel_connected(priv, peer.peer);
		if (qp->type != IBV_QPT_UD)
			priv->peer = known ? atomic_load(&found) : NULL; /* this one, whoever has its slot later */
	}
	apply(priv, a, mask);
	bool changed = atomic_compare_exchange_strong(&qp->state, &(uint32_t){ from }, to); /* an error meanwhile wins */
	if (changed && to == IBV_QPS_SQD && mask & IBV_QP_EN_SQD_ASYNC_NOTIFY && a->en_sqd_async_notify)
		drained(priv);
	return 0;
}

SN_EXPORT int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
	struct sn_priv_qp *priv = sn_container(ibv, struct sn_priv_qp, ibv);
	int err;
	if (sn_foreign(priv->ctx))
		return EPERM;
	if ((err = sn_refused(priv->ctx, SN_MODIFY_QP)))
		return err;
	pthread_mutex_lock(&priv->ctx->lock);
	err = modify(priv, attr, mask);
	pthread_mutex_unlock(&priv->ctx->lock);
	ibv->state = atomic_load(&priv->qp->state);
	if (ibv->state != IBV_QPS_RESET && ibv->state != IBV_QPS_INIT)
		sn_drive(priv); /* flush, or go on after SQD */
	if (ibv->state != IBV_QPS_INIT)
		sn_drive_peer(priv); /* its sends waited for this QP, or have nobody to wait for now */
	return err;
}

SN_EXPORT int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	struct sn_priv_qp *priv = sn_container(ibv, struct sn_priv_qp, ibv);
	(void)mask;
	if (sn_foreign(priv->ctx))
		return EPERM;
	*attr = priv->attr;
	attr->qp_state = attr->cur_qp_state = ibv->state = atomic_load(&priv->qp->state);
	attr->cap = priv->init.cap;
	attr->path_mig_state = IBV_MIG_MIGRATED;
	*init = priv->init;
	return 0;
}

SN_EXPORT int ibv_destroy_qp(struct ibv_qp *ibv)
{
	struct sn_priv_qp *priv = sn_container(ibv, struct sn_priv_qp, ibv);
	struct sn_ctx *ctx = priv->ctx;
	int err;
	if (sn_foreign(ctx))
		return 0;
	if ((err = sn_refused(ctx, SN_DESTROY_QP)))
		return err;
	pthread_mutex_lock(&ctx->lock);
	err = sn_mcast_has(ctx, ibv->qp_num) ? EBUSY : 0;
	if (!err) {
		priv->destroying = true;
		err = quiesce(priv, SN_QP_FREE);
	}
	pthread_mutex_unlock(&ctx->lock);
	if (err)
		return err;
	sn_mw_qp_gone(ctx, ibv->qp_num);
	sn_drive_peer(priv); /* what it still sends has nobody to wait for */
	pthread_mutex_lock(&ibv->mutex);
	while (ibv->events_completed != priv->async_seen)
		pthread_cond_wait(&ibv->cond, &ibv->mutex);
	pthread_mutex_unlock(&ibv->mutex);
	delist(priv);
	pthread_mutex_lock(&ctx->lock);
	struct sn_priv_cq *recv = priv_cq(priv->init.recv_cq);
	sn_spin(&recv->poll_lock); /* a poll in another thread looks QPs up by number */
	ctx->qps[priv->index] = NULL;
	sn_unspin(&recv->poll_lock);
	sn_heap_put(ctx, priv->heap, priv->heap_len);
	pthread_mutex_unlock(&ctx->lock);
	sn_pd_put(priv->ibv.pd);
	atomic_fetch_sub(&priv_cq(priv->init.send_cq)->users, 1);
	atomic_fetch_sub(&recv->users, 1);
	if (priv->init.srq)
		atomic_fetch_sub(&sn_container(priv->init.srq, struct sn_priv_srq, ibv)->users, 1);
	free(priv->free.item);
	free(priv);
	return 0;
}
