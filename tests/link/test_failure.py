"""What ranks see when another one dies, stops, computes or leaves (cases F3, F4, F10, C11)."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from worlds import Died

from rocecomm import ClosedError, PeerDeadError, RocecommError, TimeoutError


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# --------------------------------------------------------------------------------- death

def wait_in(comm, what):
    """Blocks on rank 1, which dies; returns how long that took to be noticed."""
    data = np.zeros(1 << 20, "u1")
    if comm.rank == 1:
        time.sleep(0.7)
        die()
    start = time.monotonic()
    with pytest.raises(PeerDeadError, match="rank 1") as caught:
        if what == "recv":
            comm.recv(data, 1)
        elif what == "recv forever":
            comm.recv(data, 1, timeout=None)
        elif what == "send":
            comm.send(data, 1)
        elif what == "wait":
            comm.irecv(data, 1).wait()
        elif what == "any":
            comm.wait_any([comm.irecv(data, 1), comm.irecv(data, 1, tag=2)])
            comm.irecv(data, 1).wait(0)
        elif what == "sendrecv":
            comm.sendrecv(data, 1, data.copy(), 1)
    took = time.monotonic() - start
    assert caught.value.peer == 1
    first = str(caught.value).partition(":")[2]
    for call in (comm.send, comm.recv):                 # at once, with the first cause
        start = time.monotonic()
        with pytest.raises(PeerDeadError) as again:
            call(data, 1)
        assert time.monotonic() - start < 0.2
        assert str(again.value).partition(":")[2] == first
    start = time.monotonic()
    comm.close()
    assert time.monotonic() - start < 5
    return took


@pytest.mark.parametrize("what", ["recv", "recv forever", "send", "wait", "any", "sendrecv"])
def test_a_dead_peer_is_found_in_every_wait(world, scale, what):
    result = world(2, wait_in, what, mortal=[1])
    assert result[1] == Died(signal.SIGKILL)
    assert result[0] < 0.7 + 5 * scale.time


def hundred_requests(comm, n):
    if comm.rank == 1:
        time.sleep(0.5)
        die()
    receives = [comm.irecv(np.zeros(30000), 1, tag=i) for i in range(n)]
    sends = [comm.isend(np.zeros(30000), 1, tag=i) for i in range(n)]
    start = time.monotonic()
    causes = set()
    for request in receives + sends:
        with pytest.raises(PeerDeadError) as caught:
            request.wait()
        causes.add(str(caught.value).partition(":")[2])
        assert request.done and request.error is not None
    assert time.monotonic() - start < 6
    assert len(causes) == 1
    return True


def test_nothing_stays_pending_when_the_peer_dies(world):      # F4 a
    assert world(2, hundred_requests, 50, mortal=[1])[0]


def others_go_on(comm):
    if comm.rank == 1:
        die()
    with pytest.raises(PeerDeadError):
        comm.recv(np.zeros(1), 1)
    other = 2 - comm.rank
    got = np.zeros(30000)
    for _ in range(10):
        assert comm.sendrecv(np.full(30000, comm.rank, "f8"), other, got, other) == 240000
    assert (got == other).all()
    return True


def test_the_living_go_on(world):
    assert world(3, others_go_on, mortal=[1])[::2] == [True, True]


def any_of_the_living(comm):
    from rocecomm import ANY_SOURCE
    if comm.rank:
        if comm.rank == 2:
            time.sleep(0.5)
        die()
    with pytest.raises(PeerDeadError):
        comm.recv(np.zeros(1), ANY_SOURCE)
    return True


def test_any_source_ends_when_nobody_is_left(world):
    assert world(3, any_of_the_living, mortal=[1, 2])[0]


def told_of_a_death(comm, kind):
    """Rank 0 waits for any source, before rank 1 dies or (rank 2 says when) after it."""
    from rocecomm import ANY_SOURCE
    if comm.rank == 1:
        comm.recv(bytearray(1), 0)
        die()
    if comm.rank == 2:
        if kind == "later":
            with pytest.raises(PeerDeadError):
                comm.recv(bytearray(1), 1)
            comm.send(b"2", 0)
        comm.recv(bytearray(1), 0)
        comm.send(b"2", 0, tag=5)
        return True
    waits = {"recv": lambda: comm.recv(bytearray(1), ANY_SOURCE, tag=5),
             "irecv": lambda: comm.irecv(bytearray(1), ANY_SOURCE, tag=5).wait(),
             "probe": lambda: comm.probe(ANY_SOURCE, tag=5),
             "notify": lambda: comm.wait_notify(ANY_SOURCE),
             "later": lambda: comm.recv(bytearray(1), ANY_SOURCE, tag=5)}
    comm.send(b"x", 1)
    if kind == "later":
        comm.recv(bytearray(1), 2)
    name = {"later": "recv", "notify": "wait_notify"}.get(kind, kind)
    with pytest.raises(PeerDeadError, match=f"{name} from any rank: rank 1 .*; the next call waits for the "
                       "other ranks") as caught:
        waits[kind]()
    assert caught.value.peer == 1
    comm.send(b"g", 2)
    got = bytearray(1)
    assert comm.recv(got, ANY_SOURCE, tag=5) == 1 and got == b"2"      # told once
    return True


@pytest.mark.parametrize("kind", ["recv", "irecv", "probe", "notify", "later"])
def test_waits_for_any_source_are_told_of_a_death_once(soft_world, kind):
    """F3: recv, probe and wait_notify from anybody; after it they go on with the living."""
    assert soft_world(3, told_of_a_death, kind, mortal=[1], timeout=60)[::2] == [True, True]


def nobody_left(comm, dies):
    from rocecomm import ANY_SOURCE
    if comm.rank == 1:
        comm.recv(bytearray(1), 0)
        return die() if dies else True
    comm.send(b"x", 1)
    with pytest.raises(PeerDeadError):
        comm.recv(bytearray(1), 1)
    for call in (lambda: comm.recv(bytearray(1), ANY_SOURCE), lambda: comm.probe(ANY_SOURCE),
                 lambda: comm.irecv(bytearray(1), ANY_SOURCE).wait(), lambda: comm.iprobe(ANY_SOURCE),
                 lambda: comm.wait_notify(ANY_SOURCE), lambda: comm.iprobe(1), lambda: comm.probe(1)):
        with pytest.raises(PeerDeadError, match="rank 1 ") as caught:
            call()
        assert caught.value.peer == 1
    return True


@pytest.mark.parametrize("dies", [True, False])
def test_nobody_is_waited_for_when_all_have_gone(soft_world, dies):
    """F3, F4: calls that begin after the others died or closed fail at once, not at their timeout."""
    assert soft_world(2, nobody_left, dies, mortal=[1] if dies else [], timeout=60)[0]


def polls(comm, kind):
    if comm.rank == 1:
        comm.recv(bytearray(1), 0)
        die()
    comm.send(b"x", 1)
    start = time.monotonic()
    request = None if kind == "iprobe" else comm.irecv(bytearray(1), 1)
    with pytest.raises(PeerDeadError, match="rank 1 "):
        while time.monotonic() < start + 40:
            if kind == "iprobe":
                assert comm.iprobe(1) is None
            elif kind == "test":
                if request.test():
                    request.wait()
            elif comm.progress() >= 0 and request.done:
                request.wait()
            time.sleep(0.01)
    return time.monotonic() - start


@pytest.mark.parametrize("kind", ["iprobe", "test", "progress"])
def test_a_program_that_polls_finds_a_dead_peer(world, scale, kind):
    """F3: nothing waits, so whoever only looks now and then has to ask whether the peer lives."""
    assert world(2, polls, kind, mortal=[1])[0] < 0.7 + 5 * scale.time


# ----------------------------------------------------------------------- closed by itself

def leaves(comm):
    if comm.rank == 0:
        comm.send(np.full(1 << 20, 3, "u1"), 1)
        comm.send(b"tail", 1)
        comm.close()
    else:
        time.sleep(1)
        big, tail = np.zeros(1 << 20, "u1"), bytearray(4)
        comm.recv(big, 0)
        comm.recv(tail, 0)
        assert (big == 3).all() and tail == b"tail"
        for call in (comm.recv, comm.send):
            with pytest.raises(PeerDeadError, match="closed its communicator"):
                call(tail, 0)


def test_what_was_sent_arrives_although_the_sender_left(world):       # C11
    world(2, leaves)


def leaves_a_waiter(comm):
    if comm.rank == 0:
        time.sleep(0.5)
        return 0
    start = time.monotonic()
    with pytest.raises(PeerDeadError, match="rank 0 has closed"):
        comm.recv(np.zeros(4), 0)
    with pytest.raises(PeerDeadError, match="rank 0 has closed"):
        comm.send(np.zeros(1 << 20), 0)
    return time.monotonic() - start


def test_a_waiter_learns_that_the_peer_left(world, scale):
    assert world(2, leaves_a_waiter)[1] < 3 * scale.time


def closed_by_a_thread(comm, n):                               # F4 c, H8
    if comm.rank == 1:
        time.sleep(1.5)
        return True
    receives = [comm.irecv(np.zeros(30000), 1, tag=i) for i in range(n)]
    sends = [comm.isend(np.zeros(30000), 1, tag=i) for i in range(n)]
    seen = []

    def waits():
        try:
            comm.recv(np.zeros(1), 1, tag=99)
        except BaseException as error:
            seen.append(error)
    threads = [threading.Thread(target=waits) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    comm.close()
    assert time.monotonic() - start < 5.5
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert [type(e) for e in seen] == [ClosedError] * 3, seen
    for request in receives + sends:
        with pytest.raises((ClosedError, PeerDeadError)):
            request.wait()
        assert request.test()
    for call in (comm.send, comm.recv, comm.isend):
        with pytest.raises(ClosedError):
            call(np.zeros(1), 1)
    comm.close()
    return True


def test_close_ends_everything(world):
    assert world(2, closed_by_a_thread, 50, timeout=30)[0]


# -------------------------------------------------------------------------------- timeouts

def timeouts(comm):
    data = np.zeros(4)
    if comm.rank == 1:
        time.sleep(3.2)
        word = bytearray(2)
        assert comm.recv(word, 0) == 2 and word == b"go"
        return None
    took = []
    for seconds in (0, 0.5):
        start = time.monotonic()
        with pytest.raises(TimeoutError) as caught:
            comm.recv(data, 1, timeout=seconds)
        took.append(time.monotonic() - start)
        assert caught.value.peer == 1
    assert caught.value.peer_state == "busy" and "not in a rocecomm call" in str(caught.value)
    pending = comm.irecv(data, 1, tag=8)
    with pytest.raises(TimeoutError):
        pending.wait(0.1)
    assert not pending.done and pending.cancel()
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="rank 1"):
        comm.send(np.zeros(1 << 20), 1, timeout=0.5)
    took.append(time.monotonic() - start)
    comm.send(b"go", 1)
    return took


def test_timeouts_mean_what_they_say(world, scale):            # F10
    poll, half, send = world(2, timeouts)[0]
    assert poll < 0.1 * scale.time
    assert 0.5 <= half < 1.5 * scale.time
    assert 0.5 <= send < 2.5 * scale.time


def timed_out_receive_is_withdrawn(comm):
    if comm.rank == 0:
        late = np.full(4, -1.0)
        with pytest.raises(TimeoutError):
            comm.recv(late, 1, timeout=0.2)
        comm.send(b"x", 1)
        got = np.zeros(4)
        comm.recv(got, 1)
        assert (got == 5).all() and (late == -1).all()
    else:
        comm.recv(bytearray(1), 0)
        comm.send(np.full(4, 5.0), 0)


def test_a_timed_out_receive_takes_nothing(world):
    world(2, timed_out_receive_is_withdrawn)


def stopped_peer(comm, pids):
    data = np.zeros(4)
    if comm.rank == 1:
        comm.send(np.int64([os.getpid()]), 0)
        comm.recv(data, 0)                      # stopped in here
        return (data == 7).all()
    pid = np.zeros(1, "i8")
    comm.recv(pid, 1)
    time.sleep(0.3)
    os.kill(int(pid[0]), signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError) as caught:
            comm.recv(data, 1, timeout=2)
        assert caught.value.peer_state == "stopped" and "SIGSTOP" in str(caught.value)
        with pytest.raises(TimeoutError):
            comm.send(np.zeros(1 << 20), 1, timeout=0.5)
    finally:
        os.kill(int(pid[0]), signal.SIGCONT)
    comm.send(np.full(4, 7.0), 1)
    return True


def test_a_stopped_peer_is_not_taken_for_dead(world):
    assert all(world(2, stopped_peer, None))


def computing_peer(comm, seconds):
    data = np.zeros(4)
    if comm.rank == 1:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
        comm.send(np.full(4, 7.0), 0)
        return True
    comm.recv(data, 1, timeout=None)
    return bool((data == 7).all())


def test_a_computing_peer_is_not_taken_for_dead(world, scale):
    assert all(world(2, computing_peer, 6.5))


# ------------------------------------------------------------------- disagreeing collectives

def disagree(comm):
    engine, other = comm._engine, 1 - comm.rank
    a, b = np.full(100, comm.rank, "f4"), np.zeros(100, "f4")
    for _ in range(70):                         # more than signatures are remembered
        sig = engine.coll_begin("all_reduce", "float32", 100, "sum")
        engine.wait_all([engine.coll_isend(sig, a, other), engine.coll_irecv(sig, b, other)])
        assert (b == other).all()
    with pytest.raises(RocecommError) as caught:
        if comm.rank == 0:
            sig = engine.coll_begin("broadcast", "float32", 100, root=0)
            engine.wait_all([engine.coll_isend(sig, a, other)])     # rightly returns
            sig = engine.coll_begin("barrier", 0, 0)
            engine.wait_all([engine.coll_irecv(sig, b, other)])
        else:
            sig = engine.coll_begin("all_reduce", "float32", 100, "sum")
            engine.wait_all([engine.coll_isend(sig, a, other), engine.coll_irecv(sig, b, other)])
    assert type(caught.value).__name__ == "MismatchError"
    assert "broadcast #71" in str(caught.value) and "all_reduce #71" in str(caught.value)
    with pytest.raises(RocecommError, match="#71"):
        engine.coll_begin("barrier", 0, 0)
    comm.sendrecv(a, other, b, other)           # point to point goes on
    assert (b == other).all()


def test_ranks_that_disagree_all_learn_it(world):
    world(2, disagree)


def told_by_abort(comm):
    engine = comm._engine
    sig = engine.coll_begin("all_gather", "uint8", 8)
    if comm.rank == 0:
        time.sleep(0.2)
        engine.abort(sig, "rank 0 could not go on: \u00e4")
    else:
        with pytest.raises(RocecommError, match="could not go on: \u00e4"):
            engine.wait_all([engine.coll_irecv(sig, np.zeros(8, "u1"), (comm.rank + 1) % comm.size)])
    with pytest.raises(RocecommError, match="barrier: .*could not go on") as caught:
        engine.coll_begin("barrier", 0, 0)
    assert type(caught.value) is RocecommError


def test_an_abort_reaches_everybody(world):
    world(4, told_by_abort)


def not_a_neighbour_of_the_dead(comm):
    engine = comm._engine
    sig = engine.coll_begin("all_reduce", "uint8", 8, "sum")
    if comm.rank == 3:
        time.sleep(0.3)
        die()
    # a chain: only rank 2 waits for the dead one
    with pytest.raises(PeerDeadError, match="rank 3"):
        engine.wait_all([engine.coll_irecv(sig, np.zeros(8, "u1"), comm.rank + 1)])
    return True


def test_ranks_that_do_not_wait_for_the_dead_one_learn_it(world):
    assert world(4, not_a_neighbour_of_the_dead, mortal=[3])[:3] == [True] * 3
