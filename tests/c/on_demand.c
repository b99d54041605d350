/* Regions that are paged on demand: memory that is not there yet, all of the address space, and prefetching. */
#include <sys/mman.h>

#include "pair.h"

int main(void)
{
	struct end e[2], *a = &e[0], *b = &e[1];
	pair_open(e, &usual);
	int access = ALL_ACCESS | IBV_ACCESS_ON_DEMAND;
	char *m = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(m != MAP_FAILED && !ibv_reg_mr(b->pd, m, 1 << 20, ALL_ACCESS) && errno == EFAULT);
	struct ibv_mr *mr = ibv_reg_mr(b->pd, m, 1 << 20, access), *all = ibv_reg_mr(b->pd, NULL, SIZE_MAX, access);
	CHECK(mr && all);
	CHECK(!ibv_reg_mr(b->pd, NULL, SIZE_MAX, ALL_ACCESS));
	struct ibv_sge s = { (uintptr_t)m, 8192, mr->lkey };
	CHECK(ibv_advise_mr(b->pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &s, 1) == EFAULT);
	CHECK(mprotect(m, 1 << 20, PROT_READ | PROT_WRITE) == 0);
	CHECK(ibv_advise_mr(b->pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &s, 1) == 0);
	CHECK(ibv_advise_mr(b->pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &s, 1) == 0);
	CHECK(ibv_advise_mr(b->pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &s, 0) == EINVAL);
	s.lkey ^= 1;
	CHECK(ibv_advise_mr(b->pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &s, 1) == ENOENT);

	struct end far = *b;
	far.buf = m;
	far.mr = mr;
	pattern(a->buf, 5000, 2);
	CHECK(post(a, IBV_WR_RDMA_WRITE, 1, 0, 5000, &far, 3000) == 0);
	expect(a, 1, IBV_WC_SUCCESS);
	far.mr = all;
	CHECK(post(a, IBV_WR_RDMA_READ, 2, 8192, 5000, &far, 3000) == 0);
	expect(a, 2, IBV_WC_SUCCESS);
	CHECK(same(m + 3000, 5000, 2) && same(a->buf + 8192, 5000, 2));
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_dereg_mr(all) == 0 && munmap(m, 1 << 20) == 0);
	pair_close(e);
	return 0;
}
