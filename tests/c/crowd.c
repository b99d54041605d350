/* Many processes open and close the device at the same time, some are killed in between: nobody
 * fails, and when all are gone the next one in and out leaves nothing behind. */
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "pair.h"

int main(void)
{
	char dir[] = "/dev/shm/rocecomm-test-XXXXXX", sub[128];
	struct stat st;
	pid_t pid[24];
	int killed = 0;

	CHECK(mkdtemp(dir));
	setenv("ROCECOMM_SOFT_DIR", dir, 1);
	for (int i = 0; i < 24; i++) {
		CHECK((pid[i] = fork()) >= 0);
		if (pid[i] == 0) {
			struct options o = usual;
			o.len = 4096;
			alarm(20);
			for (int round = 0; round < 15; round++) {
				struct end e[2];
				pair_open(e, &o);
				CHECK(post_recv(&e[1], 1, 0, 8) == 0 && post(&e[0], IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0);
				expect(&e[0], 2, IBV_WC_SUCCESS);
				expect(&e[1], 1, IBV_WC_SUCCESS);
				if (i % 3 == 0 && round == i / 3)
					raise(SIGKILL);
				pair_close(e);
			}
			_exit(0);
		}
	}
	for (int i = 0; i < 24; i++) {
		int status;
		CHECK(waitpid(pid[i], &status, 0) == pid[i]);
		killed += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
		CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
	}
	CHECK(killed == 8);
	struct ibv_context *c = open_device();
	CHECK(c && ibv_close_device(c) == 0);
	snprintf(sub, sizeof(sub), "%s/rocecomm-%u", dir, (unsigned)geteuid());
	CHECK(stat(sub, &st) != 0 && errno == ENOENT);
	CHECK(rmdir(dir) == 0);
	return 0;
}
