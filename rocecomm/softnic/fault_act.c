/* What a fault does to the work request at the head of a send queue, and to those who sleep
 * meanwhile.
 *
 * While something is injected at R, only R carries out R's queue: R's process has the rules. A peer
 * that would go on in its place wakes it instead. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>

#include "fault.h"

/* ---- ports ---------------------------------------------------------------------------------- */

static bool down(struct sn_seg *seg)
{
	if (!(atomic_load(&seg->faults) & SN_FAULTS_PORT))
		return false;
	uint64_t until = atomic_load(&seg->port_up_at);
	return !until || sn_now() < until;
}

void sn_fault_set_port(struct sn_ctx *ctx, bool up, uint64_t ns)
{
	struct sn_side own = { ctx->seg, NULL, NULL };
	bool was_down = atomic_load(&ctx->seg->faults) & SN_FAULTS_PORT;
	atomic_store(&ctx->seg->port_up_at, !up && ns ? sn_now() + ns : 0);
	sn_fault_mark(ctx, up ? 0 : SN_FAULTS_PORT, up ? SN_FAULTS_PORT : 0);
	if (was_down == up)
		sn_async_raise(ctx, &own, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, 1, 0);
}

/* Looked at by the context itself; a port that was down for a time comes up here. */
bool sn_fault_port_down(struct sn_ctx *ctx)
{
	if (down(ctx->seg))
		return true;
	if (atomic_load(&ctx->seg->faults) & SN_FAULTS_PORT)
		sn_fault_set_port(ctx, true, 0);
	return false;
}

SN_EXPORT int softnic_port(struct ibv_context *context, int up)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	if (sn_foreign(ctx))
		return EPERM;
	sn_fault_set_port(ctx, up, 0);
	/* what waited here and at the peers may go on, or now waits for something else */
	pthread_mutex_lock(&ctx->lock);
	for (uint32_t i = 0; i < atomic_load(&ctx->seg->qp_limit); i++)
		if (ctx->qps[i] && !ctx->qps[i]->destroying) {
			sn_drive(ctx->qps[i]);
			sn_drive_peer(ctx->qps[i]);
		}
	pthread_mutex_unlock(&ctx->lock);
	sn_fault_wake(ctx->seg);
	return 0;
}

/* ---- peers and completion queues ------------------------------------------------------------ */

static void shun(struct sn_ctx *ctx, struct sn_peer *peer)
{
	atomic_store(&peer->shunned, true);
	sn_fault_mark(ctx, SN_FAULTS_SHUN, 0);
	sn_fault_wake(ctx->seg); /* other queues may wait for it */
}

SN_EXPORT int softnic_peer_death(struct ibv_qp *ibv)
{
	struct sn_priv_qp *qp = sn_container(ibv, struct sn_priv_qp, ibv);
	struct sn_side t;
	if (sn_foreign(qp->ctx))
		return EPERM;
	if (qp->qp->type == IBV_QPT_UD || !sn_peer_side(qp, &t) || !t.peer)
		return sn_because(ENOTCONN, "queue pair 0x%x is not connected to another context, so nobody is there to be "
					    "declared dead", qp->qp->qpn);
	shun(qp->ctx, t.peer);
	sn_drive(qp);
	return 0;
}

static void overrun(struct sn_ctx *ctx, uint32_t index)
{
	struct sn_side own = { ctx->seg, NULL, NULL };
	struct sn_cq *cq = sn_cq_at(ctx->seg, index);
	if (!atomic_exchange(&cq->overrun, 1))
		sn_async_raise(ctx, &own, IBV_EVENT_CQ_ERR, index, cq->epoch);
}

static void qp_fatal(struct sn_ctx *ctx, struct sn_qp *qp)
{
	struct sn_side own = { ctx->seg, qp, NULL };
	sn_async_raise(ctx, &own, IBV_EVENT_QP_FATAL, qp->qpn & (SN_QPS - 1), atomic_load(&qp->epoch));
}

SN_EXPORT int softnic_cq_overrun(struct ibv_cq *ibv)
{
	struct sn_priv_cq *cq = sn_container(ibv, struct sn_priv_cq, ibv);
	struct sn_ctx *ctx = sn_ctx_of(ibv->context);
	if (sn_foreign(ctx))
		return EPERM;
	pthread_mutex_lock(&ctx->lock);
	overrun(ctx, cq->index);
	for (uint32_t i = 0; i < atomic_load(&ctx->seg->qp_limit); i++) {
		struct sn_priv_qp *qp = ctx->qps[i];
		if (!qp || qp->destroying || (qp->qp->send_cq != cq->index && qp->qp->recv_cq != cq->index))
			continue;
		struct sn_side own = sn_own_side(qp);
		if (sn_qp_fail(ctx, &own)) {
			qp_fatal(ctx, qp->qp);
			sn_drive(qp);
			sn_drive_peer(qp);
		}
	}
	pthread_mutex_unlock(&ctx->lock);
	sn_fault_wake(ctx->seg);
	return 0;
}

/* ---- the head of a send queue --------------------------------------------------------------- */

static enum sn_fault_do end(struct job *j, enum ibv_wc_status status)
{
	/* who is not connected is told nothing of what happens on the way */
	bool away = status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_RNR_RETRY_EXC_ERR;
	j->status = away && j->r->qp->type != IBV_QPT_RC ? IBV_WC_SUCCESS : status;
	return SN_FAULT_DONE;
}

static enum sn_fault_do hold(struct job *j, uint64_t until)
{
	struct sn_sq *sq = &j->r->qp->sq;
	atomic_store(&sq->deadline, until == UINT64_MAX ? 0 : until);
	atomic_store(&sq->wait, SN_WAIT_FAULT);
	j->status = IBV_WC_SUCCESS;
	return SN_FAULT_WAIT;
}

/* When the device gives up, or UINT64_MAX: a timeout of 0 stands for never. */
static uint64_t retries_end(const struct sn_qp *qp, uint64_t now, unsigned transmissions)
{
	return qp->timeout ? now + transmissions * (4096ULL << (qp->timeout & 31)) : UINT64_MAX;
}

/* A status that the responder caused leaves its mark there as well. */
static enum sn_fault_do fail_with(struct job *j, enum ibv_wc_status status)
{
	enum ibv_event_type event = status == IBV_WC_REM_ACCESS_ERR	 ? IBV_EVENT_QP_ACCESS_ERR
				    : status == IBV_WC_REM_INV_REQ_ERR ? IBV_EVENT_QP_REQ_ERR
								       : IBV_EVENT_QP_FATAL;
	bool remote = status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR || status == IBV_WC_REM_OP_ERR;
	if (remote && j->r->qp->type == IBV_QPT_RC && j->t && j->t->qp->dest_qpn == j->r->qp->qpn) {
		j->fail_t = true;
		sn_async_raise(j->ctx, j->t, event, j->t->qp->qpn & (SN_QPS - 1), atomic_load(&j->t->qp->epoch));
	}
	j->status = status;
	return SN_FAULT_DONE;
}

/* A rule has hit this request, just now. */
static void begin(struct job *j, struct sn_hold *h, const struct sn_fault_rule *rule)
{
	struct sn_qp *qp = j->r->qp;
	uint64_t now = sn_now();

	h->kind = rule->kind;
	h->id = rule->id;
	h->status = rule->status;
	h->then = IBV_WC_SUCCESS;
	switch (rule->kind) {
	case SN_DELAY:
		h->until = now + rule->ns;
		break;
	case SN_DROP:
		if (rule->lost && rule->lost <= qp->retry_cnt) {
			h->until = retries_end(qp, now, rule->lost);
		} else {
			h->until = retries_end(qp, now, qp->retry_cnt + 1u);
			h->then = IBV_WC_RETRY_EXC_ERR;
		}
		break;
	case SN_RNR:
		h->until = UINT64_MAX;
		if (qp->rnr_retry < 7) {
			h->until = now + qp->rnr_retry * sn_rnr_timer_ns(j->t ? j->t->qp->min_rnr_timer : 0);
			h->then = IBV_WC_RNR_RETRY_EXC_ERR;
		}
		if (rule->ns && now + rule->ns < h->until) {
			h->until = now + rule->ns;
			h->then = IBV_WC_SUCCESS;
		}
		break;
	case SN_PORT_DOWN:
		sn_fault_set_port(j->ctx, false, rule->ns);
		h->kind = SN_NO_FAULT; /* from here on the port speaks for itself */
		break;
	case SN_PEER_DEATH:
		if (j->t && j->t->peer) {
			shun(j->ctx, j->t->peer);
			h->kind = SN_NO_FAULT;
		} else { /* itself, or nobody */
			h->kind = SN_STATUS;
			h->status = IBV_WC_RETRY_EXC_ERR;
		}
		break;
	default:
		break;
	}
}

/* The other end, for whoever wants to know whether it can be reached. */
static bool far_end(struct job *j, struct sn_side *t)
{
	struct sn_peer *_Atomic found = NULL;
	if (j->t)
		*t = *j->t;
	return j->t || (j->r->qp->type == IBV_QPT_UD && sn_side_of(j->ctx, j->w->ud_qpn, &found, t));
}

enum sn_fault_do sn_fault(struct job *j, uint32_t head)
{
	struct sn_qp *qp = j->r->qp;
	struct sn_priv_qp *priv = j->ctx->qps[qp->qpn & (SN_QPS - 1)];
	struct sn_fault_rule rule;
	struct sn_side t;
	uint32_t epoch = atomic_load(&qp->epoch);

	if (j->r->peer || !priv)
		return SN_FAULT_NONE;
	struct sn_hold *h = &priv->hold;
	uint32_t op = SN_OP(j->w->opcode & 31);
	bool message = op & SN_OP_MESSAGE;
	if (h->position != head + 1 || h->epoch != epoch) {
		*h = (struct sn_hold){ .position = head + 1, .epoch = epoch };
		if (sn_fault_decide(j->ctx, qp->qpn, op, &rule))
			begin(j, h, &rule);
	}
	if (h->kind == SN_STATUS)
		return fail_with(j, h->status);
	if (h->kind == SN_CQ_OVERRUN) {
		overrun(j->ctx, qp->send_cq);
		qp_fatal(j->ctx, qp);
		j->status = IBV_WC_GENERAL_ERR; /* nobody will hear of it */
		return SN_FAULT_DONE;
	}
	if (!message)
		return SN_FAULT_NONE;

	bool there = far_end(j, &t);
	uint64_t now = sn_now();
	if (there && t.peer && (atomic_load(&t.peer->shunned) || sn_peer_dead(t.peer, now)))
		return end(j, IBV_WC_RETRY_EXC_ERR);
	if (sn_fault_port_down(j->ctx) || (there && down(t.seg))) {
		if (qp->type != IBV_QPT_RC)
			return end(j, IBV_WC_RETRY_EXC_ERR);
		if (!h->silent_until)
			h->silent_until = retries_end(qp, now, qp->retry_cnt + 1u);
		if (now >= h->silent_until)
			return end(j, IBV_WC_RETRY_EXC_ERR);
		/* a port that is to come up by itself is looked at then */
		uint64_t until = h->silent_until, up = atomic_load(&j->ctx->seg->port_up_at), far_up = 0;
		if (there)
			far_up = atomic_load(&t.seg->port_up_at);
		if (up > now && up < until)
			until = up;
		if (far_up > now && far_up < until)
			until = far_up;
		return hold(j, until);
	}
	h->silent_until = 0;
	if (h->kind == SN_NO_FAULT)
		return SN_FAULT_NONE;
	if (qp->type != IBV_QPT_RC && h->kind != SN_DELAY)
		return end(j, IBV_WC_RETRY_EXC_ERR); /* lost, and nobody is told */
	if (!sn_fault_still(h->id))
		h->then = IBV_WC_SUCCESS;
	else if (now < h->until)
		return hold(j, h->until);
	h->kind = SN_NO_FAULT;
	return h->then == IBV_WC_SUCCESS ? SN_FAULT_NONE : end(j, h->then);
}

/* A receive is about to be reported: the status that a rule puts in place of success. */
enum ibv_wc_status sn_fault_receive(struct sn_priv_qp *qp)
{
	struct sn_fault_rule rule;
	struct sn_side own = sn_own_side(qp);
	if (!(atomic_load(&qp->ctx->seg->faults) & SN_FAULTS_RULES) ||
	    !sn_fault_decide(qp->ctx, qp->qp->qpn, SN_OP_RECV, &rule))
		return IBV_WC_SUCCESS;
	sn_qp_fail(qp->ctx, &own);
	return rule.status;
}

/* ---- progress and sleep --------------------------------------------------------------------- */

/* Must R's queue be left to R? */
bool sn_fault_leave_to(const struct sn_side *r, const struct sn_side *t)
{
	return atomic_load(&r->seg->faults) || (t && atomic_load(&t->seg->faults) & SN_FAULTS_PORT);
}

/* Whoever sleeps on a channel of this context gets an event, and looks. */
void sn_fault_wake(struct sn_seg *seg)
{
	char path[192];
	for (uint32_t i = 0; i < SN_CQS && i < atomic_load(&seg->cq_limit); i++) {
		struct sn_cq *cq = sn_cq_at(seg, i);
		if (!cq->channel || atomic_exchange(&cq->armed, SN_ARM_NONE) == SN_ARM_NONE)
			continue;
		struct sn_event e = { .kind = 0, .index = (uint16_t)i, .epoch = cq->epoch };
		sn_fabric_path(path, sizeof(path), "ch-%u-%u", seg->id & (SN_SLOTS - 1), cq->channel);
		int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
		if (fd < 0)
			continue;
		if (write(fd, &e, sizeof(e)) < 0) {
			/* full: its reader is awake */
		}
		close(fd);
	}
}

/* Everything of this context that waits, whichever queue the program looks at: nobody else may go
 * on in its place. With the context's lock held. */
static bool kick_all(struct sn_ctx *ctx)
{
	bool moved = false;
	for (uint32_t i = 0; i < SN_CQS && i < atomic_load(&ctx->seg->cq_limit); i++)
		if (ctx->cqs[i] && atomic_load(&ctx->cqs[i]->pending))
			moved |= sn_cq_kick(ctx->cqs[i]);
	return moved;
}

bool sn_fault_kick(struct sn_ctx *ctx)
{
	if (pthread_mutex_trylock(&ctx->lock))
		return false; /* somebody is at it, or makes or ends an object: the next poll will do */
	bool moved = kick_all(ctx);
	pthread_mutex_unlock(&ctx->lock);
	return moved;
}

/* Before a sleep on `ch`, with the context's lock held: the timer goes off when the next of all
 * queues has to be looked at. */
void sn_fault_before_sleep(struct sn_channel *ch)
{
	struct sn_ctx *ctx = ch->ctx;
	uint64_t at = 0;
	kick_all(ctx);
	for (uint32_t i = 0; i < atomic_load(&ctx->seg->qp_limit); i++) {
		if (!ctx->qps[i] || !sn_qp_busy(ctx->qps[i]->qp))
			continue;
		uint64_t look = sn_now() + 1000000000ULL, deadline = atomic_load(&ctx->qps[i]->qp->sq.deadline);
		if (deadline && deadline < look)
			look = deadline;
		if (!at || look < at)
			at = look;
	}
	if (at)
		sn_channel_wake_at(ch, at);
}
