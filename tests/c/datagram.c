/* UD: 40 bytes of header in front, a wrong qkey or a missing receive drops without an error. UC:
 * delivered when a receive is there, dropped when not. */
#include "pair.h"

static void send_to(struct end *e, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey, uint64_t id, size_t len)
{
	struct ibv_sge s = sge_of(e, 0, len);
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qpn;
	wr.wr.ud.remote_qkey = qkey;
	CHECK(ibv_post_send(e->qp, &wr, &bad) == 0);
	expect(e, id, IBV_WC_SUCCESS);
}

int main(void)
{
	struct options o = usual;
	struct end e[2];
	o.type = IBV_QPT_UD;
	pair_open(e, &o);
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1 } };
	struct ibv_ah *ah = ibv_create_ah(e[0].pd, &attr);
	CHECK(ah);
	attr.is_global = 0;
	CHECK(!ibv_create_ah(e[0].pd, &attr));
	pattern(e[0].buf, 1000, 4);
	send_to(&e[0], ah, e[1].qp->qp_num, 0x11111111, 1, 1000); /* no receive */
	CHECK(post_recv(&e[1], 2, 0, 2000) == 0);
	send_to(&e[0], ah, e[1].qp->qp_num, 0x22222222, 3, 1000); /* wrong key */
	send_to(&e[0], ah, 0xfffff0, 0x11111111, 4, 1000);	  /* nobody there */
	expect_nothing(&e[1]);
	send_to(&e[0], ah, e[1].qp->qp_num, 0x11111111, 5, 1000);
	struct ibv_wc wc = wait_wc(&e[1]);
	CHECK(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS && wc.byte_len == 1040 && wc.wc_flags & IBV_WC_GRH);
	CHECK(same(e[1].buf + 40, 1000, 4) && wc.src_qp == e[0].qp->qp_num);
	CHECK(ibv_destroy_ah(ah) == 0);
	pair_close(e);

	o.type = IBV_QPT_UC;
	pair_open(e, &o);
	CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 100, NULL, 0) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect_nothing(&e[1]);
	CHECK(post_recv(&e[1], 2, 0, 2000) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 3, 0, 100, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 4, 0, 100, &e[1], 5000) == 0);
	expect(&e[0], 3, IBV_WC_SUCCESS);
	expect(&e[0], 4, IBV_WC_SUCCESS);
	expect(&e[1], 2, IBV_WC_SUCCESS);
	CHECK(e[1].buf[5000] == e[0].buf[0] && e[1].buf[5099] == e[0].buf[99]);
	CHECK(post(&e[0], IBV_WR_RDMA_READ, 5, 0, 8, &e[1], 0) == EINVAL);
	pair_close(e);
	return 0;
}
