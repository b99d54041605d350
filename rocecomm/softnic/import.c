/* Importing: a second handle on objects of a context of this process, found through its cmd_fd. The
 * descriptor leads to the context's segment, so a copy of it (dup) does as well. A context of another
 * process cannot be imported: its objects and queues are filled through addresses and locks of that
 * process. Such a program shares memory windows or keys instead, or opens the device itself. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softnic.h"

struct search {
	struct stat want;
	struct sn_ctx *found;
};

static void compare(struct sn_ctx *ctx, void *arg)
{
	struct search *s = arg;
	struct stat have;
	if (!s->found && !sn_foreign(ctx) && fstat(ctx->seg_fd, &have) == 0 && have.st_dev == s->want.st_dev &&
	    have.st_ino == s->want.st_ino) {
		atomic_fetch_add(&ctx->opens, 1);
		s->found = ctx;
	}
}

SN_EXPORT struct ibv_context *ibv_import_device(int cmd_fd)
{
	struct search s = { .found = NULL };
	struct sn_seg head;

	if (fstat(cmd_fd, &s.want))
		return NULL;
	sn_each_context(compare, &s);
	if (!s.found) {
		bool ours = pread(cmd_fd, &head, sizeof(head), 0) == sizeof(head) && head.magic == SN_MAGIC;
		errno = ours ? sn_because(EOPNOTSUPP, "this is a device of process %d, and soft devices can be imported "
						      "only within the process that opened them: open the device here",
					  head.pid)
			     : EINVAL;
		return NULL;
	}
	if (cmd_fd != s.found->seg_fd)
		close(cmd_fd); /* an import owns it, and the context has one */
	return &s.found->vctx.context;
}

/* ---- regions --------------------------------------------------------------------------------- */

SN_EXPORT struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle)
{
	struct sn_ctx *ctx = sn_ctx_of(pd->context);
	struct sn_priv_mr *mr = NULL;
	struct sn_mr *e = sn_mr_at(ctx->seg, handle);
	uint32_t key = 0;

	if (sn_foreign(ctx)) {
		errno = EPERM;
		return NULL;
	}
	pthread_mutex_lock(&ctx->lock);
	if (handle < atomic_load(&ctx->seg->mr_limit) && e->taken && !e->window && e->pd == pd->handle)
		key = atomic_load(&e->key);
	errno = ENOENT;
	if (key && (mr = calloc(1, sizeof(*mr)))) {
		mr->index = handle;
		mr->imported = true;
		mr->ibv.lkey = mr->ibv.rkey = key;
		mr->ibv.length = e->length; /* the address is the owner's business, and NULL here */
	}
	pthread_mutex_unlock(&ctx->lock);
	if (!mr)
		return NULL;
	mr->ibv.context = pd->context;
	mr->ibv.pd = pd;
	mr->ibv.handle = handle;
	sn_pd_get(pd);
	return &mr->ibv;
}

SN_EXPORT void ibv_unimport_mr(struct ibv_mr *ibv)
{
	struct sn_priv_mr *mr = sn_container(ibv, struct sn_priv_mr, ibv);
	if (sn_foreign(sn_ctx_of(ibv->context)) || !mr->imported)
		return;
	sn_pd_put(ibv->pd);
	free(mr);
}
