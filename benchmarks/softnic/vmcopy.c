/* vmcopy write|read SIZE COUNT CPU PEER_CPU sleep|poll: a loop over process_vm_writev or readv.
 *
 * What one process can move into or out of another, a system call per message. The other one
 * sleeps, or polls a word of its own memory as a receiver does. Reports the typical call and the
 * bytes per second of the whole loop.
 */
#include <sys/uio.h>

#include "raw.h"

struct target {
	_Atomic int ready;
	char *buffer;
};

static void be_target(struct target *t, size_t size, int cpu, int polls)
{
	volatile char *word;

	raw_pin(cpu);
	t->buffer = raw_buffer(size);
	word = malloc(4096);
	*word = 0;
	atomic_store(&t->ready, 1);
	while (polls && !*word)
		;
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	if (argc != 7)
		return 2;
	int writes = strcmp(argv[1], "write") == 0, polls = strcmp(argv[6], "poll") == 0;
	size_t size = strtoul(argv[2], NULL, 0), count = strtoul(argv[3], NULL, 0);
	size_t half = size < 4096 ? 4096 : size;
	struct target *t = raw_shared(sizeof(*t));
	uint64_t *interval = calloc(count, sizeof(*interval));
	pid_t child = raw_fork();

	if (child == 0)
		be_target(t, size, atoi(argv[5]), polls);
	raw_pin(atoi(argv[4]));
	char *mine = raw_buffer(size);

	while (!atomic_load(&t->ready))
		usleep(100);
	/* a message leaves its sender's first half and arrives in the receiver's second */
	struct iovec local = { mine + (writes ? 0 : half), size };
	struct iovec remote = { t->buffer + (writes ? half : 0), size };
	double tick = raw_tick();

	ssize_t (*move)(pid_t, const struct iovec *, unsigned long, const struct iovec *,
			unsigned long, unsigned long) = writes ? process_vm_writev : process_vm_readv;

	for (size_t n = 0; n < count / 20 + 1; n++)
		if (move(child, &local, 1, &remote, 1, 0) != (ssize_t)size)
			raw_die(argv[1]);
	double start = raw_now();

	for (size_t n = 0; n < count; n++) {
		uint64_t begin = raw_ticks();

		if (move(child, &local, 1, &remote, 1, 0) != (ssize_t)size)
			raw_die(argv[1]);
		interval[n] = raw_ticks() - begin;
	}
	double took = raw_now() - start;

	raw_end(child);
	qsort(interval, count, sizeof(*interval), raw_order);
	printf("{\"usec\": %.4f, \"p10\": %.4f, \"p90\": %.4f, \"bytes_per_s\": %.6g}\n",
	       interval[count / 2] * tick, interval[count / 10] * tick,
	       interval[count * 9 / 10] * tick, size * count / took);
	return 0;
}
