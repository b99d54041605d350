/* What somebody else put where this user's processes meet is refused with a reason that names it, and
 * never followed or written to: a folder of another user, a link, a file, a folder open to others, a
 * place where everybody may exchange it. Two users in one place do not see each other. */
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "pair.h"

const char *softnic_reason(void);
static char dir[] = "/dev/shm/rocecomm-strangers-XXXXXX", mine[200];

static void refused(const char *what, const char *word)
{
	struct ibv_context *c = open_device();
	int got = errno;
	const char *why = softnic_reason();
	if (c || got != EPERM || !strstr(why, dir) || !strstr(why, word)) {
		fprintf(stderr, "%s: %s, errno %d, reason: %s\n", what, c ? "opened" : "refused", got, why);
		exit(1);
	}
}

static void as_user(uid_t uid)
{
	CHECK(setgid(uid) == 0 && setuid(uid) == 0);
	CHECK(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0); /* a change of user took it away */
}

static void user(uid_t uid, int ready, int go, int leave)
{
	struct options o = usual;
	struct end e[2];
	char other[256], c = 0;
	as_user(uid);
	o.len = 4096;
	pair_open(e, &o);
	CHECK(post_recv(&e[1], 1, 0, 8) == 0 && post(&e[0], IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0);
	expect(&e[0], 2, IBV_WC_SUCCESS);
	expect(&e[1], 1, IBV_WC_SUCCESS);
	CHECK(write(ready, &c, 1) == 1 && read(go, &c, 1) == 1); /* both are there now */
	snprintf(other, sizeof(other), "%s/rocecomm-%u/fabric", dir, (unsigned)(uid == 1001 ? 1002 : 1001));
	CHECK(open(other, O_RDONLY) < 0 && errno == EACCES);
	CHECK(write(ready, &c, 1) == 1 && read(leave, &c, 1) == 1);
	pair_close(e);
	exit(0);
}

static void two_users(void)
{
	int ready[2], go[2], leave[2], status;
	char c[2] = { 0 };
	CHECK(pipe(ready) == 0 && pipe(go) == 0 && pipe(leave) == 0);
	for (uid_t uid = 1001; uid <= 1002; uid++) {
		pid_t pid = fork();
		CHECK(pid >= 0);
		if (pid == 0)
			user(uid, ready[1], go[0], leave[0]);
	}
	for (int i = 0; i < 2; i++) {
		CHECK(read(ready[0], c, 1) == 1 && read(ready[0], c, 1) == 1);
		CHECK(write(i ? leave[1] : go[1], c, 2) == 2);
	}
	for (int i = 0; i < 2; i++)
		CHECK(wait(&status) > 0 && status == 0);
}

static void squatted(void) /* by another user */
{
	int status;
	CHECK(mkdir(mine, 0700) == 0 && chown(mine, 1002, 1002) == 0);
	refused("a folder of another user", "a directory of user 1002");
	CHECK(rmdir(mine) == 0);
	char theirs[200];
	snprintf(theirs, sizeof(theirs), "%s/rocecomm-1001", dir);
	CHECK(mkdir(theirs, 0777) == 0 && chmod(theirs, 0777) == 0 && chown(theirs, 1002, 1002) == 0);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		as_user(1001);
		refused("a folder of another user", "a directory of user 1002");
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	CHECK(rmdir(theirs) == 0); /* nothing was put there */
}

int main(void)
{
	char elsewhere[] = "/dev/shm/rocecomm-elsewhere-XXXXXX", file[256];
	CHECK(mkdtemp(dir) && mkdtemp(elsewhere) && chmod(dir, 01777) == 0);
	setenv("ROCECOMM_SOFT_DIR", dir, 1);
	snprintf(mine, sizeof(mine), "%s/rocecomm-%u", dir, (unsigned)geteuid());

	CHECK(symlink(elsewhere, mine) == 0);
	refused("a link", "a symbolic link");
	CHECK(rmdir(elsewhere) == 0); /* not followed */
	CHECK(unlink(mine) == 0);

	CHECK(mkfifo(mine, 0600) == 0);
	refused("a FIFO", "a file of user");
	CHECK(unlink(mine) == 0);

	CHECK(mkdir(mine, 0700) == 0 && chmod(mine, 0755) == 0);
	refused("open to others", "chmod 700");
	CHECK(chmod(mine, 0700) == 0);

	snprintf(file, sizeof(file), "%s/fabric", mine);
	CHECK(mkfifo(file, 0600) == 0);
	refused("a FIFO for the fabric", "not a file that softnic made");
	CHECK(unlink(file) == 0);
	CHECK(symlink("/dev/null", file) == 0);
	CHECK(!open_device() && errno == ELOOP);
	CHECK(unlink(file) == 0 && rmdir(mine) == 0);

	CHECK(chmod(dir, 0777) == 0);
	refused("a place where everybody may rename", "not sticky");
	CHECK(chmod(dir, 01777) == 0);

	if (geteuid() == 0) {
		squatted();
		two_users();
	}
	CHECK(rmdir(dir) == 0);
	if (geteuid() != 0)
		puts("other users can only be played by root; the rest passed");
	return 0;
}
