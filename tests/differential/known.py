"""Small programs, each about one rule, with the outcome that the specification asks for.

All memory of side 0 is region 0, that of side 1 is region 1.
"""

from typing import NamedTuple

from differential.steps import (
    ALL,
    ARENA,
    LOCAL,
    READ,
    Config,
    Dereg,
    Err,
    Recv,
    Reg,
    Remote,
    Scribble,
    Send,
    Sge,
    Sync,
)


class Case(NamedTuple):
    steps: tuple
    expected: dict              # "side queue": [(wr_id, status)]
    config: Config = Config()
    unless: str = ""            # field of Rules: no outcome is asked of a device that departs there


HUNDRED = (Sge(0, 8, 100),)
OK, FLUSH = "SUCCESS", "WR_FLUSH_ERR"
BAD, INVALID, ACCESS, OPERATION = "LOC_PROT_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR"


def recv(wr_id, length=100, **more):
    return Recv(1, wr_id, (Sge(1, 0, length, **more),))


def write(wr_id, sges=HUNDRED, remote=None, **more):
    return Send(0, wr_id, "write", sges, remote or Remote(1, 64), **more)


KNOWN = {
    "write": Case((write(1),), {"0 send": [(1, OK)]}),
    "write, unsignaled before": Case((write(1, signaled=False), write(2)), {"0 send": [(2, OK)]}),
    "write inline, memory changed": Case(
        (write(1, (Sge(0, 0, 60),), inline=True), Scribble(0, 0, 60, 7)), {"0 send": [(1, OK)]}),
    "receive, then send": Case((recv(1), Send(0, 2, "send", HUNDRED)),
                               {"0 send": [(2, OK)], "1 recv": [(1, OK)]}),
    "send, then receive": Case((Send(0, 2, "send", HUNDRED), recv(1)),
                               {"0 send": [(2, OK)], "1 recv": [(1, OK)]}),
    "what is behind a send that waits": Case(
        (Send(0, 2, "send_imm", HUNDRED, imm=0xFFFFFFFF), write(3), Sync, recv(1), Sync),
        {"0 send": [(2, OK), (3, OK)], "1 recv": [(1, OK)]}),
    "receives in order": Case((recv(1), recv(2), Send(0, 3, "send", HUNDRED), Send(0, 4, "send", ())),
                              {"0 send": [(3, OK), (4, OK)], "1 recv": [(1, OK), (2, OK)]}),
    "nothing sent": Case((Recv(1, 1), Send(0, 2, "send", ())), {"0 send": [(2, OK)], "1 recv": [(1, OK)]}),
    "write with immediate data uses no memory of the receive": Case(
        (recv(1, wrong_key=True), Send(0, 2, "write_imm", HUNDRED, Remote(1, 64), imm=5)),
        {"0 send": [(2, OK)], "1 recv": [(1, OK)]}),
    "many elements": Case(
        (Recv(1, 1, (Sge(1, 0, 30), Sge(1, 100, 0), Sge(1, 200, 2000))),
         Send(0, 2, "send", (Sge(0, 0, 1), Sge(0, 50, 1100), Sge(0, 2000, 7)))),
        {"0 send": [(2, OK)], "1 recv": [(1, OK)]}),
    "read and atomics": Case(
        (Send(0, 1, "add", (Sge(0, 0, 8),), Remote(1, 8), compare_add=2**64 - 1),
         Send(0, 2, "swap", (Sge(0, 16, 8),), Remote(1, 16), compare_add=1, swap=2, fence=True),
         Send(0, 3, "read", (Sge(0, 40, 2000), Sge(0, 4000, 9)), Remote(1, 0), fence=True)),
        {"0 send": [(1, OK), (2, OK), (3, OK)]}),
    "fenced behind an atomic that waits": Case(
        (Send(0, 1, "send", HUNDRED), Send(0, 2, "add", (Sge(0, 1000, 8),), Remote(1, 8), compare_add=1),
         Send(0, 3, "write", (Sge(0, 1000, 8),), Remote(1, 4096), fence=True), Sync, recv(4)),
        {"0 send": [(1, OK), (2, OK), (3, OK)], "1 recv": [(4, OK)]}, unless="fence_sent_again"),
    "zero bytes look at no key": Case(
        (write(1, (), Remote(1, 0, True)), Send(0, 2, "read", (), Remote(1, 0, True))),
        {"0 send": [(1, OK), (2, OK)]}),
    "overlapping writes": Case(
        (write(1, (Sge(0, 0, 2500),)), write(2, (Sge(0, 5000, 2500),), Remote(1, 1000))),
        {"0 send": [(1, OK), (2, OK)]}),
    "write over a send": Case((recv(1), Send(0, 2, "send", HUNDRED), write(3)),
                              {"0 send": [(2, OK), (3, OK)], "1 recv": [(1, OK)]}),
    "send over a send": Case((recv(1), recv(2, 2000), Send(0, 3, "send", HUNDRED),
                              Send(0, 4, "send", (Sge(0, 1000, 1500),))),
                             {"0 send": [(3, OK), (4, OK)], "1 recv": [(1, OK), (2, OK)]}),
    "read of what was sent": Case(
        (recv(1), Send(0, 2, "send", HUNDRED), Send(0, 3, "read", (Sge(0, 1000, 200),), Remote(1, 0))),
        {"0 send": [(2, OK), (3, OK)], "1 recv": [(1, OK)]}),
    "atomic on what was sent": Case(
        (recv(1), Send(0, 2, "send", HUNDRED),
         Send(0, 3, "add", (Sge(0, 1000, 8),), Remote(1, 16), compare_add=5)),
        {"0 send": [(2, OK), (3, OK)], "1 recv": [(1, OK)]}),
    "send over a write": Case(
        (Recv(1, 1, (Sge(1, 100, 2000),)), write(2, (Sge(0, 0, 3000),)),
         Send(0, 3, "send", (Sge(0, 9000, 1500),))),
        {"0 send": [(2, OK), (3, OK)], "1 recv": [(1, OK)]}),

    "wrong lkey": Case((write(1), Sync, write(2, (Sge(0, 0, 9, True),)), write(3), Sync),
                       {"0 send": [(1, OK), (2, BAD), (3, FLUSH)]}),
    "one byte beyond the region": Case((write(1, (Sge(0, ARENA - 9, 10),)), Sync), {"0 send": [(1, BAD)]}),
    "second element bad": Case((write(1, (Sge(0, 0, 9), Sge(0, 0, 9, True))), Sync), {"0 send": [(1, BAD)]}),
    "read into memory without the right": Case(
        (Reg(0, 2, 0, 100, READ), Send(0, 1, "read", (Sge(2, 0, 100),), Remote(1, 0)), Sync),
        {"0 send": [(1, BAD)]}),
    "lkey of another domain": Case((Reg(0, 2, 0, 100, ALL, 1), write(1, (Sge(2, 0, 9),)), Sync),
                                   {"0 send": [(1, BAD)]}),
    "lkey of what was deregistered": Case((Dereg(0, 0), write(1), Sync), {"0 send": [(1, BAD)]}),

    "wrong rkey": Case((write(1), write(2, remote=Remote(1, 0, True)), write(3), Sync),
                       {"0 send": [(1, OK), (2, ACCESS), (3, FLUSH)]}),
    "wrong rkey flushes both sides": Case(
        (recv(1), Recv(0, 2, (Sge(0, 0, 9),)), Send(1, 3, "send", (Sge(1, 0, 9),)), Sync,
         Send(1, 4, "send", (Sge(1, 0, 9),)), Sync, Send(0, 5, "read", HUNDRED, Remote(1, 0, True)), Sync),
        {"0 send": [(5, ACCESS)], "0 recv": [(2, OK)], "1 send": [(3, OK), (4, FLUSH)],
         "1 recv": [(1, FLUSH)]}),
    "one byte beyond the far region": Case((write(1, remote=Remote(1, ARENA - 99)), Sync),
                                           {"0 send": [(1, ACCESS)]}),
    "atomic before the far region": Case(
        (Reg(1, 2, 64, 64), Send(0, 1, "add", (Sge(0, 0, 8),), Remote(2, -8)), Sync),
        {"0 send": [(1, ACCESS)]}),
    "far region without the right": Case(
        (Reg(1, 2, 0, 100, LOCAL), Send(0, 1, "read", HUNDRED, Remote(2, 0)), Sync),
        {"0 send": [(1, ACCESS)]}),
    "far region of another domain": Case((Reg(1, 2, 0, 100, ALL, 1), write(1, remote=Remote(2, 0)), Sync),
                                         {"0 send": [(1, ACCESS)]}),
    "rkey of what was deregistered": Case((write(1), Sync, Dereg(1, 1), write(2), Sync),
                                          {"0 send": [(1, OK), (2, ACCESS)]}),
    "queue pair without the right": Case((write(1, ()), Sync), {"0 send": [(1, INVALID)]},
                                         Config(access=(ALL, int(READ)))),
    "write with immediate data, queue pair without the right": Case(
        (recv(1), recv(2), Send(0, 3, "write_imm", HUNDRED, Remote(1, 0)), Sync),
        {"0 send": [(3, INVALID)], "1 recv": [(1, FLUSH), (2, FLUSH)]}, Config(access=(ALL, 0))),

    "receive too short": Case((recv(1, 99), recv(2), Send(0, 3, "send", HUNDRED), Sync),
                              {"0 send": [(3, INVALID)], "1 recv": [(1, "LOC_LEN_ERR"), (2, FLUSH)]}),
    "receive too short for a second packet": Case(
        (recv(1, 1500), Send(0, 3, "send", (Sge(0, 0, 2500),)), Sync),
        {"0 send": [(3, INVALID)], "1 recv": [(1, "LOC_LEN_ERR")]}),
    "receive with a wrong lkey": Case((recv(1, wrong_key=True), recv(2), Send(0, 3, "send", HUNDRED), Sync),
                                      {"0 send": [(3, OPERATION)], "1 recv": [(1, BAD), (2, FLUSH)]}),
    "receive without the right to write": Case(
        (Reg(1, 2, 0, 100, READ), Recv(1, 1, (Sge(2, 0, 100),)), Send(0, 3, "send", HUNDRED), Sync),
        {"0 send": [(3, OPERATION)], "1 recv": [(1, BAD)]}),

    "receive deregistered, then polled": Case(
        (Reg(1, 2, 0, 200), Recv(1, 1, (Sge(2, 0, 200),)), Send(0, 3, "send", HUNDRED),
         Sync({(0, "send"): 1}), Dereg(1, 2), Sync),
        {"0 send": [(3, OK)], "1 recv": [(1, OK)]}),
    "receive deregistered and its memory used, then polled": Case(
        (Reg(1, 2, 0, 200), Recv(1, 1, (Sge(2, 0, 200),)), Send(0, 3, "send", HUNDRED),
         Sync({(0, "send"): 1}), Dereg(1, 2), Scribble(1, 0, 150, 3), Sync),
        {"0 send": [(3, OK)], "1 recv": [(1, OK)]}),
    "source deregistered, then polled": Case(
        (Reg(0, 2, 0, 200), recv(1), Send(0, 3, "send", (Sge(2, 5, 100),)), Sync({(1, "recv"): 1}),
         Dereg(0, 2), Sync),
        {"0 send": [(3, OK)], "1 recv": [(1, OK)]}),

    "error state": Case(
        (Recv(0, 1, (Sge(0, 0, 9),)), Recv(0, 2), Send(0, 3, "send", HUNDRED), write(4, signaled=False), Sync,
         Err(0), write(5), Sync),
        {"0 recv": [(1, FLUSH), (2, FLUSH)], "0 send": [(3, FLUSH), (4, FLUSH), (5, FLUSH)]}),
    "to a peer in the error state": Case(
        (Err(1), Sync, Send(0, 1, "send", HUNDRED), write(2), Sync),
        {"0 send": [(1, "RETRY_EXC_ERR"), (2, FLUSH)]}),
    "the peer ends while a send waits": Case(
        (Send(0, 1, "send", HUNDRED), write(2), Sync, Err(1), Sync),
        {"0 send": [(1, "RETRY_EXC_ERR"), (2, FLUSH)]}),
    "receive in the error state": Case((Err(1), Sync, recv(1), recv(2), Sync),
                                       {"1 recv": [(1, FLUSH), (2, FLUSH)]}),
}
