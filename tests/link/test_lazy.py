"""Ranks that connect when they first need each other (ROCECOMM_CONNECT=lazy)."""

import errno
import os
import signal
import threading
import time

import numpy as np
import pytest
from together import together
from worlds import Died

from rocecomm import (
    ANY_SOURCE,
    ClosedError,
    MismatchError,
    PeerDeadError,
    RocecommError,
    TimeoutError,
    VerbsError,
    verbs,
)
from rocecomm.verbs import soft


def inject(kind, **options):
    """The fault, or a skip where the device says that it has no such thing."""
    try:
        return soft.inject(kind, **options)
    except VerbsError as error:
        if error.errno == errno.EOPNOTSUPP:
            pytest.skip(f"the device cannot inject faults: {error}")
        raise


LAZY = {"ROCECOMM_CONNECT": "lazy"}


def connections(comm):
    return comm.counters["connections"]


def turn(comms, *requests, until=None, seconds=20.0):
    """Lets all ranks of this process move traffic until the requests have ended and `until()` holds."""
    end = time.monotonic() + seconds
    while not (all(request.test() for request in requests) and (until is None or until())):
        for comm in comms:
            comm.progress()
        assert time.monotonic() < end, "nothing happens any more"


# ------------------------------------------------------------------------ first contact

def test_only_those_who_talk_are_connected(device):
    with together(4, device, connect="lazy") as comms:
        a, b, c, d = comms
        assert [connections(comm) for comm in comms] == [0, 0, 0, 0]
        for here, there in ((a, b), (b, a)):                # the second one over the same queue pairs
            got = np.zeros(3)
            receive = there.irecv(got, here.rank)
            send = here.isend(np.arange(3.0), there.rank)
            turn(comms, receive, send)
            assert (got == np.arange(3)).all()
        assert [connections(comm) for comm in comms] == [1, 1, 0, 0]
        # a receive from anybody connects nobody: whoever sends does
        got = np.zeros(1 << 16)
        receive = d.irecv(got, ANY_SOURCE)
        for comm in comms:
            comm.progress()
        assert connections(d) == 0
        send = c.isend(np.ones(1 << 16), 3)
        turn(comms, receive, send)
        assert (got == 1).all() and receive.source == 2
        assert [connections(comm) for comm in comms] == [1, 1, 1, 1]


def test_who_computes_is_connected_when_it_calls(device):
    with together(2, device, connect="lazy") as (a, b):
        sends = [a.isend(np.full(4, i, "i4"), 1) for i in range(3)]
        for _ in range(100):
            a.progress()
        assert not any(send.test() for send in sends)
        receives = [b.irecv(np.zeros(4, "i4"), 0) for _ in range(3)]
        turn((a, b), *sends, *receives)


def everybody_at_once(comm):
    """All ranks begin to talk to all others at the same moment, with messages of both kinds."""
    size, rank = comm.size, comm.rank
    requests, got = [], {}
    for other in range(size):
        for tag, n in enumerate((1, 3000, 100_000)):
            got[other, tag] = np.zeros(n, "i4")
            requests.append(comm.irecv(got[other, tag], other, tag))
            requests.append(comm.isend(np.full(n, 100 * rank + tag, "i4"), other, tag))
    comm.wait_all(requests)
    for (other, tag), values in got.items():
        assert (values == 100 * other + tag).all()
    assert connections(comm) == size - 1
    comm.barrier()
    assert comm.all_reduce(np.ones(5)).tolist() == [size] * 5


def test_simultaneous_connects_settle_on_one_connection(soft_world):
    soft_world(5, everybody_at_once, env=LAZY)


def test_simultaneous_connects_of_three(device):
    with together(3, device, connect="lazy") as comms:
        requests, got = [], {}
        for comm in comms:
            for other in {0, 1, 2} - {comm.rank}:
                got[comm.rank, other] = np.zeros(20_000, "i4")
                requests.append(comm.isend(np.full(20_000, comm.rank, "i4"), other))
                requests.append(comm.irecv(got[comm.rank, other], other))
        turn(comms, *requests)
        assert all((values == other).all() for (_, other), values in got.items())
        assert [connections(comm) for comm in comms] == [2, 2, 2]


def test_the_first_contact_may_be_one_sided(device):
    with together(3, device, connect="lazy") as comms:
        a, b, c = comms
        memory = np.zeros(4, "u8")
        with a.register(memory) as region:
            remote = c.open(region.descriptor())
            first = c.ifetch_add(remote, 0, 5)
            turn(comms, first, c.iwrite(np.arange(1, 5, dtype="u8"), remote, notify=7))
            assert first.wait() == 0 and memory.tolist() == [1, 2, 3, 4]
            assert a.wait_notify(ANY_SOURCE, with_source=True) == [(2, 7)]
            assert [connections(comm) for comm in comms] == [1, 0, 1]
            got = bytearray(3)
            turn(comms, a.isend(b"abc", 2), c.irecv(got, 0))
            assert got == b"abc"


def asleep(comm, gate):
    if comm.rank == 0:
        comm.send(np.arange(4), 1)
        open(gate, "w").close()
    else:
        wait_for_file(gate)
        got = np.zeros(4, np.int64)
        comm.recv(got, 0)
        assert got.tolist() == [0, 1, 2, 3]


def wait_for_file(gate, seconds=40):
    end = time.monotonic() + seconds
    while not os.path.exists(gate):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_progress_thread_answers(soft_world, tmp_path):
    soft_world(2, asleep, str(tmp_path / "gate"), env={**LAZY, "ROCECOMM_PROGRESS": "thread"})


# ---------------------------------------------------------------------------- datagrams

@pytest.mark.parametrize("lost", [1, 4])
def test_lost_datagrams_are_sent_again(device, lost):
    with together(2, device, connect="lazy") as comms:
        a, b = comms
        with inject("drop", op="send", times=lost, qp=a._engine.datagrams()["qp"]) as fault:
            got = np.zeros(5)
            receive = b.irecv(got, 0)
            send = a.isend(np.ones(5), 1)
            turn(comms, receive, send)
        assert (got == 1).all() and fault.hit == lost
        assert a._engine.datagrams()["sent"] > lost


def test_a_lost_confirmation_does_not_matter(device):
    # the third datagram tells rank 1 that its answer has come; the message behind it tells it as well
    with together(2, device, connect="lazy") as comms:
        a, b = comms
        a_send = a.isend(np.ones(5), 1)
        a.progress()
        b.progress()
        with inject("drop", op="send", times=1, qp=a._engine.datagrams()["qp"]) as fault:
            got = np.zeros(5)
            receive = b.irecv(got, 0)
            turn(comms, receive, a_send)
            assert fault.hit == 1
        back = np.zeros(2)
        receive = a.irecv(back, 1)
        send = b.isend(np.ones(2), 0)
        turn(comms, receive, send)


def test_strangers_datagrams_are_refused(device):
    with together(2, device, connect="lazy") as comms:
        a, b = comms
        calls = a._engine.datagrams()
        gid = a._engine.describe()[1]
        qkey = calls["qp"].query().qkey
        with verbs.open_device(device) as ctx:
            pd, cq = verbs.PD(ctx), verbs.CQ(ctx, 64)
            qp = verbs.QP(pd, cq, qp_type=verbs.IBV_QPT_UD, max_send_wr=32)
            qp.to_init(qkey=qkey)
            qp.to_rtr()
            qp.to_rts()
            ah = verbs.AH(pd, verbs.AHAttr(dgid=gid.gid, sgid_index=gid.gid_index, hop_limit=64))
            data = np.zeros(512, "u1")
            mr = verbs.MR(pd, data)
            forged = np.zeros(256, "u1")
            forged[:4] = (0x43, 0x43, 2, 1)                 # magic, version, "these are my queue pairs"
            forged[4] = 3
            forged[8] = 1                                   # of rank 1 to rank 0
            forged[16:24] = np.frombuffer(b._engine.datagrams()["instance"].to_bytes(8, "little"), "u1")
            forged[24:32] = np.frombuffer(calls["instance"].to_bytes(8, "little"), "u1")
            rows = [bytes(forged), bytes(forged[:255]), b"", bytes(forged) + b"x", bytes([1] * 256)]
            for i, row in enumerate(rows):
                data[:len(row)] = np.frombuffer(row, "u1")
                qp.post_send(verbs.IBV_WR_SEND, verbs.SGE(mr.addr, len(row), mr.lkey), wr_id=i, ah=ah,
                             remote_qpn=calls["qp"].qp_num, remote_qkey=qkey)
                end = time.monotonic() + 10
                while not cq.poll(1):
                    assert time.monotonic() < end
            turn(comms, until=lambda: a._engine.datagrams()["refused"] == len(rows))
        assert connections(a) == 0
        got = np.zeros(3)
        receive = a.irecv(got, 1)
        send = b.isend(np.ones(3), 0)
        turn(comms, receive, send)


# --------------------------------------------------------------- who is not there any more

def dies_first(comm, what):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerDeadError, match="rank 1") as caught:
        if what == "recv":
            comm.recv(bytearray(3), 1)
        elif what == "send":
            comm.send(np.zeros(1 << 20), 1)
        elif what == "all_reduce":
            comm.all_reduce(np.zeros(10))
        elif what == "probe":
            comm.probe(1)
        else:
            comm.wait_notify(1)
    took = time.monotonic() - start
    assert caught.value.peer == 1
    with pytest.raises(PeerDeadError, match="rank 1"):      # at once
        comm.send(b"x", 1)
    # the others are there
    got = bytearray(1)
    other = 2 - comm.rank
    comm.sendrecv(b"y", other, got, other)
    assert got == b"y"
    return took


def test_a_rank_that_dies_before_the_first_contact(world, scale):
    took = world(3, dies_first, "recv", env=LAZY, mortal=[1])
    assert took[1] == Died(signal.SIGKILL)
    assert max(took[0], took[2]) < 5 * scale.time


@pytest.mark.parametrize("what", ["send", "all_reduce", "probe", "notify"])
def test_a_rank_that_dies_before_it_is_needed(soft_world, scale, what):
    took = soft_world(3, dies_first, what, env=LAZY, mortal=[1])
    assert took[1] == Died(signal.SIGKILL)
    assert max(took[0], took[2]) < 5 * scale.time


def leaves_first(comm):
    if comm.rank == 1:
        comm.close()
        return
    for call in (lambda: comm.recv(bytearray(3), 1), lambda: comm.send(b"abc", 1),
                 lambda: comm.isend(np.zeros(1 << 20), 1).wait(), lambda: comm.probe(1)):
        with pytest.raises(PeerDeadError, match="rank 1 has closed its communicator"):
            call()
    got = bytearray(1)
    other = 2 - comm.rank
    comm.sendrecv(b"y", other, got, other)
    return connections(comm)


def test_a_rank_that_left_before_the_first_contact(world):
    world(3, leaves_first, env=LAZY)


def test_all_that_could_send_have_left(soft_world):
    soft_world(3, nobody_left, env=LAZY)


def test_a_device_that_refuses_the_queue_pairs():
    with together(3, "soft0", connect="lazy") as (a, b, c):
        with inject("refuse", verb="create_qp", errno="ENOMEM", times=1) as fault:
            with pytest.raises(VerbsError, match="rank 1 could not be connected") as caught:
                a.send(b"abc", 1)
            assert fault.hit == 1 and caught.value.errno == errno.ENOMEM
        receive = b.irecv(bytearray(3), 0)          # the other side learns it when it calls
        turn((a, b, c), until=lambda: receive.done)
        assert isinstance(receive.error, PeerDeadError) and "of its own" in str(receive.error)
        got = bytearray(3)                          # the third rank is not affected
        receives = [c.irecv(bytearray(3), 0, tag=1), c.irecv(got, 1, tag=2)]
        turn((a, b, c), *receives, a.isend(b"abc", 2, tag=1), b.isend(b"def", 2, tag=2))
        assert got == b"def"


def nobody_left(comm):
    if comm.rank:
        return
    with pytest.raises(PeerDeadError):
        comm.recv(bytearray(3), ANY_SOURCE)
    with pytest.raises(PeerDeadError):
        comm.wait_notify(ANY_SOURCE)


def test_close_while_connecting(device):
    # with a message that waits for its connection: close() delivers it
    with together(2, device, connect="lazy") as (a, b):
        got = np.zeros(3)
        receive = b.irecv(got, 0)
        send = a.isend(np.ones(3), 1)
        closing = threading.Thread(target=a.close)
        closing.start()
        receive.wait(20)
        closing.join(20)
        assert not closing.is_alive() and (got == 1).all()
        send.wait()
    # without: at once, and the other side is told
    with together(2, device, connect="lazy") as (a, b):
        receive = a.irecv(np.zeros(3), 1)
        a.progress()
        start = time.monotonic()
        a.close()
        assert time.monotonic() - start < 3
        with pytest.raises(ClosedError):
            receive.wait()
        with pytest.raises(PeerDeadError, match="rank 0 has closed"):
            b.send(np.ones(3), 0)


def never_calls(comm, gate):
    if comm.rank:
        wait_for_file(gate)
        comm.send(b"abc", 0)
        return
    with pytest.raises(TimeoutError, match="the connection to it was never made") as caught:
        comm.recv(bytearray(3), 1, timeout=0.3)
    assert caught.value.peer == 1 and caught.value.peer_state == "busy"
    open(gate, "w").close()
    got = bytearray(3)
    comm.recv(got, 1)                                   # it goes on where it stood
    assert got == b"abc"


def test_a_timeout_says_that_there_was_no_connection(soft_world, tmp_path):
    soft_world(2, never_calls, str(tmp_path / "gate"), env=LAZY)


def disagrees(comm):
    with pytest.raises(MismatchError):
        comm.all_reduce(np.zeros(10, "f4" if comm.rank == 1 else "f8"))
    try:
        comm.close()
    except RocecommError:
        pass


def test_a_failed_collective_reaches_ranks_that_connect_later(soft_world):
    soft_world(5, disagrees, env=LAZY)


# -------------------------------------------------------------------------------- many

def neighbours(comm):
    size, rank = comm.size, comm.rank
    got = np.zeros(1000)
    comm.sendrecv(np.full(1000, float(rank)), (rank + 1) % size, got, (rank - 1) % size)
    assert (got == (rank - 1) % size).all()
    return connections(comm)


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_many_ranks_that_talk_to_few_make_few_connections(soft_world):
    assert soft_world(72, neighbours, timeout=240) == [2] * 72
