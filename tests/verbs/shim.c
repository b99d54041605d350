/* libsoftnic with faults: the verb named in shim_verb fails with shim_errno, shim_times
 * times, after shim_skip calls that do not. Everything else goes to the real library, which this one is linked to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <infiniband/verbs.h>

#undef ibv_reg_mr

char shim_verb[64];
int shim_errno = EIO;
int shim_times, shim_skip;

static int fails(const char *verb)
{
	if (strcmp(verb, shim_verb) || shim_times <= 0)
		return 0;
	if (shim_skip-- > 0)
		return 0;
	shim_times--;
	errno = shim_errno;
	return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define POINTER(type, name, params, args) \
	type *name params { return fails(#name) ? NULL : REAL(name) args; }
#define NUMBER(name, params, args) \
	int name params { return fails(#name) ? shim_errno : REAL(name) args; }
#define MINUS(name, params, args) \
	int name params { return fails(#name) ? -1 : REAL(name) args; }

POINTER(struct ibv_device *, ibv_get_device_list, (int *n), (n))
POINTER(struct ibv_pd, ibv_alloc_pd, (struct ibv_context *c), (c))
POINTER(struct ibv_mr, ibv_reg_mr, (struct ibv_pd *p, void *a, size_t n, int f), (p, a, n, f))
POINTER(struct ibv_comp_channel, ibv_create_comp_channel, (struct ibv_context *c), (c))
POINTER(struct ibv_cq, ibv_create_cq,
	(struct ibv_context *c, int n, void *u, struct ibv_comp_channel *h, int x), (c, n, u, h, x))
POINTER(struct ibv_srq, ibv_create_srq, (struct ibv_pd *p, struct ibv_srq_init_attr *a), (p, a))
POINTER(struct ibv_qp, ibv_create_qp, (struct ibv_pd *p, struct ibv_qp_init_attr *a), (p, a))
POINTER(struct ibv_ah, ibv_create_ah, (struct ibv_pd *p, struct ibv_ah_attr *a), (p, a))
NUMBER(ibv_close_device, (struct ibv_context *c), (c))
NUMBER(ibv_dealloc_pd, (struct ibv_pd *p), (p))
NUMBER(ibv_dereg_mr, (struct ibv_mr *m), (m))
NUMBER(ibv_destroy_comp_channel, (struct ibv_comp_channel *h), (h))
NUMBER(ibv_destroy_cq, (struct ibv_cq *q), (q))
NUMBER(ibv_destroy_srq, (struct ibv_srq *s), (s))
NUMBER(ibv_destroy_qp, (struct ibv_qp *q), (q))
NUMBER(ibv_destroy_ah, (struct ibv_ah *a), (a))
NUMBER(ibv_query_device, (struct ibv_context *c, struct ibv_device_attr *a), (c, a))
NUMBER(ibv_modify_qp, (struct ibv_qp *q, struct ibv_qp_attr *a, int m), (q, a, m))
NUMBER(ibv_query_qp, (struct ibv_qp *q, struct ibv_qp_attr *a, int m, struct ibv_qp_init_attr *i),
       (q, a, m, i))
NUMBER(ibv_modify_srq, (struct ibv_srq *s, struct ibv_srq_attr *a, int m), (s, a, m))
NUMBER(ibv_query_srq, (struct ibv_srq *s, struct ibv_srq_attr *a), (s, a))
NUMBER(ibv_resize_cq, (struct ibv_cq *q, int n), (q, n))
MINUS(ibv_query_pkey, (struct ibv_context *c, uint8_t p, int i, __be16 *k), (c, p, i, k))

/* the data path goes through the context's table of functions */
static struct ibv_context_ops ops;

static int post_send(struct ibv_qp *q, struct ibv_send_wr *w, struct ibv_send_wr **bad)
{
	*bad = w;
	return fails("ibv_post_send") ? shim_errno : ops.post_send(q, w, bad);
}

static int post_recv(struct ibv_qp *q, struct ibv_recv_wr *w, struct ibv_recv_wr **bad)
{
	*bad = w;
	return fails("ibv_post_recv") ? shim_errno : ops.post_recv(q, w, bad);
}

static int post_srq_recv(struct ibv_srq *s, struct ibv_recv_wr *w, struct ibv_recv_wr **bad)
{
	*bad = w;
	return fails("ibv_post_srq_recv") ? shim_errno : ops.post_srq_recv(s, w, bad);
}

static int poll_cq(struct ibv_cq *q, int n, struct ibv_wc *w)
{
	return fails("ibv_poll_cq") ? -1 : ops.poll_cq(q, n, w);
}

static int req_notify_cq(struct ibv_cq *q, int s)
{
	return fails("ibv_req_notify_cq") ? shim_errno : ops.req_notify_cq(q, s);
}

struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	struct ibv_context *c = fails("ibv_open_device") ? NULL : REAL(ibv_open_device)(d);
	if (c) {
		ops = c->ops;
		c->ops.post_send = post_send;
		c->ops.post_recv = post_recv;
		c->ops.post_srq_recv = post_srq_recv;
		c->ops.poll_cq = poll_cq;
		c->ops.req_notify_cq = req_notify_cq;
	}
	return c;
}
