/* The peer is connected, and asleep on its channel, when we find out that we cannot reach its memory:
 * it wakes up, starts its helper, and our writes and sends arrive while it sleeps on. */
#include "process.h"
#include "refuse.h"

static void sleeper(int in, int out)
{
	struct options o = usual;
	struct end e;
	uint32_t qpn;
	o.channel = 1;
	alarm(25);
	end_open(&e, &o);
	struct hello me = { e.qp->qp_num, e.mr->rkey, (uintptr_t)e.buf };
	put(out, &me, sizeof(me));
	take(in, &qpn, sizeof(qpn));
	CHECK(to_rts(&e, qpn, &o) == 0);
	CHECK(post_recv(&e, 7, 8192, 4096) == 0);
	CHECK(ibv_req_notify_cq(e.cq, 0) == 0);
	put(out, "r", 1);
	for (;;) {
		struct ibv_cq *cq;
		struct ibv_wc wc;
		void *context;
		CHECK(ibv_get_cq_event(e.channel, &cq, &context) == 0);
		ibv_ack_cq_events(cq, 1);
		CHECK(ibv_req_notify_cq(e.cq, 0) == 0);
		if (ibv_poll_cq(e.cq, 1, &wc) == 0)
			continue;
		CHECK(wc.wr_id == 7 && wc.status == IBV_WC_SUCCESS);
		break;
	}
	CHECK(same(e.buf, 4096, 5) && same(e.buf + 8192, 4096, 6));
	end_close(&e);
	_exit(0);
}

int main(void)
{
#ifdef __SANITIZE_THREAD__
	puts("the thread sanitizer does not see what orders two processes");
	return 77;
#endif
	struct options o = usual;
	struct end e;
	struct hello you;
	int ab[2], ba[2];
	char c;
	unsetenv("ROCECOMM_SOFT_STAGING");
	o.timeout = 20; /* 34 s with the retries: the peer has all the time it needs */
	CHECK(pipe(ab) == 0 && pipe(ba) == 0);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0)
		sleeper(ab[0], ba[1]);
	end_open(&e, &o);
	refuse_process_vm();
	take(ba[0], &you, sizeof(you));
	put(ab[1], &e.qp->qp_num, sizeof(you.qpn));
	take(ba[0], &c, 1);
	usleep(50000); /* it is asleep now, most likely; right in any case */
	CHECK(freopen("/dev/null", "w", stderr)); /* the line about staging */
	CHECK(to_rts(&e, you.qpn, &o) == 0);
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	pattern(e.buf, 4096, 5);
	pattern(e.buf + 4096, 4096, 6);
	double start = seconds();
	CHECK(post(&e, IBV_WR_RDMA_WRITE, 1, 0, 4096, &far, 0) == 0);
	CHECK(post(&e, IBV_WR_SEND, 2, 4096, 4096, NULL, 0) == 0);
	expect(&e, 1, IBV_WC_SUCCESS);
	expect(&e, 2, IBV_WC_SUCCESS);
	CHECK(seconds() - start < 5);
	join_peer(pid);
	end_close(&e);
	return 0;
}
