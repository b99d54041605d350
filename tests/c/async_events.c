/* Asynchronous events: which come, for which object, once each; and that destroying waits for the ack. */
#include <fcntl.h>
#include <pthread.h>

#include "pair.h"

static struct ibv_async_event next(struct end *e)
{
	struct ibv_async_event event;
	struct pollfd p = { .fd = e->ctx->async_fd, .events = POLLIN };
	CHECK(poll(&p, 1, 10000) == 1);
	CHECK(ibv_get_async_event(e->ctx, &event) == 0);
	return event;
}

static void expect_event(struct end *e, enum ibv_event_type type, void *element)
{
	struct ibv_async_event event = next(e);
	if (event.event_type != type || event.element.qp != element) {
		fprintf(stderr, "expected event %d, got %d\n", type, event.event_type);
		exit(1);
	}
	ibv_ack_async_event(&event);
}

static void no_event(struct end *e)
{
	struct pollfd p = { .fd = e->ctx->async_fd, .events = POLLIN };
	struct ibv_async_event event;
	CHECK(poll(&p, 1, 0) == 0);
	int flags = fcntl(e->ctx->async_fd, F_GETFL);
	CHECK(fcntl(e->ctx->async_fd, F_SETFL, flags | O_NONBLOCK) == 0);
	CHECK(ibv_get_async_event(e->ctx, &event) == -1 && errno == EAGAIN);
	CHECK(fcntl(e->ctx->async_fd, F_SETFL, flags) == 0);
}

static void set_state(struct end *e, enum ibv_qp_state state, int mask)
{
	struct ibv_qp_attr a = { .qp_state = state, .en_sqd_async_notify = 1 };
	CHECK(ibv_modify_qp(e->qp, &a, IBV_QP_STATE | mask) == 0);
}

static _Atomic int destroyed;

static void *destroy(void *arg)
{
	CHECK(ibv_destroy_qp(arg) == 0);
	destroyed = 1;
	return NULL;
}

int main(void)
{
	struct end e[2], *a = &e[0], *b = &e[1];
	struct options o = usual;
	struct ibv_mr nothing = { .rkey = 1 };

	/* COMM_EST: a message comes before its receiver is in RTS; once */
	end_open(a, &o);
	end_open(b, &o);
	CHECK(to_rts(a, b->qp->qp_num, &o) == 0);
	struct ibv_qp_attr q = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL_ACCESS };
	CHECK(ibv_modify_qp(b->qp, &q, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	q = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = a->qp->qp_num,
				  .max_dest_rd_atomic = 16, .min_rnr_timer = 12,
				  .ah_attr = { .is_global = 1, .port_num = 1, .grh.sgid_index = 1 } };
	CHECK(ibv_modify_qp(b->qp, &q, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	no_event(b);
	CHECK(post_recv(b, 1, 0, 8) == 0 && post_recv(b, 2, 0, 8) == 0);
	CHECK(post(a, IBV_WR_SEND, 3, 0, 8, NULL, 0) == 0 && post(a, IBV_WR_SEND, 4, 0, 8, NULL, 0) == 0);
	expect(b, 1, IBV_WC_SUCCESS);
	expect_event(b, IBV_EVENT_COMM_EST, b->qp);
	no_event(b);
	no_event(a);
	pair_close(e);

	/* SQ_DRAINED, only if asked for; what is posted then waits for RTS */
	pair_open(e, &o);
	set_state(a, IBV_QPS_SQD, 0);
	no_event(a);
	set_state(a, IBV_QPS_RTS, 0);
	set_state(a, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY);
	expect_event(a, IBV_EVENT_SQ_DRAINED, a->qp);
	CHECK(post(a, IBV_WR_RDMA_WRITE, 1, 0, 8, b, 0) == 0);
	expect_nothing(a);
	set_state(a, IBV_QPS_RTS, 0);
	expect(a, 1, IBV_WC_SUCCESS);

	/* the responder hears of what it refused */
	struct end far = *b;
	far.mr = &nothing;
	CHECK(post(a, IBV_WR_RDMA_WRITE, 2, 0, 8, &far, 0) == 0);
	expect(a, 2, IBV_WC_REM_ACCESS_ERR);
	expect_event(b, IBV_EVENT_QP_ACCESS_ERR, b->qp);
	no_event(b);
	no_event(a); /* the requester has its completion */
	pair_close(e);
	pair_open(e, &o);
	CHECK(post_atomic(a, IBV_WR_ATOMIC_FETCH_AND_ADD, 1, 0, b, 4, 1, 0) == 0);
	expect(a, 1, IBV_WC_REM_INV_REQ_ERR);
	expect_event(b, IBV_EVENT_QP_REQ_ERR, b->qp);

	/* destroy waits for the ack of what was handed out */
	set_state(b, IBV_QPS_RESET, 0);
	CHECK(to_rts(b, a->qp->qp_num, &o) == 0);
	set_state(a, IBV_QPS_RESET, 0);
	CHECK(to_rts(a, b->qp->qp_num, &o) == 0);
	CHECK(post(a, IBV_WR_RDMA_WRITE, 2, 0, 8, &far, 0) == 0);
	expect(a, 2, IBV_WC_REM_ACCESS_ERR);
	struct ibv_async_event held = next(b);
	pthread_t t;
	CHECK(pthread_create(&t, NULL, destroy, b->qp) == 0);
	usleep(50000);
	CHECK(!destroyed);
	ibv_ack_async_event(&held);
	CHECK(pthread_join(t, NULL) == 0 && destroyed);
	struct ibv_qp_init_attr init = { .send_cq = b->cq, .recv_cq = b->cq, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	CHECK(b->qp = ibv_create_qp(b->pd, &init));
	pair_close(e);

	/* a full completion queue: the queue and its queue pair are lost */
	o.cqe = 4;
	pair_open(e, &o);
	for (unsigned i = 0; i < 10; i++)
		CHECK(post(a, IBV_WR_RDMA_WRITE, i, 0, 8, b, 0) == 0);
	expect_event(a, IBV_EVENT_CQ_ERR, a->cq);
	expect_event(a, IBV_EVENT_QP_FATAL, a->qp);
	no_event(a);
	struct ibv_wc wc[8];
	CHECK(ibv_poll_cq(a->cq, 8, wc) == 4 && ibv_poll_cq(a->cq, 8, wc) < 0);
	pair_close(e);

	/* shared receive queue: the limit once, and the last receive of a queue pair in error */
	o = usual;
	o.srq = 16;
	pair_open(e, &o);
	struct ibv_srq_attr limit = { .srq_limit = 2 };
	CHECK(ibv_modify_srq(b->srq, &limit, IBV_SRQ_LIMIT) == 0);
	for (unsigned i = 0; i < 4; i++)
		CHECK(post_recv(b, i, 0, 8) == 0);
	for (unsigned i = 0; i < 2; i++)
		CHECK(post(a, IBV_WR_SEND, i, 0, 8, NULL, 0) == 0);
	no_event(b);
	for (unsigned i = 2; i < 4; i++)
		CHECK(post(a, IBV_WR_SEND, i, 0, 8, NULL, 0) == 0);
	expect_event(b, IBV_EVENT_SRQ_LIMIT_REACHED, b->srq);
	CHECK(ibv_query_srq(b->srq, &limit) == 0 && limit.srq_limit == 0);
	no_event(b);
	set_state(b, IBV_QPS_ERR, 0);
	expect_event(b, IBV_EVENT_QP_LAST_WQE_REACHED, b->qp);
	no_event(b);
	pair_close(e);
	return 0;
}
