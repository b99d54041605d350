/* A context's segment: created sparse, given memory piece by piece before it is touched, so that
 * a full /dev/shm is ENOSPC from a verb and never SIGBUS in the data path. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "softnic.h"

/* Why memory in a file of the fabric was refused, and what to do. */
int sn_no_room(int err, uint64_t len, const char *name)
{
	char path[192];
	struct statvfs v;
	unsigned long long left = 0, all = 0;
	sn_fabric_path(path, sizeof(path), "%s", name);
	if (err == EOPNOTSUPP)
		return sn_because(err, "the file system of %s cannot set memory aside (fallocate): name a tmpfs by "
				       "ROCECOMM_SOFT_DIR", path);
	if (!statvfs(path, &v)) {
		left = (unsigned long long)v.f_bavail * v.f_frsize;
		all = (unsigned long long)v.f_blocks * v.f_frsize;
	}
	return sn_because(err, "no room for another %llu bytes in %s (%llu KiB of %llu free): make /dev/shm larger (docker run "
			       "--shm-size=...), ask for smaller queues, or name another place by ROCECOMM_SOFT_DIR",
			  (unsigned long long)len, path, left >> 10, all >> 10);
}

static int back(struct sn_ctx *ctx, uint64_t at, uint64_t len)
{
	int r;
	do
		r = fallocate(ctx->seg_fd, 0, (off_t)at, (off_t)len);
	while (r < 0 && errno == EINTR);
	if (r == 0)
		return 0;
	char name[32];
	int err = errno;
	snprintf(name, sizeof(name), "seg-%u", ctx->id & (SN_SLOTS - 1));
	return sn_no_room(err, len, name);
}

struct sn_mapping *sn_mapping_new(struct sn_seg *seg)
{
	struct sn_mapping *m = malloc(sizeof(*m));
	if (m) {
		m->seg = seg;
		atomic_store(&m->users, 1);
	}
	return m;
}

void sn_mapping_put(struct sn_mapping *m)
{
	if (atomic_fetch_sub(&m->users, 1) == 1) {
		munmap(m->seg, SN_SEG_SIZE);
		free(m);
	}
}

int sn_seg_create(struct sn_ctx *ctx)
{
	char path[192];
	int err;

	sn_fabric_path(path, sizeof(path), "seg-%u", ctx->id & (SN_SLOTS - 1));
	unlink(path);
	ctx->seg_fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (ctx->seg_fd < 0)
		return sn_because(errno, "cannot create %s: %s", path, strerror(errno));
	if (ftruncate(ctx->seg_fd, SN_SEG_SIZE))
		err = errno;
	else
		err = back(ctx, 0, SN_QP_TABLE);
	if (!err) {
		ctx->seg = mmap(NULL, SN_SEG_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, ctx->seg_fd, 0);
		if (ctx->seg == MAP_FAILED) {
			ctx->seg = NULL;
			err = sn_because(errno, "cannot map %s: %s (1 GiB of address space, ulimit -v?)", path, strerror(errno));
		}
	}
	ctx->holes = calloc(16, sizeof(*ctx->holes));
	if (!err)
		madvise(ctx->seg, SN_SEG_SIZE, MADV_DONTFORK); /* a child has no business there */
	ctx->mapping = err ? NULL : sn_mapping_new(ctx->seg);
	if (!err && (!ctx->holes || !ctx->mapping))
		err = ENOMEM;
	if (err) {
		if (ctx->mapping)
			sn_mapping_put(ctx->mapping);
		else if (ctx->seg)
			munmap(ctx->seg, SN_SEG_SIZE);
		free(ctx->holes);
		close(ctx->seg_fd);
		return err;
	}
	ctx->room_holes = 16;
	ctx->num_holes = 1;
	ctx->holes[0] = (struct sn_extent){ SN_HEAP, SN_SEG_SIZE - SN_HEAP };

	struct sn_seg *seg = ctx->seg;
	if (getrandom(&ctx->instance, sizeof(ctx->instance), 0) != sizeof(ctx->instance))
		ctx->instance = sn_now() ^ (uint64_t)ctx->pid << 32;
	seg->version = SN_LAYOUT_VERSION;
	seg->id = ctx->id;
	seg->pid = ctx->pid;
	seg->uid = geteuid();
	seg->instance = ctx->instance;
	seg->probe_addr = (uintptr_t)&ctx->instance;
	seg->refused = !sn_may_read(seg);
	atomic_thread_fence(memory_order_release);
	seg->magic = SN_MAGIC;
	return 0;
}

int sn_seg_grow(struct sn_ctx *ctx, _Atomic uint32_t *limit, uint64_t table, size_t entry, uint32_t need)
{
	uint32_t have = atomic_load(limit);
	if (need <= have)
		return 0;
	uint64_t from = table + SN_ROUND((uint64_t)have * entry);
	uint64_t to = table + SN_ROUND((uint64_t)need * entry);
	int err = to > from ? back(ctx, from, to - from) : 0;
	if (!err)
		atomic_store(limit, (uint32_t)((to - table) / entry));
	return err;
}

int sn_heap_get(struct sn_ctx *ctx, uint64_t len, uint64_t *at)
{
	len = SN_ROUND(len);
	for (uint32_t i = 0; i < ctx->num_holes; i++) {
		struct sn_extent *h = &ctx->holes[i];
		if (h->len < len)
			continue;
		int err = back(ctx, h->at, len);
		if (err)
			return err;
		*at = h->at;
		h->at += len;
		h->len -= len;
		if (!h->len)
			ctx->holes[i] = ctx->holes[--ctx->num_holes];
		return 0;
	}
	return ENOSPC;
}

void sn_heap_put(struct sn_ctx *ctx, uint64_t at, uint64_t len)
{
	len = SN_ROUND(len);
	if (!len)
		return;
	fallocate(ctx->seg_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)len);
	for (uint32_t i = 0; i < ctx->num_holes;) { /* join with neighbours */
		struct sn_extent h = ctx->holes[i];
		if (h.at + h.len == at || at + len == h.at) {
			at = h.at < at ? h.at : at;
			len += h.len;
			ctx->holes[i] = ctx->holes[--ctx->num_holes];
			i = 0;
		} else {
			i++;
		}
	}
	if (ctx->num_holes == ctx->room_holes) {
		struct sn_extent *more = realloc(ctx->holes, 2 * ctx->room_holes * sizeof(*more));
		if (!more)
			return; /* address room is lost, memory is not: it was given back above */
		ctx->holes = more;
		ctx->room_holes *= 2;
	}
	ctx->holes[ctx->num_holes++] = (struct sn_extent){ at, len };
}

void sn_heap_free(struct sn_ctx *ctx)
{
	sn_mapping_put(ctx->mapping);
	close(ctx->seg_fd);
	free(ctx->holes);
}
