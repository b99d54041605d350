/* Thread domains and parent domains: a parent domain stands for its protection domain, and holds it. */
#include "pair.h"

static void *no_alloc(struct ibv_pd *pd, void *arg, size_t size, size_t align, uint64_t type)
{
	(void)pd, (void)arg, (void)size, (void)align, (void)type;
	return IBV_ALLOCATOR_USE_DEFAULT;
}

static void no_free(struct ibv_pd *pd, void *arg, void *ptr, uint64_t type)
{
	(void)pd, (void)arg, (void)ptr, (void)type;
}

int main(void)
{
	struct end e[2], *a = &e[0], *b = &e[1];
	struct options o = usual;
	pair_open(e, &o);
	struct ibv_td_init_attr t = { 0 }, odd = { .comp_mask = 1 };
	struct ibv_td *td = ibv_alloc_td(b->ctx, &t);
	CHECK(td && td->context == b->ctx);
	CHECK(!ibv_alloc_td(b->ctx, &odd) && errno == EINVAL);
	struct ibv_parent_domain_init_attr p = { .pd = b->pd, .td = td, .alloc = no_alloc, .free = no_free, .pd_context = e,
						 .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS |
							      IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT };
	struct ibv_pd *parent = ibv_alloc_parent_domain(b->ctx, &p);
	CHECK(parent && parent->handle == b->pd->handle);

	struct ibv_parent_domain_init_attr bad = p;
	bad.comp_mask = 1 << 5;
	CHECK(!ibv_alloc_parent_domain(b->ctx, &bad) && errno == EINVAL);
	bad = p;
	bad.pd = NULL;
	CHECK(!ibv_alloc_parent_domain(b->ctx, &bad) && errno == EINVAL);
	bad.pd = parent;
	CHECK(!ibv_alloc_parent_domain(b->ctx, &bad) && errno == EINVAL); /* not of a parent domain */
	bad.pd = a->pd;
	CHECK(!ibv_alloc_parent_domain(b->ctx, &bad) && errno == EINVAL); /* of another context */

	/* regions of one are good for queue pairs of the other */
	struct ibv_cq_init_attr_ex ca = { .cqe = 16, .wc_flags = IBV_WC_EX_WITH_QP_NUM, .parent_domain = parent,
					  .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD };
	struct ibv_cq *cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(b->ctx, &ca));
	CHECK(cq);
	struct end near = *a, far = *b;
	struct ibv_qp_init_attr q = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	CHECK(far.qp = ibv_create_qp(parent, &q));
	far.cq = cq;
	q.send_cq = q.recv_cq = a->cq;
	CHECK(near.qp = ibv_create_qp(a->pd, &q));
	CHECK(to_rts(&far, near.qp->qp_num, &o) == 0 && to_rts(&near, far.qp->qp_num, &o) == 0);
	CHECK(post_recv(&far, 5, 0, 64) == 0 && post(&near, IBV_WR_SEND, 6, 0, 64, NULL, 0) == 0);
	expect(&near, 6, IBV_WC_SUCCESS);
	expect(&far, 5, IBV_WC_SUCCESS);
	CHECK(ibv_dealloc_td(td) == EBUSY && ibv_dealloc_pd(parent) == EBUSY && ibv_dealloc_pd(b->pd) == EBUSY);
	CHECK(ibv_destroy_qp(near.qp) == 0 && ibv_destroy_qp(far.qp) == 0 && ibv_destroy_cq(cq) == 0);
	CHECK(ibv_dealloc_td(td) == EBUSY);
	CHECK(ibv_dealloc_pd(parent) == 0 && ibv_dealloc_td(td) == 0);
	pair_close(e);
	return 0;
}
