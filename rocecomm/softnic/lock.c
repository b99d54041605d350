/* Spinlocks that survive the death of their holder.
 *
 * The word names the holder (slot and generation). Waiting yields the CPU early, since two
 * processes often share one; a holder that is dead loses the lock to whoever waits. What a lock
 * protects is therefore written so that it can be left half done at any instruction: entries
 * first, then one store that publishes them. */
#define _GNU_SOURCE
#include <sched.h>
#include <unistd.h>

#include "softnic.h"

pid_t sn_pid;

static void forked(void)
{
	sn_pid = getpid();
	sn_fabric_forked();
	sn_pool_forked();
	sn_faults_forked();
}

__attribute__((constructor)) static void start(void)
{
	sn_pid = getpid();
	pthread_atfork(NULL, NULL, forked);
}

uint64_t sn_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

/* Some milliseconds behind, at a fifth of the price. */
uint64_t sn_now_coarse(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

bool sn_try_lock(struct sn_ctx *ctx, struct sn_lock *l)
{
	sn_id holder = atomic_load_explicit(&l->owner, memory_order_relaxed);
	return holder == 0 && atomic_compare_exchange_strong_explicit(&l->owner, &holder, ctx->id, memory_order_acquire,
								      memory_order_relaxed);
}

bool sn_lock(struct sn_ctx *ctx, struct sn_lock *l)
{
	uint64_t start = 0;
	for (uint32_t tries = 0;; tries++) {
		if (sn_try_lock(ctx, l))
			return true;
		if (tries < 64) {
			sn_pause();
			continue;
		}
		sched_yield();
		if (tries % 256 != 255)
			continue;
		sn_id holder = atomic_load(&l->owner);
		if (holder && !sn_alive(holder) &&
		    atomic_compare_exchange_strong(&l->owner, &holder, ctx->id))
			return true; /* a dead holder's lock */
		uint64_t now = sn_now();
		if (!start)
			start = now;
		else if (now - start > SN_LOCK_WAIT_NS)
			return false;
	}
}

/* Of a lock that may have been taken from us while we were stopped. */
void sn_unlock_mine(struct sn_ctx *ctx, struct sn_lock *l)
{
	sn_id me = ctx->id;
	atomic_compare_exchange_strong_explicit(&l->owner, &me, 0, memory_order_release, memory_order_relaxed);
}

/* Between threads of one process only. */
void sn_spin(_Atomic uint32_t *l)
{
	for (uint32_t tries = 0;; tries++) {
		uint32_t zero = 0;
		if (atomic_load_explicit(l, memory_order_relaxed) == 0 &&
		    atomic_compare_exchange_strong_explicit(l, &zero, 1, memory_order_acquire, memory_order_relaxed))
			return;
		if (tries < 64)
			sn_pause();
		else
			sched_yield();
	}
}
