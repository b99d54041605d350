/* Where processes meet: one directory per user in /dev/shm, and who of them lives.
 *
 * Liveness is a POSIX record lock on one byte per slot of the file "fabric", opened once per
 * process and never closed while a context lives: the kernel drops it at death, whatever the
 * death, and a pid that was used again cannot fool it. A record lock is invisible to its own
 * process, so contexts of this process are also kept in a list. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softnic.h"

#define REGISTRY_BYTE (SN_SLOTS + 1) /* serialises join and leave */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct sn_ctx *contexts; /* of this process */
static struct sn_fabric *fabric;
static int fabric_fd = -1;
static pid_t fabric_pid;
static char directory[128];

/* In a fresh child: another thread of the parent may have held it at the fork. */
void sn_fabric_forked(void)
{
	pthread_mutex_init(&mutex, NULL);
}

int sn_fabric_path(char *buf, size_t size, const char *format, ...)
{
	va_list args;
	int n = snprintf(buf, size, "%s/", directory);
	va_start(args, format);
	n += vsnprintf(buf + n, size - n, format, args);
	va_end(args);
	return (size_t)n < size ? 0 : ENAMETOOLONG;
}

static int byte_lock(int type, int wait, off_t at, off_t len, pid_t *holder)
{
	struct flock f = { .l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = len };
	int r;
	do
		r = fcntl(fabric_fd, holder ? F_GETLK : wait ? F_SETLKW : F_SETLK, &f);
	while (r < 0 && errno == EINTR);
	if (r < 0)
		return errno;
	if (holder)
		*holder = f.l_type == F_UNLCK ? 0 : f.l_pid;
	return 0;
}

static void forget(void)
{
	if (fabric)
		munmap(fabric, sizeof(*fabric));
	if (fabric_fd >= 0)
		close(fabric_fd);
	fabric = NULL;
	fabric_fd = -1;
}

static int make_directory(void)
{
	const char *base = getenv("ROCECOMM_SOFT_DIR");
	struct stat st;
	snprintf(directory, sizeof(directory), "%.90s/rocecomm-%u", base && *base ? base : "/dev/shm", (unsigned)geteuid());
	if (mkdir(directory, 0700) && errno != EEXIST)
		return sn_because(errno, "cannot create %s: %s; softnic needs a writable /dev/shm, or another place named by "
					 "ROCECOMM_SOFT_DIR that all ranks share", directory, strerror(errno));
	if (lstat(directory, &st))
		return errno;
	if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077)) /* do not meet strangers there */
		return sn_because(EPERM, "%s is not a private directory of this user (owner %u, mode %o): remove it, or name "
					 "another place by ROCECOMM_SOFT_DIR", directory, (unsigned)st.st_uid,
				  (unsigned)st.st_mode & 07777);
	return 0;
}

/* Opens the fabric file and takes the registry lock on the inode that the path really names. */
static int open_fabric(void)
{
	char path[192];
	struct stat mine, named;
	int err;

	if (fabric_fd >= 0 && fabric_pid != sn_pid)
		forget(); /* inherited through fork */
	for (int tries = 0; tries < 1000; tries++) {
		if (fabric_fd < 0) {
			if ((err = make_directory()))
				return err;
			sn_fabric_path(path, sizeof(path), "fabric");
			fabric_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
			if (fabric_fd < 0) {
				if (errno == ENOENT)
					continue; /* the last one out removed the directory just now */
				return errno;
			}
			fabric_pid = sn_pid;
		}
		sn_fabric_path(path, sizeof(path), "fabric");
		if ((err = byte_lock(F_WRLCK, 1, REGISTRY_BYTE, 1, NULL)))
			return err;
		if (fabric || (!fstat(fabric_fd, &mine) && !stat(path, &named) && mine.st_ino == named.st_ino &&
			       mine.st_dev == named.st_dev))
			break;
		forget(); /* an unlinked file: its lock goes with the descriptor */
	}
	if (fabric_fd < 0)
		return EAGAIN;
	if (fabric)
		return 0;
	err = fallocate(fabric_fd, 0, 0, sizeof(struct sn_fabric)) ? errno : 0;
	if (err)
		sn_because(err, "no room for %zu bytes in %s", sizeof(struct sn_fabric), directory);
	if (!err) {
		fabric = mmap(NULL, sizeof(*fabric), PROT_READ | PROT_WRITE, MAP_SHARED, fabric_fd, 0);
		if (fabric == MAP_FAILED) {
			fabric = NULL;
			err = errno;
		} else if (fabric->magic == 0) {
			fabric->version = SN_LAYOUT_VERSION;
			fabric->next_slot = 1;
			fabric->magic = SN_MAGIC;
		} else if (fabric->magic != SN_MAGIC || fabric->version != SN_LAYOUT_VERSION) {
			err = sn_because(EPROTO, "another version of softnic runs in %s: end its processes first", directory);
		}
	}
	if (err)
		forget();
	return err;
}

static bool slot_locked(uint32_t slot)
{
	pid_t holder = 0;
	for (struct sn_ctx *c = contexts; c; c = c->next)
		if (c->pid == sn_pid && (c->id & (SN_SLOTS - 1)) == slot)
			return true;
	return byte_lock(F_WRLCK, 0, slot, 1, &holder) == 0 && holder != 0;
}

struct sn_mapping *sn_local_mapping(sn_id id)
{
	struct sn_mapping *m = NULL;
	pthread_mutex_lock(&mutex);
	for (struct sn_ctx *c = contexts; c; c = c->next)
		if (c->id == id && c->pid == sn_pid)
			m = c->mapping;
	if (m)
		atomic_fetch_add(&m->users, 1);
	pthread_mutex_unlock(&mutex);
	return m;
}

bool sn_alive(sn_id id)
{
	uint32_t slot = id & (SN_SLOTS - 1);
	bool alive;
	pthread_mutex_lock(&mutex);
	alive = fabric && fabric_pid == sn_pid && (atomic_load(&fabric->generation[slot]) == id >> SN_SLOT_BITS) &&
		slot_locked(slot);
	pthread_mutex_unlock(&mutex);
	return alive;
}

/* Removes what the dead left: with the registry lock held. Returns whether anybody else lives. */
static bool sweep(void)
{
	bool others = false;
	DIR *d = opendir(directory);
	struct dirent *e;
	if (!d)
		return true;
	while ((e = readdir(d))) {
		unsigned slot;
		char kind[8];
		if (sscanf(e->d_name, "%7[a-z]-%u", kind, &slot) != 2 || slot >= SN_SLOTS)
			continue;
		if (slot_locked(slot))
			others = true;
		else
			unlinkat(dirfd(d), e->d_name, 0);
	}
	closedir(d);
	return others;
}

static int claim_slot(struct sn_ctx *ctx)
{
	uint32_t first = atomic_load(&fabric->next_slot);
	for (uint32_t i = 0; i < SN_SLOTS; i++) {
		uint32_t slot = (first + i) & (SN_SLOTS - 1);
		if (slot == 0 || slot_locked(slot) || byte_lock(F_WRLCK, 0, slot, 1, NULL))
			continue;
		uint32_t generation = (atomic_load(&fabric->generation[slot]) + 1) & ((1u << (32 - SN_SLOT_BITS)) - 1);
		if (!generation)
			generation = 1;
		atomic_store(&fabric->generation[slot], generation);
		atomic_store(&fabric->next_slot, (slot + 1) & (SN_SLOTS - 1));
		ctx->id = generation << SN_SLOT_BITS | slot;
		return 0;
	}
	return EUSERS;
}

static void unlist(struct sn_ctx *ctx)
{
	for (struct sn_ctx **p = &contexts; *p; p = &(*p)->next)
		if (*p == ctx) {
			*p = ctx->next;
			break;
		}
}

/* With the registry lock and the mutex held. */
static void leave(struct sn_ctx *ctx)
{
	char path[192];
	uint32_t slot = ctx->id & (SN_SLOTS - 1);
	bool mine = false;

	unlist(ctx);
	sn_fabric_path(path, sizeof(path), "seg-%u", slot);
	unlink(path);
	byte_lock(F_UNLCK, 0, slot, 1, NULL);
	for (struct sn_ctx *c = contexts; c; c = c->next)
		if (c->pid == sn_pid)
			mine = true;
	if (!sweep() && !mine) {
		sn_fabric_path(path, sizeof(path), "fabric");
		unlink(path);
		rmdir(directory);
	}
	if (mine)
		byte_lock(F_UNLCK, 0, REGISTRY_BYTE, 1, NULL);
	else
		forget();
}

int sn_fabric_join(struct sn_ctx *ctx)
{
	int err;
	pthread_mutex_lock(&mutex);
	err = open_fabric();
	if (!err) {
		sweep();
		err = claim_slot(ctx);
		if (!err) {
			ctx->pid = sn_pid;
			ctx->next = contexts;
			contexts = ctx;
			err = sn_seg_create(ctx);
			if (err)
				leave(ctx);
		}
		if (fabric_fd >= 0)
			byte_lock(F_UNLCK, 0, REGISTRY_BYTE, 1, NULL);
	}
	pthread_mutex_unlock(&mutex);
	return err;
}

void sn_fabric_leave(struct sn_ctx *ctx)
{
	pthread_mutex_lock(&mutex);
	if (fabric_pid == sn_pid && byte_lock(F_WRLCK, 1, REGISTRY_BYTE, 1, NULL) == 0)
		leave(ctx);
	pthread_mutex_unlock(&mutex);
}

/* A program that ends without closing its devices still leaves /dev/shm as it found it. */
__attribute__((destructor)) static void at_exit(void)
{
	while (1) {
		struct sn_ctx *c;
		pthread_mutex_lock(&mutex);
		for (c = contexts; c && c->pid != sn_pid; c = c->next)
			;
		if (c && fabric_pid == sn_pid && byte_lock(F_WRLCK, 1, REGISTRY_BYTE, 1, NULL) == 0)
			leave(c);
		else
			c = NULL;
		pthread_mutex_unlock(&mutex);
		if (!c)
			return;
	}
}
