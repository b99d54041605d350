/* What the kernel says of a range of our own address space: may it be read and written, and is it a
 * shared mapping of a file, which peers could map as well? */
#define _GNU_SOURCE
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "softnic.h"

/* PROCMAP_QUERY of Linux 6.11, which Debian's headers do not know yet. */
struct query {
	uint64_t size, flags, addr, start, end, vma_flags, page_size, offset, inode;
	uint32_t major, minor, name_size, build_id_size;
	uint64_t name, build_id;
};
#define QUERY _IOWR('f', 17, struct query)
enum { QUERY_READABLE = 1, QUERY_WRITABLE = 2, QUERY_SHARED = 8 };

static _Atomic int maps_fd = -1; /* of this process: a child has its own */
static _Atomic int maps_pid;
static _Atomic int can_query = 1;

static int maps(void)
{
	int fd = atomic_load(&maps_fd), none = fd;
	if (fd >= 0 && atomic_load(&maps_pid) == sn_pid)
		return fd;
	int fresh = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	if (fresh < 0)
		return -1;
	/* the parent's, if any, stays open: another thread may be about to use the number */
	if (atomic_compare_exchange_strong(&maps_fd, &none, fresh)) {
		atomic_store(&maps_pid, sn_pid);
		return fresh;
	}
	close(fresh);
	return atomic_load(&maps_fd);
}

/* 0, ENOENT (nothing is mapped there) or ENOTTY (an older kernel). */
static int query(uintptr_t addr, struct sn_vma *vma)
{
	struct query q = { .size = sizeof(q), .addr = addr };
	int fd = atomic_load(&can_query) ? maps() : -1;
	if (fd < 0)
		return ENOTTY;
	if (ioctl(fd, QUERY, &q) < 0) {
		int err = errno;
		if (err == ENOENT)
			return ENOENT;
		atomic_store(&can_query, 0);
		return ENOTTY;
	}
	vma->start = q.start;
	vma->end = q.end;
	vma->offset = q.offset;
	vma->inode = q.inode;
	vma->device = makedev(q.major, q.minor);
	vma->readable = q.vma_flags & QUERY_READABLE;
	vma->writable = q.vma_flags & QUERY_WRITABLE;
	vma->shared = q.vma_flags & QUERY_SHARED;
	return 0;
}

/* A shared mapping can be duplicated by mremap, a private one cannot: one system call instead of
 * reading all of /proc/self/maps at every registration. */
static bool is_shared(uintptr_t addr)
{
	void *copy = mremap((void *)(addr & ~(SN_PAGE - 1)), 0, SN_PAGE, MREMAP_MAYMOVE);
	if (copy == MAP_FAILED)
		return false;
	munmap(copy, SN_PAGE);
	return true;
}

static bool read_maps(uintptr_t addr, struct sn_vma *vma)
{
	char line[4352], mode[5];
	bool found = false;
	FILE *f = fopen("/proc/self/maps", "re");
	while (f && !found && fgets(line, sizeof(line), f)) {
		uint64_t start, end, offset, inode;
		unsigned major, minor;
		int at = 0;
		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64 " %n", &start, &end, mode, &offset,
			   &major, &minor, &inode, &at) < 7 || addr < start || addr >= end)
			continue;
		found = true;
		*vma = (struct sn_vma){ .start = start, .end = end, .offset = offset, .inode = inode,
					.device = makedev(major, minor), .readable = mode[0] == 'r',
					.writable = mode[1] == 'w', .shared = mode[3] == 's' };
		line[strcspn(line, "\n")] = 0;
		if (strlen(line + at) < sizeof(vma->path))
			strcpy(vma->path, line + at);
	}
	if (f)
		fclose(f);
	return found;
}

/* A descriptor that names the file behind the mapping; -1 if it is not to be had: its name is gone or
 * somebody else's by now. No more than a name (O_PATH): to close an open one would release the program's
 * own record locks on the file, and to open a device may have effects. */
int sn_vma_open(struct sn_vma *vma)
{
	char path[64];
	struct stat st;
	int fd;

	if (!vma->path[0])
		read_maps(vma->start, vma);
	fd = open(vma->path[0] == '/' ? vma->path : "", O_PATH | O_CLOEXEC);
	if (fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_ino == vma->inode && st.st_dev == vma->device)
		return fd;
	if (fd >= 0)
		close(fd);
	snprintf(path, sizeof(path), "/proc/self/map_files/%" PRIx64 "-%" PRIx64, vma->start, vma->end);
	fd = open(path, O_PATH | O_CLOEXEC); /* takes privileges */
	if (fd >= 0 && (fstat(fd, &st) || !S_ISREG(st.st_mode))) {
		close(fd);
		fd = -1;
	}
	return fd;
}

/* A NIC pins every page, so bad memory is refused at once. Without the query, looking at the first
 * and the last page finds unmapped and read-only memory at no more than two system calls. */
static int touch(uintptr_t addr, size_t length, bool write)
{
	int advice = write ? 23 /* MADV_POPULATE_WRITE */ : 22 /* MADV_POPULATE_READ */;
	uintptr_t first = addr & ~(SN_PAGE - 1), last = (addr + length - 1) & ~(SN_PAGE - 1);
	static _Atomic int supported = -1;

	if (atomic_load(&supported) < 0) {
		long page = 0;
		uintptr_t known = (uintptr_t)&page & ~(SN_PAGE - 1);
		atomic_store(&supported, madvise((void *)known, SN_PAGE, advice) == 0);
	}
	if (!atomic_load(&supported))
		return 0; /* Linux before 5.14: found when the memory is used */
	for (uintptr_t at = first;; at = last) {
		int r, tries = 0;
		do
			r = madvise((void *)at, SN_PAGE, advice);
		while (r < 0 && (errno == EINTR || errno == EAGAIN) && tries++ < 100);
		if (r < 0)
			return EFAULT;
		if (at == last)
			return 0;
	}
}

/* May a device read (and with `write`, write) this memory? `vma` tells what covers its beginning;
 * vma->end is 0 where that is not known. */
int sn_vma_check(uintptr_t addr, size_t length, bool write, struct sn_vma *vma)
{
	struct sn_vma next;
	int err;

	vma->path[0] = 0;
	vma->start = vma->end = 0;
	vma->shared = false;
	if (addr + length < addr)
		return EINVAL;
	err = query(addr, vma);
	if (err == ENOTTY) {
		vma->end = 0;
		err = touch(addr, length, write);
		if (!err && is_shared(addr) && !read_maps(addr, vma))
			vma->end = 0;
		return err;
	}
	if (!err && !(write ? vma->writable : vma->readable))
		err = EFAULT;
	for (uint64_t at = vma->end; !err && at < addr + length; at = next.end) {
		next.path[0] = 0;
		err = query(at, &next);
		if (!err && !(write ? next.writable : next.readable))
			err = EFAULT;
	}
	return err ? EFAULT : 0;
}
