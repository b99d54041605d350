# cython: language_level=3
"""The Communicator: what most users meet. Small messages go from here straight to the post."""
cimport cython
from libc.stdint cimport int64_t, uint64_t
from rocecomm.link.base cimport hold, mem_t, plain_array
from rocecomm.link.core cimport (
    F_ANYTAG, F_BLOCKING, F_OWN_MR, F_WAITS, K_RECV, K_SEND, P_READY, R_CANCELLED, R_OK, S_ANNOUNCED, S_DONE, S_PULLING,
    S_QUEUED, engine_t, peer_t, pthread_mutex_lock, pthread_mutex_unlock, rc_now, req_end, req_free,
    req_new, req_t, req_unregister, unlink)
from rocecomm.link.engine cimport Engine
from rocecomm.link.match cimport unpost_receive
from rocecomm.link.peer cimport eager_credit, post_message
from rocecomm.link.progress cimport W_DONE, W_TIMEOUT, poll_once
from rocecomm.link.rendezvous cimport start_receive, start_send, withdraw
from rocecomm.link.request cimport Request, start
from rocecomm.link.wire cimport EAGER, rc_header
from rocecomm.verbs.buffer cimport Buffer
from rocecomm.verbs.libibverbs cimport ibv_mr
from libc.string cimport memset

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int) noexcept

from .config import USE_CONFIG, Config, check_timeout

cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
    ctypedef struct PyInterpreterState:
        pass
    PyThreadState *PyThreadState_Get() noexcept
    PyInterpreterState *PyThreadState_GetInterpreter(PyThreadState *) noexcept
    PyThreadState *PyInterpreterState_ThreadHead(PyInterpreterState *) noexcept
    PyThreadState *PyThreadState_Next(PyThreadState *) noexcept


cdef inline bint only_thread() noexcept:
    """Whether no other Python thread exists that could receive what this one waits for."""
    cdef PyThreadState *first = PyInterpreterState_ThreadHead(
        PyThreadState_GetInterpreter(PyThreadState_Get()))
    return PyThreadState_Next(first) == NULL


cdef enum:
    # Polls with the GIL held before a receive prepares to wait: about 2 microseconds.
    QUICK_POLLS = 100

cdef int64_t WITHDRAW_GRACE = 1000000000


class _Any:
    """A wildcard of recv and irecv."""

    def __init__(self, name):
        self._name = name

    def __repr__(self):
        return f"rocecomm.{self._name}"

    def __reduce__(self):
        return self._name


ANY_SOURCE = _Any("ANY_SOURCE")
ANY_TAG = _Any("ANY_TAG")
cdef object any_source = ANY_SOURCE
cdef object any_tag_object = ANY_TAG


@cython.auto_pickle(False)
cdef class Communicator:
    """A group of ranks that exchange messages; made by :func:`rocecomm.init`.

    ``rank``, ``size``, ``device``. All methods may be called from several threads. Use it
    as a context manager, or call :meth:`close` at the end.
    """

    def __init__(self, Engine engine not None, group=None):
        self.engine = engine
        self.group = group

    def __reduce__(self):
        raise TypeError("a Communicator cannot be copied or pickled: it stands for connections of "
                        "this process; call rocecomm.init() in the other one")

    @property
    def rank(self):
        """This process's rank, 0 to ``size - 1``."""
        return self.engine.rank

    @property
    def size(self):
        """Number of ranks."""
        return self.engine.size

    @property
    def device(self):
        """Name of the RDMA device."""
        return self.engine.device

    @property
    def _engine(self):
        return self.engine

    @property
    def config(self):
        """The settings in use (``rocecomm.config.Config``)."""
        return self.engine.config

    @property
    def closed(self):
        """Whether :meth:`close` was called (or this is a forked child)."""
        return not self.engine.is_open

    @property
    def counters(self):
        """``bytes_sent``, ``bytes_received``, ``messages_sent``, ``messages_received``, ``seconds``
        in blocking calls, since the start: dict."""
        return self.engine.counters()

    # ------------------------------------------------------------------ point to point
    def send(self, buf, dst, tag=0, timeout=USE_CONFIG):
        """Sends `buf` to rank `dst` (IBV_WR_SEND, or IBV_WR_RDMA_READ by the receiver).

        `buf`: any dense CPU memory: numpy array, torch tensor, bytes, DLPack. `tag`: 0 to
        2**63 - 1. Up to ``config.eager_limit`` bytes it returns at once as a rule; larger
        messages when the receiver has read them from `buf`. `timeout` in seconds, None for
        ever, 0 not at all; default ``config.timeout``.

        Raises BufferError or TypeError (buffer), ValueError (rank, tag, timeout),
        TimeoutError (the message was withdrawn), PeerDeadError, CompletionError, ClosedError,
        RocecommError if both ranks block in large sends to each other.
        """
        cdef Engine g = self.engine
        cdef engine_t *e = g.e
        cdef int peer = g.peer_arg(dst, "dst")
        cdef uint64_t number = g.tag_arg(tag)
        cdef mem_t m
        cdef Buffer held = None
        cdef rc_header h
        cdef peer_t *p
        cdef int rc
        if not plain_array(buf, False, &m):
            held = hold(buf, False, &m)
        if timeout is not USE_CONFIG:
            g.until(timeout)
        g.enter()
        p = &e.peers[peer]
        if (m.n <= e.eager_limit and p.state == P_READY and p.sends.head == NULL
                and eager_credit(p)):
            memset(&h, 0, sizeof(h))
            h.kind = EAGER
            h.tag = number
            h.size = m.n
            h.dtype = m.dtype
            h.seq = p.send_seq
            rc = post_message(e, p, &h, m.ptr, m.n)
            if rc == 1:
                p.send_seq += 1
                p.eager_sent += 1
                e.bytes_sent += m.n
                e.messages_sent += 1
                poll_once(e, False)
                g.leave()
                return
        g.leave()
        self.send_slowly(buf, held, peer, number, timeout)

    cdef object send_slowly(self, object buf, Buffer held, int peer, unsigned long long tag, object timeout):
        """A large message, or one that has to wait."""
        cdef Engine g = self.engine
        cdef engine_t *e = g.e
        cdef mem_t m
        cdef req_t *r
        cdef int64_t deadline = g.until(timeout)
        cdef int result
        cdef object entry = None
        cdef bint plain = held is None and plain_array(buf, False, &m)
        if not plain or (g.cache is not None and m.n > e.eager_limit):
            plain = False
            held = hold(buf if held is None else held, False, &m)
            if g.cache is not None and m.n > e.eager_limit:
                entry = g.cache.find(held)
        g.enter()
        r = req_new(e)
        if r == NULL:
            g.leave()
            raise MemoryError("send: no memory for another message")
        r.kind = K_SEND
        r.buf = m.ptr
        r.size = m.n
        r.dtype = m.dtype
        r.peer = peer
        r.source = e.rank
        r.tag = tag
        r.flags = F_WAITS | F_BLOCKING if only_thread() else F_WAITS
        if entry is not None:
            r.lkey, r.rkey = entry.lkey, entry.rkey
            r.mr = <ibv_mr *><size_t>entry.handle
        start_send(e, &e.peers[peer], r)
        g.leave()
        try:
            if plain:
                held = hold(buf, False, &m)     # while the announcement travels; the GIL was held
            if r.state != S_DONE:
                result = g.wait_reqs(&r, 1, False, deadline)
                if result == W_TIMEOUT and not self.take_back(r):
                    raise g.timeout_error("send", peer, timeout)
            error = g.error_of(r, "send")
            if error is not None:
                if r.state == S_DONE and r.status == R_CANCELLED:
                    error = g.timeout_error("send", peer, timeout)
                raise error
        except BaseException:
            if r.state != S_DONE:           # a signal's handler raised
                self.take_back(r)
            raise
        finally:
            g.release(r, (held, entry))

    cdef bint take_back(self, req_t *r):
        """Withdraws a send; True if it is over: withdrawn, or after all received.

        A receiver that is not in a call cannot answer. Then the registration goes, so nothing
        reads the buffer that the caller is about to get back.
        """
        cdef Engine g = self.engine
        cdef engine_t *e = g.e
        cdef int64_t limit = rc_now() + WITHDRAW_GRACE
        cdef bint over
        with nogil:
            pthread_mutex_lock(&e.mutex)
            if not e.closing:
                poll_once(e, True)
                if r.state != S_DONE:
                    withdraw(e, r)
            while r.state != S_DONE and rc_now() < limit and not e.closing:
                poll_once(e, True)
                pthread_mutex_unlock(&e.mutex)
                usleep(200)
                pthread_mutex_lock(&e.mutex)
            if r.state == S_ANNOUNCED and r.flags & F_OWN_MR and req_unregister(e, r):
                unlink(&e.peers[r.peer].announced, r)
                req_end(e, r, R_CANCELLED)
            over = r.state == S_DONE
            pthread_mutex_unlock(&e.mutex)
        return over

    def recv(self, buf, src, tag=0, timeout=USE_CONFIG):
        """Receives a message of rank `src` with `tag` into `buf`; returns its size in bytes.

        `src` may be ANY_SOURCE, `tag` ANY_TAG. A message may be smaller than `buf`: the rest
        of `buf` is untouched. A larger one raises MessageTruncatedError, another dtype
        MismatchError (uint8, int8 and plain bytes match every dtype); either way the
        message is used up, nothing was written, and the sender does not notice.
        `timeout`: as for :meth:`send`; if it passes, the receive is withdrawn and the
        message goes to the next one. Other exceptions: as for :meth:`send`.
        """
        cdef Engine g = self.engine
        cdef int peer = -1 if src is any_source else g.peer_arg(src, "src")
        cdef bint any_tag = tag is any_tag_object
        return self.receive(buf, peer, 0 if any_tag else g.tag_arg(tag), any_tag, timeout, "recv")

    cdef Py_ssize_t receive(self, object buf, int peer, unsigned long long tag, bint any_tag,
                            object timeout, str what) except -1:
        cdef Engine g = self.engine
        cdef engine_t *e = g.e
        cdef mem_t m
        cdef Buffer held = None
        cdef req_t *r
        cdef int64_t deadline
        cdef int result
        cdef int i
        cdef Py_ssize_t got
        cdef object entry = None
        if not plain_array(buf, True, &m):
            held = hold(buf, True, &m)
        if timeout is not USE_CONFIG:
            g.until(timeout)
        if g.cache is not None and m.n > e.eager_limit:
            held = hold(buf if held is None else held, True, &m)
            entry = g.cache.find(held)
        g.enter()
        r = req_new(e)
        if r == NULL:
            g.leave()
            raise MemoryError("recv: no memory for another message")
        r.kind = K_RECV
        r.buf = m.ptr
        r.size = m.n
        r.dtype = m.dtype
        r.peer = peer
        r.source = -1
        r.tag = tag
        if any_tag:
            r.flags |= F_ANYTAG
        if entry is not None:
            r.lkey, r.rkey = entry.lkey, entry.rkey
            r.mr = <ibv_mr *><size_t>entry.handle
        start_receive(e, r, False)
        i = 0
        # the common case in a few microseconds: with the GIL, without an export
        while r.state != S_DONE and i < QUICK_POLLS and not e.more:
            poll_once(e, False)
            i += 1
        if r.state == S_DONE and r.status == R_OK:
            got = r.got
            req_free(e, r)
            g.leave()
            return got
        g.leave()
        try:
            if r.state != S_DONE:
                if held is None:
                    held = hold(buf, True, &m)      # from here on others may run
                deadline = g.until(timeout)
                result = g.wait_reqs(&r, 1, False, deadline)
                if result == W_TIMEOUT and not self.give_up(r):
                    raise g.timeout_error(what, r.source if r.source >= 0 else peer, timeout)
            error = g.error_of(r, what)
            if error is not None:
                if r.state == S_DONE and r.status == R_CANCELLED:
                    error = g.timeout_error(what, peer, timeout)
                raise error
            return r.got
        except BaseException:
            if r.state != S_DONE:
                self.give_up(r)
            raise
        finally:
            g.release(r, (held, entry))

    cdef bint give_up(self, req_t *r):
        """Withdraws a receive; True if it is over. One whose read was posted ends first: that
        is bounded by the transport's deadline."""
        cdef Engine g = self.engine
        cdef engine_t *e = g.e
        cdef int64_t limit = rc_now() + <int64_t>(g.config.dead_after * 2e9)
        cdef bint over
        with nogil:
            pthread_mutex_lock(&e.mutex)
            if not e.closing:
                poll_once(e, True)
            if unpost_receive(e, r):
                req_end(e, r, R_CANCELLED)
            while r.state != S_DONE and rc_now() < limit and not e.closing:
                if poll_once(e, True) == 0 and not e.more:
                    pthread_mutex_unlock(&e.mutex)
                    usleep(50)
                    pthread_mutex_lock(&e.mutex)
            over = r.state == S_DONE
            pthread_mutex_unlock(&e.mutex)
        return over

    def isend(self, buf, dst, tag=0):
        """Starts to send and returns a Request; `buf` must not change until it has ended.

        The request holds `buf`. Arguments and exceptions: as for :meth:`send`, the latter
        from ``Request.wait()`` where they concern the transfer.
        """
        cdef Engine g = self.engine
        return start(g, False, buf, g.peer_arg(dst, "dst"), g.tag_arg(tag), False, 0, NULL, 0, -1)

    def irecv(self, buf, src, tag=0):
        """Starts to receive and returns a Request; `buf` is filled when it has ended.

        Arguments and exceptions: as for :meth:`recv`, the latter from ``Request.wait()``
        where they concern the transfer.
        """
        cdef Engine g = self.engine
        cdef bint any_tag = tag is any_tag_object
        return start(g, True, buf, -1 if src is any_source else g.peer_arg(src, "src"),
                     0 if any_tag else g.tag_arg(tag), any_tag, 0, NULL, 0, -1)

    def sendrecv(self, sendbuf, dst, recvbuf, src, sendtag=0, recvtag=0, timeout=USE_CONFIG):
        """Sends and receives at the same time, at every size; returns the received bytes.

        Raises what :meth:`send` and :meth:`recv` raise. After a TimeoutError the receive
        was withdrawn if it had not matched; the send holds `sendbuf` until it ends.
        """
        cdef Request receiving = self.irecv(recvbuf, src, recvtag)
        cdef Request sending
        try:
            sending = self.isend(sendbuf, dst, sendtag)
        except BaseException:
            receiving.cancel()
            raise
        try:
            self.engine.wait_all((receiving, sending), timeout)
        except BaseException:
            if self.engine.is_open:
                receiving.cancel()
                sending.cancel()
            raise
        return receiving.wait(0)

    def wait_all(self, requests, timeout=USE_CONFIG):
        """Waits for all `requests`; returns the list of their byte counts.

        The first error is raised when all have ended; TimeoutError leaves them alive.
        """
        requests = list(requests)
        self.engine.wait_all(requests, timeout)
        return [request.nbytes for request in requests]

    def wait_any(self, requests, timeout=USE_CONFIG):
        """The index of a request that has ended; its ``wait()`` returns at once."""
        return self.engine.wait_any(requests, timeout)

    def progress(self):
        """Moves all pending traffic once; returns how many completions there were."""
        return self.engine.progress()

    def trim(self):
        """Gives up registrations that are kept for reuse; arrays can be resized again then.

        Nothing to do on devices where registering costs nothing.
        """
        self.engine.trim()

    # --------------------------------------------------------------------- collectives
    def all_reduce(self, buf, op="sum", *, out=None, timeout=USE_CONFIG):
        """Combines `buf` of all ranks element by element; see ``rocecomm.collectives``."""
        return self.collectives.all_reduce(buf, op, out=out, timeout=timeout)

    def barrier(self, timeout=USE_CONFIG):
        """Returns when every rank has entered it."""
        return self.collectives.barrier(timeout=timeout)

    @property
    def collectives(self):
        """The collectives of all ranks (``rocecomm.collectives.Collectives``)."""
        if self.coll is None:
            from .collectives import Collectives
            made = Collectives(self.engine)
            if self.coll is None:           # another thread may have been faster
                self.coll = made
        return self.coll

    # ----------------------------------------------------------------------------- end
    def close(self):
        """Delivers what was sent, tells the other ranks, and frees everything.

        Returns within 5 s. Waiting calls of other threads end with ClosedError. Closing
        twice does nothing.
        """
        self.engine.close()

    def __enter__(self):
        self.engine.ensure()
        return self

    def __exit__(self, *exc):
        self.close()

    def __repr__(self):
        state = "closed" if self.closed else "open"
        return f"<Communicator rank {self.rank} of {self.size} on {self.device}, {state}>"


def init(rank=None, world_size=None, device=None, timeout=USE_CONFIG, store=None, progress=None,
         **overrides):
    """Joins the ranks and connects them; returns a :class:`Communicator`.

    All arguments are optional under ``rocecomm run``, torchrun, mpirun or srun. `rank` and
    `world_size`: ints. `device`: name of an RDMA device, default the first with an active
    RoCE port, else ``soft0``. `timeout`: seconds for operations, None for ever, default
    ``ROCECOMM_TIMEOUT`` or 300. `store`: "host:port" or an object with set, get and wait.
    `overrides`: other settings by name (``rocecomm.config.Config``).

    Raises JoinError (ranks missing, doubled, or set up differently), DeviceNotFoundError,
    ConfigError, TimeoutError.
    """
    from .bootstrap import join
    text_store = store if isinstance(store, str) else None
    config = Config.from_env(device=device, progress=progress, store=text_store, **overrides)
    if timeout is not USE_CONFIG:
        config = config.replace(timeout=check_timeout(timeout))
    group = join(config, rank=rank, world_size=world_size, store=None if text_store else store)
    try:
        engine = Engine(config, group)
    except BaseException as error:
        try:
            group.store.abort(f"rank {group.rank}: {error}")
        except Exception:
            pass        # the cause matters more than who could not be told
        raise
    finally:
        group.store.close()
    return Communicator(engine, group)
