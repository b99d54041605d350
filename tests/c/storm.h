/* A worker of kill_storm: it talks to every other one, over everything that the device has, checks
 * each byte, and connects anew to whoever takes the place of a dead one. The board is memory that all
 * share with their supervisor. */
#ifndef STORM_H
#define STORM_H

#include <poll.h>
#include <stdatomic.h>

#include "process.h"

enum { N = 5, DEPTH = 3, RECVS = 4, SHARED = 16, BIG = (1 << 20) + 70000, WORDS = BIG / 8 };

struct seat { /* one end of a connection: who offers it to whom */
	_Atomic uint32_t mine, yours; /* incarnations; mine is written last */
	_Atomic uint32_t qpn;
};

struct board {
	_Atomic uint32_t quit;
	_Atomic uint32_t now[N];    /* incarnation that is there, 0: nobody */
	_Atomic uint32_t doomed[N]; /* incarnation that may die from here on */
	_Atomic uint32_t met[N][N];    /* [who][whom]: incarnation that was offered a connection */
	_Atomic uint32_t broken[N][N]; /* [who][whom]: incarnation whose end was noticed */
	_Atomic uint64_t done[N][N];   /* what was completed and checked */
	_Atomic uint64_t addr[N];
	_Atomic uint32_t rkey[N], ud[N];
	struct seat seat[N][N];
};

struct message {
	uint32_t magic, src, src_inc, dst, dst_inc, seq, len, seed;
};

enum what { IDLE, SENT, WROTE, READ_BACK, ADDED, DATAGRAM };

struct slot {
	enum what what;
	uint32_t len, seed;
	size_t at; /* of its memory */
};

struct link {
	enum { DOWN, OFFERED, UP } state;
	struct ibv_qp *qp;
	uint32_t inc, sent, got, adds;
	int chain; /* a write with its read is on the way */
	struct slot slot[DEPTH + 2];
	size_t recv_at[RECVS];
	int posted[RECVS];
};

struct worker {
	struct board *b;
	uint32_t me, inc, rng;
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *scq, *rcq;
	struct ibv_srq *srq;
	struct ibv_qp *ud;
	struct ibv_ah *ah;
	struct ibv_mr *mr;
	char *buf;
	size_t len, window, shared_at[SHARED], ud_at[RECVS], ud_out;
	int shared_posted[SHARED], ud_posted[RECVS], ud_busy;
	struct link link[N];
};

#define DIE(...)                                                                  \
	do {                                                                      \
		fprintf(stderr, "rank %u.%u: ", w->me, w->inc);                   \
		fprintf(stderr, __VA_ARGS__);                                     \
		fprintf(stderr, " (%s:%d, errno %d)\n", __FILE__, __LINE__, errno); \
		_exit(1);                                                         \
	} while (0)
#define MUST(what)                              \
	do {                                    \
		if (!(what))                    \
			DIE("failed: %s", #what); \
	} while (0)

static uint32_t dice(struct worker *w, uint32_t n)
{
	w->rng ^= w->rng << 13;
	w->rng ^= w->rng >> 17;
	w->rng ^= w->rng << 5;
	return w->rng % n;
}

static uint64_t word(uint32_t seed, size_t i)
{
	return (seed * 0x9e3779b97f4a7c15ull) ^ (i * 0xc2b2ae3d27d4eb4full);
}

static void paint(char *p, size_t len, uint32_t seed)
{
	uint64_t *q = (uint64_t *)(void *)p;
	for (size_t i = 0; i < len / 8; i++)
		q[i] = word(seed, i);
}

static int painted(const char *p, size_t len, uint32_t seed)
{
	const uint64_t *q = (const uint64_t *)(const void *)p;
	for (size_t i = 0; i < len / 8; i++)
		if (q[i] != word(seed, i))
			return 0;
	return 1;
}

static int has_own_queue(uint32_t a, uint32_t b)
{
	return (a + b) % 2;
}

static uint32_t random_len(struct worker *w)
{
	uint32_t kind = dice(w, 20), top = kind < 10 ? 256 : kind < 15 ? 8192 : kind < 19 ? 65536 : 0;
	return (top ? 64 + dice(w, top - 64) : (1 << 20) + dice(w, 65536)) & ~7u;
}

/* ---- opening --------------------------------------------------------------------------------- */

static size_t carve(size_t *at, size_t n)
{
	size_t here = *at;
	*at += (n + 4095) & ~(size_t)4095;
	return here;
}

static struct ibv_qp *new_qp(struct worker *w, enum ibv_qp_type type, int shared)
{
	struct ibv_qp_init_attr a = { .send_cq = w->scq, .recv_cq = w->rcq, .srq = shared ? w->srq : NULL, .qp_type = type,
				      .cap = { 16, 16, 2, 2, 64 } };
	struct ibv_qp *qp = ibv_create_qp(w->pd, &a);
	if (!qp)
		DIE("ibv_create_qp");
	return qp;
}

static void post_shared(struct worker *w, int i)
{
	struct ibv_sge s = { (uintptr_t)w->buf + w->shared_at[i], BIG, w->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = (uint64_t)i, .sg_list = &s, .num_sge = 1 }, *bad;
	MUST(!w->shared_posted[i]);
	w->shared_posted[i] = 1;
	MUST(ibv_post_srq_recv(w->srq, &wr, &bad) == 0);
}

static void post_own(struct worker *w, struct ibv_qp *qp, size_t at, uint32_t len, uint64_t id, int *posted)
{
	struct ibv_sge s = { (uintptr_t)w->buf + at, len, w->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1 }, *bad;
	MUST(!*posted);
	*posted = 1;
	int err = ibv_post_recv(qp, &wr, &bad);
	if (err)
		DIE("ibv_post_recv: %d", err);
}

static void work_open(struct worker *w)
{
	int softnic_alloc(struct ibv_context *, size_t, void **);
	size_t at = 0;
	w->window = carve(&at, N * (size_t)BIG + N * 4096);
	for (int i = 0; i < SHARED; i++)
		w->shared_at[i] = carve(&at, BIG);
	for (int i = 0; i < RECVS; i++)
		w->ud_at[i] = carve(&at, 4096);
	w->ud_out = carve(&at, 4096);
	for (int k = 0; k < N; k++) {
		for (int i = 0; i < DEPTH + 2; i++)
			w->link[k].slot[i].at = carve(&at, BIG);
		for (int i = 0; i < RECVS; i++)
			w->link[k].recv_at[i] = carve(&at, BIG);
	}
	w->len = at;
	MUST(w->ctx = open_device());
	MUST(w->pd = ibv_alloc_pd(w->ctx));
	MUST(w->channel = ibv_create_comp_channel(w->ctx));
	MUST(w->scq = ibv_create_cq(w->ctx, 512, NULL, w->channel, 0));
	MUST(w->rcq = ibv_create_cq(w->ctx, 512, NULL, w->channel, 0));
	struct ibv_srq_init_attr s = { .attr = { .max_wr = SHARED, .max_sge = 1 } };
	MUST(w->srq = ibv_create_srq(w->pd, &s));
	if (w->me % 2) /* memory that peers map, for the odd ones */
		MUST(softnic_alloc(w->ctx, w->len, (void **)&w->buf) == 0);
	else
		MUST(posix_memalign((void **)&w->buf, 4096, w->len) == 0);
	MUST(w->mr = ibv_reg_mr(w->pd, w->buf, w->len, ALL_ACCESS));
	for (int i = 0; i < SHARED; i++)
		post_shared(w, i);
	w->ud = new_qp(w, IBV_QPT_UD, 0);
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };
	MUST(ibv_modify_qp(w->ud, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
	for (int i = 0; i < RECVS; i++)
		post_own(w, w->ud, w->ud_at[i], 4096, 1000 + (uint64_t)i, &w->ud_posted[i]);
	a.qp_state = IBV_QPS_RTR;
	MUST(ibv_modify_qp(w->ud, &a, IBV_QP_STATE) == 0);
	a.qp_state = IBV_QPS_RTS;
	MUST(ibv_modify_qp(w->ud, &a, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1, .hop_limit = 64 } };
	MUST(ibv_query_gid(w->ctx, 1, 1, &ah.grh.dgid) == 0);
	MUST(w->ah = ibv_create_ah(w->pd, &ah));
	atomic_store(&w->b->addr[w->me], (uintptr_t)w->buf);
	atomic_store(&w->b->rkey[w->me], w->mr->rkey);
	atomic_store(&w->b->ud[w->me], w->ud->qp_num);
	atomic_store(&w->b->now[w->me], w->inc);
}

/* ---- connections ----------------------------------------------------------------------------- */

static void offer(struct worker *w, uint32_t k, uint32_t inc)
{
	struct link *l = &w->link[k];
	struct seat *s = &w->b->seat[w->me][k];
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL_ACCESS };
	l->inc = inc;
	atomic_store(&w->b->met[w->me][k], inc);
	l->sent = l->got = l->adds = 0;
	l->chain = 0;
	l->qp = new_qp(w, IBV_QPT_RC, !has_own_queue(w->me, k));
	MUST(ibv_modify_qp(l->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	memset(w->buf + w->window + N * (size_t)BIG + k * 4096, 0, 8); /* the word that it adds to */
	if (has_own_queue(w->me, k))
		for (int i = 0; i < RECVS; i++) {
			l->posted[i] = 0;
			post_own(w, l->qp, l->recv_at[i], BIG, 100 + k * 16 + (uint64_t)i, &l->posted[i]);
		}
	for (int i = 0; i < DEPTH + 2; i++)
		l->slot[i].what = IDLE;
	atomic_store(&s->mine, 0);
	atomic_store(&s->qpn, l->qp->qp_num);
	atomic_store(&s->yours, inc);
	atomic_store(&s->mine, w->inc);
	l->state = OFFERED;
}

static int may_break(struct worker *w, uint32_t k)
{
	return atomic_load(&w->b->doomed[k]) == w->link[k].inc;
}

static void try_connect(struct worker *w, uint32_t k)
{
	struct link *l = &w->link[k];
	struct seat *s = &w->b->seat[k][w->me];
	if (l->state == DOWN) {
		uint32_t inc = atomic_load(&w->b->now[k]);
		if (!inc || inc == atomic_load(&w->b->broken[w->me][k]))
			return;
		offer(w, k, inc);
	}
	if (l->state != OFFERED)
		return;
	if (atomic_load(&w->b->now[k]) != l->inc) { /* it died before we met */
		MUST(ibv_destroy_qp(l->qp) == 0);
		l->state = DOWN;
		atomic_store(&w->b->broken[w->me][k], l->inc);
		return;
	}
	if (atomic_load(&s->mine) != l->inc || atomic_load(&s->yours) != w->inc)
		return;
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = atomic_load(&s->qpn),
				 .max_dest_rd_atomic = 16, .min_rnr_timer = 12,
				 .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1, .hop_limit = 64 } } };
	MUST(ibv_modify_qp(l->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16 };
	int err = ibv_modify_qp(l->qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
						   IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
	if (err && !may_break(w, k)) /* else it is in error already */
		DIE("to RTS with rank %u: %d", k, err);
	l->state = UP;
}

/* The connection broke, as it may if the peer is doomed. All that was posted has come back. */
static void tear_down(struct worker *w, uint32_t k)
{
	struct link *l = &w->link[k];
	double until = seconds() + 8;
	int err;
	while ((err = ibv_destroy_qp(l->qp)) == EBUSY && seconds() < until)
		usleep(1000);
	if (err)
		DIE("ibv_destroy_qp of the connection to rank %u: %d", k, err);
	l->state = DOWN;
	atomic_store(&w->b->broken[w->me][k], l->inc);
}

/* ---- traffic --------------------------------------------------------------------------------- */

static uint64_t tag(uint32_t k, int slot)
{
	return (uint64_t)k << 8 | (uint64_t)slot;
}

static void post_one(struct worker *w, uint32_t k, int slot, enum ibv_wr_opcode opcode, size_t at, uint32_t len,
		     uint64_t far)
{
	struct ibv_sge s = { (uintptr_t)w->buf + at, len, w->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = tag(k, slot), .sg_list = &s, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	uint32_t rkey = atomic_load(&w->b->rkey[k]);
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = far;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = 3;
	} else {
		wr.wr.rdma.remote_addr = far;
		wr.wr.rdma.rkey = rkey;
	}
	wr.imm_data = w->me;
	int err = ibv_post_send(w->link[k].qp, &wr, &bad);
	if (err)
		DIE("ibv_post_send to rank %u: %d", k, err);
}

static void send_message(struct worker *w, uint32_t k, int slot)
{
	struct link *l = &w->link[k];
	struct slot *s = &l->slot[slot];
	struct message m = { 0x5ca1ab1e, w->me, w->inc, k, l->inc, l->sent++, random_len(w), w->rng };
	s->what = SENT;
	paint(w->buf + s->at + sizeof(m), m.len - sizeof(m), m.seed);
	memcpy(w->buf + s->at, &m, sizeof(m));
	post_one(w, k, slot, IBV_WR_SEND, s->at, m.len, 0);
}

static void post_more(struct worker *w, uint32_t k)
{
	struct link *l = &w->link[k];
	uint64_t base = atomic_load(&w->b->addr[k]), words = base + w->window + N * (uint64_t)BIG + w->me * 4096;
	for (int i = 0; i < DEPTH; i++) {
		struct slot *s = &l->slot[i];
		uint32_t kind = dice(w, 8);
		if (s->what != IDLE)
			continue;
		if (kind == 0 && !l->chain) { /* a write, and the read that looks whether it arrived */
			struct slot *back = &l->slot[DEPTH];
			uint64_t far = base + w->window + w->me * (uint64_t)BIG;
			s->len = back->len = random_len(w);
			s->seed = back->seed = w->rng;
			s->what = WROTE;
			back->what = READ_BACK;
			l->chain = 1;
			paint(w->buf + s->at, s->len, s->seed);
			memset(w->buf + back->at, 0, s->len);
			post_one(w, k, i, IBV_WR_RDMA_WRITE, s->at, s->len, far);
			post_one(w, k, DEPTH, IBV_WR_RDMA_READ, back->at, s->len, far);
		} else if (kind == 1 && l->slot[DEPTH + 1].what == IDLE) {
			l->slot[DEPTH + 1].what = ADDED;
			post_one(w, k, DEPTH + 1, IBV_WR_ATOMIC_FETCH_AND_ADD, l->slot[DEPTH + 1].at, 8, words);
		} else {
			send_message(w, k, i);
		}
	}
}

static void send_datagram(struct worker *w)
{
	uint32_t k = dice(w, N), qpn = atomic_load(&w->b->ud[k]);
	if (w->ud_busy || k == w->me || !qpn || !atomic_load(&w->b->now[k]))
		return;
	struct message m = { 0xda7a, w->me, w->inc, k, 0, 0, (64 + dice(w, 1500)) & ~7u, w->rng };
	paint(w->buf + w->ud_out + sizeof(m), m.len - sizeof(m), m.seed);
	memcpy(w->buf + w->ud_out, &m, sizeof(m));
	struct ibv_sge s = { (uintptr_t)w->buf + w->ud_out, m.len, w->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = tag(99, 0), .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED, .wr.ud = { w->ah, qpn, 7 } }, *bad;
	w->ud_busy = 1;
	MUST(ibv_post_send(w->ud, &wr, &bad) == 0);
}

static void sent_one(struct worker *w, const struct ibv_wc *wc, int *broke)
{
	uint32_t k = (uint32_t)(wc->wr_id >> 8);
	if (k == 99) {
		if (wc->status != IBV_WC_SUCCESS)
			DIE("a datagram: status %d", wc->status);
		w->ud_busy = 0;
		return;
	}
	struct link *l = &w->link[k];
	struct slot *s = &l->slot[wc->wr_id & 255];
	enum what what = s->what;
	if (what == IDLE)
		DIE("a completion that nobody waits for, rank %u slot %u status %d", k, (unsigned)(wc->wr_id & 255), wc->status);
	s->what = IDLE;
	if (what == READ_BACK)
		l->chain = 0;
	if (wc->status != IBV_WC_SUCCESS) {
		if (!may_break(w, k))
			DIE("rank %u lives, but operation %d ended with status %d", k, what, wc->status);
		if (wc->status != IBV_WC_RETRY_EXC_ERR && wc->status != IBV_WC_WR_FLUSH_ERR)
			DIE("rank %u died, operation %d ended with status %d", k, what, wc->status);
		broke[k] = 1;
		return;
	}
	if (what == READ_BACK && !painted(w->buf + s->at, s->len, s->seed))
		DIE("what was read back from rank %u is not what was written (%u bytes)", k, s->len);
	if (what == ADDED) {
		uint64_t old = *(uint64_t *)(void *)(w->buf + s->at);
		if (old != 3ull * l->adds)
			DIE("atomics at rank %u: %lu, expected %u", k, (unsigned long)old, 3 * l->adds);
		l->adds++;
	}
	atomic_fetch_add(&w->b->done[w->me][k], 1);
}

static void check_message(struct worker *w, const char *p, uint32_t len, uint32_t magic)
{
	struct message m;
	memcpy(&m, p, sizeof(m));
	if (m.magic != magic || m.src >= N || m.dst != w->me || m.len != len || !painted(p + sizeof(m), len - sizeof(m), m.seed))
		DIE("a message of %u bytes is not what was sent: magic %x, from %u to %u, length %u", len, m.magic, m.src, m.dst,
		    m.len);
	if (magic == 0xda7a)
		return;
	struct link *l = &w->link[m.src];
	if (m.src_inc != l->inc || m.dst_inc != w->inc || m.seq != l->got)
		DIE("from rank %u.%u: message %u, expected %u.%u's %u", m.src, m.src_inc, m.seq, m.src, l->inc, l->got);
	l->got++;
	atomic_fetch_add(&w->b->done[w->me][m.src], 1);
}

static void received_one(struct worker *w, const struct ibv_wc *wc, int *broke)
{
	uint64_t id = wc->wr_id;
	if (id >= 1000) {
		int i = (int)id - 1000;
		MUST(w->ud_posted[i] && wc->status == IBV_WC_SUCCESS);
		w->ud_posted[i] = 0;
		check_message(w, w->buf + w->ud_at[i] + 40, wc->byte_len - 40, 0xda7a);
		post_own(w, w->ud, w->ud_at[i], 4096, id, &w->ud_posted[i]);
		return;
	}
	uint32_t k = N;
	for (uint32_t i = 0; i < N; i++)
		if (w->link[i].state != DOWN && w->link[i].qp->qp_num == wc->qp_num)
			k = i;
	if (k == N)
		DIE("a receive of a QP that is gone: wr_id %lu status %d", (unsigned long)id, wc->status);
	if (wc->status != IBV_WC_SUCCESS) {
		if (!may_break(w, k))
			DIE("rank %u lives, but a receive ended with status %d", k, wc->status);
		broke[k] = 1;
	}
	if (id >= 100) {
		int i = (int)(id & 15) - 4;
		struct link *l = &w->link[k];
		i = (int)(id - 100 - k * 16);
		MUST(i >= 0 && i < RECVS && l->posted[i]);
		l->posted[i] = 0;
		if (wc->status == IBV_WC_SUCCESS) {
			check_message(w, w->buf + l->recv_at[i], wc->byte_len, 0x5ca1ab1e);
			post_own(w, l->qp, l->recv_at[i], BIG, id, &l->posted[i]);
		}
		return;
	}
	if (id >= SHARED || !w->shared_posted[id])
		DIE("shared receive %lu came back twice", (unsigned long)id);
	w->shared_posted[id] = 0;
	if (wc->status == IBV_WC_SUCCESS)
		check_message(w, w->buf + w->shared_at[id], wc->byte_len, 0x5ca1ab1e);
	post_shared(w, (int)id);
}

static int poll_all(struct worker *w, int *broke)
{
	struct ibv_wc wc[8];
	int n, all = 0;
	while ((n = ibv_poll_cq(w->scq, 8, wc)) > 0) {
		for (int i = 0; i < n; i++)
			sent_one(w, &wc[i], broke);
		all += n;
	}
	MUST(n == 0);
	while ((n = ibv_poll_cq(w->rcq, 8, wc)) > 0) {
		for (int i = 0; i < n; i++)
			received_one(w, &wc[i], broke);
		all += n;
	}
	MUST(n == 0);
	return all;
}

/* A connection that broke: everything that was posted comes back, then it goes. */
static void drain(struct worker *w, uint32_t k)
{
	struct link *l = &w->link[k];
	int broke[N] = { 0 };
	double until = seconds() + 8;
	for (;;) {
		int left = 0;
		for (int i = 0; i < DEPTH + 2; i++)
			left += l->slot[i].what != IDLE;
		for (int i = 0; has_own_queue(w->me, k) && i < RECVS; i++)
			left += l->posted[i];
		if (!left)
			break;
		if (seconds() > until) {
			for (int i = 0; i < DEPTH + 2; i++)
				if (l->slot[i].what != IDLE)
					fprintf(stderr, "slot %d: operation %d\n", i, l->slot[i].what);
			for (int i = 0; has_own_queue(w->me, k) && i < RECVS; i++)
				if (l->posted[i])
					fprintf(stderr, "receive %d\n", i);
			DIE("rank %u died, %d requests never came back", k, left);
		}
		poll_all(w, broke);
	}
	tear_down(w, k);
	for (uint32_t i = 0; i < N; i++) /* what else was noticed meanwhile */
		if (i != k && broke[i] && w->link[i].state == UP)
			drain(w, i);
}

static void doze(struct worker *w, int all_up)
{
	struct pollfd p = { w->channel->fd, POLLIN, 0 };
	struct ibv_cq *cq;
	void *context;
	int broke[N] = { 0 };
	MUST(ibv_req_notify_cq(w->scq, 0) == 0 && ibv_req_notify_cq(w->rcq, 0) == 0);
	int n = poll_all(w, broke);
	for (uint32_t k = 0; k < N; k++)
		if (broke[k] && w->link[k].state == UP)
			drain(w, k);
	if (n)
		return;
	int r = poll(&p, 1, all_up ? 4000 : 5);
	if (r == 0 && all_up)
		DIE("asleep for 4 s, with work under way to everybody");
	if (r > 0) {
		MUST(ibv_get_cq_event(w->channel, &cq, &context) == 0);
		ibv_ack_cq_events(cq, 1);
	}
}

static void work(struct worker *w)
{
	work_open(w);
	while (!atomic_load(&w->b->quit)) {
		int broke[N] = { 0 }, up = 0, mode = (int)dice(w, 4);
		for (uint32_t k = 0; k < N; k++) {
			if (k == w->me)
				continue;
			try_connect(w, k);
			if (w->link[k].state == UP) {
				up++;
				post_more(w, k);
			}
		}
		if (dice(w, 16) == 0)
			send_datagram(w);
		for (uint32_t i = dice(w, 50); i-- > 0 && !poll_all(w, broke);)
			;
		for (uint32_t k = 0; k < N; k++)
			if (broke[k] && w->link[k].state == UP)
				drain(w, k);
		if (mode == 0)
			doze(w, up == N - 1);
	}
	_exit(0); /* the device closes, or the next one sweeps up */
}

#endif
