"""What went wrong with a transfer, in words: one sentence with cause and remedy.

Pure functions of what the engine found; they name no device kind and touch no verbs.
"""

import os

from ..errors import (
    ClosedError,
    CompletionError,
    MessageTruncatedError,
    MismatchError,
    PeerDeadError,
    RocecommError,
    TimeoutError,
    VerbsError,
)
from .statuses import (
    CLOSED,
    ENDED_BEFORE,
    NOT_CONNECTED,
    NOT_RECONNECTED,
    OUT_OF_SEQUENCE,
    POST_FAILED,
    operation,
)
from .statuses import status as status_of

__all__ = ["abort_class", "aborted", "cancelled", "cycle", "dtype", "engine_closed", "fatal", "from_any",
           "lost_peer", "no_memory", "not_connected", "nothing_came", "one_sided", "registration", "size",
           "timed_out", "truncated"]


def size(n):
    """``n`` bytes for people: exact below 10 KiB, then with one decimal and the exact number."""
    if n < 10240:
        return f"{n} bytes"
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >> shift:
            return f"{n} bytes ({n / (1 << shift):.4g} {unit})"


def lost_peer(what, rank, device, *, status, opcode, vendor, err, nbytes, left, dead_after):
    """The connection to ``rank`` broke; ``what`` is the operation that learns of it now."""
    if left:
        return PeerDeadError(
            f"{what}: rank {rank} has closed its communicator on {device}, so nothing can be "
            "exchanged with it any more; let all ranks agree on when the last message is sent",
            peer=rank)
    row = status_of(status)
    why = f"{row.meaning}: {row.cause}; {row.remedy}"
    if status == POST_FAILED:
        return VerbsError(
            f"{what}: posting {size(nbytes)} to rank {rank} on {device} failed with "
            f"{os.strerror(err)}, which closed its connection: {why}",
            verb="ibv_post_send", errno=err, device=device)
    if status == OUT_OF_SEQUENCE:
        return RocecommError(
            f"{what}: rank {rank} sent {size(nbytes)} on {device} that are not the next message of "
            f"this connection, so it is closed: {row.cause}; {row.remedy}")
    if status == CLOSED:
        return ClosedError(
            f"{what}: the communicator on {device} was closed while the transfer with rank {rank} was "
            f"under way: {row.cause}; {row.remedy}")
    if status == NOT_RECONNECTED:
        return VerbsError(
            f"{what}: the queue pairs for one-sided operations with rank {rank} on {device} could not "
            f"be connected again ({os.strerror(err)}), which closed the connection: {why}",
            verb="ibv_modify_qp", errno=err, device=device)
    if status == NOT_CONNECTED:
        return VerbsError(
            f"{what}: rank {rank} could not be connected on {device}, as making or connecting the queue "
            f"pairs failed with {os.strerror(err)}: {row.cause}; {row.remedy}",
            verb="ibv_create_qp", errno=err, device=device)
    if status == ENDED_BEFORE:
        return PeerDeadError(
            f"{what}: the process of rank {rank} has ended before a connection to it was made on "
            f"{device}: {row.cause}; {row.remedy}", peer=rank)
    request = f"a {operation(opcode)} of {size(nbytes)}" if nbytes else f"a {operation(opcode)}"
    if row.dead:
        return PeerDeadError(
            f"{what}: rank {rank} does not answer on {device} ({row.name} on {request}, looked for "
            f"every second, given up within {dead_after:g} s): {row.cause}; {row.remedy}", peer=rank)
    code = f" (vendor code {vendor:#x})" if vendor else ""
    return CompletionError(
        f"{what}: the connection to rank {rank} on {device} broke, as {request} ended with {row.name}"
        f"{code}: {why}", status=status, opcode=opcode, vendor_err=vendor, peer=rank)


def from_any(error, others):
    """``error`` ends a wait for any source; ``others``: whether another rank can still send."""
    if others:
        error.args = (f"{error}; the next call waits for the other ranks",)
    return error


def nothing_came(gone):
    """A wait for any source got nothing; the ranks ``gone`` have closed or died."""
    if not gone:
        return "no matching message was sent"
    ranks = ", ".join(map(str, gone))
    return ("no matching message was sent; " +
            (f"rank {ranks} has" if len(gone) == 1 else f"ranks {ranks} have") +
            " closed or died and sends none any more")


#: enum ibv_wc_opcode of write, read, fetch_add, compare_swap
_WC_OPCODES = (1, 2, 4, 3)

#: Why a one-sided request fails while the connection goes on, and what helps.
_ONE_SIDED = {
    "IBV_WC_REM_ACCESS_ERR":
        "the region is closed, or does not allow it; ask its owner for the descriptor of an open one",
    "IBV_WC_REM_INV_REQ_ERR":
        "the owner's device does not carry out such a request there; check alignment and access "
        "rights of the region",
    "IBV_WC_REM_OP_ERR":
        "the owner's device could not carry it out, perhaps because the region's memory is not "
        "mapped any more; keep it until the region is closed",
    "IBV_WC_LOC_PROT_ERR":
        "the local buffer was unmapped or its registration closed meanwhile; keep it until the "
        "request has ended",
}


def one_sided(what, rank, device, op, nbytes, piece, status, vendor, doubtful):
    """One request of ``nbytes`` failed, in a work request of ``piece`` bytes; all others go on."""
    if doubtful:
        return CompletionError(
            f"{what}: rank {rank} may or may not have carried it out: a request before it failed on "
            f"{device} while this one was on its way; look at the region before you repeat it",
            status=5, opcode=_WC_OPCODES[op], vendor_err=vendor, peer=rank)
    row = status_of(status)
    why = _ONE_SIDED.get(row.name, f"{row.cause}; {row.remedy}")
    amount = size(nbytes) if piece == nbytes else f"{size(nbytes)}, in a piece of {size(piece)},"
    return CompletionError(
        f"{what}: {amount} with the region of rank {rank} on {device} ended with {row.name} "
        f"({row.meaning}): {why}; other requests are not affected",
        status=status, opcode=_WC_OPCODES[op], vendor_err=vendor, peer=rank)


def timed_out(what, rank, device, seconds, state, detail):
    """A deadline passed. ``state``: "busy", "stopped" or "unknown"; ``detail``: what is known."""
    who = "any rank" if rank is None or rank < 0 else f"rank {rank}"
    return TimeoutError(
        f"{what} with {who} on {device} did not end within {seconds:g} s: {detail}",
        peer=None if rank is None or rank < 0 else rank, peer_state=state)


def not_connected(what, rank, device, seconds, alive):
    """A deadline passed before the first connection to ``rank``. ``alive``: its process runs on this host."""
    if alive:
        return timed_out(what, rank, device, seconds, "busy",
                         "the connection to it was never made: its process is alive, but was not in a "
                         "rocecomm call since it was needed, or has closed its communicator; let it call, or "
                         "raise the timeout")
    return timed_out(what, rank, device, seconds, "unknown",
                     "the connection to it was never made: it is not in a rocecomm call, dead, or its "
                     "datagrams do not get through; let it call, or set ROCECOMM_CONNECT=init on all "
                     "ranks to find out at the start")


def truncated(what, rank, sent, capacity):
    return MessageTruncatedError(
        f"{what}: rank {rank} sent {size(sent)} but the buffer holds {size(capacity)}; the message "
        "is lost to this receive, nothing was written; pass a buffer of at least that size",
        sent=sent, capacity=capacity, peer=rank)


def dtype(what, rank, sent, wanted, nbytes):
    return MismatchError(
        f"{what}: rank {rank} sent {size(nbytes)} of {sent} but the buffer is of {wanted}; the "
        "message is lost to this receive, nothing was written; pass a buffer of the same dtype, or "
        "view one side as uint8 to say that bytes are meant", peer=rank)


def aborted(what, cls, rank, device, mine, theirs, other, text):
    """A collective failed: 1 signatures differ, 2 a rank died, 3 a rank closed, 4 see ``text``,
    5 and up the same, a deadline passed."""
    if cls == 1:
        return MismatchError(
            f"{what}: the ranks disagree: rank {rank} is in {mine}, rank {other} in {theirs}; all "
            "ranks must make the same collective calls in the same order with the same arguments",
            peer=other)
    if cls == 2:
        return PeerDeadError(
            f"{what}: rank {rank} died or does not answer on {device}, so no collective of this "
            "group can end; look at its output and start the job again", peer=rank)
    if cls == 3:
        return PeerDeadError(
            f"{what}: rank {rank} closed its communicator on {device} while this group still had a "
            "collective to do; all ranks must make the same collective calls", peer=rank)
    if cls > 4:
        return TimeoutError(f"{what}: {text}", peer=None if rank < 0 else rank, peer_state=_STATES[cls - 5])
    return RocecommError(f"{what}: {text}")


#: Of a peer in a TimeoutError; classes 5 and up of a group that failed.
_STATES = (None, "unknown", "busy", "stopped", "waiting")


def abort_class(error):
    """How the other ranks are told of ``error``: class and rank for :func:`aborted`."""
    if isinstance(error, PeerDeadError) and error.peer is not None:
        return 2, error.peer
    if not isinstance(error, TimeoutError):
        return 4, -1
    return 5 + _STATES.index(error.peer_state), -1 if error.peer is None else error.peer


def cycle(what, rank, device, mine, theirs, ranks, where):
    """``ranks`` ranks block in sends in a ring; ``rank``, to which this one sends, in one to
    ``where``."""
    if ranks > 2:
        return RocecommError(
            f"{what}: {ranks} ranks block in large sends to each other in a ring: this one in a send of "
            f"{size(mine)} to rank {rank} on {device}, that one in a send of {size(theirs)} to rank "
            f"{where}, and so on back to this rank, and none of them receives; use isend() or "
            "sendrecv(), which work at every size")
    return RocecommError(
        f"{what}: rank {rank} blocks in a send of {size(theirs)} to this rank while this rank blocks "
        f"in a send of {size(mine)} to it on {device}, and neither receives; use isend() or "
        "sendrecv(), which work at every size")


def self_cycle(what, nbytes):
    return RocecommError(
        f"{what}: a blocking send of {size(nbytes)} to oneself cannot end, as no receive is posted; "
        "post irecv() first, or use isend() or sendrecv()")


def cancelled(what):
    return RocecommError(f"{what}: the request was cancelled")


def engine_closed(what, device):
    return ClosedError(
        f"{what}: the communicator on {device} was closed; nothing can be exchanged any more")


def no_memory(what):
    return MemoryError(f"{what}: no memory for the bookkeeping of another message")


def registration(what, err, nbytes, device, hint):
    """``hint``: cause and remedy, as ``verbs.mr`` knows them."""
    return VerbsError(
        f"{what}: {size(nbytes)} could not be registered on {device}: {os.strerror(err)}{hint}",
        verb="ibv_reg_mr", errno=err, device=device)


def fatal(what, err, device, verb):
    return VerbsError(
        f"{what}: {verb} on {device} failed with {os.strerror(err)}, so the communicator is of no use "
        "any more: a queue overran or the device is in trouble; look into the kernel's log (dmesg) "
        "and start the job again", verb=verb, errno=err, device=device)
