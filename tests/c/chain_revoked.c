/* While one thread posts chains of writes, the other end takes its memory back: dereg, RESET, the error
 * state. When that returned nobody writes there any more, and the poster's chain ends in order: successes,
 * one error, flushes. Both ends as if of two processes. */
#include <pthread.h>
#include <stdbool.h>

#include "pair.h"

enum { CHAIN = 600, PIECE = 512, LEN = CHAIN * PIECE };

struct poster {
	struct end *e, *far;
	_Atomic int going;
	unsigned chains, errors;
};

static void *post_chains(void *arg)
{
	struct poster *p = arg;
	struct ibv_send_wr *wr = calloc(CHAIN, sizeof(*wr)), *bad;
	struct ibv_sge *sge = calloc(CHAIN, sizeof(*sge));
	struct ibv_wc wc;
	enum ibv_wc_status want = IBV_WC_SUCCESS;
	uint64_t next = 0, posted = 0;
	for (int i = 0; i < CHAIN; i++) {
		sge[i] = sge_of(p->e, (size_t)i * PIECE, PIECE);
		wr[i] = (struct ibv_send_wr){ .sg_list = &sge[i], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
					      .send_flags = IBV_SEND_SIGNALED, .next = i + 1 < CHAIN ? &wr[i + 1] : NULL };
		wr[i].wr.rdma.remote_addr = (uintptr_t)p->far->buf + (size_t)i * PIECE;
		wr[i].wr.rdma.rkey = p->far->mr->rkey;
	}
	for (; want == IBV_WC_SUCCESS || next < posted;) {
		if (next == posted && want == IBV_WC_SUCCESS) {
			for (int i = 0; i < CHAIN; i++)
				wr[i].wr_id = posted + (uint64_t)i;
			CHECK(ibv_post_send(p->e->qp, wr, &bad) == 0);
			posted += CHAIN;
			p->chains++;
			__atomic_store_n(&p->going, 1, __ATOMIC_RELEASE);
		}
		wc = wait_wc(p->e);
		CHECK(wc.wr_id == next++);
		if (want == IBV_WC_SUCCESS && wc.status != IBV_WC_SUCCESS) {
			CHECK(wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_RETRY_EXC_ERR);
			want = IBV_WC_WR_FLUSH_ERR;
			p->errors++;
		} else {
			CHECK(wc.status == want);
		}
	}
	free(wr);
	free(sge);
	return NULL;
}

static void one(unsigned round)
{
	struct ibv_qp_attr a = { .qp_state = round % 3 == 1 ? IBV_QPS_RESET : IBV_QPS_ERR };
	struct options o = usual;
	struct end e[2];
	pthread_t thread;
	o.depth = CHAIN;
	o.cqe = 2 * CHAIN;
	o.len = LEN;
	pair_open(e, &o);
	struct poster p = { .e = &e[0], .far = &e[1] };
	CHECK(pthread_create(&thread, NULL, post_chains, &p) == 0);
	while (!__atomic_load_n(&p.going, __ATOMIC_ACQUIRE))
		;
	for (double until = seconds() + 1e-5 * (round % 50); seconds() < until;)
		;
	if (round % 3 == 0) {
		CHECK(ibv_dereg_mr(e[1].mr) == 0);
		e[1].mr = NULL;
	} else {
		CHECK(ibv_modify_qp(e[1].qp, &a, IBV_QP_STATE) == 0);
	}
	memset(e[1].buf, 0x33, LEN);
	CHECK(pthread_join(thread, NULL) == 0);
	for (int i = 0; i < LEN; i++)
		CHECK(e[1].buf[i] == 0x33);
	CHECK(p.errors == 1);
	pair_close(e);
}

int main(void)
{
	CHECK(setenv("ROCECOMM_SOFT_FAR", "1", 1) == 0);
	for (unsigned round = 0; round < 60; round++)
		one(round);
	return 0;
}
