/* The same across a process boundary: sends small and large, writes, reads, atomics. */
#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	char c;
	(void)you;
	CHECK(post_recv(e, 1, 0, 4096) == 0);
	CHECK(post_recv(e, 2, 4096, 600000) == 0);
	put(out, "r", 1);
	expect(e, 1, IBV_WC_SUCCESS);
	CHECK(same(e->buf, 100, 1));
	expect(e, 2, IBV_WC_SUCCESS);
	CHECK(same(e->buf + 4096, 500000, 1));
	take(in, &c, 1);
	CHECK(same(e->buf + 700000, 100, 1) && *(uint64_t *)(void *)(e->buf + 800000) == 1000);
	put(out, "d", 1);
	take(in, &c, 1);
}

int main(void)
{
	struct end e;
	int in, out;
	char c;
	pid_t pid = start_peer(&usual, peer, &in, &out);
	end_open(&e, &usual);
	struct hello you = meet(&e, &usual, in, out);
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	take(in, &c, 1);
	pattern(e.buf, 500000, 1);
	CHECK(post(&e, IBV_WR_SEND, 1, 0, 100, NULL, 0) == 0);
	CHECK(post(&e, IBV_WR_SEND, 2, 0, 500000, NULL, 0) == 0);
	CHECK(post(&e, IBV_WR_RDMA_WRITE, 3, 0, 100, &far, 700000) == 0);
	CHECK(post(&e, IBV_WR_RDMA_READ, 4, 600000, 100, &far, 700000) == 0);
	for (int i = 1; i <= 4; i++)
		expect(&e, (uint64_t)i, IBV_WC_SUCCESS);
	CHECK(same(e.buf + 600000, 100, 1));
	for (int i = 0; i < 1000; i++) {
		CHECK(post_atomic(&e, IBV_WR_ATOMIC_FETCH_AND_ADD, 5, 0, &far, 800000, 1, 0) == 0);
		expect(&e, 5, IBV_WC_SUCCESS);
		CHECK(*(uint64_t *)(void *)e.buf == (uint64_t)i);
	}
	put(out, "x", 1);
	take(in, &c, 1);
	put(out, "x", 1);
	join_peer(pid);
	end_close(&e);
	return 0;
}
