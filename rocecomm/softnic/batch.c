/* Chains of reads, and chains of writes. Each work request is checked as respond.c checks it, and the
 * bytes of many move together: one process_vm call takes 1024 pieces of each side, in order. Whatever
 * breaks a rule or cannot be reached ends the batch before it and goes the usual way, which knows all the
 * errors; so there is nothing here that fails, only what is done and what is left. */
#define _GNU_SOURCE
#include <limits.h>

#include "job.h"

#define PIECES 1024u	    /* the system's IOV_MAX */
#define BYTES (4ULL << 20) /* under one claim: beyond, a call more or less does not matter */

/* The region that the last request used: under the claim it stays where it is. */
struct view {
	uint32_t key;
	bool reached; /* plain memcpy reaches it */
	uint64_t iova, length, host;
	uintptr_t base; /* then: where it begins, seen from here */
};

struct pieces {
	uint32_t num;
	uint64_t end; /* of the last one: what begins there makes it longer */
	struct iovec iov[PIECES];
};

struct batch {
	struct job *j;
	uint32_t opcode, right, need;
	uint32_t done;	  /* requests whose bytes have moved */
	uint32_t waiting; /* requests behind them that are described below */
	uint64_t waiting_bytes, left;
	struct view at_r, at_t;
	struct pieces of_r, of_t;
};

static bool look_up(struct batch *b, struct view *v, const struct sn_side *s, uint32_t key, uint64_t addr, uint64_t length)
{
	struct sn_claim *c = b->j->claim;
	struct sn_piece whole;
	struct sn_mr mr;
	if (v == &b->at_t) {
		if (!sn_mr_claim(c, s, key, b->right, addr, length, &mr))
			return false;
	} else {
		sn_claim_key(c, 0, key);
		if (!sn_mr_covers(s->seg, key, s->qp, b->need, addr, length, &mr))
			return false;
	}
	sn_piece_of(&whole, s, &mr, mr.iova, mr.length);
	*v = (struct view){ .key = key, .iova = mr.iova, .length = mr.length, .host = mr.host };
	if (mr.iova && mr.length > -mr.iova)
		v->length = -mr.iova; /* no address is beyond the last */
	v->reached = !s->peer || whole.ptr;
	v->base = (uintptr_t)whole.ptr;
	return true;
}

static inline bool find(struct batch *b, struct view *v, const struct sn_side *s, uint32_t key, uint64_t addr,
			uint64_t length, struct sn_piece *p)
{
	if (__builtin_expect(key != v->key, 0) && !look_up(b, v, s, key, addr, length))
		return false;
	uint64_t offset = addr - v->iova;
	if (offset > v->length || length > v->length - offset)
		return false;
	p->ptr = v->reached ? (char *)(v->base + offset) : NULL;
	p->addr = v->host + offset;
	p->len = length;
	return true;
}

static inline void append(struct pieces *p, uint64_t at, uint64_t length)
{
	if (p->end == at && p->num)
		p->iov[p->num - 1].iov_len += length;
	else
		p->iov[p->num++] = (struct iovec){ (void *)(uintptr_t)at, length };
	p->end = at + length;
}

/* What waits is moved. False: not all of it; where the first address is bad, its request will tell. */
static bool move(struct batch *b)
{
	struct job *j = b->j;
	bool at_r = !j->r->peer;
	const struct pieces *here = at_r ? &b->of_r : &b->of_t, *there = at_r ? &b->of_t : &b->of_r;
	int pid = (at_r ? j->t : j->r)->seg->pid;
	ssize_t n;
	if (!b->waiting)
		return true;
	do
		n = at_r == is_inbound(b->opcode) ? process_vm_readv(pid, here->iov, here->num, there->iov, there->num, 0)
						  : process_vm_writev(pid, here->iov, here->num, there->iov, there->num, 0);
	while (n < 0 && errno == EINTR);
	bool all = n == (ssize_t)b->waiting_bytes;
	if (all) {
		b->done += b->waiting;
	} else {
		uint32_t head = atomic_load_explicit(&j->r->qp->sq.head, memory_order_relaxed), length;
		for (uint64_t got = n > 0 ? (uint64_t)n : 0;; got -= length, b->done++) {
			length = sn_swqe_at(j->r->seg, &j->r->qp->sq, head + b->done)->length;
			if (length > got)
				break;
		}
	}
	b->of_r.num = b->of_t.num = b->waiting = 0;
	b->waiting_bytes = 0;
	return all;
}

/* The next request: checked, and moved or described. False: it is not for us, or those before it did not
 * all get through. */
static inline bool add(struct batch *b, const struct sn_swqe *w)
{
	struct job *j = b->j;
	struct sn_piece far, near[SN_MAX_SGE];
	uint32_t n = 0, sges = w->flags & IBV_SEND_INLINE ? 0 : w->num_sge, length = w->length;
	bool reached = true;

	if (w->opcode != b->opcode || length - 1 >= SN_BIG - 1 || length > b->left || sges > SN_MAX_SGE)
		return false;
	for (uint32_t i = 0; i < sges; i++) {
		if (!w->sge[i].length)
			continue;
		if (!find(b, &b->at_r, j->r, w->sge[i].lkey, w->sge[i].addr, w->sge[i].length, &near[n]))
			return false;
		reached &= near[n++].ptr != NULL;
	}
	if (!find(b, &b->at_t, j->t, w->rkey, w->remote_addr, length, &far))
		return false;
	if (w->staged) {
		char *data = (char *)(uintptr_t)w + w->data;
		near[0] = (struct sn_piece){ .ptr = data, .addr = (uintptr_t)data, .len = length };
		n = 1;
		reached = true;
	}
	b->left -= length;
	if (reached && far.ptr) {
		if (!move(b))
			return false;
		for (uint32_t i = 0; i < n; far.ptr += near[i++].len)
			memmove(is_inbound(b->opcode) ? near[i].ptr : far.ptr, is_inbound(b->opcode) ? far.ptr : near[i].ptr,
				near[i].len);
		b->done++;
		return true;
	}
	if ((b->of_r.num + n > PIECES || b->of_t.num == PIECES) && !move(b))
		return false;
	append(&b->of_t, far.addr, length);
	for (uint32_t i = 0; i < n; i++)
		append(&b->of_r, near[i].addr, near[i].len);
	b->waiting++;
	b->waiting_bytes += length;
	return true;
}

/* From the head of R's queue on, which lies before `tail`. Returns how many requests have been carried out,
 * all with success. The claim is published, and R's state was looked at since. */
uint32_t sn_batch(struct job *j, uint32_t head, uint32_t tail)
{
	struct sn_qp *r = j->r->qp;
	struct batch b; /* not zeroed as a whole */

	if (sn_staged(j->r) || (j->t && sn_staged(j->t)) || sn_check_peer(j) != DONE || j->status != IBV_WC_SUCCESS)
		return 0;
	b.j = j;
	b.opcode = j->w->opcode;
	b.right = b.opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
	b.need = b.opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0;
	b.at_r.key = b.at_t.key = 0;
	b.at_r.length = b.at_t.length = b.at_r.iova = b.at_t.iova = 0; /* nothing is in key 0 */
	b.done = b.waiting = b.of_r.num = b.of_t.num = 0;
	b.waiting_bytes = 0;
	b.left = BYTES;
	if (!(atomic_load_explicit(&j->t->qp->access, memory_order_relaxed) & b.right) ||
	    (b.opcode == IBV_WR_RDMA_READ && !(r->max_rd_atomic && j->t->qp->max_dest_rd_atomic)))
		return 0;
	sn_place_before(j);
	for (uint32_t pos = head; pos != tail && add(&b, sn_swqe_at(j->r->seg, &r->sq, pos)); pos++)
		;
	move(&b);
	return b.done;
}
