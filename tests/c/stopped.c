/* A peer stopped in the middle of a copy into our memory: deregistration says so within its deadline
 * and keeps the region; once the peer goes on it succeeds, and no late byte arrives after that. */
#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	struct ibv_wc wc;
	(void)in;
	memset(e->buf, 0x55, e->len);
	put(out, "g", 1);
	for (;;) {
		if (post(e, IBV_WR_RDMA_WRITE, 2, 0, e->len, &far, 0))
			usleep(1000);
		if (ibv_poll_cq(e->cq, 1, &wc) > 0 && wc.status != IBV_WC_SUCCESS)
			break; /* the region is gone */
	}
	put(out, "e", 1);
	pause();
}

int main(void)
{
	struct options o = usual;
	int busy = 0;
	o.len = 16 << 20;
	for (int round = 0; round < 40 && !busy; round++) {
		struct end e;
		int in, out, status;
		char c;
		pid_t pid = start_peer(&o, peer, &in, &out);
		end_open(&e, &o);
		meet(&e, &o, in, out);
		take(in, &c, 1);
		usleep((useconds_t)(20000 + 3000 * (round % 8)));
		CHECK(kill(pid, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
		double start = seconds();
		int err = ibv_dereg_mr(e.mr);
		CHECK(err == 0 || err == EBUSY);
		CHECK(seconds() - start < 4);
		if (err == EBUSY) {
			busy = 1;
			CHECK(kill(pid, SIGCONT) == 0);
			for (int i = 0; err && i < 100; i++) {
				usleep(20000);
				err = ibv_dereg_mr(e.mr);
			}
			CHECK(err == 0);
		}
		memset(e.buf, 0x11, e.len);
		kill(pid, SIGCONT);
		take(in, &c, 1); /* it saw the refusal, so its copies are over */
		for (size_t i = 0; i < e.len; i++)
			CHECK(e.buf[i] == 0x11);
		kill(pid, SIGKILL);
		CHECK(waitpid(pid, &status, 0) == pid);
		close(in);
		close(out);
		e.mr = NULL;
		end_close(&e);
	}
	CHECK(busy); /* the interesting case did occur */
	return 0;
}
