/* Queue pairs made for ibv_wr_*, in the place of a pair's own. */
#ifndef EXTENDED_H
#define EXTENDED_H

#include "pair.h"

#define ALL_OPS                                                                                              \
	(IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |                     \
	 IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |  \
	 IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_BIND_MW |        \
	 IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_ATOMIC_WRITE)

static inline struct ibv_qp *new_qp_ex(struct end *e, const struct options *o, uint64_t ops)
{
	struct ibv_qp_init_attr_ex a = { .send_cq = e->cq, .recv_cq = e->cq, .srq = e->srq, .qp_type = o->type,
					 .cap = { (uint32_t)o->depth, (uint32_t)o->depth, (uint32_t)o->sge,
						  (uint32_t)o->sge, (uint32_t)o->inline_data },
					 .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					 .pd = e->pd, .send_ops_flags = ops };
	return ibv_create_qp_ex(e->ctx, &a);
}

static inline void extended_open(struct end e[2], const struct options *o, uint64_t ops)
{
	for (int i = 0; i < 2; i++) {
		end_open(&e[i], o);
		CHECK(ibv_destroy_qp(e[i].qp) == 0);
		CHECK(e[i].qp = new_qp_ex(&e[i], o, ops));
	}
	for (int i = 0; i < 2; i++)
		CHECK(to_rts(&e[i], e[1 - i].qp->qp_num, o) == 0);
}

static inline struct ibv_qp_ex *begin(struct end *e, uint64_t id, unsigned flags)
{
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(e->qp);
	CHECK(x);
	ibv_wr_start(x);
	x->wr_id = id;
	x->wr_flags = flags;
	return x;
}

#endif
