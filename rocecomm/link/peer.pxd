# cython: language_level=3
from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t, uint8_t
from rocecomm.link.core cimport P_READY, abort_t, ctl_t, engine_t, peer_t, req_t
from rocecomm.link.wire cimport EAGER, FLAG_SHORT, rc_header
from rocecomm.verbs.libibverbs cimport ibv_send_wr

cdef int post_wr(engine_t *e, peer_t *p, ibv_send_wr *wr, uint8_t type, uint32_t slot,
                 uint32_t req, uint32_t length, bint signal) noexcept nogil
cdef int post_message(engine_t *e, peer_t *p, rc_header *h, const char *payload,
                      size_t n) noexcept nogil
cdef void queue_ctl(engine_t *e, peer_t *p, uint8_t kind, uint64_t req, uint32_t gen,
                    uint64_t size) noexcept nogil
cdef void queue_cycle(engine_t *e, peer_t *p, const ctl_t *what) noexcept nogil
cdef void queue_abort(engine_t *e, peer_t *p, uint32_t group) noexcept nogil
cdef bint drain_ctl(engine_t *e, peer_t *p) noexcept nogil
cdef void free_slot(engine_t *e, peer_t *p, uint32_t slot, uint8_t kind) noexcept nogil
cdef bint post_slots(engine_t *e) noexcept nogil
cdef bint repost_slot(engine_t *e, uint32_t slot) noexcept nogil
cdef void retire(engine_t *e, peer_t *p, uint32_t position, bint good) noexcept nogil
cdef void break_peer(engine_t *e, peer_t *p, int status, int opcode, uint32_t vendor,
                     int err, uint64_t nbytes) noexcept nogil
cdef void leave_peer(engine_t *e, peer_t *p) noexcept nogil
cdef void beat(engine_t *e, peer_t *p, bint ask) noexcept nogil
cdef void fail_group(engine_t *e, uint32_t group, int cls, int32_t rank, const abort_t *why,
                     bint tell) noexcept nogil
cdef void tell_failure(engine_t *e, peer_t *p) noexcept nogil

cdef inline bint eager_credit(peer_t *p) noexcept nogil:
    # both count modulo 2^32
    return p.eager_sent != p.eager_acked + p.eager_credits and p.fences == 0

cdef inline bint ctrl_credit(peer_t *p) noexcept nogil:
    return p.ctrl_sent - p.ctrl_acked < p.ctrl_credits

cdef inline bint sq_room(peer_t *p) noexcept nogil:
    return p.sq_head - p.sq_tail < p.sq_depth

cdef inline bint send_now(engine_t *e, peer_t *p, uint16_t dtype, const char *payload, uint64_t n,
                          uint64_t tag) noexcept nogil:
    """A small message without a request, where nothing has to be waited for. False: it was not sent."""
    cdef rc_header h
    if (n > e.eager_limit or p.state != P_READY or p.sends.head != NULL or not eager_credit(p)):
        return False
    h.kind = EAGER
    h.flags = FLAG_SHORT
    h.dtype = dtype
    h.tag = tag
    h.seq = p.send_seq
    h.group = 0
    if post_message(e, p, &h, payload, n) != 1:
        return False
    p.send_seq += 1
    p.eager_sent += 1
    e.bytes_sent += n
    e.messages_sent += 1
    return True
