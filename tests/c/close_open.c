/* A device closed with queue pairs and regions still there: from the return on no peer writes into
 * the program's memory. */
#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	struct ibv_wc wc = { 0 };
	(void)in;
	memset(e->buf, 0x55, e->len);
	put(out, "g", 1);
	while (wc.status == IBV_WC_SUCCESS) {
		post(e, IBV_WR_RDMA_WRITE, 2, 0, 4096, &far, 0);
		while (wc.status == IBV_WC_SUCCESS && ibv_poll_cq(e->cq, 1, &wc) > 0)
			;
	}
	CHECK(wc.status == IBV_WC_RETRY_EXC_ERR);
	put(out, "e", 1);
	pause();
}

int main(void)
{
	for (int round = 0; round < 10; round++) {
		struct end e;
		int in, out;
		char c;
		pid_t pid = start_peer(&usual, peer, &in, &out);
		end_open(&e, &usual);
		meet(&e, &usual, in, out);
		take(in, &c, 1);
		usleep(10000);
		CHECK(ibv_close_device(e.ctx) == 0);
		memset(e.buf, 0x11, e.len);
		take(in, &c, 1);
		for (size_t i = 0; i < e.len; i++)
			CHECK(e.buf[i] == 0x11);
		kill(pid, SIGKILL);
		CHECK(waitpid(pid, NULL, 0) == pid);
		close(in);
		close(out);
		CHECK(ibv_destroy_qp(e.qp) == 0 && ibv_destroy_cq(e.cq) == 0 && ibv_dereg_mr(e.mr) == 0);
		CHECK(ibv_dealloc_pd(e.pd) == 0);
		free(e.buf);
	}
	return 0;
}
