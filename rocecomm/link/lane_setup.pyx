# cython: language_level=3
"""Lanes are made, with the other queue pairs, and connected, to oneself as well."""
from libc.stdlib cimport calloc
from rocecomm.link.base cimport Base
from rocecomm.link.core cimport engine_t, lane_t, lsqe_t, peer_t, uint32_t
from rocecomm.link.lane_repair cimport connect_lane
from rocecomm.verbs.ah cimport fill_ah_attr
from rocecomm.verbs.libibverbs cimport ibv_send_wr, ibv_sge
from rocecomm.verbs.qp cimport QP

import os

from ..enums import AccessFlags, AtomicCap
from ..errors import VerbsError
from ..verbs.attrs import AHAttr
from . import wireup

cdef enum:
    #: Work requests of all lanes together, and of one: 256 of 4 KiB take far longer than a post.
    ALL_DEEP = 1024
    DEEPEST = 256
    #: Small writes go inline, without a registration.
    INLINE = 64


cdef uint32_t lane_depth(int others, object device) except 0:
    """Work requests of one lane: all of them for one peer, fewer each for many."""
    cdef uint32_t depth = DEEPEST
    while depth > 16 and (depth * <uint32_t>max(1, others) > max(ALL_DEEP, 32 * others)
                          or depth > <uint32_t>device.max_qp_wr):
        depth //= 2
    return depth


cdef int make_chain(engine_t *e, uint32_t depth) except -1:
    """Room for the work requests of one post."""
    e.chain_max = depth
    e.chain = <ibv_send_wr *>calloc(depth + 1, sizeof(ibv_send_wr))
    e.chain_sge = <ibv_sge *>calloc(depth, sizeof(ibv_sge))
    if e.chain == NULL or e.chain_sge == NULL:
        raise MemoryError("no memory for one-sided operations")
    return 0


cdef tuple make_lane(Base g, int rank, uint32_t depth, int port, object device):
    """The two queue pairs towards a rank, in RESET: their numbers and the first packet's."""
    cdef peer_t *p = &g.e.peers[rank]
    cdef lane_t *l = &p.lane
    cdef QP out
    cdef QP inward
    inline = INLINE
    try:
        out = QP(g.pd, g.cq, srq=g.srq, max_send_wr=depth, max_inline_data=INLINE)
    except VerbsError:
        out = QP(g.pd, g.cq, srq=g.srq, max_send_wr=depth)
        inline = 0
    g.lanes.append(out)
    inward = QP(g.pd, g.cq, srq=g.srq, max_send_wr=1)
    g.lanes.append(inward)
    p.rank = rank
    l.out = out.qp
    l.inward = inward.qp
    l.inward_qpn = inward.qp.qp_num
    l.port = port
    l.depth = depth
    l.max_inline = inline
    l.psn = wireup.packet_number()
    l.access = AccessFlags.IBV_ACCESS_REMOTE_READ | AccessFlags.IBV_ACCESS_REMOTE_WRITE
    if device.atomic_cap != AtomicCap.IBV_ATOMIC_NONE:
        l.access |= <uint32_t>AccessFlags.IBV_ACCESS_REMOTE_ATOMIC
    l.sq = <lsqe_t *>calloc(depth, sizeof(lsqe_t))
    if l.sq == NULL:
        raise MemoryError("no memory for one-sided operations")
    return out.qp.qp_num, inward.qp.qp_num, l.psn


cdef int plan_lane(Base g, peer_t *p, object agreement, object config, int port) except -1:
    """What the queue pairs of a lane are connected with, apart from the peer's numbers."""
    cdef lane_t *l = &p.lane
    l.path_mtu = wireup.MTU_CODE[agreement.mtu]
    l.timeout, l.retry = wireup.transport_timer(config)
    l.reads = min(255, agreement.reads)
    l.serves = min(255, agreement.serves)
    fill_ah_attr(&l.ah, AHAttr(dgid=agreement.peer_gid, sgid_index=agreement.gid_index, port_num=port,
                               sl=config.service_level, traffic_class=config.traffic_class,
                               hop_limit=64))
    p.max_read = agreement.max_message
    return 0


cdef int join_lane(Base g, object mine, object other, object agreement, object config,
                   int port) except -1:
    """Connects the lane with a rank, perhaps this one, whose Endpoint is `other`."""
    cdef peer_t *p = &g.e.peers[other.rank]
    cdef lane_t *l = &p.lane
    cdef int rc
    theirs_out, theirs_in, psn = other.lanes[mine.rank]
    l.dest_out = theirs_in
    l.dest_inward = theirs_out
    plan_lane(g, p, agreement, config, port)
    rc = connect_lane(g.e, p, psn)
    if rc != 0:
        raise VerbsError(
            f"connecting the queue pairs for one-sided operations with rank {other.rank} on "
            f"{g.device} failed: {os.strerror(rc)}", verb="ibv_modify_qp", errno=rc, device=g.device)
    return 0
