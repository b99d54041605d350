/* A peer that is stopped while it carries out our queue: every send ends with an error in a few
 * seconds; what it may still touch stays (EBUSY) until it goes on. */
#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	char c;
	(void)you;
	take(in, &c, 1);
	put(out, "g", 1);
	for (int i = 0; i < 60; i++)
		post_recv(e, 1, 0, e->len);
	pause();
}

int main(void)
{
	struct options o = usual;
	int caught = 0;
	o.len = 32 << 20;
	for (int round = 0; round < 3 && !caught; round++) {
		struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
		struct end e;
		struct ibv_wc wc;
		int in, out, status, n = 0;
		char c;
		pid_t pid = start_peer(&o, peer, &in, &out);
		end_open(&e, &o);
		meet(&e, &o, in, out);
		memset(e.buf, 1, e.len);
		for (int i = 0; i < 40; i++)
			CHECK(post(&e, IBV_WR_SEND, (uint64_t)i, 0, e.len, NULL, 0) == 0);
		put(out, "x", 1);
		take(in, &c, 1);
		struct ibv_wc first = wait_wc(&e); /* it has begun: most of its time it copies */
		CHECK(first.wr_id == 0 && first.status == IBV_WC_SUCCESS);
		n = 1;
		usleep(2000);
		kill(pid, SIGSTOP);
		CHECK(waitpid(pid, &status, WUNTRACED) == pid);
		for (double until = seconds() + 7; n < 40 && seconds() < until;)
			if (ibv_poll_cq(e.cq, 1, &wc) > 0) {
				CHECK(wc.wr_id == (uint64_t)n); /* in order, each once */
				caught += wc.status == IBV_WC_RETRY_EXC_ERR;
				n++;
			}
		if (caught) { /* else it was stopped between two copies, and the sends wait as they should */
			CHECK(n == 40);
			CHECK(ibv_modify_qp(e.qp, &error, IBV_QP_STATE) == EBUSY);
			kill(pid, SIGCONT);
			int err = EBUSY;
			for (int i = 0; err && i < 100; i++) {
				usleep(20000);
				err = ibv_modify_qp(e.qp, &error, IBV_QP_STATE);
			}
			CHECK(err == 0);
			expect_nothing(&e); /* what the late executor completed is a duplicate */
		}
		kill(pid, SIGKILL);
		CHECK(waitpid(pid, &status, 0) == pid);
		close(in);
		close(out);
		end_close(&e);
	}
	CHECK(caught); /* the interesting case did occur */
	return 0;
}
