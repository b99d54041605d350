/* Protection domains, and what may stand in their place: parent domains and imported ones. Objects
 * count themselves on the ibv_pd that they were made with; that one holds the domain it stands for. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "softnic.h"

static struct sn_priv_pd *priv_of(struct ibv_pd *pd)
{
	return sn_container(pd, struct sn_priv_pd, ibv);
}

static struct sn_priv_pd *new_pd(struct sn_ctx *ctx, uint32_t handle)
{
	struct sn_priv_pd *pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	pd->ibv.context = &ctx->vctx.context;
	pthread_mutex_lock(&ctx->lock);
	pd->ibv.handle = handle ? handle : ++ctx->next_pd;
	pd->next = ctx->pds;
	ctx->pds = pd;
	pthread_mutex_unlock(&ctx->lock);
	atomic_fetch_add(&ctx->objects, 1);
	return pd;
}

static void free_pd(struct sn_priv_pd *pd)
{
	struct sn_ctx *ctx = sn_ctx_of(pd->ibv.context);
	pthread_mutex_lock(&ctx->lock);
	for (struct sn_priv_pd **p = &ctx->pds; *p; p = &(*p)->next)
		if (*p == pd) {
			*p = pd->next;
			break;
		}
	pthread_mutex_unlock(&ctx->lock);
	if (pd->of)
		sn_pd_put(&pd->of->ibv);
	if (pd->td)
		atomic_fetch_sub(&pd->td->users, 1);
	free(pd);
	sn_object_gone(ctx);
}

void sn_pd_get(struct ibv_pd *pd)
{
	atomic_fetch_add(&priv_of(pd)->users, 1);
}

void sn_pd_put(struct ibv_pd *pd)
{
	if (atomic_fetch_sub(&priv_of(pd)->users, 1) == 1 && priv_of(pd)->unimported)
		free_pd(priv_of(pd));
}

SN_EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_priv_pd *pd;
	if (sn_foreign(ctx)) {
		errno = EPERM;
		return NULL;
	}
	int refused = sn_refused(ctx, SN_ALLOC_PD);
	if (refused) {
		errno = refused;
		return NULL;
	}
	pd = new_pd(ctx, 0);
	return pd ? &pd->ibv : NULL;
}

SN_EXPORT int ibv_dealloc_pd(struct ibv_pd *ibv)
{
	struct sn_priv_pd *pd = priv_of(ibv);
	if (sn_foreign(sn_ctx_of(ibv->context)))
		return 0;
	if (atomic_load(&pd->users))
		return EBUSY;
	free_pd(pd);
	return 0;
}

/* ---- thread domains and parent domains ----------------------------------------------------- */

struct ibv_td *sn_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_priv_td *td = NULL;
	errno = sn_foreign(ctx) ? EPERM : attr->comp_mask ? EINVAL : 0;
	if (!errno)
		td = calloc(1, sizeof(*td));
	if (!td)
		return NULL;
	td->ibv.context = context;
	atomic_fetch_add(&ctx->objects, 1);
	return &td->ibv;
}

int sn_dealloc_td(struct ibv_td *ibv)
{
	struct sn_priv_td *td = sn_container(ibv, struct sn_priv_td, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	if (sn_foreign(ctx))
		return 0;
	if (atomic_load(&td->users))
		return EBUSY;
	free(td);
	sn_object_gone(ctx);
	return 0;
}

/* The program's allocators are accepted and not asked: queues lie in shared memory. A thread domain
 * promises one thread at a time; the locks that it would save cost a few nanoseconds. */
struct ibv_pd *sn_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_priv_pd *pd = NULL;

	errno = 0;
	if (sn_foreign(ctx))
		errno = EPERM;
	else if (!attr->pd || attr->pd->context != context || priv_of(attr->pd)->of ||
		 (attr->td && attr->td->context != context))
		errno = EINVAL;
	else if (attr->comp_mask &
		 ~(uint32_t)(IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT))
		errno = EINVAL;
	if (!errno)
		pd = new_pd(ctx, attr->pd->handle);
	if (!pd)
		return NULL;
	pd->of = priv_of(attr->pd);
	sn_pd_get(attr->pd);
	if (attr->td) {
		pd->td = sn_container(attr->td, struct sn_priv_td, ibv);
		atomic_fetch_add(&pd->td->users, 1);
	}
	return &pd->ibv;
}

/* ---- imported -------------------------------------------------------------------------------- */

SN_EXPORT struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t handle)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_priv_pd *origin, *pd = NULL;

	if (sn_foreign(ctx)) {
		errno = EPERM;
		return NULL;
	}
	pthread_mutex_lock(&ctx->lock);
	for (origin = ctx->pds; origin && (origin->of || origin->ibv.handle != handle); origin = origin->next)
		;
	if (origin)
		sn_pd_get(&origin->ibv);
	pthread_mutex_unlock(&ctx->lock);
	errno = ENOENT;
	if (origin && !(pd = new_pd(ctx, handle)))
		sn_pd_put(&origin->ibv);
	if (!pd)
		return NULL;
	pd->of = origin;
	return &pd->ibv;
}

/* What was made with it may outlive it. */
SN_EXPORT void ibv_unimport_pd(struct ibv_pd *ibv)
{
	struct sn_priv_pd *pd = priv_of(ibv);
	if (sn_foreign(sn_ctx_of(ibv->context)) || pd->unimported)
		return;
	sn_pd_get(ibv);
	pd->unimported = true;
	sn_pd_put(ibv);
}
