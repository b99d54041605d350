/* Whatever is sent to a killed peer fails, also what needs none of its memory (a write of nothing, the
 * link layer's heartbeat) or only memory that is mapped here (small sends into slots). */
#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	(void)you;
	(void)in;
	for (int i = 0; i < 60; i++)
		CHECK(post_recv(e, 1, 0, 64) == 0);
	put(out, "g", 1);
	pause();
}

static void check(enum ibv_wr_opcode opcode, size_t len)
{
	struct end e;
	int in, out, status;
	char c;
	pid_t pid = start_peer(&usual, peer, &in, &out);
	end_open(&e, &usual);
	struct hello you = meet(&e, &usual, in, out);
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	take(in, &c, 1);
	CHECK(post(&e, opcode, 1, 0, len, &far, 0) == 0);
	expect(&e, 1, IBV_WC_SUCCESS);
	CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
	double until = seconds() + 2;
	struct ibv_wc wc;
	do {
		CHECK(seconds() < until);
		CHECK(post(&e, opcode, 2, 0, len, &far, 0) == 0);
		wc = wait_wc(&e);
		usleep(1000);
	} while (wc.status == IBV_WC_SUCCESS);
	CHECK(wc.status == IBV_WC_RETRY_EXC_ERR);
	close(in);
	close(out);
	end_close(&e);
}

int main(void)
{
	check(IBV_WR_RDMA_WRITE, 0);
	check(IBV_WR_SEND, 8);
	check(IBV_WR_RDMA_READ, 4096);
	return 0;
}
