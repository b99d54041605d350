/* Both directions of sleep: a receiver asleep on its channel is woken by a send; a sender asleep
 * with a send that waits is woken when the peer posts the receive, or when the peer dies. */
#include "process.h"

static void get_event(struct end *e)
{
	struct ibv_cq *cq;
	void *context;
	struct pollfd p = { .fd = e->channel->fd, .events = POLLIN };
	CHECK(poll(&p, 1, 10000) == 1);
	CHECK(ibv_get_cq_event(e->channel, &cq, &context) == 0 && cq == e->cq && context == e);
	ibv_ack_cq_events(cq, 1);
}

static void peer(struct end *e, struct hello you, int in, int out)
{
	char c;
	(void)you;
	CHECK(post_recv(e, 1, 0, 64) == 0);
	CHECK(ibv_req_notify_cq(e->cq, 0) == 0);
	put(out, "s", 1);
	get_event(e); /* asleep until the send comes */
	expect(e, 1, IBV_WC_SUCCESS);
	CHECK(e->buf[0] == 3);
	take(in, &c, 1);
	usleep(100000);
	CHECK(post_recv(e, 2, 0, 64) == 0);
	expect(e, 2, IBV_WC_SUCCESS);
	take(in, &c, 1);
	usleep(100000);
	kill(getpid(), SIGKILL);
}

int main(void)
{
	struct options o = usual;
	struct end e;
	int in, out, status;
	char c;
	o.channel = 1;
	pid_t pid = start_peer(&o, peer, &in, &out);
	end_open(&e, &o);
	meet(&e, &o, in, out);
	e.buf[0] = 3;
	take(in, &c, 1);
	usleep(100000);
	CHECK(post(&e, IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	expect(&e, 1, IBV_WC_SUCCESS);

	CHECK(post(&e, IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0); /* no receive there */
	CHECK(ibv_req_notify_cq(e.cq, 0) == 0);
	expect_nothing(&e);
	put(out, "x", 1);
	get_event(&e);
	expect(&e, 2, IBV_WC_SUCCESS);

	CHECK(ibv_req_notify_cq(e.cq, 0) == 0);
	CHECK(post(&e, IBV_WR_SEND, 3, 0, 8, NULL, 0) == 0);
	put(out, "x", 1);
	get_event(&e); /* the kill */
	expect(&e, 3, IBV_WC_RETRY_EXC_ERR);
	CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
	end_close(&e);
	return 0;
}
