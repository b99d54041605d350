/* Queue pairs that fail: the error state, what is flushed, and receives that a peer took with it. */
#define _GNU_SOURCE
#include "job.h"

/* A QP in error whose peer may still have receives of ours in its hands: it completes them, or it dies
 * with them. Nor may it have come to the end of flushing what was posted. True: ask again. */
bool sn_qp_mourn(struct sn_priv_qp *own)
{
	struct sn_peer *peer = atomic_load(&own->peer);
	struct sn_side side = sn_own_side(own);
	uint64_t now = sn_now();
	if (!atomic_load(&own->mourning))
		return false;
	if (now < own->mourn_at)
		return true;
	own->mourn_at = now + 2000000;
	if (peer && atomic_load(&own->qp->state) == IBV_QPS_ERR) {
		if (sn_peer_dead(peer, now)) {
			if (own->qp->srq < 0)
				sn_rq_flush(own->ctx, &side);
			sn_rq_flush_taken(own);
		} else if (sn_rq_has_taken(own)) {
			return true;
		}
	}
	atomic_store(&own->mourning, false);
	return false;
}

bool sn_qp_set_error(const struct sn_side *side)
{
	uint32_t state = atomic_load(&side->qp->state);
	while (state != IBV_QPS_ERR && state != IBV_QPS_RESET && state != SN_QP_FREE)
		if (atomic_compare_exchange_weak(&side->qp->state, &state, IBV_QPS_ERR))
			return true;
	return false;
}

void sn_flush_receives(struct sn_ctx *ctx, const struct sn_side *side)
{
	sn_rq_flush(ctx, side);
	struct sn_priv_qp *own = side->peer ? NULL : ctx->qps[side->qp->qpn & (SN_QPS - 1)];
	struct sn_peer *peer = own ? atomic_load(&own->peer) : NULL;
	if (peer && peer->dead)
		sn_rq_flush_taken(own); /* what it took it will not complete */
}

/* To the error state, once: the receive queue is flushed here, the send queue by its next drive.
 * True if it was this call that did it: then the peer's sends have nobody left to wait for. */
bool sn_qp_fail(struct sn_ctx *ctx, const struct sn_side *side)
{
	if (!sn_qp_set_error(side))
		return false;
	sn_flush_receives(ctx, side);
	return true;
}
