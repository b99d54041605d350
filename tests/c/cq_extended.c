/* The extended completion queue gives the fields that ibv_poll_cq gives, and the time on two clocks. */
#include "pair.h"

#define FIELDS                                                                                         \
	(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)

static uint64_t wall(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

static uint64_t raw(struct end *e)
{
	struct ibv_values_ex v = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	CHECK(ibv_query_rt_values_ex(e->ctx, &v) == 0 && v.comp_mask == IBV_VALUES_MASK_RAW_CLOCK);
	return (uint64_t)v.raw_clock.tv_sec * 1000000000ULL + (uint64_t)v.raw_clock.tv_nsec;
}

static struct ibv_cq_ex *start(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr none = { 0 };
	double until = seconds() + 10;
	int err;
	while ((err = ibv_start_poll(cq, &none)) == ENOENT)
		CHECK(seconds() < until);
	CHECK(err == 0);
	return cq;
}

int main(void)
{
	struct end e[2];
	struct options o = usual;
	struct ibv_cq_ex *cq[2];
	struct ibv_poll_cq_attr none = { 0 }, odd = { .comp_mask = 1 };

	for (int i = 0; i < 2; i++) {
		end_open(&e[i], &o);
		CHECK(ibv_destroy_qp(e[i].qp) == 0 && ibv_destroy_cq(e[i].cq) == 0);
		struct ibv_cq_init_attr_ex a = { .cqe = 64, .cq_context = e, .wc_flags = FIELDS,
						 .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
						 .flags = i ? IBV_CREATE_CQ_ATTR_SINGLE_THREADED : 0 };
		CHECK(cq[i] = ibv_create_cq_ex(e[i].ctx, &a));
		e[i].cq = ibv_cq_ex_to_cq(cq[i]);
		CHECK(e[i].cq->cqe >= 64 && e[i].cq->cq_context == e);
		struct ibv_qp_init_attr q = { .send_cq = e[i].cq, .recv_cq = e[i].cq, .qp_type = IBV_QPT_RC,
					      .cap = { 16, 16, 4, 4, 0 } };
		CHECK(e[i].qp = ibv_create_qp(e[i].pd, &q));
	}
	CHECK(to_rts(&e[0], e[1].qp->qp_num, &o) == 0 && to_rts(&e[1], e[0].qp->qp_num, &o) == 0);

	CHECK(ibv_start_poll(cq[0], &none) == ENOENT);
	CHECK(ibv_start_poll(cq[0], &odd) == EINVAL);

	uint64_t raw0 = raw(&e[1]), wall0 = wall();
	for (unsigned i = 0; i < 3; i++)
		CHECK(post_recv(&e[1], i, 0, 4096) == 0);
	CHECK(post(&e[0], IBV_WR_SEND_WITH_IMM, 7, 0, 33, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 8, 0, 44, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 9, 0, 55, NULL, 0) == 0);

	struct ibv_cq_ex *c = start(cq[1]);
	CHECK(c->wr_id == 0 && c->status == IBV_WC_SUCCESS && ibv_wc_read_opcode(c) == IBV_WC_RECV);
	CHECK(ibv_wc_read_byte_len(c) == 33 && ibv_wc_read_imm_data(c) == 0x44332211);
	CHECK(ibv_wc_read_wc_flags(c) & IBV_WC_WITH_IMM && ibv_wc_read_qp_num(c) == e[1].qp->qp_num);
	CHECK(ibv_wc_read_src_qp(c) == e[0].qp->qp_num && ibv_wc_read_vendor_err(c) == 0);
	CHECK(ibv_wc_read_slid(c) == 0 && ibv_wc_read_sl(c) == 0 && ibv_wc_read_dlid_path_bits(c) == 0);
	uint64_t t0 = ibv_wc_read_completion_ts(c), w0 = ibv_wc_read_completion_wallclock_ns(c);
	CHECK(ibv_next_poll(c) == 0 && c->wr_id == 1 && ibv_wc_read_byte_len(c) == 44);
	uint64_t t1 = ibv_wc_read_completion_ts(c);
	ibv_end_poll(c);
	CHECK(raw0 <= t0 && t0 <= t1 && t1 <= raw(&e[1]));
	CHECK(wall0 <= w0 + 1000000 && w0 <= wall() + 1000000);

	struct ibv_device_attr_ex d;
	CHECK(ibv_query_device_ex(e[0].ctx, NULL, &d) == 0);
	CHECK(d.hca_core_clock == 1000000 && d.completion_timestamp_mask == UINT64_MAX);

	/* the plain verb works on it too, and start_poll goes on where that stopped */
	expect(&e[1], 2, IBV_WC_SUCCESS);
	CHECK(ibv_start_poll(cq[1], &none) == ENOENT);
	expect(&e[0], 7, IBV_WC_SUCCESS);
	c = start(cq[0]);
	CHECK(c->wr_id == 8 && ibv_wc_read_opcode(c) == IBV_WC_SEND);
	CHECK(ibv_next_poll(c) == 0 && c->wr_id == 9);
	CHECK(ibv_next_poll(c) == ENOENT);
	ibv_end_poll(c);

	/* an error is told in place */
	struct end far = e[1];
	struct ibv_mr nothing = { .rkey = 1 };
	far.mr = &nothing;
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 10, 0, 8, &far, 0) == 0);
	c = start(cq[0]);
	CHECK(c->wr_id == 10 && c->status == IBV_WC_REM_ACCESS_ERR);
	ibv_end_poll(c);

	struct ibv_cq_init_attr_ex bad = { .cqe = 16, .wc_flags = IBV_WC_EX_WITH_TM_INFO };
	CHECK(!ibv_create_cq_ex(e[0].ctx, &bad) && errno == EOPNOTSUPP);
	bad = (struct ibv_cq_init_attr_ex){ .cqe = 0 };
	CHECK(!ibv_create_cq_ex(e[0].ctx, &bad) && errno == EINVAL);
	bad = (struct ibv_cq_init_attr_ex){ .cqe = 16, .comp_mask = 1 << 5 };
	CHECK(!ibv_create_cq_ex(e[0].ctx, &bad) && errno == EOPNOTSUPP);
	pair_close(e);
	return 0;
}
