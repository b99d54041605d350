# cython: language_level=3
"""The end of a communicator: delivers, says goodbye, ends what could not be waited for."""
from rocecomm.link.core cimport (
    F_COLL, P_JOINING, P_READY, P_SELF, R_CLOSED, engine_t, find_group, group_t, int64_t, list_t, mark_dirty, peer_t,
    pthread_mutex_unlock, rc_lock, rc_now, req_end, req_t, unlink)
from rocecomm.link.connect cimport say_left
from rocecomm.link.lane cimport end_idle, end_lane
from rocecomm.link.match cimport end_probes
from rocecomm.link.peer cimport break_peer
from rocecomm.link.progress cimport heartbeats, poll_once

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int) noexcept


cdef void end_one(engine_t *e, list_t *l, req_t *r) noexcept nogil:
    unlink(l, r)
    req_end(e, r, R_CLOSED)


cdef void end_all(engine_t *e, peer_t *p) noexcept nogil:
    """Ends what close() could not wait for; first the peer loses access to our memory."""
    if p.state == P_READY and (p.announced.head != NULL or p.pulls.head != NULL
                               or p.reading.head != NULL or p.lane.head != p.lane.tail):
        break_peer(e, p, -3, -1, 0, 0, 0)
    end_lane(e, p)
    end_idle(e, p, R_CLOSED, True)
    while p.sends.head != NULL:
        end_one(e, &p.sends, p.sends.head)
    while p.announced.head != NULL:
        end_one(e, &p.announced, p.announced.head)
    while p.posted.head != NULL:
        end_one(e, &p.posted, p.posted.head)
    end_probes(e, p.rank, R_CLOSED)
    while p.pulls.head != NULL:
        end_one(e, &p.pulls, p.pulls.head)
    while p.reading.head != NULL:
        end_one(e, &p.reading, p.reading.head)


cdef bint announced_for_use(engine_t *e, peer_t *p) noexcept nogil:
    """Whether the peer may still want an announced message: none of a group that failed."""
    cdef req_t *r = p.announced.head
    cdef group_t *g
    while r != NULL:
        g = find_group(e, r.group, False) if r.flags & F_COLL else NULL
        if g == NULL or not g.aborted:
            return True
        r = r.next
    return False


cdef bint busy(engine_t *e) noexcept nogil:
    cdef int i
    cdef peer_t *p
    # datagrams that say that we close
    if e.caller != NULL and e.closing and e.caller.tail != e.caller.head:
        return True
    for i in range(e.size):
        p = &e.peers[i]
        if p.state == P_JOINING and (p.sends.head != NULL or p.lane.pending.head != NULL):
            return True
        if p.state == P_SELF and p.lane.head != p.lane.tail:
            return True
        if p.state != P_READY:
            continue
        if p.lane.pending.head != NULL or p.lane.flying.head != NULL:
            return True
        if (p.sends.head != NULL or announced_for_use(e, p) or p.pulls.head != NULL
                or p.reading.head != NULL or p.ctl_head != NULL or p.goodbye_due):
            return True
        # entries behind the last signalled one are never reported; GOODBYE is signalled
        if p.sq_tail != p.sq_head and e.closing and p.sq_signal - p.sq_tail < p.sq_head - p.sq_tail:
            return True
    return False


cdef void flush(engine_t *e, int64_t limit) noexcept nogil:
    """Moves traffic until nothing is under way, or `limit`. Asks silent peers as every wait does."""
    cdef int idle = 0
    while busy(e) and rc_now() < limit and not e.fatal:
        if poll_once(e, True) > 0 or e.more:
            idle = 0
            continue
        idle += 1
        if idle > 200:
            heartbeats(e, rc_now())
            pthread_mutex_unlock(&e.mutex)
            usleep(100)
            rc_lock(&e.mutex, &e.want)


cdef void finish(engine_t *e, int64_t limit) noexcept nogil:
    """Moves traffic until all is delivered, or `limit`; then no request is left."""
    cdef int i
    flush(e, limit)
    for i in range(e.size):
        e.peers[i].goodbye_due = e.peers[i].state == P_READY
        if e.peers[i].goodbye_due:
            # its completion proves that all before it has arrived
            e.peers[i].sq_signal = e.peers[i].sq_head - e.peers[i].sq_depth
            mark_dirty(e, &e.peers[i])
    while not say_left(e) and rc_now() < limit + 500000000 and not e.fatal:
        flush(e, limit + 500000000)     # each has room for some
    # even when the time is up: the others shall hear it rather than find us dead
    flush(e, max(limit, rc_now() + 500000000))
    for i in range(e.size):
        end_all(e, &e.peers[i])
    while e.any_posted.head != NULL:
        end_one(e, &e.any_posted, e.any_posted.head)
    end_probes(e, -1, R_CLOSED)
    while e.note_waits.head != NULL:
        end_one(e, &e.note_waits, e.note_waits.head)
