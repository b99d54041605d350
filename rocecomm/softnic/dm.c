/* Device memory: memory of the device's own, in and out of it by copy or by registering it. Here it is
 * memory that peers map, so that transfers into it cost no system call. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "softnic.h"
#include "softnic_api.h"

struct sn_priv_dm {
	struct ibv_dm ibv;
	pid_t pid; /* a forked child may have some of its own, but cannot register it */
	char *memory;
	size_t length;
	_Atomic int users; /* regions in it, and imports */
	struct sn_priv_dm *origin; /* of an import */
	struct sn_priv_dm *next;
};

static struct sn_priv_dm *priv_of(struct ibv_dm *dm)
{
	struct sn_priv_dm *d = sn_container(dm, struct sn_priv_dm, ibv);
	return d->origin ? d->origin : d;
}

/* A device moves whole words of four bytes. */
static bool inside(const struct sn_priv_dm *d, uint64_t offset, size_t length)
{
	return offset % 4 == 0 && length % 4 == 0 && offset <= d->length && length <= d->length - offset;
}

static int copy_in(struct ibv_dm *dm, uint64_t offset, const void *from, size_t length)
{
	struct sn_priv_dm *d = priv_of(dm);
	if (d->pid != sn_pid)
		return EPERM; /* the parent's */
	if (!inside(d, offset, length))
		return EFAULT;
	memcpy(d->memory + offset, from, length);
	return 0;
}

static int copy_out(void *to, struct ibv_dm *dm, uint64_t offset, size_t length)
{
	struct sn_priv_dm *d = priv_of(dm);
	if (d->pid != sn_pid)
		return EPERM;
	if (!inside(d, offset, length))
		return EFAULT;
	memcpy(to, d->memory + offset, length);
	return 0;
}

static void describe(struct sn_priv_dm *d, struct ibv_context *context, uint32_t handle)
{
	d->ibv.context = context;
	d->ibv.memcpy_to_dm = copy_in;
	d->ibv.memcpy_from_dm = copy_out;
	d->ibv.handle = handle;
}

struct ibv_dm *sn_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *a)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_priv_dm *d = NULL;
	void *memory = NULL;
	bool child = sn_foreign(ctx);
	int err = 0;

	if (a->comp_mask || !a->length || a->log_align_req > 12)
		err = EINVAL;
	else if (a->length > SN_MAX_DM)
		err = ENOMEM;
	if (!err && !(d = calloc(1, sizeof(*d))))
		err = ENOMEM;
	if (!err && child && !(memory = calloc(1, a->length)))
		err = ENOMEM;
	if (!err && !child)
		err = softnic_alloc(context, a->length, &memory);
	if (err) {
		free(d);
		errno = err;
		return NULL;
	}
	d->pid = sn_pid;
	d->memory = memory;
	d->length = a->length;
	if (child) {
		describe(d, context, 0);
		return &d->ibv;
	}
	pthread_mutex_lock(&ctx->lock);
	if (a->length > SN_MAX_DM - ctx->dm_used)
		err = ENOMEM;
	if (!err) {
		ctx->dm_used += a->length;
		describe(d, context, ++ctx->next_dm);
		d->next = ctx->dms;
		ctx->dms = d;
	}
	pthread_mutex_unlock(&ctx->lock);
	if (err) {
		softnic_free(context, memory, a->length);
		free(d);
		errno = err;
		return NULL;
	}
	atomic_fetch_add(&ctx->objects, 1);
	return &d->ibv;
}

int sn_free_dm(struct ibv_dm *ibv)
{
	struct sn_priv_dm *d = sn_container(ibv, struct sn_priv_dm, ibv);
	struct ibv_context *context = ibv->context;
	struct sn_ctx *ctx = sn_ctx_of(context);
	if (d->pid != sn_pid)
		return 0;
	if (sn_foreign(ctx)) {
		free(d->memory);
		free(d);
		return 0;
	}
	if (d->origin)
		return EINVAL; /* an import is let go with ibv_unimport_dm */
	pthread_mutex_lock(&ctx->lock);
	if (atomic_load(&d->users)) {
		pthread_mutex_unlock(&ctx->lock);
		return EBUSY;
	}
	for (struct sn_priv_dm **p = &ctx->dms; *p; p = &(*p)->next)
		if (*p == d) {
			*p = d->next;
			break;
		}
	ctx->dm_used -= d->length;
	pthread_mutex_unlock(&ctx->lock);
	softnic_free(context, d->memory, d->length);
	free(d);
	sn_object_gone(ctx);
	return 0;
}

struct ibv_mr *sn_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length, unsigned access)
{
	struct sn_priv_dm *d = priv_of(dm);
	struct ibv_mr *mr;
	if (sn_foreign(sn_ctx_of(dm->context)) || dm->context != pd->context || !(access & IBV_ACCESS_ZERO_BASED) || !inside(d, offset, length)) {
		errno = EINVAL;
		return NULL;
	}
	mr = sn_reg_mr(pd, d->memory + offset, length, (uintptr_t)d->memory + offset, (int)access, true);
	if (!mr)
		return NULL;
	mr->addr = NULL; /* nothing that the program could look at */
	atomic_fetch_add(&d->users, 1);
	sn_container(mr, struct sn_priv_mr, ibv)->dm_users = &d->users;
	return mr;
}

/* ---- imported -------------------------------------------------------------------------------- */

SN_EXPORT struct ibv_dm *ibv_import_dm(struct ibv_context *context, uint32_t handle)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_priv_dm *d = NULL, *origin;

	if (sn_foreign(ctx)) {
		errno = EPERM;
		return NULL;
	}
	pthread_mutex_lock(&ctx->lock);
	for (origin = ctx->dms; origin && origin->ibv.handle != handle; origin = origin->next)
		;
	errno = ENOENT;
	if (origin && (d = calloc(1, sizeof(*d)))) {
		describe(d, context, handle);
		d->origin = origin;
		d->pid = sn_pid;
		atomic_fetch_add(&origin->users, 1);
	}
	pthread_mutex_unlock(&ctx->lock);
	return d ? &d->ibv : NULL;
}

SN_EXPORT void ibv_unimport_dm(struct ibv_dm *ibv)
{
	struct sn_priv_dm *d = sn_container(ibv, struct sn_priv_dm, ibv);
	if (sn_foreign(sn_ctx_of(ibv->context)) || !d->origin)
		return;
	atomic_fetch_sub(&d->origin->users, 1);
	free(d);
}

/* ---- memory of other devices ------------------------------------------------------------------ */

SN_EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
					   int access)
{
	(void)pd, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
	errno = EOPNOTSUPP; /* copied by CPUs, so only memory that CPUs reach */
	return NULL;
}
