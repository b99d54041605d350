/* Sends of every size class arrive whole, in order, with length and immediate value. */
#include "pair.h"

int main(void)
{
	static const size_t sizes[] = { 0, 1, 8, 255, 256, 257, 4096, 65537, 400000 };
	struct end e[2];
	pair_open(e, &usual);
	for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		pattern(e[0].buf, sizes[i], i);
		memset(e[1].buf, 7, e[1].len);
		CHECK(post_recv(&e[1], 100 + i, 64, 500000) == 0);
		CHECK(post(&e[0], i % 2 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, i, 0, sizes[i], NULL, 0) == 0);
		expect(&e[0], i, IBV_WC_SUCCESS);
		struct ibv_wc wc = wait_wc(&e[1]);
		CHECK(wc.wr_id == 100 + i && wc.status == IBV_WC_SUCCESS && wc.byte_len == sizes[i]);
		CHECK(wc.opcode == IBV_WC_RECV && wc.qp_num == e[1].qp->qp_num && wc.src_qp == e[0].qp->qp_num);
		CHECK(i % 2 ? wc.wc_flags & IBV_WC_WITH_IMM && wc.imm_data == 0x44332211 : !(wc.wc_flags & IBV_WC_WITH_IMM));
		CHECK(same(e[1].buf + 64, sizes[i], i));
		CHECK(e[1].buf[63] == 7 && e[1].buf[64 + sizes[i]] == 7);
	}
	pair_close(e);
	return 0;
}
