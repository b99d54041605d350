/* A completion queue with room for exactly what was posted: moved to the error state with all receives
 * completed and none polled, the queue pair adds nothing, and nothing is lost. */
#include "pair.h"

#define N 16

int main(void)
{
	struct options o = usual;
	struct end e[2];
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	o.cqe = N;
	o.depth = N;
	for (int srq = 0; srq < 2; srq++) {
		o.srq = srq ? 2 * N : 0;
		pair_open(e, &o);
		for (int i = 0; i < N; i++)
			CHECK(post_recv(&e[1], 10 + i, (size_t)i * 512, 512) == 0);
		for (int i = 0; i < N; i++) {
			CHECK(post(&e[0], IBV_WR_SEND, i, 0, 512, NULL, 0) == 0);
			expect(&e[0], i, IBV_WC_SUCCESS);
		}
		CHECK(ibv_modify_qp(e[1].qp, &error, IBV_QP_STATE) == 0);
		for (int i = 0; i < N; i++)
			expect(&e[1], 10 + i, IBV_WC_SUCCESS);
		expect_nothing(&e[1]);
		if (srq) { /* with an SRQ there is an event to take before the queue pair can go */
			struct ibv_async_event event;
			do {
				CHECK(ibv_get_async_event(e[1].ctx, &event) == 0);
				ibv_ack_async_event(&event);
			} while (event.event_type != IBV_EVENT_QP_LAST_WQE_REACHED);
		}
		pair_close(e);
	}
	return 0;
}
