/* Faults on request, between the grammar (fault_rule.c), the table of rules (fault.c) and what a
 * rule does to a work request (fault_act.c). */
#ifndef SN_FAULT_H
#define SN_FAULT_H

#include "job.h"
#include "softnic_api.h"

#define SN_FAULT_RULES 64

enum sn_fault_kind { SN_NO_FAULT, SN_DELAY, SN_DROP, SN_RNR, SN_STATUS, SN_PORT_DOWN, SN_PEER_DEATH, SN_CQ_OVERRUN, SN_REFUSE };

#define SN_OP_RECV (1u << 31)
#define SN_OP(opcode) (1u << (opcode))
#define SN_OP_SEND (SN_OP(IBV_WR_SEND) | SN_OP(IBV_WR_SEND_WITH_IMM) | SN_OP(IBV_WR_SEND_WITH_INV))
#define SN_OP_WRITE (SN_OP(IBV_WR_RDMA_WRITE) | SN_OP(IBV_WR_RDMA_WRITE_WITH_IMM))
#define SN_OP_ATOMIC (SN_OP(IBV_WR_ATOMIC_CMP_AND_SWP) | SN_OP(IBV_WR_ATOMIC_FETCH_AND_ADD))
#define SN_OP_TAKES_RECEIVE (SN_OP_SEND | SN_OP(IBV_WR_RDMA_WRITE_WITH_IMM))
#define SN_OP_MESSAGE (SN_OP_SEND | SN_OP_WRITE | SN_OP(IBV_WR_RDMA_READ) | SN_OP_ATOMIC)
#define SN_OP_ANY_SEND 0x7fffffffu

struct sn_fault_rule {
	enum sn_fault_kind kind;
	enum ibv_wc_status status;
	uint32_t ops;	/* of work requests; none for SN_REFUSE */
	uint32_t verbs;	/* bits of enum sn_verb, for SN_REFUSE */
	int err;	/* with which they fail */
	int device;	/* index, -1: any */
	sn_id context;	/* 0: any of this process */
	uint32_t qpn;	/* 0: any */
	double p;
	uint64_t seed, after, times; /* times 0: without end */
	uint64_t ns;	/* how long; 0: not said */
	uint32_t lost;	/* transmissions in a row; 0: all */
	uint64_t id;	/* of the injection that brought it; 0: a free place in the table */
	uint64_t seen, fired;
};

/* ---- fault_rule.c: text to rules. `origin` begins the sentence that softnic_reason() gives. */
int sn_fault_parse(const char *origin, const char *text, struct sn_fault_rule *rules, unsigned room, unsigned *count);

/* ---- fault.c */
bool sn_fault_decide(struct sn_ctx *ctx, uint32_t qpn, uint32_t op, struct sn_fault_rule *hit);
bool sn_fault_still(uint64_t id);
void sn_fault_mark(struct sn_ctx *ctx, uint32_t set, uint32_t clear);
unsigned sn_device_index(struct ibv_context *context);

/* ---- fault_act.c */
void sn_fault_set_port(struct sn_ctx *ctx, bool up, uint64_t ns);

#endif
