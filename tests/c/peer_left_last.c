/* What completed before the peer left is polled by itself, the error after it: a program that has all
 * it waited for never looks further (ibv_srq_pingpong sends more than it counts). Who goes to sleep
 * instead is woken for the error. */
#include "pair.h"

int main(void)
{
	struct options o = usual;
	struct ibv_wc wc[8];
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct end e[2];
	struct ibv_cq *cq;
	void *context;

	o.channel = 1;
	pair_open(e, &o);
	for (uint64_t i = 0; i < 3; i++)
		CHECK(post_recv(&e[1], 10 + i, 0, 8) == 0);
	for (uint64_t i = 0; i < 3; i++)
		CHECK(post(&e[0], IBV_WR_SEND, 1 + i, 0, 8, NULL, 0) == 0);
	CHECK(ibv_modify_qp(e[1].qp, &reset, IBV_QP_STATE) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 4, 0, 8, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 5, 0, 8, NULL, 0) == 0);

	CHECK(ibv_poll_cq(e[0].cq, 8, wc) == 3);
	for (int i = 0; i < 3; i++)
		CHECK(wc[i].wr_id == (uint64_t)i + 1 && wc[i].status == IBV_WC_SUCCESS);
	CHECK(ibv_req_notify_cq(e[0].cq, 0) == 0);
	struct pollfd p = { .fd = e[0].channel->fd, .events = POLLIN };
	CHECK(poll(&p, 1, 8000) == 1);
	CHECK(ibv_get_cq_event(e[0].channel, &cq, &context) == 0 && cq == e[0].cq);
	ibv_ack_cq_events(cq, 1);
	CHECK(ibv_poll_cq(e[0].cq, 8, wc) == 2);
	CHECK(wc[0].wr_id == 4 && wc[0].status == IBV_WC_RETRY_EXC_ERR);
	CHECK(wc[1].wr_id == 5 && wc[1].status == IBV_WC_WR_FLUSH_ERR);
	CHECK(ibv_req_notify_cq(e[0].cq, 0) == 0 && poll(&p, 1, 0) == 0);
	pair_close(e);
	return 0;
}
