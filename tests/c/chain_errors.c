/* One bad request in the middle of a chain of reads or writes: those before it are carried out and, if
 * signaled, complete; it gets its error; those behind it are flushed and touch nothing. Every kind of bad
 * request, at places within and beyond what one system call takes. And a chain that is longer than the
 * send queue: what fits is carried out, the rest is handed back. */
#include <stdbool.h>
#include <sys/mman.h>

#include "pair.h"

enum { CHAIN = 1300, PIECE = 64, LEN = CHAIN * PIECE, PAGE = 4096 };
enum bad { CLOSED_KEY, BEYOND, NO_RIGHT, LOCAL_KEY, LOCAL_BEYOND, LOCAL_RIGHT, TOO_SHORT, QP_RIGHT, NO_PAGE, READ_ONLY, KINDS };

static const char *const name[KINDS] = { "closed key", "out of bounds", "no right", "bad local key", "local out of bounds",
					 "local memory is read-only", "wrong size", "QP without rights",
					 "unmapped page", "read-only page" };

static enum ibv_wc_status status_of(enum bad kind)
{
	switch (kind) {
	case LOCAL_KEY:
	case LOCAL_BEYOND:
	case LOCAL_RIGHT:
		return IBV_WC_LOC_PROT_ERR;
	case TOO_SHORT:
		return IBV_WC_LOC_LEN_ERR;
	case QP_RIGHT:
		return IBV_WC_REM_INV_REQ_ERR;
	case NO_PAGE:
	case READ_ONLY:
		return IBV_WC_REM_OP_ERR;
	default:
		return IBV_WC_REM_ACCESS_ERR;
	}
}

struct keys {
	struct ibv_mr *closed, *no_right, *read_only;
};

static void spoil(struct end e[2], const struct keys *k, enum bad kind, struct ibv_send_wr *wr)
{
	switch (kind) {
	case CLOSED_KEY:
		wr->wr.rdma.rkey ^= 1;
		break;
	case BEYOND:
		wr->wr.rdma.remote_addr = (uintptr_t)e[1].buf + e[1].len - PIECE + 1;
		break;
	case NO_RIGHT:
		wr->wr.rdma.rkey = k->no_right->rkey;
		break;
	case LOCAL_KEY:
		wr->sg_list->lkey ^= 1;
		break;
	case LOCAL_BEYOND:
		wr->sg_list->addr = (uintptr_t)e[0].buf + e[0].len - 1;
		break;
	case LOCAL_RIGHT:
		wr->sg_list->lkey = k->read_only->lkey;
		break;
	case TOO_SHORT: /* an atomic of the wrong size: another kind of request, in the middle */
		wr->opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		wr->wr.atomic.remote_addr = (uintptr_t)e[1].buf;
		wr->wr.atomic.rkey = e[1].mr->rkey;
		break;
	case NO_PAGE:
	case READ_ONLY:
		CHECK(mprotect((void *)((uintptr_t)wr->wr.rdma.remote_addr & ~(uintptr_t)(PAGE - 1)), PAGE,
			       kind == NO_PAGE ? PROT_NONE : PROT_READ) == 0);
		break;
	default:
		break;
	}
}

static void one(struct options o, enum bad kind, bool read, uint32_t at, bool all_signaled)
{
	static struct ibv_send_wr wr[CHAIN];
	static struct ibv_sge sge[CHAIN];
	struct ibv_send_wr *bad;
	struct end e[2];
	struct keys k;
	if (kind == QP_RIGHT) {
		o.qp_access = read ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ;
		at = 0; /* none of them may */
	}
	pair_open(e, &o);
	if (kind == NO_PAGE || kind == READ_ONLY)
		at -= at % (PAGE / PIECE); /* the first one in its page */
	CHECK(k.no_right = ibv_reg_mr(e[1].pd, e[1].buf, LEN, IBV_ACCESS_LOCAL_WRITE));
	CHECK(k.read_only = ibv_reg_mr(e[0].pd, e[0].buf, LEN, 0));
	char *source = read ? e[1].buf : e[0].buf, *sink = read ? e[0].buf : e[1].buf;
	pattern(source, LEN, 5);
	memset(sink, 0x5a, LEN);
	for (uint32_t i = 0; i < CHAIN; i++) {
		sge[i] = sge_of(&e[0], (size_t)i * PIECE, PIECE);
		wr[i] = (struct ibv_send_wr){ .wr_id = i, .sg_list = &sge[i], .num_sge = 1,
					      .opcode = read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
					      .send_flags = all_signaled || i % 7 == 3 ? IBV_SEND_SIGNALED : 0,
					      .next = i + 1 < CHAIN ? &wr[i + 1] : NULL };
		wr[i].wr.rdma.remote_addr = (uintptr_t)e[1].buf + (size_t)i * PIECE;
		wr[i].wr.rdma.rkey = e[1].mr->rkey;
	}
	spoil(e, &k, kind, &wr[at]);
	CHECK(ibv_post_send(e[0].qp, wr, &bad) == 0);
	for (uint32_t i = 0; i < CHAIN; i++) {
		enum ibv_wc_status want = i < at ? IBV_WC_SUCCESS : i == at ? status_of(kind) : IBV_WC_WR_FLUSH_ERR;
		if (i < at && !(wr[i].send_flags & IBV_SEND_SIGNALED))
			continue;
		struct ibv_wc wc = wait_wc(&e[0]);
		if (wc.wr_id != i || wc.status != want) {
			fprintf(stderr, "%s %s at %u: completion of %u has status %d, expected that of %u and %d\n", name[kind],
				read ? "read" : "write", at, (unsigned)wc.wr_id, wc.status, i, want);
			exit(1);
		}
	}
	expect_nothing(&e[0]);
	CHECK(mprotect(e[1].buf, (LEN + PAGE - 1) & ~(PAGE - 1), PROT_READ | PROT_WRITE) == 0);
	CHECK(same(sink, (size_t)at * PIECE, 5));
	for (size_t i = (size_t)at * PIECE; i < LEN; i++)
		CHECK(sink[i] == 0x5a);
	CHECK(ibv_dereg_mr(k.no_right) == 0 && ibv_dereg_mr(k.read_only) == 0);
	pair_close(e);
}

static void too_long(struct options o)
{
	static struct ibv_send_wr wr[100];
	struct ibv_send_wr *bad = NULL;
	struct ibv_sge sge[100];
	struct end e[2];
	o.depth = 64;
	pair_open(e, &o);
	pattern(e[1].buf, 100 * PIECE, 8);
	for (int i = 0; i < 100; i++) {
		sge[i] = sge_of(&e[0], (size_t)i * PIECE, PIECE);
		wr[i] = (struct ibv_send_wr){ .wr_id = (uint64_t)i, .sg_list = &sge[i], .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
					      .send_flags = i == 63 || i == 99 ? IBV_SEND_SIGNALED : 0,
					      .next = i < 99 ? &wr[i + 1] : NULL };
		wr[i].wr.rdma.remote_addr = (uintptr_t)e[1].buf + (size_t)i * PIECE;
		wr[i].wr.rdma.rkey = e[1].mr->rkey;
	}
	CHECK(ibv_post_send(e[0].qp, wr, &bad) == ENOMEM && bad == &wr[64]);
	expect(&e[0], 63, IBV_WC_SUCCESS);
	CHECK(same(e[0].buf, 64 * PIECE, 8) && e[0].buf[64 * PIECE] == 0);
	CHECK(ibv_post_send(e[0].qp, bad, &bad) == 0);
	expect(&e[0], 99, IBV_WC_SUCCESS);
	CHECK(same(e[0].buf, 100 * PIECE, 8));
	pair_close(e);
}

int main(void)
{
	static const uint32_t places[] = { 0, 1, 130, 1024, CHAIN - 1 };
	struct options o = usual;
	o.depth = CHAIN;
	o.cqe = CHAIN + 1;
	o.len = (LEN + PAGE - 1) & ~(size_t)(PAGE - 1);
	const char *staged = getenv("ROCECOMM_SOFT_STAGING");
	for (int far = 0; far < 2; far++) {
		if (far)
			CHECK(setenv("ROCECOMM_SOFT_FAR", "1", 1) == 0); /* as if of two processes */
		for (int kind = 0; kind < KINDS; kind++)
			for (unsigned i = 0; i < sizeof(places) / sizeof(places[0]); i++)
				for (int read = 0; read < 2; read++) {
					if (((kind == NO_PAGE || kind == READ_ONLY) && !far && !staged) || (kind == READ_ONLY && read) ||
					    (kind == LOCAL_RIGHT && !read))
						continue; /* a copy within one process would be a signal; reading is no error */
					one(o, (enum bad)kind, read, places[i], i % 2);
				}
		too_long(o);
	}
	return 0;
}
