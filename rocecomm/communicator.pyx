# cython: language_level=3
"""The Communicator: what most users meet. `send` and `recv` go straight to link/blocking."""
cimport cython
from rocecomm.link.base cimport hold, mem_t, plain_array
from rocecomm.link.blocking cimport receive, send
from rocecomm.link.engine cimport Engine
from rocecomm.link.onesided cimport finish, start_atomic, start_notify, start_pieces, start_transfer, wait_notify
from rocecomm.link.probe cimport iprobe, probe
from rocecomm.link.region cimport RegisteredBuffer, open_descriptor, register
from rocecomm.link.request cimport Request, start

from .config import USE_CONFIG, Config, check_timeout, warn_of_unknown_variables


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
        in blocking calls, since the start; ``slot_bytes``, the registered receive and send slots: dict."""
        return self.engine.counters()

    # ------------------------------------------------------------------ point to point
    def send(self, buf, dst, tag=0, timeout=USE_CONFIG):
        """Sends `buf` to rank `dst` (IBV_WR_SEND, or IBV_WR_RDMA_READ by the receiver).

        `buf`: any dense CPU memory: numpy array, torch tensor, bytes, DLPack; or a list or tuple
        of at most 16,384 such buffers, which travel as one message of their bytes one after
        the other, without a copy to join them. `tag`: 0 to 2**63 - 1. Up to ``config.eager_limit`` bytes it returns at once as a rule; larger
        messages when the receiver has read them from `buf`. `timeout` in seconds, None for
        ever, 0 not at all; default ``config.timeout``.

        Raises BufferError or TypeError (buffer), ValueError (rank, tag, timeout),
        TimeoutError (the message was withdrawn), PeerDeadError, CompletionError, ClosedError,
        RocecommError if ranks block in large sends to each other, two or a ring of more.
        """
        cdef Engine g = self.engine
        send(g, buf, g.peer_arg(dst, "dst"), g.tag_arg(tag), timeout)

    def recv(self, buf, src, tag=0, timeout=USE_CONFIG):
        """Receives a message of rank `src` with `tag` into `buf`; returns its size in bytes.

        `src` may be ANY_SOURCE, `tag` ANY_TAG. A message may be smaller than `buf`: the rest
        of `buf` is untouched. A larger one raises MessageTruncatedError, another dtype
        MismatchError (uint8, int8 and plain bytes match every dtype); either way the
        message is used up, nothing was written, and the sender does not notice.
        `buf` may be a list or tuple of buffers, which are filled in order and must not overlap;
        how the sender's bytes were spread does not matter. A list has its buffers' dtype
        if they have all the same, else it is plain bytes (empty ones do not count).
        `timeout`: as for :meth:`send`; if it passes, the receive is withdrawn and the
        message goes to the next one. Other exceptions: as for :meth:`send`.
        """
        cdef Engine g = self.engine
        cdef int peer = -1 if src is any_source else g.peer_arg(src, "src")
        cdef bint any_tag = tag is any_tag_object
        return receive(g, buf, peer, 0 if any_tag else g.tag_arg(tag), any_tag, timeout, "recv")

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

    def probe(self, src, tag=0, timeout=USE_CONFIG):
        """Waits until a message of rank `src` with `tag` could be received; returns its Status.

        `src` may be ANY_SOURCE, `tag` ANY_TAG. The Status (``source``, ``tag``, ``nbytes``,
        ``dtype``) is of the message that ``recv`` from that source with that tag takes next;
        it stays where it is. With several threads another one may receive it first, and
        a sender may take a large one back (``cancel``, a timeout). Messages for which a
        receive was posted are not seen. As MPI_Probe.

        Raises ValueError or TypeError (rank, tag, timeout), TimeoutError, PeerDeadError,
        CompletionError, ClosedError.
        """
        cdef Engine g = self.engine
        cdef bint any_tag = tag is any_tag_object
        return probe(g, -1 if src is any_source else g.peer_arg(src, "src"),
                     0 if any_tag else g.tag_arg(tag), any_tag, timeout)

    def iprobe(self, src, tag=0):
        """As :meth:`probe`, but returns None at once if no such message is here. Moves traffic.
        Raises what ``probe`` does, so PeerDeadError if none can come any more."""
        cdef Engine g = self.engine
        cdef bint any_tag = tag is any_tag_object
        return iprobe(g, -1 if src is any_source else g.peer_arg(src, "src"),
                      0 if any_tag else g.tag_arg(tag), any_tag)

    def sendrecv(self, sendbuf, dst, recvbuf, src, sendtag=0, recvtag=0, timeout=USE_CONFIG):
        """Sends and receives at the same time, at every size; returns the received bytes.

        Raises what :meth:`send` and :meth:`recv` raise. After a TimeoutError the receive
        was withdrawn if it had not matched; the send holds `sendbuf` until it ends.
        """
        cdef Engine g = self.engine
        cdef mem_t m
        cdef Request receiving
        cdef Request sending
        # all arguments are looked at before the receive is posted: it might take a message
        g.peer_arg(dst, "dst")
        g.tag_arg(sendtag)
        if timeout is not USE_CONFIG:
            g.until(timeout)
        if not isinstance(sendbuf, (list, tuple, RegisteredBuffer)) and \
                not plain_array(sendbuf, False, &m):
            sendbuf = hold(sendbuf, False, &m)
        receiving = self.irecv(recvbuf, src, recvtag)
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

    # -------------------------------------------------------------------------- memory
    def register(self, buf, access=None):
        """Registers memory for peers and for own transfers: ``link.region.RegisteredBuffer``.

        `buf`: as for :meth:`send`, at least one byte (ibv_reg_mr). It is held until the
        registration is closed. `access`: what peers may do, a string of 'r' (read), 'w' (write)
        and 'a' (atomic operations), or AccessFlags; default "rwa", and "r" where the memory is
        read-only. The same memory may be registered several times; each registration has keys and
        a life of its own.

        Raises BufferError or TypeError (unsuitable or read-only memory), ValueError (access, no
        bytes), VerbsError (the device refuses; ENOMEM: the limit on locked memory), ClosedError.
        """
        return register(self.engine, buf, access)

    def open(self, descriptor):
        """What a rank needs to use memory of another: ``link.region.RemoteBuffer``.

        `descriptor`: the bytes that ``RegisteredBuffer.descriptor()`` returned there. One-sided
        calls take the bytes as well; opening them once saves the check. Raises ValueError for
        bytes that were changed, belong to another job or communicator or version; TypeError;
        ClosedError.
        """
        return open_descriptor(self.engine, descriptor)

    # ----------------------------------------------------------------------- one-sided
    def write(self, local, remote, offset=0, notify=None, timeout=USE_CONFIG):
        """Writes all of `local` into another rank's region at byte `offset` (IBV_WR_RDMA_WRITE);
        returns its size in bytes when it lies there.

        `local`: as for :meth:`send`, or a RegisteredBuffer. `remote`: the bytes of a
        ``descriptor()``, or what :meth:`open` made of them; it may be this rank's own. The owner
        takes no part and notices nothing, unless `notify`, 0 to 2**32 - 1, is given: then its
        :meth:`wait_notify` returns that number once the bytes are there
        (IBV_WR_RDMA_WRITE_WITH_IMM). No bytes at all may be written, up to the very end of the region.

        Raises ValueError (bounds, access rights, `notify`, a descriptor that is not of this job),
        BufferError or TypeError (buffer), CompletionError (the region was closed: nothing else
        is affected), TimeoutError (the write goes on, and holds `local` until it ends),
        PeerDeadError, ClosedError.
        """
        cdef Engine g = self.engine
        return finish(g, start_transfer(g, False, local, remote, offset, notify, "write"), timeout)

    def read(self, local, remote, offset=0, timeout=USE_CONFIG):
        """Reads from another rank's region at byte `offset` until `local` is full
        (IBV_WR_RDMA_READ); returns the number of bytes.

        After a TimeoutError the read goes on, and `local` may change until it ends. Arguments
        and other exceptions: as for :meth:`write`.
        """
        cdef Engine g = self.engine
        return finish(g, start_transfer(g, True, local, remote, offset, None, "read"), timeout)

    def writev(self, local, remote, local_offsets, remote_offsets, lengths, timeout=USE_CONFIG):
        """Writes many pieces: ``lengths[i]`` bytes at ``local_offsets[i]`` of `local` go to
        ``remote_offsets[i]`` of the region; returns the sum of the lengths.

        The arrays are one-dimensional, of any integer type, offsets in bytes; `lengths` may be one
        integer. All pieces are checked before the first is posted, in numpy, then posted in chains
        (``docs/how-to/one-sided.md``). Pieces are carried out in order. Raises what :meth:`write` raises,
        ValueError naming the first piece out of bounds; after a CompletionError those before
        the failed one are in place.
        """
        cdef Engine g = self.engine
        return finish(g, start_pieces(g, False, local, remote, local_offsets, remote_offsets, lengths,
                                      "writev"), timeout)

    def readv(self, local, remote, local_offsets, remote_offsets, lengths, timeout=USE_CONFIG):
        """Reads many pieces, in the other direction; see :meth:`writev`."""
        cdef Engine g = self.engine
        return finish(g, start_pieces(g, True, local, remote, local_offsets, remote_offsets, lengths,
                                      "readv"), timeout)

    def fetch_add(self, remote, offset, value, timeout=USE_CONFIG):
        """Adds `value` to 8 bytes of a region, modulo 2**64, and returns what was there before
        (IBV_WR_ATOMIC_FETCH_AND_ADD).

        The cell is an unsigned 64-bit integer in the byte order of its machine, at an address that
        is a multiple of 8. Atomic with regard to other such operations, not to what the owner's CPU
        does. `value`: 0 to 2**64 - 1. Raises what :meth:`write` raises.
        """
        cdef Engine g = self.engine
        return finish(g, start_atomic(g, False, remote, offset, value, None, "fetch_add"), timeout)

    def compare_swap(self, remote, offset, compare, swap, timeout=USE_CONFIG):
        """Stores `swap` in 8 bytes of a region if they hold `compare`; returns what was there
        before (IBV_WR_ATOMIC_CMP_AND_SWP). Otherwise as :meth:`fetch_add`."""
        cdef Engine g = self.engine
        return finish(g, start_atomic(g, True, remote, offset, swap, compare, "compare_swap"), timeout)

    def iwrite(self, local, remote, offset=0, notify=None):
        """Starts :meth:`write` and returns a Request; `local` must not change until it has ended.
        Messages to that rank that are sent later arrive after it (``docs/explanation/ordering.md``)."""
        return start_transfer(self.engine, False, local, remote, offset, notify, "iwrite")

    def iread(self, local, remote, offset=0):
        """Starts :meth:`read` and returns a Request; `local` is full when it has ended."""
        return start_transfer(self.engine, True, local, remote, offset, None, "iread")

    def iwritev(self, local, remote, local_offsets, remote_offsets, lengths):
        """Starts :meth:`writev` and returns a Request. The arrays are copied."""
        return start_pieces(self.engine, False, local, remote, local_offsets, remote_offsets, lengths,
                            "iwritev")

    def ireadv(self, local, remote, local_offsets, remote_offsets, lengths):
        """Starts :meth:`readv` and returns a Request. The arrays are copied."""
        return start_pieces(self.engine, True, local, remote, local_offsets, remote_offsets, lengths,
                            "ireadv")

    def ifetch_add(self, remote, offset, value):
        """Starts :meth:`fetch_add`; the Request's ``wait()`` returns what was there before."""
        return start_atomic(self.engine, False, remote, offset, value, None, "ifetch_add")

    def icompare_swap(self, remote, offset, compare, swap):
        """Starts :meth:`compare_swap`; the Request's ``wait()`` returns what was there before."""
        return start_atomic(self.engine, True, remote, offset, swap, compare, "icompare_swap")

    def wait_notify(self, source, count=1, timeout=USE_CONFIG, with_source=False):
        """Waits for `count` writes with notification and returns their numbers, oldest first: list
        of ints, or of (rank, number) if `with_source`.

        `source`: a rank, this one included, or ANY_SOURCE; `count`: 1 to 65536. What arrives while
        nobody waits is kept; when 65536 of one rank are unread, that rank's next ones wait there,
        and what it starts or sends after them to this rank. Raises ValueError, TypeError, TimeoutError (nothing was taken), PeerDeadError
        (fewer than `count` came), ClosedError.
        """
        cdef Engine g = self.engine
        cdef int peer = -1 if source is any_source else g.peer_arg(source, "source")
        return wait_notify(g, peer, count, timeout, with_source)

    def iwait_notify(self, source, count=1, with_source=False):
        """Starts :meth:`wait_notify` and returns a Request, whose ``wait()`` and ``await`` return the list.

        Those that wait for the same notifications are served in the order in which they began; nothing is
        taken before all `count` are there, nor once the request was cancelled or dropped.
        """
        cdef Engine g = self.engine
        cdef int peer = -1 if source is any_source else g.peer_arg(source, "source")
        return start_notify(g, peer, count, with_source, "iwait_notify")

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

        Returns within 5 s. Waiting calls of other threads end with ClosedError; those of daemon
        threads, when the interpreter ends, with SystemExit, so in silence. Closing twice does nothing.
        """
        self.engine.close()

    def __enter__(self):
        self.engine.ensure("entering the communicator")
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
    warn_of_unknown_variables(config.logger())
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
