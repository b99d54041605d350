# cython: language_level=3
"""The messaging core of one communicator; see engine.pyi for what it offers."""
cimport cython
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from rocecomm.link.closing cimport finish
from rocecomm.link.core cimport (
    P_BROKEN, SIG_RING, TEXT_MAX, abort_t, engine_t, find_group, group_t, int64_t, peer_t,
    pthread_mutex_unlock, rc_lock, rc_now, req_t, uint32_t, uint64_t, unx_t)
from rocecomm.link.join cimport caller_t
from rocecomm.link.peer cimport fail_group
from rocecomm.link.progress cimport W_DONE, W_TIMEOUT, poll_once, wake
from rocecomm.link.region cimport retry_held
from rocecomm.link.request cimport Request, start
from rocecomm.link.setup cimport Links
from rocecomm.link.worker cimport start_worker, stop_worker
from rocecomm.link.wire cimport describe_sig, same_sig, sig_of, sig_t

import atexit
import weakref

from ..config import USE_CONFIG
from ..errors import ConfigError, RocecommError
from . import failure, wireup
from .wire import OPERATIONS, REDUCTIONS, dtype_code

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int) noexcept

_open_engines = weakref.WeakSet()
_exit_hook = False

#: How long close() waits for what is still under way, in seconds.
CLOSE_LIMIT = 4.0


def _close_all():
    for engine in list(_open_engines):
        try:
            engine.close()
        except Exception:
            pass        # the process is ending: there is nobody left to tell


@cython.auto_pickle(False)
cdef class Signature:
    """What all ranks of a group must agree on for one collective. Made by `coll_begin`."""

    def __init__(self):
        raise TypeError("a Signature is made by Engine.coll_begin()")

    @property
    def seq(self):
        return self.s.coll_seq

    @property
    def op(self):
        return self.s.op

    @property
    def dtype(self):
        return self.s.dtype

    @property
    def count(self):
        return self.s.count

    @property
    def reduction(self):
        return self.s.reduction

    @property
    def root(self):
        return -1 if self.s.root == 0xFFFFFFFF else self.s.root

    @property
    def group(self):
        return self.s.group

    def __str__(self):
        return describe_sig(&self.s)


@cython.auto_pickle(False)
cdef class Engine(Links):
    """Connections to all ranks of a group, and everything that travels over them."""

    def __init__(self, config, group, context=None, port=None):
        """Opens the device and connects to all ranks of `group` (a bootstrap.Group)."""
        cdef int err = 0
        global _exit_hook
        if self.is_open or self.foreign:
            raise RuntimeError("an Engine is set up once")
        self.config = config
        self.rank, self.size = group.rank, group.world_size
        self.default_timeout = config.timeout
        self.qps = {}
        self.lanes = []
        if context is None:
            context, port = wireup.choose_device(config)
        self.context = context
        self.device = context.name
        try:
            self.open(config, group, port or 1)
            if config.progress == "thread":
                with nogil:
                    err = start_worker(self.e)
                if err:
                    raise OSError(err, "init: the progress thread could not be started")
        except BaseException:
            self.tear_down()
            raise
        self.is_open = True
        if not _exit_hook:
            atexit.register(_close_all)
            _exit_hook = True
        _open_engines.add(self)

    # ---------------------------------------------------------------------- transfers
    def isend(self, buf, dst, tag=0, space=0, offset=0, nbytes=-1):
        """Starts to send; see engine.pyi."""
        return start(self, False, buf, self.peer_arg(dst, "dst"), tag, False, space, NULL, offset,
                     nbytes)

    def irecv(self, buf, src, tag=0, space=0, offset=0, nbytes=-1):
        """Starts to receive; `src` None means any rank, `tag` None any tag."""
        return start(self, True, buf, -1 if src is None else self.peer_arg(src, "src"),
                     0 if tag is None else tag, tag is None, space, NULL, offset, nbytes)

    def coll_begin(self, op, dtype, count, reduction=0, root=-1, group=1):
        """Numbers a collective and makes its signature known; see engine.pyi."""
        cdef Signature sig = Signature.__new__(Signature)
        cdef group_t *g
        cdef unx_t *u
        cdef int i
        cdef abort_t why
        cdef bint failed = False
        sig.s.op = OPERATIONS.index(op) if isinstance(op, str) else op
        sig.s.dtype = dtype_code(dtype) if isinstance(dtype, str) else dtype
        sig.s.count = count
        sig.s.reduction = (REDUCTIONS.index(reduction or "none")
                           if not isinstance(reduction, int) else reduction)
        sig.s.root = <uint32_t><int>root
        sig.s.group = group
        self.enter(sig_name(op))
        poll_once(self.e, False)
        g = find_group(self.e, group, True)
        if g == NULL:
            self.leave()
            raise MemoryError("no memory for another group")
        for i in range(self.e.size):
            # it cannot end. Who left may have done its part before, and then all is well
            if self.e.peers[i].state == P_BROKEN and not self.e.peers[i].left:
                fail_group(self.e, group, 2, i, NULL, True)
        if not g.aborted:
            g.seq += 1
            sig.s.coll_seq = g.seq
            g.ring[g.seq % SIG_RING] = sig.s
            # what came before we knew what to expect
            for i in range(self.e.size):
                u = self.e.peers[i].unexpected.head
                while u != NULL and not failed:
                    if u.h.group == group and u.h.coll_seq == g.seq and not same_sig(&sig.s, &u.h):
                        memset(&why, 0, sizeof(why))
                        why.sig_a = sig.s
                        why.rank_a = self.e.rank
                        sig_of(&why.sig_b, &u.h)
                        why.rank_b = <int>u.h.source
                        failed = True
                    u = u.next
            if failed:
                fail_group(self.e, group, 1, -1, &why, True)
        self.leave()
        error = self.group_error(group, sig_name(op))
        if error is not None:
            raise error
        return sig

    def coll_isend(self, Signature sig not None, buf, dst, step=0, offset=0, nbytes=-1):
        """Starts to send a piece of a collective; see engine.pyi."""
        return start(self, False, buf, self.peer_arg(dst, "dst"),
                     sig.s.coll_seq << 24 | <uint64_t>step, False, sig.s.group, &sig.s, offset, nbytes)

    def coll_irecv(self, Signature sig not None, buf, src, step=0, offset=0, nbytes=-1):
        """Starts to receive a piece of a collective; see engine.pyi."""
        return start(self, True, buf, self.peer_arg(src, "src"),
                     sig.s.coll_seq << 24 | <uint64_t>step, False, sig.s.group, &sig.s, offset, nbytes)

    def abort(self, sig_or_group, text, error=None):
        """Fails a group on all ranks; see engine.pyi. Never raises."""
        cdef abort_t why
        cdef bytes raw = str(text).encode("utf-8", "replace")[:TEXT_MAX - 1]
        cdef int cls, rank
        cls, rank = failure.abort_class(error)
        if not self.is_open:
            return
        memset(&why, 0, sizeof(why))
        memcpy(why.text, <const char *>raw, len(raw))
        group = sig_or_group.group if isinstance(sig_or_group, Signature) else sig_or_group
        try:
            self.enter("abort")
        except RocecommError:
            return
        if cls == 2:
            fail_group(self.e, group, 3 if self.e.peers[rank].left else 2, rank, NULL, True)
        else:
            fail_group(self.e, group, cls, rank, &why, True)
        poll_once(self.e, False)
        self.leave()

    # ------------------------------------------------------------------------ waiting
    def wait_all(self, requests, timeout=USE_CONFIG):
        """Waits for all requests; see engine.pyi."""
        cdef list todo
        requests = list(requests)
        if timeout is not USE_CONFIG:
            self.until(timeout)
        if not requests:
            self.ensure("wait_all")
        todo = [q for q in requests if not (<Request?>q).collect()]
        if todo:
            self.wait_list(todo, False, self.until(timeout), timeout)
        for q in requests:
            if (<Request>q).failure is not None:
                raise (<Request>q).failure

    def wait_any(self, requests, timeout=USE_CONFIG):
        """The index of a request that has ended; see engine.pyi."""
        cdef list todo = list(requests)
        if not todo:
            self.ensure("wait_any")
            raise ValueError("wait_any needs at least one request")
        deadline = self.until(timeout)
        for i, q in enumerate(todo):
            if (<Request?>q).collect():
                return i
        self.wait_list(todo, True, deadline, timeout)
        for i, q in enumerate(todo):
            if (<Request>q).collect():
                return i

    def wait_list(self, list todo, bint any_, int64_t deadline, timeout):
        cdef int n = 0
        cdef int result = W_DONE
        cdef Request q
        cdef req_t **reqs = <req_t **>malloc(len(todo) * sizeof(req_t *))
        if reqs == NULL:
            raise MemoryError("no memory to wait for the requests")
        for q in todo:
            q.waiters += 1                  # nobody lets its C part go meanwhile
            if not q.ended:
                reqs[n] = q.r
                n += 1
        try:
            if n > 0 and (n == len(todo) or not any_):
                result = self.wait_reqs(reqs, n, any_, deadline)
        finally:
            free(reqs)
            for q in todo:
                q.unpin()
        error = None
        while True:                 # twice after a timeout: some may end while the peer is asked
            over = [(<Request>q).collect() for q in todo]
            if any(over) if any_ else all(over):
                return
            for p in todo:
                if (<Request>p).failure is not None:
                    raise (<Request>p).failure
            if error is not None:
                raise error
            q = todo[over.index(False)]
            if result != W_TIMEOUT:
                raise self.closed_error(q.what)
            error = self.timeout_error(q.what, q.other_rank(), timeout)

    def progress(self):
        """Moves all pending traffic once; the number of completions seen."""
        self.enter("progress")
        return self.poll_and_leave()

    def trim(self):
        """Empties the registration cache."""
        self.ensure("trim")
        retry_held(self)
        if self.cache is not None:
            self.cache.trim(0)

    def counters(self):
        """Bytes, messages and seconds in blocking calls since the start, and what its slots take: dict."""
        cdef engine_t *e = self.e
        cdef uint64_t n[11]
        with nogil:
            rc_lock(&e.mutex, &e.want)
            n[0], n[1], n[2], n[3] = e.bytes_sent, e.bytes_received, e.messages_sent, e.messages_received
            n[4], n[5], n[6], n[7] = e.pulls_started, e.announced_small, e.one_requests, e.one_bytes
            n[8], n[9] = e.lane_repairs, <uint64_t>(e.n_recv + e.n_send) * e.slot_size
            n[10] = e.caller.connections if e.caller != NULL else <uint64_t>e.size - 1
            pthread_mutex_unlock(&e.mutex)
        return {"bytes_sent": n[0], "bytes_received": n[1], "messages_sent": n[2], "messages_received": n[3],
                "seconds": self.seconds, "pulls": n[4], "announced_small": n[5], "one_sided": n[6],
                "one_sided_bytes": n[7], "lane_repairs": n[8], "slot_bytes": n[9], "connections": n[10]}

    def describe(self):
        """What wire-up agreed on: rank -> Agreement (mtu, gids, outstanding reads)."""
        return dict(self.info)

    def queue_pairs(self):
        """The queue pair to every other rank, for tests and debugging: rank -> verbs.QP."""
        return dict(self.qps)

    def datagrams(self):
        """Where this rank takes datagrams and how many it sent and refused; see engine.pyi."""
        cdef caller_t *c = self.e.caller
        if c == NULL:
            return None
        return {"qp": self.call_qp, "instance": self.e.instance, "sent": c.sent, "refused": c.refused}

    @property
    def closed(self):
        return not self.is_open

    def peers(self):
        """State of every connection, for debugging: list of dicts."""
        cdef int i
        cdef peer_t p
        cdef uint32_t pool, strangers, overslept
        cdef bint worker
        out = []
        for i in range(self.size):
            with nogil:
                rc_lock(&self.e.mutex, &self.e.want)
                p = self.e.peers[i]
                pool, strangers = self.e.pool, self.e.strangers
                overslept, worker = self.e.overslept, self.e.worker_asleep
                pthread_mutex_unlock(&self.e.mutex)
            out.append({
                "rank": p.rank, "state": p.state, "sq": (p.sq_tail, p.sq_head),
                "eager": (p.eager_sent, p.eager_acked, p.eager_credits),
                "ctrl": (p.ctrl_sent, p.ctrl_acked, p.ctrl_credits),
                "freed": (p.eager_given, p.ctrl_freed), "grant": p.grant, "seq": (p.send_seq, p.recv_seq),
                "sends": p.sends.n, "announced": p.announced.n, "posted": p.posted.n,
                "pulls": p.pulls.n, "reading": p.reading.n, "unexpected": p.unexpected.n,
                "lane": (p.lane.state, p.lane.tail, p.lane.head, p.lane.pending.n, p.lane.flying.n),
                "lane_qp": p.lane.out.qp_num if p.lane.out != NULL else 0,
                "fences": p.fences, "notes": p.lane.notes_n,
                "ctl": p.ctl_n, "dirty": bool(p.dirty), "heartbeats": p.status_n,
                "pool": pool, "strangers": strangers, "overslept": overslept, "worker_asleep": worker})
        return out

    # -------------------------------------------------------------------------- close
    def __del__(self):
        if self.is_open:
            try:
                self.close()
            except Exception:
                pass    # nobody is there to be told

    def close(self):
        """Delivers what was sent, says goodbye, frees everything. Waits at most
        CLOSE_LIMIT seconds; requests that have not ended by then end with ClosedError."""
        cdef engine_t *e = self.e
        cdef int64_t limit
        if not self.is_open or self.foreign:
            return
        self.is_open = False
        _open_engines.discard(self)
        limit = rc_now() + <int64_t>(CLOSE_LIMIT * 1e9)
        with nogil:
            rc_lock(&e.mutex, &e.want)
            e.closing = True
            wake(e)
            pthread_mutex_unlock(&e.mutex)
            stop_worker(e)
            rc_lock(&e.mutex, &e.want)
            # those who wait leave first: the queues are not theirs any more
            while e.status.in_call and rc_now() < limit:
                wake(e)
                pthread_mutex_unlock(&e.mutex)
                usleep(100)
                rc_lock(&e.mutex, &e.want)
            finish(e, limit)
            e.closed = True
            pthread_mutex_unlock(&e.mutex)
        self.reap()
        refused = self.tear_down()
        if refused is not None:
            raise refused


cdef str sig_name(object op):
    return op if isinstance(op, str) else OPERATIONS[op] if 0 <= op < len(OPERATIONS) else str(op)
