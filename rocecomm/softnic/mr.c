/* Memory regions and their keys. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "softnic.h"

#define REMOTE (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define KNOWN_ACCESS (IBV_ACCESS_LOCAL_WRITE | REMOTE | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_HUGETLB | \
		      IBV_ACCESS_ON_DEMAND)

/* The table grows by whole pages, so it may hold a few more than there are keys. */
static uint32_t entries(struct sn_ctx *ctx)
{
	uint32_t limit = atomic_load(&ctx->seg->mr_limit);
	return limit < SN_MRS ? limit : SN_MRS;
}

int sn_mr_take(struct sn_ctx *ctx, uint32_t *index)
{
	uint32_t limit = entries(ctx);
	for (int round = 0; round < 2; round++) {
		for (uint32_t i = 0; i < limit; i++) {
			uint32_t at = (ctx->next_mr + i) % limit;
			struct sn_mr *mr = sn_mr_at(ctx->seg, at);
			if (at && !mr->taken) {
				mr->taken = 1;
				ctx->next_mr = at + 1;
				*index = at;
				return 0;
			}
		}
		if (limit >= SN_MRS)
			break;
		uint32_t want = limit ? 2 * limit : 256;
		int err = sn_seg_grow(ctx, &ctx->seg->mr_limit, SN_MR_TABLE, sizeof(struct sn_mr), want);
		if (err)
			return err;
		ctx->next_mr = limit;
		limit = entries(ctx);
	}
	return ENOMEM;
}

static int check_access(int access)
{
	int flags = access & ~(int)IBV_ACCESS_OPTIONAL_RANGE;
	if (flags & ~KNOWN_ACCESS)
		return EINVAL;
	if ((flags & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) && !(flags & IBV_ACCESS_LOCAL_WRITE))
		return EINVAL;
	return 0;
}

/* `dm`: memory of the device itself, of which an empty piece is allowed. */
struct ibv_mr *sn_reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access, bool dm)
{
	struct sn_ctx *ctx = sn_ctx_of(pd->context);
	struct sn_priv_mr *mr;
	struct sn_vma vma;
	uint32_t index = 0;
	int err = sn_foreign(ctx) ? EPERM : check_access(access);
	if (!err)
		err = sn_refused(ctx, SN_REG_MR);

	bool demand = access & IBV_ACCESS_ON_DEMAND; /* looked at when it is used */
	bool everything = demand && !addr && length == SIZE_MAX && !iova;

	/* the iova and the address lie at the same place of their pages, as for the kernel */
	if (!err && !everything && ((!length && !dm) || length > sn_max_region() || (iova - (uintptr_t)addr) % SN_PAGE ||
				    (uintptr_t)addr + length < length))
		err = EINVAL;
	if (!err && !demand && length)
		err = sn_vma_check((uintptr_t)addr, length, access & IBV_ACCESS_LOCAL_WRITE, &vma);
	mr = err ? NULL : calloc(1, sizeof(*mr));
	if (!err && !mr)
		err = ENOMEM;
	if (!err) {
		pthread_mutex_lock(&ctx->lock);
		err = sn_mr_take(ctx, &index);
		if (!err) {
			struct sn_mr *e = sn_mr_at(ctx->seg, index);
			e->access = access;
			e->pd = pd->handle;
			e->iova = access & IBV_ACCESS_ZERO_BASED ? 0 : iova;
			e->length = length;
			e->host = (uintptr_t)addr;
			e->pool = 0;
			if (!demand && length)
				sn_pool_find(ctx, (uintptr_t)addr, length, &vma, e);
			e->tag = ((e->tag ? e->tag : ctx->key_start) + 1) & 0xffff;
			if (!e->tag)
				e->tag = 1;
			mr->index = index;
			mr->ibv.lkey = mr->ibv.rkey = index << 16 | e->tag;
			atomic_store(&e->key, mr->ibv.lkey);
		}
		pthread_mutex_unlock(&ctx->lock);
	}
	if (err) {
		free(mr);
		errno = err;
		return NULL;
	}
	mr->ibv.context = pd->context;
	mr->ibv.pd = pd;
	mr->ibv.addr = addr;
	mr->ibv.length = length;
	mr->ibv.handle = index;
	sn_pd_get(pd);
	return &mr->ibv;
}

SN_EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return sn_reg_mr(pd, addr, length, (uintptr_t)addr, access, false);
}

SN_EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return sn_reg_mr(pd, addr, length, iova, access, false);
}

SN_EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
					  unsigned int access)
{
	return sn_reg_mr(pd, addr, length, iova, (int)access, false);
}

/* From here on no new copy starts; EBUSY while one still runs whose holder is stopped. */
static int revoke_region(struct sn_ctx *ctx, struct sn_priv_mr *mr)
{
	struct sn_mr *e = sn_mr_at(ctx->seg, mr->index);
	if (sn_mw_bound_to(ctx, mr->ibv.lkey))
		return EBUSY;
	atomic_store(&e->key, 0);
	if (!sn_wait_claims(ctx, 0, mr->ibv.lkey))
		return EBUSY;
	/* What arrived before now belongs in that memory, polled or not. */
	return sn_place_all(ctx) ? 0 : EBUSY;
}

SN_EXPORT int ibv_dereg_mr(struct ibv_mr *ibv)
{
	struct sn_priv_mr *mr = sn_container(ibv, struct sn_priv_mr, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	int err;
	if (sn_foreign(ctx))
		return 0;
	if ((err = sn_refused(ctx, SN_DEREG_MR)))
		return err;
	if (mr->imported)
		return sn_because(EINVAL, "an imported region is let go with ibv_unimport_mr; whoever registered it deregisters it");
	pthread_mutex_lock(&ctx->lock);
	err = revoke_region(ctx, mr);
	if (!err && sn_mw_bound_to(ctx, ibv->lkey)) { /* bound just before */
		atomic_store(&sn_mr_at(ctx->seg, mr->index)->key, ibv->lkey);
		err = EBUSY;
	}
	if (!err) {
		sn_pool_release(ctx, sn_mr_at(ctx->seg, mr->index));
		sn_mr_at(ctx->seg, mr->index)->taken = 0;
	}
	pthread_mutex_unlock(&ctx->lock);
	if (err)
		return err;
	if (mr->dm_users)
		atomic_fetch_sub(mr->dm_users, 1);
	sn_pd_put(ibv->pd);
	free(mr);
	return 0;
}

SN_EXPORT int ibv_rereg_mr(struct ibv_mr *ibv, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct sn_priv_mr *mr = sn_container(ibv, struct sn_priv_mr, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	struct sn_mr *e = sn_mr_at(ctx->seg, mr->index);
	int now = flags & IBV_REREG_MR_CHANGE_ACCESS ? access : (int)e->access;
	void *at = flags & IBV_REREG_MR_CHANGE_TRANSLATION ? addr : ibv->addr;
	size_t len = flags & IBV_REREG_MR_CHANGE_TRANSLATION ? length : ibv->length;
	struct sn_vma vma;

	errno = EINVAL;
	if (sn_foreign(ctx) || mr->imported || mr->dm_users || now & IBV_ACCESS_ON_DEMAND || !flags || flags & ~IBV_REREG_MR_FLAGS_SUPPORTED || check_access(now) || !len ||
	    len > sn_max_region() || (flags & IBV_REREG_MR_CHANGE_PD && !pd))
		return IBV_REREG_MR_ERR_INPUT;
	if (sn_vma_check((uintptr_t)at, len, now & IBV_ACCESS_LOCAL_WRITE, &vma))
		return IBV_REREG_MR_ERR_INPUT;
	pthread_mutex_lock(&ctx->lock);
	errno = revoke_region(ctx, mr);
	if (!errno) {
		e->access = now;
		e->host = (uintptr_t)at;
		e->iova = now & IBV_ACCESS_ZERO_BASED ? 0 : (uintptr_t)at;
		e->length = len;
		sn_pool_release(ctx, e);
		sn_pool_find(ctx, (uintptr_t)at, len, &vma, e);
		if (flags & IBV_REREG_MR_CHANGE_PD) {
			sn_pd_put(ibv->pd);
			sn_pd_get(pd);
			ibv->pd = pd;
			e->pd = pd->handle;
		}
		ibv->addr = at;
		ibv->length = len;
		atomic_store(&e->key, ibv->lkey);
	}
	pthread_mutex_unlock(&ctx->lock);
	return errno ? IBV_REREG_MR_ERR_CMD : 0;
}

/* Is [addr, addr + length) inside the region or window that `key` names, in the protection domain of
 * `qp`, with the rights `need`? Copies what tells where it lies, since the entry may change once the claim ends. */
bool sn_mr_covers(struct sn_seg *seg, uint32_t key, const struct sn_qp *qp, uint32_t need, uint64_t addr, uint64_t length,
		  struct sn_mr *copy)
{
	uint32_t index = key >> 16;
	if (!key || index >= atomic_load_explicit(&seg->mr_limit, memory_order_relaxed))
		return false;
	struct sn_mr *e = sn_mr_at(seg, index);
	if (atomic_load_explicit(&e->key, memory_order_acquire) != key)
		return false;
	uint64_t offset = addr - e->iova, size = e->length;
	/* a window is no local key, and one of type 2 is of its queue pair */
	bool fits = e->pd == qp->pd && (e->access & need) == need && addr >= e->iova && offset <= size &&
		    length <= size - offset &&
		    (!e->window || (need & REMOTE && (e->window != IBV_MW_TYPE_2 || e->qpn == qp->qpn)));
	copy->access = e->access;
	copy->iova = addr - offset;
	copy->length = size;
	copy->host = e->host;
	copy->pool = e->pool;
	copy->pool_offset = e->pool_offset;
	copy->pool_serial = e->pool_serial;
	copy->window = e->window;
	copy->parent = e->parent;
	atomic_thread_fence(memory_order_acquire);
	/* of one registration, all of it */
	return atomic_load_explicit(&e->key, memory_order_relaxed) == key && fits;
}

/* The same for a remote key, claimed first. Who is inside a window is inside its region. */
bool sn_mr_claim(struct sn_claim *claim, const struct sn_side *t, uint32_t key, uint32_t need, uint64_t addr,
		 uint64_t length, struct sn_mr *copy)
{
	sn_claim_key(claim, 1, key);
	if (!sn_mr_covers(t->seg, key, t->qp, need, addr, length, copy))
		return false;
	if (!copy->window)
		return true;
	sn_claim_key(claim, 1, copy->parent);
	return sn_mr_covers(t->seg, key, t->qp, need, addr, length, copy);
}

/* Prefetching. Nothing has to be fetched for us to reach it, but with FLUSH the caller wants to know. */
int sn_advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sge, uint32_t n)
{
	struct sn_ctx *ctx = sn_ctx_of(pd->context);
	uint32_t need = advice == IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE ? IBV_ACCESS_LOCAL_WRITE : 0;
	struct sn_qp of = { .pd = pd->handle };
	struct sn_mr mr;

	if (sn_foreign(ctx))
		return EPERM;
	if (advice > IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT)
		return EOPNOTSUPP;
	if (!n || flags & ~(uint32_t)IBV_ADVISE_MR_FLAG_FLUSH)
		return EINVAL;
	for (uint32_t i = 0; i < n; i++) {
		if (!sn_mr_covers(ctx->seg, sge[i].lkey, &of, need, sge[i].addr, sge[i].length, &mr))
			return ENOENT;
		if (!(mr.access & IBV_ACCESS_ON_DEMAND))
			return EINVAL;
		if (!(flags & IBV_ADVISE_MR_FLAG_FLUSH) || advice == IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT || !sge[i].length)
			continue;
		uint64_t from = (mr.host + (sge[i].addr - mr.iova)) & ~(SN_PAGE - 1);
		uint64_t to = mr.host + (sge[i].addr - mr.iova) + sge[i].length;
		int how = need ? 23 /* MADV_POPULATE_WRITE */ : 22 /* MADV_POPULATE_READ */;
		struct sn_vma vma;
		if (sn_vma_check(from, to - from, need, &vma))
			return EFAULT;
		madvise((void *)(uintptr_t)from, to - from, how); /* before Linux 5.14: at the first use */
	}
	return 0;
}
