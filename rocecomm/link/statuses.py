"""The catalogue: what every completion status means between two ranks, why, and what helps.

One table. `failure.py` makes its messages of it, and docs/reference/errors.md shows it; a
test compares the two. Statuses and their meaning: `enum ibv_wc_status` of
<infiniband/verbs.h>, ibv_poll_cq(3), InfiniBand Architecture Specification 1.4, 11.6.2.
Negative numbers are causes of rocecomm's own.
"""

import dataclasses

from ..enums import WCStatus

__all__ = ["POST_FAILED", "OUT_OF_SEQUENCE", "CLOSED", "NOT_RECONNECTED", "NOT_CONNECTED",
           "ENDED_BEFORE", "STATUSES", "Status", "operation", "status"]

#: A connection ended without a completion: `peer_t.cause_status`.
POST_FAILED = -1
OUT_OF_SEQUENCE = -2
CLOSED = -3
NOT_RECONNECTED = -4
NOT_CONNECTED = -5
ENDED_BEFORE = -6


@dataclasses.dataclass(frozen=True)
class Status:
    """One row. ``dead``: the peer's end does not answer, so its rank counts as dead."""

    name: str
    meaning: str
    cause: str
    remedy: str
    dead: bool = False


_DRIVER = "look into the kernel's log (dmesg) on this host, and update driver and firmware"
_NOT_OURS = "the driver reports a status of a transport that rocecomm does not use"
_OTHER_DEVICE = "update driver and firmware, or choose another device with ROCECOMM_IB_HCA"
_SILENT = ("its process or host died, it broke the connection after an error of its own, or packets do "
           "not get through (cable, switch, firewall on UDP port 4791, wrong GID)")
_LISTEN = ("look at its output; if it lives, compare 'rocecomm info' on both hosts and set "
           "ROCECOMM_IB_GID_INDEX, or raise ROCECOMM_DEAD_AFTER, from which ROCECOMM_IB_TIMEOUT "
           "follows, if packets get lost")

STATUSES = {
    0: Status("IBV_WC_SUCCESS", "the request was carried out", "", ""),
    1: Status(
        "IBV_WC_LOC_LEN_ERR", "a length did not fit on this side",
        "the peer sent more than a receive slot holds, or the port carries shorter messages than "
        "it says",
        "set ROCECOMM_EAGER_LIMIT to one, smaller value on all ranks"),
    2: Status(
        "IBV_WC_LOC_QP_OP_ERR", "the local queue pair could not carry out the request",
        "the device or its driver is in trouble, or does not take the service level",
        "leave ROCECOMM_IB_SL at 0, " + _DRIVER),
    3: Status("IBV_WC_LOC_EEC_OP_ERR", "a local end-to-end context could not carry out the request",
              _NOT_OURS, _OTHER_DEVICE),
    4: Status(
        "IBV_WC_LOC_PROT_ERR", "the local buffer is not accessible under its key",
        "the buffer was unmapped or mapped anew while the transfer was under way",
        "keep the memory as it is until the request has ended; if other code maps memory behind "
        "numpy's back, set ROCECOMM_REG_CACHE=0"),
    5: Status(
        "IBV_WC_WR_FLUSH_ERR", "the queue pair was in error before this request began",
        "an earlier request of this connection failed, here or at the peer",
        "look at the peer's output, where the first error is"),
    6: Status("IBV_WC_MW_BIND_ERR", "a memory window could not be bound",
              "the region under the window lacks access rights",
              "register with IBV_ACCESS_MW_BIND; rocecomm itself binds no windows"),
    7: Status("IBV_WC_BAD_RESP_ERR", "the peer's device answered with something unexpected",
              "the two devices or drivers do not understand each other",
              "use the same driver and firmware on both hosts, or lower ROCECOMM_IB_MTU"),
    8: Status(
        "IBV_WC_LOC_ACCESS_ERR", "the peer's operation may not go into local memory",
        "the local region does not allow the access, or was removed meanwhile",
        "register with the access that the peer uses, and keep the region open as long as it does"),
    9: Status(
        "IBV_WC_REM_INV_REQ_ERR", "the peer's device refused the request as malformed",
        "the message is longer than the peer's receive slot, the peer's queue pair does not allow "
        "the operation, or an atomic is not aligned to 8 bytes",
        "set ROCECOMM_EAGER_LIMIT alike on all ranks, and align the offsets of atomics"),
    10: Status(
        "IBV_WC_REM_ACCESS_ERR", "the peer's memory may not be accessed",
        "it is no longer registered: the peer's send timed out or was interrupted, its memory was "
        "freed, or its region was closed",
        "raise ROCECOMM_TIMEOUT or the timeout of the peer's send, and keep regions open until all "
        "have used them"),
    11: Status(
        "IBV_WC_REM_OP_ERR", "the peer's device could not carry out the request",
        "the peer's host or device is in trouble, or its memory was unmapped",
        "look at the peer's output and its kernel's log (dmesg)"),
    12: Status("IBV_WC_RETRY_EXC_ERR", "the peer does not answer", _SILENT, _LISTEN, dead=True),
    13: Status(
        "IBV_WC_RNR_RETRY_EXC_ERR", "the peer had no receive ready in time",
        "the peer's receive queue lost entries (rocecomm's credits keep it filled)",
        "raise ROCECOMM_RECV_POOL and ROCECOMM_PEER_CREDITS alike on all ranks, and report it"),
    14: Status("IBV_WC_LOC_RDD_VIOL_ERR", "local reliable datagram domains differ",
               _NOT_OURS, _OTHER_DEVICE),
    15: Status("IBV_WC_REM_INV_RD_REQ_ERR", "the peer refused a reliable datagram",
               _NOT_OURS, _OTHER_DEVICE),
    16: Status(
        "IBV_WC_REM_ABORT_ERR", "the peer's device gave the operation up",
        "the peer's queue pair was reset or destroyed in the middle of it",
        "look at the peer's output; close() there only when all messages have been taken"),
    17: Status("IBV_WC_INV_EECN_ERR", "there is no such end-to-end context",
               _NOT_OURS, _OTHER_DEVICE),
    18: Status("IBV_WC_INV_EEC_STATE_ERR", "an end-to-end context is in the wrong state",
               _NOT_OURS, _OTHER_DEVICE),
    19: Status("IBV_WC_FATAL_ERR", "the local device failed",
               "the device met an error from which it does not recover",
               _DRIVER + ", or choose another device with ROCECOMM_IB_HCA"),
    20: Status("IBV_WC_RESP_TIMEOUT_ERR", "the peer's answer did not come in time", _SILENT, _LISTEN,
               dead=True),
    21: Status("IBV_WC_GENERAL_ERR", "the device met an error that has no status of its own",
               "only the vendor's code tells",
               _DRIVER + ", or choose another device with ROCECOMM_IB_HCA"),
    22: Status("IBV_WC_TM_ERR", "tag matching in the device failed",
               "the driver reports a status of a feature that rocecomm does not use", _OTHER_DEVICE),
    23: Status("IBV_WC_TM_RNDV_INCOMPLETE", "the device left a rendezvous to the program",
               "the driver reports a status of a feature that rocecomm does not use", _OTHER_DEVICE),
    POST_FAILED: Status(
        "post failed", "the device refused the request before it began",
        "it is out of resources (ENOMEM), or no longer usable (EIO, ENODEV), or the process has changed its "
        "user, group or capabilities since init() (EACCES, where sending is a call to the kernel)",
        _DRIVER + ", drop privileges before init(), then start the job again"),
    OUT_OF_SEQUENCE: Status(
        "out of sequence", "what came is not the next message of this connection",
        "the peer runs another build, or memory under its messages was overwritten",
        "install the same rocecomm on all hosts, then start the job again"),
    CLOSED: Status(
        "closed", "close() broke the connection off with transfers under way",
        "the peer did not take them within the 4 s that close() waits",
        "wait for the requests before close()"),
    NOT_RECONNECTED: Status(
        "not reconnected", "the device refused to connect again after a one-sided request had failed",
        "it is out of resources (ENOMEM), or a peer that is stopped in the middle of a copy holds "
        "it (EBUSY)",
        _DRIVER + ", then start the job again"),
    NOT_CONNECTED: Status(
        "not connected", "the device refused the queue pairs for a rank that was needed for the first time",
        "it is out of resources (ENOMEM), which many connections take",
        "look at 'ulimit -l' and into the kernel's log (dmesg), or talk to fewer ranks"),
    ENDED_BEFORE: Status(
        "ended before", "the rank's process ended before anybody connected to it",
        "it died, or exited without close()", "look at its output", dead=True),
}

_OPERATIONS = {16: "send", 17: "send", 18: "read of the peer's buffer", 19: "heartbeat",
               20: "read of the peer's state", 32: "write into its region", 33: "read of its region",
               34: "fetch_add in its region", 35: "compare_swap in its region", 128: "receive"}


def status(number):
    """The row of a status; of an unknown number one that says so."""
    row = STATUSES.get(int(number))
    if row is None:
        row = Status(f"status {int(number)}", "the device reports a status that libibverbs does not name",
                     "the driver is newer than this rocecomm", _OTHER_DEVICE)
    return row


def operation(opcode):
    """What was under way: `peer_t.cause_opcode` in words."""
    return _OPERATIONS.get(opcode, "transfer")


assert set(STATUSES) >= set(WCStatus)
