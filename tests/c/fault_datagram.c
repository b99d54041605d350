/* Faults where nobody is told what happens on the way: UD and UC; and RC into a shared receive queue. */
#include "fault.h"

static struct options o;
static struct end e[2];

static void send_to(struct ibv_ah *ah, uint64_t id, char byte)
{
	struct ibv_sge s = sge_of(&e[0], 0, 8);
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	if (ah) {
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = e[1].qp->qp_num;
		wr.wr.ud.remote_qkey = 0x11111111;
	}
	e[0].buf[0] = byte;
	CHECK(ibv_post_send(e[0].qp, &wr, &bad) == 0);
}

/* Of ten messages those that the seed names are lost, the others arrive in order. */
static void unconnected(enum ibv_qp_type type, const char *rule, const char *lost)
{
	o.type = type;
	pair_open(e, &o);
	size_t header = type == IBV_QPT_UD ? 40 : 0;
	struct ibv_ah_attr a = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1 } };
	struct ibv_ah *ah = type == IBV_QPT_UD ? ibv_create_ah(e[0].pd, &a) : NULL;
	uint64_t id = inject(&e[0], rule);
	for (unsigned i = 0; i < 10; i++)
		CHECK(post_recv(&e[1], i, 128 * i, 128) == 0);
	unsigned n = 0;
	for (unsigned i = 0; i < 10; i++) {
		send_to(ah, i, (char)(i + 1));
		expect(&e[0], i, IBV_WC_SUCCESS);
		if (lost[i] == 'x') {
			expect_nothing(&e[1]);
		} else {
			expect(&e[1], n, IBV_WC_SUCCESS);
			CHECK(e[1].buf[128 * n + header] == (char)(i + 1));
			n++;
		}
	}
	CHECK(softnic_inject_remove(id) == 0);
	if (ah)
		CHECK(ibv_destroy_ah(ah) == 0);
	pair_close(e);
	o = usual;
}

/* A local error stops the send queue of an unreliable queue pair, not the receives. */
static void local_error(enum ibv_qp_type type)
{
	o.type = type;
	pair_open(e, &o);
	struct ibv_ah_attr a = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1 } };
	struct ibv_ah *ah = type == IBV_QPT_UD ? ibv_create_ah(e[0].pd, &a) : NULL;
	inject(&e[0], "loc_prot_err:times=1");
	send_to(ah, 1, 1);
	expect(&e[0], 1, IBV_WC_LOC_PROT_ERR);
	CHECK(state_of(&e[0]) == IBV_QPS_SQE);
	if (ah)
		CHECK(ibv_destroy_ah(ah) == 0);
	pair_close(e);
	o = usual;
}

static void shared_queue(void)
{
	o.srq = 16;
	pair_open(e, &o);
	uint64_t id = inject(&e[0], "delay:ms=20,times=1;rnr:after=1,times=1,ms=20");
	for (unsigned i = 0; i < 3; i++)
		CHECK(post_recv(&e[1], 10 + i, 64 * i, 64) == 0);
	double start = seconds();
	for (unsigned i = 0; i < 3; i++)
		send_to(NULL, i, (char)i);
	for (unsigned i = 0; i < 3; i++) {
		expect(&e[0], i, IBV_WC_SUCCESS);
		expect(&e[1], 10 + i, IBV_WC_SUCCESS);
	}
	CHECK(seconds() - start > 0.04);
	CHECK(softnic_inject_remove(id) == 0);
	/* a sender that waits for the queue of somebody else, with rules of its own, is gone on with */
	id = inject(&e[0], "delay:us=1,op=rdma_read");
	send_to(NULL, 5, 5);
	expect_nothing(&e[0]);
	CHECK(post_recv(&e[1], 15, 0, 64) == 0);
	expect(&e[0], 5, IBV_WC_SUCCESS);
	expect(&e[1], 15, IBV_WC_SUCCESS);
	uninject(id, 0, 0);
	pair_close(e);
	o = usual;
}

int main(void)
{
	o = usual;
	unconnected(IBV_QPT_UD, "drop:after=2,times=3", "..xxx.....");
	unconnected(IBV_QPT_UC, "drop:after=2,times=3", "..xxx.....");
	unconnected(IBV_QPT_UD, "drop:p=0.3,seed=7", "x.x...x..x"); /* bits 0, 2, 6, 9: see fault_rules */
	unconnected(IBV_QPT_UC, "rnr:times=1", "x.........");
	unconnected(IBV_QPT_UD, "delay:us=500", "..........");
	unconnected(IBV_QPT_UC, "delay:us=500", "..........");
	unconnected(IBV_QPT_UC, "peer_death:after=9", ".........x");
	local_error(IBV_QPT_UD);
	local_error(IBV_QPT_UC);
	shared_queue();
	return 0;
}
