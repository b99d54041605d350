/* Memory that peers can map: a memfd, which they open through /proc/PID/fd. It belongs to the
 * process; a context that registers a part of it gets an entry for it in its own segment. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softnic.h"

struct memory {
	char *addr;
	uint64_t length;
	int fd;
	struct memory *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* taken before the fabric's */
static struct memory *all;

static bool covers(const char *base, uint64_t size, uintptr_t addr, uint64_t length)
{
	uint64_t offset = addr - (uintptr_t)base;
	return base && addr >= (uintptr_t)base && offset <= size && length <= size - offset;
}

static bool find_here(struct sn_ctx *ctx, uintptr_t addr, uint64_t length, struct sn_mr *mr)
{
	for (uint32_t i = 0; i < SN_POOLS; i++)
		if (covers(ctx->pool_addr[i], ctx->seg->pools[i].length, addr, length)) {
			mr->pool = i + 1;
			mr->pool_serial = atomic_load(&ctx->seg->pools[i].serial);
			mr->pool_offset = addr - (uintptr_t)ctx->pool_addr[i];
			return true;
		}
	return false;
}

static void announce(struct sn_ctx *ctx, const struct memory *m)
{
	for (uint32_t i = 0; i < SN_POOLS; i++)
		if (!ctx->pool_addr[i]) {
			struct sn_pool *pool = &ctx->seg->pools[i];
			ctx->pool_addr[i] = m->addr;
			pool->fd = m->fd;
			pool->length = m->length;
			if (++ctx->next_pool == 0)
				ctx->next_pool = 1;
			atomic_store_explicit(&pool->serial, ctx->next_pool, memory_order_release);
			return;
		}
}

/* Does [addr, addr + length) lie in such memory? Then peers may map what `mr` registers. */
void sn_pool_find(struct sn_ctx *ctx, uintptr_t addr, uint64_t length, struct sn_mr *mr)
{
	struct memory *m = NULL;
	mr->pool = 0;
	pthread_mutex_lock(&mutex);
	for (m = all; m && !covers(m->addr, m->length, addr, length); m = m->next)
		;
	if (m) {
		sn_spin(&ctx->pool_lock);
		if (!find_here(ctx, addr, length, mr)) {
			announce(ctx, m);
			find_here(ctx, addr, length, mr);
		}
		sn_unspin(&ctx->pool_lock);
	}
	pthread_mutex_unlock(&mutex);
}

static void withdraw(struct sn_ctx *ctx, void *addr)
{
	sn_spin(&ctx->pool_lock);
	for (uint32_t i = 0; i < SN_POOLS; i++)
		if (ctx->pool_addr[i] == addr) {
			atomic_store(&ctx->seg->pools[i].serial, 0);
			ctx->pool_addr[i] = NULL;
		}
	sn_unspin(&ctx->pool_lock);
}

SN_EXPORT int softnic_alloc(struct ibv_context *context, size_t length, void **addr)
{
	struct memory *m = malloc(sizeof(*m));
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
		*m = (struct memory){ at, length, fd, NULL };
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
	for (struct memory **p = &all, *m; (m = *p); p = &m->next)
		if (m->addr == addr) {
			*p = m->next;
			sn_each_context(withdraw, addr);
			close(m->fd);
			free(m);
			break;
		}
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
