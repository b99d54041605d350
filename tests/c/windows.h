/* Memory windows: both ends of a pair have regions that windows may be bound to. */
#ifndef WINDOWS_H
#define WINDOWS_H

#include "extended.h"

#define W IBV_ACCESS_REMOTE_WRITE
#define R IBV_ACCESS_REMOTE_READ

static inline void windows_open(struct end e[2], int more_access)
{
	struct options o = usual;
	o.mr_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND | more_access; /* no remote rights of its own */
	o.len = 1 << 16;
	extended_open(e, &o, ALL_OPS);
}

static inline void bind_1(struct end *e, struct ibv_mw *mw, size_t at, size_t len, unsigned access)
{
	struct ibv_mw_bind b = { .wr_id = 500, .send_flags = IBV_SEND_SIGNALED,
				 .bind_info = { .mr = e->mr, .addr = (uintptr_t)e->buf + at, .length = len,
						.mw_access_flags = access } };
	CHECK(ibv_bind_mw(e->qp, mw, &b) == 0);
	struct ibv_wc wc = wait_wc(e);
	CHECK(wc.wr_id == 500 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW);
}

static inline enum ibv_wc_status bind_2(struct end *e, struct ibv_mw *mw, uint32_t rkey, struct ibv_mr *mr, uint64_t addr,
					uint64_t len, unsigned access)
{
	struct ibv_mw_bind_info info = { .mr = mr, .addr = addr, .length = len, .mw_access_flags = access };
	struct ibv_qp_ex *x = begin(e, 501, IBV_SEND_SIGNALED);
	ibv_wr_bind_mw(x, mw, rkey, &info);
	CHECK(ibv_wr_complete(x) == 0);
	struct ibv_wc wc = wait_wc(e);
	CHECK(wc.wr_id == 501 && (wc.status || wc.opcode == IBV_WC_BIND_MW));
	return wc.status;
}

/* One access from `a` through `rkey`; a refusal puts both ends into the error state. */
static inline enum ibv_wc_status access_as(struct end *a, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr, size_t len)
{
	struct ibv_sge s = sge_of(a, 0, len);
	struct ibv_send_wr wr = { .wr_id = 502, .sg_list = &s, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { addr, rkey } }, *bad;
	CHECK(ibv_post_send(a->qp, &wr, &bad) == 0);
	struct ibv_wc wc = wait_wc(a);
	CHECK(wc.wr_id == 502);
	return wc.status;
}

static inline void reconnect(struct end e[2])
{
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	for (int i = 0; i < 2; i++)
		CHECK(ibv_modify_qp(e[i].qp, &reset, IBV_QP_STATE) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(to_rts(&e[i], e[1 - i].qp->qp_num, &usual) == 0);
}

#endif
