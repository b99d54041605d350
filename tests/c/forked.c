/* A forked child cannot harm the parent: its verbs on inherited objects do nothing, and it can open
 * the device for itself. */
#include <sys/wait.h>

#include "pair.h"

int main(void)
{
	struct end e[2];
	struct ibv_wc wc;
	int status;
	pair_open(e, &usual);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) == EPERM);
		CHECK(post_recv(&e[0], 1, 0, 8) == EPERM);
		CHECK(ibv_poll_cq(e[0].cq, 1, &wc) < 0);
		CHECK(ibv_dereg_mr(e[0].mr) == 0 && ibv_destroy_qp(e[0].qp) == 0 && ibv_destroy_cq(e[0].cq) == 0);
		CHECK(ibv_dealloc_pd(e[0].pd) == 0 && ibv_close_device(e[0].ctx) == 0);
		struct end own[2];
		pair_open(own, &usual);
		CHECK(post_recv(&own[1], 1, 0, 8) == 0 && post(&own[0], IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0);
		expect(&own[0], 2, IBV_WC_SUCCESS);
		expect(&own[1], 1, IBV_WC_SUCCESS);
		pair_close(own);
		exit(0); /* with destructors */
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(post_recv(&e[1], 1, 0, 8) == 0 && post(&e[0], IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0);
	expect(&e[0], 2, IBV_WC_SUCCESS);
	expect(&e[1], 1, IBV_WC_SUCCESS);
	pair_close(e);
	return 0;
}
