/* A /dev/shm that is missing, read-only, full to the last byte or out of inodes: opening the device
 * fails with the cause, and the reason names the path and what to do. Never a signal, and nothing is
 * left there. */
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "pair.h"

const char *softnic_reason(void);

static void refused(const char *what, int err, const char *dir, const char *word)
{
	char sub[256];
	struct stat st;
	struct ibv_context *c = open_device();
	int got = errno;
	const char *why = softnic_reason();
	if (c || got != err || !strstr(why, dir) || !strstr(why, word)) {
		fprintf(stderr, "%s: %s, errno %d (expected %d), reason: %s\n", what, c ? "opened" : "refused", got, err, why);
		exit(1);
	}
	snprintf(sub, sizeof(sub), "%s/rocecomm-%u", dir, (unsigned)geteuid());
	CHECK(stat(sub, &st) != 0); /* as it was before */
}

static int try_mount(const char *dir, const char *options, unsigned long flags)
{
	return mount("none", dir, "tmpfs", flags, options);
}

int main(void)
{
	char dir[] = "/tmp/rocecomm-shm-XXXXXX", path[300];
	struct stat st;
	CHECK(mkdtemp(dir));
	setenv("ROCECOMM_SOFT_DIR", dir, 1);
	if (try_mount(dir, "size=1m", 0)) {
		rmdir(dir);
		puts("mounting a tmpfs is not permitted here");
		return 77;
	}
	CHECK(umount(dir) == 0);

	CHECK(try_mount(dir, "size=1m", MS_RDONLY) == 0);
	refused("read-only", EROFS, dir, "ROCECOMM_SOFT_DIR");
	CHECK(umount(dir) == 0);

	CHECK(try_mount(dir, "size=1m,nr_inodes=4", 0) == 0); /* the root, our folder, fabric, a segment; no FIFO */
	refused("out of inodes", ENOSPC, dir, "cannot create");
	CHECK(umount(dir) == 0);

	CHECK(try_mount(dir, "size=1m", 0) == 0);
	snprintf(path, sizeof(path), "%s/ballast", dir);
	int fd = open(path, O_RDWR | O_CREAT, 0600);
	CHECK(fd >= 0);
	/* ever more room: each step of opening is the one that fails once, until all of it fits */
	int left = 1 << 20, opened = 0, failed = 0;
	CHECK(fallocate(fd, 0, 0, left) == 0);
	for (; left >= 0 && !opened; left -= 4096) {
		CHECK(ftruncate(fd, left) == 0);
		struct ibv_context *c = open_device();
		if (c) {
			opened = 1;
			CHECK(ibv_close_device(c) == 0);
		} else {
			CHECK(errno == ENOSPC);
			const char *why = softnic_reason();
			CHECK(strstr(why, dir) && (strstr(why, "no room for another") || strstr(why, "cannot create")));
			failed++;
		}
		snprintf(path, sizeof(path), "%s/rocecomm-%u", dir, (unsigned)geteuid());
		CHECK(stat(path, &st) != 0);
	}
	printf("opening takes %d KiB\n", (1 << 20) / 1024 - left / 1024);
	CHECK(opened && failed > 3);
	close(fd);
	CHECK(umount(dir) == 0);

	CHECK(rmdir(dir) == 0);
	refused("missing", ENOENT, dir, "ROCECOMM_SOFT_DIR");
	return 0;
}
