/* One work request on its way, between the send queue (exec.c) and the checks and copies that it
 * goes through (respond.c). */
#ifndef SN_JOB_H
#define SN_JOB_H

#include "softnic.h"

enum verdict { DONE, WAIT_PEER, WAIT_RNR };

struct job {
	struct sn_ctx *ctx;
	const struct sn_side *r, *t;
	struct sn_swqe *w;
	struct sn_claim *claim;
	struct sn_piece near[SN_MAX_SGE + 1]; /* R's memory; one more for the header of a datagram */
	int num_near;
	enum ibv_wc_status status; /* what R is told */
	bool fail_t;
	bool fresh; /* the claim is */
	uint32_t item; /* of a send: the receive that it took */
};

/* Looks at both ends and moves the bytes. DONE leaves R's completion status in the job. */
enum verdict sn_execute(struct job *j);
bool sn_name_keys(struct job *j); /* true: the claim covers more than it did */
enum verdict sn_check_peer(struct job *j);
void sn_place_before(struct job *j);
uint32_t sn_batch(struct job *j, uint32_t head, uint32_t tail); /* batch.c */
/* take.c */
enum verdict sn_take_receive(struct job *j, uint32_t *item);
int sn_complete_receive(struct job *j, uint32_t item, enum ibv_wc_status status, uint32_t length, uint32_t kind);
enum ibv_wc_status sn_scatter(struct job *j, struct sn_rwqe *rw, uint64_t length, struct sn_piece *far, int *num_far);

/* help.c: sn_copy, shared with the other end where that polls. */
enum sn_copy_result sn_copy_together(struct job *j, const struct sn_side *other, bool write, const struct sn_piece *near,
				     int num_near, const struct sn_piece *far, int num_far, uint64_t length);
enum sn_fault_do sn_fault(struct job *j, uint32_t head);
enum ibv_wc_status sn_mw_execute(struct job *j); /* mw.c */
bool sn_side_of(struct sn_ctx *ctx, uint32_t qpn, struct sn_peer *_Atomic *cached, struct sn_side *side);

static inline bool is_atomic(uint32_t opcode)
{
	return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static inline bool is_send(uint32_t opcode)
{
	return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_SEND_WITH_INV;
}

static inline bool is_local(uint32_t opcode) /* nothing goes to T */
{
	return opcode == IBV_WR_BIND_MW || opcode == IBV_WR_LOCAL_INV;
}

static inline bool is_inbound(uint32_t opcode) /* the result is written into R's memory */
{
	return opcode == IBV_WR_RDMA_READ || is_atomic(opcode);
}

static inline bool goes_in_batches(uint32_t opcode)
{
	return opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_RDMA_WRITE;
}

static inline bool can_receive(uint32_t state)
{
	return state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD || state == IBV_QPS_SQE;
}

#endif
