/* A message that is longer than the receive; local keys that do not hold; zero-length with any key. */
#include "pair.h"

int main(void)
{
	struct end e[2];

	pair_open(e, &usual);
	memset(e[1].buf, 7, 100);
	CHECK(post_recv(&e[1], 1, 0, 10) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 2, 0, 11, NULL, 0) == 0);
	expect(&e[0], 2, IBV_WC_REM_INV_REQ_ERR);
	expect(&e[1], 1, IBV_WC_LOC_LEN_ERR);
	CHECK(e[1].buf[0] == 7 && e[1].buf[10] == 7);
	pair_close(e);

	pair_open(e, &usual);
	e[0].mr->lkey += 1;
	CHECK(post(&e[0], IBV_WR_SEND, 3, 0, 11, NULL, 0) == 0);
	expect(&e[0], 3, IBV_WC_LOC_PROT_ERR);
	CHECK(post(&e[0], IBV_WR_SEND, 4, 0, 11, NULL, 0) == 0);
	expect(&e[0], 4, IBV_WC_WR_FLUSH_ERR);
	expect_nothing(&e[1]);
	e[0].mr->lkey -= 1;
	pair_close(e);

	pair_open(e, &usual);
	e[1].mr->lkey += 1; /* the receiver's own key is bad: both ends are told */
	CHECK(post_recv(&e[1], 5, 0, 10) == 0);
	e[1].mr->lkey -= 1;
	CHECK(post(&e[0], IBV_WR_SEND, 6, 0, 4, NULL, 0) == 0);
	expect(&e[0], 6, IBV_WC_REM_OP_ERR);
	expect(&e[1], 5, IBV_WC_LOC_PROT_ERR);
	pair_close(e);

	pair_open(e, &usual);
	uint32_t key = e[1].mr->rkey;
	e[1].mr->rkey = 12345;
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 7, 0, 0, &e[1], 0) == 0);
	expect(&e[0], 7, IBV_WC_SUCCESS);
	e[1].mr->rkey = key;
	pair_close(e);
	return 0;
}
