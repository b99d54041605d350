/* For the tests of faults on request. */
#ifndef FAULT_TEST_H
#define FAULT_TEST_H

#include "pair.h"
#include "softnic_api.h"

static inline uint64_t inject(struct end *e, const char *rules)
{
	uint64_t id = 0;
	int err = softnic_inject(e ? e->ctx : NULL, rules, &id);
	if (err) {
		fprintf(stderr, "%s: errno %d, %s\n", rules, err, softnic_reason());
		exit(1);
	}
	return id;
}

static inline void uninject(uint64_t id, uint64_t matched, uint64_t hit)
{
	uint64_t m, h;
	CHECK(softnic_inject_stats(id, &m, &h) == 0);
	if (m != matched || h != hit) {
		fprintf(stderr, "matched %lu, hit %lu\n", (unsigned long)m, (unsigned long)h);
		exit(1);
	}
	CHECK(softnic_inject_remove(id) == 0);
	CHECK(softnic_inject_remove(id) == ENOENT && softnic_inject_stats(id, &m, &h) == ENOENT);
}

static inline enum ibv_qp_state state_of(struct end *e)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;
	CHECK(ibv_query_qp(e->qp, &a, IBV_QP_STATE, &i) == 0);
	return a.qp_state;
}

/* The next asynchronous event, at most 5 s away. */
static inline struct ibv_async_event next_event(struct end *e)
{
	struct ibv_async_event event;
	struct pollfd p = { .fd = e->ctx->async_fd, .events = POLLIN };
	CHECK(poll(&p, 1, 5000) == 1);
	CHECK(ibv_get_async_event(e->ctx, &event) == 0);
	ibv_ack_async_event(&event);
	return event;
}

static inline void no_event(struct end *e)
{
	struct pollfd p = { .fd = e->ctx->async_fd, .events = POLLIN };
	CHECK(poll(&p, 1, 0) == 0);
}

#endif
