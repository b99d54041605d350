/* What a responder must refuse, with the status that the requester gets and the memory intact. */
#include "pair.h"

struct refusal {
	const char *name;
	enum ibv_wr_opcode opcode;
	int mr_access, qp_access;
	long key_change; /* added to the rkey */
	long at;	 /* remote offset */
	size_t len;
	enum ibv_wc_status status;
};

#define W IBV_ACCESS_REMOTE_WRITE
#define R IBV_ACCESS_REMOTE_READ
#define A IBV_ACCESS_REMOTE_ATOMIC
#define L IBV_ACCESS_LOCAL_WRITE

static const struct refusal table[] = {
	{ "unknown key", IBV_WR_RDMA_WRITE, ALL_ACCESS, ALL_ACCESS, 1, 0, 8, IBV_WC_REM_ACCESS_ERR },
	{ "unknown index", IBV_WR_RDMA_WRITE, ALL_ACCESS, ALL_ACCESS, 1 << 24, 0, 8, IBV_WC_REM_ACCESS_ERR },
	{ "past the end", IBV_WR_RDMA_WRITE, ALL_ACCESS, ALL_ACCESS, 0, 4092, 8, IBV_WC_REM_ACCESS_ERR },
	{ "before the start", IBV_WR_RDMA_READ, ALL_ACCESS, ALL_ACCESS, 0, -8, 8, IBV_WC_REM_ACCESS_ERR },
	{ "wrapping", IBV_WR_RDMA_READ, ALL_ACCESS, ALL_ACCESS, 0, 1L << 62, 8, IBV_WC_REM_ACCESS_ERR },
	{ "no remote write", IBV_WR_RDMA_WRITE, L | R | A, ALL_ACCESS, 0, 0, 8, IBV_WC_REM_ACCESS_ERR },
	{ "no remote read", IBV_WR_RDMA_READ, L | W | A, ALL_ACCESS, 0, 0, 8, IBV_WC_REM_ACCESS_ERR },
	{ "no remote atomic", IBV_WR_ATOMIC_FETCH_AND_ADD, L | R | W, ALL_ACCESS, 0, 0, 8, IBV_WC_REM_ACCESS_ERR },
	{ "QP without write", IBV_WR_RDMA_WRITE, ALL_ACCESS, R | A, 0, 0, 8, IBV_WC_REM_INV_REQ_ERR },
	{ "QP without read", IBV_WR_RDMA_READ, ALL_ACCESS, W | A, 0, 0, 8, IBV_WC_REM_INV_REQ_ERR },
	{ "QP without atomics", IBV_WR_ATOMIC_CMP_AND_SWP, ALL_ACCESS, W | R, 0, 0, 8, IBV_WC_REM_INV_REQ_ERR },
	{ "unaligned atomic", IBV_WR_ATOMIC_FETCH_AND_ADD, ALL_ACCESS, ALL_ACCESS, 0, 4, 8, IBV_WC_REM_INV_REQ_ERR },
};

int main(void)
{
	for (unsigned i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		const struct refusal *t = &table[i];
		struct options o = usual;
		struct end e[2];
		o.mr_access = t->mr_access;
		o.qp_access = t->qp_access;
		o.len = 4096;
		pair_open(e, &o);
		memset(e[1].buf, 0xaa, 4096);
		struct ibv_sge s = { (uintptr_t)e[0].buf, (uint32_t)t->len, e[0].mr->lkey };
		struct ibv_send_wr wr = { .wr_id = 9, .sg_list = &s, .num_sge = 1, .opcode = t->opcode }, *bad;
		if (t->opcode == IBV_WR_RDMA_WRITE || t->opcode == IBV_WR_RDMA_READ) {
			wr.wr.rdma.remote_addr = (uintptr_t)e[1].buf + (uintptr_t)t->at;
			wr.wr.rdma.rkey = e[1].mr->rkey + (uint32_t)t->key_change;
		} else {
			wr.wr.atomic.remote_addr = (uintptr_t)e[1].buf + (uintptr_t)t->at;
			wr.wr.atomic.rkey = e[1].mr->rkey;
			wr.wr.atomic.compare_add = 1;
		}
		CHECK(post_recv(&e[1], 77, 0, 8) == 0);
		CHECK(ibv_post_send(e[0].qp, &wr, &bad) == 0); /* unsignaled: an error is told all the same */
		struct ibv_wc wc = wait_wc(&e[0]);
		if (wc.status != t->status || wc.wr_id != 9) {
			fprintf(stderr, "%s: status %d, expected %d\n", t->name, wc.status, t->status);
			return 1;
		}
		expect(&e[1], 77, IBV_WC_WR_FLUSH_ERR); /* the responder's QP went to the error state */
		for (int b = 0; b < 4096; b++)
			CHECK((unsigned char)e[1].buf[b] == 0xaa);
		struct ibv_qp_attr a;
		struct ibv_qp_init_attr init;
		CHECK(ibv_query_qp(e[0].qp, &a, IBV_QP_STATE, &init) == 0 && a.qp_state == IBV_QPS_ERR);
		CHECK(ibv_query_qp(e[1].qp, &a, IBV_QP_STATE, &init) == 0 && a.qp_state == IBV_QPS_ERR);
		pair_close(e);
	}
	return 0;
}
