/* The grammar of fault rules: "drop:p=0.01,seed=7;delay:us=200,op=rdma_write". What it cannot use it
 * refuses with a sentence that names the part. */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#include "fault.h"

struct word {
	const char *at;
	int len;
};

struct place { /* where in the text we are, for the sentence */
	const char *origin;
	struct word rule;
};

#define REFUSE(place, format, ...)                                                                    \
	sn_because(EINVAL, "%s: the rule \"%.*s\" " format, (place)->origin, (place)->rule.len > 60 ? 60 : (place)->rule.len, \
		   (place)->rule.at, __VA_ARGS__)

static struct word trimmed(const char *from, const char *to)
{
	while (from < to && isspace((unsigned char)*from))
		from++;
	while (to > from && isspace((unsigned char)to[-1]))
		to--;
	return (struct word){ from, (int)(to - from) };
}

/* The part up to `stop`; *text moves behind it. */
static struct word part(struct word *text, char stop)
{
	const char *end = text->at + text->len, *cut = memchr(text->at, stop, (size_t)text->len);
	struct word w = trimmed(text->at, cut ? cut : end);
	text->at = cut ? cut + 1 : end;
	text->len = (int)(end - text->at);
	return w;
}

static bool is(struct word w, const char *name)
{
	return (int)strlen(name) == w.len && strncasecmp(w.at, name, (size_t)w.len) == 0;
}

static bool whole(struct word w, uint64_t *value)
{
	uint64_t v = 0;
	int i;
	for (i = 0; i < w.len && isdigit((unsigned char)w.at[i]); i++)
		if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, (uint64_t)(w.at[i] - '0'), &v))
			return false;
	if (i != w.len || !w.len)
		return false;
	*value = v;
	return true;
}

/* Digits with one point at most: the locale has no say here. */
static bool decimal(struct word w, double *value)
{
	double v = 0, scale = 0;
	int digits = 0;
	for (int i = 0; i < w.len; i++) {
		if (w.at[i] == '.' && scale == 0) {
			scale = 1;
		} else if (isdigit((unsigned char)w.at[i])) {
			v = v * 10 + (w.at[i] - '0');
			scale *= 10;
			digits++;
		} else {
			return false;
		}
	}
	*value = scale > 0 ? v / scale : v;
	return digits > 0 && digits < 18;
}

static const char *const status_names[] = {
	[IBV_WC_LOC_LEN_ERR] = "loc_len_err", [IBV_WC_LOC_QP_OP_ERR] = "loc_qp_op_err",
	[IBV_WC_LOC_EEC_OP_ERR] = "loc_eec_op_err", [IBV_WC_LOC_PROT_ERR] = "loc_prot_err",
	[IBV_WC_WR_FLUSH_ERR] = "wr_flush_err", [IBV_WC_MW_BIND_ERR] = "mw_bind_err",
	[IBV_WC_BAD_RESP_ERR] = "bad_resp_err", [IBV_WC_LOC_ACCESS_ERR] = "loc_access_err",
	[IBV_WC_REM_INV_REQ_ERR] = "rem_inv_req_err", [IBV_WC_REM_ACCESS_ERR] = "rem_access_err",
	[IBV_WC_REM_OP_ERR] = "rem_op_err", [IBV_WC_RETRY_EXC_ERR] = "retry_exc_err",
	[IBV_WC_RNR_RETRY_EXC_ERR] = "rnr_retry_exc_err", [IBV_WC_LOC_RDD_VIOL_ERR] = "loc_rdd_viol_err",
	[IBV_WC_REM_INV_RD_REQ_ERR] = "rem_inv_rd_req_err", [IBV_WC_REM_ABORT_ERR] = "rem_abort_err",
	[IBV_WC_INV_EECN_ERR] = "inv_eecn_err", [IBV_WC_INV_EEC_STATE_ERR] = "inv_eec_state_err",
	[IBV_WC_FATAL_ERR] = "fatal_err", [IBV_WC_RESP_TIMEOUT_ERR] = "resp_timeout_err",
	[IBV_WC_GENERAL_ERR] = "general_err", [IBV_WC_TM_ERR] = "tm_err",
	[IBV_WC_TM_RNDV_INCOMPLETE] = "tm_rndv_incomplete",
};

static bool kind_of(struct word w, struct sn_fault_rule *r)
{
	static const struct {
		const char *name;
		enum sn_fault_kind kind;
		uint32_t ops, times;
	} kinds[] = {
		{ "delay", SN_DELAY, SN_OP_MESSAGE, 0 },
		{ "drop", SN_DROP, SN_OP_MESSAGE, 0 },
		{ "rnr", SN_RNR, SN_OP_TAKES_RECEIVE, 0 },
		{ "port_down", SN_PORT_DOWN, SN_OP_MESSAGE, 1 },
		{ "peer_death", SN_PEER_DEATH, SN_OP_MESSAGE, 1 },
		{ "cq_overrun", SN_CQ_OVERRUN, SN_OP_ANY_SEND, 1 },
		{ "refuse", SN_REFUSE, 0, 0 },
	};
	for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		if (is(w, kinds[i].name)) {
			r->kind = kinds[i].kind;
			r->ops = kinds[i].ops;
			r->times = kinds[i].times;
			return true;
		}
	if (w.len > 7 && strncasecmp(w.at, "IBV_WC_", 7) == 0)
		w = (struct word){ w.at + 7, w.len - 7 };
	if (is(w, "access"))
		w = (struct word){ "rem_access_err", 14 };
	for (unsigned i = 1; i < sizeof(status_names) / sizeof(status_names[0]); i++)
		if (is(w, status_names[i])) {
			r->kind = SN_STATUS;
			r->status = (enum ibv_wc_status)i;
			r->ops = SN_OP_ANY_SEND;
			return true;
		}
	return false;
}

static uint32_t ops_of(struct word w)
{
	static const struct {
		const char *name;
		uint32_t ops;
	} names[] = {
		{ "send", SN_OP_SEND },
		{ "write", SN_OP_WRITE },
		{ "rdma_write", SN_OP_WRITE },
		{ "read", SN_OP(IBV_WR_RDMA_READ) },
		{ "rdma_read", SN_OP(IBV_WR_RDMA_READ) },
		{ "atomic", SN_OP_ATOMIC },
		{ "send_with_imm", SN_OP(IBV_WR_SEND_WITH_IMM) },
		{ "send_with_inv", SN_OP(IBV_WR_SEND_WITH_INV) },
		{ "rdma_write_with_imm", SN_OP(IBV_WR_RDMA_WRITE_WITH_IMM) },
		{ "atomic_cmp_and_swp", SN_OP(IBV_WR_ATOMIC_CMP_AND_SWP) },
		{ "atomic_fetch_and_add", SN_OP(IBV_WR_ATOMIC_FETCH_AND_ADD) },
		{ "bind_mw", SN_OP(IBV_WR_BIND_MW) },
		{ "local_inv", SN_OP(IBV_WR_LOCAL_INV) },
		{ "recv", SN_OP_RECV },
	};
	for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (is(w, names[i].name))
			return names[i].ops;
	return 0;
}

static int take_ops(const struct place *p, struct word value, struct sn_fault_rule *r)
{
	uint32_t possible = r->kind == SN_STATUS ? SN_OP_ANY_SEND | SN_OP_RECV : r->ops, ops = 0;
	struct word rest = value;
	do {
		struct word w = part(&rest, '+');
		uint32_t found = ops_of(w);
		if (!found)
			return REFUSE(p, "has op=%.*s; operations are send, rdma_write, rdma_read, atomic, recv, or an exact "
					 "opcode like send_with_imm, several joined by '+'", w.len, w.at);
		ops |= found;
		/* "write" stands for both writes: where only the one with a receive can be meant, it is meant */
		if (!(found & possible))
			return REFUSE(p, "cannot happen to op=%.*s", w.len, w.at);
	} while (rest.len);
	r->ops = ops & possible;
	return 0;
}

static int take_verbs(const struct place *p, struct word value, struct sn_fault_rule *r)
{
	static const char *const names[SN_VERBS] = {
		[SN_ALLOC_PD] = "alloc_pd", [SN_REG_MR] = "reg_mr", [SN_DEREG_MR] = "dereg_mr",
		[SN_CREATE_COMP_CHANNEL] = "create_comp_channel", [SN_CREATE_CQ] = "create_cq",
		[SN_DESTROY_CQ] = "destroy_cq", [SN_CREATE_SRQ] = "create_srq", [SN_DESTROY_SRQ] = "destroy_srq",
		[SN_CREATE_QP] = "create_qp", [SN_MODIFY_QP] = "modify_qp", [SN_DESTROY_QP] = "destroy_qp",
	};
	struct word rest = value;
	r->verbs = 0;
	do {
		struct word w = part(&rest, '+');
		unsigned i = 0;
		if (w.len > 4 && strncasecmp(w.at, "ibv_", 4) == 0)
			w = (struct word){ w.at + 4, w.len - 4 };
		while (i < SN_VERBS && !is(w, names[i]))
			i++;
		if (i == SN_VERBS)
			return REFUSE(p, "has verb=%.*s; verbs are alloc_pd, reg_mr, dereg_mr, create_qp, modify_qp, destroy_qp, "
					 "create_comp_channel, and create_ and destroy_ of cq and srq, several joined by '+'",
				      w.len, w.at);
		r->verbs |= 1u << i;
	} while (rest.len);
	return 0;
}

static int take_errno(const struct place *p, struct word value, struct sn_fault_rule *r)
{
	static const struct {
		const char *name;
		int err;
	} names[] = { { "EPERM", EPERM }, { "EIO", EIO }, { "EAGAIN", EAGAIN }, { "ENOMEM", ENOMEM }, { "EACCES", EACCES },
		      { "EFAULT", EFAULT }, { "EBUSY", EBUSY }, { "ENODEV", ENODEV }, { "EINVAL", EINVAL },
		      { "ENOSPC", ENOSPC }, { "EOPNOTSUPP", EOPNOTSUPP }, { "ETIMEDOUT", ETIMEDOUT } };
	uint64_t n = 0;
	for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (is(value, names[i].name))
			n = (uint64_t)names[i].err;
	if (!n && (!whole(value, &n) || !n || n > 4095))
		return REFUSE(p, "has errno=%.*s; it is a number or a name like ENOMEM, EIO, EINVAL, EBUSY", value.len, value.at);
	r->err = (int)n;
	return 0;
}

static int take_setting(const struct place *p, struct word key, struct word value, struct sn_fault_rule *r)
{
	static const struct {
		const char *name;
		double ns;
	} units[] = { { "s", 1e9 }, { "ms", 1e6 }, { "us", 1e3 } };
	uint64_t n = 0;
	double d = 0;

	for (unsigned i = 0; i < 3; i++)
		if (is(key, units[i].name)) {
			if (r->kind != SN_DELAY && r->kind != SN_RNR && r->kind != SN_PORT_DOWN)
				return REFUSE(p, "lasts no time, so it takes no %.*s=", key.len, key.at);
			if (!decimal(value, &d) || d * units[i].ns < 1 || d * units[i].ns > 86400e9)
				return REFUSE(p, "has %.*s=%.*s; a time lies between 1 ns and a day", key.len, key.at,
					      value.len, value.at);
			r->ns = (uint64_t)(d * units[i].ns);
			return 0;
		}
	if (r->kind == SN_REFUSE && is(key, "verb"))
		return take_verbs(p, value, r);
	if (r->kind == SN_REFUSE && is(key, "errno"))
		return take_errno(p, value, r);
	if (r->kind == SN_REFUSE && (is(key, "op") || is(key, "qp")))
		return REFUSE(p, "is about verbs, so it takes verb= and errno=, not %.*s=", key.len, key.at);
	if (is(key, "op"))
		return take_ops(p, value, r);
	if (is(key, "dev")) {
		if (value.len != 5 || strncmp(value.at, "soft", 4) || value.at[4] < '0' || value.at[4] > '7')
			return REFUSE(p, "has dev=%.*s; devices are soft0 to soft7", value.len, value.at);
		r->device = value.at[4] - '0';
		return 0;
	}
	if (is(key, "p")) {
		if (!decimal(value, &r->p) || r->p > 1)
			return REFUSE(p, "has p=%.*s; a probability lies between 0 and 1", value.len, value.at);
		return 0;
	}
	bool known = is(key, "seed") || is(key, "after") || is(key, "times") || is(key, "qp") || is(key, "lost");
	if (!known)
		return REFUSE(p, "has %.*s=; it takes op, qp, dev, p, seed, after, times, s, ms, us and lost, and refuse takes verb and errno", key.len, key.at);
	if (!whole(value, &n))
		return REFUSE(p, "has %.*s=%.*s, which is not a whole number", key.len, key.at, value.len, value.at);
	if (is(key, "seed")) {
		r->seed = n;
	} else if (is(key, "after")) {
		r->after = n;
	} else if (is(key, "times")) {
		if (!n)
			return REFUSE(p, "has times=%d, so it would never act", 0);
		r->times = n;
	} else if (is(key, "qp")) {
		if (!n || n > 0xffffff)
			return REFUSE(p, "has qp=%.*s, which is no queue pair number", value.len, value.at);
		r->qpn = (uint32_t)n;
	} else {
		if (r->kind != SN_DROP || !n || n > 255)
			return REFUSE(p, "has lost=%.*s; only drop takes it, from 1 to 255", value.len, value.at);
		r->lost = (uint32_t)n;
	}
	return 0;
}

static int parse_rule(const char *origin, struct word text, struct sn_fault_rule *r)
{
	struct place p = { origin, text };
	struct word kind = part(&text, ':');

	*r = (struct sn_fault_rule){ .device = -1, .p = 1 };
	if (!kind_of(kind, r))
		return REFUSE(&p, "begins with %.*s, which is no fault; there are delay, drop, rnr, access, port_down, peer_death, "
				  "cq_overrun, refuse and the names of completion statuses", kind.len, kind.at);
	while (text.len) {
		struct word value = part(&text, ','), key;
		if (!memchr(value.at, '=', (size_t)value.len))
			return REFUSE(&p, "has \"%.*s\" where KEY=VALUE is wanted", value.len, value.at);
		key = part(&value, '=');
		value = trimmed(value.at, value.at + value.len);
		int err = take_setting(&p, key, value, r);
		if (err)
			return err;
	}
	if (r->kind == SN_REFUSE && !r->verbs)
		return REFUSE(&p, "does not say which verb: add verb=%s", "");
	if (r->kind == SN_REFUSE && !r->err)
		r->err = EIO;
	if (r->kind == SN_DELAY && !r->ns)
		return REFUSE(&p, "does not say how long: add s=, ms= or us=%s", "");
	return 0;
}

int sn_fault_parse(const char *origin, const char *text, struct sn_fault_rule *rules, unsigned room, unsigned *count)
{
	struct word rest = { text, (int)strnlen(text, 4097) };
	*count = 0;
	if (rest.len > 4096)
		return sn_because(EINVAL, "%s: more than 4096 bytes of fault rules", origin);
	while (rest.len) {
		struct word w = part(&rest, ';');
		if (!w.len)
			continue; /* a ';' at the end */
		if (*count == room)
			return sn_because(ENOSPC, "%s: a process takes %u fault rules at a time; remove some", origin,
					  SN_FAULT_RULES);
		int err = parse_rule(origin, w, &rules[*count]);
		if (err)
			return err;
		++*count;
	}
	return *count ? 0 : sn_because(EINVAL, "%s: there is no fault rule in it", origin);
}
