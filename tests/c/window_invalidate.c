/* Taking a window back: by its owner (LOCAL_INV), by the peer (SEND_WITH_INV), with its queue pair; and a
 * request that only the owner may execute wakes the owner up. */
#include "windows.h"

static enum ibv_wc_status local_inv(struct end *e, uint32_t key)
{
	struct ibv_send_wr wr = { .wr_id = 600, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED,
				  .invalidate_rkey = key }, *bad;
	CHECK(ibv_post_send(e->qp, &wr, &bad) == 0);
	struct ibv_wc wc = wait_wc(e);
	CHECK(wc.wr_id == 600 && (wc.status || wc.opcode == IBV_WC_LOCAL_INV));
	return wc.status;
}

static void send_inv(struct end *e, uint32_t key)
{
	struct ibv_qp_ex *x = begin(e, 601, IBV_SEND_SIGNALED);
	ibv_wr_send_inv(x, key);
	ibv_wr_set_inline_data(x, "bye", 3);
	CHECK(ibv_wr_complete(x) == 0);
}

int main(void)
{
	struct end e[2], *a = &e[0], *b = &e[1];
	windows_open(e, 0);
	uint64_t base = (uintptr_t)b->buf;
	struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2), *one = ibv_alloc_mw(b->pd, IBV_MW_TYPE_1);
	uint32_t key = mw->rkey;
	struct ibv_wc wc;

	/* the owner, and the window can be bound again */
	for (int i = 0; i < 300; i++) {
		key = ibv_inc_rkey(key);
		CHECK(bind_2(b, mw, key, b->mr, base, 64, W) == IBV_WC_SUCCESS);
		CHECK(access_as(a, IBV_WR_RDMA_WRITE, key, base, 8) == IBV_WC_SUCCESS);
		CHECK(local_inv(b, key) == IBV_WC_SUCCESS);
	}
	CHECK(access_as(a, IBV_WR_RDMA_WRITE, key, base, 8) == IBV_WC_REM_ACCESS_ERR);
	reconnect(e);
	CHECK(local_inv(b, key) == IBV_WC_LOC_QP_OP_ERR); /* it is void already */
	reconnect(e);
	CHECK(local_inv(b, b->mr->rkey) == IBV_WC_LOC_QP_OP_ERR); /* a region is no window */
	reconnect(e);
	bind_1(b, one, 0, 8, W);
	CHECK(local_inv(b, one->rkey) == IBV_WC_LOC_QP_OP_ERR); /* type 1 is taken back by a bind */
	reconnect(e);

	/* in one list with sends of many regions and a write through the window from the other side */
	struct ibv_mr *many[6];
	struct ibv_send_wr list[7], *bad_wr;
	struct ibv_sge s6[6];
	key = ibv_inc_rkey(key);
	CHECK(bind_2(b, mw, key, b->mr, base, 64, W) == IBV_WC_SUCCESS);
	memset(list, 0, sizeof(list));
	for (unsigned i = 0; i < 6; i++) {
		CHECK(many[i] = ibv_reg_mr(b->pd, b->buf + 8192 + 64 * i, 64, IBV_ACCESS_LOCAL_WRITE));
		s6[i] = (struct ibv_sge){ (uintptr_t)many[i]->addr, 64, many[i]->lkey };
		list[i] = (struct ibv_send_wr){ .opcode = IBV_WR_SEND, .sg_list = &s6[i], .num_sge = 1, .next = &list[i + 1] };
		CHECK(post_recv(a, i, 64 * i, 64) == 0);
	}
	list[6] = (struct ibv_send_wr){ .wr_id = 700, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED,
					.invalidate_rkey = key };
	CHECK(ibv_post_send(b->qp, list, &bad_wr) == 0);
	expect(b, 700, IBV_WC_SUCCESS);
	for (unsigned i = 0; i < 6; i++) {
		expect(a, i, IBV_WC_SUCCESS);
		CHECK(ibv_dereg_mr(many[i]) == 0);
	}

	/* the peer */
	key = ibv_inc_rkey(key);
	CHECK(bind_2(b, mw, key, b->mr, base, 64, W) == IBV_WC_SUCCESS);
	CHECK(post_recv(b, 1, 4096, 64) == 0);
	send_inv(a, key);
	expect(a, 601, IBV_WC_SUCCESS);
	wc = wait_wc(b);
	CHECK(wc.wr_id == 1 && wc.status == 0 && wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == key);
	CHECK(wc.byte_len == 3 && memcmp(b->buf + 4096, "bye", 3) == 0);
	CHECK(access_as(a, IBV_WR_RDMA_WRITE, key, base, 8) == IBV_WC_REM_ACCESS_ERR);
	reconnect(e);
	CHECK(post_recv(b, 2, 4096, 64) == 0);
	send_inv(a, key); /* void already */
	expect(a, 601, IBV_WC_REM_OP_ERR);
	expect(b, 2, IBV_WC_REM_INV_REQ_ERR);
	reconnect(e);

	/* with its queue pair */
	key = ibv_inc_rkey(key);
	CHECK(bind_2(b, mw, key, b->mr, base, 64, W) == IBV_WC_SUCCESS);
	CHECK(ibv_destroy_qp(b->qp) == 0);
	CHECK(b->qp = new_qp_ex(b, &usual, ALL_OPS));
	CHECK(ibv_dealloc_mw(one) == 0);
	CHECK(ibv_dereg_mr(b->mr) == 0);
	CHECK(b->mr = ibv_reg_mr(b->pd, b->buf, b->len, ALL_ACCESS | IBV_ACCESS_MW_BIND));
	CHECK(ibv_dealloc_mw(mw) == 0);
	pair_close(e);

	/* A send that waits, and behind it an invalidation. The peer's receive lets the send go, but only the
	 * owner may invalidate: asleep on its channel, it is woken to do so. */
	struct options o = usual;
	o.channel = 1;
	pair_open(e, &o);
	struct ibv_mr *mr = ibv_reg_mr(a->pd, a->buf, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	CHECK(mw = ibv_alloc_mw(a->pd, IBV_MW_TYPE_2));
	key = ibv_inc_rkey(mw->rkey);
	struct ibv_send_wr bind = { .wr_id = 1, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
				    .bind_mw = { mw, key, { mr, (uintptr_t)a->buf, 8, W } } }, *bad;
	CHECK(ibv_post_send(a->qp, &bind, &bad) == 0);
	expect(a, 1, IBV_WC_SUCCESS);
	struct ibv_sge s = sge_of(a, 0, 8);
	struct ibv_send_wr inv = { .wr_id = 3, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED,
				   .invalidate_rkey = key };
	struct ibv_send_wr send = { .wr_id = 2, .opcode = IBV_WR_SEND, .sg_list = &s, .num_sge = 1, .next = &inv };
	CHECK(ibv_post_send(a->qp, &send, &bad) == 0);
	CHECK(ibv_req_notify_cq(a->cq, 0) == 0);
	expect_nothing(a);
	struct pollfd p = { .fd = a->channel->fd, .events = POLLIN };
	CHECK(post_recv(b, 9, 0, 64) == 0);
	expect(b, 9, IBV_WC_SUCCESS);
	CHECK(poll(&p, 1, 0) == 1); /* at once: the timers of waiting sends are not what wakes it */
	struct ibv_cq *cq;
	void *arg;
	CHECK(ibv_get_cq_event(a->channel, &cq, &arg) == 0);
	ibv_ack_cq_events(cq, 1);
	expect(a, 3, IBV_WC_SUCCESS);
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_mw(mw) == 0);
	pair_close(e);
	return 0;
}
