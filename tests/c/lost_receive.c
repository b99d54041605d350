/* A sender is killed in the middle of its messages: every receive that was posted completes exactly
 * once, the one that the dead sender had begun to fill included. */
#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	struct ibv_wc wc;
	(void)you;
	(void)in;
	put(out, "g", 1);
	for (;;) {
		post(e, IBV_WR_SEND, 2, 0, e->len, NULL, 0);
		while (ibv_poll_cq(e->cq, 1, &wc) > 0)
			;
	}
}

int main(void)
{
	struct options o = usual;
	o.len = 4 << 20;
	for (int round = 0; round < 10; round++) {
		struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
		struct end e;
		int in, out, status, seen[60] = { 0 };
		char c;
		pid_t pid = start_peer(&o, peer, &in, &out);
		end_open(&e, &o);
		meet(&e, &o, in, out);
		for (int i = 0; i < 60; i++)
			CHECK(post_recv(&e, (uint64_t)i, 0, e.len) == 0);
		take(in, &c, 1);
		usleep((useconds_t)(3000 + 1300 * round));
		kill(pid, SIGKILL);
		CHECK(waitpid(pid, &status, 0) == pid);
		CHECK(ibv_modify_qp(e.qp, &error, IBV_QP_STATE) == 0);
		for (int i = 0; i < 60; i++) {
			struct ibv_wc wc = wait_wc(&e);
			CHECK(wc.wr_id < 60 && !seen[wc.wr_id]++);
		}
		expect_nothing(&e);
		close(in);
		close(out);
		end_close(&e);
	}
	return 0;
}
