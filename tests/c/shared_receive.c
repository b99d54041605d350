/* A shared receive queue: two senders, the limit event, senders that wait are served when it fills. */
#include "pair.h"

int main(void)
{
	struct options o = usual, plain = usual;
	struct end e[2], more;
	struct ibv_async_event event;

	o.srq = 32;
	end_open(&e[0], &plain);
	end_open(&e[1], &o); /* the receiver */
	CHECK(to_rts(&e[0], e[1].qp->qp_num, &plain) == 0 && to_rts(&e[1], e[0].qp->qp_num, &o) == 0);
	end_open(&more, &plain);
	struct ibv_qp_init_attr a = { .send_cq = e[1].cq, .recv_cq = e[1].cq, .srq = e[1].srq, .qp_type = IBV_QPT_RC,
				      .cap = { 8, 0, 1, 0, 0 } };
	struct end second = e[1];
	CHECK(second.qp = ibv_create_qp(e[1].pd, &a));
	CHECK(to_rts(&more, second.qp->qp_num, &plain) == 0 && to_rts(&second, more.qp->qp_num, &o) == 0);

	CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	CHECK(post(&more, IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0);
	expect_nothing(&e[0]);
	expect_nothing(&more);
	for (int i = 0; i < 10; i++)
		CHECK(post_recv(&e[1], 10 + i, (size_t)i * 64, 64) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect(&more, 2, IBV_WC_SUCCESS);
	struct ibv_wc wc1 = wait_wc(&e[1]), wc2 = wait_wc(&e[1]);
	CHECK(wc1.wr_id == 10 && wc2.wr_id == 11 && wc1.qp_num != wc2.qp_num);

	struct ibv_srq_attr limit = { .srq_limit = 4 };
	CHECK(ibv_modify_srq(e[1].srq, &limit, IBV_SRQ_LIMIT) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 3, 0, 300, NULL, 0) == 0); /* 64 bytes do not hold 300 */
	expect(&e[0], 3, IBV_WC_REM_INV_REQ_ERR);
	expect(&e[1], 12, IBV_WC_LOC_LEN_ERR);
	/* the error cost that connection and one receive; seven are left, then three, below the limit */
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	CHECK(ibv_modify_qp(e[0].qp, &reset, IBV_QP_STATE) == 0 && ibv_modify_qp(e[1].qp, &reset, IBV_QP_STATE) == 0);
	CHECK(to_rts(&e[0], e[1].qp->qp_num, &plain) == 0 && to_rts(&e[1], e[0].qp->qp_num, &o) == 0);
	for (int i = 0; i < 4; i++) {
		CHECK(post(&e[0], IBV_WR_SEND, 4, 0, 8, NULL, 0) == 0);
		expect(&e[0], 4, IBV_WC_SUCCESS);
	}
	do
		CHECK(ibv_get_async_event(e[1].ctx, &event) == 0);
	while (ibv_ack_async_event(&event), event.event_type != IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK(ibv_query_srq(e[1].srq, &limit) == 0 && limit.srq_limit == 0);

	CHECK(ibv_destroy_srq(e[1].srq) == EBUSY);
	CHECK(ibv_destroy_qp(second.qp) == 0);
	end_close(&more);
	pair_close(e);
	return 0;
}
