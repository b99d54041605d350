/* Device memory: what copies into it and out of it are allowed, and that peers write it through a region. */
#include "pair.h"

int main(void)
{
	struct end e[2], *a = &e[0], *b = &e[1];
	struct ibv_device_attr_ex d;
	char text[16] = { 0 };
	pair_open(e, &usual);
	CHECK(ibv_query_device_ex(b->ctx, NULL, &d) == 0 && d.max_dm_size >= 4096);

	struct ibv_alloc_dm_attr want = { .length = 4096, .log_align_req = 6 }, bad = { .length = d.max_dm_size + 1 };
	CHECK(!ibv_alloc_dm(b->ctx, &bad) && errno == ENOMEM);
	bad = (struct ibv_alloc_dm_attr){ .length = 64, .comp_mask = 3 };
	CHECK(!ibv_alloc_dm(b->ctx, &bad) && errno == EINVAL);
	struct ibv_dm *dm = ibv_alloc_dm(b->ctx, &want);
	CHECK(dm);
	bad = (struct ibv_alloc_dm_attr){ .length = d.max_dm_size };
	CHECK(!ibv_alloc_dm(b->ctx, &bad) && errno == ENOMEM); /* some is used already */

	CHECK(ibv_memcpy_to_dm(dm, 4, "text", 4) == 0 && ibv_memcpy_from_dm(text, dm, 4, 4) == 0);
	CHECK(memcmp(text, "text", 4) == 0);
	CHECK(ibv_memcpy_to_dm(dm, 3, "text", 4) && ibv_memcpy_to_dm(dm, 4, "text", 3));
	CHECK(ibv_memcpy_to_dm(dm, 4096, "text", 4) && ibv_memcpy_from_dm(text, dm, 4092, 8));

	struct end far = *b;
	int access = ALL_ACCESS | IBV_ACCESS_ZERO_BASED;
	CHECK(!ibv_reg_dm_mr(b->pd, dm, 0, 4096, ALL_ACCESS) && errno == EINVAL);
	CHECK(!ibv_reg_dm_mr(b->pd, dm, 64, 4096, (unsigned)access) && errno == EINVAL);
	CHECK(far.mr = ibv_reg_dm_mr(b->pd, dm, 64, 1024, (unsigned)access));
	far.buf = NULL; /* addresses count from the region's start */
	pattern(a->buf, 1024, 9);
	CHECK(post(a, IBV_WR_RDMA_WRITE, 1, 0, 1024, &far, 0) == 0);
	expect(a, 1, IBV_WC_SUCCESS);
	static char back[1024];
	CHECK(ibv_memcpy_from_dm(back, dm, 64, 1024) == 0 && same(back, 1024, 9));
	CHECK(ibv_free_dm(dm) == EBUSY);
	CHECK(post(a, IBV_WR_RDMA_WRITE, 2, 0, 8, &far, 1020) == 0);
	expect(a, 2, IBV_WC_REM_ACCESS_ERR);
	CHECK(ibv_dereg_mr(far.mr) == 0 && ibv_free_dm(dm) == 0);
	CHECK(dm = ibv_alloc_dm(b->ctx, &bad)); /* all of it again */
	CHECK(ibv_free_dm(dm) == 0);
	pair_close(e);
	return 0;
}
