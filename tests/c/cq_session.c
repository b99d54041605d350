/* Between ibv_start_poll and ibv_end_poll the program may do anything else: arm the queue while a send
 * waits, register memory while another thread takes a queue pair of the same completion queue down. */
#include <pthread.h>
#include <stdatomic.h>

#include "pair.h"

static struct ibv_qp *other;
static _Atomic int begun;

static void *take_down(void *arg)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	(void)arg;
	CHECK(ibv_modify_qp(other, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	atomic_store(&begun, 1);
	CHECK(ibv_destroy_qp(other) == 0);
	return NULL;
}

int main(void)
{
	struct end e[2];
	struct options o = usual;
	struct ibv_poll_cq_attr none = { 0 };
	struct ibv_cq_ex *cq;
	pthread_t thread;
	double until = seconds() + 10;
	int err;

	alarm(20); /* it hung */
	end_open(&e[0], &o);
	end_open(&e[1], &o);
	CHECK(ibv_destroy_qp(e[1].qp) == 0 && ibv_destroy_cq(e[1].cq) == 0);
	struct ibv_cq_init_attr_ex a = { .cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS };
	CHECK(cq = ibv_create_cq_ex(e[1].ctx, &a));
	e[1].cq = ibv_cq_ex_to_cq(cq);
	struct ibv_qp_init_attr q = { .send_cq = e[1].cq, .recv_cq = e[1].cq, .qp_type = IBV_QPT_RC, .cap = { 16, 16, 4, 4, 0 } };
	CHECK((e[1].qp = ibv_create_qp(e[1].pd, &q)) && (other = ibv_create_qp(e[1].pd, &q)));
	CHECK(to_rts(&e[0], e[1].qp->qp_num, &o) == 0 && to_rts(&e[1], e[0].qp->qp_num, &o) == 0);

	for (unsigned i = 0; i < 2; i++)
		CHECK(post_recv(&e[1], i, 4096 * i, 4096) == 0);
	CHECK(post(&e[1], IBV_WR_SEND, 9, 8192, 10, NULL, 0) == 0); /* waits: no receive is there */
	CHECK(post(&e[0], IBV_WR_SEND, 7, 0, 33, NULL, 0) == 0 && post(&e[0], IBV_WR_SEND, 8, 0, 44, NULL, 0) == 0);
	while ((err = ibv_start_poll(cq, &none)) == ENOENT)
		CHECK(seconds() < until);
	CHECK(err == 0);

	CHECK(ibv_req_notify_cq(e[1].cq, 0) == 0);
	CHECK(pthread_create(&thread, NULL, take_down, NULL) == 0);
	while (!atomic_load(&begun))
		usleep(1000);
	usleep(50000); /* it is inside */
	struct ibv_mr *mr = ibv_reg_mr(e[1].pd, e[1].buf, 4096, 0);
	CHECK(mr && ibv_dereg_mr(mr) == 0);
	CHECK(pthread_join(thread, NULL) == 0);

	CHECK(cq->wr_id == 0 && cq->status == IBV_WC_SUCCESS && ibv_wc_read_byte_len(cq) == 33);
	CHECK(ibv_next_poll(cq) == 0);
	CHECK(cq->wr_id == 1 && ibv_wc_read_byte_len(cq) == 44);
	CHECK(ibv_next_poll(cq) == ENOENT);
	ibv_end_poll(cq);

	CHECK(post_recv(&e[0], 5, 0, 4096) == 0);
	expect(&e[0], 7, IBV_WC_SUCCESS);
	expect(&e[0], 8, IBV_WC_SUCCESS);
	expect(&e[0], 5, IBV_WC_SUCCESS);
	while ((err = ibv_start_poll(cq, &none)) == ENOENT)
		CHECK(seconds() < until);
	CHECK(err == 0 && cq->wr_id == 9 && cq->status == IBV_WC_SUCCESS);
	ibv_end_poll(cq);
	pair_close(e);
	return 0;
}
