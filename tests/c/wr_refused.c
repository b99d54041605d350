/* ibv_wr_*: an error anywhere between start and complete posts nothing, abort leaves nothing, and what
 * the device cannot do is refused at creation instead of being a call through a null pointer. */
#include "extended.h"

static void still_works(struct end *a, struct end *b)
{
	struct ibv_qp_ex *x = begin(a, 99, IBV_SEND_SIGNALED);
	expect_nothing(a);
	ibv_wr_rdma_write(x, b->mr->rkey, (uintptr_t)b->buf);
	ibv_wr_set_inline_data(x, "ok", 2);
	CHECK(ibv_wr_complete(x) == 0);
	expect(a, 99, IBV_WC_SUCCESS);
	CHECK(memcmp(b->buf, "ok", 2) == 0);
	b->buf[0] = 0;
}

int main(void)
{
	struct end e[2], *a = &e[0], *b = &e[1];
	struct ibv_sge many[40];
	static char big[256];
	struct ibv_qp_ex *x;
	struct options o = usual;

	o.depth = 4;
	extended_open(e, &o, ALL_OPS);
	uint64_t far = (uintptr_t)b->buf;
	for (int i = 0; i < 40; i++)
		many[i] = sge_of(a, 0, 8);

	/* a good one before the bad one is not posted either */
	x = begin(a, 1, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write(x, b->mr->rkey, far);
	ibv_wr_set_inline_data(x, "no", 2);
	ibv_wr_rdma_write(x, b->mr->rkey, far + 8);
	ibv_wr_set_sge_list(x, 5, many);
	CHECK(ibv_wr_complete(x) == EINVAL);
	CHECK(b->buf[0] == 0);
	still_works(a, b);

	x = begin(a, 2, IBV_SEND_SIGNALED); /* more inline data than the queue takes */
	ibv_wr_rdma_write(x, b->mr->rkey, far);
	ibv_wr_set_inline_data(x, big, 65);
	CHECK(ibv_wr_complete(x) == EINVAL);
	x = begin(a, 3, IBV_SEND_SIGNALED); /* a list whose sum is too long */
	struct ibv_data_buf two[2] = { { big, 64 }, { big, 1 } };
	ibv_wr_rdma_write(x, b->mr->rkey, far);
	ibv_wr_set_inline_data_list(x, 2, two);
	CHECK(ibv_wr_complete(x) == EINVAL);
	x = begin(a, 4, IBV_SEND_SIGNALED); /* a read has no inline data */
	ibv_wr_rdma_read(x, b->mr->rkey, far);
	ibv_wr_set_inline_data(x, big, 8);
	CHECK(ibv_wr_complete(x) == EINVAL);
	x = begin(a, 5, IBV_SEND_SIGNALED); /* more requests than the queue holds */
	for (int i = 0; i < 5; i++) {
		ibv_wr_rdma_write(x, b->mr->rkey, far);
		ibv_wr_set_sge(x, a->mr->lkey, (uintptr_t)a->buf, 8);
	}
	CHECK(ibv_wr_complete(x) == ENOMEM);
	still_works(a, b);

	/* four posts that are given up, as often as you like */
	for (int i = 0; i < 100; i++) {
		x = begin(a, 6, IBV_SEND_SIGNALED);
		ibv_wr_rdma_write(x, b->mr->rkey, far);
		ibv_wr_set_inline_data(x, "no", 2);
		ibv_wr_abort(x);
	}
	CHECK(b->buf[0] == 0);
	still_works(a, b);

	/* not in this state */
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	CHECK(ibv_modify_qp(a->qp, &reset, IBV_QP_STATE) == 0);
	x = begin(a, 7, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write(x, b->mr->rkey, far);
	CHECK(ibv_wr_complete(x) == EINVAL);

	/* creation */
	CHECK(!new_qp_ex(a, &usual, IBV_QP_EX_WITH_TSO) && errno == EOPNOTSUPP);
	CHECK(!new_qp_ex(a, &usual, 1ULL << 40) && errno == EOPNOTSUPP);
	struct options ud = usual;
	ud.type = IBV_QPT_UD;
	CHECK(!new_qp_ex(a, &ud, IBV_QP_EX_WITH_RDMA_WRITE) && errno == EOPNOTSUPP);
	struct ibv_qp_init_attr_ex odd = { .send_cq = a->cq, .recv_cq = a->cq, .qp_type = IBV_QPT_RC, .pd = a->pd,
					   .cap = { 1, 1, 1, 1, 0 },
					   .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_MAX_TSO_HEADER };
	CHECK(!ibv_create_qp_ex(a->ctx, &odd) && errno == EOPNOTSUPP);
	odd.comp_mask = IBV_QP_INIT_ATTR_SEND_OPS_FLAGS; /* and no domain */
	CHECK(!ibv_create_qp_ex(a->ctx, &odd) && errno == EINVAL);
	odd.comp_mask = IBV_QP_INIT_ATTR_PD;
	struct ibv_qp *plain = ibv_create_qp_ex(a->ctx, &odd);
	CHECK(plain && !ibv_qp_to_qp_ex(plain) && ibv_destroy_qp(plain) == 0);
	pair_close(e);
	return 0;
}
