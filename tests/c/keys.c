/* Registration: what is refused, keys that are not handed out again, memory that overlaps, many rounds. */
#include <sys/mman.h>

#include "pair.h"

int main(void)
{
	struct end e[2];
	pair_open(e, &usual);
	CHECK(!ibv_reg_mr(e[0].pd, e[0].buf, 0, 0) && errno == EINVAL);
	CHECK(!ibv_reg_mr(e[0].pd, e[0].buf, 64, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	CHECK(!ibv_reg_mr(e[0].pd, e[0].buf, 64, 1 << 19) && errno == EINVAL);
	char *ro = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(!ibv_reg_mr(e[0].pd, ro, 8192, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
	struct ibv_mr *mr = ibv_reg_mr(e[0].pd, ro, 8192, 0);
	CHECK(mr && ibv_dereg_mr(mr) == 0);
	CHECK(munmap(ro, 8192) == 0);
	CHECK(!ibv_reg_mr(e[0].pd, ro, 8192, 0) && errno == EFAULT);

	struct ibv_mr *a = ibv_reg_mr(e[1].pd, e[1].buf, 4096, ALL_ACCESS);
	struct ibv_mr *b = ibv_reg_mr(e[1].pd, e[1].buf + 100, 50, ALL_ACCESS);
	CHECK(a && b && a->rkey != b->rkey && ibv_dereg_mr(a) == 0);
	struct end far = e[1];
	far.mr = b;
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 50, &far, 100) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	CHECK(ibv_dereg_mr(b) == 0);

	static uint32_t keys[20000];
	for (unsigned i = 0; i < 20000; i++) {
		CHECK(mr = ibv_reg_mr(e[0].pd, e[0].buf + i, 64, ALL_ACCESS));
		keys[i] = mr->rkey;
		CHECK(ibv_dereg_mr(mr) == 0);
		if (i % 1000 == 999)
			for (unsigned j = 0; j < i; j++)
				CHECK(keys[j] != keys[i]);
	}

	/* as many as the device says, each with a key of its own */
	struct ibv_device_attr attr;
	CHECK(ibv_query_device(e[0].ctx, &attr) == 0);
	static struct ibv_mr *all[1 << 16];
	static unsigned char seen[1 << 16];
	int n = 0;
	while (n < 1 << 16 && (all[n] = ibv_reg_mr(e[0].pd, e[0].buf, 64, 0)))
		CHECK(!seen[all[n++]->rkey >> 16]++);
	CHECK(errno == ENOMEM && n < attr.max_mr && n > attr.max_mr - 8);
	while (n)
		CHECK(ibv_dereg_mr(all[--n]) == 0);
	pair_close(e);
	return 0;
}
