/* Whoever sleeps on a channel is woken in spite of faults: by the end of a delay, by retries that run
 * out, by a peer that posts the receive, by a port that comes up, by a rule that goes; also when it
 * sleeps for receives only and its send waits. */
#include "fault.h"
#include "process.h"

static void arm(struct end *e)
{
	CHECK(ibv_req_notify_cq(e->cq, 0) == 0);
}

/* Sleeps until a completion is there: events without one are allowed. */
static struct ibv_wc sleep_for(struct end *e)
{
	struct ibv_wc wc;
	double until = seconds() + 10;
	for (;;) {
		struct pollfd p = { .fd = e->channel->fd, .events = POLLIN };
		struct ibv_cq *cq;
		void *context;
		arm(e);
		int n = ibv_poll_cq(e->cq, 1, &wc);
		CHECK(n >= 0 && seconds() < until);
		if (n)
			return wc;
		CHECK(poll(&p, 1, 8000) == 1);
		CHECK(ibv_get_cq_event(e->channel, &cq, &context) == 0);
		ibv_ack_cq_events(cq, 1);
	}
}

/* No completion for a while, asleep as far as events without one allow. */
static void nothing_for(struct end *e, double time)
{
	struct ibv_wc wc;
	struct ibv_cq *cq;
	void *context;
	double until = seconds() + time;
	while (seconds() < until) {
		struct pollfd p = { .fd = e->channel->fd, .events = POLLIN };
		arm(e);
		if (ibv_poll_cq(e->cq, 1, &wc) != 0) {
			fprintf(stderr, "wr_id %lu status %d\n", (unsigned long)wc.wr_id, wc.status);
			exit(1);
		}
		if (poll(&p, 1, 10) == 1) {
			CHECK(ibv_get_cq_event(e->channel, &cq, &context) == 0);
			ibv_ack_cq_events(cq, 1);
		}
	}
	arm(e);
}

static void wake_with(struct end *e, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc = sleep_for(e);
	if (wc.wr_id != id || wc.status != status)
		fprintf(stderr, "wr_id %lu status %d\n", (unsigned long)wc.wr_id, wc.status);
	CHECK(wc.wr_id == id && wc.status == status);
}

static void peer(struct end *e, struct hello you, int in, int out)
{
	char c;
	(void)you;
	take(in, &c, 1);
	usleep(100000);
	CHECK(post_recv(e, 1, 0, 64) == 0); /* the other one sleeps with a send that waits for this */
	expect(e, 1, IBV_WC_SUCCESS);
	CHECK(e->buf[0] == 3);
	take(in, &c, 1);
	usleep(50000);
	CHECK(softnic_port(e->ctx, 0) == 0);
	put(out, "d", 1);
	usleep(150000);
	double up = seconds();
	CHECK(softnic_port(e->ctx, 1) == 0);
	put(out, &up, sizeof(up));
	take(in, &c, 1);
}

int main(int argc, char **argv)
{
	struct options o = usual;
	struct end e;
	(void)argc;
	int in, out;
	char c;
	o.channel = 1;
	o.timeout = 18;
	pid_t pid = start_peer(&o, peer, &in, &out);
	end_open(&e, &o);
	struct hello you = meet(&e, &o, in, out);
	struct ibv_sge s = sge_of(&e, 0, 8);
	struct ibv_send_wr write = { .wr_id = 9, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				     .send_flags = IBV_SEND_SIGNALED,
				     .wr.rdma = { you.addr + 4096, you.rkey } }, *bad;

	/* the end of a delay */
	uint64_t id = inject(NULL, "delay:ms=120");
	double start = seconds();
	CHECK(ibv_post_send(e.qp, &write, &bad) == 0 && ibv_post_send(e.qp, &write, &bad) == 0);
	wake_with(&e, 9, IBV_WC_SUCCESS);
	CHECK(seconds() - start >= 0.12 && seconds() - start < 0.9);
	wake_with(&e, 9, IBV_WC_SUCCESS); /* each waits its own time */
	CHECK(seconds() - start >= 0.24 && seconds() - start < 1.8);
	uninject(id, 2, 2);

	/* the peer posts the receive; R's queue is left to R, which sleeps */
	id = inject(NULL, "delay:us=1,op=rdma_read");
	e.buf[0] = 3;
	CHECK(post(&e, IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	put(out, "x", 1);
	wake_with(&e, 1, IBV_WC_SUCCESS);
	uninject(id, 0, 0);

	/* the peer's port goes down and comes up */
	put(out, "x", 1);
	take(in, &c, 1);
	start = seconds();
	double up, end;
	CHECK(ibv_post_send(e.qp, &write, &bad) == 0);
	wake_with(&e, 9, IBV_WC_SUCCESS);
	end = seconds();
	take(in, &up, sizeof(up));
	CHECK(end > up && end - start < 5);

	struct pollfd p = { .fd = e.channel->fd, .events = POLLIN };

	/* a rule that goes wakes what it held */
	id = inject(NULL, "delay:s=60");
	CHECK(ibv_post_send(e.qp, &write, &bad) == 0);
	nothing_for(&e, 0.05);
	CHECK(softnic_inject_remove(id) == 0);
	CHECK(poll(&p, 1, 500) == 1);
	wake_with(&e, 9, IBV_WC_SUCCESS);

	/* a death on request: at once, whatever the timeout */
	CHECK(post(&e, IBV_WR_SEND, 7, 0, 8, NULL, 0) == 0);
	nothing_for(&e, 0.02);
	CHECK(softnic_peer_death(e.qp) == 0);
	CHECK(poll(&p, 1, 500) == 1);
	wake_with(&e, 7, IBV_WC_RETRY_EXC_ERR);
	put(out, "x", 1);
	join_peer(pid);
	end_close(&e);

	/* asleep for the receives of another queue, while a write that nobody will hear of is held */
	struct end pair[2];
	struct ibv_cq *cq;
	void *context;
	pair_open(pair, &o);
	struct ibv_cq *other = ibv_create_cq(pair[0].ctx, 8, NULL, pair[0].channel, 0);
	CHECK(other);
	inject(&pair[0], "delay:ms=80");
	s = sge_of(&pair[0], 0, 8);
	pair[0].buf[0] = 5;
	write.send_flags = 0;
	write.wr.rdma.remote_addr = (uintptr_t)pair[1].buf;
	write.wr.rdma.rkey = pair[1].mr->rkey;
	start = seconds();
	CHECK(ibv_post_send(pair[0].qp, &write, &bad) == 0);
	CHECK(ibv_req_notify_cq(other, 0) == 0);
	p.fd = pair[0].channel->fd;
	CHECK(poll(&p, 1, 2000) == 1);
	CHECK(pair[1].buf[0] == 0); /* it is the taking of the event that goes on with it */
	CHECK(ibv_get_cq_event(pair[0].channel, &cq, &context) == 0);
	ibv_ack_cq_events(cq, 1);
	CHECK(pair[1].buf[0] == 5 && seconds() - start >= 0.08);
	CHECK(ibv_destroy_cq(other) == 0);
	pair_close(pair);

	/* retries that run out */
	o.timeout = 12;
	o.retry_cnt = 2;
	pair_open(pair, &o);
	inject(&pair[0], "drop");
	start = seconds();
	CHECK(post(&pair[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &pair[1], 0) == 0);
	wake_with(&pair[0], 1, IBV_WC_RETRY_EXC_ERR);
	CHECK(seconds() - start > 3 * 0.0167 && seconds() - start < 0.9);
	pair_close(pair);
	/* once more where bytes go through staging memory, which is slow enough for a peer to be in the
	 * middle of this one's queue when a rule comes */
	if (!getenv("ROCECOMM_SOFT_STAGING")) {
		setenv("ROCECOMM_SOFT_STAGING", "1", 1);
		execv("/proc/self/exe", argv);
	}
	return 0;
}
