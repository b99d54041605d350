/* What this machine gives to a large message: a ping-pong between two processes by bare process_vm calls,
 * with the arrays and the turns of benchmarks/messages.py. One end copies all of a message, or both take
 * chunks of it from a shared counter, as soft0 does.
 *
 *     both_ends BYTES ROUNDS      prints "one both" for each round: microseconds per message */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define CHUNK (256ul << 10)
#define RUN 8
#define HUGE_PAGE (2ul << 20)
#define SECONDS 0.06

enum { WARM_UP = 2 };

static struct shared {
	_Atomic unsigned turn, parts, ready;
	_Atomic uint64_t next;
	char *outgoing[2], *incoming[2];
	pid_t pid[2];
} *shared;
static size_t length;
static unsigned turn; /* messages so far; the same in both processes */

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static char *array(void)
{
	char *p = mmap(NULL, length + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	p = (char *)(((uintptr_t)p + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
	madvise(p, length, MADV_HUGEPAGE); /* as numpy does for large arrays */
	memset(p, 1, length);
	return p;
}

static void move(int writes, pid_t other, char *near, char *far, size_t n)
{
	while (n) {
		struct iovec mine = { near, n }, theirs = { far, n };
		ssize_t done = writes ? process_vm_writev(other, &mine, 1, &theirs, 1, 0) :
					process_vm_readv(other, &mine, 1, &theirs, 1, 0);
		if (done <= 0) {
			perror(writes ? "process_vm_writev" : "process_vm_readv");
			exit(1);
		}
		near += done;
		far += done;
		n -= (size_t)done;
	}
}

static void together(int writes, pid_t other, char *near, char *far)
{
	uint64_t chunks = (length + CHUNK - 1) / CHUNK, at = atomic_load(&shared->next);
	while (at < chunks) {
		uint64_t num = (chunks - at) / 4;
		num = num < 1 ? 1 : num < RUN ? num : RUN;
		if (!atomic_compare_exchange_weak(&shared->next, &at, at + num))
			continue;
		size_t from = at * CHUNK, n = num * CHUNK;
		move(writes, other, near + from, far + from, n < length - from ? n : length - from);
		at = atomic_load(&shared->next);
	}
}

static void messages(int me, int both, int count)
{
	for (int i = 0; i < count; i++, turn++) {
		int sends = me == (int)(turn & 1);
		pid_t other = shared->pid[!me];
		char *near = sends ? shared->outgoing[me] : shared->incoming[me];
		char *far = sends ? shared->incoming[!me] : shared->outgoing[!me];
		if (both)
			together(sends, other, near, far);
		else if (!sends)
			move(0, other, near, far, length);
		atomic_fetch_add(&shared->parts, 1);
		if (!sends) {
			while (atomic_load(&shared->parts) < 2)
				sched_yield();
			atomic_store(&shared->parts, 0);
			atomic_store(&shared->next, 0);
			atomic_store(&shared->turn, turn + 1);
		}
		while (atomic_load(&shared->turn) != turn + 1)
			sched_yield();
	}
}

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "usage: both_ends BYTES ROUNDS\n");
		return 2;
	}
	length = strtoul(argv[1], NULL, 0);
	int rounds = atoi(argv[2]), count = 2 * (int)(SECONDS * 6e9 / (double)length) + 2, status = 0;
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED || !length) {
		fprintf(stderr, "no memory, or no bytes\n");
		return 1;
	}
	pid_t parent = getpid(), child = fork();
	int me = child == 0;
	if (me) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			return 1;
	} else if (child < 0) {
		perror("fork");
		return 1;
	}
	alarm(120);
	shared->pid[me] = getpid();
	shared->outgoing[me] = array();
	shared->incoming[me] = array();
	atomic_fetch_add(&shared->ready, 1);
	while (atomic_load(&shared->ready) < 2)
		if (!me && waitpid(child, &status, WNOHANG))
			return 1;
	for (int both = 0; both < 2; both++)
		messages(me, both, WARM_UP);
	for (int r = 0; r < rounds; r++) {
		double took[2];
		for (int both = 0; both < 2; both++) {
			double start = now();
			messages(me, both, count);
			took[both] = (now() - start) / count * 1e6;
		}
		if (!me)
			printf("%.3f %.3f\n", took[0], took[1]);
	}
	if (me)
		return 0;
	return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}
