/* Memory that peers can map, through /proc/PID/fd: a memfd of softnic_alloc, or a file that the
 * program has mapped (shared) and registered. It belongs to the process; a context that registers a
 * part of it gets an entry for it in its own segment. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softnic.h"

struct sn_memory {
	char *addr;
	uint64_t length;
	int fd;
	bool file; /* the program's own mapping: here as long as a region lies in it */
	int regions;
	uint64_t device, inode, offset;
	struct sn_memory *next;
};

#define FILE_FROM_USE 2 /* mapping a file costs as much as a few transfers by system call */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* taken before the fabric's */
static struct sn_memory *all;

static bool covers(const struct sn_memory *m, uintptr_t addr, uint64_t length)
{
	uint64_t offset = addr - (uintptr_t)m->addr;
	return addr >= (uintptr_t)m->addr && offset <= m->length && length <= m->length - offset;
}

static struct sn_memory *find(uintptr_t addr, uint64_t length, const struct sn_vma *vma)
{
	struct sn_memory *m = all;
	/* something else may be mapped by now, in a part or all of it, where a file was that is still registered */
	while (m && !(covers(m, addr, length) &&
		      (!m->file || (addr + length <= vma->end && vma->shared && vma->inode == m->inode && vma->device == m->device &&
				    vma->offset + (addr - vma->start) == m->offset + (addr - (uintptr_t)m->addr)))))
		m = m->next;
	return m;
}

/* The program's own shared mapping of a file: perftest's --mmap, torch's shared tensors. */
static struct sn_memory *adopt(uintptr_t addr, uint64_t length, struct sn_vma *vma)
{
	struct sn_memory *m = NULL;
	struct stat st;
	int fd;

	if (!vma->end || !vma->shared || !vma->inode || addr + length > vma->end || (fd = sn_vma_open(vma)) < 0)
		return NULL;
	if (!fstat(fd, &st) && (uint64_t)st.st_size > vma->offset && (m = malloc(sizeof(*m)))) {
		uint64_t there = (uint64_t)st.st_size - vma->offset, size = vma->end - vma->start;
		*m = (struct sn_memory){ .addr = (char *)(uintptr_t)vma->start, .length = size < there ? size : there,
					 .fd = fd, .file = true, .device = vma->device, .inode = vma->inode,
					 .offset = vma->offset, .next = all };
		if (covers(m, addr, length)) {
			all = m;
			return m;
		}
		free(m);
	}
	close(fd);
	return NULL;
}

/* Its entry in the context's segment, made if need be; -1 if there is no more room. */
static int announce(struct sn_ctx *ctx, struct sn_memory *m)
{
	int at = -1;
	for (int i = SN_POOLS; i-- > 0;) {
		if (ctx->pool[i] == m)
			return i;
		if (!ctx->pool[i])
			at = i;
	}
	if (at >= 0) {
		struct sn_pool *pool = &ctx->seg->pools[at];
		ctx->pool[at] = m;
		pool->fd = m->fd;
		pool->offset = m->offset;
		pool->length = m->length;
		pool->from_use = m->file ? FILE_FROM_USE : 0;
		if (++ctx->next_pool == 0)
			ctx->next_pool = 1;
		atomic_store_explicit(&pool->serial, ctx->next_pool, memory_order_release);
	}
	return at;
}

static void withdraw(struct sn_ctx *ctx, void *memory)
{
	sn_spin(&ctx->pool_lock);
	for (uint32_t i = 0; i < SN_POOLS; i++)
		if (ctx->pool[i] == memory) {
			atomic_store(&ctx->seg->pools[i].serial, 0);
			ctx->pool[i] = NULL;
		}
	sn_unspin(&ctx->pool_lock);
}

static void drop(struct sn_memory *m)
{
	struct sn_memory **p = &all;
	while (*p != m)
		p = &(*p)->next;
	*p = m->next;
	sn_each_context(withdraw, m);
	close(m->fd);
	free(m);
}

/* Does [addr, addr + length) lie in such memory? Then peers may map what `mr` registers. */
void sn_pool_find(struct sn_ctx *ctx, uintptr_t addr, uint64_t length, struct sn_vma *vma, struct sn_mr *mr)
{
	mr->pool = 0;
	pthread_mutex_lock(&mutex);
	struct sn_memory *m = find(addr, length, vma);
	if (!m)
		m = adopt(addr, length, vma);
	if (m) {
		sn_spin(&ctx->pool_lock);
		int i = announce(ctx, m);
		if (i >= 0) {
			m->regions++;
			mr->pool = (uint32_t)i + 1;
			mr->pool_serial = atomic_load(&ctx->seg->pools[i].serial);
			mr->pool_offset = addr - (uintptr_t)m->addr;
		}
		sn_unspin(&ctx->pool_lock);
		if (m->file && !m->regions) /* no place for it in the segment */
			drop(m);
	}
	pthread_mutex_unlock(&mutex);
}

/* `mr` is deregistered: nobody touches its memory any more. */
void sn_pool_release(struct sn_ctx *ctx, struct sn_mr *mr)
{
	if (!mr->pool)
		return;
	pthread_mutex_lock(&mutex);
	struct sn_memory *m = ctx->pool[mr->pool - 1];
	/* else: softnic_free came first */
	if (m && atomic_load(&ctx->seg->pools[mr->pool - 1].serial) == mr->pool_serial && --m->regions == 0 && m->file)
		drop(m);
	pthread_mutex_unlock(&mutex);
	mr->pool = 0;
}

SN_EXPORT int softnic_alloc(struct ibv_context *context, size_t length, void **addr)
{
	struct sn_memory *m = calloc(1, sizeof(*m));
	void *at = MAP_FAILED;
	int fd, err = 0;

	length = SN_ROUND(length ? length : 1);
	if (!m || sn_foreign(sn_ctx_of(context))) {
		err = m ? EPERM : ENOMEM;
		free(m);
		return err;
	}
	fd = memfd_create("rocecomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	/* sealed: if it could shrink, peers would take a SIGBUS on it */
	if (fd >= 0 && ftruncate(fd, (off_t)length) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0)
		at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at != MAP_FAILED) {
		*m = (struct sn_memory){ .addr = at, .length = length, .fd = fd };
		pthread_mutex_lock(&mutex);
		m->next = all;
		all = m;
		pthread_mutex_unlock(&mutex);
	} else {
		/* no memfd to be had: plain memory does, peers copy it by system call */
		free(m);
		if (fd >= 0)
			close(fd);
		at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		err = at == MAP_FAILED ? errno : 0;
	}
	if (!err)
		*addr = at;
	return err;
}

SN_EXPORT int softnic_free(struct ibv_context *context, void *addr, size_t length)
{
	(void)context;
	length = SN_ROUND(length ? length : 1);
	pthread_mutex_lock(&mutex);
	struct sn_memory *m = all;
	while (m && (m->addr != addr || m->file))
		m = m->next;
	if (m)
		drop(m);
	pthread_mutex_unlock(&mutex);
	return munmap(addr, length) ? errno : 0;
}

SN_EXPORT int softnic_reg_is_free(void)
{
	return 1;
}

/* In a fresh child: another thread of the parent may have held it at the fork. */
void sn_pool_forked(void)
{
	pthread_mutex_init(&mutex, NULL);
}
