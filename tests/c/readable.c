/* A channel is readable only if an event can be had: a peer that was waited for once and leaves in
 * good order does not freeze a program that polls the descriptor and then takes the event. */
#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	char c;
	(void)you;
	(void)out;
	take(in, &c, 1);
	usleep(50000);
	CHECK(post_recv(e, 1, 0, 64) == 0);
	expect(e, 1, IBV_WC_SUCCESS);
	take(in, &c, 1);
}

int main(void)
{
	struct options o = usual;
	struct ibv_cq *cq;
	struct end e;
	void *context;
	int in, out, readable = 0;
	o.channel = 1;
	pid_t pid = start_peer(&o, peer, &in, &out);
	end_open(&e, &o);
	meet(&e, &o, in, out);
	CHECK(ibv_req_notify_cq(e.cq, 0) == 0);
	CHECK(post(&e, IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	put(out, "x", 1);
	CHECK(ibv_get_cq_event(e.channel, &cq, &context) == 0);
	ibv_ack_cq_events(cq, 1);
	expect(&e, 1, IBV_WC_SUCCESS);
	CHECK(ibv_req_notify_cq(e.cq, 0) == 0);
	pid_t copy = fork(); /* holds copies of every descriptor */
	CHECK(copy >= 0);
	if (!copy) {
		pause();
		_exit(0);
	}
	put(out, "x", 1);
	join_peer(pid);
	alarm(20);
	struct pollfd p = { .fd = e.channel->fd, .events = POLLIN };
	for (double until = seconds() + 2.5; seconds() < until;)
		if (poll(&p, 1, 100) == 1) {
			CHECK(ibv_get_cq_event(e.channel, &cq, &context) == 0); /* blocks, if it was a lie */
			ibv_ack_cq_events(cq, 1);
			CHECK(ibv_req_notify_cq(e.cq, 0) == 0);
			readable++;
		}
	CHECK(readable < 10); /* woken for nothing is allowed, spinning is not */
	kill(copy, SIGKILL);
	CHECK(waitpid(copy, NULL, 0) == copy);
	end_close(&e);
	return 0;
}
