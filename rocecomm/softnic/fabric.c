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

/* `door` orders joining and leaving and may be held for a while; `mutex` only guards the variables
 * below, and the data path takes it too. Whoever changes them holds both. */
static pthread_mutex_t door = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct sn_ctx *contexts; /* of this process */
static struct sn_fabric *fabric;
static int fabric_fd = -1;
static pid_t fabric_pid;
static char directory[128];
#define LONGEST_BASE 100 /* characters of ROCECOMM_SOFT_DIR */

/* In a fresh child: another thread of the parent may have held it at the fork. */
void sn_fabric_forked(void)
{
	pthread_mutex_init(&mutex, NULL);
	pthread_mutex_init(&door, NULL);
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

static int byte_lock(int type, off_t at, pid_t *holder)
{
	struct flock f = { .l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1 };
	int r;
	do
		r = fcntl(fabric_fd, holder ? F_GETLK : F_SETLK, &f);
	while (r < 0 && errno == EINTR);
	if (r < 0)
		return errno;
	if (holder)
		*holder = f.l_type == F_UNLCK ? 0 : f.l_pid ? f.l_pid : -1; /* 0: in a pid namespace out of our sight */
	return 0;
}

/* Takes the registry byte: its holder has it for moments only, unless it is stopped. */
static int enter(void)
{
	uint64_t until = sn_now() + 5000000000ULL;
	int err;
	while ((err = byte_lock(F_WRLCK, REGISTRY_BYTE, NULL)) == EAGAIN || err == EACCES) {
		if (sn_now() > until) {
			pid_t holder = 0;
			byte_lock(F_WRLCK, REGISTRY_BYTE, &holder);
			return sn_because(EBUSY, "process %d is stopped while it opens or closes softnic in %s: let it go on, or "
						 "end it", (int)holder, directory);
		}
		usleep(500);
	}
	return err;
}

static void forget(void)
{
	pthread_mutex_lock(&mutex);
	sn_faults = &sn_no_faults;
	if (fabric)
		munmap(fabric, sizeof(*fabric));
	if (fabric_fd >= 0)
		close(fabric_fd);
	fabric = NULL;
	fabric_fd = -1;
	pthread_mutex_unlock(&mutex);
}

/* The folder that holds the directory of each user. */
const char *sn_fabric_base(void)
{
	const char *base = secure_getenv("ROCECOMM_SOFT_DIR");
	return base && *base ? base : "/dev/shm";
}

static int make_directory(void)
{
	const char *base = sn_fabric_base();
	struct stat st;
	if (strlen(base) > LONGEST_BASE)
		return sn_because(ENAMETOOLONG, "ROCECOMM_SOFT_DIR=%.60s... has %zu characters: at most %d are allowed", base,
				  strlen(base), LONGEST_BASE);
	snprintf(directory, sizeof(directory), "%s/rocecomm-%u", base, (unsigned)geteuid());
	if (!stat(base, &st) && st.st_mode & S_IWOTH && !(st.st_mode & S_ISVTX))
		return sn_because(EPERM, "everybody may rename what lies in %s (mode %o, not sticky): softnic meets its peers in a "
					 "place that others cannot exchange; chmod +t, or name another one by ROCECOMM_SOFT_DIR",
				  base, (unsigned)st.st_mode & 07777);
	if (mkdir(directory, 0700) && errno != EEXIST)
		return sn_because(errno, "cannot create %s: %s; softnic needs a writable /dev/shm with room for 1 to 2 MiB per "
					 "process, or another place named by ROCECOMM_SOFT_DIR that all ranks share", directory,
				  strerror(errno));
	if (lstat(directory, &st))
		return errno;
	/* do not meet strangers there, and follow nobody's link */
	if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid())
		return sn_because(EPERM, "%s is %s of user %u, not a directory of this user (%u): have it removed, or name "
					 "another place by ROCECOMM_SOFT_DIR", directory,
				  S_ISDIR(st.st_mode) ? "a directory" : S_ISLNK(st.st_mode) ? "a symbolic link" : "a file",
				  (unsigned)st.st_uid, (unsigned)geteuid());
	if (st.st_mode & 077)
		return sn_because(EPERM, "others may enter %s (mode %o): chmod 700, or remove it", directory,
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
			int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
			if (fd >= 0 && (fstat(fd, &mine) || !S_ISREG(mine.st_mode) || mine.st_uid != geteuid())) {
				close(fd);
				return sn_because(EPERM, "%s is not a file that softnic made: remove it", path);
			}
			pthread_mutex_lock(&mutex);
			fabric_fd = fd;
			fabric_pid = sn_pid;
			pthread_mutex_unlock(&mutex);
			if (fd < 0) {
				if (errno == ENOENT)
					continue; /* the last one out removed the directory just now */
				return sn_because(errno, "cannot create %s: %s", path, strerror(errno));
			}
		}
		sn_fabric_path(path, sizeof(path), "fabric");
		if ((err = enter()))
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
	if (err) {
		sn_no_room(err, sizeof(struct sn_fabric), "fabric");
		if (!fstat(fabric_fd, &mine) && !mine.st_size) { /* nobody is there: as it was before */
			sn_fabric_path(path, sizeof(path), "fabric");
			unlink(path);
			rmdir(directory);
		}
	}
	if (!err) {
		struct sn_fabric *f = mmap(NULL, sizeof(*f), PROT_READ | PROT_WRITE, MAP_SHARED, fabric_fd, 0);
		if (f == MAP_FAILED) {
			f = NULL;
			err = errno;
		} else if (f->magic == 0) {
			f->version = SN_LAYOUT_VERSION;
			f->next_slot = 1;
			f->magic = SN_MAGIC;
		}
		pthread_mutex_lock(&mutex);
		fabric = f;
		if (f)
			sn_faults = &f->faults;
		pthread_mutex_unlock(&mutex);
		if (f && (f->magic != SN_MAGIC || f->version != SN_LAYOUT_VERSION)) {
			err = sn_because(EPROTO, "another version of softnic runs in %s: end its processes first", directory);
		}
	}
	if (err)
		forget();
	return err;
}

static bool slot_locked(uint32_t slot) /* with `mutex` held */
{
	pid_t holder = 0;
	for (struct sn_ctx *c = contexts; c; c = c->next)
		if (c->pid == sn_pid && (c->id & (SN_SLOTS - 1)) == slot)
			return true;
	return byte_lock(F_WRLCK, slot, &holder) == 0 && holder != 0;
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

/* Whoever has the slot now, or had it last: not a word about its life. */
sn_id sn_slot_id(uint32_t slot)
{
	sn_id id = 0;
	pthread_mutex_lock(&mutex);
	if (fabric)
		id = atomic_load(&fabric->generation[slot]) << SN_SLOT_BITS | slot;
	pthread_mutex_unlock(&mutex);
	return id;
}

void sn_each_context(void (*visit)(struct sn_ctx *, void *), void *arg)
{
	pthread_mutex_lock(&mutex);
	for (struct sn_ctx *c = contexts; c; c = c->next)
		if (c->pid == sn_pid)
			visit(c, arg);
	pthread_mutex_unlock(&mutex);
}

bool sn_alive(sn_id id)
{
	uint32_t slot = id & (SN_SLOTS - 1);
	bool alive;
	pthread_mutex_lock(&mutex);
	/* without the fabric (this process is leaving) nobody can be called dead */
	alive = !fabric || fabric_pid != sn_pid ||
		(atomic_load(&fabric->generation[slot]) == id >> SN_SLOT_BITS && slot_locked(slot));
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
		pthread_mutex_lock(&mutex);
		bool alive = slot_locked(slot);
		pthread_mutex_unlock(&mutex);
		if (alive)
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
		pthread_mutex_lock(&mutex);
		bool free = slot != 0 && !slot_locked(slot) && byte_lock(F_WRLCK, slot, NULL) == 0;
		pthread_mutex_unlock(&mutex);
		if (!free)
			continue;
		uint32_t generation = (atomic_load(&fabric->generation[slot]) + 1) & ((1u << (32 - SN_SLOT_BITS)) - 1);
		if (!generation)
			generation = 1;
		atomic_store(&fabric->generation[slot], generation);
		atomic_store(&fabric->next_slot, (slot + 1) & (SN_SLOTS - 1));
		ctx->id = generation << SN_SLOT_BITS | slot;
		return 0;
	}
	return sn_because(EUSERS, "all %u slots of %s are taken by open devices", SN_SLOTS - 1, directory);
}

static void unlist(struct sn_ctx *ctx)
{
	pthread_mutex_lock(&mutex);
	for (struct sn_ctx **p = &contexts; *p; p = &(*p)->next)
		if (*p == ctx) {
			*p = ctx->next;
			break;
		}
	pthread_mutex_unlock(&mutex);
}

/* With the door and the registry byte held; without the byte (somebody stopped has it) only what is
 * this context's own is given back. */
static void leave(struct sn_ctx *ctx, bool registry)
{
	char path[192];
	uint32_t slot = ctx->id & (SN_SLOTS - 1);
	bool mine = false;

	unlist(ctx);
	sn_fault_closed(ctx);
	sn_fabric_path(path, sizeof(path), "seg-%u", slot);
	unlink(path);
	byte_lock(F_UNLCK, slot, NULL);
	if (!registry)
		return;
	for (struct sn_ctx *c = contexts; c; c = c->next)
		if (c->pid == sn_pid)
			mine = true;
	if (!sweep() && !mine) {
		sn_fabric_path(path, sizeof(path), "fabric");
		unlink(path);
		rmdir(directory);
	}
	if (mine)
		byte_lock(F_UNLCK, REGISTRY_BYTE, NULL);
	else
		forget();
}

int sn_fabric_join(struct sn_ctx *ctx)
{
	int err;
	pthread_mutex_lock(&door);
	err = open_fabric();
	if (!err) {
		sweep();
		err = claim_slot(ctx);
		if (!err) {
			ctx->pid = sn_pid;
			err = sn_seg_create(ctx);
			pthread_mutex_lock(&mutex);
			ctx->next = contexts;
			contexts = ctx;
			pthread_mutex_unlock(&mutex);
			if (err)
				leave(ctx, true);
		}
		if (fabric_fd >= 0)
			byte_lock(F_UNLCK, REGISTRY_BYTE, NULL);
	}
	pthread_mutex_unlock(&door);
	return err;
}

void sn_fabric_leave(struct sn_ctx *ctx)
{
	pthread_mutex_lock(&door);
	if (fabric_pid == sn_pid)
		leave(ctx, enter() == 0);
	else
		unlist(ctx);
	pthread_mutex_unlock(&door);
}

/* A program that ends without closing its devices still leaves /dev/shm as it found it. */
__attribute__((destructor)) static void at_exit(void)
{
	pthread_mutex_lock(&door);
	for (struct sn_ctx *c = contexts, *next; c; c = next) {
		next = c->next;
		if (c->pid == sn_pid && fabric_pid == sn_pid && fabric_fd >= 0)
			leave(c, enter() == 0);
		if (c->pid == sn_pid)
			sn_stage_stop(c);
	}
	pthread_mutex_unlock(&door);
}
