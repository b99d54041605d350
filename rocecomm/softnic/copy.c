/* The one place where bytes move: plain memcpy where both ends are reachable from here, else one
 * process_vm call per run of pieces. */
#define _GNU_SOURCE
#include <unistd.h>

#include "softnic.h"

/* Where `addr` of region `mr` of a side lies as seen from this process. */
void sn_piece_of(struct sn_piece *p, const struct sn_side *side, const struct sn_mr *mr, uint64_t addr, uint64_t length)
{
	uint64_t offset = addr - mr->iova;
	p->addr = mr->host + offset;
	p->len = length;
	if (sn_staged(side)) /* not through /proc either: its pid may be somebody else's here */
		p->ptr = NULL;
	else if (!side->peer || side->peer->local)
		p->ptr = (char *)(uintptr_t)p->addr;
	else
		p->ptr = mr->pool ? sn_peer_pool(side->peer, mr, offset, length) : NULL;
}

static void copy_mapped(bool write, const struct sn_piece *local, const struct sn_piece *far, uint64_t length)
{
	uint64_t lo = 0, fo = 0;
	while (length) {
		uint64_t n = local->len - lo < far->len - fo ? local->len - lo : far->len - fo;
		n = n < length ? n : length;
		if (n)
			memmove(write ? far->ptr + fo : local->ptr + lo, write ? local->ptr + lo : far->ptr + fo, n);
		lo += n;
		fo += n;
		length -= n;
		if (lo == local->len) {
			local++;
			lo = 0;
		}
		if (fo == far->len) {
			far++;
			fo = 0;
		}
	}
}

/* `length` bytes from `skip` on of these pieces, as seen from here or in their owner. */
int sn_iovec(struct iovec *iov, const struct sn_piece *p, int num, uint64_t skip, uint64_t length, bool here)
{
	int n = 0;
	for (int i = 0; i < num && n < SN_IOVECS && length; i++) {
		if (skip >= p[i].len) {
			skip -= p[i].len;
			continue;
		}
		uint64_t len = p[i].len - skip < length ? p[i].len - skip : length;
		iov[n].iov_base = here ? p[i].ptr + skip : (char *)(uintptr_t)p[i].addr + skip;
		iov[n++].iov_len = len;
		length -= len;
		skip = 0;
	}
	return n;
}

/* `write`: from the local pieces into the far ones, which are the memory of `other`; else the other way. */
enum sn_copy_result sn_copy(struct sn_ctx *ctx, const struct sn_side *other, bool write, const struct sn_piece *local,
			    int num_local, const struct sn_piece *far, int num_far, uint64_t length)
{
	int pid = other->seg->pid;
	bool mapped = true;
	if (num_local == 1 && num_far == 1 && far->ptr && length <= local->len && length <= far->len) {
		memmove(write ? far->ptr : local->ptr, write ? local->ptr : far->ptr, length);
		return SN_COPY_OK;
	}
	for (int i = 0; i < num_far; i++)
		mapped &= far[i].ptr != NULL || !far[i].len;
	if (mapped) {
		copy_mapped(write, local, far, length);
		return SN_COPY_OK;
	}
	if (sn_staged(other))
		return sn_stage_copy(ctx, other, write, local, num_local, far, num_far, length);
	for (uint64_t done = 0; done < length;) {
		struct iovec here[SN_IOVECS], there[SN_IOVECS];
		uint64_t part = length - done < (1ULL << 30) ? length - done : 1ULL << 30;
		int h = sn_iovec(here, local, num_local, done, part, true);
		int t = sn_iovec(there, far, num_far, done, part, false);
		ssize_t n = write ? process_vm_writev(pid, here, (unsigned long)h, there, (unsigned long)t, 0)
				  : process_vm_readv(pid, here, (unsigned long)h, there, (unsigned long)t, 0);
		if (n > 0)
			done += (uint64_t)n; /* a short count: the next call says why, or goes on */
		else if (n < 0 && errno == EINTR)
			continue;
		else
			return n < 0 && errno == ESRCH ? SN_COPY_DEAD : SN_COPY_FAULT;
	}
	return SN_COPY_OK;
}

/* A read-modify-write of 8 bytes in T's memory, atomic among all that go through this device. */
enum sn_copy_result sn_atomic(struct sn_ctx *ctx, const struct sn_side *t, struct sn_piece *where, uint32_t opcode,
			      uint64_t compare_add, uint64_t swap, uint64_t *old)
{
	struct sn_piece word = { .ptr = (char *)old, .len = 8 };
	enum sn_copy_result r = SN_COPY_OK;
	uint64_t value;

	if (!where->ptr && sn_staged(t) && opcode == IBV_WR_ATOMIC_WRITE) { /* until the word was what we took it for */
		*old = 0;
		do {
			compare_add = *old;
			r = sn_stage_atomic(ctx, t, where->addr, IBV_WR_ATOMIC_CMP_AND_SWP, compare_add, swap, old);
		} while (r == SN_COPY_OK && *old != compare_add);
		return r;
	}
	if (!where->ptr && sn_staged(t))
		return sn_stage_atomic(ctx, t, where->addr, opcode, compare_add, swap, old);
	if (!sn_lock(ctx, &t->seg->atomics))
		return SN_COPY_DEAD;
	if (where->ptr && (uintptr_t)where->ptr % 8 == 0) {
		/* the program itself may use the CPU's atomics on the same word */
		_Atomic uint64_t *at = (_Atomic uint64_t *)(void *)where->ptr;
		if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			*old = atomic_fetch_add(at, compare_add);
		} else if (opcode == IBV_WR_ATOMIC_WRITE) {
			*old = atomic_exchange(at, swap);
		} else {
			*old = compare_add;
			atomic_compare_exchange_strong(at, old, swap);
		}
	} else {
		r = sn_copy(ctx, t, false, &word, 1, where, 1, 8);
		if (r == SN_COPY_OK) {
			bool store = opcode != IBV_WR_ATOMIC_CMP_AND_SWP || *old == compare_add;
			value = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? *old + compare_add : swap;
			struct sn_piece fresh = { .ptr = (char *)&value, .len = 8 };
			if (store)
				r = sn_copy(ctx, t, true, &fresh, 1, where, 1, 8);
		}
	}
	sn_unlock(&t->seg->atomics);
	return r;
}
