# cython: language_level=3
"""Probes: to look at a message before it is received (MPI_Probe, MPI_Iprobe).

A probe that waits is a request of its own kind in `engine_t.probes`; the next message
that nobody waits for and that fits ends it. It takes nothing.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset
from rocecomm.link.anyone cimport to_tell
from rocecomm.link.base cimport Base
from rocecomm.link.core cimport (
    F_ANYTAG, K_PROBE, P_READY, R_BROKEN, S_DONE, S_QUEUED, ended, engine_t, int32_t, peer_t,
    pthread_mutex_unlock, push, rc_lock, rc_now, rc_set8, reach, req_end, req_free, req_new, req_t, unlink)
from rocecomm.link.match cimport probe_now
from rocecomm.link.peer cimport beat
from rocecomm.link.progress cimport W_TIMEOUT, leave_call, poll_once

from .status import Status
from .wire import dtype_name


cdef void fill(req_t *r, int peer, uint64_t tag, bint any_tag) noexcept:
    r.kind = K_PROBE
    r.peer = peer
    r.source = -1
    r.tag = tag
    if any_tag:
        r.flags |= F_ANYTAG


cdef object status_of(req_t *r):
    return Status(r.source, r.tag, r.other_size, dtype_name(r.other_dtype))


cdef object iprobe(Base g, int peer, uint64_t tag, bint any_tag):
    """A Status, or None if no message waits that fits; raises if none can come any more."""
    cdef engine_t *e = g.e
    cdef req_t r
    cdef bint found
    cdef bint owned
    memset(&r, 0, sizeof(r))
    fill(&r, peer, tag, any_tag)
    g.enter("iprobe")
    with nogil:
        poll_once(e, True)
        found = probe_now(e, &r)
        if not found and lost(e, &r):
            r.state = S_DONE
            r.status = R_BROKEN
        elif not found:
            ask(e, peer)
        owned = leave_call(e)
    if owned:
        g.reap()
    if r.state == S_DONE:
        raise g.error_of(&r, "iprobe")
    return status_of(&r) if found else None


cdef void ask(engine_t *e, int peer) noexcept nogil:
    """A program that probes again and again waits for `peer` (-1: for all): is it there?"""
    cdef int64_t now = rc_now()
    cdef int32_t i
    cdef peer_t *p
    for i in range(e.size):
        p = &e.peers[i]
        if ((peer < 0 or i == peer) and p.state == P_READY
                and now - p.beat_at >= (e.beat_near if p.near else e.beat_every)):
            beat(e, p, True)


cdef bint lost(engine_t *e, req_t *r) noexcept nogil:
    """Whether there is no use in waiting: `r` asks for a peer that is gone."""
    if r.peer < 0:
        r.source = to_tell(e)
        return r.source >= 0
    return not reach(e, &e.peers[r.peer])


cdef object probe(Base g, int peer, uint64_t tag, bint any_tag, object timeout):
    """A Status, as soon as a message waits that fits."""
    cdef engine_t *e = g.e
    cdef req_t *r
    cdef int64_t deadline = g.until(timeout)
    cdef int result
    cdef req_t found
    g.enter("probe")
    r = req_new(e)
    if r == NULL:
        g.leave()
        raise MemoryError("probe: no memory for another request")
    fill(r, peer, tag, any_tag)
    poll_once(e, False)
    if probe_now(e, r):
        found = r[0]
        req_free(e, r)
        g.leave()                       # first: making an object may run any finalizer
        return status_of(&found)
    rc_set8(&r.state, S_QUEUED)
    if lost(e, r):
        req_end(e, r, R_BROKEN)
    else:
        push(&e.probes, r)
    g.leave()
    try:
        result = g.wait_reqs(&r, 1, False, deadline)
        if not ended(r) and result == W_TIMEOUT:
            raise g.timeout_error("probe", peer, timeout)
        error = g.error_of(r, "probe")
        if error is not None:
            raise error
        return status_of(r)
    finally:
        with nogil:
            rc_lock(&e.mutex, &e.want)
            if r.state != S_DONE:
                unlink(&e.probes, r)
            req_free(e, r)
            pthread_mutex_unlock(&e.mutex)
