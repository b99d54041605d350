/* Two CPUs, one message. A big transfer is cut into chunks that either end takes from a shared
 * counter: its executor, and the other end's process wherever that polls anyway. The executor returns
 * when every chunk that was taken is done, so a helper that is stopped in the middle of one is an
 * error within the deadline, and the helper's claim keeps both memories until it lets go. */
#define _GNU_SOURCE
#include <sched.h>

#include "job.h"

static int slice(const struct sn_piece *from, int num, uint64_t at, uint64_t len, struct sn_piece *to)
{
	int n = 0;
	for (int i = 0; i < num && len; i++) {
		if (at >= from[i].len) {
			at -= from[i].len;
			continue;
		}
		uint64_t part = from[i].len - at < len ? from[i].len - at : len;
		to[n++] = (struct sn_piece){ from[i].ptr ? from[i].ptr + at : NULL, from[i].addr + at, part };
		len -= part;
		at = 0;
	}
	return n;
}

/* `num` chunks. `near` is memory of this process, `far` of the other end. */
static enum sn_copy_result move(struct sn_ctx *ctx, const struct sn_side *other, bool write, const struct sn_piece *near, int num_near,
				const struct sn_piece *far, int num_far, int64_t chunk, uint32_t num, uint64_t length)
{
	struct sn_piece a[SN_MAX_SGE + 1], b[SN_MAX_SGE + 1];
	uint64_t at = (uint64_t)chunk * SN_CHUNK, most = (uint64_t)num * SN_CHUNK;
	uint64_t len = length - at < most ? length - at : most;
	int na = slice(near, num_near, at, len, a), nb = slice(far, num_far, at, len, b);
	return sn_copy(ctx, other, write, a, na, b, nb, len);
}

/* The next chunks of transfer number `serial`: the first one's index and how many, or -1 when all are
 * taken. A quarter of what is left, since a system call costs some microseconds (with SN_RUN at
 * once 16 MiB take 15 % less time than chunk by chunk), and few at the end, so that neither waits long. */
static int64_t take_chunks(struct sn_help *h, uint32_t serial, uint32_t *num)
{
	uint64_t ticket = atomic_load(&h->ticket);
	while ((uint32_t)(ticket >> 32) == serial && (uint32_t)ticket < h->chunks) {
		uint32_t part = (h->chunks - (uint32_t)ticket) / 4;
		*num = part < 1 ? 1 : part < SN_RUN ? part : SN_RUN;
		if (atomic_compare_exchange_weak(&h->ticket, &ticket, ticket + *num))
			return (int64_t)(uint32_t)ticket;
	}
	return -1;
}

/* Asks the process at `side` for help with a transfer to or from its QP. Returns the number of the
 * call, or -1: it has too many already. */
static int call(const struct sn_side *side)
{
	for (int i = 0; i < SN_CALLS; i++) {
		uint32_t nobody = 0;
		if (atomic_compare_exchange_strong(&side->seg->call[i], &nobody, side->qp->qpn)) {
			atomic_fetch_or(&side->seg->calls, 1u << i);
			return i;
		}
	}
	return -1;
}

static void hang_up(struct sn_seg *seg, int i, uint32_t qpn)
{
	atomic_fetch_and(&seg->calls, ~(1u << i));
	atomic_compare_exchange_strong(&seg->call[i], &qpn, 0);
}

static bool wait_done(const struct sn_side *other, struct sn_help *h, uint32_t taken)
{
	uint64_t start = 0;
	for (uint32_t tries = 0; atomic_load_explicit(&h->done, memory_order_acquire) < taken; tries++) {
		if (tries < 1000) {
			sn_pause();
			continue;
		}
		sched_yield();
		uint64_t now = sn_now();
		if (!start)
			start = now;
		if (sn_peer_dead(other->peer, now) || now - start > SN_LOCK_WAIT_NS)
			return false;
	}
	return true;
}

/* The executor's part. `near` and `far` as for sn_copy. */
enum sn_copy_result sn_copy_together(struct job *j, const struct sn_side *other, bool write, const struct sn_piece *near,
				     int num_near, const struct sn_piece *far, int num_far, uint64_t length)
{
	struct sn_help *h = &j->r->qp->sq.help;
	uint32_t serial = ++h->serial ? h->serial : ++h->serial;
	enum sn_copy_result r = SN_COPY_OK;
	uint32_t num;
	int64_t i;

	h->chunks = (uint32_t)((length + SN_CHUNK - 1) / SN_CHUNK);
	h->length = length;
	h->item = j->item;
	atomic_store_explicit(&h->done, 0, memory_order_relaxed);
	atomic_store_explicit(&h->failed, 0, memory_order_relaxed);
	atomic_store(&h->ticket, (uint64_t)serial << 32);
	int number = call(other);
	while (r == SN_COPY_OK && (i = take_chunks(h, serial, &num)) >= 0) {
		r = move(j->ctx, other, write, near, num_near, far, num_far, i, num, length);
		atomic_fetch_add_explicit(&h->done, num, memory_order_relaxed);
	}
	if (number >= 0)
		hang_up(other->seg, number, other->qp->qpn);
	uint32_t taken = (uint32_t)atomic_exchange(&h->ticket, 0); /* nothing more is taken from here on */
	if (!wait_done(other, h, taken))
		return SN_COPY_DEAD;
	return r == SN_COPY_OK && atomic_load(&h->failed) ? SN_COPY_FAULT : r;
}

/* Checks one end's elements, which hold `length` bytes at least, and describes them. */
static bool describe(struct sn_claim *c, int side, const struct sn_side *s, const struct sn_sge *sge, uint32_t num,
		     uint32_t need, uint64_t length, struct sn_piece *p, int *n)
{
	struct sn_mr mr;
	uint64_t room = 0;
	*n = 0;
	if (num > SN_MAX_SGE)
		return false;
	for (uint32_t i = 0; i < num; i++)
		if (sge[i].length)
			sn_claim_key(c, side, sge[i].lkey);
	for (uint32_t i = 0; i < num; i++) {
		struct sn_sge e = sge[i];
		if (!e.length)
			continue;
		if (!sn_mr_covers(s->seg, e.lkey, s->qp, need, e.addr, e.length, &mr))
			return false;
		if (mr.window && !sn_mr_claim(c, s, e.lkey, need, e.addr, e.length, &mr))
			return false;
		sn_piece_of(&p[(*n)++], s, &mr, e.addr, e.length);
		room += e.length;
	}
	return room >= length;
}

/* Some chunks of the transfer at the head of R's queue, in the process of whichever end does not
 * execute it. While one is ours its executor waits for it, so what describes the transfer stands
 * still; keys are looked at before one is taken, since afterwards there is no way back. */
static bool help_with(struct sn_ctx *ctx, const struct sn_side *r, const struct sn_side *t)
{
	struct sn_help *h = &r->qp->sq.help;
	const struct sn_side *other = r->peer ? r : t;
	struct sn_piece at_r[SN_MAX_SGE], at_t[SN_MAX_SGE];
	int num_r, num_t;
	uint32_t num = 0;
	int64_t i = -1;
	uint64_t ticket = atomic_load(&h->ticket);
	uint32_t serial = (uint32_t)(ticket >> 32);

	if (!serial || (uint32_t)ticket >= h->chunks || sn_staged(other)) /* one who cannot reach it is no help */
		return false;
	struct sn_claim *c = sn_claim_begin(ctx, r, t);
	sn_claim_publish();
	/* after the claim, as its executor did: whoever changes a state waits for the claims it finds */
	if ((uint32_t)(atomic_load(&h->ticket) >> 32) == serial && r->qp->dest_qpn == t->qp->qpn &&
	    t->qp->dest_qpn == r->qp->qpn && atomic_load(&r->qp->state) == IBV_QPS_RTS &&
	    can_receive(atomic_load(&t->qp->state))) {
		struct sn_swqe *w = sn_swqe_at(r->seg, &r->qp->sq, atomic_load(&r->qp->sq.head));
		bool send = is_send(w->opcode);
		bool in = is_inbound(w->opcode), to_other = (r->peer != NULL) == in;
		struct sn_sge whole = { w->remote_addr, w->length, w->rkey };
		struct sn_rq *rq = sn_rq_of(t->seg, t->qp);
		uint32_t item = h->item;
		struct sn_rwqe *rw = send && item < rq->size ? sn_rwqe_at(t->seg, rq, item) : NULL;
		uint32_t right = send ? IBV_ACCESS_LOCAL_WRITE : in ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
		uint64_t length = h->length;

		if (describe(c, 0, r, w->sge, w->num_sge, in ? IBV_ACCESS_LOCAL_WRITE : 0, length, at_r, &num_r) &&
		    describe(c, 1, t, rw ? rw->sge : &whole, rw ? rw->num_sge : 1, right, length, at_t, &num_t))
			i = take_chunks(h, serial, &num);
		if (i >= 0) {
			bool at_home = !r->peer;
			if (move(ctx, other, to_other, at_home ? at_r : at_t, at_home ? num_r : num_t, at_home ? at_t : at_r,
				 at_home ? num_t : num_r, i, num, length) != SN_COPY_OK)
				atomic_store(&h->failed, 1);
			atomic_fetch_add_explicit(&h->done, num, memory_order_release);
		}
	}
	sn_claim_end(c);
	return i >= 0;
}

/* From a poll that found nothing: some chunks of what this process was called for. */
bool sn_help_peers(struct sn_ctx *ctx)
{
	bool helped = false;
	for (uint32_t calls = atomic_load(&ctx->seg->calls); calls; calls &= calls - 1) {
		int i = __builtin_ctz(calls);
		uint32_t qpn = atomic_load(&ctx->seg->call[i]);
		struct sn_side own = { ctx->seg, sn_qp_at(ctx->seg, qpn & (SN_QPS - 1)), NULL }, other;
		struct sn_peer *_Atomic found = NULL;
		if (!qpn)
			continue;
		if (!sn_side_of(ctx, own.qp->dest_qpn, &found, &other) || !other.peer ||
		    sn_peer_dead(other.peer, sn_now_coarse())) {
			hang_up(ctx->seg, i, qpn); /* whoever called is gone */
			continue;
		}
		helped |= help_with(ctx, &own, &other) || help_with(ctx, &other, &own);
	}
	return helped;
}
