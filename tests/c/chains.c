/* Random chains of reads, writes, sends and atomics, in one call each, against a model that does one
 * after the other: memory of both ends and every completion agree. Pieces overlap, lie in several
 * elements of two regions, and are carried out by their poster or, behind a send that waited for its
 * receive, by the peer. Once with both ends of one process, once as if they were of two, once with
 * memory that peers map. ROCECOMM_TEST_SEED replays. */
#include <stdbool.h>

#include "pair.h"

int softnic_alloc(struct ibv_context *, size_t, void **);
int softnic_free(struct ibv_context *, void *, size_t);

enum { SIZE = 1 << 18, DEPTH = 4096, SGES = 4, INLINE = 64 };

struct request {
	struct ibv_send_wr wr;
	struct ibv_sge sge[SGES];
};

struct world {
	struct end e[2];
	struct ibv_mr *second[2]; /* the same memory once more, under another key */
	char *model[2];
	struct request *q;
};

static uint64_t state;

static uint32_t roll(uint32_t n)
{
	state = state * 6364136223846793005ULL + 1442695040888963407ULL;
	return (uint32_t)(state >> 33) % n;
}

/* One request on the model: bytes from or to end 0, in the order of its elements. */
static void imagine(struct world *w, const struct request *r, size_t at)
{
	uint64_t old, *word = (uint64_t *)(void *)(w->model[1] + at);
	if (r->wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		old = *word;
		*word += r->wr.wr.atomic.compare_add;
		memcpy(w->model[0] + (r->sge[0].addr - (uintptr_t)w->e[0].buf), &old, 8);
		return;
	}
	for (int i = 0; i < r->wr.num_sge; i++) {
		/* an inline payload is what lay there when it was posted */
		char *from = r->wr.send_flags & IBV_SEND_INLINE ? w->e[0].buf : w->model[0];
		char *near = from + (r->sge[i].addr - (uintptr_t)w->e[0].buf), *far = w->model[1] + at;
		memcpy(r->wr.opcode == IBV_WR_RDMA_READ ? near : far, r->wr.opcode == IBV_WR_RDMA_READ ? far : near,
		       r->sge[i].length);
		at += r->sge[i].length;
	}
}

static void gather(struct world *w, struct request *r, uint32_t most)
{
	int n = roll(4) ? 1 : 1 + (int)roll(SGES);
	for (int i = 0; i < n; i++) {
		uint32_t len = roll(40) ? roll(most) + (i == 0) : 0;
		r->sge[i] = (struct ibv_sge){ (uintptr_t)w->e[0].buf + roll(SIZE - most), len,
					      roll(8) ? w->e[0].mr->lkey : w->second[0]->lkey };
	}
	r->wr.num_sge = n;
}

static uint32_t length_of(const struct request *r)
{
	uint32_t n = 0;
	for (int i = 0; i < r->wr.num_sge; i++)
		n += r->sge[i].length;
	return n;
}

/* A chain of `n`; returns how many completions it makes here. */
static uint32_t post_chain(struct world *w, uint32_t n, uint64_t id, bool waits, uint32_t *receives)
{
	struct ibv_send_wr *bad;
	uint32_t signaled = 0, most = roll(3) ? 600 : 6000;
	enum ibv_wr_opcode opcode = IBV_WR_RDMA_READ;
	*receives = 0;
	for (uint32_t i = 0; i < n; i++) {
		struct request *r = &w->q[i];
		size_t at = 0;
		memset(&r->wr, 0, sizeof(r->wr));
		if (!roll(12) || !i)
			opcode = roll(2) ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
		r->wr.opcode = opcode;
		if (!roll(100))
			r->wr.opcode = roll(2) ? IBV_WR_SEND : IBV_WR_ATOMIC_FETCH_AND_ADD;
		if (i == 0 && waits)
			r->wr.opcode = IBV_WR_SEND;
		r->wr.wr_id = id + i;
		r->wr.sg_list = r->sge;
		gather(w, r, most);
		if (r->wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			at = 8 * (size_t)roll(SIZE / 8);
			r->wr.num_sge = 1;
			r->sge[0].length = 8;
			r->wr.wr.atomic.remote_addr = (uintptr_t)w->e[1].buf + at;
			r->wr.wr.atomic.compare_add = roll(1000);
			r->wr.wr.atomic.rkey = w->e[1].mr->rkey;
		} else if (r->wr.opcode == IBV_WR_SEND) {
			at = SIZE + (size_t)(*receives)++ * SGES * 6000; /* where its receive lies */
		} else {
			at = roll(6) ? roll(SIZE - SGES * 6000) : SIZE + roll(6) * SGES * 6000u - roll(600); /* what was sent */
			r->wr.wr.rdma.remote_addr = (uintptr_t)w->e[1].buf + at;
			r->wr.wr.rdma.rkey = roll(8) ? w->e[1].mr->rkey : w->second[1]->rkey;
			if (r->wr.opcode == IBV_WR_RDMA_WRITE && roll(4) == 0 && length_of(r) <= INLINE)
				r->wr.send_flags |= IBV_SEND_INLINE;
		}
		if (!roll(5))
			r->wr.send_flags |= IBV_SEND_FENCE;
		if (!roll(6) || i + 1 == n) {
			r->wr.send_flags |= IBV_SEND_SIGNALED;
			signaled++;
		}
		r->wr.next = i + 1 < n ? &w->q[i + 1].wr : NULL;
		imagine(w, r, at);
	}
	if (!waits)
		for (uint32_t i = 0; i < *receives; i++)
			CHECK(post_recv(&w->e[1], i, SIZE + (size_t)i * SGES * 6000, SGES * 6000) == 0);
	CHECK(ibv_post_send(w->e[0].qp, &w->q[0].wr, &bad) == 0);
	return signaled;
}

static void one_chain(struct world *w, uint32_t n, uint64_t id, bool waits)
{
	uint32_t receives, signaled = post_chain(w, n, id, waits, &receives), next = 0;
	if (waits)
		for (uint32_t i = 0; i < receives; i++)
			CHECK(post_recv(&w->e[1], i, SIZE + (size_t)i * SGES * 6000, SGES * 6000) == 0);
	for (uint32_t i = 0; i < receives; i++)
		expect(&w->e[1], i, IBV_WC_SUCCESS);
	for (uint32_t i = 0; i < signaled; i++, next++) {
		while (!(w->q[next].wr.send_flags & IBV_SEND_SIGNALED))
			next++;
		struct ibv_wc wc = wait_wc(&w->e[0]);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == id + next);
		if (w->q[next].wr.opcode == IBV_WR_RDMA_READ)
			CHECK(wc.opcode == IBV_WC_RDMA_READ && wc.byte_len == length_of(&w->q[next]));
	}
	expect_nothing(&w->e[0]);
	expect_nothing(&w->e[1]);
	for (int k = 0; k < 2; k++)
		if (memcmp(w->e[k].buf, w->model[k], w->e[k].len)) {
			fprintf(stderr, "end %d differs from the model after chain %lu\n", k, (unsigned long)id);
			exit(1);
		}
}

static void run(bool mapped, unsigned rounds)
{
	struct options o = usual;
	struct world w;
	o.depth = DEPTH;
	o.cqe = 2 * DEPTH;
	o.sge = SGES;
	o.inline_data = INLINE;
	o.len = SIZE + 64 * SGES * 6000;
	pair_open(w.e, &o);
	CHECK(w.q = calloc(DEPTH, sizeof(*w.q)));
	for (int k = 0; k < 2; k++) {
		struct end *e = &w.e[k];
		if (mapped) {
			CHECK(ibv_dereg_mr(e->mr) == 0);
			free(e->buf);
			CHECK(softnic_alloc(e->ctx, o.len, (void **)&e->buf) == 0);
			CHECK(e->mr = ibv_reg_mr(e->pd, e->buf, e->len, ALL_ACCESS));
		}
		CHECK(w.second[k] = ibv_reg_mr(e->pd, e->buf, e->len, ALL_ACCESS));
		pattern(e->buf, e->len, (unsigned)k + roll(1000));
		CHECK(w.model[k] = malloc(e->len));
		memcpy(w.model[k], e->buf, e->len);
	}
	for (unsigned i = 0; i < rounds; i++) {
		uint32_t n = i % 8 == 7 ? 1500 + roll(1200) : 1 + roll(200);
		one_chain(&w, n, (uint64_t)i << 16, roll(4) == 0);
	}
	for (int k = 0; k < 2; k++) {
		CHECK(ibv_dereg_mr(w.second[k]) == 0);
		free(w.model[k]);
		if (mapped) {
			CHECK(ibv_dereg_mr(w.e[k].mr) == 0 && softnic_free(w.e[k].ctx, w.e[k].buf, o.len) == 0);
			w.e[k].mr = NULL;
			w.e[k].buf = NULL;
		}
	}
	pair_close(w.e);
	free(w.q);
}

int main(void)
{
	const char *seed = getenv("ROCECOMM_TEST_SEED");
	state = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL) * 2654435761u + (uint64_t)getpid();
	fprintf(stderr, "ROCECOMM_TEST_SEED=%llu\n", (unsigned long long)state);
	run(false, 60);
	CHECK(setenv("ROCECOMM_SOFT_FAR", "1", 1) == 0); /* as if of two processes */
	run(false, 60);
	run(true, 60);
	return 0;
}
