/* A sender asleep on its channel is woken when the peer lives on but its QP goes away: destroyed,
 * reset, failed by an error of its own, or closed with its device. */
#include "process.h"

static int mode;

static void peer(struct end *e, struct hello you, int in, int out)
{
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct ibv_sge bad_key = { (uintptr_t)e->buf, 8, 0xdead0001 };
	struct ibv_send_wr wr = { .wr_id = 9, .sg_list = &bad_key, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	char c;
	(void)you;
	(void)out;
	take(in, &c, 1);
	usleep(100000);
	switch (mode) {
	case 0:
		CHECK(ibv_destroy_qp(e->qp) == 0);
		break;
	case 1:
		CHECK(ibv_modify_qp(e->qp, &reset, IBV_QP_STATE) == 0);
		break;
	case 2:
		CHECK(ibv_post_send(e->qp, &wr, &bad) == 0);
		expect(e, 9, IBV_WC_LOC_PROT_ERR);
		break;
	default:
		CHECK(ibv_close_device(e->ctx) == 0);
	}
	take(in, &c, 1);
	_exit(0);
}

int main(void)
{
	struct options o = usual;
	o.channel = 1;
	for (mode = 0; mode < 4; mode++) {
		struct end e;
		int in, out;
		pid_t pid = start_peer(&o, peer, &in, &out);
		end_open(&e, &o);
		meet(&e, &o, in, out);
		CHECK(ibv_req_notify_cq(e.cq, 0) == 0);
		CHECK(post(&e, IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0); /* no receive there */
		expect_nothing(&e);
		put(out, "x", 1);
		struct pollfd p = { .fd = e.channel->fd, .events = POLLIN };
		CHECK(poll(&p, 1, 8000) == 1);
		expect(&e, 1, IBV_WC_RETRY_EXC_ERR);
		put(out, "x", 1);
		join_peer(pid);
		close(in);
		close(out);
		end_close(&e);
	}
	return 0;
}
