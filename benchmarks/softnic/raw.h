/* What the baseline programs share: pinning, time, buffers as perftest has them, the result line.
 *
 * Each program measures one way to move bytes between two processes without any library, prints
 * one line of JSON and ends by itself: an alarm bounds it, and its child dies with it.
 */
#ifndef RAW_H
#define RAW_H

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RAW_LIMIT 30 /* seconds */

static inline void raw_die(const char *what)
{
	perror(what);
	exit(1);
}

static inline void raw_pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		raw_die("sched_setaffinity");
}

static inline double raw_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

/* The cheapest clock, as perftest reads it; raw_tick is the length of one tick in microseconds. */
static inline uint64_t raw_ticks(void)
{
#if defined(__x86_64__)
	return __builtin_ia32_rdtsc();
#else
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
#endif
}

static inline double raw_tick(void)
{
	double start = raw_now();
	uint64_t ticks = raw_ticks();

	while (raw_now() - start < 0.02)
		;
	ticks = raw_ticks() - ticks;
	return (raw_now() - start) * 1e6 / ticks;
}

static inline void *raw_shared(size_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		raw_die("mmap");
	return p;
}

/* perftest's buffer: page-aligned heap, twice the message, every page touched. Messages leave
 * from the first half and arrive in the second, always at the same address if they are large. */
static inline char *raw_buffer(size_t size)
{
	void *p;

	if (size < 4096)
		size = 4096;
	if (posix_memalign(&p, 4096, 2 * size))
		raw_die("posix_memalign");
	for (size_t i = 0; i < 2 * size; i++)
		((char *)p)[i] = (char)(i * 2654435761u >> 13);
	return p;
}

/* fork; the child cannot outlive the parent. Both are bounded by an alarm. */
static inline pid_t raw_fork(void)
{
	pid_t parent = getpid(), pid = fork();

	if (pid < 0)
		raw_die("fork");
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(1);
	}
	alarm(RAW_LIMIT);
	return pid;
}

static inline void raw_end(pid_t child)
{
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

static int raw_order(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

/* Percentiles of `count` intervals, each divided by `share`, in microseconds. */
static inline void raw_report(uint64_t *interval, size_t count, double tick, int share)
{
	double unit = tick / share;

	qsort(interval, count, sizeof(*interval), raw_order);
	printf("{\"usec\": %.4f, \"p10\": %.4f, \"p90\": %.4f, \"p99\": %.4f, \"count\": %zu}\n",
	       interval[count / 2] * unit, interval[count / 10] * unit, interval[count * 9 / 10] * unit,
	       interval[count * 99 / 100] * unit, count);
}

#endif
