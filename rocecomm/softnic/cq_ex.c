/* The extended completion queue: polled in place, one field at a time, with the time of completion.
 *
 * Between a start_poll that found something and end_poll the caller holds a lock against others of its
 * kind, and not the poll lock: in there it may arm the queue or register memory, and other threads take
 * the poll lock with the context's lock held. A queue that is promised to one thread keeps it all the
 * same; it costs a few nanoseconds. */
#define _GNU_SOURCE
#include "softnic.h"

#define KNOWN_FIELDS                                                                                   \
	(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
#define STAMPS (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)

static struct sn_priv_cq *priv_of(struct ibv_cq_ex *ex)
{
	return sn_container(ex, struct sn_priv_cq, ex);
}

/* The next completion becomes the current one. */
static int advance(struct sn_priv_cq *cq)
{
	sn_spin(&cq->poll_lock);
	int got = sn_cq_take(sn_ctx_of(cq->ibv.context), cq, 1, &cq->now);
	sn_unspin(&cq->poll_lock);
	if (got == 0)
		return ENOENT;
	cq->ex.status = cq->now.status;
	cq->ex.wr_id = cq->now.wr_id;
	return 0;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
	struct sn_priv_cq *cq = priv_of(ex);
	int err;

	if (attr->comp_mask)
		return EINVAL;
	if (sn_foreign(sn_ctx_of(ex->context)))
		return EPERM;
	sn_spin(&cq->session);
	err = advance(cq);
	if (!err) {
		atomic_store_explicit(&cq->empty_polls, 0, memory_order_relaxed);
		return 0;
	}
	sn_unspin(&cq->session);
	if (atomic_load_explicit(&cq->cq->overrun, memory_order_relaxed))
		return EOVERFLOW;
	if (!sn_cq_was_empty(cq))
		return err;
	sn_spin(&cq->session);
	err = advance(cq);
	if (err)
		sn_unspin(&cq->session);
	return err;
}

static int next_poll(struct ibv_cq_ex *ex)
{
	return advance(priv_of(ex));
}

static void end_poll(struct ibv_cq_ex *ex)
{
	sn_unspin(&priv_of(ex)->session);
}

/* ---- the fields of the current completion ------------------------------------------------- */

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->now.opcode;
}

static uint32_t read_vendor_err(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->now.vendor_err;
}

static uint32_t read_byte_len(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->now.byte_len;
}

static __be32 read_imm_data(struct ibv_cq_ex *ex) /* or the key that was invalidated */
{
	return priv_of(ex)->now.imm_data;
}

static uint32_t read_qp_num(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->now.qp_num;
}

static uint32_t read_src_qp(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->now.src_qp;
}

static unsigned read_wc_flags(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->now.wc_flags;
}

static uint32_t read_slid(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->now.slid;
}

static uint8_t read_sl(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->now.sl;
}

static uint8_t read_dlid_path_bits(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->now.dlid_path_bits;
}

static uint64_t read_completion_ts(struct ibv_cq_ex *ex)
{
	return priv_of(ex)->stamp;
}

/* One stamp serves both clocks: how long ago it was is the same on each. */
static uint64_t read_completion_wallclock_ns(struct ibv_cq_ex *ex)
{
	struct timespec t;
	uint64_t ago = sn_now() - priv_of(ex)->stamp;
	clock_gettime(CLOCK_REALTIME, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec - ago;
}

/* A field that was not asked for has no function, as with other providers. */
static void fill_functions(struct ibv_cq_ex *ex, uint64_t fields)
{
	ex->start_poll = start_poll;
	ex->next_poll = next_poll;
	ex->end_poll = end_poll;
	ex->read_opcode = read_opcode;
	ex->read_vendor_err = read_vendor_err;
	ex->read_wc_flags = read_wc_flags;
	if (fields & IBV_WC_EX_WITH_BYTE_LEN)
		ex->read_byte_len = read_byte_len;
	if (fields & IBV_WC_EX_WITH_IMM)
		ex->read_imm_data = read_imm_data;
	if (fields & IBV_WC_EX_WITH_QP_NUM)
		ex->read_qp_num = read_qp_num;
	if (fields & IBV_WC_EX_WITH_SRC_QP)
		ex->read_src_qp = read_src_qp;
	if (fields & IBV_WC_EX_WITH_SLID)
		ex->read_slid = read_slid;
	if (fields & IBV_WC_EX_WITH_SL)
		ex->read_sl = read_sl;
	if (fields & IBV_WC_EX_WITH_DLID_PATH_BITS)
		ex->read_dlid_path_bits = read_dlid_path_bits;
	if (fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
		ex->read_completion_ts = read_completion_ts;
	if (fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
		ex->read_completion_wallclock_ns = read_completion_wallclock_ns;
}

struct ibv_cq_ex *sn_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *a)
{
	uint32_t flags = a->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS ? a->flags : 0, kind;
	struct sn_priv_cq *cq;

	if (a->comp_mask & ~(uint32_t)(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) ||
	    a->wc_flags & ~(uint64_t)KNOWN_FIELDS ||
	    flags & ~(uint32_t)(IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN)) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	if (a->cqe > INT32_MAX || a->comp_vector > INT32_MAX) {
		errno = EINVAL;
		return NULL;
	}
	kind = (a->wc_flags & STAMPS ? SN_CQ_STAMPED : 0) |
	       (flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN ? SN_CQ_LOSSY : 0);
	cq = sn_create_cq(context, (int)a->cqe, a->cq_context, a->channel, (int)a->comp_vector, kind);
	if (!cq)
		return NULL;
	fill_functions(&cq->ex, a->wc_flags);
	return &cq->ex;
}

/* The clock that completions are stamped with. Where it ticks in cycles, tv_nsec holds all of them;
 * here a cycle is a nanosecond, so that both readings of the field are the same number. */
int sn_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
	uint32_t wanted = values->comp_mask;
	(void)context;
	values->comp_mask = wanted & IBV_VALUES_MASK_RAW_CLOCK;
	if (values->comp_mask)
		values->raw_clock = (struct timespec){ .tv_sec = 0, .tv_nsec = (long)sn_now() };
	return 0;
}
