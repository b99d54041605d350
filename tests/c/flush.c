/* The error state completes everything that is outstanding, and everything posted later; RESET
 * forgets it, old completions included, and the pair works again. */
#include "pair.h"

int main(void)
{
	struct end e[2];
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };
	pair_open(e, &usual);
	for (int i = 0; i < 5; i++)
		CHECK(post(&e[0], IBV_WR_SEND, 10 + i, 0, 8, NULL, 0) == 0); /* no receive: they wait */
	for (int i = 0; i < 5; i++)
		CHECK(post_recv(&e[0], 20 + i, 0, 8) == 0);
	CHECK(ibv_modify_qp(e[0].qp, &a, IBV_QP_STATE) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 30, 0, 8, NULL, 0) == 0);
	CHECK(post_recv(&e[0], 31, 0, 8) == 0);
	int seen[32] = { 0 };
	for (int i = 0; i < 12; i++) {
		struct ibv_wc wc = wait_wc(&e[0]);
		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id < 32);
		seen[wc.wr_id]++;
	}
	for (int i = 0; i < 5; i++)
		CHECK(seen[10 + i] == 1 && seen[20 + i] == 1);
	CHECK(seen[30] == 1 && seen[31] == 1);

	CHECK(post_recv(&e[0], 1, 0, 8) == 0); /* its flush completion is not polled ... */
	a.qp_state = IBV_QPS_RESET;
	CHECK(ibv_modify_qp(e[0].qp, &a, IBV_QP_STATE) == 0);
	CHECK(ibv_modify_qp(e[1].qp, &a, IBV_QP_STATE) == 0);
	expect_nothing(&e[0]); /* ... and RESET takes it back */
	CHECK(to_rts(&e[0], e[1].qp->qp_num, &usual) == 0 && to_rts(&e[1], e[0].qp->qp_num, &usual) == 0);
	for (int i = 0; i < 200; i++) {
		CHECK(post_recv(&e[1], 2, 0, 8) == 0);
		CHECK(post(&e[0], IBV_WR_SEND, 3, 0, 8, NULL, 0) == 0);
		expect(&e[0], 3, IBV_WC_SUCCESS);
		expect(&e[1], 2, IBV_WC_SUCCESS);
	}
	pair_close(e);
	return 0;
}
