/* Staging and a program that has unmapped, or protected, what it registered: the request fails with
 * the right end blamed, and neither process takes a signal. */
#include <sys/mman.h>

#include "pair.h"

static void one(enum ibv_wr_opcode opcode, int here, int protection, enum ibv_wc_status status)
{
	struct options o = usual;
	struct end e[2];
	o.len = 1 << 20;
	pair_open(e, &o);
	CHECK(post_recv(&e[1], 9, 0, o.len) == 0);
	char *memory = e[here ? 0 : 1].buf;
	/* the second half only: what comes before it is copied, what is there is not */
	CHECK(mprotect(memory + (1 << 19), 1 << 19, protection) == 0);
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		CHECK(post_atomic(&e[0], opcode, 1, here ? 1 << 19 : 0, &e[1], here ? 0 : 1 << 19, 1, 0) == 0);
	else
		CHECK(post(&e[0], opcode, 1, 0, o.len, opcode == IBV_WR_SEND ? NULL : &e[1], 0) == 0);
	struct ibv_wc wc = wait_wc(&e[0]);
	if (wc.status != status) {
		fprintf(stderr, "opcode %d, %s memory: status %d, expected %d\n", opcode, here ? "own" : "remote", wc.status,
			status);
		exit(1);
	}
	CHECK(mprotect(memory + (1 << 19), 1 << 19, PROT_READ | PROT_WRITE) == 0);
	pair_close(e);
}

int main(void)
{
	setenv("ROCECOMM_SOFT_STAGING", "1", 1);
	one(IBV_WR_RDMA_WRITE, 0, PROT_NONE, IBV_WC_REM_OP_ERR);
	one(IBV_WR_RDMA_WRITE, 0, PROT_READ, IBV_WC_REM_OP_ERR);
	one(IBV_WR_RDMA_READ, 0, PROT_NONE, IBV_WC_REM_OP_ERR);
	one(IBV_WR_RDMA_READ, 0, PROT_READ, IBV_WC_SUCCESS);
	one(IBV_WR_SEND, 0, PROT_NONE, IBV_WC_REM_OP_ERR);
	one(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, PROT_NONE, IBV_WC_REM_OP_ERR);
	one(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, PROT_READ, IBV_WC_REM_OP_ERR);
	one(IBV_WR_RDMA_WRITE, 1, PROT_NONE, IBV_WC_REM_OP_ERR); /* as over process_vm: nobody can tell */
	one(IBV_WR_RDMA_READ, 1, PROT_READ, IBV_WC_REM_OP_ERR);
	return 0;
}
