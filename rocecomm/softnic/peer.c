/* Other contexts as this process sees them: their segment, their life, their wake-up FIFOs and
 * the memory that they let us map. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softnic.h"

static struct sn_seg *map_segment(uint32_t slot, int *seg_fd, int *err)
{
	char path[192];
	struct stat st;
	struct { uint64_t magic; uint32_t version; } head = { 0, 0 };
	struct sn_seg *seg = NULL;
	int fd;

	sn_fabric_path(path, sizeof(path), "seg-%u", slot);
	fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0) {
		*err = errno;
		return NULL;
	}
	/* read, not mapped: one that is being made may have no memory behind its first page yet */
	*err = EPROTO;
	if (!fstat(fd, &st) && S_ISREG(st.st_mode) && (uint64_t)st.st_size == SN_SEG_SIZE && st.st_uid == geteuid() &&
	    pread(fd, &head, sizeof(head), 0) == sizeof(head) && head.magic == SN_MAGIC && head.version == SN_LAYOUT_VERSION) {
		seg = mmap(NULL, SN_SEG_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
		if (seg == MAP_FAILED) {
			seg = NULL;
			*err = errno;
		}
	}
	if (!seg) {
		close(fd);
		return NULL;
	}
	madvise(seg, SN_SEG_SIZE, MADV_DONTFORK);
	*seg_fd = fd;
	return seg;
}

/* Can this process read the memory of the segment's owner? Not where the system forbids it, nor
 * when the owner is on its way out: its memory goes before its locks do. */
bool sn_may_read(struct sn_seg *seg)
{
	uint64_t word = 0;
	struct iovec here = { &word, sizeof(word) };
	struct iovec there = { (void *)(uintptr_t)seg->probe_addr, sizeof(word) };
	return process_vm_readv(seg->pid, &here, 1, &there, 1, 0) == sizeof(word) && word == seg->instance;
}

static void drop(struct sn_peer *p)
{
	sn_mapping_put(p->mapping);
	if (p->staged)
		close(p->seg_fd);
	for (unsigned i = 0; i < 8; i++)
		if (p->fifo[i].number)
			close(p->fifo[i].fd);
	for (unsigned i = 0; i < SN_POOLS; i++)
		if (p->pool[i].addr)
			munmap(p->pool[i].addr, p->pool[i].length);
	free(p);
}

/* A peer whose slot now belongs to somebody else stays with the QPs that
 * knew it; a new QP gets the new one, so records are kept in `retired` until the context closes. */
static struct sn_peer *get(struct sn_ctx *ctx, uint32_t slot, int *err)
{
	struct sn_peer *p = ctx->peers[slot];
	if (p && !sn_peer_dead(p, SN_RETRY_NOW))
		return p;
	int fd;
	struct sn_seg *seg = map_segment(slot, &fd, err);
	if (!seg)
		return NULL;
	struct sn_peer *fresh = NULL;
	if ((seg->id & (SN_SLOTS - 1)) != slot || !sn_alive(seg->id))
		*err = ENOENT;
	else if (!(fresh = calloc(1, sizeof(*fresh))))
		*err = ENOMEM;
	if (!fresh) {
		munmap(seg, SN_SEG_SIZE);
		close(fd);
		return NULL;
	}
	uint32_t me = ctx->id & (SN_SLOTS - 1);
	fresh->id = seg->id;
	fresh->pid = seg->pid;
	fresh->mapping = sn_local_mapping(seg->id);
	/* for tests: the ways that lead into another process, with both ends where a sanitizer sees them */
	fresh->local = fresh->mapping && !getenv("ROCECOMM_SOFT_FAR");
	if (fresh->mapping) {
		munmap(seg, SN_SEG_SIZE);
		seg = fresh->mapping->seg;
	} else if (!(fresh->mapping = sn_mapping_new(seg))) {
		munmap(seg, SN_SEG_SIZE);
		close(fd);
		free(fresh);
		*err = ENOMEM;
		return NULL;
	}
	fresh->seg = seg;
	fresh->staged = sn_stage_mode() == SN_STAGE_ALWAYS || (!fresh->local && !sn_may_read(seg));
	fresh->seg_fd = fresh->staged ? fd : -1;
	if (!fresh->staged)
		close(fd);
	atomic_fetch_or(&seg->users[me / 64], 1ULL << me % 64);
	if (p)
		fresh->retired = p;
	ctx->peers[slot] = fresh;
	return fresh;
}

struct sn_peer *sn_peer_get(struct sn_ctx *ctx, uint32_t slot, int *err)
{
	pthread_mutex_lock(&ctx->peer_lock);
	struct sn_peer *p = get(ctx, slot, err);
	pthread_mutex_unlock(&ctx->peer_lock);
	return p;
}

bool sn_peer_dead(struct sn_peer *p, uint64_t now)
{
	if (p->dead)
		return true;
	if (now < p->next_probe)
		return false;
	if (!sn_alive(p->id))
		p->dead = true;
	else if (now != SN_RETRY_NOW)
		p->next_probe = now + 2000000; /* a look costs a system call: every 2 ms is enough */
	return p->dead;
}

/* Writes one event into FIFO `number` of the peer. */
void sn_peer_event(struct sn_peer *p, uint32_t number, const struct sn_event *event)
{
	char path[192];
	unsigned i = number % 8;
	sn_spin(&p->lock);
	if (p->fifo[i].number != number) {
		if (p->fifo[i].number)
			close(p->fifo[i].fd);
		sn_fabric_path(path, sizeof(path), "ch-%u-%u", p->id & (SN_SLOTS - 1), number);
		/* read-write: a reader that went away must not kill us with SIGPIPE */
		int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
		p->fifo[i].number = fd < 0 ? 0 : number;
		p->fifo[i].fd = fd;
	}
	if (p->fifo[i].number && write(p->fifo[i].fd, event, sizeof(*event)) < 0) {
		/* full: its reader is awake enough to be woken by what lies there */
	}
	sn_unspin(&p->lock);
}

static void map_pool(struct sn_peer *p, uint32_t pool, uint32_t serial)
{
	struct sn_pool *shared = &p->seg->pools[pool];
	uint64_t want = shared->length, offset = shared->offset;
	char path[64];
	struct stat st;

	/* what the peer took back since has no user here; do not keep its pages */
	for (uint32_t i = 0; i < SN_POOLS; i++)
		if (p->pool[i].addr && atomic_load(&p->seg->pools[i].serial) != p->pool[i].serial) {
			munmap(p->pool[i].addr, p->pool[i].length);
			p->pool[i].addr = NULL;
		}
	p->pool[pool].serial = serial;
	snprintf(path, sizeof(path), "/proc/%d/fd/%d", p->pid, shared->fd);
	int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* the number may be another file's by now */
	if (fd < 0)
		return;
	if (!fstat(fd, &st) && (uint64_t)st.st_size >= offset && (uint64_t)st.st_size - offset >= want) {
		char *at = mmap(NULL, want, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
		if (at != MAP_FAILED && atomic_load(&shared->serial) != serial)
			munmap(at, want);
		else if (at != MAP_FAILED) {
			p->pool[pool].addr = at;
			p->pool[pool].length = want;
		}
	}
	close(fd);
}

/* The peer's memory at `offset` of one of its pools, mapped here; NULL: go through process_vm.
 * The caller's claim keeps the pool alive, so a mapping that is replaced has no user. */
char *sn_peer_pool(struct sn_peer *p, const struct sn_mr *mr, uint64_t offset, uint64_t length)
{
	uint32_t pool = mr->pool - 1;
	if (pool >= SN_POOLS)
		return NULL;
	offset += mr->pool_offset;
	uint32_t serial = atomic_load_explicit(&p->seg->pools[pool].serial, memory_order_acquire);
	char *addr = NULL;
	if (!serial || serial != mr->pool_serial)
		return NULL; /* given back while it was registered */
	sn_spin(&p->lock);
	if (p->pool[pool].serial != serial) {
		/* a file that is registered for one transfer is not worth mapping */
		if (p->pool[pool].want != serial) {
			p->pool[pool].want = serial;
			p->pool[pool].uses = 0;
		}
		if (++p->pool[pool].uses > p->seg->pools[pool].from_use)
			map_pool(p, pool, serial);
	}
	if (p->pool[pool].serial == serial && p->pool[pool].addr && offset <= p->pool[pool].length && length <= p->pool[pool].length - offset)
		addr = p->pool[pool].addr + offset;
	sn_unspin(&p->lock);
	return addr;
}

void sn_peers_free(struct sn_ctx *ctx)
{
	for (uint32_t i = 0; i < SN_SLOTS; i++)
		for (struct sn_peer *p = ctx->peers[i], *next; p; p = next) {
			next = p->retired;
			drop(p);
		}
}
