/* A peer that helps with a big copy and is stopped in the middle: the executor gets an error within
 * its deadline, and our memory stays registered until the peer has let go of it. Killed, it leaves
 * nothing behind. */
#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	struct ibv_wc wc;
	(void)in;
	(void)you;
	put(out, "g", 1);
	for (;;)
		ibv_poll_cq(e->cq, 1, &wc); /* helps with what is written into its memory */
}

static int outcome(struct end *e, uint64_t id, double *took)
{
	struct ibv_wc wc;
	double start = seconds();
	int n;
	while ((n = ibv_poll_cq(e->cq, 1, &wc)) == 0)
		CHECK(seconds() - start < 10);
	*took = seconds() - start;
	CHECK(n == 1 && wc.wr_id == id);
	return wc.status;
}

int main(void)
{
	struct options o = usual;
	int held = 0, killed = 0;
	o.len = 32 << 20;
	for (int round = 0; round < 60 && !(held && killed); round++) {
		struct end e;
		int in, out, status, how = IBV_WC_SUCCESS, kill_it = held;
		char c;
		double took;
		pid_t pid = start_peer(&o, peer, &in, &out);
		end_open(&e, &o);
		struct hello you = meet(&e, &o, in, out);
		struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
		take(in, &c, 1);
		pid_t killer = fork(); /* without our context: inherited objects are left alone */
		CHECK(killer >= 0);
		if (killer == 0) {
			usleep((useconds_t)(3000 + 1700 * round));
			kill(pid, kill_it ? SIGKILL : SIGSTOP);
			_exit(0);
		}
		double start = seconds();
		for (int i = 0; how == IBV_WC_SUCCESS && seconds() - start < 0.3; i++) {
			CHECK(post(&e, IBV_WR_RDMA_WRITE, 1, 0, e.len, &far, 0) == 0);
			how = outcome(&e, 1, &took);
		}
		CHECK(waitpid(killer, &status, 0) == killer);
		if (how != IBV_WC_SUCCESS) {
			CHECK(how == IBV_WC_RETRY_EXC_ERR);
			if (kill_it) {
				killed = 1;
				CHECK(ibv_dereg_mr(e.mr) == 0);
			} else {
				int err = ibv_dereg_mr(e.mr);
				CHECK(err == 0 || err == EBUSY);
				held |= err == EBUSY;
				CHECK(kill(pid, SIGCONT) == 0);
				for (int i = 0; err && i < 200; i++) {
					usleep(20000);
					err = ibv_dereg_mr(e.mr);
				}
				CHECK(err == 0);
			}
			e.mr = NULL;
		}
		kill(pid, SIGCONT);
		kill(pid, SIGKILL);
		CHECK(waitpid(pid, &status, 0) == pid);
		close(in);
		close(out);
		end_close(&e);
	}
	CHECK(held && killed); /* the interesting cases did occur */
	return 0;
}
