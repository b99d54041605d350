/* Memory of softnic_alloc: peers in other processes copy it without a system call, and see it
 * exactly; given back and taken again it is never confused with what was there before. */
#include "process.h"

int softnic_alloc(struct ibv_context *, size_t, void **);
int softnic_free(struct ibv_context *, void *, size_t);

#define LEN (1 << 20)

static void peer(struct end *e, struct hello you, int in, int out)
{
	struct ibv_context *other = open_device();
	char c;
	(void)you;
	for (int round = 0; round < 5; round++) {
		void *at;
		/* any context of the process may have made it */
		struct ibv_context *ctx = round % 2 ? other : e->ctx;
		CHECK(softnic_alloc(ctx, LEN, &at) == 0);
		struct ibv_mr *mr = ibv_reg_mr(e->pd, at, LEN, ALL_ACCESS);
		CHECK(mr);
		struct hello h = { 0, mr->rkey, (uintptr_t)at };
		put(out, &h, sizeof(h));
		take(in, &c, 1);
		CHECK(same((char *)at + 64, LEN - 128, (unsigned)round));
		CHECK(((char *)at)[63] == 0 && ((char *)at)[LEN - 64] == 0);
		CHECK(ibv_dereg_mr(mr) == 0 && softnic_free(ctx, at, LEN) == 0);
	}
	CHECK(ibv_close_device(other) == 0);
}

int main(void)
{
	struct end e;
	int in, out;
	pid_t pid = start_peer(&usual, peer, &in, &out);
	end_open(&e, &usual);
	meet(&e, &usual, in, out);
	for (int round = 0; round < 5; round++) {
		struct hello h;
		take(in, &h, sizeof(h));
		struct end far = { .buf = (char *)(uintptr_t)h.addr, .mr = &(struct ibv_mr){ .rkey = h.rkey } };
		pattern(e.buf, LEN - 128, (unsigned)round);
		CHECK(post(&e, IBV_WR_RDMA_WRITE, 1, 0, LEN - 128, &far, 64) == 0);
		expect(&e, 1, IBV_WC_SUCCESS);
		put(out, "x", 1);
	}
	join_peer(pid);
	end_close(&e);
	return 0;
}
