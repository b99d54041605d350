/* Which attributes a QP transition requires and which it allows: IB spec 11.2.5.2, table 93. */
#include "softnic.h"

#define NEVER (-1)

#define ANY_ALT (IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE)

struct rule {
	enum ibv_qp_state from, to;
	int required[3], allowed[3]; /* RC, UC, UD */
};

static const struct rule rules[] = {
	{ IBV_QPS_RESET, IBV_QPS_RESET, { 0, 0, 0 }, { 0, 0, 0 } },
	{ IBV_QPS_RESET, IBV_QPS_INIT,
	  { IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
	    IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY },
	  { 0, 0, 0 } },
	{ IBV_QPS_INIT, IBV_QPS_INIT,
	  { 0, 0, 0 },
	  { IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
	    IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY } },
	{ IBV_QPS_INIT, IBV_QPS_RTR,
	  { IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
		    IBV_QP_MIN_RNR_TIMER,
	    IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN, 0 },
	  { IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
	    IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX, IBV_QP_PKEY_INDEX | IBV_QP_QKEY } },
	{ IBV_QPS_RTR, IBV_QPS_RTS,
	  { IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
	    IBV_QP_SQ_PSN, IBV_QP_SQ_PSN },
	  { IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | ANY_ALT,
	    IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | ANY_ALT, IBV_QP_CUR_STATE | IBV_QP_QKEY } },
	{ IBV_QPS_RTS, IBV_QPS_RTS,
	  { 0, 0, 0 },
	  { IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | ANY_ALT,
	    IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | ANY_ALT, IBV_QP_CUR_STATE | IBV_QP_QKEY } },
	{ IBV_QPS_RTS, IBV_QPS_SQD, { 0, 0, 0 }, { IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_EN_SQD_ASYNC_NOTIFY,
						   IBV_QP_EN_SQD_ASYNC_NOTIFY } },
	{ IBV_QPS_SQD, IBV_QPS_RTS,
	  { 0, 0, 0 },
	  { IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | ANY_ALT,
	    IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | ANY_ALT, IBV_QP_CUR_STATE | IBV_QP_QKEY } },
	{ IBV_QPS_SQD, IBV_QPS_SQD,
	  { 0, 0, 0 },
	  { IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC |
		    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_MIN_RNR_TIMER | ANY_ALT,
	    IBV_QP_AV | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | ANY_ALT, IBV_QP_PKEY_INDEX | IBV_QP_QKEY } },
	{ IBV_QPS_SQE, IBV_QPS_RTS,
	  { NEVER, 0, 0 },
	  { 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS, IBV_QP_CUR_STATE | IBV_QP_QKEY } },
};

int sn_qp_check_attr(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
	int t = type == IBV_QPT_RC ? 0 : type == IBV_QPT_UC ? 1 : 2;

	mask &= ~IBV_QP_STATE;
	if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET))
		return mask ? EINVAL : 0; /* from any state, with nothing else */
	if (mask & IBV_QP_CUR_STATE && from != IBV_QPS_RTR && from != IBV_QPS_RTS && from != IBV_QPS_SQD &&
	    from != IBV_QPS_SQE)
		return EINVAL;
	for (unsigned i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
		const struct rule *r = &rules[i];
		if (r->from != from || r->to != to)
			continue;
		if (r->required[t] == NEVER || (mask & r->required[t]) != r->required[t])
			return EINVAL;
		return mask & ~(r->required[t] | r->allowed[t]) ? EINVAL : 0;
	}
	return EINVAL;
}
