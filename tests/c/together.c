/* Big transfers, copied by both ends: whole, in order, with odd pieces, when the sender executes and
 * when the receiver does; both ends poll all the time, so that each copies some of it. */
#include <pthread.h>
#include <stdatomic.h>

#include "pair.h"

#define LEN (6u << 20)
#define ROUNDS 24

static struct end e[2];
static _Atomic int round_of[2], stop;

static size_t size_of(int round)
{
	return (1u << 20) + (size_t)round * 200003u % (LEN - (1u << 20) - 4096);
}

static void *receiver(void *arg)
{
	struct ibv_wc wc;
	(void)arg;
	for (int round = 0; round < ROUNDS;) {
		size_t len = size_of(round);
		if (round % 2)
			while (atomic_load(&round_of[0]) <= round && !atomic_load(&stop)) /* the send waits: we execute it */
				sched_yield();
		struct ibv_sge s[3] = { sge_of(&e[1], 13, 500001), sge_of(&e[1], 500014, 7),
					sge_of(&e[1], 500021, len - 500008) };
		struct ibv_recv_wr wr = { .wr_id = (uint64_t)round, .sg_list = s, .num_sge = 3 }, *bad;
		CHECK(ibv_post_recv(e[1].qp, &wr, &bad) == 0);
		while (ibv_poll_cq(e[1].cq, 1, &wc) == 0)
			;
		CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == len && wc.wr_id == (uint64_t)round);
		CHECK(same(e[1].buf + 13, len, (unsigned)round));
		memset(e[1].buf, 0, LEN);
		atomic_store(&round_of[1], ++round);
	}
	/* reads and writes of the other end go through our polls too */
	while (!atomic_load(&stop))
		CHECK(ibv_poll_cq(e[1].cq, 1, &wc) == 0);
	return NULL;
}

static void wait_for(uint64_t id)
{
	struct ibv_wc wc;
	double start = seconds();
	int n;
	while ((n = ibv_poll_cq(e[0].cq, 1, &wc)) == 0)
		CHECK(seconds() - start < 60);
	CHECK(n == 1 && wc.status == IBV_WC_SUCCESS && wc.wr_id == id);
}

int main(void)
{
	struct options o = usual;
	pthread_t thread;
	o.len = LEN;
	pair_open(e, &o);
	CHECK(pthread_create(&thread, NULL, receiver, NULL) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		size_t len = size_of(round);
		while (atomic_load(&round_of[1]) < round)
			sched_yield();
		pattern(e[0].buf + 5, len, (unsigned)round);
		struct ibv_sge s[2] = { sge_of(&e[0], 5, 3), sge_of(&e[0], 8, len - 3) };
		struct ibv_send_wr wr = { .wr_id = (uint64_t)round, .sg_list = s, .num_sge = 2, .opcode = IBV_WR_SEND,
					  .send_flags = IBV_SEND_SIGNALED }, *bad;
		CHECK(ibv_post_send(e[0].qp, &wr, &bad) == 0);
		atomic_store(&round_of[0], round + 1);
		wait_for((uint64_t)round);
	}
	while (atomic_load(&round_of[1]) < ROUNDS)
		sched_yield();
	for (int round = 0; round < ROUNDS; round++) {
		size_t len = size_of(round);
		pattern(e[0].buf, len, (unsigned)round);
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, len, &e[1], 100) == 0);
		wait_for(1);
		CHECK(same(e[1].buf + 100, len, (unsigned)round));
		memset(e[0].buf, 0, len);
		CHECK(post(&e[0], IBV_WR_RDMA_READ, 2, 0, len, &e[1], 100) == 0);
		wait_for(2);
		CHECK(same(e[0].buf, len, (unsigned)round));
	}
	atomic_store(&stop, 1);
	CHECK(pthread_join(thread, NULL) == 0);
	pair_close(e);
	return 0;
}
