/* Completion channels and asynchronous events: what wakes a sleeper.
 *
 * A channel's descriptor is an epoll over a FIFO that any process writes into, a timer for the
 * nearest retry deadline and the pidfds of peers with work outstanding, so that deadlines and
 * deaths reach a sleeper without a thread. An event is an index and an epoch, never a pointer:
 * the FIFO's writers are other processes. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "softnic.h"

enum { WAKE_FIFO = 0, WAKE_TIMER = 1, WAKE_DEATH = 2 };

static int make_fifo(struct sn_ctx *ctx, uint32_t number)
{
	char path[192];
	sn_fabric_path(path, sizeof(path), "ch-%u-%u", ctx->id & (SN_SLOTS - 1), number);
	unlink(path);
	if (mkfifo(path, 0600)) {
		errno = sn_because(errno, "cannot create %s: %s", path, strerror(errno));
		return -1;
	}
	return open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
}

static int watch(int epoll, int fd, uint64_t what)
{
	struct epoll_event e = { .events = EPOLLIN, .data.u64 = what };
	return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e);
}

SN_EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_channel *ch;
	if (sn_foreign(ctx)) {
		errno = EPERM;
		return NULL;
	}
	int refused = sn_refused(ctx, SN_CREATE_COMP_CHANNEL);
	if (refused) {
		errno = refused;
		return NULL;
	}
	ch = calloc(1, sizeof(*ch));
	if (!ch)
		return NULL;
	pthread_mutex_lock(&ctx->lock);
	ch->number = ++ctx->next_channel;
	pthread_mutex_unlock(&ctx->lock);
	ch->ctx = ctx;
	ch->fifo = make_fifo(ctx, ch->number);
	ch->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	ch->ibv.fd = epoll_create1(EPOLL_CLOEXEC);
	if (ch->fifo < 0 || ch->timer < 0 || ch->ibv.fd < 0 || watch(ch->ibv.fd, ch->fifo, WAKE_FIFO) ||
	    watch(ch->ibv.fd, ch->timer, WAKE_TIMER)) {
		int err = errno;
		if (ch->fifo >= 0)
			close(ch->fifo);
		if (ch->timer >= 0)
			close(ch->timer);
		if (ch->ibv.fd >= 0)
			close(ch->ibv.fd);
		free(ch);
		errno = err;
		return NULL;
	}
	ch->ibv.context = context;
	pthread_mutex_init(&ch->lock, NULL);
	atomic_fetch_add(&ctx->objects, 1);
	return &ch->ibv;
}

SN_EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
	struct sn_channel *ch = sn_container(ibv, struct sn_channel, ibv);
	char path[192];
	if (sn_foreign(ch->ctx))
		return 0;
	if (ibv->refcnt)
		return EBUSY;
	sn_fabric_path(path, sizeof(path), "ch-%u-%u", ch->ctx->id & (SN_SLOTS - 1), ch->number);
	unlink(path);
	for (uint32_t i = 0; i < ch->num_death; i++)
		close(ch->death[i].fd);
	close(ch->ibv.fd);
	close(ch->timer);
	close(ch->fifo);
	struct sn_ctx *ctx = ch->ctx;
	free(ch);
	sn_object_gone(ctx);
	return 0;
}

void sn_channel_notify(struct sn_ctx *ctx, const struct sn_side *side, uint32_t channel, uint32_t cq, uint32_t epoch)
{
	struct sn_event e = { .kind = 0, .index = (uint16_t)cq, .epoch = epoch };
	if (side->peer) {
		sn_peer_event(side->peer, channel, &e);
	} else {
		struct sn_priv_cq *own = ctx->cqs[cq];
		if (own && own->ibv.channel &&
		    write(sn_container(own->ibv.channel, struct sn_channel, ibv)->fifo, &e, sizeof(e)) < 0) {
			/* full: whoever reads it is awake already */
		}
	}
}

static void set_timer(struct sn_channel *ch, uint64_t at)
{
	struct itimerspec t = { .it_value = { .tv_sec = (time_t)(at / 1000000000ULL), .tv_nsec = (long)(at % 1000000000ULL) } };
	ch->timer_at = at;
	timerfd_settime(ch->timer, TFD_TIMER_ABSTIME, &t, NULL);
}

void sn_channel_wake_at(struct sn_channel *ch, uint64_t at)
{
	pthread_mutex_lock(&ch->lock);
	if (!ch->timer_at || at < ch->timer_at)
		set_timer(ch, at);
	pthread_mutex_unlock(&ch->lock);
}

static bool watch_death(struct sn_channel *ch, struct sn_peer *p)
{
	for (uint32_t i = 0; i < ch->num_death; i++)
		if (ch->death[i].id == p->id)
			return true;
	int fd = ch->num_death < 64 ? (int)syscall(SYS_pidfd_open, p->pid, 0) : -1;
	if (fd < 0)
		return false;
	if (watch(ch->ibv.fd, fd, WAKE_DEATH | (uint64_t)p->id << 8)) {
		close(fd);
		return false;
	}
	ch->death[ch->num_death].id = p->id;
	ch->death[ch->num_death++].fd = fd;
	return true;
}

/* This QP is about to be connected. If the peer dies between the completion that it pushes and the
 * event that announces it, whoever sleeps here must look. */
void sn_channel_connected(struct sn_priv_qp *qp, struct sn_peer *peer)
{
	struct ibv_comp_channel *of[2] = { qp->ibv.send_cq->channel, qp->ibv.recv_cq->channel };
	for (int i = 0; i < 2; i++) {
		if (!of[i] || peer->local || (i && of[1] == of[0]))
			continue;
		struct sn_channel *ch = sn_container(of[i], struct sn_channel, ibv);
		pthread_mutex_lock(&ch->lock);
		watch_death(ch, peer);
		pthread_mutex_unlock(&ch->lock);
	}
}

/* The head of this QP's send queue waits, and its owner may go to sleep. */
void sn_channel_watch(struct sn_priv_qp *qp)
{
	struct ibv_comp_channel *ibv = qp->ibv.send_cq->channel;
	struct sn_cq *cq = sn_container(qp->ibv.send_cq, struct sn_priv_cq, ibv)->cq;
	if (!ibv || atomic_load(&cq->armed) == SN_ARM_NONE)
		return;
	struct sn_channel *ch = sn_container(ibv, struct sn_channel, ibv);
	uint64_t at = atomic_load(&qp->qp->sq.deadline);
	pthread_mutex_lock(&ch->lock);
	struct sn_peer *peer = qp->peer;
	/* Known to be dead: now. Where no pidfd says so (another pid namespace, a context of this very
	 * process): look often. And nothing hangs on one wake-up alone: look now and then in any case. */
	uint64_t look = sn_now();
	if (!peer || !peer->dead)
		look += peer && (peer->local || !watch_death(ch, peer)) ? 50000000 : 1000000000;
	if (!at || look < at)
		at = look;
	if (at && (!ch->timer_at || at < ch->timer_at))
		set_timer(ch, at);
	pthread_mutex_unlock(&ch->lock);
}

static void peer_died(struct sn_channel *ch, sn_id id)
{
	pthread_mutex_lock(&ch->lock);
	for (uint32_t i = 0; i < ch->num_death; i++)
		if (ch->death[i].id == id) {
			/* a forked child may hold a copy, so closing alone would not take it out */
			epoll_ctl(ch->ibv.fd, EPOLL_CTL_DEL, ch->death[i].fd, NULL);
			close(ch->death[i].fd);
			ch->death[i] = ch->death[--ch->num_death];
			break;
		}
	pthread_mutex_unlock(&ch->lock);
	struct sn_peer *p = ch->ctx->peers[id & (SN_SLOTS - 1)];
	for (; p; p = p->retired)
		if (p->id == id)
			p->next_probe = 0;
}

static void kick_all(struct sn_channel *ch)
{
	struct sn_ctx *ctx = ch->ctx;
	pthread_mutex_lock(&ctx->lock);
	for (uint32_t i = 0; i < SN_CQS && i < atomic_load(&ctx->seg->cq_limit); i++) {
		struct sn_priv_cq *cq = ctx->cqs[i];
		if (!cq || cq->ibv.channel != &ch->ibv || !atomic_load(&cq->pending))
			continue;
		sn_cq_kick(cq);
		sn_spin(&cq->poll_lock);
		for (struct sn_priv_qp *qp = cq->senders; qp; qp = qp->next_sender)
			if (sn_qp_busy(qp->qp) || atomic_load(&qp->mourning))
				sn_channel_watch(qp);
		sn_unspin(&cq->poll_lock);
	}
	if (sn_faulty())
		sn_fault_before_sleep(ch);
	pthread_mutex_unlock(&ctx->lock);
}

/* The program gets an event of this CQ, and will have to acknowledge it. */
static void hand_out(struct sn_priv_cq *c, struct ibv_cq **cq, void **cq_context)
{
	pthread_mutex_lock(&c->ibv.mutex);
	c->events_seen++;
	pthread_mutex_unlock(&c->ibv.mutex);
	*cq = &c->ibv;
	*cq_context = c->ibv.cq_context;
}

static bool read_event(struct sn_channel *ch, struct ibv_cq **cq, void **cq_context)
{
	struct sn_event e;
	while (read(ch->fifo, &e, sizeof(e)) == sizeof(e)) {
		bool found = false;
		pthread_mutex_lock(&ch->ctx->lock);
		struct sn_priv_cq *c = e.kind == 0 && e.index < SN_CQS ? ch->ctx->cqs[e.index] : NULL;
		if (c && c->cq->epoch == e.epoch && c->ibv.channel == &ch->ibv) {
			hand_out(c, cq, cq_context);
			found = true;
		}
		pthread_mutex_unlock(&ch->ctx->lock);
		if (found)
			return true;
	}
	return false;
}

static bool has_completion(struct sn_ctx *ctx, struct sn_cq *cq)
{
	struct sn_cqe *ring = sn_at(ctx->seg, cq->ring);
	uint32_t head = atomic_load(&cq->head);
	return atomic_load(&ring[head & (cq->size - 1)].seq) == head + 1;
}

/* The descriptor said readable, but nothing came of it. Some CQ that is armed gets an event all the
 * same: verbs allow it, whereas sleeping after POLLIN would freeze an event loop. If none is armed
 * nobody is waiting, and what woke us is put to rest. A peer that died may have taken the arming with
 * it and not written the event: then a CQ with a completion in it counts as armed. */
static bool spurious_event(struct sn_channel *ch, bool death, struct ibv_cq **cq, void **cq_context)
{
	struct sn_ctx *ctx = ch->ctx;
	bool found = false;
	pthread_mutex_lock(&ctx->lock);
	for (uint32_t i = 0; i < SN_CQS && i < atomic_load(&ctx->seg->cq_limit) && !found; i++) {
		struct sn_priv_cq *c = ctx->cqs[i];
		if (!c || c->ibv.channel != &ch->ibv || (atomic_exchange(&c->cq->armed, SN_ARM_NONE) == SN_ARM_NONE &&
							 !(death && has_completion(ctx, c->cq))))
			continue;
		hand_out(c, cq, cq_context);
		found = true;
	}
	pthread_mutex_unlock(&ctx->lock);
	if (found)
		return true;
	pthread_mutex_lock(&ch->lock);
	set_timer(ch, 0);
	pthread_mutex_unlock(&ch->lock);
	return false;
}

SN_EXPORT int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **cq, void **cq_context)
{
	struct sn_channel *ch = sn_container(ibv, struct sn_channel, ibv);
	if (sn_foreign(ch->ctx)) {
		errno = EPERM;
		return -1;
	}
	for (bool slept = false;; slept = true) {
		struct epoll_event e[8];
		bool kick = false, death = false;
		if (read_event(ch, cq, cq_context)) {
			sn_stage_look(ch->ctx);
			return 0;
		}
		int flags = fcntl(ibv->fd, F_GETFL);
		bool block = flags >= 0 && !(flags & O_NONBLOCK);
		struct pollfd sleep = { .fd = ibv->fd, .events = POLLIN };
		/* EINTR included, as read() from a device would. poll and not epoll_wait, which fails with
		 * it also after a mere stop and continue, with no handler run. */
		if (block && poll(&sleep, 1, -1) < 0)
			return -1;
		int n = epoll_wait(ibv->fd, e, 8, 0);
		if (n < 0)
			return -1;
		for (int i = 0; i < n; i++) {
			uint64_t ticks;
			if ((e[i].data.u64 & 0xff) == WAKE_DEATH) {
				peer_died(ch, (sn_id)(e[i].data.u64 >> 8));
				kick = death = true;
			} else if (e[i].data.u64 == WAKE_TIMER) {
				pthread_mutex_lock(&ch->lock);
				if (read(ch->timer, &ticks, sizeof(ticks)) == sizeof(ticks))
					ch->timer_at = 0;
				pthread_mutex_unlock(&ch->lock);
				kick = true;
			}
		}
		if (kick)
			kick_all(ch);
		sn_stage_look(ch->ctx);
		if (read_event(ch, cq, cq_context) || (kick && spurious_event(ch, death, cq, cq_context)))
			return 0;
		if (!block && (n == 0 || slept)) {
			errno = EAGAIN;
			return -1;
		}
	}
}

SN_EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
	if (sn_foreign(sn_ctx_of(cq->context)))
		return;
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += n;
	pthread_cond_signal(&cq->cond);
	pthread_mutex_unlock(&cq->mutex);
}

/* ---- asynchronous events: FIFO number 0 of the context ------------------------------------ */

int sn_async_open(struct sn_ctx *ctx)
{
	ctx->async_fifo = make_fifo(ctx, 0);
	if (ctx->async_fifo < 0)
		return errno;
	int flags = fcntl(ctx->async_fifo, F_GETFL);
	fcntl(ctx->async_fifo, F_SETFL, flags & ~O_NONBLOCK); /* ibv_get_async_event blocks by default */
	ctx->vctx.context.async_fd = ctx->async_fifo;
	return 0;
}

void sn_async_raise(struct sn_ctx *ctx, const struct sn_side *side, enum ibv_event_type type, uint32_t index,
		    uint32_t epoch)
{
	struct sn_event e = { .kind = (uint16_t)(type + 1), .index = (uint16_t)index, .epoch = epoch };
	char path[192];
	(void)ctx;
	/* rare: opened each time, so that the owner's own blocking descriptor is never written to */
	sn_fabric_path(path, sizeof(path), "ch-%u-0", side->seg->id & (SN_SLOTS - 1));
	int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0)
		return;
	if (write(fd, &e, sizeof(e)) < 0) {
		/* full of events that nobody reads */
	}
	close(fd);
}

static bool resolve_async(struct sn_ctx *ctx, const struct sn_event *e, struct ibv_async_event *out)
{
	out->event_type = (enum ibv_event_type)(e->kind - 1);
	switch (out->event_type) {
	case IBV_EVENT_CQ_ERR:
		if (e->index >= SN_CQS || !ctx->cqs[e->index] || ctx->cqs[e->index]->cq->epoch != e->epoch)
			return false;
		out->element.cq = &ctx->cqs[e->index]->ibv;
		ctx->cqs[e->index]->async_seen++;
		return true;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		if (e->index >= SN_SRQS || !ctx->srqs[e->index] ||
		    atomic_load(&ctx->srqs[e->index]->srq->epoch) != e->epoch)
			return false;
		out->element.srq = &ctx->srqs[e->index]->ibv;
		ctx->srqs[e->index]->async_seen++;
		return true;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		if (e->index >= SN_QPS || !ctx->qps[e->index] ||
		    atomic_load(&ctx->qps[e->index]->qp->epoch) != e->epoch)
			return false;
		out->element.qp = &ctx->qps[e->index]->ibv;
		ctx->qps[e->index]->async_seen++;
		return true;
	default:
		out->element.port_num = 1;
		return true;
	}
}

SN_EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	struct sn_event e;
	if (sn_foreign(ctx)) {
		errno = EPERM;
		return -1;
	}
	while (read(ctx->async_fifo, &e, sizeof(e)) == sizeof(e)) {
		pthread_mutex_lock(&ctx->lock);
		bool ok = e.kind && resolve_async(ctx, &e, event);
		pthread_mutex_unlock(&ctx->lock);
		if (ok)
			return 0;
	}
	return -1;
}

static void acked(pthread_mutex_t *m, pthread_cond_t *c, uint32_t *count)
{
	pthread_mutex_lock(m);
	(*count)++;
	pthread_cond_signal(c);
	pthread_mutex_unlock(m);
}

SN_EXPORT void ibv_ack_async_event(struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		acked(&event->element.cq->mutex, &event->element.cq->cond, &event->element.cq->async_events_completed);
		break;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		acked(&event->element.srq->mutex, &event->element.srq->cond, &event->element.srq->events_completed);
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		acked(&event->element.qp->mutex, &event->element.qp->cond, &event->element.qp->events_completed);
		break;
	default:
		break;
	}
}
