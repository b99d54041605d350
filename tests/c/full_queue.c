/* A send queue is full when as many requests as it holds were posted and not one of their completions was
 * polled, though they were carried out long ago: a completion queue made to measure does not overrun. */
#include "pair.h"

#define N 16

int main(void)
{
	struct options o = usual;
	struct end e[2];
	o.depth = N;
	o.cqe = N;
	pair_open(e, &o);
	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < N; i++)
			CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0);
		for (int i = 0; i < 3; i++)
			CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 99, 0, 8, &e[1], 0) == ENOMEM);
		expect(&e[0], 0, IBV_WC_SUCCESS);
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, N, 0, 8, &e[1], 0) == 0);
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 99, 0, 8, &e[1], 0) == ENOMEM);
		for (int i = 1; i <= N; i++)
			expect(&e[0], i, IBV_WC_SUCCESS);
	}
	/* the same for what is flushed; and a RESET empties it all */
	for (int i = 0; i < N / 2; i++)
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0);
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };
	CHECK(ibv_modify_qp(e[0].qp, &a, IBV_QP_STATE) == 0);
	for (int i = N / 2; i < N; i++)
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 99, 0, 8, &e[1], 0) == ENOMEM);
	for (int i = 0; i < 4; i++)
		expect(&e[0], i, IBV_WC_SUCCESS);
	for (int n = 0; n < 2; n++) {
		a.qp_state = IBV_QPS_RESET;
		CHECK(ibv_modify_qp(e[n].qp, &a, IBV_QP_STATE) == 0);
	}
	CHECK(to_rts(&e[0], e[1].qp->qp_num, &o) == 0 && to_rts(&e[1], e[0].qp->qp_num, &o) == 0);
	for (int i = 0; i < N; i++)
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0);
	for (int i = 0; i < N; i++)
		expect(&e[0], i, IBV_WC_SUCCESS);
	expect_nothing(&e[0]);
	pair_close(e);
	return 0;
}
