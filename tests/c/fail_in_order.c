/* A queue pair that fails by a send of its own while its peer fills a receive: that one completes before
 * the ones behind it are flushed. */
#include "process.h"

#define LEN (32u << 20)
#define ROUNDS 12
#define DEPTH 8

static void to_reset(struct end *e)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RESET };
	CHECK(ibv_modify_qp(e->qp, &a, IBV_QP_STATE) == 0);
}

static void peer(struct end *e, struct hello you, int in, int out)
{
	for (int round = 0; round < ROUNDS; round++) {
		char c = 0;
		for (unsigned i = 0; i < DEPTH; i++)
			CHECK(post_recv(e, i, 0, LEN) == 0);
		put(out, &c, 1);
		usleep((useconds_t)(500 * round));
		struct ibv_sge s = { (uintptr_t)e->buf, 8, 0x1234 }; /* nobody's key */
		struct ibv_send_wr w = { .wr_id = 99, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND,
					 .send_flags = IBV_SEND_SIGNALED }, *bad;
		CHECK(ibv_post_send(e->qp, &w, &bad) == 0);
		for (unsigned got = 0, next = 0; got < DEPTH + 1; got++) {
			struct ibv_wc wc = wait_wc(e);
			if (wc.wr_id == 99)
				CHECK(wc.status == IBV_WC_LOC_PROT_ERR);
			else
				CHECK(wc.wr_id == next++ && (wc.status == IBV_WC_WR_FLUSH_ERR || wc.wr_id == 0));
		}
		put(out, &c, 1);
		take(in, &c, 1);
		to_reset(e);
		CHECK(to_rts(e, you.qpn, &usual) == 0);
	}
}

int main(void)
{
	struct options o = usual;
	struct end e;
	int in, out;
	char c;
	o.len = LEN;
	pid_t pid = start_peer(&o, peer, &in, &out);
	end_open(&e, &o);
	struct hello you = meet(&e, &o, in, out);
	for (int round = 0; round < ROUNDS; round++) {
		take(in, &c, 1);
		CHECK(post(&e, IBV_WR_SEND, 1, 0, LEN, NULL, 0) == 0);
		struct ibv_wc wc = wait_wc(&e);
		CHECK(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_RETRY_EXC_ERR || wc.status == IBV_WC_WR_FLUSH_ERR);
		take(in, &c, 1);
		to_reset(&e);
		CHECK(to_rts(&e, you.qpn, &usual) == 0);
		put(out, &c, 1);
	}
	join_peer(pid);
	end_close(&e);
	return 0;
}
