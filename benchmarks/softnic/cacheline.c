/* cacheline CPU PEER_CPU COUNT: two processes pass a number to and fro in one shared cache line.
 *
 * The fastest that two CPUs can talk. Reports half a round trip.
 */
#include "raw.h"

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	int cpu = atoi(argv[1]), peer = atoi(argv[2]);
	size_t count = strtoul(argv[3], NULL, 0);
	_Atomic uint64_t *word = raw_shared(4096);
	uint64_t *interval = calloc(count, sizeof(*interval));
	pid_t child = raw_fork();

	if (child == 0) {
		raw_pin(peer);
		for (uint64_t i = 1;; i += 2) {
			while (atomic_load_explicit(word, memory_order_acquire) != i)
				;
			atomic_store_explicit(word, i + 1, memory_order_release);
		}
	}
	raw_pin(cpu);
	double tick = raw_tick();
	uint64_t i = 1, last = 0;

	for (size_t n = 0; n < count + count / 10; n++, i += 2) { /* the first tenth warms up */
		uint64_t now = raw_ticks();

		if (n > count / 10)
			interval[n - count / 10 - 1] = now - last;
		last = now;
		atomic_store_explicit(word, i, memory_order_release);
		while (atomic_load_explicit(word, memory_order_acquire) != i + 1)
			;
	}
	interval[count - 1] = raw_ticks() - last;
	raw_end(child);
	raw_report(interval, count, tick, 2);
	return 0;
}
