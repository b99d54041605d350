/* A peer killed while we send to it and it to us: an error completion soon, and no hang. */

#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	struct ibv_wc wc;
	(void)in;
	for (int i = 0; i < 32; i++)
		CHECK(post_recv(e, 1, 0, 4096) == 0);
	put(out, "g", 1);
	for (;;) { /* until killed */
		post(e, IBV_WR_RDMA_WRITE, 2, 0, 200000, &far, 500000);
		while (ibv_poll_cq(e->cq, 1, &wc) > 0)
			if (wc.opcode & IBV_WC_RECV)
				post_recv(e, 1, 0, 4096);
	}
}

int main(void)
{
	for (int round = 0; round < 20; round++) {
		struct end e;
		int in, out, status, sent = 0;
		char c;
		pid_t pid = start_peer(&usual, peer, &in, &out);
		end_open(&e, &usual);
		meet(&e, &usual, in, out);
		take(in, &c, 1);
		double start = seconds(), kill_at = start + 0.002 * round;
		int killed = 0;
		for (;;) {
			struct ibv_wc wc;
			CHECK(seconds() - start < 10);
			if (!killed && seconds() > kill_at) {
				kill(pid, SIGKILL);
				killed = 1;
			}
			if (sent < 16 && post(&e, IBV_WR_SEND, 5, 0, (size_t)(round % 2 ? 64 : 4096), NULL, 0) == 0)
				sent++;
			int n = ibv_poll_cq(e.cq, 1, &wc);
			CHECK(n >= 0);
			if (n && wc.status != IBV_WC_SUCCESS) {
				if (!killed || wc.status != IBV_WC_RETRY_EXC_ERR) {
					fprintf(stderr, "round %d: killed %d, status %d\n", round, killed, wc.status);
					return 1;
				}
				break;
			}
			sent -= n;
		}
		CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
		close(in);
		close(out);
		end_close(&e);
	}
	return 0;
}
