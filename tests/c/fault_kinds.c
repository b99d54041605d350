/* What each kind of fault does to a work request of an RC queue pair, and to what is behind it. */
#include "fault.h"

static struct options o;
static struct end e[2];

static void delay(void)
{
	pair_open(e, &o);
	uint64_t id = inject(&e[0], "delay:ms=60,times=1");
	double start = seconds();
	CHECK(post_recv(&e[1], 10, 0, 64) == 0);
	pattern(e[0].buf, 64, 5);
	CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 64, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 2, 0, 64, &e[1], 4096) == 0); /* waits behind it */
	expect_nothing(&e[1]);
	CHECK(e[1].buf[4096] == 0 || seconds() - start > 0.06);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	CHECK(seconds() - start >= 0.06);
	expect(&e[0], 2, IBV_WC_SUCCESS);
	expect(&e[1], 10, IBV_WC_SUCCESS);
	CHECK(same(e[1].buf, 64, 5) && same(e[1].buf + 4096, 64, 5));
	uninject(id, 2, 1);
	pair_close(e);
}

static void drop(void)
{
	o.timeout = 12; /* 16.8 ms */
	o.retry_cnt = 2;
	pair_open(e, &o);
	inject(&e[0], "drop:after=1");
	double start = seconds();
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 2, 0, 8, &e[1], 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_READ, 3, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 2, IBV_WC_RETRY_EXC_ERR);
	CHECK(seconds() - start > 3 * 0.0167);
	expect(&e[0], 3, IBV_WC_WR_FLUSH_ERR);
	CHECK(state_of(&e[0]) == IBV_QPS_ERR);
	CHECK(state_of(&e[1]) == IBV_QPS_RTS); /* it knows nothing of what was lost */
	pair_close(e); /* takes the context's rules along */

	pair_open(e, &o); /* lost twice of three times: it arrives in the end */
	uint64_t id = inject(&e[0], "drop:lost=2");
	start = seconds();
	e[0].buf[0] = 9;
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	CHECK(seconds() - start > 2 * 0.0167 && e[1].buf[0] == 9);
	uninject(id, 1, 1);
	id = inject(&e[0], "drop:lost=3"); /* one too many */
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 2, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 2, IBV_WC_RETRY_EXC_ERR);
	uninject(id, 1, 1);
	pair_close(e);

	o.timeout = 0; /* waits for ever, as on a NIC; here: until the rule goes */
	pair_open(e, &o);
	id = inject(&e[0], "drop");
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	usleep(50000);
	expect_nothing(&e[0]);
	uninject(id, 1, 1);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	pair_close(e);
	o = usual;
}

static void rnr(void)
{
	o.rnr_retry = 3;
	o.min_rnr_timer = 20; /* 10.24 ms */
	pair_open(e, &o);
	uint64_t id = inject(&e[0], "rnr:ms=15");
	double start = seconds();
	CHECK(post_recv(&e[1], 10, 0, 64) == 0);
	CHECK(post_recv(&e[1], 11, 0, 64) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0); /* needs no receive */
	expect(&e[0], 1, IBV_WC_SUCCESS);
	CHECK(post(&e[0], IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0);
	expect(&e[0], 2, IBV_WC_SUCCESS);
	expect(&e[1], 10, IBV_WC_SUCCESS);
	CHECK(seconds() - start > 0.015);
	uninject(id, 1, 1);
	id = inject(&e[0], "rnr");
	start = seconds();
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE_WITH_IMM, 3, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 3, IBV_WC_RNR_RETRY_EXC_ERR);
	CHECK(seconds() - start > 3 * 0.01);
	uninject(id, 1, 1);
	pair_close(e);

	o.rnr_retry = 7; /* for ever, until the rule goes */
	pair_open(e, &o);
	id = inject(&e[0], "rnr");
	CHECK(post_recv(&e[1], 10, 0, 64) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	expect_nothing(&e[0]);
	uninject(id, 1, 1);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect(&e[1], 10, IBV_WC_SUCCESS);
	pair_close(e);
	o = usual;
}

static void remote(const char *rule, enum ibv_wc_status status, enum ibv_event_type event)
{
	pair_open(e, &o);
	uint64_t id = inject(&e[0], rule);
	CHECK(post_recv(&e[1], 10, 0, 64) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 1, status);
	CHECK(state_of(&e[0]) == IBV_QPS_ERR && state_of(&e[1]) == IBV_QPS_ERR);
	struct ibv_async_event got = next_event(&e[1]); /* the responder hears of it too */
	CHECK(got.event_type == event && got.element.qp == e[1].qp);
	expect(&e[1], 10, IBV_WC_WR_FLUSH_ERR);
	uninject(id, 1, 1);
	pair_close(e);
}

/* Every status there is, by the name of its enumerator. */
static void statuses(void)
{
	for (int s = IBV_WC_LOC_LEN_ERR; s <= IBV_WC_TM_RNDV_INCOMPLETE; s++) {
		static const char *const names[] = {
			"", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR",
			"BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR",
			"RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR",
			"INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR", "TM_ERR", "TM_RNDV_INCOMPLETE" };
		char rule[64];
		pair_open(e, &o);
		snprintf(rule, sizeof(rule), "IBV_WC_%s:after=1", names[s]);
		uint64_t id = inject(&e[0], rule);
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 2, 0, 8, &e[1], 0) == 0);
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 3, 0, 8, &e[1], 0) == 0);
		expect(&e[0], 1, IBV_WC_SUCCESS);
		expect(&e[0], 2, s);
		expect(&e[0], 3, IBV_WC_WR_FLUSH_ERR);
		uninject(id, 2, 1);
		pair_close(e);
	}
}

/* At the receiver: the data came, the completion says something else. */
static void receives(void)
{
	pair_open(e, &o);
	uint64_t id = inject(&e[1], "loc_access_err:op=recv,after=1");
	for (unsigned i = 0; i < 3; i++)
		CHECK(post_recv(&e[1], 10 + i, 64 * i, 64) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0);
	expect(&e[1], 10, IBV_WC_SUCCESS);
	expect(&e[1], 11, IBV_WC_LOC_ACCESS_ERR);
	expect(&e[1], 12, IBV_WC_WR_FLUSH_ERR);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect(&e[0], 2, IBV_WC_SUCCESS);
	CHECK(post(&e[0], IBV_WR_SEND, 3, 0, 8, NULL, 0) == 0);
	expect(&e[0], 3, IBV_WC_RETRY_EXC_ERR);
	uninject(id, 2, 1);
	pair_close(e);
}

static void death(void)
{
	o.timeout = 20; /* 8 x 4.3 s: a death is not waited for */
	pair_open(e, &o);
	uint64_t id = inject(&e[0], "peer_death:after=1");
	CHECK(post_recv(&e[0], 9, 0, 64) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 2, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 2, IBV_WC_RETRY_EXC_ERR);
	expect(&e[0], 9, IBV_WC_WR_FLUSH_ERR);
	uninject(id, 2, 1);
	/* a new connection to the same context meets the dead as well, with no rule left */
	CHECK(ibv_modify_qp(e[0].qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_RESET }, IBV_QP_STATE) == 0);
	CHECK(ibv_modify_qp(e[1].qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_RESET }, IBV_QP_STATE) == 0);
	CHECK(to_rts(&e[0], e[1].qp->qp_num, &o) == 0 && to_rts(&e[1], e[0].qp->qp_num, &o) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 3, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 3, IBV_WC_RETRY_EXC_ERR);
	pair_close(e);

	pair_open(e, &o); /* outstanding work is hit too; the other side lives */
	CHECK(post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	expect_nothing(&e[0]);
	CHECK(softnic_peer_death(e[0].qp) == 0);
	expect(&e[0], 1, IBV_WC_RETRY_EXC_ERR);
	CHECK(state_of(&e[1]) == IBV_QPS_RTS);
	pair_close(e);
	o = usual;
}

static void cq_overrun(void)
{
	struct ibv_wc wc;
	pair_open(e, &o);
	uint64_t id = inject(&e[0], "cq_overrun:after=1");
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 2, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	CHECK(ibv_poll_cq(e[0].cq, 1, &wc) < 0);
	struct ibv_async_event got = next_event(&e[0]);
	CHECK(got.event_type == IBV_EVENT_CQ_ERR && got.element.cq == e[0].cq);
	got = next_event(&e[0]);
	CHECK(got.event_type == IBV_EVENT_QP_FATAL && got.element.qp == e[0].qp);
	CHECK(state_of(&e[0]) == IBV_QPS_ERR);
	uninject(id, 2, 1);
	pair_close(e);

	pair_open(e, &o);
	CHECK(softnic_cq_overrun(e[1].cq) == 0);
	got = next_event(&e[1]);
	CHECK(got.event_type == IBV_EVENT_CQ_ERR && got.element.cq == e[1].cq);
	got = next_event(&e[1]);
	CHECK(got.event_type == IBV_EVENT_QP_FATAL && got.element.qp == e[1].qp);
	CHECK(ibv_poll_cq(e[1].cq, 1, &wc) < 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 1, IBV_WC_RETRY_EXC_ERR); /* its queue pair is in error */
	pair_close(e);
}

int main(void)
{
	o = usual;
	delay();
	drop();
	rnr();
	remote("access:times=1", IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
	remote("rem_inv_req_err", IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
	remote("rem_op_err", IBV_WC_REM_OP_ERR, IBV_EVENT_QP_FATAL);
	statuses();
	receives();
	death();
	cq_overrun();
	return 0;
}
