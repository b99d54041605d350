# cython: language_level=3
"""What connecting on first use (connect.pyx) needs from the start: a queue pair for datagrams, and
all that is known of every peer, so that no Python is needed later."""
from libc.stdlib cimport calloc
from libc.string cimport memcpy
from rocecomm.link.base cimport Base
from rocecomm.link.call cimport CALL_SLOT, post_call
from rocecomm.link.core cimport engine_t, peer_t, uint32_t, uint64_t
from rocecomm.link.join cimport caller_t, join_t
from rocecomm.link.lane_setup cimport plan_lane
from rocecomm.verbs.ah cimport fill_ah_attr
from rocecomm.verbs.context cimport Memory
from rocecomm.verbs.mr cimport MR
from rocecomm.verbs.qp cimport QP

import hashlib
import hmac
import secrets

from ..enums import AccessFlags, QPType
from ..errors import VerbsError
from . import wireup


cdef int count_calls(int size, object device) except -1:
    """Room for datagrams that come: two of every rank, and more in a small world."""
    return min(max(64, 2 * size + 32), 4096, device.max_qp_wr)


cdef tuple open_caller(Base g, int port, uint32_t depth, uint32_t lane, uint32_t max_inline, object device):
    """Opens the queue pair for datagrams: its number and key. `depth`, `lane`, `max_inline`: what queue
    pairs to peers are made with."""
    cdef engine_t *e = g.e
    cdef caller_t *c
    cdef uint32_t i
    cdef QP qp
    cdef Memory memory
    cdef bytes key
    e.joins = <join_t *>calloc(g.size, sizeof(join_t))
    c = e.caller = <caller_t *>calloc(1, sizeof(caller_t))
    if e.joins == NULL or c == NULL:
        raise MemoryError("no memory for connecting later")
    for i in range(<uint32_t>g.size):
        e.peers[i].rank = <int>i
        if <int>i != g.rank:
            e.peers[i].join = &e.joins[i]
    c.n_recv = c.n_send = count_calls(g.size, device)
    c.depth, c.lane_depth, c.max_inline, c.port = depth, lane, max_inline, port
    c.lane_inline = e.peers[g.rank].lane.max_inline
    c.lane_access = e.peers[g.rank].lane.access
    key = hmac.new(g.secret, b"connect", hashlib.sha256).digest()
    memcpy(c.key, <const char *>key, sizeof(c.key))
    memory = Memory(g.context, (c.n_recv + c.n_send) * CALL_SLOT)
    g.memory += (memory,)
    mr = MR(g.pd, memory, AccessFlags.IBV_ACCESS_LOCAL_WRITE)
    g.memory_mr += (mr,)
    c.slots = <char *><size_t>memory.address
    c.lkey = mr.lkey
    qp = QP(g.pd, g.cq, qp_type=QPType.IBV_QPT_UD, max_send_wr=c.n_send, max_recv_wr=c.n_recv)
    g.lanes.append(qp)
    g.call_qp = qp
    c.qp = qp.qp
    qkey = secrets.randbits(31)         # without the highest bit, which means another key
    qp.to_init(port_num=port, qkey=qkey)
    qp.to_rtr()
    qp.to_rts(sq_psn=wireup.packet_number())
    for i in range(c.n_recv):
        if not post_call(e, i):
            raise VerbsError(f"posting receives for datagrams on {g.device} failed", verb="ibv_post_recv",
                             device=g.device)
    return qp.qp.qp_num, qkey


cdef int plan_peer(Base g, object mine, object other, object agreement, object config, int port) except -1:
    """Notes how `other` (an Endpoint) is going to be connected, when somebody needs it."""
    cdef peer_t *p = &g.e.peers[other.rank]
    cdef join_t *j = p.join
    j.call_qpn, j.call_qkey = other.call
    j.psn = wireup.packet_number()
    plan_lane(g, p, agreement, config, port)
    p.lane.psn = wireup.packet_number()
    j.attr = p.lane.ah
    j.mtu, j.timeout, j.retry = p.lane.path_mtu, p.lane.timeout, p.lane.retry
    j.reads, j.serves = p.lane.reads, p.lane.serves
    j.pid, j.started = wireup.neighbour(mine.process, agreement.process)
    return 0
