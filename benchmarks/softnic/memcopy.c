/* memcopy SIZE COUNT CPU FOLDER: a loop over memcpy between two mapped files.
 *
 * What one CPU moves between memory that two processes share, if nobody else does anything.
 * The files are made in FOLDER, as perftest's --mmap has them.
 */
#include <fcntl.h>

#include "raw.h"

static char *map_file(const char *folder, int which, size_t length)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/memcopy-%d-%d", folder, getpid(), which);
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

	if (fd < 0)
		raw_die(path);
	unlink(path);
	if (posix_fallocate(fd, 0, length))
		raw_die("posix_fallocate");
	char *p = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		raw_die("mmap");
	for (size_t i = 0; i < length; i++)
		p[i] = (char)(i * 2654435761u >> 13);
	close(fd);
	return p;
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	size_t size = strtoul(argv[1], NULL, 0), count = strtoul(argv[2], NULL, 0);
	size_t half = size < 4096 ? 4096 : size;

	alarm(RAW_LIMIT);
	raw_pin(atoi(argv[3]));
	char *from = map_file(argv[4], 0, 2 * half), *to = map_file(argv[4], 1, 2 * half) + half;

	for (size_t n = 0; n < count / 20 + 1; n++)
		memcpy(to, from, size);
	double start = raw_now();

	for (size_t n = 0; n < count; n++) {
		memcpy(to, from, size);
		__asm__ volatile("" ::: "memory");
	}
	double took = raw_now() - start;

	printf("{\"usec\": %.4f, \"bytes_per_s\": %.6g}\n", took / count * 1e6, size * count / took);
	return 0;
}
