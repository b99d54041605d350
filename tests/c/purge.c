/* Completions of a QP that was reset or destroyed take no room, and the entries of a shared receive
 * queue come back. */
#include "pair.h"

int main(void)
{
	struct options o = usual, plain = usual;
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET }, error = { .qp_state = IBV_QPS_ERR };
	struct end r, t, e[2];

	o.srq = 16;
	end_open(&r, &plain);
	end_open(&t, &o);
	for (int i = 0; i < 16; i++)
		CHECK(post_recv(&t, (uint64_t)i, 0, 64) == 0);
	for (int round = 0; round < 40; round++) {
		struct ibv_cq *cq = ibv_create_cq(t.ctx, 64, NULL, NULL, 0);
		struct ibv_qp_init_attr a = { .send_cq = cq, .recv_cq = cq, .srq = t.srq, .qp_type = IBV_QPT_RC,
					      .cap = { 8, 0, 1, 0, 0 } };
		struct end s = t;
		CHECK(s.qp = ibv_create_qp(t.pd, &a));
		CHECK(ibv_modify_qp(r.qp, &reset, IBV_QP_STATE) == 0);
		CHECK(to_rts(&r, s.qp->qp_num, &plain) == 0 && to_rts(&s, r.qp->qp_num, &o) == 0);
		CHECK(post(&r, IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
		expect(&r, 1, IBV_WC_SUCCESS);
		CHECK(ibv_destroy_qp(s.qp) == 0 && ibv_destroy_cq(cq) == 0); /* its receive was not polled */
		CHECK(post_recv(&t, 99, 0, 64) == 0);
	}
	end_close(&r);
	end_close(&t);

	o = usual;
	o.cqe = o.depth = 32;
	pair_open(e, &o);
	for (int round = 0; round < 5; round++) {
		for (int i = 0; i < 16; i++)
			CHECK(post_recv(&e[1], (uint64_t)i, 0, 64) == 0);
		CHECK(ibv_modify_qp(e[1].qp, &error, IBV_QP_STATE) == 0 && ibv_modify_qp(e[1].qp, &reset, IBV_QP_STATE) == 0);
		CHECK(ibv_modify_qp(e[0].qp, &reset, IBV_QP_STATE) == 0);
		CHECK(to_rts(&e[0], e[1].qp->qp_num, &o) == 0 && to_rts(&e[1], e[0].qp->qp_num, &o) == 0);
	}
	CHECK(post_recv(&e[1], 5, 0, 64) == 0 && post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect(&e[1], 5, IBV_WC_SUCCESS);
	pair_close(e);
	return 0;
}
