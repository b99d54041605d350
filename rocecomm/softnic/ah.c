/* Address handles: who a datagram is for, and what its receiver is told about where it came from. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdlib.h>

#include "softnic.h"

struct sn_priv_ah {
	struct ibv_ah ibv;
	struct ibv_ah_attr attr;
};

SN_EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct sn_ctx *ctx = sn_ctx_of(pd->context);
	struct sn_priv_ah *ah;
	/* RoCE knows no address without a global route */
	errno = sn_foreign(ctx) ? EPERM : EINVAL;
	if (sn_foreign(ctx) || !attr->is_global || attr->port_num != 1 || attr->grh.sgid_index >= SN_GIDS)
		return NULL;
	ah = calloc(1, sizeof(*ah));
	if (!ah)
		return NULL;
	ah->attr = *attr;
	ah->ibv.context = pd->context;
	ah->ibv.pd = pd;
	sn_pd_get(pd);
	return &ah->ibv;
}

SN_EXPORT int ibv_destroy_ah(struct ibv_ah *ibv)
{
	if (sn_foreign(sn_ctx_of(ibv->context)))
		return 0;
	sn_pd_put(ibv->pd);
	free(sn_container(ibv, struct sn_priv_ah, ibv));
	return 0;
}

/* The address of a datagram, in the entry of the send queue. A key with the highest bit set stands for
 * the QP's own. */
void sn_ah_address(struct sn_qp *qp, struct sn_swqe *w, const struct ibv_ah *ibv, uint32_t qpn, uint32_t qkey)
{
	const struct sn_priv_ah *ah = sn_container(ibv, struct sn_priv_ah, ibv);
	w->ud_qpn = sn_reachable(&ah->attr.grh.dgid) ? qpn : 0; /* nobody has number 0: lost on the way */
	w->ud_qkey = qkey & 0x80000000u ? qp->qkey : qkey;
	memcpy(&w->remote_addr, ah->attr.grh.dgid.raw, 8);
	memcpy(&w->compare_add, ah->attr.grh.dgid.raw + 8, 8);
	w->swap = (uint64_t)sn_device_number(ibv->context->device) << 32 | (uint64_t)ah->attr.grh.traffic_class << 16 |
		  (uint64_t)ah->attr.grh.hop_limit << 8 | ah->attr.grh.sgid_index;
}

static uint16_t ip_checksum(const uint8_t *header)
{
	uint32_t sum = 0;
	for (int i = 0; i < 20; i += 2)
		sum += (uint32_t)header[i] << 8 | header[i + 1];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return (uint16_t)~sum;
}

static bool is_ipv4(const uint8_t *gid)
{
	static const uint8_t prefix[12] = { [10] = 0xff, [11] = 0xff };
	return memcmp(gid, prefix, sizeof(prefix)) == 0;
}

/* The 40 bytes in front of a received datagram, as RoCEv2 has them: an IPv6 header, or in the second
 * half an IPv4 one. */
void sn_ah_header(const struct sn_swqe *w, uint8_t header[40])
{
	union ibv_gid from, to;
	uint8_t hop_limit = (uint8_t)(w->swap >> 8), tclass = (uint8_t)(w->swap >> 16);

	sn_gid((unsigned)(w->swap >> 32), (uint8_t)w->swap, &from);
	memcpy(to.raw, &w->remote_addr, 8);
	memcpy(to.raw + 8, &w->compare_add, 8);
	memset(header, 0, 40);
	if (is_ipv4(from.raw) && is_ipv4(to.raw)) {
		uint32_t total = 20 + 8 + 12 + 8 + ((w->length + 3) & ~3u) + 4; /* IP, UDP, BTH, DETH, payload, ICRC */
		uint8_t *ip = header + 20;
		ip[0] = 0x45;
		ip[1] = tclass;
		ip[2] = (uint8_t)(total >> 8);
		ip[3] = (uint8_t)total;
		ip[6] = 0x40;
		ip[8] = hop_limit;
		ip[9] = 17;
		memcpy(ip + 12, from.raw + 12, 4);
		memcpy(ip + 16, to.raw + 12, 4);
		uint16_t sum = ip_checksum(ip);
		ip[10] = (uint8_t)(sum >> 8);
		ip[11] = (uint8_t)sum;
		return;
	}
	struct ibv_grh grh = { .version_tclass_flow = htonl(6u << 28 | (uint32_t)tclass << 20),
			       .paylen = htons((uint16_t)(8 + 12 + 8 + ((w->length + 3) & ~3u) + 4)),
			       .next_hdr = 17, .hop_limit = hop_limit, .sgid = from, .dgid = to };
	memcpy(header, &grh, 40);
}

/* ---- answering ------------------------------------------------------------------------------ */

/* Where a datagram came from: its header is IPv6 or, if the checksum agrees, IPv4. */
static void read_header(const struct ibv_grh *grh, struct ibv_ah_attr *attr, union ibv_gid *to)
{
	const uint8_t *ip = (const uint8_t *)grh + 20;
	if (ip[0] == 0x45 && ip_checksum(ip) == 0) {
		uint8_t prefix[12] = { [10] = 0xff, [11] = 0xff };
		memcpy(attr->grh.dgid.raw, prefix, 12);
		memcpy(attr->grh.dgid.raw + 12, ip + 12, 4);
		memcpy(to->raw, prefix, 12);
		memcpy(to->raw + 12, ip + 16, 4);
		attr->grh.traffic_class = ip[1];
		return;
	}
	attr->grh.dgid = grh->sgid;
	*to = grh->dgid;
	attr->grh.flow_label = ntohl(grh->version_tclass_flow) & 0xfffff;
	attr->grh.traffic_class = (uint8_t)(ntohl(grh->version_tclass_flow) >> 20);
}

SN_EXPORT int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
				  struct ibv_ah_attr *attr)
{
	union ibv_gid to, own;
	memset(attr, 0, sizeof(*attr));
	attr->sl = wc->sl;
	attr->src_path_bits = wc->dlid_path_bits;
	attr->port_num = port;
	errno = EINVAL;
	if (!(wc->wc_flags & IBV_WC_GRH))
		return -1; /* RoCE knows no address without a global route */
	attr->is_global = 1;
	attr->grh.hop_limit = 0xff;
	read_header(grh, attr, &to);
	for (uint32_t i = 0; i < SN_GIDS; i++)
		if (sn_gid(sn_device_number(context->device), i, &own) && memcmp(&own, &to, sizeof(own)) == 0) {
			attr->grh.sgid_index = (uint8_t)i;
			return 0;
		}
	return -1;
}

SN_EXPORT struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port)
{
	struct ibv_ah_attr attr;
	return ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr) ? NULL : ibv_create_ah(pd, &attr);
}
