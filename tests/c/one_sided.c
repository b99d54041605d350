/* Write, write with immediate, read, fetch-and-add, compare-and-swap. */
#include "pair.h"

int main(void)
{
	struct end e[2];
	pair_open(e, &usual);
	pattern(e[0].buf, 300000, 3);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 300000, &e[1], 4096) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	CHECK(same(e[1].buf + 4096, 300000, 3) && e[1].buf[4095] == 0);
	expect_nothing(&e[1]);

	CHECK(post_recv(&e[1], 50, 0, 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE_WITH_IMM, 2, 0, 16, &e[1], 0) == 0);
	expect(&e[0], 2, IBV_WC_SUCCESS);
	struct ibv_wc wc = wait_wc(&e[1]);
	CHECK(wc.wr_id == 50 && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.byte_len == 16 && wc.imm_data == 0x44332211);
	CHECK(same(e[1].buf, 16, 3));

	pattern(e[1].buf, 200000, 9);
	CHECK(post(&e[0], IBV_WR_RDMA_READ, 3, 8, 200000, &e[1], 0) == 0);
	wc = wait_wc(&e[0]);
	CHECK(wc.wr_id == 3 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RDMA_READ && wc.byte_len == 200000);
	CHECK(same(e[0].buf + 8, 200000, 9));

	uint64_t *word = (uint64_t *)(void *)(e[1].buf + 64), *result = (uint64_t *)(void *)e[0].buf;
	*word = 40;
	CHECK(post_atomic(&e[0], IBV_WR_ATOMIC_FETCH_AND_ADD, 4, 0, &e[1], 64, 2, 0) == 0);
	expect(&e[0], 4, IBV_WC_SUCCESS);
	CHECK(*word == 42 && *result == 40);
	CHECK(post_atomic(&e[0], IBV_WR_ATOMIC_CMP_AND_SWP, 5, 0, &e[1], 64, 41, 7) == 0);
	expect(&e[0], 5, IBV_WC_SUCCESS);
	CHECK(*word == 42 && *result == 42);
	CHECK(post_atomic(&e[0], IBV_WR_ATOMIC_CMP_AND_SWP, 6, 0, &e[1], 64, 42, 7) == 0);
	expect(&e[0], 6, IBV_WC_SUCCESS);
	CHECK(*word == 7 && *result == 42);
	pair_close(e);
	return 0;
}
