"""Small programs of many queue pairs, each about one rule, with the outcome worked out by hand;
and those that tell devices apart where they are known to differ."""

from typing import NamedTuple

from differential.departures import RXE
from differential.many_model import Many, More
from differential.many_steps import (
    GRH,
    QKEY,
    Again,
    Arm,
    Asyncs,
    Drain,
    Err,
    Events,
    Limit,
    Place,
    Queue,
    Recv,
    Resize,
    Resume,
    Send,
    Sync,
    World,
)
from differential.model import Rules
from differential.steps import WRITE


class Case(NamedTuple):
    world: World
    steps: tuple
    expected: dict              # "side qp queue": [(wr_id, status)]
    events: tuple = ()          # (side, cq), all that come
    asyncs: tuple = ()          # (side, name, number)
    unless: str = ""            # a field of More: no outcome is asked of a device that departs there


OK, FLUSH = "SUCCESS", "WR_FLUSH_ERR"
RC, UC, UD = (Queue(kind) for kind in ("RC", "UC", "UD"))
PAIR, WIRED = World((RC,)), World((RC,), channels=((0,), (0,)))
TWO = Queue("RC", send_cq=(0, 0), recv_cq=(1, 1))
SHARED = Queue("RC", srq=(None, 0))
POOL = World((SHARED, SHARED), srqs=(0, 1))
LIMITED, LAST = "IBV_EVENT_SRQ_LIMIT_REACHED", "IBV_EVENT_QP_LAST_WQE_REACHED"
ACCESS = "IBV_EVENT_QP_ACCESS_ERR"
GLAZED = World((RC,), windows=(0, 1))
BIND = Send(1, 0, 1, "bind", (Place(6000, 100),), window=0, rights=int(WRITE))


def recv(wr_id, to=0, length=2000, shared=False, side=1):
    return Recv(side, to, wr_id, (Place(5000 + (wr_id % 50) * 2000, length),) if length else (), shared)


def send(wr_id, length=100, qp=0, side=0, op="send", **more):
    return Send(side, qp, wr_id, op, (Place(0, length),) if length else (), **more)


KNOWN = {
    "two queue pairs, one queue for both, one order each": Case(
        World((RC, RC)),
        (recv(1), recv(2, 1), recv(3), send(4), send(5, qp=1), send(6)),
        {"0 0 send": [(4, OK), (6, OK)], "0 1 send": [(5, OK)], "1 0 recv": [(1, OK), (3, OK)],
         "1 1 recv": [(2, OK)]}),
    "one shared receive queue serves in its order": Case(
        POOL, (*(recv(n, shared=True) for n in (1, 2, 3)), send(4, qp=1), Sync, send(5), Sync, send(6, qp=1)),
        {"0 0 send": [(5, OK)], "0 1 send": [(4, OK), (6, OK)], "1 0 recv": [(2, OK)],
         "1 1 recv": [(1, OK), (3, OK)]}),
    "a sender waits for the shared queue": Case(
        POOL, (send(1), send(2, op="send_imm", imm=7), Sync, recv(3, shared=True), recv(4, shared=True)),
        {"0 0 send": [(1, OK), (2, OK)], "1 0 recv": [(3, OK), (4, OK)]}),
    "the limit is told once": Case(
        POOL, (*(recv(n, shared=True) for n in range(1, 6)), Limit(1, 0, 4), send(11), Sync, send(12), Sync,
               send(13)),
        {"0 0 send": [(11, OK), (12, OK), (13, OK)], "1 0 recv": [(1, OK), (2, OK), (3, OK)]},
        asyncs=((1, LIMITED, 0),)),
    "no limit, no event": Case(
        POOL, (recv(1, shared=True), recv(2, shared=True), Limit(1, 0, 2), Limit(1, 0, 0), send(11),
               send(12)),
        {"0 0 send": [(11, OK), (12, OK)], "1 0 recv": [(1, OK), (2, OK)]}),
    "a shared queue outlives a queue pair": Case(
        POOL, (recv(1, shared=True), recv(2, shared=True), Err(1, 0), Sync, send(3, qp=1), Sync, Again(0),
               send(4)),
        {"0 0 send": [(4, OK)], "0 1 send": [(3, OK)], "1 0 recv": [(2, OK)], "1 1 recv": [(1, OK)]},
        asyncs=((1, LAST, 0),), unless="last_wqe_event"),

    "one completion, one event": Case(
        WIRED, (recv(1), recv(2), Arm(1, 0, False), send(3), send(4)),
        {"0 0 send": [(3, OK), (4, OK)], "1 0 recv": [(1, OK), (2, OK)]}, events=((1, 0),)),
    "what was there before makes no event": Case(
        WIRED, (recv(1), send(2), Sync({(0, 0, "send"): 1}, whole=False), Arm(1, 0, False)),
        {"0 0 send": [(2, OK)], "1 0 recv": [(1, OK)]}),
    "only what is solicited": Case(
        WIRED, (recv(1), recv(2), Arm(1, 0, True), send(3), Sync, Events([]), send(4, solicited=True)),
        {"0 0 send": [(3, OK), (4, OK)], "1 0 recv": [(1, OK), (2, OK)]}, events=((1, 0),)),
    "a write with immediate data can be solicited, a write cannot": Case(
        WIRED, (recv(1), Arm(1, 0, True), send(2, op="write", far=Place(5000, 100), solicited=True), Sync,
                Events([]), send(3, op="write_imm", far=Place(6000, 100), solicited=True, imm=9)),
        {"0 0 send": [(2, OK), (3, OK)], "1 0 recv": [(1, OK)]}, events=((1, 0),)),
    "the wider request stays": Case(
        WIRED, (recv(1), Arm(1, 0, False), Arm(1, 0, True), send(2)),
        {"0 0 send": [(2, OK)], "1 0 recv": [(1, OK)]}, events=((1, 0),)),
    "flushed receives are solicited": Case(
        WIRED, (recv(1), recv(2), Arm(1, 0, True), Err(1, 0)), {"1 0 recv": [(1, FLUSH), (2, FLUSH)]},
        events=((1, 0),)),
    "an unsignaled send makes none": Case(
        WIRED, (recv(1), Arm(0, 0, False), send(2, signaled=False), Sync({(1, 0, "recv"): 1}, whole=False),
                Events([]), send(3, op="write", far=Place(8000, 100))),
        {"0 0 send": [(3, OK)], "1 0 recv": [(1, OK)]}, events=((0, 0),)),
    "several queues of one channel": Case(
        World((TWO,), (2, 2), ((0, 0), (0, 0))),
        (recv(1), Arm(0, 0, False), Arm(0, 1, False), Arm(1, 0, False), Arm(1, 1, False), send(2)),
        {"0 0 send": [(2, OK)], "1 0 recv": [(1, OK)]}, events=((0, 0), (1, 1))),

    "a datagram with its header": Case(
        World((UD,)),
        (recv(1, length=GRH + 100), send(2, to=(1, 0)), recv(3, length=GRH), send(4, 0, to=(1, 0))),
        {"0 0 send": [(2, OK), (4, OK)], "1 0 recv": [(1, OK), (3, OK)]}),
    "datagrams from many": Case(
        World((UD, UD)),
        (*(recv(n) for n in (1, 2, 3)), send(4, to=(1, 0)), Sync, send(5, qp=1, to=(1, 0)), Sync,
         send(6, qp=1, side=1, to=(1, 0), op="send_imm", imm=1)),
        {"0 0 send": [(4, OK)], "0 1 send": [(5, OK)], "1 1 send": [(6, OK)],
         "1 0 recv": [(1, OK), (2, OK), (3, OK)]}),
    "a datagram with another key, or for nobody": Case(
        World((UD,)), (send(1, to=(1, 0)), Sync({(0, 0, "send"): 1}, True, False), recv(2),
                       send(3, to=(1, 0), qkey=QKEY + 1), Sync({(0, 0, "send"): 2}, True, False),
                       send(4, to=(1, 0), op="send_imm", imm=6)),
        {"0 0 send": [(1, OK), (3, OK), (4, OK)], "1 0 recv": [(2, OK)]}),
    "unreliable, nobody there": Case(
        World((UC,)),
        (send(1), Sync({(0, 0, "send"): 1}, True, False), recv(2), send(3, op="send_imm", imm=5)),
        {"0 0 send": [(1, OK), (3, OK)], "1 0 recv": [(2, OK)]}),
    "unreliable, refused": Case(
        World((UC,)),
        (send(1, op="write", far=Place(5000, 100, 0, True)), Sync({(0, 0, "send"): 1}, True, False),
         recv(2), send(3)),
        {"0 0 send": [(1, OK), (3, OK)], "1 0 recv": [(2, OK)]}),

    "the receiver is not ready, and is not asked again": Case(
        World((RC._replace(rnr_retry=(0, 7)),)),
        (send(1), send(2, op="write", far=Place(9000, 100)), Sync, recv(3)),
        {"0 0 send": [(1, "RNR_RETRY_EXC_ERR"), (2, FLUSH)]}),
    "the receiver is not ready, asked twice more": Case(
        World((RC._replace(rnr_retry=(2, 7)),)), (send(1), Sync), {"0 0 send": [(1, "RNR_RETRY_EXC_ERR")]}),
    "posted while the queue drains": Case(
        PAIR, (recv(1), recv(2), send(3), Sync, Drain(0, 0), send(4, signaled=False),
               send(5, op="write", far=Place(9000, 100)), Sync, Resume(0, 0)),
        {"0 0 send": [(3, OK), (5, OK)], "1 0 recv": [(1, OK), (2, OK)]}, unless="resumes"),
    "receives while its queue drains": Case(
        PAIR, (recv(1, side=0), Drain(0, 0), send(2, side=1), Sync, Resume(0, 0)),
        {"0 0 recv": [(1, OK)], "1 0 send": [(2, OK)]}),
    "a drained queue is flushed": Case(
        PAIR, (Drain(0, 0), send(1), send(2, signaled=False), Err(0, 0)),
        {"0 0 send": [(1, FLUSH), (2, FLUSH)]}),
    "reset takes what was posted": Case(
        PAIR, (recv(1), send(2, side=1), Sync, Again(0), recv(3), send(4)),
        {"0 0 send": [(4, OK)], "1 0 recv": [(3, OK)]}),
    "a new one in its place": Case(
        PAIR, (recv(1), send(2), Sync, Again(0, True), recv(3), send(4)),
        {"0 0 send": [(2, OK), (4, OK)], "1 0 recv": [(1, OK), (3, OK)]}),
    "resized with completions inside": Case(
        PAIR, (*(recv(n) for n in range(1, 9)), *(send(n) for n in range(11, 19)),
               Sync({(0, 0, "send"): 0}, whole=False), Resize(0, 0, 2000), Resize(1, 0, 2000),
               Resize(1, 0, 100)),
        {"0 0 send": [(n, OK) for n in range(11, 19)], "1 0 recv": [(n, OK) for n in range(1, 9)]}),
    "a write through a window": Case(
        GLAZED, (BIND, Sync, send(2, op="write", far=Place(6000, 100, window=0))),
        {"1 0 send": [(1, OK)], "0 0 send": [(2, OK)]}),
    "a write beside a window": Case(
        GLAZED, (BIND, Sync, send(2, op="write", far=Place(6001, 100, window=0)), Sync),
        {"1 0 send": [(1, OK)], "0 0 send": [(2, "REM_ACCESS_ERR")]}, asyncs=((1, ACCESS, 0),),
        unless="responder_event"),
    "a read through a window for writes": Case(
        GLAZED, (BIND, Sync, Send(0, 0, 2, "read", (Place(9000, 8),), Place(6000, 8, window=0)), Sync),
        {"1 0 send": [(1, OK)], "0 0 send": [(2, "REM_ACCESS_ERR")]}, asyncs=((1, ACCESS, 0),),
        unless="responder_event"),
    "a window is bound once": Case(
        GLAZED, (BIND, BIND, Sync), {"1 0 send": [(1, OK), (1, "MW_BIND_ERR")]}),
    "a message takes a window back": Case(
        GLAZED, (BIND, recv(2), Sync, send(3, op="send_inv", window=0), Sync,
                 send(4, op="write", far=Place(6000, 100, window=0)), Sync),
        {"1 0 send": [(1, OK)], "1 0 recv": [(2, OK)], "0 0 send": [(3, OK), (4, "REM_ACCESS_ERR")]},
        asyncs=((1, ACCESS, 0),), unless="responder_event"),
    "the owner takes a window back, and binds it again": Case(
        GLAZED, (BIND, Sync, Send(1, 0, 2, "local_inv", window=0), BIND, Sync,
                 send(4, op="write", far=Place(6000, 100, window=0))),
        {"1 0 send": [(1, OK), (2, OK), (1, OK)], "0 0 send": [(4, OK)]}),
    "all signaled": Case(
        World((RC._replace(sig_all=(True, False)),)),
        (send(1, op="write", far=Place(9000, 100), signaled=False), recv(3, side=0),
         send(2, side=1, signaled=False), Sync({(0, 0, "recv"): 1}, whole=False)),
        {"0 0 send": [(1, OK)], "0 0 recv": [(3, OK)]}),
}


class Departure(NamedTuple):
    name: str
    field: str          # of More
    seen: str           # where
    world: World
    steps: tuple


REFUSED = send(1, op="write", far=Place(5000, 100, 0, True))
DEPARTURES = (
    Departure("a refused request is no event", "responder_event", RXE, PAIR, (REFUSED,)),
    Departure("the last receive is no event", "last_wqe_event", RXE, POOL, (Err(1, 0),)),
    Departure("a bad completion of a send is not solicited", "send_error_event", RXE, WIRED,
              (Arm(0, 0, True), REFUSED)),
    Departure("a receive does not say which window was taken back", "invalidated_told", RXE, GLAZED,
              (BIND, recv(2), Sync, send(3, op="send_inv", window=0))),
    Departure("what was posted in SQD waits for one more", "resumes", RXE, PAIR,
              (Drain(0, 0), send(1, op="write", far=Place(5000, 100)), Resume(0, 0))),
)


def complete(world, steps, rules, more):
    """A program of `steps` with what is due filled in where it says Sync; at the end all is
    waited for and all events are taken. (A receive's wr_id gets the bit that marks one.)"""
    model, out = Many(world, rules, more), []

    def put(step):
        model.apply(step)
        out.append(step)

    def wait():
        put(Sync({k: len(c) for k, c in model.completed.items()}, model.dropped))
        model.dropped = False

    for step in steps:
        if step is Sync:
            wait()
        elif isinstance(step, Recv):
            put(Recv(step.side, step.to, step.wr_id | 1 << 32, step.places, step.shared))
        else:
            if isinstance(step, Again):
                put(Asyncs(sorted(model.asyncs)))       # a RESET may make them void
            put(step)
    wait()
    put(Events(sorted(model.events)))
    put(Asyncs(sorted(model.asyncs)))
    return out


def find_more(driver, rules):
    """The More of the driver's device. Fails where it does neither what the specification says
    nor what is known."""
    more = More()
    for d in DEPARTURES:
        if d.world.windows != (0, 0) and not driver.windows:
            continue
        # the departure first: it may be that nothing comes, and then the other way takes long
        one = more._replace(**{d.field: False})
        steps = complete(d.world, d.steps, rules, one)
        if not driver.differences(d.world, steps, rules, one, quiet=driver.patience / 100):
            more = one
            continue
        found = driver.differences(d.world, complete(d.world, d.steps, rules, more), rules, more)
        assert not found, f"{d.name}: the device departs in a way that is not known: {found}"
    return more


def outcome(case, rules=Rules(), more=More()):
    """What the model says of a known program, as in its `expected`."""
    model, events, asyncs = Many(case.world, rules, more), [], []
    for step in complete(case.world, case.steps, rules, more):
        if isinstance(step, Events | Asyncs):
            (events if isinstance(step, Events) else asyncs).extend(step.due)
        model.apply(step)
    done = {f"{side} {i} {queue}":
            [(c.wr_id & 0xFFFFFFFF, c.status.name.removeprefix("IBV_WC_")) for c in got]
            for (side, i, queue), got in model.completed.items() if got}
    return done, tuple(events), tuple(asyncs)
