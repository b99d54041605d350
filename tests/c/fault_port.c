/* A port that goes down and comes up again: what query_port and the events say, and what becomes of
 * work on both sides, before and after. */
#include "fault.h"

static struct options o;
static struct end e[2];

static enum ibv_port_state port(struct end *x)
{
	struct ibv_port_attr a;
	CHECK(ibv_query_port(x->ctx, 1, &a) == 0);
	CHECK((a.state == IBV_PORT_ACTIVE) == (a.phys_state == 5));
	return a.state;
}

static void is_event(struct end *x, enum ibv_event_type type)
{
	struct ibv_async_event got = next_event(x);
	CHECK(got.event_type == type && got.element.port_num == 1);
}

/* `down` is the side whose port is down, R posts. */
static void outlasts_the_retries(int down)
{
	o.timeout = 12; /* 16.8 ms */
	o.retry_cnt = 2;
	pair_open(e, &o);
	CHECK(port(&e[down]) == IBV_PORT_ACTIVE);
	CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0); /* outstanding: no receive there */
	expect_nothing(&e[0]);
	double start = seconds();
	CHECK(softnic_port(e[down].ctx, 0) == 0);
	CHECK(softnic_port(e[down].ctx, 0) == 0); /* already */
	CHECK(port(&e[down]) == IBV_PORT_DOWN && port(&e[1 - down]) == IBV_PORT_ACTIVE);
	is_event(&e[down], IBV_EVENT_PORT_ERR);
	no_event(&e[down]);
	no_event(&e[1 - down]);
	CHECK(post_recv(&e[1], 10, 0, 64) == 0); /* nothing gets through any more */
	expect(&e[0], 1, IBV_WC_RETRY_EXC_ERR);
	CHECK(seconds() - start > 3 * 0.0167);
	expect_nothing(&e[1]);
	CHECK(softnic_port(e[down].ctx, 1) == 0);
	is_event(&e[down], IBV_EVENT_PORT_ACTIVE);
	CHECK(port(&e[down]) == IBV_PORT_ACTIVE);
	pair_close(e);
	o = usual;
}

static void comes_up_in_time(int down)
{
	o.timeout = 18; /* 8 times 1.07 s */
	pair_open(e, &o);
	CHECK(softnic_port(e[down].ctx, 0) == 0);
	is_event(&e[down], IBV_EVENT_PORT_ERR);
	CHECK(post_recv(&e[1], 10, 0, 64) == 0);
	e[0].buf[0] = 7;
	CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 2, 0, 8, &e[1], 4096) == 0);
	expect_nothing(&e[0]);
	expect_nothing(&e[1]);
	CHECK(e[1].buf[4096] == 0);
	CHECK(softnic_port(e[down].ctx, 1) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect(&e[0], 2, IBV_WC_SUCCESS);
	expect(&e[1], 10, IBV_WC_SUCCESS);
	CHECK(e[1].buf[0] == 7 && e[1].buf[4096] == 7);
	is_event(&e[down], IBV_EVENT_PORT_ACTIVE);
	pair_close(e);
	o = usual;
}

/* By rule: at the third request, for a time. */
static void flap(void)
{
	o.timeout = 18;
	pair_open(e, &o);
	inject(&e[0], "port_down:after=2,ms=60");
	double start = seconds();
	for (unsigned i = 0; i < 4; i++)
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0);
	is_event(&e[0], IBV_EVENT_PORT_ERR);
	for (unsigned i = 0; i < 4; i++)
		expect(&e[0], i, IBV_WC_SUCCESS);
	CHECK(seconds() - start > 0.06);
	is_event(&e[0], IBV_EVENT_PORT_ACTIVE);
	pair_close(e);
	o = usual;
}

/* A datagram and an unreliable connection are told nothing. */
static void unconnected(enum ibv_qp_type type, int down)
{
	o.type = type;
	pair_open(e, &o);
	CHECK(softnic_port(e[down].ctx, 0) == 0);
	CHECK(post_recv(&e[1], 10, 0, 128) == 0);
	struct ibv_ah_attr a = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1 } };
	struct ibv_ah *ah = ibv_create_ah(e[0].pd, &a);
	CHECK(ah);
	struct ibv_sge s = sge_of(&e[0], 0, 8);
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	if (type == IBV_QPT_UD) {
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = e[1].qp->qp_num;
		wr.wr.ud.remote_qkey = 0x11111111;
	}
	CHECK(ibv_post_send(e[0].qp, &wr, &bad) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect_nothing(&e[1]);
	CHECK(softnic_port(e[down].ctx, 1) == 0);
	CHECK(ibv_post_send(e[0].qp, &wr, &bad) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect(&e[1], 10, IBV_WC_SUCCESS);
	CHECK(ibv_destroy_ah(ah) == 0);
	pair_close(e);
	o = usual;
}

int main(void)
{
	o = usual;
	for (int down = 0; down < 2; down++) {
		outlasts_the_retries(down);
		comes_up_in_time(down);
		unconnected(IBV_QPT_UC, down);
		unconnected(IBV_QPT_UD, down);
	}
	flap();
	return 0;
}
