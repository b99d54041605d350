/* The devices soft0, soft1, ...: what they say of themselves, opening and closing them. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>

#include "softnic.h"

#define MAX_DEVICES 8
#define ATOMIC_WRITE (1ULL << 40) /* of device_cap_flags_ex, which older headers do not name */

/* Providers' "is it mine" checks read memory behind the public struct: keep zeros there. */
static struct sn_device {
	struct ibv_device ibv;
	char zeros[256];
} devices[MAX_DEVICES];

static uint64_t setting(const char *name, uint64_t otherwise, uint64_t least, uint64_t most)
{
	const char *text = secure_getenv(name);
	char *end;
	if (!text || !*text)
		return otherwise;
	unsigned long long v = strtoull(text, &end, 0);
	return *end || v < least || v > most ? otherwise : v;
}

uint64_t sn_max_message(void)
{
	static _Atomic uint64_t known;
	uint64_t value = atomic_load_explicit(&known, memory_order_relaxed);
	if (!value) {
		value = setting("ROCECOMM_SOFT_MAX_MSG", 1ULL << 31, 64, 1ULL << 31);
		atomic_store_explicit(&known, value, memory_order_relaxed);
	}
	return value;
}

uint64_t sn_max_region(void)
{
	static _Atomic uint64_t known;
	uint64_t value = atomic_load_explicit(&known, memory_order_relaxed);
	if (!value) {
		value = setting("ROCECOMM_SOFT_MAX_MR", UINT64_MAX, 4096, UINT64_MAX);
		atomic_store_explicit(&known, value, memory_order_relaxed);
	}
	return value;
}

static enum ibv_mtu mtu(void)
{
	switch (setting("ROCECOMM_SOFT_MTU", 4096, 256, 4096)) {
	case 256:
		return IBV_MTU_256;
	case 512:
		return IBV_MTU_512;
	case 1024:
		return IBV_MTU_1024;
	case 2048:
		return IBV_MTU_2048;
	default:
		return IBV_MTU_4096;
	}
}

uint32_t sn_mtu_bytes(void)
{
	return 128u << mtu();
}

unsigned sn_device_number(const struct ibv_device *device)
{
	return (unsigned)((const struct sn_device *)device - devices);
}

unsigned sn_device_index(struct ibv_context *context)
{
	return sn_device_number(context->device);
}

static void name_devices(void)
{
	for (int i = 0; i < MAX_DEVICES; i++) {
		struct ibv_device *d = &devices[i].ibv;
		d->node_type = IBV_NODE_CA;
		d->transport_type = IBV_TRANSPORT_IB;
		snprintf(d->dev_name, sizeof(d->dev_name), "uverbs-soft%d", i);
		snprintf(d->dev_path, sizeof(d->dev_path), "/sys/class/infiniband_verbs/uverbs-soft%d", i);
		snprintf(d->ibdev_path, sizeof(d->ibdev_path), "/sys/class/infiniband/soft%d", i);
		snprintf(d->name, sizeof(d->name), "soft%d", i);
	}
}

SN_EXPORT struct ibv_device **ibv_get_device_list(int *num)
{
	static pthread_once_t named = PTHREAD_ONCE_INIT; /* several threads may ask at the same time */
	int n = (int)setting("ROCECOMM_SOFT_DEVICES", 1, 1, MAX_DEVICES);
	struct ibv_device **list = calloc((size_t)n + 1, sizeof(*list));
	if (num)
		*num = list ? n : 0;
	pthread_once(&named, name_devices);
	for (int i = 0; list && i < n; i++)
		list[i] = &devices[i].ibv;
	return list;
}

SN_EXPORT void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

SN_EXPORT const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

SN_EXPORT int ibv_get_device_index(struct ibv_device *device)
{
	return (int)sn_device_number(device);
}

SN_EXPORT __be64 ibv_get_device_guid(struct ibv_device *device)
{
	uint16_t net = sn_network();
	uint8_t guid[8] = { 0x02, 0x73, 0x6f, 0xff, 0xfe, (uint8_t)(net >> 8), (uint8_t)net,
			    (uint8_t)sn_device_number(device) };
	__be64 v;
	memcpy(&v, guid, 8);
	return v;
}

/* ---- queries ------------------------------------------------------------------------------ */

SN_EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *a)
{
	memset(a, 0, sizeof(*a));
	snprintf(a->fw_ver, sizeof(a->fw_ver), "softnic-%u", SN_LAYOUT_VERSION);
	/* perftest and others choose what they do by this number */
	a->vendor_part_id = (uint32_t)setting("ROCECOMM_SOFT_PART_ID", 0, 0, UINT32_MAX);
	a->node_guid = a->sys_image_guid = ibv_get_device_guid(context->device);
	a->vendor_id = 0x02736f; /* of the GUID: an identifier that nobody is assigned */
	a->hw_ver = 1;
	a->max_mr_size = sn_max_region();
	a->page_size_cap = ~(SN_PAGE - 1);
	a->max_qp = SN_QPS - 2;
	a->max_qp_wr = SN_MAX_WR;
	a->device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_MEM_WINDOW |
			      IBV_DEVICE_MEM_WINDOW_TYPE_2B;
	a->max_sge = a->max_sge_rd = SN_MAX_SGE;
	a->max_cq = SN_CQS;
	a->max_cqe = SN_MAX_CQE;
	a->max_mr = a->max_mw = SN_MRS - 1; /* together */
	a->max_pd = 1 << 24;
	a->max_qp_rd_atom = a->max_qp_init_rd_atom = SN_MAX_RD_ATOM;
	a->max_res_rd_atom = SN_MAX_RD_ATOM * SN_QPS;
	a->atomic_cap = IBV_ATOMIC_HCA;
	a->max_mcast_grp = a->max_mcast_qp_attach = a->max_total_mcast_qp_attach = SN_MEMBERS;
	a->max_ah = 1 << 24;
	a->max_srq = SN_SRQS;
	a->max_srq_wr = SN_MAX_WR;
	a->max_srq_sge = SN_MAX_SGE;
	a->max_pkeys = 1;
	a->phys_port_cnt = 1;
	return 0;
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t size)
{
	struct ibv_device_attr_ex full = { 0 };
	if (input && input->comp_mask)
		return EINVAL;
	if (size < sizeof(full.orig_attr))
		return EINVAL;
	ibv_query_device(context, &full.orig_attr);
	full.device_cap_flags_ex = full.orig_attr.device_cap_flags | ATOMIC_WRITE;
	full.phys_port_cnt_ex = 1;
	full.max_dm_size = SN_MAX_DM;
	/* nothing is pinned, so paging on demand is what happens anyway */
	full.odp_caps.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
	full.odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
						       IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ |
						       IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_SRQ_RECV;
	full.odp_caps.per_transport_caps.uc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
						       IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_SRQ_RECV;
	full.odp_caps.per_transport_caps.ud_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
						       IBV_ODP_SUPPORT_SRQ_RECV;
	full.completion_timestamp_mask = UINT64_MAX; /* of CLOCK_MONOTONIC, in ns */
	full.hca_core_clock = 1000000;		     /* kHz */
	memset(attr, 0, size);
	memcpy(attr, &full, size < sizeof(full) ? size : sizeof(full));
	return 0;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	if (port != 1)
		return EINVAL;
	bool down = sn_faulty() && !sn_foreign(sn_ctx_of(context)) && sn_fault_port_down(sn_ctx_of(context));
	struct ibv_port_attr a = {
		.state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
		.max_mtu = IBV_MTU_4096,
		.active_mtu = mtu(),
		.gid_tbl_len = SN_GID_TABLE,
		.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
		.max_msg_sz = (uint32_t)sn_max_message(),
		.pkey_tbl_len = 1,
		.max_vl_num = 1,
		.active_width = 2,
		.active_speed = 64,
		.phys_state = down ? 3 : 5, /* disabled, link up */
		.link_layer = IBV_LINK_LAYER_ETHERNET,
		.flags = IBV_QPF_GRH_REQUIRED,
	};
	memcpy(attr, &a, size < sizeof(a) ? size : sizeof(a));
	return 0;
}

/* The old symbol: programs hand in the struct as it was before port_cap_flags2. */
SN_EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	return query_port(context, port, (struct ibv_port_attr *)attr, offsetof(struct ibv_port_attr, port_cap_flags2));
}

bool sn_gid(unsigned device, uint32_t index, union ibv_gid *gid)
{
	const __be64 guid = ibv_get_device_guid(&devices[device % MAX_DEVICES].ibv);
	memset(gid, 0, sizeof(*gid));
	switch (index) {
	case 0: /* link-local, from the GUID */
		gid->raw[0] = 0xfe;
		gid->raw[1] = 0x80;
		gid->global.interface_id = guid;
		gid->raw[8] ^= 2;
		return true;
	case 1: /* IPv4-mapped: the device reaches this host only */
		gid->raw[10] = gid->raw[11] = 0xff;
		gid->raw[12] = 127;
		gid->raw[13] = (uint8_t)(sn_network() >> 8);
		gid->raw[14] = (uint8_t)sn_network();
		gid->raw[15] = (uint8_t)(device + 1);
		return true;
	case 2: /* a unique local address, RFC 4193 */
		gid->raw[0] = 0xfd;
		gid->raw[1] = 0x73;
		gid->global.interface_id = guid;
		return true;
	default:
		return false;
	}
}

SN_EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	if (port != 1 || index < 0 || index >= SN_GID_TABLE) {
		errno = EINVAL;
		return -1;
	}
	sn_gid(sn_device_number(context->device), (uint32_t)index, gid); /* an empty entry is a zero GID */
	return 0;
}

SN_EXPORT int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
				uint32_t flags, size_t size)
{
	struct ibv_gid_entry e = { .gid_index = index, .port_num = port, .gid_type = IBV_GID_TYPE_ROCE_V2 };
	if (port != 1 || index >= SN_GID_TABLE || flags)
		return EINVAL;
	if (!sn_gid(sn_device_number(context->device), index, &e.gid))
		return ENODATA;
	memcpy(entry, &e, size < sizeof(e) ? size : sizeof(e));
	return 0;
}

SN_EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max,
				       uint32_t flags, size_t size)
{
	size_t n = 0;
	if (flags || max < SN_GIDS)
		return -EINVAL; /* too little room is an error, not a shorter answer */
	for (uint32_t i = 0; i < SN_GIDS; i++)
		if (_ibv_query_gid_ex(context, 1, i, (struct ibv_gid_entry *)((char *)entries + n * size), 0, size) == 0)
			n++;
	return (ssize_t)n;
}

int sn_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, unsigned int *type);
SN_EXPORT int sn_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, unsigned int *type)
{
	(void)context;
	if (port != 1 || index >= SN_GID_TABLE) {
		errno = EINVAL;
		return -1;
	}
	*type = 1; /* RoCE v2 in this call's own numbering */
	return 0;
}

/* The one private symbol that programs use. Its node is named after libibverbs' private ABI: 34, and 57
 * since rdma-core 57. */
__typeof__(sn_query_gid_type) sn_query_gid_type_57 SN_EXPORT __attribute__((alias("sn_query_gid_type")));
__asm__(".symver sn_query_gid_type, ibv_query_gid_type@@IBVERBS_PRIVATE_34");
__asm__(".symver sn_query_gid_type_57, ibv_query_gid_type@IBVERBS_PRIVATE_57");

SN_EXPORT int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	(void)context;
	if (port != 1 || index != 0) {
		errno = EINVAL;
		return -1;
	}
	*pkey = htons(0xffff);
	return 0;
}

SN_EXPORT int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
	(void)context;
	return port == 1 && pkey == htons(0xffff) ? 0 : -1;
}

/* ---- open and close ----------------------------------------------------------------------- */

static int compat_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	return ibv_query_device(context, attr);
}

const struct ibv_context_ops sn_context_ops = {
	._compat_query_device = compat_query_device,
	._compat_query_port = ibv_query_port,
	.alloc_mw = sn_alloc_mw,
	.bind_mw = sn_bind_mw,
	.dealloc_mw = sn_dealloc_mw,
	.poll_cq = sn_poll_cq,
	.req_notify_cq = sn_req_notify_cq,
	.post_srq_recv = sn_post_srq_recv,
	.post_send = sn_post_send,
	.post_recv = sn_post_recv,
};

/* Where Yama restricts who may read whose memory, let the peers of this user in. */
static void let_peers_in(void)
{
	if (access("/proc/sys/kernel/yama/ptrace_scope", F_OK) == 0)
		prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

SN_EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct sn_ctx *ctx = calloc(1, sizeof(*ctx));
	struct ibv_context *c;
	int err;

	if (!ctx)
		return NULL;
	pthread_mutex_init(&ctx->lock, NULL);
	pthread_mutex_init(&ctx->peer_lock, NULL);
	err = sn_fault_check_environment();
	if (!err)
		err = sn_fabric_join(ctx);
	if (err) {
		free(ctx);
		errno = err;
		return NULL;
	}
	err = sn_async_open(ctx);
	if (err) {
		sn_fabric_leave(ctx);
		sn_heap_free(ctx);
		free(ctx);
		errno = err;
		return NULL;
	}
	let_peers_in();
	atomic_store(&ctx->objects, 1);
	atomic_store(&ctx->opens, 1);
	uint32_t start = 0;
	if (getrandom(&start, sizeof(start), 0) == sizeof(start))
		ctx->key_start = start;
	ctx->vctx.sz = sizeof(ctx->vctx);
	ctx->vctx.query_port = query_port;
	ctx->vctx.query_device_ex = query_device_ex;
	ctx->vctx.create_qp_ex = sn_create_qp_ex;
	ctx->vctx.create_cq_ex = sn_create_cq_ex;
	ctx->vctx.query_rt_values = sn_query_rt_values;
	ctx->vctx.advise_mr = sn_advise_mr;
	ctx->vctx.alloc_dm = sn_alloc_dm;
	ctx->vctx.free_dm = sn_free_dm;
	ctx->vctx.reg_dm_mr = sn_reg_dm_mr;
	ctx->vctx.alloc_td = sn_alloc_td;
	ctx->vctx.dealloc_td = sn_dealloc_td;
	ctx->vctx.alloc_parent_domain = sn_alloc_parent_domain;
	c = &ctx->vctx.context;
	c->device = device;
	c->ops = sn_context_ops;
	c->cmd_fd = ctx->seg_fd;
	c->num_comp_vectors = 1;
	c->abi_compat = __VERBS_ABI_IS_EXTENDED;
	pthread_mutex_init(&c->mutex, NULL);
	err = sn_fault_opened(ctx);
	if (err) {
		ibv_close_device(c);
		errno = err;
		return NULL;
	}
	return c;
}

/* The last one frees the context. */
void sn_object_gone(struct sn_ctx *ctx)
{
	if (atomic_fetch_sub(&ctx->objects, 1) > 1)
		return;
	close(ctx->async_fifo);
	sn_peers_free(ctx);
	sn_heap_free(ctx);
	free(ctx);
}

/* Ends what the program left open, so that no peer touches its memory any more. */
static bool abandon(struct sn_ctx *ctx)
{
	bool quiet = true;
	pthread_mutex_lock(&ctx->lock);
	for (uint32_t i = 0; i < atomic_load(&ctx->seg->qp_limit); i++)
		if (ctx->qps[i])
			quiet &= sn_qp_abandon(ctx->qps[i]) == 0;
	for (uint32_t i = 0; i < atomic_load(&ctx->seg->mr_limit); i++) {
		struct sn_mr *e = sn_mr_at(ctx->seg, i);
		uint32_t key = atomic_exchange(&e->key, 0);
		if (key)
			quiet &= sn_wait_claims(ctx, 0, key);
	}
	pthread_mutex_unlock(&ctx->lock);
	return quiet;
}

SN_EXPORT int ibv_close_device(struct ibv_context *context)
{
	struct sn_ctx *ctx = sn_ctx_of(context);
	if (sn_foreign(ctx))
		return 0; /* the parent's; the child's copy of the mappings goes with the child */
	if (atomic_fetch_sub(&ctx->opens, 1) > 1)
		return 0; /* imported more often than closed */
	atomic_store(&ctx->opens, 1);
	if (atomic_load(&ctx->objects) > 1 && !abandon(ctx))
		return EBUSY; /* a peer is stopped with its hands on our memory */
	sn_fabric_leave(ctx);
	sn_stage_stop(ctx);
	/* As with the kernel's devices, closing ends what the program left open; its handles may still
	 * be passed to destroy verbs. */
	sn_object_gone(ctx);
	return 0;
}

/* Not declared in verbs.h, but public. */
SN_EXPORT int ibv_dontfork_range(void *base, size_t size);
SN_EXPORT int ibv_dofork_range(void *base, size_t size);

SN_EXPORT int ibv_fork_init(void)
{
	return 0; /* memory is not pinned, a fork needs no protection */
}

SN_EXPORT int ibv_dontfork_range(void *base, size_t size)
{
	(void)base, (void)size;
	return 0;
}

SN_EXPORT int ibv_dofork_range(void *base, size_t size)
{
	(void)base, (void)size;
	return 0;
}

SN_EXPORT enum ibv_fork_status ibv_is_fork_initialized(void)
{
	return IBV_FORK_UNNEEDED;
}
