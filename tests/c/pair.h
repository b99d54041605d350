/* Two connected RC queue pairs for the C tests, by default as two contexts of one process, so that
 * sanitizers see both ends. A test is one behaviour: exit 0 passed, 1 failed, 77 cannot run here. */
#ifndef PAIR_H
#define PAIR_H

#include <dirent.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what)                                                                       \
	do {                                                                              \
		if (!(what)) {                                                            \
			fprintf(stderr, "%s:%d: failed: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
			exit(1);                                                          \
		}                                                                         \
	} while (0)

#define ALL_ACCESS                                                                                \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

struct end {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char *buf;
	size_t len;
};

struct options {
	enum ibv_qp_type type;
	int depth, cqe, sge, inline_data, srq, channel;
	uint8_t timeout, retry_cnt, rnr_retry, min_rnr_timer;
	int qp_access, mr_access;
	size_t len;
};

static const struct options usual = { .type = IBV_QPT_RC, .depth = 64, .cqe = 256, .sge = 4, .inline_data = 64,
				      .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 12,
				      .qp_access = ALL_ACCESS, .mr_access = ALL_ACCESS, .len = 1 << 20 };

static inline double seconds(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline struct ibv_context *open_device(void)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	CHECK(list && n > 0);
	struct ibv_context *ctx = ibv_open_device(list[0]);
	ibv_free_device_list(list);
	return ctx;
}

static inline void end_open(struct end *e, const struct options *o)
{
	memset(e, 0, sizeof(*e));
	CHECK(e->ctx = open_device());
	CHECK(e->pd = ibv_alloc_pd(e->ctx));
	if (o->channel)
		CHECK(e->channel = ibv_create_comp_channel(e->ctx));
	CHECK(e->cq = ibv_create_cq(e->ctx, o->cqe, e, e->channel, 0));
	if (o->srq) {
		struct ibv_srq_init_attr s = { .attr = { .max_wr = (uint32_t)o->srq, .max_sge = (uint32_t)o->sge } };
		CHECK(e->srq = ibv_create_srq(e->pd, &s));
	}
	struct ibv_qp_init_attr a = { .send_cq = e->cq, .recv_cq = e->cq, .srq = e->srq, .qp_type = o->type,
				      .cap = { (uint32_t)o->depth, (uint32_t)o->depth, (uint32_t)o->sge,
					       (uint32_t)o->sge, (uint32_t)o->inline_data } };
	CHECK(e->qp = ibv_create_qp(e->pd, &a));
	e->len = o->len;
	CHECK(posix_memalign((void **)&e->buf, 4096, o->len) == 0);
	memset(e->buf, 0, o->len);
	CHECK(e->mr = ibv_reg_mr(e->pd, e->buf, o->len, o->mr_access));
}

static inline int to_rts(struct end *e, uint32_t peer, const struct options *o)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = (unsigned)o->qp_access,
				 .qkey = 0x11111111 };
	int ud = o->type == IBV_QPT_UD, rc = o->type == IBV_QPT_RC, err;
	err = ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					       (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
	if (err)
		return err;
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
				  .max_dest_rd_atomic = 16, .min_rnr_timer = o->min_rnr_timer,
				  .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1, .hop_limit = 64 } } };
	err = ibv_modify_qp(e->qp, &a, IBV_QP_STATE |
					       (ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) |
					       (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0));
	if (err)
		return err;
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = o->timeout, .retry_cnt = o->retry_cnt,
				  .rnr_retry = o->rnr_retry, .max_rd_atomic = 16 };
	return ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN |
						(rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
							      IBV_QP_MAX_QP_RD_ATOMIC
						    : 0));
}

static inline void pair_open(struct end e[2], const struct options *o)
{
	end_open(&e[0], o);
	end_open(&e[1], o);
	CHECK(to_rts(&e[0], e[1].qp->qp_num, o) == 0);
	CHECK(to_rts(&e[1], e[0].qp->qp_num, o) == 0);
}

static inline void end_close(struct end *e)
{
	CHECK(ibv_destroy_qp(e->qp) == 0);
	if (e->srq)
		CHECK(ibv_destroy_srq(e->srq) == 0);
	CHECK(ibv_destroy_cq(e->cq) == 0);
	if (e->channel)
		CHECK(ibv_destroy_comp_channel(e->channel) == 0);
	if (e->mr)
		CHECK(ibv_dereg_mr(e->mr) == 0);
	CHECK(ibv_dealloc_pd(e->pd) == 0);
	CHECK(ibv_close_device(e->ctx) == 0);
	free(e->buf);
}

static inline void pair_close(struct end e[2])
{
	end_close(&e[0]);
	end_close(&e[1]);
}

static inline struct ibv_sge sge_of(struct end *e, size_t at, size_t len)
{
	return (struct ibv_sge){ (uintptr_t)e->buf + at, (uint32_t)len, e->mr->lkey };
}

static inline int post_recv(struct end *e, uint64_t id, size_t at, size_t len)
{
	struct ibv_sge s = sge_of(e, at, len);
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1 }, *bad;
	return e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad);
}

static inline int post(struct end *e, enum ibv_wr_opcode opcode, uint64_t id, size_t at, size_t len, struct end *far,
		       size_t far_at)
{
	struct ibv_sge s = sge_of(e, at, len);
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED, .imm_data = 0x44332211 }, *bad;
	if (far) {
		wr.wr.rdma.remote_addr = (uintptr_t)far->buf + far_at;
		wr.wr.rdma.rkey = far->mr->rkey;
	}
	return ibv_post_send(e->qp, &wr, &bad);
}

static inline int post_atomic(struct end *e, enum ibv_wr_opcode opcode, uint64_t id, size_t at, struct end *far,
			      size_t far_at, uint64_t compare_add, uint64_t swap)
{
	struct ibv_sge s = sge_of(e, at, 8);
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.wr.atomic.remote_addr = (uintptr_t)far->buf + far_at;
	wr.wr.atomic.rkey = far->mr->rkey;
	wr.wr.atomic.compare_add = compare_add;
	wr.wr.atomic.swap = swap;
	return ibv_post_send(e->qp, &wr, &bad);
}

/* The next completion, at most 10 s away. */
static inline struct ibv_wc wait_wc(struct end *e)
{
	struct ibv_wc wc;
	double until = seconds() + 10;
	int n;
	while ((n = ibv_poll_cq(e->cq, 1, &wc)) == 0)
		CHECK(seconds() < until);
	CHECK(n == 1);
	return wc;
}

static inline void expect(struct end *e, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc = wait_wc(e);
	if (wc.wr_id != id || wc.status != status) {
		fprintf(stderr, "expected wr_id %lu status %d, got wr_id %lu status %d\n", (unsigned long)id, status,
			(unsigned long)wc.wr_id, wc.status);
		exit(1);
	}
}

static inline void expect_nothing(struct end *e)
{
	struct ibv_wc wc;
	for (int i = 0; i < 100; i++)
		CHECK(ibv_poll_cq(e->cq, 1, &wc) == 0);
}

static inline void pattern(char *p, size_t n, unsigned seed)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (char)(((i + seed) * 2654435761u) >> 24);
}

static inline int same(const char *p, size_t n, unsigned seed)
{
	for (size_t i = 0; i < n; i++)
		if (p[i] != (char)(((i + seed) * 2654435761u) >> 24))
			return 0;
	return 1;
}

static inline int count_fds(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/fd");
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

#endif
