/* Everything comes and goes while peers go on posting, all of it threads of one process: queue pairs
 * fail, are reset, destroyed and made anew, regions are deregistered and moved, devices closed,
 * completion queues resized, with completion queues and an SRQ that links share. Whoever took its
 * memory back finds it as it left it; nobody hangs; nothing ends with a status that has no reason. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>

#include <stdbool.h>

#include "pair.h"

#define LINKS 5
#define RECVS 8
#define SLOT 512u
#define TARGET 16384u /* what the peer writes */
#define SOURCE 16384u /* what nobody writes */
#define LANDING (RECVS * SLOT)
#define RESULT 16384u /* where this end's reads and atomics go */
#define SECONDS 1.5
#define MAX_CLOSES 25 /* a closed device stays mapped while those live that knew it */

enum action { FAIL, RESET, DESTROY, DEREG, REREG, CLOSE, ACTIONS };

struct shared { /* what the ends of a side have in common; those of link 3 are both of side 0 */
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
};

struct end_of {
	struct shared *in, own; /* `own`: a device of this link alone */
	int link, number;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	_Atomic uint32_t rkey; /* the peer may use it when the region is gone */
	char *buf;
	bool use_srq;
	uint64_t rng;
	uint32_t round;
	_Atomic uint32_t posted[RECVS]; /* round << 1 | is it posted */
};

struct link {
	struct end_of end[2];
	_Atomic int want; /* end 1 has acted and wants to meet */
	_Atomic int over;
	pthread_mutex_t lock;
	pthread_cond_t cond;
	int here, turn;
};

static struct shared side[2];
static struct link links[LINKS];
static _Atomic int stop;
static _Atomic uint32_t rounds[ACTIONS], statuses[32];
static double end_at;

/* Has everything happened that this test is about? On a busy machine that takes longer. */
static int saw_all(void)
{
	for (int a = 0; a < ACTIONS; a++)
		if (!atomic_load(&rounds[a]))
			return 0;
	return atomic_load(&statuses[IBV_WC_SUCCESS]) > 1000 && atomic_load(&statuses[IBV_WC_WR_FLUSH_ERR]) > 0 &&
	       atomic_load(&statuses[IBV_WC_RETRY_EXC_ERR]) > 0 && atomic_load(&statuses[IBV_WC_REM_ACCESS_ERR]) > 0;
}

static uint32_t below(uint64_t *rng, uint32_t n)
{
	*rng = (*rng ^ *rng >> 31) * 0x9e3779b97f4a7c15ULL + 12345;
	return (uint32_t)(*rng >> 33) % n;
}

/* Both ends of a link come here, or the test fails. */
static void meet(struct link *k)
{
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 25;
	pthread_mutex_lock(&k->lock);
	int turn = k->turn;
	if (++k->here == 2) {
		k->here = 0;
		k->turn++;
		pthread_cond_broadcast(&k->cond);
	}
	while (k->turn == turn)
		CHECK(pthread_cond_timedwait(&k->cond, &k->lock, &until) == 0);
	pthread_mutex_unlock(&k->lock);
}

/* ---- completions: any thread may take any of its side's ------------------------------------ */

static bool reasonable(enum ibv_wc_status s)
{
	return s == IBV_WC_SUCCESS || s == IBV_WC_WR_FLUSH_ERR || s == IBV_WC_RETRY_EXC_ERR || s == IBV_WC_REM_ACCESS_ERR ||
	       s == IBV_WC_REM_OP_ERR || s == IBV_WC_LOC_PROT_ERR;
}

static void poll_some(struct end_of *e)
{
	struct ibv_wc wc[8];
	int n = ibv_poll_cq(e->in->cq, 8, wc);
	CHECK(n >= 0);
	for (int i = 0; i < n; i++) {
		struct end_of *of = &links[wc[i].wr_id >> 56].end[wc[i].wr_id >> 55 & 1];
		CHECK(reasonable(wc[i].status));
		atomic_fetch_add_explicit(&statuses[wc[i].status], 1, memory_order_relaxed);
		uint32_t was = (uint32_t)(wc[i].wr_id >> 16 & 0x7fffffff) << 1 | 1;
		if (wc[i].wr_id & 0x8000) /* a receive; of an earlier round it counts no more */
			atomic_compare_exchange_strong(&of->posted[wc[i].wr_id & 0xff], &was, was & ~1u);
	}
}

/* ---- traffic ------------------------------------------------------------------------------ */

static uint64_t id_of(struct end_of *e)
{
	return (uint64_t)e->link << 56 | (uint64_t)e->number << 55 | (uint64_t)(e->round & 0x7fffffff) << 16;
}

static void post_receives(struct end_of *e)
{
	for (uint32_t r = 0; r < RECVS; r++) {
		uint32_t s = atomic_load(&e->posted[r]);
		if (s & 1)
			continue;
		/* a receive of an SRQ outlives the round of its poster */
		struct ibv_sge g = { (uintptr_t)e->buf + TARGET + SOURCE + r * SLOT, SLOT, e->mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = id_of(e) | 0x8000 | r, .sg_list = &g, .num_sge = 1 }, *bad;
		atomic_store(&e->posted[r], (e->round & 0x7fffffff) << 1 | 1);
		int err = e->use_srq ? ibv_post_srq_recv(e->in->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad);
		if (err)
			fprintf(stderr, "post_recv of link %d, end %d: %s\n", e->link, e->number, strerror(err));
		CHECK(err == 0);
	}
}

/* One request; false: the queue is full. */
static bool post_one(struct end_of *e)
{
	struct end_of *far = &links[e->link].end[1 - e->number];
	static const enum ibv_wr_opcode ops[] = { IBV_WR_SEND, IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE,
						  IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ,
						  IBV_WR_ATOMIC_FETCH_AND_ADD };
	enum ibv_wr_opcode op = ops[below(&e->rng, 7)];
	uint32_t len = below(&e->rng, 4) ? 8 + 8 * below(&e->rng, 30) : below(&e->rng, TARGET - 8) + 8;
	bool inbound = op == IBV_WR_RDMA_READ || op == IBV_WR_ATOMIC_FETCH_AND_ADD;
	bool small = op == IBV_WR_SEND;
	struct ibv_sge g = { (uintptr_t)e->buf + TARGET, small && len > SLOT ? SLOT : len, e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id_of(e), .sg_list = &g, .num_sge = 1, .opcode = op,
				  .send_flags = below(&e->rng, 3) ? IBV_SEND_SIGNALED : 0 }, *bad;
	if (inbound)
		g.addr = (uintptr_t)e->buf + TARGET + SOURCE + LANDING;
	else if (len <= 64 && below(&e->rng, 2))
		wr.send_flags |= IBV_SEND_INLINE;
	wr.wr.rdma.remote_addr = (uintptr_t)far->buf + (op == IBV_WR_RDMA_READ ? TARGET : 0);
	wr.wr.rdma.rkey = atomic_load(&far->rkey);
	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		g.length = 8;
		wr.wr.atomic.remote_addr = (uintptr_t)far->buf;
		wr.wr.atomic.rkey = atomic_load(&far->rkey);
		wr.wr.atomic.compare_add = 1;
	}
	int err = ibv_post_send(e->qp, &wr, &bad);
	CHECK(err == 0 || err == ENOMEM);
	return err == 0;
}

static void work(struct end_of *e, int times)
{
	for (int i = 0; i < times; i++) {
		if (below(&e->rng, 4) == 0)
			post_receives(e);
		for (int n = (int)below(&e->rng, 4); n >= 0; n--)
			if (!post_one(e))
				break;
		poll_some(e);
	}
}

/* ---- coming and going --------------------------------------------------------------------- */

static void make_qp(struct end_of *e)
{
	struct ibv_qp_init_attr a = { .send_cq = e->in->cq, .recv_cq = e->in->cq, .srq = e->use_srq ? e->in->srq : NULL,
				      .qp_type = IBV_QPT_RC, .cap = { 16, RECVS, 1, 1, 64 } };
	CHECK(e->qp = ibv_create_qp(e->in->pd, &a));
}

static void register_all(struct end_of *e)
{
	CHECK(e->mr = ibv_reg_mr(e->in->pd, e->buf, TARGET + SOURCE + LANDING + RESULT, ALL_ACCESS));
	atomic_store(&e->rkey, e->mr->rkey);
}

static void open_shared(struct shared *s)
{
	CHECK(s->ctx = open_device());
	CHECK(fcntl(s->ctx->async_fd, F_SETFL, fcntl(s->ctx->async_fd, F_GETFL) | O_NONBLOCK) == 0);
	CHECK(s->pd = ibv_alloc_pd(s->ctx));
	CHECK(s->cq = ibv_create_cq(s->ctx, 1024, NULL, NULL, 0));
	struct ibv_srq_init_attr a = { .attr = { .max_wr = 4 * RECVS, .max_sge = 1 } };
	CHECK(s->srq = ibv_create_srq(s->pd, &a));
}

static void close_shared(struct shared *s)
{
	CHECK(ibv_destroy_srq(s->srq) == 0);
	CHECK(ibv_destroy_cq(s->cq) == 0);
	CHECK(ibv_dealloc_pd(s->pd) == 0);
	CHECK(ibv_close_device(s->ctx) == 0);
}

static void state(struct end_of *e, enum ibv_qp_state to)
{
	struct ibv_qp_attr a = { .qp_state = to };
	CHECK(ibv_modify_qp(e->qp, &a, IBV_QP_STATE) == 0);
}

/* After this nobody may touch what the peer could write. */
static void act(struct end_of *e, enum action what)
{
	atomic_fetch_add(&rounds[what], 1);
	switch (what) {
	case FAIL:
		state(e, IBV_QPS_ERR);
		break;
	case RESET:
		state(e, IBV_QPS_RESET);
		break;
	case DESTROY:
		CHECK(ibv_destroy_qp(e->qp) == 0);
		break;
	case DEREG:
		CHECK(ibv_dereg_mr(e->mr) == 0);
		break;
	case REREG: /* the peer's part is in it no longer */
		CHECK(ibv_rereg_mr(e->mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, e->buf + TARGET,
				   SOURCE + LANDING + RESULT, 0) == 0);
		break;
	default:
		CHECK(ibv_close_device(e->own.ctx) == 0);
	}
}

static void must_be_quiet(struct end_of *e)
{
	char mark = (char)below(&e->rng, 256);
	memset(e->buf, mark, TARGET);
	for (int i = 0; i < 3; i++) {
		usleep(300);
		for (uint32_t at = 0; at < TARGET; at++)
			CHECK(e->buf[at] == mark);
	}
}

/* The other end's queue pair is of no use after this, whatever it is in the middle of. */
static void make_good(struct end_of *e, enum action what)
{
	switch (what) {
	case CLOSE: /* the handles that are left may be given back */
		CHECK(ibv_destroy_qp(e->qp) == 0 && ibv_dereg_mr(e->mr) == 0 && ibv_destroy_srq(e->own.srq) == 0);
		CHECK(ibv_destroy_cq(e->own.cq) == 0 && ibv_dealloc_pd(e->own.pd) == 0);
		open_shared(&e->own);
		/* fall through */
	case DESTROY:
		make_qp(e);
		break;
	default:
		state(e, IBV_QPS_RESET);
	}
	if (what == DEREG || what == CLOSE)
		register_all(e);
	else if (what == REREG)
		CHECK(ibv_rereg_mr(e->mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, e->buf,
				   TARGET + SOURCE + LANDING + RESULT, 0) == 0);
	e->round++;
	if (!e->use_srq || what == CLOSE) /* what was posted is gone with the queue */
		for (int r = 0; r < RECVS; r++)
			atomic_store(&e->posted[r], 0);
}

static void connect_ends(struct link *k, struct end_of *e)
{
	meet(k); /* both queue pairs are there, and both regions */
	CHECK(to_rts(&(struct end){ .qp = e->qp }, k->end[1 - e->number].qp->qp_num, &usual) == 0);
	meet(k);
}

static void *poster(void *arg) /* end 0: posts until the other end has acted, and some more */
{
	struct link *k = arg;
	struct end_of *e = &k->end[0];
	while (!atomic_load(&k->over)) {
		connect_ends(k, e);
		while (!atomic_load(&k->want))
			work(e, 4);
		work(e, (int)below(&e->rng, 20));
		enum action what = below(&e->rng, 2) ? RESET : DESTROY;
		meet(k); /* the other end looks at its memory until here */
		act(e, what);
		make_good(e, what);
		meet(k);
		atomic_store(&k->want, 0);
	}
	return NULL;
}

static void *actor(void *arg)
{
	struct link *k = arg;
	struct end_of *e = &k->end[1];
	int closes = 0;
	while (!atomic_load(&k->over)) {
		connect_ends(k, e);
		work(e, (int)below(&e->rng, 300));
		enum action what = (enum action)below(&e->rng, CLOSE);
		if (e->in == &e->own && closes < MAX_CLOSES && below(&e->rng, 3) == 0) {
			what = CLOSE;
			closes++;
		}
		act(e, what);
		must_be_quiet(e);
		if (seconds() > end_at && (saw_all() || seconds() > end_at + 20))
			atomic_store(&k->over, 1);
		atomic_store(&k->want, 1);
		meet(k);
		make_good(e, what);
		meet(k);
	}
	return NULL;
}

/* ---- others ------------------------------------------------------------------------------- */

static void *resize(void *arg)
{
	uint64_t rng = 3;
	(void)arg;
	while (!atomic_load(&stop)) {
		struct shared *s = &side[below(&rng, 2)];
		struct ibv_srq_attr a = { .srq_limit = below(&rng, 8) };
		CHECK(ibv_resize_cq(s->cq, 1024 << below(&rng, 3)) == 0);
		CHECK(ibv_modify_srq(s->srq, &a, IBV_SRQ_LIMIT) == 0);
		usleep(2000);
	}
	return NULL;
}

static void *events(void *arg)
{
	struct shared *s = arg;
	struct ibv_async_event e;
	while (!atomic_load(&stop)) {
		struct pollfd p = { .fd = s->ctx->async_fd, .events = POLLIN };
		if (poll(&p, 1, 5) == 1 && ibv_get_async_event(s->ctx, &e) == 0)
			ibv_ack_async_event(&e);
	}
	return NULL;
}

static void *visitor(void *arg) /* comes, says something to itself, goes */
{
	(void)arg;
	for (int i = 0; i < 15 && !atomic_load(&stop); i++) {
		struct end e[2];
		struct options o = usual;
		o.len = 4096;
		o.channel = 1;
		pair_open(e, &o);
		CHECK(post_recv(&e[1], 1, 0, 64) == 0);
		CHECK(post(&e[0], IBV_WR_SEND, 2, 0, 64, NULL, 0) == 0);
		expect(&e[1], 1, IBV_WC_SUCCESS);
		expect(&e[0], 2, IBV_WC_SUCCESS);
		pair_close(e);
	}
	return NULL;
}

static void churn(void)
{
	static void *(*const roles[])(void *) = { resize, visitor, events, events };
	static void *const args[] = { NULL, NULL, &side[0], &side[1] };
	pthread_t of_link[LINKS][2], others[4];

	atomic_store(&stop, 0);
	memset(links, 0, sizeof(links));

	for (int s = 0; s < 2; s++)
		open_shared(&side[s]);
	for (int l = 0; l < LINKS; l++) {
		struct link *k = &links[l];
		pthread_mutex_init(&k->lock, NULL);
		pthread_cond_init(&k->cond, NULL);
		for (int n = 0; n < 2; n++) {
			struct end_of *e = &k->end[n];
			*e = (struct end_of){ .in = &side[l == 3 ? 0 : n], .link = l, .number = n, .use_srq = n && (l == 1 || l == 2),
					      .rng = (uint64_t)(l * 2 + n + 1) * 7919 };
			if (n && l == LINKS - 1)
				open_shared(e->in = &e->own);
			CHECK(e->buf = calloc(1, TARGET + SOURCE + LANDING + RESULT));
			make_qp(e);
			register_all(e);
		}
	}
	end_at = seconds() + SECONDS;
	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&others[i], NULL, roles[i], args[i]) == 0);
	for (int l = 0; l < LINKS; l++)
		for (int n = 0; n < 2; n++)
			CHECK(pthread_create(&of_link[l][n], NULL, n ? actor : poster, &links[l]) == 0);
	for (int l = 0; l < LINKS; l++)
		for (int n = 0; n < 2; n++)
			CHECK(pthread_join(of_link[l][n], NULL) == 0);
	atomic_store(&stop, 1);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(others[i], NULL) == 0);
	CHECK(saw_all());
	for (int l = 0; l < LINKS; l++)
		for (int n = 0; n < 2; n++) {
			struct end_of *e = &links[l].end[n];
			CHECK(ibv_destroy_qp(e->qp) == 0 && ibv_dereg_mr(e->mr) == 0);
			if (e->in == &e->own)
				close_shared(&e->own);
		}
	for (int s = 0; s < 2; s++)
		close_shared(&side[s]);
	for (int l = 0; l < LINKS; l++)
		for (int n = 0; n < 2; n++)
			free(links[l].end[n].buf);
}

int main(void)
{
	churn();
	CHECK(setenv("ROCECOMM_SOFT_FAR", "1", 1) == 0); /* as if of two processes */
	churn();
	return 0;
}
