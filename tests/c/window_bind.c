/* What memory windows let in and keep out, of both types, and which binds are refused. */
#include "windows.h"

static void refused(struct end e[2], uint32_t rkey, uint64_t addr, enum ibv_wr_opcode opcode)
{
	CHECK(access_as(&e[0], opcode, rkey, addr, 8) == IBV_WC_REM_ACCESS_ERR);
	reconnect(e);
}

static void bad_bind(struct end e[2], struct ibv_mw *mw, uint32_t rkey, struct ibv_mr *mr, uint64_t addr, uint64_t len)
{
	CHECK(bind_2(&e[1], mw, rkey, mr, addr, len, W) == IBV_WC_MW_BIND_ERR);
	reconnect(e);
}

int main(void)
{
	struct end e[2], *a = &e[0], *b = &e[1];
	windows_open(e, 0);
	uint64_t base = (uintptr_t)b->buf;
	pattern(a->buf, 4096, 1);

	/* type 1: rights and bounds are the window's, not the region's */
	struct ibv_mw *one = ibv_alloc_mw(b->pd, IBV_MW_TYPE_1);
	CHECK(one && one->type == IBV_MW_TYPE_1 && one->pd == b->pd);
	refused(e, one->rkey, base, IBV_WR_RDMA_WRITE); /* not bound yet */
	uint32_t before = one->rkey;
	bind_1(b, one, 4096, 100, W);
	CHECK(one->rkey != before);
	CHECK(access_as(a, IBV_WR_RDMA_WRITE, one->rkey, base + 4096, 100) == IBV_WC_SUCCESS);
	CHECK(same(b->buf + 4096, 100, 1) && b->buf[4196] == 0);
	refused(e, one->rkey, base + 4095, IBV_WR_RDMA_WRITE);
	refused(e, one->rkey, base + 4096 + 93, IBV_WR_RDMA_WRITE);
	refused(e, one->rkey, base + 4096, IBV_WR_RDMA_READ);
	refused(e, b->mr->rkey, base, IBV_WR_RDMA_WRITE); /* the region itself gives no rights */
	before = one->rkey;
	bind_1(b, one, 0, 8, R);
	refused(e, before, base + 4096, IBV_WR_RDMA_WRITE);
	CHECK(access_as(a, IBV_WR_RDMA_READ, one->rkey, base, 8) == IBV_WC_SUCCESS);
	CHECK(ibv_dereg_mr(b->mr) == EBUSY); /* a window looks at it */
	CHECK(access_as(a, IBV_WR_RDMA_READ, one->rkey, base, 8) == IBV_WC_SUCCESS); /* and still does */
	bind_1(b, one, 0, 0, 0);
	refused(e, one->rkey, base, IBV_WR_RDMA_READ);
	struct ibv_mw_bind zero = { .bind_info = { b->mr, base, 8, W | IBV_ACCESS_ZERO_BASED } };
	CHECK(ibv_bind_mw(b->qp, one, &zero) == EINVAL);

	pattern(a->buf, 4096, 1); /* the reads went into it */

	/* type 2: the program chooses the lowest byte of the key */
	struct ibv_mw *two = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
	uint32_t key = ibv_inc_rkey(two->rkey);
	CHECK(bind_2(b, two, key, b->mr, base + 8192, 64, W) == IBV_WC_SUCCESS);
	CHECK(access_as(a, IBV_WR_RDMA_WRITE, key, base + 8192, 64) == IBV_WC_SUCCESS);
	CHECK(same(b->buf + 8192, 64, 1));
	bad_bind(e, two, ibv_inc_rkey(key), b->mr, base, 8); /* is bound */
	struct end other[2]; /* another queue pair of the same domain does not get in */
	struct ibv_qp *first = b->qp;
	other[0] = e[0];
	other[1] = e[1];
	for (int i = 0; i < 2; i++)
		CHECK(other[i].qp = new_qp_ex(&other[i], &usual, ALL_OPS));
	reconnect(other);
	CHECK(access_as(&other[0], IBV_WR_RDMA_WRITE, key, base + 8192, 8) == IBV_WC_REM_ACCESS_ERR);
	CHECK(ibv_destroy_qp(other[0].qp) == 0 && ibv_destroy_qp(other[1].qp) == 0);
	CHECK(b->qp == first);

	/* zero-based: addresses count from the window's start */
	struct ibv_mw *based = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
	CHECK(bind_2(b, based, ibv_inc_rkey(based->rkey), b->mr, base + 12288, 64, W | IBV_ACCESS_ZERO_BASED) == 0);
	CHECK(access_as(a, IBV_WR_RDMA_WRITE, ibv_inc_rkey(based->rkey), 16, 48) == IBV_WC_SUCCESS);
	CHECK(same(b->buf + 12288 + 16, 48, 1) && b->buf[12288] == 0);
	refused(e, ibv_inc_rkey(based->rkey), 64, IBV_WR_RDMA_WRITE);

	/* binds that are refused */
	struct ibv_mw *bad = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
	uint32_t k = ibv_inc_rkey(bad->rkey);
	bad_bind(e, bad, k, b->mr, base + b->len - 8, 16);
	bad_bind(e, bad, k, b->mr, base - 8, 8);
	bad_bind(e, bad, k, b->mr, base, 0);
	bad_bind(e, bad, k ^ 0x100, b->mr, base, 8);
	struct ibv_mr *closed = ibv_reg_mr(b->pd, b->buf, 4096, IBV_ACCESS_LOCAL_WRITE);
	bad_bind(e, bad, k, closed, base, 8); /* without MW_BIND */
	struct ibv_mr *constant = ibv_reg_mr(b->pd, b->buf, 4096, IBV_ACCESS_MW_BIND);
	bad_bind(e, bad, k, constant, base, 8); /* nobody may write there */
	struct ibv_pd *pd = ibv_alloc_pd(b->ctx);
	struct ibv_mr *foreign = ibv_reg_mr(pd, b->buf, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	bad_bind(e, bad, k, foreign, base, 8);
	struct ibv_mw *elsewhere = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	bad_bind(e, elsewhere, ibv_inc_rkey(elsewhere->rkey), foreign, base, 8);
	CHECK(ibv_dealloc_pd(pd) == EBUSY);
	CHECK(ibv_dealloc_mw(elsewhere) == 0 && ibv_dereg_mr(foreign) == 0 && ibv_dealloc_pd(pd) == 0);
	CHECK(ibv_dereg_mr(constant) == 0 && ibv_dereg_mr(closed) == 0);
	CHECK(!ibv_alloc_mw(b->pd, 3) && errno == EINVAL);

	/* freed: the key is void, and the region may go */
	CHECK(ibv_dealloc_mw(two) == 0);
	refused(e, key, base + 8192, IBV_WR_RDMA_WRITE);
	CHECK(ibv_dealloc_mw(one) == 0 && ibv_dealloc_mw(bad) == 0);
	CHECK(ibv_dereg_mr(b->mr) == EBUSY);
	CHECK(ibv_dealloc_mw(based) == 0);
	pair_close(e);
	return 0;
}
