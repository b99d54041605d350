/* Rules come and go, and ports flap, under traffic of several threads that poll or sleep: faults that
 * pass are never the end of a request, nobody hangs, and each message arrives once, in order. */
#include <pthread.h>
#include <stdatomic.h>

#include "fault.h"

#define LINKS 2
#define SLOT 64
#define DEPTH 16

static struct end ends[LINKS][2];
static _Atomic int stop;
static _Atomic uint64_t messages, last[LINKS]; /* how many each side of a link sends; 0: not yet said */

struct side {
	struct end *e, *far;
	_Atomic uint64_t *last;
	unsigned seed;
};

static uint32_t next(unsigned *seed)
{
	*seed = *seed * 1103515245u + 12345u;
	return *seed >> 16 & 0x7fff;
}

/* At least one completion: by polling, or asleep on the channel. */
static int some(struct side *s, struct ibv_wc *wc)
{
	double until = seconds() + 20;
	for (;;) {
		int n = ibv_poll_cq(s->e->cq, 8, wc);
		CHECK(n >= 0 && seconds() < until);
		if (n)
			return n;
		if (next(&s->seed) % 4)
			continue;
		CHECK(ibv_req_notify_cq(s->e->cq, 0) == 0);
		n = ibv_poll_cq(s->e->cq, 8, wc);
		CHECK(n >= 0);
		if (n)
			return n;
		struct pollfd p = { .fd = s->e->channel->fd, .events = POLLIN };
		struct ibv_cq *cq;
		void *context;
		CHECK(poll(&p, 1, 20000) == 1);
		CHECK(ibv_get_cq_event(s->e->channel, &cq, &context) == 0);
		ibv_ack_cq_events(cq, 1);
	}
}

static void *traffic(void *arg)
{
	struct side *s = arg;
	uint64_t sent = 0, done = 0, got = 0;
	struct ibv_wc wc[8];

	for (unsigned i = 0; i < DEPTH; i++)
		CHECK(post_recv(s->e, i, SLOT * (DEPTH + i), SLOT) == 0);
	for (;;) {
		/* neither side is more than DEPTH / 2 ahead of the other, so no one has sent more than that */
		uint64_t end = 0;
		if (atomic_load(&stop))
			atomic_compare_exchange_strong(s->last, &end, sent + 4 * DEPTH);
		end = atomic_load(s->last);
		if (end && done == end && got == end)
			return NULL;
		if (sent - done < DEPTH / 2 && (int64_t)(sent - got) < DEPTH / 2 && !(end && sent == end)) {
			size_t at = SLOT * (sent % DEPTH);
			memcpy(s->e->buf + at, &sent, sizeof(sent));
			enum ibv_wr_opcode op = next(&s->seed) % 3 ? IBV_WR_SEND : IBV_WR_RDMA_WRITE;
			if (op == IBV_WR_RDMA_WRITE) /* on the way, elsewhere, told by nobody */
				CHECK(post(s->e, op, 1000, at, 8, s->far, 65536) == 0);
			CHECK(post(s->e, IBV_WR_SEND, 2000, at, 8, NULL, 0) == 0);
			sent++;
			continue;
		}
		int n = some(s, wc);
		for (int i = 0; i < n; i++) {
			if (wc[i].status != IBV_WC_SUCCESS)
				fprintf(stderr, "wr_id %lu status %d\n", (unsigned long)wc[i].wr_id, wc[i].status);
			CHECK(wc[i].status == IBV_WC_SUCCESS);
			if (wc[i].wr_id >= 1000) {
				done += wc[i].wr_id == 2000;
				continue;
			}
			uint64_t value;
			memcpy(&value, s->e->buf + SLOT * (DEPTH + wc[i].wr_id), sizeof(value));
			CHECK(value == got);
			got++;
			CHECK(post_recv(s->e, wc[i].wr_id, SLOT * (DEPTH + wc[i].wr_id), SLOT) == 0);
			atomic_fetch_add(&messages, 1);
		}
	}
}

int main(void)
{
	static const char *const rules[] = { "delay:us=100,p=0.1,seed=3", "delay:ms=2,times=2", "rnr:us=300,p=0.05",
					     "drop:lost=1,times=1", "delay:us=50,op=send;rnr:ms=1,times=3",
					     "port_down:us=500,times=1" };
	struct options o = usual;
	struct side sides[LINKS][2];
	pthread_t threads[LINKS][2];
	unsigned seed = (unsigned)getpid();
	double until = seconds() + 2;

	o.channel = 1;
	o.timeout = 16; /* 268 ms, eight times */
	for (unsigned l = 0; l < LINKS; l++) {
		pair_open(ends[l], &o);
		for (unsigned i = 0; i < 2; i++)
			sides[l][i] = (struct side){ &ends[l][i], &ends[l][1 - i], &last[l], seed + l * 2 + i };
	}
	for (unsigned l = 0; l < LINKS; l++)
		for (unsigned i = 0; i < 2; i++)
			CHECK(pthread_create(&threads[l][i], NULL, traffic, &sides[l][i]) == 0);
	uint64_t ids[4] = { 0 }, rounds = 0;
	while (seconds() < until) {
		unsigned k = next(&seed) % 4;
		if (ids[k]) {
			CHECK(softnic_inject_remove(ids[k]) == 0);
			ids[k] = 0;
		} else {
			struct end *e = &ends[next(&seed) % LINKS][next(&seed) % 2];
			ids[k] = inject(next(&seed) % 3 ? e : NULL, rules[next(&seed) % 6]);
		}
		if (next(&seed) % 8 == 0) {
			struct end *e = &ends[next(&seed) % LINKS][next(&seed) % 2];
			CHECK(softnic_port(e->ctx, 0) == 0);
			usleep(next(&seed) % 2000);
			CHECK(softnic_port(e->ctx, 1) == 0);
		}
		usleep(next(&seed) % 3000);
		rounds++;
	}
	for (unsigned k = 0; k < 4; k++)
		if (ids[k])
			CHECK(softnic_inject_remove(ids[k]) == 0);
	atomic_store(&stop, 1);
	for (unsigned l = 0; l < LINKS; l++) {
		for (unsigned i = 0; i < 2; i++)
			CHECK(pthread_join(threads[l][i], NULL) == 0);
		pair_close(ends[l]);
	}
	printf("%lu messages, %lu changes, seed %d\n", (unsigned long)messages, (unsigned long)rounds, getpid());
	CHECK(messages > 100 && rounds > 50);
	return 0;
}
