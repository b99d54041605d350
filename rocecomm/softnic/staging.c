/* Staging: how bytes reach a process whose memory the system does not let us touch.
 *
 * The owner of the memory runs one helper thread. An executor puts the bytes (or the wish for some)
 * into a slot of the owner's segment, in chunks and two at a time, so that both copy at once; the
 * helper carries them to or from its own memory. Both do it by reading and writing the segment's
 * file, for which an address that is no longer mapped is EFAULT and not a signal, and which no
 * security policy refuses. The executor's claim covers what the helper does on its behalf; what a
 * dead or impatient executor has left behind, sn_stage_settle waits for.
 *
 * Nothing of this exists, thread included, unless two processes need it. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "softnic.h"

#define IDLE_TRIES 50 /* looks before the helper goes to sleep */
#define PATIENCE_NS (2 * SN_LOCK_WAIT_NS) /* an owner that makes no headway for so long is stopped */

enum sn_stage_mode sn_stage_mode(void)
{
	static _Atomic int mode = -1;
	int m = atomic_load_explicit(&mode, memory_order_relaxed);
	if (m < 0) {
		const char *text = secure_getenv("ROCECOMM_SOFT_STAGING");
		m = !text || (strcmp(text, "0") && strcmp(text, "1")) ? SN_STAGE_AUTO
		    : *text == '1'				      ? SN_STAGE_ALWAYS
								      : SN_STAGE_NEVER;
		atomic_store(&mode, m);
	}
	return (enum sn_stage_mode)m;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value, long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
	syscall(SYS_futex, word, FUTEX_WAIT, value, ms ? &t : NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static struct sn_staging *staging_of(struct sn_seg *seg)
{
	uint64_t at = atomic_load_explicit(&seg->staging, memory_order_acquire);
	return at ? sn_at(seg, at) : NULL;
}

static uint64_t room(uint32_t chunk)
{
	return SN_ROUND(sizeof(struct sn_staging)) + 2ULL * SN_STAGE_SLOTS * chunk;
}

/* Where in the segment's file the bytes of a half lie. */
static uint64_t data_at(struct sn_seg *seg, const struct sn_staging *st, uint32_t slot, uint32_t half)
{
	uint64_t start = (uint64_t)((const char *)st - (const char *)seg) + SN_ROUND(sizeof(*st));
	return start + (uint64_t)(2 * slot + half) * st->chunk;
}

/* Between memory of this process, described by pieces, and the file. */
static bool move(int fd, uint64_t at, bool to_file, const struct sn_piece *p, int num, uint64_t skip, uint64_t length)
{
	for (uint64_t done = 0; done < length;) {
		struct iovec iov[SN_IOVECS];
		int n = sn_iovec(iov, p, num, skip + done, length - done, true);
		ssize_t r = to_file ? pwritev(fd, iov, n, (off_t)(at + done)) : preadv(fd, iov, n, (off_t)(at + done));
		if (r > 0)
			done += (uint64_t)r; /* a short count: the next call says why, or goes on */
		else if (r == 0 || errno != EINTR)
			return false;
	}
	return true;
}

/* ---- the helper: in the owner of the memory ------------------------------------------------- */

static bool carry(struct sn_ctx *ctx, struct sn_staging *st, struct sn_stage_half *h, uint64_t at)
{
	struct sn_piece p[SN_STAGE_PIECES];
	uint32_t num = h->num;
	uint64_t length = 0;

	if (num > SN_STAGE_PIECES)
		return false;
	for (uint32_t i = 0; i < num; i++) {
		p[i] = (struct sn_piece){ (char *)(uintptr_t)h->piece[i].addr, h->piece[i].addr, h->piece[i].len };
		if (p[i].len > st->chunk || (length += p[i].len) > st->chunk)
			return false;
	}
	sn_helper_seen(ctx);
	bool ok = move(ctx->seg_fd, at, h->kind == SN_STAGE_FETCH, p, (int)num, 0, length);
	sn_helper_done(ctx);
	return ok;
}

static bool populate(uintptr_t addr)
{
	return madvise((void *)(addr & ~(SN_PAGE - 1)), SN_PAGE, 23 /* MADV_POPULATE_WRITE */) == 0;
}

/* May the word be written? Asked without writing it; Linux before 5.14 only says whether it is there. */
static bool writable(struct sn_ctx *ctx, uint64_t at, const struct sn_piece *word)
{
	char known;
	return populate(word->addr) || (!populate((uintptr_t)&known) && move(ctx->seg_fd, at, true, word, 1, 0, 8));
}

/* Under the lock that every read-modify-write of this device on this memory takes. */
static bool modify(struct sn_ctx *ctx, struct sn_stage_half *h, uint64_t at)
{
	struct sn_piece word = { (char *)(uintptr_t)h->piece[0].addr, h->piece[0].addr, 8 };
	uint64_t operand = h->compare_add, swap = h->swap, old = 0;
	bool add = h->kind == SN_STAGE_ADD, ok;

	if (!sn_lock(ctx, &ctx->seg->atomics))
		return false;
	if (word.addr % 8 == 0) {
		/* the program itself may use the CPU's atomics on the same word */
		_Atomic uint64_t *w = (_Atomic uint64_t *)(void *)word.ptr;
		ok = writable(ctx, at, &word);
		if (ok && add) {
			old = atomic_fetch_add(w, operand);
		} else if (ok) {
			old = operand;
			atomic_compare_exchange_strong(w, &old, swap);
		}
	} else {
		ok = move(ctx->seg_fd, at, true, &word, 1, 0, 8);
		memcpy(&old, sn_at(ctx->seg, at), 8);
		uint64_t fresh = add ? old + operand : swap;
		memcpy(sn_at(ctx->seg, at), &fresh, 8);
		if (ok && (add || old == operand))
			ok = move(ctx->seg_fd, at, false, &word, 1, 0, 8);
	}
	sn_unlock(&ctx->seg->atomics);
	h->old = old;
	return ok;
}

static bool answer(struct sn_ctx *ctx, struct sn_staging *st, uint32_t slot, uint32_t half)
{
	struct sn_stage_half *h = &st->slot[slot].half[half];
	uint32_t asked = SN_STAGE_ASKED;
	if (atomic_load_explicit(&h->state, memory_order_relaxed) != SN_STAGE_ASKED ||
	    !atomic_compare_exchange_strong(&h->state, &asked, SN_STAGE_BUSY))
		return false;
	uint64_t at = data_at(ctx->seg, st, slot, half);
	bool ok = h->kind == SN_STAGE_STORE || h->kind == SN_STAGE_FETCH ? carry(ctx, st, h, at) : modify(ctx, h, at);
	atomic_store(&h->state, ok ? SN_STAGE_DONE : SN_STAGE_FAULT);
	if (atomic_exchange(&h->watched, 0))
		futex_wake(&h->state);
	return true;
}

static void *serve(void *arg)
{
	struct sn_ctx *ctx = arg;
	struct sn_staging *st = staging_of(ctx->seg);
	int idle = 0;

	prctl(PR_SET_NAME, "softnic-staging", 0, 0, 0);
	for (;;) {
		uint32_t bell = atomic_load(&st->bell);
		bool worked = false;
		for (uint32_t i = 0; i < 2 * SN_STAGE_SLOTS; i++)
			worked |= answer(ctx, st, i / 2, i % 2);
		if (worked)
			idle = 0;
		else if (atomic_load(&ctx->stage_stop))
			return NULL;
		else if (++idle < IDLE_TRIES)
			sched_yield();
		else {
			atomic_store(&st->asleep, 1);
			if (atomic_load(&st->bell) == bell)
				futex_wait(&st->bell, bell, 0);
			atomic_store(&st->asleep, 0);
			idle = 0;
		}
	}
}

static void ring(struct sn_staging *st)
{
	atomic_fetch_add(&st->bell, 1);
	if (atomic_load(&st->asleep))
		futex_wake(&st->bell);
}

/* Memory and thread for those who cannot reach us; with ctx->lock held. */
int sn_stage_start(struct sn_ctx *ctx)
{
	uint32_t chunk = SN_STAGE_CHUNK;
	sigset_t all, before;
	uint64_t at;
	int err;

	if (atomic_load(&ctx->seg->staging))
		return 0;
	err = sn_heap_get(ctx, room(chunk), &at);
	if (err == ENOSPC) { /* a very small /dev/shm: smaller steps do as well */
		chunk = SN_STAGE_CHUNK_LEAST;
		err = sn_heap_get(ctx, room(chunk), &at);
	}
	if (err)
		return err;
	struct sn_staging *st = sn_at(ctx->seg, at);
	memset(st, 0, sizeof(*st));
	st->chunk = chunk;
	atomic_store_explicit(&ctx->seg->staging, at, memory_order_release);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's business, not this thread's */
	err = pthread_create(&ctx->stage_thread, NULL, serve, ctx);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (err) {
		atomic_store(&ctx->seg->staging, 0);
		sn_heap_put(ctx, at, room(chunk));
		return sn_because(err, "cannot start the helper thread that staging needs: %s (process_vm is refused between "
				       "this process and its peer)", strerror(err));
	}
	return 0;
}

void sn_stage_stop(struct sn_ctx *ctx)
{
	struct sn_staging *st = staging_of(ctx->seg);
	if (!st || atomic_exchange(&ctx->stage_stop, 1))
		return;
	ring(st);
	pthread_join(ctx->stage_thread, NULL);
}

/* Somebody found out that it cannot reach us. */
void sn_stage_answer(struct sn_ctx *ctx)
{
	uint32_t wanted = 1;
	if (sn_stage_mode() == SN_STAGE_NEVER || pthread_mutex_trylock(&ctx->lock))
		return;
	if (atomic_compare_exchange_strong(&ctx->seg->staging_wanted, &wanted, 2) && sn_stage_start(ctx) == 0)
		for (uint32_t i = 0; i < atomic_load(&ctx->seg->qp_limit); i++)
			if (ctx->qps[i] && !ctx->qps[i]->destroying)
				sn_drive_peer(ctx->qps[i]);
	pthread_mutex_unlock(&ctx->lock);
}

/* From the return on the helper does nothing more for executors that are dead or have given up. */
void sn_stage_settle(struct sn_ctx *ctx)
{
	struct sn_staging *st = staging_of(ctx->seg);
	for (uint32_t i = 0; st && i < 2 * SN_STAGE_SLOTS; i++) {
		struct sn_stage_slot *slot = &st->slot[i / 2];
		struct sn_stage_half *h = &slot->half[i % 2];
		for (;;) {
			uint32_t state = atomic_load(&h->state);
			if (state == SN_STAGE_BUSY) {
				sched_yield();
				continue;
			}
			if (state != SN_STAGE_ASKED)
				break;
			sn_id holder = atomic_load(&slot->lock.owner);
			if (holder && sn_alive(holder))
				break; /* whoever waits for it knows its claim */
			atomic_compare_exchange_strong(&h->state, &state, SN_STAGE_FREE);
		}
	}
}

/* ---- the executor ---------------------------------------------------------------------------- */

/* The owner has not started its helper yet: ask it, and wake it if it sleeps. */
bool sn_stage_missing(struct sn_ctx *ctx, const struct sn_side *side)
{
	if (!sn_staged(side) || atomic_load_explicit(&side->seg->staging, memory_order_acquire))
		return false;
	uint32_t zero = 0, index[2] = { side->qp->recv_cq, side->qp->send_cq };
	atomic_compare_exchange_strong(&side->seg->staging_wanted, &zero, 1);
	for (int i = 0; i < 2; i++) {
		struct sn_cq *cq = sn_cq_at(side->seg, index[i]);
		if (index[i] < atomic_load(&side->seg->cq_limit) && cq->channel &&
		    atomic_exchange(&cq->armed, SN_ARM_NONE) != SN_ARM_NONE)
			sn_channel_notify(ctx, side, cq->channel, index[i], cq->epoch);
	}
	return true;
}

/* What an executor that died or gave up left in the slot goes; false: the helper is still at it. */
static bool clean(struct sn_stage_slot *slot)
{
	bool ok = true;
	for (int i = 0; i < 2; i++) {
		uint32_t asked = SN_STAGE_ASKED;
		atomic_compare_exchange_strong(&slot->half[i].state, &asked, SN_STAGE_FREE);
		ok &= atomic_load(&slot->half[i].state) != SN_STAGE_BUSY;
	}
	return ok;
}

static bool lock_slot(struct sn_ctx *ctx, struct sn_stage_slot *slot, bool look)
{
	sn_id holder = atomic_load_explicit(&slot->lock.owner, memory_order_relaxed);
	if (!sn_try_lock(ctx, &slot->lock) &&
	    !(look && holder && !sn_alive(holder) && atomic_compare_exchange_strong(&slot->lock.owner, &holder, ctx->id)))
		return false;
	if (clean(slot))
		return true;
	sn_unlock(&slot->lock);
	return false;
}

static struct sn_stage_slot *take_slot(struct sn_ctx *ctx, const struct sn_side *side, struct sn_staging *st)
{
	uint64_t start = sn_now();
	for (uint32_t tries = 0;; tries++) {
		bool look = tries % 64 == 63;
		for (uint32_t i = 0; i < SN_STAGE_SLOTS; i++) {
			struct sn_stage_slot *slot = &st->slot[(ctx->id + i) % SN_STAGE_SLOTS];
			if (lock_slot(ctx, slot, look))
				return slot;
		}
		if (look && (sn_peer_dead(side->peer, sn_now()) || sn_now() - start > PATIENCE_NS))
			return NULL;
		sched_yield();
	}
}

static void ask(struct sn_staging *st, struct sn_stage_half *h, uint32_t kind, uint32_t num)
{
	h->kind = kind;
	h->num = num;
	atomic_store(&h->watched, 0);
	atomic_store_explicit(&h->state, SN_STAGE_ASKED, memory_order_release);
	ring(st);
}

static enum sn_copy_result await(const struct sn_side *side, struct sn_stage_half *h)
{
	uint64_t start = 0;
	for (uint32_t tries = 0;; tries++) {
		uint32_t state = atomic_load_explicit(&h->state, memory_order_acquire);
		if (state == SN_STAGE_DONE)
			return SN_COPY_OK;
		if (state != SN_STAGE_ASKED && state != SN_STAGE_BUSY)
			return SN_COPY_FAULT;
		if (tries < 64) {
			sn_pause();
		} else if (tries < 128) {
			sched_yield();
		} else {
			uint64_t now = sn_now();
			if (!start)
				start = now;
			if (sn_peer_dead(side->peer, now) || now - start > PATIENCE_NS)
				return SN_COPY_DEAD;
			atomic_store(&h->watched, 1);
			futex_wait(&h->state, state, 5);
		}
	}
}

/* The slot goes back with nothing asked for in it. What the helper of a living owner has begun is
 * waited for, since our claim is about to end; one that is stopped finishes when it goes on, and its
 * owner waits for it then. */
static void leave_slot(const struct sn_side *side, struct sn_stage_slot *slot, bool wait)
{
	if (!clean(slot) && wait)
		for (int i = 0; i < 2; i++)
			if (atomic_load(&slot->half[i].state) == SN_STAGE_BUSY)
				await(side, &slot->half[i]);
	sn_unlock(&slot->lock);
}

enum sn_copy_result sn_stage_copy(struct sn_ctx *ctx, const struct sn_side *side, bool write, const struct sn_piece *local,
				  int num_local, const struct sn_piece *far, int num_far, uint64_t length)
{
	struct sn_staging *st = staging_of(side->seg);
	struct sn_stage_slot *slot = st ? take_slot(ctx, side, st) : NULL;
	enum sn_copy_result r = SN_COPY_OK;
	uint64_t asked = 0, done = 0;
	uint32_t chunk, index;

	if (!slot)
		return SN_COPY_DEAD;
	chunk = st->chunk;
	index = (uint32_t)(slot - st->slot);
	for (uint32_t ahead = 0, turn = 0; done < length && r == SN_COPY_OK;) {
		if (ahead < 2 && asked < length) {
			uint32_t which = (turn + ahead) % 2;
			struct sn_stage_half *h = &slot->half[which];
			uint64_t part = length - asked < chunk ? length - asked : chunk;
			struct iovec there[SN_IOVECS];
			int n = sn_iovec(there, far, num_far, asked, part, false);
			if (n > (int)SN_STAGE_PIECES ||
			    (write && !move(side->peer->seg_fd, data_at(side->seg, st, index, which), true, local, num_local,
					    asked, part))) {
				r = SN_COPY_FAULT;
				break;
			}
			for (int i = 0; i < n; i++) {
				h->piece[i].addr = (uintptr_t)there[i].iov_base;
				h->piece[i].len = there[i].iov_len;
			}
			ask(st, h, write ? SN_STAGE_STORE : SN_STAGE_FETCH, (uint32_t)n);
			asked += part;
			ahead++;
			continue;
		}
		uint64_t part = length - done < chunk ? length - done : chunk;
		r = await(side, &slot->half[turn]);
		if (r == SN_COPY_OK && !write &&
		    !move(side->peer->seg_fd, data_at(side->seg, st, index, turn), false, local, num_local, done, part))
			r = SN_COPY_FAULT;
		done += part;
		turn ^= 1;
		ahead--;
	}
	leave_slot(side, slot, r == SN_COPY_FAULT);
	return r;
}

enum sn_copy_result sn_stage_atomic(struct sn_ctx *ctx, const struct sn_side *side, uint64_t addr, uint32_t opcode,
				    uint64_t compare_add, uint64_t swap, uint64_t *old)
{
	struct sn_staging *st = staging_of(side->seg);
	struct sn_stage_slot *slot = st ? take_slot(ctx, side, st) : NULL;
	if (!slot)
		return SN_COPY_DEAD;
	struct sn_stage_half *h = &slot->half[0];
	h->piece[0].addr = addr;
	h->piece[0].len = 8;
	h->compare_add = compare_add;
	h->swap = swap;
	ask(st, h, opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? SN_STAGE_ADD : SN_STAGE_SWAP, 1);
	enum sn_copy_result r = await(side, h);
	*old = h->old;
	leave_slot(side, slot, false);
	return r;
}

/* ---- connecting ------------------------------------------------------------------------------ */

static void say_once(int pid)
{
	static _Atomic int said;
	if (sn_stage_mode() == SN_STAGE_AUTO && !atomic_exchange(&said, 1))
		fprintf(stderr, "softnic: the system does not let process %d reach the memory of process %d (process_vm_readv "
				"refused): messages between them go through shared staging memory, which is slower. "
				"kernel.yama.ptrace_scope=0 or --cap-add=SYS_PTRACE avoids it; ROCECOMM_SOFT_STAGING=1 "
				"silences this line\n", (int)sn_pid, pid);
}

/* At RTR of a QP: is staging needed in either direction? `peer` is NULL for a datagram QP. A peer
 * that cannot reach us, for a reason that is not to be seen from here, asks later (sn_stage_missing). */
int sn_stage_connect(struct sn_ctx *ctx, const struct sn_side *peer)
{
	enum sn_stage_mode mode = sn_stage_mode();
	bool far = peer && peer->peer && peer->peer->staged;
	/* most reasons hold both ways; the others are told by our flag, or by the peer's segment */
	bool near = far || mode == SN_STAGE_ALWAYS || (peer && peer->seg->refused) || prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) != 1 ||
		    atomic_load(&ctx->seg->staging_wanted);

	if (peer && !peer->peer)
		return 0; /* to ourselves */
	if (mode == SN_STAGE_NEVER)
		return !far ? 0
			    : sn_because(EPERM, "the system does not let this process reach the memory of its peer, process %d "
						"(process_vm_readv refused), and ROCECOMM_SOFT_STAGING=0 forbids the detour: run "
						"both as the same user in one container, and allow it "
						"(kernel.yama.ptrace_scope=0, --cap-add=SYS_PTRACE)", peer->peer->pid);
	if (far) {
		say_once(peer->peer->pid);
		sn_stage_missing(ctx, peer);
	}
	return near ? sn_stage_start(ctx) : 0;
}
