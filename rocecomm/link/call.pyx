# cython: language_level=3
"""Datagrams by which ranks connect on first use: what is in them, and how they travel.

Each rank has one UD queue pair for them, whose number all ranks were told when they joined. A
datagram may be lost, come twice or come from a stranger. It carries the instances of both
communicators and a code that only ranks of this job can make (SipHash-2-4 with two keys made of the
job's secret; Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012), so what is not of this
world is counted and dropped. All is at a fixed place and of a fixed size.
"""
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from rocecomm.link.core cimport WR_CALL, WR_CALL_SENT, engine_t, group_t, peer_t
from rocecomm.link.join cimport caller_t, join_t
from rocecomm.link.wire cimport RC_VERSION, sig_t
from rocecomm.verbs.libibverbs cimport (
    IBV_SEND_SIGNALED, IBV_WC_SUCCESS, IBV_WR_SEND, ibv_post_recv, ibv_post_send, ibv_recv_wr, ibv_send_wr,
    ibv_sge, ibv_wc)

cdef extern from *:
    """
    #include <string.h>
    static inline uint64_t rc_turn(uint64_t x, int n) { return x << n | x >> (64 - n); }
    static inline void rc_sip_round(uint64_t v[4]) {
        v[0] += v[1]; v[2] += v[3];
        v[1] = rc_turn(v[1], 13) ^ v[0]; v[3] = rc_turn(v[3], 16) ^ v[2];
        v[0] = rc_turn(v[0], 32);
        v[2] += v[1]; v[0] += v[3];
        v[1] = rc_turn(v[1], 17) ^ v[2]; v[3] = rc_turn(v[3], 21) ^ v[0];
        v[2] = rc_turn(v[2], 32);
    }
    /* SipHash-2-4 of whole 64-bit words. */
    static inline uint64_t rc_siphash(const void *data, int words, uint64_t k0, uint64_t k1) {
        uint64_t v[4] = { k0 ^ 0x736f6d6570736575ull, k1 ^ 0x646f72616e646f6dull,
                          k0 ^ 0x6c7967656e657261ull, k1 ^ 0x7465646279746573ull };
        uint64_t m;
        for (int i = 0; i <= words; i++) {
            if (i < words) memcpy(&m, (const char *)data + 8 * i, 8);
            else m = (uint64_t)(8 * words & 0xff) << 56;
            v[3] ^= m;
            rc_sip_round(v); rc_sip_round(v);
            v[0] ^= m;
        }
        v[2] ^= 0xff;
        for (int i = 0; i < 4; i++) rc_sip_round(v);
        return v[0] ^ v[1] ^ v[2] ^ v[3];
    }
    """
    uint64_t rc_siphash(const void *, int words, uint64_t, uint64_t) noexcept nogil

cdef enum:
    ROUTING = 40            # bytes in front of a datagram that came (Global Routing Header)
    SIGNED = 30             # 64-bit words before the code


cdef inline void sign(const caller_t *c, const rc_call *m, uint64_t *mac) noexcept nogil:
    mac[0] = rc_siphash(m, SIGNED, c.key[0], c.key[1])
    mac[1] = rc_siphash(m, SIGNED, c.key[2], c.key[3])


cdef bint send_call(engine_t *e, peer_t *p, uint8_t kind, uint8_t flags, const group_t *g) noexcept nogil:
    """Sends a datagram, with `g` about a failed group. False if it cannot be sent now; that is as if
    it were lost."""
    cdef caller_t *c = e.caller
    cdef join_t *j = p.join
    cdef ibv_sge sge
    cdef ibv_send_wr wr
    cdef ibv_send_wr *bad = NULL
    cdef rc_call m
    cdef char *place
    if c.head - c.tail >= c.n_send:
        return False
    if j.ah == NULL:
        j.ah = e.ops.create_ah(e.pd, &j.attr)
        if j.ah == NULL:
            return False
    memset(&m, 0, sizeof(m))
    m.magic = CALL_MAGIC
    m.version = RC_VERSION
    m.kind = kind
    m.flags = flags
    m.source = <uint32_t>e.rank
    m.target = <uint32_t>p.rank
    m.instance = e.instance
    m.to = p.instance
    if kind == CALL_NUMBERS:
        m.qpn = j.qpn
        m.psn = j.psn
        m.lane_out = p.lane.out.qp_num
        m.lane_in = p.lane.inward_qpn
        m.lane_psn = p.lane.psn
        m.eager = e.eager_grant
        m.ctrl = e.ctrl_grant
    if g != NULL:
        m.group = g.id
        m.cls = g.abort_class
        m.who = g.abort_rank
        m.rank_a, m.rank_b = g.why.rank_a, g.why.rank_b
        memcpy(m.sig_a, &g.why.sig_a, sizeof(sig_t))
        memcpy(m.sig_b, &g.why.sig_b, sizeof(sig_t))
        memcpy(m.text, g.why.text, sizeof(m.text) - 1)
    sign(c, &m, m.mac)
    place = c.slots + <size_t>(c.n_recv + c.head % c.n_send) * CALL_SLOT
    memcpy(place, &m, sizeof(m))
    sge.addr = <uint64_t>place
    sge.length = sizeof(m)
    sge.lkey = c.lkey
    memset(&wr, 0, sizeof(wr))
    wr.wr_id = <uint64_t>WR_CALL_SENT << 32 | c.head
    wr.sg_list = &sge
    wr.num_sge = 1
    wr.opcode = IBV_WR_SEND
    wr.send_flags = IBV_SEND_SIGNALED
    wr.wr.ud.ah = j.ah
    wr.wr.ud.remote_qpn = j.call_qpn
    wr.wr.ud.remote_qkey = j.call_qkey
    c.head += 1
    if ibv_post_send(c.qp, &wr, &bad) != 0:
        c.head -= 1
        return False
    c.sent += 1
    return True


cdef bint post_call(engine_t *e, uint32_t slot) noexcept nogil:
    """Posts a receive for a datagram."""
    cdef caller_t *c = e.caller
    cdef ibv_sge sge
    cdef ibv_recv_wr wr
    cdef ibv_recv_wr *bad = NULL
    sge.addr = <uint64_t>(c.slots + <size_t>slot * CALL_SLOT)
    sge.length = CALL_SLOT
    sge.lkey = c.lkey
    wr.wr_id = <uint64_t>WR_CALL << 32 | slot
    wr.next = NULL
    wr.sg_list = &sge
    wr.num_sge = 1
    return ibv_post_recv(c.qp, &wr, &bad) == 0


cdef peer_t *take_call(engine_t *e, ibv_wc *wc, rc_call *out) noexcept nogil:
    """Copies a datagram that has come and posts its slot again. Whose it is; NULL: a stranger's."""
    cdef caller_t *c = e.caller
    cdef uint32_t slot = <uint32_t>wc.wr_id
    cdef peer_t *p
    cdef uint64_t mac[2]
    cdef bint good = wc.status == IBV_WC_SUCCESS and wc.byte_len == ROUTING + sizeof(rc_call)
    if good:
        memcpy(out, c.slots + <size_t>slot * CALL_SLOT + ROUTING, sizeof(rc_call))
    if wc.status == IBV_WC_SUCCESS:
        post_call(e, slot)
    if not good or out.magic != CALL_MAGIC or out.version != RC_VERSION:
        c.refused += 1
        return NULL
    sign(c, out, mac)
    if (((mac[0] ^ out.mac[0]) | (mac[1] ^ out.mac[1])) != 0 or out.to != e.instance
            or out.target != <uint32_t>e.rank or out.source >= <uint32_t>e.size
            or out.source == <uint32_t>e.rank):
        c.refused += 1
        return NULL
    p = &e.peers[out.source]
    if out.instance != p.instance:
        c.refused += 1
        return NULL
    return p


cdef int on_call_sent(engine_t *e, ibv_wc *wc) noexcept nogil:
    """The device is done with a datagram. A status other than success has ended the queue pair."""
    e.caller.tail = <uint32_t>wc.wr_id + 1
    return wc.status
