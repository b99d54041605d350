/* Every request of the ibv_wr_* interface does what the one posted by ibv_post_send does. */
#include "extended.h"

static void sge(struct ibv_qp_ex *x, struct end *e, size_t at, size_t len)
{
	ibv_wr_set_sge(x, e->mr->lkey, (uintptr_t)e->buf + at, (uint32_t)len);
}

int main(void)
{
	struct end e[2];
	extended_open(e, &usual, ALL_OPS);
	struct end *a = &e[0], *b = &e[1];
	uint64_t far = (uintptr_t)b->buf;
	struct ibv_qp_ex *x;
	struct ibv_wc wc;

	/* sends: one element, several, inline, with immediate data; three of them in one go */
	pattern(a->buf, 3000, 1);
	for (unsigned i = 0; i < 4; i++)
		CHECK(post_recv(b, i, i * 4096, 4096) == 0);
	x = begin(a, 10, IBV_SEND_SIGNALED);
	ibv_wr_send(x);
	sge(x, a, 0, 3000);
	x->wr_id = 11;
	ibv_wr_send_imm(x, 0x1234);
	struct ibv_sge list[3] = { sge_of(a, 0, 100), sge_of(a, 100, 200), sge_of(a, 300, 1) };
	ibv_wr_set_sge_list(x, 3, list);
	x->wr_id = 12;
	x->wr_flags = 0;
	ibv_wr_send(x);
	ibv_wr_set_inline_data(x, "hello", 5);
	CHECK(ibv_wr_complete(x) == 0);
	expect(b, 0, IBV_WC_SUCCESS);
	wc = wait_wc(b);
	CHECK(wc.wr_id == 1 && wc.wc_flags & IBV_WC_WITH_IMM && wc.imm_data == 0x1234 && wc.byte_len == 301);
	expect(b, 2, IBV_WC_SUCCESS);
	expect(a, 10, IBV_WC_SUCCESS);
	expect(a, 11, IBV_WC_SUCCESS);
	expect_nothing(a); /* the third was unsignaled */
	CHECK(same(b->buf, 3000, 1) && same(b->buf + 4096, 301, 1) && memcmp(b->buf + 8192, "hello", 5) == 0);

	/* a list of inline buffers, written; a write with immediate data */
	struct ibv_data_buf parts[2] = { { "one", 3 }, { "two", 3 } };
	x = begin(a, 20, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write(x, b->mr->rkey, far + 100000);
	ibv_wr_set_inline_data_list(x, 2, parts);
	x->wr_id = 21;
	ibv_wr_rdma_write_imm(x, b->mr->rkey, far + 200000, 7);
	sge(x, a, 0, 3000);
	CHECK(ibv_wr_complete(x) == 0);
	expect(a, 20, IBV_WC_SUCCESS);
	expect(a, 21, IBV_WC_SUCCESS);
	wc = wait_wc(b);
	CHECK(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.imm_data == 7);
	CHECK(memcmp(b->buf + 100000, "onetwo", 6) == 0 && same(b->buf + 200000, 3000, 1));

	/* reads and atomics */
	*(uint64_t *)(b->buf + 512) = 40;
	x = begin(a, 30, IBV_SEND_SIGNALED);
	ibv_wr_rdma_read(x, b->mr->rkey, far + 200000);
	sge(x, a, 300000, 3000);
	x->wr_id = 31;
	ibv_wr_atomic_fetch_add(x, b->mr->rkey, far + 512, 2);
	sge(x, a, 8, 8);
	x->wr_id = 32;
	ibv_wr_atomic_cmp_swp(x, b->mr->rkey, far + 512, 42, 99);
	sge(x, a, 16, 8);
	CHECK(ibv_wr_complete(x) == 0);
	wc = wait_wc(a);
	CHECK(wc.wr_id == 30 && wc.status == 0 && wc.opcode == IBV_WC_RDMA_READ && same(a->buf + 300000, 3000, 1));
	wc = wait_wc(a);
	CHECK(wc.wr_id == 31 && wc.opcode == IBV_WC_FETCH_ADD && *(uint64_t *)(a->buf + 8) == 40);
	wc = wait_wc(a);
	CHECK(wc.wr_id == 32 && wc.opcode == IBV_WC_COMP_SWAP && *(uint64_t *)(a->buf + 16) == 42);
	CHECK(*(uint64_t *)(b->buf + 512) == 99);

	/* atomic writes: of a value, and of eight bytes of a region; aligned, eight bytes and no more */
	uint64_t value = 0x1122334455667788;
	x = begin(a, 33, IBV_SEND_SIGNALED);
	ibv_wr_atomic_write(x, b->mr->rkey, far + 512, &value);
	CHECK(ibv_wr_complete(x) == 0);
	wc = wait_wc(a);
	CHECK(wc.wr_id == 33 && wc.status == 0 && wc.opcode == IBV_WC_ATOMIC_WRITE);
	CHECK(*(uint64_t *)(b->buf + 512) == value);
	memcpy(a->buf + 24, "8 bytes!", 8);
	CHECK(post(a, IBV_WR_ATOMIC_WRITE, 34, 24, 8, b, 520) == 0);
	expect(a, 34, IBV_WC_SUCCESS);
	CHECK(memcmp(b->buf + 520, "8 bytes!", 8) == 0);

	/* nothing at all, and old and new posts on one queue */
	x = begin(a, 40, IBV_SEND_SIGNALED);
	CHECK(ibv_wr_complete(x) == 0);
	CHECK(post(a, IBV_WR_RDMA_WRITE, 41, 0, 8, b, 0) == 0);
	expect(a, 41, IBV_WC_SUCCESS);
	expect_nothing(a);
	CHECK(post(a, IBV_WR_ATOMIC_WRITE, 42, 24, 8, b, 516) == 0);
	expect(a, 42, IBV_WC_REM_INV_REQ_ERR);
	pair_close(e);

	/* a datagram needs its address */
	struct options o = usual;
	o.type = IBV_QPT_UD;
	extended_open(e, &o, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM);
	struct ibv_ah_attr at = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1 } };
	struct ibv_ah *ah = ibv_create_ah(a->pd, &at);
	CHECK(ah);
	CHECK(post_recv(b, 1, 0, 200) == 0);
	x = begin(a, 50, IBV_SEND_SIGNALED);
	ibv_wr_send_imm(x, 5);
	ibv_wr_set_ud_addr(x, ah, b->qp->qp_num, 0x11111111);
	ibv_wr_set_inline_data(x, "datagram", 8);
	CHECK(ibv_wr_complete(x) == 0);
	expect(a, 50, IBV_WC_SUCCESS);
	wc = wait_wc(b);
	CHECK(wc.wr_id == 1 && wc.imm_data == 5 && wc.byte_len == 48 && memcmp(b->buf + 40, "datagram", 8) == 0);
	x = begin(a, 51, IBV_SEND_SIGNALED);
	ibv_wr_send(x);
	CHECK(ibv_wr_complete(x) == EINVAL);
	CHECK(ibv_destroy_ah(ah) == 0);
	pair_close(e);
	return 0;
}
