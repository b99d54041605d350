/* The extended queue pair: ibv_create_qp_ex, and the ibv_wr_* calls that write work requests straight
 * into the shared send queue. Between wr_start and wr_complete the caller holds the post lock, and
 * entries beyond the published tail are nobody else's: wr_abort has nothing to undo. */
#define _GNU_SOURCE
#include "softnic.h"

static struct sn_priv_qp *priv_of(struct ibv_qp_ex *ex)
{
	return sn_container(ex, struct sn_priv_qp, ex);
}

static struct sn_swqe *entry(struct sn_priv_qp *priv, uint32_t pos)
{
	return sn_swqe_at(priv->ctx->seg, &priv->qp->sq, pos);
}

/* Atomic: take_back() in exec.c looks at the head of a queue that it does not hold. */
static void set_length(struct sn_swqe *w, uint64_t length)
{
	__atomic_store_n(&w->length, length > UINT32_MAX ? UINT32_MAX : (uint32_t)length, __ATOMIC_RELAXED);
}

static void wr_fail(struct sn_priv_qp *priv, int err)
{
	if (!priv->wr.err)
		priv->wr.err = err;
}

static void wr_start(struct ibv_qp_ex *ex)
{
	struct sn_priv_qp *priv = priv_of(ex);
	if (sn_foreign(priv->ctx)) {
		priv->wr.err = EPERM;
		priv->wr.open = NULL;
		return; /* the lock is the parent's: nothing is written, and wr_complete says why */
	}
	sn_spin(&priv->post_lock);
	priv->wr.err = sn_sq_ready(priv);
	priv->wr.tail = atomic_load_explicit(&priv->qp->sq.tail, memory_order_relaxed);
	priv->wr.open = NULL;
	priv->wr.needs_address = false;
}

/* The next entry, with what the program has set in the QP. NULL: an error, kept for wr_complete. */
static struct sn_swqe *begin(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode)
{
	struct sn_priv_qp *priv = priv_of(ex);
	struct sn_swqe *w;
	int err = 0;

	if (sn_foreign(priv->ctx))
		return NULL; /* in a forked child the queue is not even mapped */
	if (priv->wr.needs_address || !sn_sq_takes(priv->qp->type, opcode))
		err = EINVAL;
	else if (!priv->wr.err && !sn_sq_room(priv, priv->wr.tail))
		err = ENOMEM;
	if (err)
		wr_fail(priv, err);
	if (priv->wr.err) {
		priv->wr.open = NULL;
		return NULL;
	}
	w = priv->wr.open = entry(priv, priv->wr.tail++);
	w->wr_id = ex->wr_id;
	w->opcode = opcode;
	w->flags = ex->wr_flags & ~(unsigned)IBV_SEND_INLINE;
	w->num_sge = 0;
	set_length(w, 0);
	w->staged = 0;
	priv->wr.needs_address = priv->qp->type == IBV_QPT_UD;
	return w;
}

static void begin_remote(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr, uint32_t imm)
{
	struct sn_swqe *w = begin(ex, opcode);
	if (!w)
		return;
	w->rkey = rkey;
	w->remote_addr = addr;
	w->imm = imm;
}

static void begin_send(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t imm)
{
	struct sn_swqe *w = begin(ex, opcode);
	if (w)
		w->imm = imm;
}

/* ---- the requests ------------------------------------------------------------------------- */

static void wr_send(struct ibv_qp_ex *ex)
{
	begin_send(ex, IBV_WR_SEND, 0);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm)
{
	begin_send(ex, IBV_WR_SEND_WITH_IMM, imm);
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	begin_remote(ex, IBV_WR_RDMA_WRITE, rkey, addr, 0);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, __be32 imm)
{
	begin_remote(ex, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr, imm);
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	begin_remote(ex, IBV_WR_RDMA_READ, rkey, addr, 0);
}

static void begin_atomic(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr,
			 uint64_t compare_add, uint64_t swap)
{
	struct sn_swqe *w = begin(ex, opcode);
	if (!w)
		return;
	w->rkey = rkey;
	w->remote_addr = addr;
	w->compare_add = compare_add;
	w->swap = swap;
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t compare, uint64_t swap)
{
	begin_atomic(ex, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, addr, compare, swap);
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t add)
{
	begin_atomic(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, addr, add, 0);
}

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
	begin_send(ex, IBV_WR_SEND_WITH_INV, rkey);
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
	begin_send(ex, IBV_WR_LOCAL_INV, rkey);
}

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
	struct sn_swqe *w = begin(ex, IBV_WR_BIND_MW);
	if (w)
		sn_mw_describe(w, mw, rkey, info);
}

/* ---- what they carry ---------------------------------------------------------------------- */

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_sge *list)
{
	struct sn_priv_qp *priv = priv_of(ex);
	struct sn_swqe *w = priv->wr.open;
	uint64_t length = 0;
	if (!w)
		return;
	if (n > priv->qp->sq.max_sge) {
		wr_fail(priv, EINVAL);
		return;
	}
	w->num_sge = (uint32_t)n;
	for (size_t i = 0; i < n; i++) {
		w->sge[i] = (struct sn_sge){ list[i].addr, list[i].length, list[i].lkey };
		length += list[i].length;
	}
	set_length(w, length);
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
	struct ibv_sge s = { .addr = addr, .length = length, .lkey = lkey };
	wr_set_sge_list(ex, 1, &s);
}

static void put_inline(struct ibv_qp_ex *ex, size_t n, const struct ibv_data_buf *list, uint32_t room)
{
	struct sn_priv_qp *priv = priv_of(ex);
	struct sn_swqe *w = priv->wr.open;
	uint32_t length = 0;
	if (!w)
		return;
	w->num_sge = 0;
	for (size_t i = 0; i < n; i++) {
		if (list[i].length > room - length) {
			wr_fail(priv, EINVAL);
			return;
		}
		memcpy((char *)w + w->data + length, list[i].addr, list[i].length);
		length += (uint32_t)list[i].length;
	}
	set_length(w, length);
	if (!sn_sq_inlines(w->opcode))
		wr_fail(priv, EINVAL);
	w->flags |= IBV_SEND_INLINE;
	w->staged = 1;
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_data_buf *list)
{
	if (priv_of(ex)->wr.open)
		put_inline(ex, n, list, priv_of(ex)->qp->sq.max_inline);
}

static void wr_atomic_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, const void *value)
{
	struct ibv_data_buf b = { .addr = (void *)(uintptr_t)value, .length = 8 };
	begin_remote(ex, IBV_WR_ATOMIC_WRITE, rkey, addr, 0);
	put_inline(ex, 1, &b, SN_SMALL); /* there is always room for eight bytes */
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *addr, size_t length)
{
	struct ibv_data_buf b = { .addr = addr, .length = length };
	wr_set_inline_data_list(ex, 1, &b);
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	struct sn_priv_qp *priv = priv_of(ex);
	if (!priv->wr.open)
		return;
	if (!ah || priv->qp->type != IBV_QPT_UD)
		wr_fail(priv, EINVAL);
	else
		sn_ah_address(priv->qp, priv->wr.open, ah, qpn, qkey);
	priv->wr.needs_address = false;
}

/* ---- the end ------------------------------------------------------------------------------ */

static int wr_complete(struct ibv_qp_ex *ex)
{
	struct sn_priv_qp *priv = priv_of(ex);
	if (sn_foreign(priv->ctx))
		return EPERM;
	if (priv->wr.needs_address)
		wr_fail(priv, EINVAL);
	int err = priv->wr.err; /* ours only as long as we hold the lock */
	priv->wr.open = NULL;
	sn_sq_publish(priv, err ? atomic_load_explicit(&priv->qp->sq.tail, memory_order_relaxed) : priv->wr.tail);
	return err;
}

static void wr_abort(struct ibv_qp_ex *ex)
{
	struct sn_priv_qp *priv = priv_of(ex);
	if (sn_foreign(priv->ctx))
		return;
	priv->wr.open = NULL;
	sn_unspin(&priv->post_lock);
}

static const struct {
	uint64_t flag;
	enum ibv_wr_opcode opcode;
} ops[] = {
	{ IBV_QP_EX_WITH_RDMA_WRITE, IBV_WR_RDMA_WRITE },
	{ IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM },
	{ IBV_QP_EX_WITH_SEND, IBV_WR_SEND },
	{ IBV_QP_EX_WITH_SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM },
	{ IBV_QP_EX_WITH_RDMA_READ, IBV_WR_RDMA_READ },
	{ IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_CMP_AND_SWP },
	{ IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD },
	{ IBV_QP_EX_WITH_ATOMIC_WRITE, IBV_WR_ATOMIC_WRITE },
	{ IBV_QP_EX_WITH_SEND_WITH_INV, IBV_WR_SEND_WITH_INV },
	{ IBV_QP_EX_WITH_BIND_MW, IBV_WR_BIND_MW },
	{ IBV_QP_EX_WITH_LOCAL_INV, IBV_WR_LOCAL_INV },
};

/* Every operation that is asked for has a function behind it, and fits the type of the QP. */
static bool serves(enum ibv_qp_type type, uint64_t wanted)
{
	for (unsigned i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
		if (wanted & ops[i].flag) {
			if (!sn_sq_takes(type, ops[i].opcode))
				return false;
			wanted &= ~ops[i].flag;
		}
	return !wanted;
}

static void fill_functions(struct ibv_qp_ex *ex)
{
	ex->wr_start = wr_start;
	ex->wr_complete = wr_complete;
	ex->wr_abort = wr_abort;
	ex->wr_send = wr_send;
	ex->wr_send_imm = wr_send_imm;
	ex->wr_rdma_write = wr_rdma_write;
	ex->wr_rdma_write_imm = wr_rdma_write_imm;
	ex->wr_rdma_read = wr_rdma_read;
	ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
	ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
	ex->wr_atomic_write = wr_atomic_write;
	ex->wr_send_inv = wr_send_inv;
	ex->wr_bind_mw = wr_bind_mw;
	ex->wr_local_inv = wr_local_inv;
	ex->wr_set_sge = wr_set_sge;
	ex->wr_set_sge_list = wr_set_sge_list;
	ex->wr_set_inline_data = wr_set_inline_data;
	ex->wr_set_inline_data_list = wr_set_inline_data_list;
	ex->wr_set_ud_addr = wr_set_ud_addr;
}

struct ibv_qp *sn_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *a)
{
	bool with_ops = a->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	struct ibv_qp_init_attr plain = { .qp_context = a->qp_context, .send_cq = a->send_cq, .recv_cq = a->recv_cq,
					  .srq = a->srq, .cap = a->cap, .qp_type = a->qp_type,
					  .sq_sig_all = a->sq_sig_all };
	struct ibv_qp *qp;

	errno = 0;
	if (a->comp_mask & ~(uint32_t)(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS |
				       IBV_QP_INIT_ATTR_CREATE_FLAGS) ||
	    (a->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && a->create_flags))
		errno = EOPNOTSUPP;
	else if (!(a->comp_mask & IBV_QP_INIT_ATTR_PD) || !a->pd || a->pd->context != context)
		errno = EINVAL;
	else if (with_ops && !serves(a->qp_type, a->send_ops_flags))
		errno = EOPNOTSUPP;
	if (errno)
		return NULL;
	qp = ibv_create_qp(a->pd, &plain);
	if (!qp)
		return NULL;
	a->cap = plain.cap;
	if (with_ops) {
		struct sn_priv_qp *priv = sn_container(qp, struct sn_priv_qp, ibv);
		fill_functions(&priv->ex);
		priv->extended = true;
	}
	return qp;
}

SN_EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	struct sn_priv_qp *priv = sn_container(qp, struct sn_priv_qp, ibv);
	return priv->extended ? &priv->ex : NULL;
}

/* ---- what other devices know of a queue pair and this one does not --------------------------- */

SN_EXPORT int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	(void)qp, (void)op, (void)flags;
	return 0; /* both ends may copy parts of a message at once */
}

SN_EXPORT int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	memset(ece, 0, sizeof(*ece));
	return EOPNOTSUPP;
}

SN_EXPORT int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp, (void)ece;
	return EOPNOTSUPP;
}
