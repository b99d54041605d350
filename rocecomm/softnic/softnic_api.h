/* What libsoftnic.so offers beside libibverbs' own symbols. A program that also runs on other
 * devices looks these up with dlsym(): libibverbs does not have them.
 *
 * int functions return 0 or a positive errno; softnic_reason() then says in words what was found. */
#ifndef SOFTNIC_API_H
#define SOFTNIC_API_H

#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- memory ------------------------------------------------------------------------------- */

/* Zeroed, page-aligned memory that peers on this host can map. */
int softnic_alloc(struct ibv_context *context, size_t length, void **addr);
int softnic_free(struct ibv_context *context, void *addr, size_t length);

/* 1: registering memory costs nothing, a cache of registrations is pointless. */
int softnic_reg_is_free(void);

/* What the last call that failed in this thread found, and what to do about it; "" if nothing is
 * known. Asking forgets it. */
const char *softnic_reason(void);

/* ---- faults on request -------------------------------------------------------------------- */

/* Adds fault rules to what `context` sends (NULL: every context of this process), e.g.
 *
 *     uint64_t id;
 *     softnic_inject(NULL, "drop:p=0.01,seed=7;delay:us=200,op=rdma_write", &id);
 *
 * The text is that of ROCECOMM_SOFT_FAULT: rules separated by ';', each KIND[:KEY=VALUE,...].
 *
 *     delay        the request waits s=, ms= or us=, then goes on
 *     drop         it is lost lost=N times; without N, or beyond the retry count:
 *                  IBV_WC_RETRY_EXC_ERR after the transport timeout
 *     rnr          the peer has no receive ready, for s=/ms=/us= or until the retries are used up
 *     port_down    the port of the posting context goes down (for s=/ms=/us=, or until softnic_port)
 *     peer_death   the context at the other end is dead for this one from here on
 *     cq_overrun   the send completion queue overruns
 *     refuse       control verbs fail: verb=A+B (alloc_pd, reg_mr, dereg_mr, create_comp_channel,
 *                  create_cq, destroy_cq, create_srq, destroy_srq, create_qp, modify_qp, destroy_qp)
 *                  with errno=E (EIO)
 *     access, or any work completion status (rem_access_err, IBV_WC_GENERAL_ERR, ...)
 *                  the request ends with it
 *
 *     op=A+B       send rdma_write (write) rdma_read (read) atomic, exact opcodes as
 *                  send_with_imm, bind_mw, local_inv; recv (status kinds only): receives
 *     qp=N         number of the queue pair that posts
 *     dev=soft0    device
 *     after=N      the first N requests that match are left alone
 *     times=N      at most N requests are hit (1 for port_down, peer_death and cq_overrun)
 *     p=X, seed=N  each is hit with this probability; the same seed hits the same ones
 *
 * Of several rules the first that hits acts. Rules belong to the process and are not inherited
 * through fork(). What waits because of a rule goes on when the rule is removed. */
int softnic_inject(struct ibv_context *context, const char *rules, uint64_t *id);

/* ENOENT: there is none with this number (any more). */
int softnic_inject_remove(uint64_t id);

/* How many work requests matched the rules of `id` and how many were hit. */
int softnic_inject_stats(uint64_t id, uint64_t *matched, uint64_t *hit);

/* Takes the port of a context down or up: IBV_EVENT_PORT_ERR or IBV_EVENT_PORT_ACTIVE. While it is
 * down nothing travels from or to this context. */
int softnic_port(struct ibv_context *context, int up);

/* The context at the other end of `qp` is dead for the context of `qp`, as if its process had been
 * killed. It stays so until the context is closed. */
int softnic_peer_death(struct ibv_qp *qp);

/* `cq` overruns: IBV_EVENT_CQ_ERR, and its queue pairs fail with IBV_EVENT_QP_FATAL. */
int softnic_cq_overrun(struct ibv_cq *cq);

#ifdef __cplusplus
}
#endif
#endif
