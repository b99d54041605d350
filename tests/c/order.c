/* What a small send put into the receive comes before a later write, read or atomic on the same QP,
 * polled or not; and deregistration leaves what arrived in place. */
#include "pair.h"

int main(void)
{
	struct end e[2];
	pair_open(e, &usual);
	for (int round = 0; round < 100; round++) {
		memset(e[0].buf, 1, 64);
		memset(e[0].buf + 64, 2, 64);
		CHECK(post_recv(&e[1], 1, 0, 64) == 0);
		CHECK(post(&e[0], IBV_WR_SEND, 2, 0, 64, NULL, 0) == 0);
		CHECK(post(&e[0], IBV_WR_RDMA_READ, 3, 128, 64, &e[1], 0) == 0);
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 4, 64, 32, &e[1], 16) == 0);
		expect(&e[0], 2, IBV_WC_SUCCESS);
		expect(&e[0], 3, IBV_WC_SUCCESS);
		expect(&e[0], 4, IBV_WC_SUCCESS);
		CHECK(e[0].buf[128] == 1 && e[0].buf[191] == 1); /* the read saw the send */
		expect(&e[1], 1, IBV_WC_SUCCESS);
		CHECK(e[1].buf[0] == 1 && e[1].buf[16] == 2 && e[1].buf[47] == 2 && e[1].buf[48] == 1);
		memset(e[1].buf, 0, 64);
	}
	memset(e[0].buf, 5, 64);
	CHECK(post_recv(&e[1], 5, 0, 64) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 6, 0, 64, NULL, 0) == 0);
	expect(&e[0], 6, IBV_WC_SUCCESS);
	CHECK(ibv_dereg_mr(e[1].mr) == 0);
	e[1].mr = NULL;
	CHECK(e[1].buf[0] == 5 && e[1].buf[63] == 5);
	memset(e[1].buf, 9, 64);
	expect(&e[1], 5, IBV_WC_SUCCESS);
	CHECK(e[1].buf[0] == 9); /* the memory is the program's again: no late write */
	pair_close(e);
	return 0;
}
