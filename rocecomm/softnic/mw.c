/* Memory windows: a key of their own for a part of a region, given out and taken back by work
 * requests. A window is an entry of the table of regions: bound while its key is set, then a copy of
 * the region's entry cut to size. Only its owner binds and invalidates it, except that a peer's send
 * with invalidate takes back a type 2 window of the queue pair that it arrives at. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "job.h"

#define REMOTE (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

struct sn_priv_mw {
	struct ibv_mw ibv;
};

struct ibv_mw *sn_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct sn_ctx *ctx = sn_ctx_of(pd->context);
	struct sn_priv_mw *mw = NULL;
	uint32_t index = 0;
	int err = sn_foreign(ctx) ? EPERM : type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2 ? EINVAL : 0;

	if (!err && !(mw = calloc(1, sizeof(*mw))))
		err = ENOMEM;
	if (!err) {
		pthread_mutex_lock(&ctx->lock);
		err = sn_mr_take(ctx, &index);
		if (!err) {
			struct sn_mr *e = sn_mr_at(ctx->seg, index);
			/* the lowest byte is the program's (type 2) or counts binds (type 1) */
			e->tag = (((e->tag ? e->tag : ctx->key_start) | 0xff) + 1) & 0xff00;
			if (!e->tag)
				e->tag = 0x100;
			e->pd = pd->handle;
			e->pool = 0;
			e->parent = 0;
			e->window = type;
			mw->ibv.rkey = index << 16 | e->tag;
			atomic_fetch_add(&ctx->windows, 1);
		}
		pthread_mutex_unlock(&ctx->lock);
	}
	if (err) {
		free(mw);
		errno = err;
		return NULL;
	}
	mw->ibv.context = pd->context;
	mw->ibv.pd = pd;
	mw->ibv.handle = index;
	mw->ibv.type = type;
	sn_pd_get(pd);
	return &mw->ibv;
}

/* The key is void. Nobody gets in through it when this returns; false: a stopped peer is still inside,
 * under a claim that names the region, too. */
static bool unbind(struct sn_ctx *ctx, struct sn_mr *e)
{
	uint32_t key = atomic_exchange(&e->key, 0);
	return !key || sn_wait_claims(ctx, 0, key);
}

int sn_dealloc_mw(struct ibv_mw *ibv)
{
	struct sn_priv_mw *mw = sn_container(ibv, struct sn_priv_mw, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	struct sn_mr *e = sn_mr_at(ctx->seg, ibv->handle);

	if (sn_foreign(ctx))
		return 0;
	pthread_mutex_lock(&ctx->lock);
	sn_spin(&ctx->window_lock);
	bool gone = unbind(ctx, e);
	if (gone) {
		e->window = 0;
		e->parent = 0;
		e->tag |= 0xff; /* the next user of the entry gets keys that were never this one's */
		e->taken = 0;
		atomic_fetch_sub(&ctx->windows, 1);
	}
	sn_unspin(&ctx->window_lock);
	pthread_mutex_unlock(&ctx->lock);
	if (!gone)
		return EBUSY;
	sn_pd_put(ibv->pd);
	free(mw);
	return 0;
}

/* Type 1: the verb posts a request, the key it will have is known at once. */
int sn_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	uint32_t rkey = ibv_inc_rkey(mw->rkey);
	struct ibv_send_wr wr = { .wr_id = bind->wr_id, .opcode = IBV_WR_BIND_MW, .send_flags = bind->send_flags,
				  .bind_mw = { .mw = mw, .rkey = rkey, .bind_info = bind->bind_info } }, *bad;
	int err;

	if (bind->bind_info.mw_access_flags & IBV_ACCESS_ZERO_BASED || qp->pd->handle != mw->pd->handle)
		return EINVAL; /* o10-36.2.2: a type 1 window has the region's addresses */
	err = sn_post_send(qp, &wr, &bad);
	if (!err)
		mw->rkey = rkey;
	return err;
}

/* What the entry of the send queue says of a bind. */
void sn_mw_describe(struct sn_swqe *w, const struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
	w->rkey = rkey;
	w->remote_addr = info->addr;
	w->compare_add = info->mr ? info->length : 0;
	w->swap = info->mw_access_flags;
	w->ud_qpn = mw->handle;
	w->ud_qkey = info->mr ? info->mr->lkey : 0;
}

/* ---- execution, in the owner's process ---------------------------------------------------- */

static bool cut_to_size(struct job *j, struct sn_mr *e, const struct sn_mr *mr)
{
	struct sn_swqe *w = j->w;
	uint64_t addr = w->remote_addr, length = w->compare_add;
	if (mr->window || mr->pd != e->pd || !(mr->access & IBV_ACCESS_MW_BIND) || mr->access & IBV_ACCESS_ZERO_BASED)
		return false;
	if (w->swap & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) && !(mr->access & IBV_ACCESS_LOCAL_WRITE))
		return false;
	if (addr < mr->iova || addr - mr->iova > mr->length || length > mr->length - (addr - mr->iova))
		return false;
	e->access = w->swap & REMOTE;
	e->iova = w->swap & IBV_ACCESS_ZERO_BASED ? 0 : addr;
	e->length = length;
	e->host = mr->host + (addr - mr->iova);
	e->pool = mr->pool;
	e->pool_serial = mr->pool_serial;
	e->pool_offset = mr->pool_offset + (addr - mr->iova);
	e->parent = w->ud_qkey;
	e->qpn = j->r->qp->qpn;
	return true;
}

static bool bind(struct job *j)
{
	struct sn_ctx *ctx = j->ctx;
	struct sn_swqe *w = j->w;
	uint32_t index = w->ud_qpn, parent = w->ud_qkey >> 16, limit = atomic_load(&ctx->seg->mr_limit);
	struct sn_mr *e = sn_mr_at(ctx->seg, index), *mr = sn_mr_at(ctx->seg, parent);

	if (index >= limit || !e->window || e->pd != j->r->qp->pd || w->rkey >> 16 != index ||
	    (w->rkey & 0xff00) != (e->tag & 0xff00))
		return false;
	if (e->window == IBV_MW_TYPE_2 && (atomic_load(&e->key) || !w->compare_add))
		return false; /* bound already; and it is not unbound in this way */
	if (!unbind(ctx, e))
		return false;
	if (!w->compare_add)
		return true; /* a type 1 window is taken back by binding it to nothing */
	sn_claim_key(j->claim, 0, w->ud_qkey); /* dereg_mr waits for us, or we see the key gone */
	if (parent >= limit || !w->ud_qkey || atomic_load(&mr->key) != w->ud_qkey || !cut_to_size(j, e, mr))
		return false;
	atomic_store(&e->key, w->rkey);
	return true;
}

static bool invalidate(struct job *j)
{
	struct sn_ctx *ctx = j->ctx;
	uint32_t key = j->w->imm, index = key >> 16;
	if (!key || index >= atomic_load(&ctx->seg->mr_limit))
		return false;
	struct sn_mr *e = sn_mr_at(ctx->seg, index);
	return atomic_load(&e->key) == key && e->window == IBV_MW_TYPE_2 && e->qpn == j->r->qp->qpn && unbind(ctx, e);
}

enum ibv_wc_status sn_mw_execute(struct job *j)
{
	bool ok, binds = j->w->opcode == IBV_WR_BIND_MW;
	sn_spin(&j->ctx->window_lock); /* one at a time: dealloc_mw, and other queues of this context */
	ok = binds ? bind(j) : invalidate(j);
	sn_unspin(&j->ctx->window_lock);
	return ok ? IBV_WC_SUCCESS : binds ? IBV_WC_MW_BIND_ERR : IBV_WC_LOC_QP_OP_ERR;
}

/* A send with invalidate has arrived at T. Nobody is inside: whoever gets in through a type 2 window
 * comes over this queue pair, and we hold the queue that it comes from. */
bool sn_mw_invalidate_remote(const struct sn_side *t, uint32_t key)
{
	uint32_t index = key >> 16;
	if (!key || index >= atomic_load(&t->seg->mr_limit))
		return false;
	struct sn_mr *e = sn_mr_at(t->seg, index);
	return e->window == IBV_MW_TYPE_2 && e->qpn == t->qp->qpn &&
	       atomic_compare_exchange_strong(&e->key, &(uint32_t){ key }, 0);
}

/* ---- what the objects around them ask ----------------------------------------------------- */

bool sn_mw_bound_to(struct sn_ctx *ctx, uint32_t lkey)
{
	bool found = false;
	if (!atomic_load(&ctx->windows))
		return false;
	sn_spin(&ctx->window_lock);
	for (uint32_t i = 0; i < atomic_load(&ctx->seg->mr_limit) && !found; i++) {
		struct sn_mr *e = sn_mr_at(ctx->seg, i);
		found = e->window && atomic_load(&e->key) && e->parent == lkey;
	}
	sn_unspin(&ctx->window_lock);
	return found;
}

void sn_mw_qp_gone(struct sn_ctx *ctx, uint32_t qpn)
{
	if (!atomic_load(&ctx->windows))
		return;
	sn_spin(&ctx->window_lock);
	for (uint32_t i = 0; i < atomic_load(&ctx->seg->mr_limit); i++) {
		struct sn_mr *e = sn_mr_at(ctx->seg, i);
		if (e->window == IBV_MW_TYPE_2 && e->qpn == qpn)
			atomic_store(&e->key, 0);
	}
	sn_unspin(&ctx->window_lock);
}
