/* A datagram to a group goes to every member, of this and other contexts, except its sender. */
#include <arpa/inet.h>

#include "pair.h"

static int send_to(struct end *e, struct ibv_ah *ah, uint32_t qpn)
{
	struct ibv_sge s = sge_of(e, 0, 100);
	struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED, .wr.ud = { ah, qpn, 0x11111111 } }, *bad;
	return ibv_post_send(e->qp, &wr, &bad);
}

static void expect_receive(struct end *e, unsigned seed)
{
	struct ibv_wc wc = wait_wc(e);
	CHECK(wc.wr_id == 1 && wc.status == 0 && wc.byte_len == 140 && same(e->buf + 4096 + 40, 100, seed));
}

int main(void)
{
	struct end e[3], *a = &e[0], *b = &e[1], *c = &e[2];
	struct options o = usual;
	union ibv_gid group = { .raw = { 0xff, 0x0e, 1, 2, 3, 4, 5, 6 } }, other = group, v4 = { .raw = { 0 } }, own;
	o.type = IBV_QPT_UD;
	for (int i = 0; i < 3; i++) {
		end_open(&e[i], &o);
		CHECK(to_rts(&e[i], 0, &o) == 0);
		for (int k = 0; k < 4; k++)
			CHECK(post_recv(&e[i], 1, 4096, 4096) == 0);
	}
	other.raw[15] = 9;
	v4.raw[10] = v4.raw[11] = 0xff;
	v4.raw[12] = 224;
	v4.raw[15] = 7;
	CHECK(ibv_attach_mcast(a->qp, &group, 0) == 0 && ibv_attach_mcast(b->qp, &group, 0) == 0);
	CHECK(ibv_attach_mcast(b->qp, &group, 0) == 0); /* twice is once */
	CHECK(ibv_attach_mcast(c->qp, &other, 0) == 0);

	struct ibv_ah_attr at = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 0, .hop_limit = 1, .dgid = group } };
	struct ibv_ah *ah = ibv_create_ah(a->pd, &at);
	pattern(a->buf, 100, 5);
	CHECK(ah && send_to(a, ah, 0xffffff) == 0);
	expect(a, 2, IBV_WC_SUCCESS);
	expect_receive(b, 5);
	expect_nothing(a); /* not to its sender */
	expect_nothing(b);
	expect_nothing(c);
	CHECK(memcmp(b->buf + 4096 + 24, group.raw, 16) == 0); /* the header says which group */

	CHECK(ibv_attach_mcast(c->qp, &group, 0) == 0);
	pattern(a->buf, 100, 6);
	CHECK(send_to(a, ah, 0xffffff) == 0);
	expect(a, 2, IBV_WC_SUCCESS);
	expect_receive(b, 6);
	expect_receive(c, 6);

	/* a member that left, and one that is alone with its own datagram */
	CHECK(ibv_detach_mcast(b->qp, &group, 0) == 0 && ibv_detach_mcast(b->qp, &group, 0) == EINVAL);
	CHECK(ibv_detach_mcast(c->qp, &group, 0) == 0);
	CHECK(send_to(a, ah, 0xffffff) == 0);
	expect(a, 2, IBV_WC_SUCCESS);
	expect_nothing(a);
	expect_nothing(b);
	expect_nothing(c);

	/* an IPv4 group, from the IPv4 address */
	at.grh.sgid_index = 1;
	at.grh.dgid = v4;
	struct ibv_ah *ah4 = ibv_create_ah(a->pd, &at);
	CHECK(ah4 && ibv_attach_mcast(b->qp, &v4, 0) == 0 && send_to(a, ah4, 0xffffff) == 0);
	expect(a, 2, IBV_WC_SUCCESS);
	expect_receive(b, 6);
	CHECK(ibv_query_gid(a->ctx, 1, 1, &own) == 0);
	CHECK(b->buf[4096 + 20] == 0x45 && memcmp(b->buf + 4096 + 32, own.raw + 12, 4) == 0 &&
	      memcmp(b->buf + 4096 + 36, v4.raw + 12, 4) == 0);

	/* what cannot be joined, and who cannot be destroyed */
	CHECK(ibv_attach_mcast(a->qp, &own, 0) == EINVAL);
	struct ibv_qp_init_attr rc = { .send_cq = a->cq, .recv_cq = a->cq, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(a->pd, &rc);
	CHECK(ibv_attach_mcast(qp, &group, 0) == EINVAL && ibv_destroy_qp(qp) == 0);
	CHECK(ibv_destroy_qp(b->qp) == EBUSY);
	CHECK(ibv_detach_mcast(b->qp, &v4, 0) == 0 && ibv_detach_mcast(a->qp, &group, 0) == 0);
	CHECK(ibv_detach_mcast(c->qp, &other, 0) == 0);
	CHECK(ibv_destroy_ah(ah) == 0 && ibv_destroy_ah(ah4) == 0);
	for (int i = 0; i < 3; i++)
		end_close(&e[i]);
	return 0;
}
