/* Traffic of every kind between two contexts of one process, from many threads: several threads post
 * on each queue pair, others post the receives, two poll each completion queue (one of them asleep
 * on its channel), one resizes it. For the sanitizers, which see the shared protocol only where both
 * ends are of one process; and every payload is looked at. Once more with ROCECOMM_SOFT_FAR, where
 * small payloads wait in the receive's slot as they do between processes. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>

#include "pair.h"

#define LINKS 4 /* queue pairs of a side; the last two share an SRQ; the first carries large messages */
#define OPS 12	/* requests of a queue pair under way */
#define RECVS 6 /* receives of a queue, per queue pair */
#define SMALL 8192u
#define LARGE (1536u << 10)
#define MAX_SEQ (1u << 20)
#define SOURCE 65536u /* what is only read */
#define SECONDS 1.5

enum kind { SEND, WRITE, READ, ADD, SWAP, WRITE_IMM, KINDS };

struct op {
	_Atomic int busy;
	enum kind kind;
	uint32_t len;
	uint64_t seed, at;
	int with; /* an unsignaled one before it */
};

struct link {
	struct ibv_qp *qp;
	struct op op[OPS];
	_Atomic uint32_t sent; /* sends posted so far */
	_Atomic uint64_t adds;
	_Atomic unsigned char *seen; /* by the sequence number of the peer's sends */
	_Atomic uint32_t got, got_imm, sent_imm;
};

struct side {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	char *buf;
	struct link link[LINKS];
	_Atomic int posted[LINKS][RECVS];
	struct side *far;
};

/* posters, then those that serve them */
static _Atomic int stop_posting, stop;
static double end_at;

static uint32_t room(int l)
{
	return l ? SMALL : LARGE;
}
/* parts of a side's memory: words for atomics, what is read, then per link OPS sources, OPS targets and
 * RECVS receives */
static uint64_t word(int l, int slot) /* the last one is the counter */
{
	return (uint64_t)(l * (OPS + 1) + slot) * 8;
}
static uint64_t base(int l)
{
	return 4096 + SOURCE + (l ? (uint64_t)LARGE + (uint64_t)(l - 1) * SMALL : 0) * (2 * OPS + RECVS);
}
static uint64_t source_of(int l, int slot)
{
	return base(l) + (uint64_t)slot * room(l);
}
static uint64_t target_of(int l, int slot)
{
	return source_of(l, OPS + slot);
}
static uint64_t receive_of(int l, int slot)
{
	return source_of(l, 2 * OPS + slot);
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	return x * 0x9e3779b97f4a7c15ULL + 12345;
}
static uint32_t below(uint64_t *rng, uint32_t n)
{
	*rng = mix(*rng);
	return (uint32_t)(*rng >> 33) % n;
}
static void fill(char *p, uint32_t len, uint64_t seed)
{
	for (uint32_t i = 0; i + 8 <= len; i += 8)
		*(uint64_t *)(void *)(p + i) = seed + i;
}
static int good(const char *p, uint32_t len, uint64_t seed)
{
	for (uint32_t i = 0; i + 8 <= len; i += 8)
		if (*(const uint64_t *)(const void *)(p + i) != seed + i)
			return 0;
	return 1;
}

/* ---- posting ------------------------------------------------------------------------------ */

static void post_op(struct side *s, int l, int slot, uint64_t *rng, int before)
{
	struct link *k = &s->link[l];
	struct op *o = &k->op[slot];
	static const uint32_t sizes[] = { 16, 64, 64, 200, 256, 1024, 8192 };
	enum kind kind = below(rng, 3) ? SEND : (enum kind)below(rng, KINDS);
	char *p = s->buf + source_of(l, slot);
	struct ibv_sge g[2] = { { (uintptr_t)p, 0, s->mr->lkey } };
	struct ibv_send_wr wr = { .sg_list = g, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED }, *bad;

	o->with = before;
	if (before == -2) /* the first of two; the second one frees it */
		wr.send_flags = 0;
	o->kind = kind;
	o->len = l == 0 && below(rng, 8) == 0 ? LARGE - below(rng, 64) * 8 : sizes[below(rng, 7)];
	o->at = target_of(l, slot);
	wr.wr_id = (uint64_t)l << 16 | (uint64_t)slot;
	wr.wr.rdma.rkey = s->far->mr->rkey;
	wr.wr.rdma.remote_addr = (uintptr_t)s->far->buf + o->at;
	o->seed = (uint64_t)l << 56 | below(rng, 1u << 30);
	switch (kind) {
	case SEND:
		/* which one it is, and how long: the receiver checks it by that */
		o->seed = (uint64_t)l << 56 | (uint64_t)atomic_fetch_add(&k->sent, 1) << 32;
		CHECK((uint32_t)(o->seed >> 32) % MAX_SEQ + 1 < MAX_SEQ);
		wr.opcode = IBV_WR_SEND;
		wr.send_flags |= below(rng, 2) ? IBV_SEND_SOLICITED : 0;
		break;
	case WRITE_IMM:
		wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		wr.imm_data = (uint32_t)l;
		atomic_fetch_add(&k->sent_imm, 1);
		break;
	case WRITE:
		wr.opcode = IBV_WR_RDMA_WRITE;
		break;
	case READ:
		o->len = o->len > SMALL ? SMALL : o->len;
		o->seed = 8 * below(rng, (SOURCE - SMALL) / 8);
		wr.opcode = IBV_WR_RDMA_READ;
		wr.wr.rdma.remote_addr = (uintptr_t)s->far->buf + 4096 + o->seed;
		break;
	default:
		o->len = 8;
		wr.opcode = kind == ADD ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
		wr.wr.atomic.rkey = s->far->mr->rkey;
		wr.wr.atomic.remote_addr = (uintptr_t)s->far->buf + word(l, kind == ADD ? OPS : slot);
		wr.wr.atomic.compare_add = kind == ADD;
		wr.wr.atomic.swap = 0;
		o->seed = 0;
	}
	if (kind == SEND || kind == WRITE || kind == WRITE_IMM) {
		fill(p, o->len, o->seed);
		g[0].length = o->len;
		if (o->len <= 64 && below(rng, 2))
			wr.send_flags |= IBV_SEND_INLINE;
		else if (below(rng, 3) == 0) { /* two elements */
			g[1] = g[0];
			g[0].length = 8 + 8 * below(rng, o->len / 8 - 1);
			g[1].addr += g[0].length;
			g[1].length -= g[0].length;
			wr.num_sge = 2;
		}
	} else {
		g[0].length = o->len;
	}
	atomic_store_explicit(&o->busy, 1, memory_order_release);
	CHECK(ibv_post_send(k->qp, &wr, &bad) == 0);
}

struct poster {
	struct side *side;
	int number;
};

static void *post_all(void *arg)
{
	struct poster *p = arg;
	uint64_t rng = mix((uint64_t)p->number + (p->side > p->side->far ? 77 : 0));
	while (!atomic_load(&stop_posting)) {
		/* each thread has slots of its own, on queue pairs that all of them use */
		int l = (int)below(&rng, LINKS), slot = 4 * p->number + 2 * (int)below(&rng, 2);
		struct op *o = p->side->link[l].op;
		if (atomic_load_explicit(&o[slot].busy, memory_order_acquire) ||
		    atomic_load_explicit(&o[slot + 1].busy, memory_order_acquire)) {
			usleep(20);
			continue;
		}
		if (below(&rng, 3) == 0)
			post_op(p->side, l, slot + 1, &rng, -1);
		else {
			post_op(p->side, l, slot, &rng, -2);
			post_op(p->side, l, slot + 1, &rng, slot);
		}
	}
	return NULL;
}

/* ---- receives ----------------------------------------------------------------------------- */

static void *feed(void *arg)
{
	struct side *s = arg;
	while (!atomic_load(&stop)) {
		for (int l = 0; l < LINKS; l++)
			for (int r = 0; r < RECVS; r++) {
				if (atomic_load_explicit(&s->posted[l][r], memory_order_acquire))
					continue;
				struct ibv_sge g = { (uintptr_t)s->buf + receive_of(l, r), room(l), s->mr->lkey };
				struct ibv_recv_wr wr = { .wr_id = (uint64_t)l << 16 | (uint64_t)r, .sg_list = &g,
							  .num_sge = 1 }, *bad;
				atomic_store_explicit(&s->posted[l][r], 1, memory_order_relaxed);
				CHECK((l < 2 ? ibv_post_recv(s->link[l].qp, &wr, &bad)
					     : ibv_post_srq_recv(s->srq, &wr, &bad)) == 0);
			}
		usleep(50);
	}
	return NULL;
}

/* ---- completions -------------------------------------------------------------------------- */

static int link_of(struct side *s, uint32_t qpn)
{
	for (int l = 0; l < LINKS; l++)
		if (s->link[l].qp->qp_num == qpn)
			return l;
	CHECK(!"a completion of a queue pair of ours");
	return 0;
}

static void received(struct side *s, const struct ibv_wc *wc)
{
	int l = (int)(wc->wr_id >> 16), r = (int)(wc->wr_id & 0xffff), from = link_of(s, wc->qp_num);
	struct link *k = &s->link[from];
	const char *p = s->buf + receive_of(l, r);
	if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
		CHECK(wc->imm_data == (uint32_t)from);
		atomic_fetch_add(&k->got_imm, 1);
	} else {
		uint64_t seed = *(const uint64_t *)(const void *)p;
		CHECK(wc->opcode == IBV_WC_RECV && seed >> 56 == (uint64_t)from && good(p, wc->byte_len, seed));
		CHECK(atomic_exchange(&k->seen[(seed >> 32) % MAX_SEQ], 1) == 0);
		atomic_fetch_add(&k->got, 1);
	}
	atomic_store_explicit(&s->posted[l][r], 0, memory_order_release);
}

static void check_op(struct side *s, int l, int slot)
{
	struct op *o = &s->link[l].op[slot];
	const char *mine = s->buf + source_of(l, slot);
	CHECK(atomic_load_explicit(&o->busy, memory_order_acquire));
	switch (o->kind) {
	case WRITE:
	case WRITE_IMM:
		CHECK(good(s->far->buf + o->at, o->len, o->seed));
		break;
	case READ:
		CHECK(good(mine, o->len, o->seed));
		break;
	case ADD:
		atomic_fetch_add(&s->link[l].adds, 1);
		break;
	case SWAP:
		CHECK(*(const uint64_t *)(const void *)mine == 0);
		break;
	default:
		break;
	}
	atomic_store_explicit(&o->busy, 0, memory_order_release);
}

static void completed(struct side *s, const struct ibv_wc *wc, int n)
{
	for (int i = 0; i < n; i++) {
		if (wc[i].status != IBV_WC_SUCCESS)
			fprintf(stderr, "wr_id %#lx: status %d\n", (unsigned long)wc[i].wr_id, wc[i].status);
		CHECK(wc[i].status == IBV_WC_SUCCESS);
		if (wc[i].opcode & IBV_WC_RECV) {
			received(s, &wc[i]);
			continue;
		}
		int l = (int)(wc[i].wr_id >> 16), slot = (int)(wc[i].wr_id & 0xffff);
		int before = s->link[l].op[slot].with;
		if (before >= 0)
			check_op(s, l, before);
		check_op(s, l, slot);
	}
}

static void *spin(void *arg)
{
	struct side *s = arg;
	struct ibv_wc wc[8];
	uint64_t rng = 5;
	while (!atomic_load(&stop)) {
		int n = ibv_poll_cq(s->cq, 1 + (int)below(&rng, 8), wc);
		CHECK(n >= 0);
		completed(s, wc, n);
		if (below(&rng, 256) == 0)
			usleep(200); /* so that the sleeper has something to do */
	}
	return NULL;
}

static void *sleep_and_poll(void *arg)
{
	struct side *s = arg;
	struct ibv_cq *cq;
	struct ibv_wc wc[4];
	void *context;
	int n, solicited = 0;
	while (!atomic_load(&stop)) {
		struct pollfd p = { .fd = s->channel->fd, .events = POLLIN };
		CHECK(ibv_req_notify_cq(s->cq, solicited ^= 1) == 0);
		while ((n = ibv_poll_cq(s->cq, 4, wc)) > 0)
			completed(s, wc, n);
		CHECK(n == 0);
		if (poll(&p, 1, 20) == 1 && ibv_get_cq_event(s->channel, &cq, &context) == 0) {
			CHECK(cq == s->cq && context == s);
			ibv_ack_cq_events(cq, 1);
		}
	}
	return NULL;
}

static void *resize(void *arg)
{
	struct side *s = arg;
	uint64_t rng = 9;
	while (!atomic_load(&stop)) {
		CHECK(ibv_resize_cq(s->cq, 256 << below(&rng, 4)) == 0);
		usleep(3000);
	}
	return NULL;
}

/* ---- both sides --------------------------------------------------------------------------- */

static void open_side(struct side *s)
{
	uint64_t len = base(LINKS);
	memset(s, 0, sizeof(*s));
	CHECK(s->ctx = open_device());
	CHECK(s->pd = ibv_alloc_pd(s->ctx));
	CHECK(s->channel = ibv_create_comp_channel(s->ctx));
	CHECK(fcntl(s->channel->fd, F_SETFL, fcntl(s->channel->fd, F_GETFL) | O_NONBLOCK) == 0);
	CHECK(s->cq = ibv_create_cq(s->ctx, 512, s, s->channel, 0));
	struct ibv_srq_init_attr a = { .attr = { .max_wr = 2 * RECVS, .max_sge = 1 } };
	CHECK(s->srq = ibv_create_srq(s->pd, &a));
	CHECK(s->buf = calloc(1, len));
	fill(s->buf + 4096, SOURCE, 0);
	CHECK(s->mr = ibv_reg_mr(s->pd, s->buf, len, ALL_ACCESS));
	for (int l = 0; l < LINKS; l++) {
		struct ibv_qp_init_attr q = { .send_cq = s->cq, .recv_cq = s->cq, .srq = l < 2 ? NULL : s->srq,
					      .qp_type = IBV_QPT_RC, .cap = { 2 * OPS, RECVS, 2, 1, 64 } };
		CHECK(s->link[l].qp = ibv_create_qp(s->pd, &q));
		CHECK(s->link[l].seen = calloc(MAX_SEQ, 1));
	}
}

static void close_side(struct side *s)
{
	for (int l = 0; l < LINKS; l++) {
		CHECK(ibv_destroy_qp(s->link[l].qp) == 0);
		free((void *)s->link[l].seen);
	}
	CHECK(ibv_destroy_srq(s->srq) == 0);
	CHECK(ibv_destroy_cq(s->cq) == 0);
	CHECK(ibv_destroy_comp_channel(s->channel) == 0);
	CHECK(ibv_dereg_mr(s->mr) == 0);
	CHECK(ibv_dealloc_pd(s->pd) == 0);
	CHECK(ibv_close_device(s->ctx) == 0);
	free(s->buf);
}

static int busy(struct side *s)
{
	for (int l = 0; l < LINKS; l++) {
		struct link *far = &s->far->link[l];
		for (int i = 0; i < OPS; i++)
			if (atomic_load(&s->link[l].op[i].busy))
				return 1;
		if (atomic_load(&far->got) != atomic_load(&s->link[l].sent) ||
		    atomic_load(&far->got_imm) != atomic_load(&s->link[l].sent_imm))
			return 1;
	}
	return 0;
}

static void storm(void)
{
	static struct side s[2];
	static void *(*const roles[])(void *) = { feed, spin, sleep_and_poll, resize };
	struct poster poster[2][3];
	pthread_t posters[6], others[8];
	struct options o = usual;

	atomic_store(&stop, 0);
	atomic_store(&stop_posting, 0);
	for (int i = 0; i < 2; i++)
		open_side(&s[i]);
	for (int i = 0; i < 2; i++) {
		s[i].far = &s[1 - i];
		for (int l = 0; l < LINKS; l++)
			CHECK(to_rts(&(struct end){ .qp = s[i].link[l].qp }, s[1 - i].link[l].qp->qp_num, &o) == 0);
	}
	end_at = seconds() + SECONDS;
	for (int i = 0; i < 8; i++)
		CHECK(pthread_create(&others[i], NULL, roles[i / 2], &s[i % 2]) == 0);
	for (int i = 0; i < 6; i++) {
		poster[i % 2][i / 2] = (struct poster){ &s[i % 2], i / 2 };
		CHECK(pthread_create(&posters[i], NULL, post_all, &poster[i % 2][i / 2]) == 0);
	}
	while (seconds() < end_at)
		usleep(10000);
	atomic_store(&stop_posting, 1);
	for (int i = 0; i < 6; i++)
		CHECK(pthread_join(posters[i], NULL) == 0);
	for (double until = seconds() + 20; busy(&s[0]) || busy(&s[1]);) {
		CHECK(seconds() < until);
		usleep(1000);
	}
	atomic_store(&stop, 1);
	for (int i = 0; i < 8; i++)
		CHECK(pthread_join(others[i], NULL) == 0);
	for (int i = 0; i < 2; i++)
		for (int l = 0; l < LINKS; l++) {
			CHECK(*(uint64_t *)(void *)(s[1 - i].buf + word(l, OPS)) == atomic_load(&s[i].link[l].adds));
			CHECK(atomic_load(&s[i].link[l].got) > 10 && atomic_load(&s[i].link[l].adds) > 0);
		}
	close_side(&s[0]);
	close_side(&s[1]);
}

int main(void)
{
	storm();
	CHECK(setenv("ROCECOMM_SOFT_FAR", "1", 1) == 0);
	storm();
	return 0;
}
