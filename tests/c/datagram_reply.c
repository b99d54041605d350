/* Answering a datagram: the header in front of it says where it came from, over IPv4 and IPv6 addresses. */
#include "pair.h"

int main(void)
{
	struct end e[2], *a = &e[0], *b = &e[1];
	struct options o = usual;
	o.type = IBV_QPT_UD;
	pair_open(e, &o);
	for (int index = 0; index < 3; index++) {
		struct ibv_ah_attr at = { .is_global = 1, .port_num = 1,
					  .grh = { .sgid_index = (uint8_t)index, .hop_limit = 64, .traffic_class = 5 } };
		union ibv_gid gid;
		CHECK(ibv_query_gid(a->ctx, 1, index, &gid) == 0);
		at.grh.dgid = gid; /* both are soft0 */
		struct ibv_ah *ah = ibv_create_ah(a->pd, &at), *back;
		CHECK(ah);
		CHECK(post_recv(b, 1, 0, 4096) == 0);
		struct ibv_sge s = sge_of(a, 0, 100);
		struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND,
					  .send_flags = IBV_SEND_SIGNALED,
					  .wr.ud = { ah, b->qp->qp_num, 0x11111111 } }, *bad;
		CHECK(ibv_post_send(a->qp, &wr, &bad) == 0);
		expect(a, 2, IBV_WC_SUCCESS);
		struct ibv_wc wc = wait_wc(b);
		CHECK(wc.status == 0 && wc.byte_len == 140 && wc.wc_flags & IBV_WC_GRH && wc.src_qp == a->qp->qp_num);
		struct ibv_ah_attr found;
		CHECK(ibv_init_ah_from_wc(b->ctx, 1, &wc, (struct ibv_grh *)b->buf, &found) == 0);
		CHECK(found.is_global && memcmp(&found.grh.dgid, &gid, 16) == 0 && found.grh.sgid_index == index);
		CHECK(found.port_num == 1 && found.grh.traffic_class == 5);
		CHECK(back = ibv_create_ah_from_wc(b->pd, &wc, (struct ibv_grh *)b->buf, 1));
		wc.wc_flags = 0;
		CHECK(!ibv_create_ah_from_wc(b->pd, &wc, (struct ibv_grh *)b->buf, 1));
		CHECK(ibv_destroy_ah(ah) == 0 && ibv_destroy_ah(back) == 0);
	}
	pair_close(e);
	return 0;
}
