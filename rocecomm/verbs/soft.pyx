"""Faults on request, for tests of programs that must survive them. Soft devices only.

    from rocecomm.verbs import soft

    with soft.inject("drop", op="send", times=1) as fault:
        ...                             # the next send ends in IBV_WC_RETRY_EXC_ERR
    assert fault.hit == 1

A rule hits work requests where the device carries them out, so that what the program sees
is what a NIC would show: a completion with that status, the queue pair in error, what is
behind it flushed, the peer's end as it would be. The same rules can be given from outside
as ``ROCECOMM_SOFT_FAULT="drop:op=send,times=1"``; docs/how-to/test-rdma-code-without-hardware.md
has them all.
"""

from libc.errno cimport ENOENT
from libc.stdint cimport uint64_t
from rocecomm.verbs.context cimport Context
from rocecomm.verbs.cq cimport CQ
from rocecomm.verbs.handle cimport verbs_error
from rocecomm.verbs.libibverbs cimport ibv_context, ibv_cq, ibv_qp
from rocecomm.verbs.provider cimport Provider
from rocecomm.verbs.qp cimport QP

import errno as _errno
import numbers

from rocecomm.enums import WCStatus, WROpcode
from rocecomm.errors import VerbsError
from rocecomm.verbs import provider as _provider

__all__ = ["Fault", "Outage", "inject", "port_down", "port_up", "peer_death", "cq_overrun"]

ctypedef int (*inject_fn)(ibv_context *, const char *, uint64_t *) noexcept nogil
ctypedef int (*remove_fn)(uint64_t) noexcept nogil
ctypedef int (*stats_fn)(uint64_t, uint64_t *, uint64_t *) noexcept nogil
ctypedef int (*port_fn)(ibv_context *, int) noexcept nogil
ctypedef int (*death_fn)(ibv_qp *) noexcept nogil
ctypedef int (*overrun_fn)(ibv_cq *) noexcept nogil


cdef void *symbol(Provider provider, str name, str device) except NULL:
    cdef void *found = provider.symbol(name, False)
    if found == NULL:
        raise VerbsError(
            f"{name} on {device}: faults can be injected on soft devices (soft0, ...) only, and this "
            f"one belongs to {provider.path}; open a soft device in the test",
            verb=name, errno=_errno.EOPNOTSUPP, device=device)
    return found


cdef class Fault:
    """Rules that are in force until ``remove()``, or the end of a ``with`` block.

    Made by :func:`inject`. ``rule`` is their text as ROCECOMM_SOFT_FAULT would have it,
    ``matched`` counts the work requests that they were asked about, ``hit`` those that they
    struck; both keep their last value after the removal.
    """

    cdef Provider provider
    cdef uint64_t id
    cdef uint64_t last_matched
    cdef uint64_t last_hit
    cdef readonly str rule

    def __init__(self):
        raise TypeError("a Fault is made by rocecomm.verbs.soft.inject()")

    cdef int look(self) except -1:
        cdef uint64_t matched
        cdef uint64_t hit
        if (<stats_fn> symbol(self.provider, "softnic_inject_stats", "soft0"))(
                self.id, &matched, &hit) == 0:
            self.last_matched = matched
            self.last_hit = hit
            return 1
        return 0

    @property
    def matched(self):
        """How many work requests the rules were asked about."""
        self.look()
        return self.last_matched

    @property
    def hit(self):
        """How many work requests were struck."""
        self.look()
        return self.last_hit

    @property
    def active(self):
        """False once removed, or once the context is closed that the rules were for."""
        return self.look() == 1

    def remove(self):
        """Takes the rules away; what waits because of them goes on. Twice is fine."""
        cdef int rc
        cdef remove_fn call = <remove_fn> symbol(self.provider, "softnic_inject_remove", "soft0")
        self.look()
        with nogil:
            rc = call(self.id)
        if rc and rc != ENOENT:
            raise verbs_error("softnic_inject_remove", rc, "soft0", self.rule)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.remove()

    def __repr__(self):
        state = "" if self.active else ", removed"
        return f"<Fault {self.rule!r}: hit {self.hit} of {self.matched}{state}>"

    def __reduce__(self):
        raise TypeError("a Fault cannot be copied or pickled: its rules are in force in this process")


def _op(op):
    if isinstance(op, WROpcode):
        return op.name.removeprefix("IBV_WR_").lower()
    if isinstance(op, str):
        return op
    return "+".join(_op(each) for each in op)


def _number(value, what):
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number, not {value!r}")
    if not 0 <= value <= 86400:         # false for NaN as well; the longest time is a day
        raise ValueError(f"{what} must lie between 0 and {'a day' if what == 'seconds' else 1}, not {value!r}")
    return f"{float(value):.11f}".rstrip("0").rstrip(".")


def _whole(value, what):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{what} must be a whole number, not {value!r}")
    return str(int(value))


def _text(kind, settings):
    if isinstance(kind, WCStatus):
        kind = kind.name
    if not isinstance(kind, str):
        raise TypeError(f"a fault is named by a str or a WCStatus, not by {kind!r}")
    words = [f"{key}={value}" for key, value in settings if value is not None]
    if words and ";" in kind:
        raise ValueError(f"{kind!r} has several rules: put their settings into the text")
    if not words:
        return kind
    return kind + ("," if ":" in kind else ":") + ",".join(words)


def inject(kind, *, Context context=None, device=None, qp=None, op=None, p=None, seed=None, after=None,
           times=None, seconds=None, lost=None, verb=None, errno=None):
    """Puts fault rules in force in this process: :class:`Fault`, also a context manager.

    `kind` is ``"delay"``, ``"drop"``, ``"rnr"``, ``"access"``, ``"port_down"``,
    ``"peer_death"``, ``"cq_overrun"``, a completion status (``WCStatus`` or its name), or a
    whole text as for ``ROCECOMM_SOFT_FAULT``, several rules separated by ``;``.

    Which requests: of `context` (default: all of this process), of `device` (a name), of
    `qp` (a QP or its number), of opcode `op` (``"send"``, ``"rdma_write"``, ``"rdma_read"``,
    ``"atomic"``, an exact WROpcode, several in a list; ``"recv"`` for receives, completion
    statuses only). The first `after` that match are left alone, at most `times` are hit, each
    with probability `p`; the same `seed` hits the same ones.

    `seconds`: how long a delay lasts (needed), an RNR state or a port that is down (default:
    until the retries are used up; until :func:`port_up`). `lost`: how many transmissions in a row
    a drop takes (default: all, which ends in IBV_WC_RETRY_EXC_ERR after the transport timeout).

    ``"refuse"`` makes control verbs fail: `verb` is ``"reg_mr"``, ``"create_qp"``, ... or a list of
    them, `errno` the error number or its name (default EIO).

    Raises VerbsError, with a sentence that names the part, for what cannot be used (EINVAL),
    for more than 64 rules (ENOSPC) and for a device that is not a soft one (EOPNOTSUPP).
    """
    cdef Fault fault = Fault.__new__(Fault)
    cdef QP pair
    cdef bytes raw
    cdef const char *c_text
    cdef ibv_context *ctx = NULL
    cdef inject_fn call
    cdef int rc
    if isinstance(qp, QP):
        pair = qp
        pair.ensure_open()
        if context is None:
            context = pair.pd.context
        qp = pair.qp_num
    text = _text(kind, (
        ("op", None if op is None else _op(op)),
        ("qp", None if qp is None else _whole(qp, "qp")),
        ("dev", device),
        ("p", None if p is None else _number(p, "p")),
        ("seed", None if seed is None else _whole(seed, "seed")),
        ("after", None if after is None else _whole(after, "after")),
        ("times", None if times is None else _whole(times, "times")),
        ("s", None if seconds is None else _number(seconds, "seconds")),
        ("lost", None if lost is None else _whole(lost, "lost")),
        ("verb", None if verb is None else _op(verb)),
        ("errno", errno if errno is None or isinstance(errno, str) else _whole(errno, "errno"))))
    raw = text.encode()
    if b"\0" in raw:
        raise ValueError("a fault rule cannot have a zero byte in it")
    c_text = raw
    name = "soft devices"
    fault.rule = text
    if context is None:
        fault.provider = _provider.get("softnic")
    else:
        fault.provider = context.provider
        name = context.name
    call = <inject_fn> symbol(fault.provider, "softnic_inject", name)
    if context is not None:
        context.enter()
        ctx = context.ctx
    try:
        with nogil:
            rc = call(ctx, c_text, &fault.id)
    finally:
        if context is not None:
            context.leave()
    if rc:
        raise verbs_error("softnic_inject", rc, name, "")
    return fault


class Outage:
    """A port that was taken down: at the end of a ``with`` block it comes up again."""

    def __init__(self, context):
        self.context = context

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if not self.context.closed:
            port_up(self.context)


cdef int set_port(Context context, int up) except -1:
    cdef int rc
    cdef port_fn call = <port_fn> symbol(context.provider, "softnic_port", context.name)
    context.enter()
    try:
        with nogil:
            rc = call(context.ctx, up)
    finally:
        context.leave()
    if rc:
        raise verbs_error("softnic_port", rc, context.name, "")
    return 0


def port_down(Context context not None):
    """Takes the port of `context` down, and up again at the end of a ``with`` block.

    ``query_port`` says IBV_PORT_DOWN, IBV_EVENT_PORT_ERR is raised, and nothing travels from or
    to this context: what is outstanding and what is posted ends in IBV_WC_RETRY_EXC_ERR after the
    transport timeout, unless the port comes up before. Other contexts of the process have ports
    of their own. Raises VerbsError if the device is not a soft one.
    """
    set_port(context, 0)
    return Outage(context)


def port_up(Context context not None):
    """Brings the port of `context` up: IBV_EVENT_PORT_ACTIVE, and what waits goes on."""
    set_port(context, 1)


def peer_death(QP qp not None):
    """The context that `qp` is connected to is dead for the context of `qp`, as if killed.

    Outstanding and later work of all queue pairs between the two ends in
    IBV_WC_RETRY_EXC_ERR at once, until the context of `qp` is closed. The peer itself is
    told nothing. Raises VerbsError (ENOTCONN) if `qp` is not connected to another context.
    """
    cdef int rc
    cdef Context context = qp.pd.context
    cdef death_fn call = <death_fn> symbol(context.provider, "softnic_peer_death", context.name)
    qp.enter()
    try:
        with nogil:
            rc = call(qp.qp)
    finally:
        qp.leave()
    if rc:
        raise verbs_error("softnic_peer_death", rc, context.name, "")


def cq_overrun(CQ cq not None):
    """`cq` overruns: IBV_EVENT_CQ_ERR; its queue pairs fail, each with IBV_EVENT_QP_FATAL.

    Once what is in the queue has been polled, ``poll`` raises VerbsError (EOVERFLOW).
    """
    cdef int rc
    cdef Context context = cq.context
    cdef overrun_fn call = <overrun_fn> symbol(context.provider, "softnic_cq_overrun", context.name)
    cq.enter()
    try:
        with nogil:
            rc = call(cq.cq)
    finally:
        cq.leave()
    if rc:
        raise verbs_error("softnic_cq_overrun", rc, context.name, "")
