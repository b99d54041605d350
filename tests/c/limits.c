/* Full queues and a completion queue that overruns: said, not silently lost. */
#include "pair.h"

int main(void)
{
	struct options o = usual;
	struct end e[2];
	struct ibv_sge s[8];
	struct ibv_wc wc;
	struct ibv_async_event event;

	o.depth = 8;
	o.cqe = 8;
	pair_open(e, &o);
	for (int i = 0; i < 8; i++)
		CHECK(post(&e[0], IBV_WR_SEND, i, 0, 8, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 8, 0, 8, NULL, 0) == ENOMEM);
	for (int i = 0; i < 8; i++)
		CHECK(post_recv(&e[0], i, 0, 8) == 0);
	CHECK(post_recv(&e[0], 8, 0, 8) == ENOMEM);
	for (int i = 0; i < 8; i++)
		s[i] = sge_of(&e[0], 0, 1);
	struct ibv_send_wr wr = { .sg_list = s, .num_sge = 8, .opcode = IBV_WR_SEND }, *bad = NULL;
	struct ibv_recv_wr rr = { .sg_list = s, .num_sge = 8 }, *rbad = NULL;
	CHECK(ibv_post_recv(e[1].qp, &rr, &rbad) == EINVAL && rbad == &rr);
	CHECK(ibv_post_send(e[1].qp, &wr, &bad) == EINVAL && bad == &wr);
	wr.num_sge = 1;
	s[0].length = 100;
	wr.send_flags = IBV_SEND_INLINE; /* 64 are allowed */
	CHECK(ibv_post_send(e[1].qp, &wr, &bad) == EINVAL);
	pair_close(e);

	o.depth = 16;
	pair_open(e, &o);
	for (int i = 0; i < 9; i++)
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0); /* nine completions, room for eight */
	CHECK(ibv_get_async_event(e[0].ctx, &event) == 0);
	CHECK(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == e[0].cq);
	ibv_ack_async_event(&event);
	for (int i = 0; i < 8; i++)
		expect(&e[0], i, IBV_WC_SUCCESS);
	CHECK(ibv_poll_cq(e[0].cq, 1, &wc) < 0);
	pair_close(e);
	return 0;
}
