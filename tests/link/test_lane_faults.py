"""Every completion status on a lane: which requests end, and which go on (H7).

On soft0 alone, which takes faults on request."""

import time

import numpy as np
import pytest
from together import close, start

from rocecomm import CompletionError, PeerDeadError
from rocecomm.enums import WCStatus
from rocecomm.verbs import soft

ALONE = ("REM_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_OP_ERR", "LOC_PROT_ERR", "LOC_LEN_ERR",
         "LOC_ACCESS_ERR", "LOC_QP_OP_ERR")


def settle(comms, requests):
    end = time.monotonic() + 20
    while not all(request.done for request in requests):
        for comm in comms:
            comm.progress()
        assert time.monotonic() < end, [*requests, comms[0]._engine.peers()]


def chain(a, b, remote, page, status):
    """A chain of requests, the first of which ends with `status`: its outcome, and theirs."""
    late = b.register(np.zeros(64, "u1"))
    gone = a.open(late.descriptor())
    late.close()
    lost = a.iwrite(b"x", gone)                 # the lane waits for b's answer, the next ones for it
    requests = [a.iwrite(np.full(512, 3, "u1"), remote, 512), a.ifetch_add(remote, 0, 1),
                a.iwrite(b"", remote, notify=status), a.iwrite(np.full(512, 4, "u1"), remote, 1024),
                a.icompare_swap(remote, 8, 0, 7), a.iread(np.zeros(512, "u1"), remote, 1024)]
    lane = a._engine.peers()[1]["lane_qp"]      # heartbeats are writes, too
    with soft.inject(status, op="rdma_write", times=1, qp=lane) as fault:
        settle((a, b), [lost, *requests])
        assert fault.hit == 1
    assert isinstance(lost.error, CompletionError)
    return requests


@pytest.mark.parametrize("name", ALONE)
def test_a_status_that_fails_one_request(name):
    status = WCStatus["IBV_WC_" + name]
    comms = start(2, "soft0")
    a, b = comms
    page = np.zeros(4096, "u1")
    try:
        with b.register(page) as region:
            remote = a.open(region.descriptor())
            first, add, note, plain, swapped, read = chain(a, b, remote, page, status)
            assert isinstance(first.error, CompletionError) and first.error.status == status
            assert first.error.peer == 1 and "rank 1" in str(first.error)
            assert "512 bytes" in str(first.error) and status.name in str(first.error)
            assert plain.error is None and read.error is None and (page[1024:1536] == 4).all()
            counters = page[:16].view("u8").tolist()
            if name.startswith("LOC"):          # they may have been on their way
                for request in (add, note, swapped):
                    assert "may or may not" in str(request.error) and request.error.peer == 1
            else:                               # the peer answered: nothing behind it was carried out
                assert [add.wait(), swapped.wait(), note.wait()] == [0, 0, 0] and counters == [1, 7]
                assert b.wait_notify(0) == [status]
            again = [a.ifetch_add(remote, 16, 1), a.iwrite(b"", remote, notify=5)]
            settle((a, b), again)
            assert again[0].wait() == 0 and b.wait_notify(0) == [5]
            assert a._engine.counters()["lane_repairs"] == 2
            peer = a._engine.peers()[1]
            assert peer["fences"] == 0 and peer["lane"][1] == peer["lane"][2]
    finally:
        close(comms)


@pytest.mark.parametrize("name", ["RETRY_EXC_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR"])
def test_a_status_that_breaks_the_connection(name):
    status = WCStatus["IBV_WC_" + name]
    comms = start(3, "soft0", dead_after=1)
    a, b, c = comms
    page = np.zeros(4096, "u1")
    try:
        region, other = b.register(page), c.register(page)
        requests = chain(a, b, a.open(region.descriptor()), page, status)
        kind = PeerDeadError if name in ("RETRY_EXC_ERR", "RESP_TIMEOUT_ERR") else CompletionError
        for request in requests:
            assert type(request.error) is kind and status.name in str(request.error)
            assert "write into its region of 512 bytes" in str(request.error)
        with pytest.raises(kind, match=status.name):
            a.send(b"x", 1)
        assert a.write(b"hello", other.descriptor()) == 5 and bytes(page[:5]) == b"hello"
    finally:
        close(comms)


def test_messages_wait_for_a_write_that_has_to_be_posted_again():        # D5
    comms = start(2, "soft0")
    a, b = comms
    page, small, large = np.zeros(512, "u1"), np.zeros(1), np.zeros(20000)
    try:
        with b.register(page) as region:
            remote = a.open(region.descriptor())
            late = b.register(np.zeros(8, "u1"))
            gone = a.open(late.descriptor())
            late.close()
            lost = a.iwrite(b"x", gone)             # now the lane waits for b
            write = a.iwrite(np.full(512, 9, "u1"), remote)
            sends = [a.isend(np.full(20000, 2.0), 1, tag=2), a.isend(np.full(1, 1.0), 1, tag=1)]
            receives = [b.irecv(small, 0, tag=1), b.irecv(large, 0, tag=2)]
            for _ in range(50):
                b.progress()                        # a message that had overtaken would arrive
            assert not any(request.done for request in [write, *sends, *receives]) and not page.any()
            assert a._engine.peers()[1]["fences"] == 1
            settle(comms, [lost, write, *sends, *receives])
            assert (page == 9).all() and small[0] == 1 and (large == 2).all()
    finally:
        close(comms)
