/* IGNORE_OVERRUN: completions that find no room are lost, and the queue lives on. */
#include "pair.h"

int main(void)
{
	struct end e[2];
	struct options o = usual;
	for (int i = 0; i < 2; i++) {
		end_open(&e[i], &o);
		CHECK(ibv_destroy_qp(e[i].qp) == 0 && ibv_destroy_cq(e[i].cq) == 0);
		struct ibv_cq_init_attr_ex a = { .cqe = 4, .wc_flags = IBV_WC_EX_WITH_QP_NUM,
						 .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
						 .flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN };
		CHECK(e[i].cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(e[i].ctx, &a)));
		struct ibv_qp_init_attr q = { .send_cq = e[i].cq, .recv_cq = e[i].cq, .qp_type = IBV_QPT_RC,
					      .cap = { 16, 16, 4, 4, 0 } };
		CHECK(e[i].qp = ibv_create_qp(e[i].pd, &q));
	}
	CHECK(to_rts(&e[0], e[1].qp->qp_num, &o) == 0 && to_rts(&e[1], e[0].qp->qp_num, &o) == 0);
	unsigned room = (unsigned)e[0].cq->cqe;
	for (unsigned i = 0; i < room + 5; i++)
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0);
	for (unsigned i = 0; i < room; i++)
		expect(&e[0], i, IBV_WC_SUCCESS);
	expect_nothing(&e[0]);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 77, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 77, IBV_WC_SUCCESS);
	pair_close(e);
	return 0;
}
