/* The other process is killed or stopped in the middle of chains. A target that is killed: what came
 * before has completed, one request gets RETRY_EXC_ERR, the rest is flushed. A poster that is stopped:
 * deregistration says EBUSY within its deadline as long as it may still write, and no late byte arrives
 * after it succeeded. */
#include "process.h"

enum { CHAIN = 1024, PIECE = 4096, LEN = CHAIN * PIECE };

static struct ibv_send_wr wr[CHAIN];
static struct ibv_sge sge[CHAIN];

static void make_chain(struct end *e, const struct hello *you, enum ibv_wr_opcode opcode)
{
	for (int i = 0; i < CHAIN; i++) {
		sge[i] = sge_of(e, (size_t)i * PIECE, PIECE);
		wr[i] = (struct ibv_send_wr){ .wr_id = (uint64_t)i, .sg_list = &sge[i], .num_sge = 1, .opcode = opcode,
					      .send_flags = i % 8 == 7 ? IBV_SEND_SIGNALED : 0,
					      .next = i + 1 < CHAIN ? &wr[i + 1] : NULL };
		/* backwards: no two pieces become one */
		wr[i].wr.rdma.remote_addr = you->addr + (size_t)(CHAIN - 1 - i) * PIECE;
		wr[i].wr.rdma.rkey = you->rkey;
	}
}

static void poster(struct end *e, struct hello you, int in, int out)
{
	struct ibv_send_wr *bad;
	(void)in;
	memset(e->buf, 0x55, e->len);
	make_chain(e, &you, IBV_WR_RDMA_WRITE);
	put(out, "g", 1);
	for (enum ibv_wc_status status = IBV_WC_SUCCESS; status == IBV_WC_SUCCESS;) {
		CHECK(ibv_post_send(e->qp, wr, &bad) == 0);
		for (int i = 0; i < CHAIN / 8 && status == IBV_WC_SUCCESS; i++)
			status = wait_wc(e).status;
		CHECK(status == IBV_WC_SUCCESS || status == IBV_WC_REM_ACCESS_ERR);
	}
	put(out, "e", 1); /* the region is gone */
	pause();
}

static int stop_poster(const struct options *o, int round)
{
	struct end e;
	int in, out, status;
	char c;
	pid_t pid = start_peer(o, poster, &in, &out);
	end_open(&e, o);
	meet(&e, o, in, out);
	take(in, &c, 1);
	usleep((useconds_t)(5000 + 700 * (round % 8)));
	CHECK(kill(pid, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
	double start = seconds();
	int err = ibv_dereg_mr(e.mr), busy = err == EBUSY;
	CHECK(err == 0 || err == EBUSY);
	CHECK(seconds() - start < 4);
	if (busy) {
		CHECK(kill(pid, SIGCONT) == 0);
		for (int i = 0; err && i < 100; i++) {
			usleep(20000);
			err = ibv_dereg_mr(e.mr);
		}
		CHECK(err == 0);
	}
	memset(e.buf, 0x11, e.len);
	kill(pid, SIGCONT);
	take(in, &c, 1);
	for (size_t i = 0; i < e.len; i++)
		CHECK(e.buf[i] == 0x11);
	kill(pid, SIGKILL);
	CHECK(waitpid(pid, &status, 0) == pid);
	close(in);
	close(out);
	e.mr = NULL;
	end_close(&e);
	return busy;
}

static void target(struct end *e, struct hello you, int in, int out)
{
	(void)in, (void)you;
	pattern(e->buf, e->len, 4);
	put(out, "g", 1);
	pause();
}

static void kill_target(const struct options *o, int round)
{
	struct ibv_send_wr *bad;
	struct end e;
	int in, out, status, failed = 0;
	char c;
	pid_t pid = start_peer(o, target, &in, &out);
	end_open(&e, o);
	struct hello you = meet(&e, o, in, out);
	take(in, &c, 1);
	make_chain(&e, &you, round % 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE);
	pid_t killer = fork();
	CHECK(killer >= 0);
	if (killer == 0) {
		usleep((useconds_t)(2000 + 500 * round));
		kill(pid, SIGKILL);
		_exit(0);
	}
	while (!failed) {
		uint64_t next = 0;
		CHECK(ibv_post_send(e.qp, wr, &bad) == 0);
		while (next < CHAIN) {
			struct ibv_wc wc = wait_wc(&e);
			CHECK(wc.wr_id == (failed ? next : wc.wr_id) && wc.wr_id >= next && wc.wr_id - next < 8);
			CHECK(wc.status == (failed ? IBV_WC_WR_FLUSH_ERR : wc.status));
			CHECK(wc.status == IBV_WC_SUCCESS || failed || wc.status == IBV_WC_RETRY_EXC_ERR);
			failed |= wc.status != IBV_WC_SUCCESS;
			next = wc.wr_id + 1;
		}
	}
	expect_nothing(&e);
	CHECK(waitpid(killer, &status, 0) == killer && waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
	close(in);
	close(out);
	end_close(&e);
}

int main(void)
{
	struct options o = usual;
	int busy = 0;
	o.depth = CHAIN;
	o.cqe = 2 * CHAIN;
	o.len = LEN;
	for (int round = 0; round < 12; round++)
		kill_target(&o, round);
	for (int round = 0; round < 40 && !busy; round++)
		busy = stop_poster(&o, round);
	CHECK(busy); /* the interesting case did occur */
	return 0;
}
