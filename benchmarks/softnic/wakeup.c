/* wakeup CPU PEER_CPU COUNT: two processes wake each other through FIFOs.
 *
 * Each sleeps in epoll_wait, reads 8 bytes, writes 8 bytes. Reports half a round trip: what a
 * wake-up costs that goes through a file descriptor, as completion events do.
 */
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/stat.h>

#include "raw.h"

static void wait_for(int poll, int fifo)
{
	struct epoll_event event;
	uint64_t word;

	if (epoll_wait(poll, &event, 1, -1) != 1 || read(fifo, &word, 8) != 8)
		raw_die("epoll_wait, read");
}

static void wake(int fifo)
{
	uint64_t word = 1;

	if (write(fifo, &word, 8) != 8)
		raw_die("write");
}

static int sleep_on(int fifo)
{
	struct epoll_event event = { .events = EPOLLIN };
	int poll = epoll_create1(EPOLL_CLOEXEC);

	if (poll < 0 || epoll_ctl(poll, EPOLL_CTL_ADD, fifo, &event))
		raw_die("epoll_ctl");
	return poll;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	int cpu = atoi(argv[1]), peer = atoi(argv[2]), fifo[2];
	size_t count = strtoul(argv[3], NULL, 0);
	uint64_t *interval = calloc(count, sizeof(*interval));
	char folder[] = "/tmp/rocecomm-wakeup-XXXXXX", path[64];

	if (!mkdtemp(folder))
		raw_die("mkdtemp");
	for (int i = 0; i < 2; i++) {
		snprintf(path, sizeof(path), "%s/%d", folder, i);
		if (mkfifo(path, 0600) || (fifo[i] = open(path, O_RDWR | O_NONBLOCK)) < 0)
			raw_die("mkfifo");
		unlink(path);
	}
	rmdir(folder);
	pid_t child = raw_fork();

	if (child == 0) {
		raw_pin(peer);
		int poll = sleep_on(fifo[1]);

		for (;;) {
			wait_for(poll, fifo[1]);
			wake(fifo[0]);
		}
	}
	raw_pin(cpu);
	int poll = sleep_on(fifo[0]);
	double tick = raw_tick();

	for (size_t n = 0; n < count + count / 10; n++) {
		uint64_t start = raw_ticks();

		wake(fifo[1]);
		wait_for(poll, fifo[0]);
		if (n >= count / 10)
			interval[n - count / 10] = raw_ticks() - start;
	}
	raw_end(child);
	raw_report(interval, count, tick, 2);
	return 0;
}
