/* No receive posted: the send waits; runs out after its count; a later receive completes it. */
#include "pair.h"

int main(void)
{
	struct options o = usual;
	struct end e[2];

	pair_open(e, &o); /* rnr_retry 7: waits for ever */
	pattern(e[0].buf, 100000, 1);
	CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 2, 0, 100000, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 3, 0, 8, &e[1], 200000) == 0);
	expect_nothing(&e[0]);
	CHECK(e[1].buf[200000] == 0); /* in order: the write waits behind the sends */
	CHECK(post_recv(&e[1], 10, 0, 8) == 0);
	expect(&e[1], 10, IBV_WC_SUCCESS);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect_nothing(&e[0]);
	CHECK(post_recv(&e[1], 11, 64, 100000) == 0);
	expect(&e[1], 11, IBV_WC_SUCCESS);
	expect(&e[0], 2, IBV_WC_SUCCESS);
	expect(&e[0], 3, IBV_WC_SUCCESS);
	CHECK(same(e[1].buf, 8, 1) && same(e[1].buf + 64, 100000, 1) && same(e[1].buf + 200000, 8, 1));
	pair_close(e);

	o.rnr_retry = 0;
	pair_open(e, &o);
	CHECK(post(&e[0], IBV_WR_SEND, 4, 0, 8, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 5, 0, 8, NULL, 0) == 0);
	expect(&e[0], 4, IBV_WC_RNR_RETRY_EXC_ERR);
	expect(&e[0], 5, IBV_WC_WR_FLUSH_ERR);
	pair_close(e);

	o.rnr_retry = 3;
	o.min_rnr_timer = 23; /* 30.72 ms */
	pair_open(e, &o);
	double start = seconds();
	CHECK(post(&e[0], IBV_WR_SEND, 6, 0, 8, NULL, 0) == 0);
	expect(&e[0], 6, IBV_WC_RNR_RETRY_EXC_ERR);
	double took = seconds() - start;
	CHECK(took > 0.085 && took < 5);
	pair_close(e);
	return 0;
}
