"""Lanes: order with messages, requests that fail alone, death and close (D4, D5, F4)."""

import asyncio
import hmac
import os
import signal
import threading
import time

import numpy as np
import pytest
from regions import swap
from worlds import Died, run_world

from rocecomm import ANY_SOURCE, ClosedError, CompletionError, PeerDeadError, RocecommError, TimeoutError
from rocecomm.enums import WCStatus

# ----------------------------------------------------------------------------------- D5


def write_then_send(comm, size, rounds):
    page = np.zeros(size, "u1")
    remote = swap(comm, comm.register(page))
    word = np.zeros(1, "i8")
    if comm.rank == 0:
        block = np.zeros((2, size), "u1")
        requests = []
        for k in range(1, rounds + 1):
            if k > 2:
                requests[k - 3].wait()
            block[k & 1] = k & 255
            requests.append(comm.iwrite(block[k & 1], remote))
            word[0] = k
            if k % 3:
                comm.send(word, 1)
            else:
                comm.isend(word, 1).wait()
            comm.recv(word, 1)
        comm.wait_all(requests)
    else:
        for k in range(1, rounds + 1):
            comm.recv(word, 0)
            assert word[0] == k and (page == k & 255).all(), f"old bytes in round {k}"
            comm.send(word, 0)


def test_a_message_comes_after_the_writes_before_it(world, scale):      # D5
    world(2, write_then_send, min(scale.bytes, 4 << 20), scale.rounds(500, 12))


def write_then_pipe(comm, size, rounds, path):
    page = np.zeros(size, "u1")
    remote = swap(comm, comm.register(page))
    if comm.rank == 0:
        with open(f"{path}-0", "wb", buffering=0) as out, open(f"{path}-1", "rb", buffering=0) as back:
            for k in range(1, rounds + 1):
                block = np.full(size, k & 255, "u1")
                comm.write(block, remote)
                out.write(b"%08d" % k)
                assert back.read(1) == b"k"
    else:
        with open(f"{path}-0", "rb", buffering=0) as notice, open(f"{path}-1", "wb", buffering=0) as ok:
            for k in range(1, rounds + 1):
                assert int(notice.read(8)) == k
                assert (page == k & 255).all(), f"old bytes in round {k}"
                ok.write(b"k")
    comm.barrier()


def test_a_write_is_there_when_it_has_returned(world, scale, tmp_path):     # D5, by another channel
    os.mkfifo(tmp_path / "pipe-0")
    os.mkfifo(tmp_path / "pipe-1")
    world(2, write_then_pipe, min(scale.bytes, 4 << 20), scale.rounds(300, 10), tmp_path / "pipe")


def fences(comm, rounds):
    """Small, large and awaited messages keep behind writes and atomics, and in their order."""
    cells = np.zeros(8, "u8")
    remote = swap(comm, comm.register(cells))
    big = np.zeros(20000, "u1")
    word = np.zeros(1, "u8")
    for k in range(rounds):
        if comm.rank == 0:
            comm.iwrite(np.full(1, k + 1, "u8"), remote)
            comm.ifetch_add(remote, 8, 1)
            comm.isend(np.full(1, 3 * k, "u8"), 1)
            comm.isend(np.full(20000, k & 255, "u1"), 1, tag=5)
            comm.ifetch_add(remote, 8, 1)
            comm.send(np.full(1, 3 * k + 1, "u8"), 1)
            comm.recv(word, 1)
        else:
            comm.recv(word, 0)
            assert word[0] == 3 * k and cells[0] == k + 1 and cells[1] >= 2 * k + 1
            comm.recv(word, 0)
            assert word[0] == 3 * k + 1 and cells[1] == 2 * k + 2
            comm.recv(big, 0, tag=5)
            assert (big == k & 255).all()
            comm.send(word, 0)
    assert comm._engine.peers()[1 - comm.rank]["fences"] == 0


def test_messages_of_all_kinds_are_fenced(world, scale):
    world(2, fences, scale.rounds(300, 10))


# ----------------------------------------------------------------------- failing alone

def expect_refused(request, what):
    with pytest.raises(CompletionError) as caught:
        request.wait(20)
    text = str(caught.value)
    assert what in text and "IBV_WC_REM_ACCESS_ERR" in text and "descriptor" in text
    assert caught.value.status == WCStatus.IBV_WC_REM_ACCESS_ERR


def closed_regions(comm, rounds):
    """Both ranks use regions that the other has closed, between good operations, at the same time."""
    other = 1 - comm.rank
    page = np.zeros(8192, "u1")
    remote = swap(comm, comm.register(page))
    data = np.random.default_rng(comm.rank).integers(0, 255, 4096, "u1")
    back = np.zeros(4096, "u1")
    where = np.arange(0, 4096, 64)
    for k in range(rounds):
        gone = comm.register(np.zeros(1000, "u1"))
        bad = swap(comm, gone)
        gone.close()
        comm.barrier()
        first = comm.ifetch_add(remote, 0, 1)
        kind = k % 4
        if kind == 0:
            refused = comm.iwrite(b"late", bad, 3)
        elif kind == 1:
            refused = comm.iread(np.zeros(900, "u1"), bad, 3)
        elif kind == 2:
            refused = comm.iwritev(data, bad, where, where // 8, 10)
        else:
            refused = comm.iwrite(b"late", bad, notify=9)       # never arrives
        behind = [comm.ifetch_add(remote, 0, 1), comm.iwritev(data, remote, where, 4096 + where, 64),
                  comm.iwrite(b"", remote, notify=k), comm.ifetch_add(remote, 0, 1),
                  comm.iread(back, remote, 4096)]
        comm.send(np.full(1, k, "u8"), other)                   # waits behind all of them
        word = np.zeros(1, "u8")
        comm.recv(word, other)
        assert word[0] == k and page[:8].view("u8")[0] == 3 * (k + 1)
        expect_refused(refused, ("iwrite: 4 bytes", "iread: 900 bytes",
                                 "iwritev: 640 bytes", "iwrite: 4 bytes")[kind])
        assert f"rank {other}" in str(refused.error)
        assert [first.wait(20), behind[0].wait(), behind[3].wait()] == [3 * k, 3 * k + 1, 3 * k + 2]
        comm.wait_all(behind)
        assert (back == data).all()
        back[:] = 0
        assert comm.wait_notify(other) == [k]
    comm.barrier()
    repairs = comm.counters["lane_repairs"]
    comm.send(b"still here", other)
    comm.recv(bytearray(10), other)
    return repairs


def test_a_closed_region_fails_one_request(world, scale):
    n = scale.rounds(24, 8)
    assert world(2, closed_regions, n) == [n, n]


def closing_in_flight(comm, rounds):
    """The region is closed while a request with many pieces runs."""
    other = 1 - comm.rank
    size = 1 << 20
    good = np.zeros(8, "u8")
    counter = swap(comm, comm.register(good))
    failed = 0
    for _ in range(rounds):
        page = np.zeros(size, "u1")
        region = comm.register(page)
        remote = swap(comm, region)
        where = np.arange(0, size, 512)
        comm.barrier()
        request = comm.iwritev(np.ones(size, "u1"), remote, where, where, 512)
        after = comm.ifetch_add(counter, 0, 1)
        region.close()
        try:
            request.wait(20)
        except CompletionError as error:
            failed += 1
            assert error.status == WCStatus.IBV_WC_REM_ACCESS_ERR
        after.wait(20)
        comm.barrier()
        done = int(page.sum())
        assert page[:done].all() and not page[done:].any()      # in order, up to somewhere
    assert good[0] == rounds
    assert comm.recv(bytearray(2), other) == 2 if comm.rank else comm.send(b"ok", other) is None
    return failed


def test_a_region_is_closed_while_it_is_written(world, scale):
    world(2, closing_in_flight, scale.rounds(40, 5))


def forged(comm, remote, bits):
    """A descriptor that claims more than its owner granted: the device has to refuse."""
    body = bytearray(remote.descriptor()[:-16])
    body[5] = bits
    return comm.open(bytes(body) + hmac.digest(comm.group.secret, b"descriptor" + bytes(body),
                                               "sha256")[:16])


def device_rights(comm):
    table = {}
    for access in ("", "r", "w", "a"):
        page = np.arange(8, dtype="u8")
        remote = forged(comm, swap(comm, comm.register(page, access)), 14)
        if comm.rank == 0:
            calls = {"write": lambda r=remote: comm.write(np.full(1, 77, "u8"), r, 8),
                     "read": lambda r=remote: comm.read(np.zeros(1, "u8"), r, 16),
                     "fetch_add": lambda r=remote: comm.fetch_add(r, 24, 5),
                     "compare_swap": lambda r=remote: comm.compare_swap(r, 32, 4, 9)}
            for name, call in calls.items():
                try:
                    call()
                    table[access, name] = "works"
                except CompletionError as error:
                    table[access, name] = WCStatus(error.status).name
        comm.barrier()
        want = np.arange(8, dtype="u8")
        if comm.rank == 1:
            if "w" in access:
                want[1] = 77
            if "a" in access:
                want[3], want[4] = 8, 9
        assert (page == want).all()
    return table


def test_the_device_refuses_what_was_not_granted(world):        # D4
    table, _ = world(2, device_rights)
    assert table == {(access, name): "works" if letter == access else "IBV_WC_REM_ACCESS_ERR"
                     for access in ("", "r", "w", "a")
                     for name, letter in (("write", "w"), ("read", "r"), ("fetch_add", "a"),
                                          ("compare_swap", "a"))}


# ---------------------------------------------------------------------- death and close

def death(comm):
    page = np.zeros(1 << 20, "u1")
    remote = swap(comm, comm.register(page))
    comm.barrier()
    if comm.rank == 1:
        comm.write(b"", remote, notify=1)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    assert comm.wait_notify(1) == [1]
    with pytest.raises(PeerDeadError, match="rank 1") as caught:
        comm.wait_notify(1)
    with pytest.raises(PeerDeadError):
        comm.wait_notify(1, 5)
    for call in (lambda: comm.write(page, remote), lambda: comm.read(page, remote),
                 lambda: comm.fetch_add(remote, 0, 1), lambda: comm.iwrite(b"", remote, notify=1).wait(),
                 lambda: comm.iwritev(page, remote, [0, 8], [0, 8], 8).wait(), lambda: comm.send(b"", 1)):
        with pytest.raises(PeerDeadError, match="rank 1") as again:
            call()
        assert str(again.value).partition(":")[2] == str(caught.value).partition(":")[2]
    assert time.monotonic() - start < 60
    return True


def test_a_dead_peer_ends_one_sided_calls(world):
    assert world(2, death, mortal=[1]) == [True, Died(signal.SIGKILL)]


def death_in_flight(comm, n):
    page = np.zeros(1 << 16, "u1")
    gone = comm.register(page)
    bad = swap(comm, gone)
    remote = swap(comm, comm.register(page))
    gone.close()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGKILL)            # it never answers LANE_RESET
    time.sleep(0.2)                                     # it has left the barrier
    requests = [comm.iwrite(b"x", bad)] + [comm.ifetch_add(remote, 0, 1) for _ in range(n)]
    waiter = comm.irecv(bytearray(1), 1)
    start = time.monotonic()
    for request in [*requests, waiter]:
        with pytest.raises((CompletionError, PeerDeadError), match="rank 1"):
            request.wait()
    return time.monotonic() - start


def test_death_of_a_peer_that_was_to_answer(world, scale):
    took, _ = world(2, death_in_flight, 50, mortal=[1])
    assert took < 6 * scale.time


def leaving(comm):
    """close() carries out what was started; the other side's calls then say that it left."""
    page = np.zeros(1 << 16, "u1")
    remote = swap(comm, comm.register(page))
    if comm.rank == 0:
        for i in range(100):
            comm.iwrite(bytes([i]) * 8, remote, 8 * i, notify=i)
        request = comm.iwrite(np.full(1 << 15, 7, "u1"), remote, 1 << 15)
        comm.close()
        assert request.done and request.error is None
        for call in (lambda: comm.write(b"", remote), lambda: comm.wait_notify(1),
                     lambda: comm.iwritev(b"", remote, [], [], 1), lambda: comm.fetch_add(remote, 0, 1)):
            with pytest.raises(ClosedError):
                call()
    else:
        assert comm.wait_notify(0, 100) == list(range(100))
        with pytest.raises(PeerDeadError, match="closed"):
            comm.wait_notify(0)
        assert (page[1 << 15:] == 7).all() and page[792:800].tolist() == [99] * 8
        with pytest.raises(PeerDeadError, match="closed"):
            comm.write(b"x", remote)


def test_close_carries_out_what_was_started(world):
    world(2, leaving)


def full_window(comm, n, seen):
    """Beyond the window notified writes wait for their target to take some."""
    page = np.zeros(8, "u8")
    remote = swap(comm, comm.register(page))
    other = 1 - comm.rank
    if comm.rank == 0:
        requests = [comm.iwrite(b"", remote, notify=i) for i in range(n)]
        assert requests[65535].wait() == 0
        with pytest.raises(TimeoutError):
            requests[65536].wait(0.2)
        assert requests[-1].cancel() and not requests[-1].cancel() and not requests[0].cancel()
        with pytest.raises(RocecommError, match="cancelled"):
            requests[-1].wait()
        comm.recv(bytearray(1), 1)                      # the other direction works
        seen.touch()
        comm.wait_all(requests[:-1])
    else:
        comm.send(b"x", 0)
        while not seen.exists():
            comm.progress()
        got = comm.wait_notify(0, 40000)
        got += comm.wait_notify(0, n - 1 - 40000)
        assert got == list(range(n - 1))
        with pytest.raises(TimeoutError):
            comm.wait_notify(0, timeout=0.05)
    comm.barrier()
    assert comm._engine.peers()[other]["fences"] == 0


def test_unread_notifications_are_bounded(tmp_path):
    run_world(2, full_window, 65600, tmp_path / "seen", device="soft0", timeout=40)


# --------------------------------------------------------------------- threads, asyncio

def threads(comm, n):
    """Four threads of each rank use the same lanes, and messages as well."""
    other = 1 - comm.rank
    page = np.zeros(4 << 12, "u1")
    cells = np.zeros(4, "u8")
    remote, counters = swap(comm, comm.register(page)), swap(comm, comm.register(cells))
    errors = []

    def work(k):
        rng = np.random.default_rng(k)
        back, word = np.zeros(4096, "u1"), np.zeros(1, "u8")
        try:
            for i in range(n):
                size = int(rng.integers(1, 4096))
                comm.write(np.full(size, i & 255, "u1"), remote, 4096 * k)
                comm.read(back[:size], remote, 4096 * k)
                assert (back[:size] == i & 255).all()
                assert comm.fetch_add(counters, 8 * k, 1) == i
                request = comm.isend(np.full(1, i, "u8"), other, tag=k)
                comm.recv(word, other, tag=k)
                assert word[0] == i and request.wait() == 8
                comm.writev(back, remote, [0, 10], [4096 * k, 4096 * k + 64], [8, 16])
        except BaseException as error:
            errors.append(error)
            raise

    running = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    comm.barrier()
    assert not errors and cells.tolist() == [n] * 4


def test_threads_share_the_lanes(world, scale):
    world(2, threads, scale.rounds(200, 10))


def awaited(comm, n):
    cells = np.zeros(2, "u8")
    remote = swap(comm, comm.register(cells))

    async def one(k):
        return [await comm.ifetch_add(remote, 0, 1) for _ in range(n)]

    async def main():
        assert await comm.iwrite(np.full(1, 5, "u8"), remote, 8) == 8
        return await asyncio.gather(*(one(k) for k in range(3)))

    seen = sorted(sum(asyncio.run(main()), []))
    assert seen == list(range(3 * n))
    comm.barrier()
    assert cells.tolist() == [3 * n, 5]


def test_one_sided_requests_are_awaited(world, scale):
    world(2, awaited, scale.rounds(100, 5))


def gathered(comm, n):
    """Notifications of several ranks: each rank's in order, and who sent which."""
    remote = None
    page = np.zeros(64, "u1")
    reg = comm.register(page)
    if comm.rank == 0:
        for other in range(1, comm.size):
            comm.send(reg.descriptor(), other)
        told = []
        while len(told) < n * (comm.size - 1):
            told += comm.wait_notify(ANY_SOURCE, with_source=True)
        for other in range(1, comm.size):
            assert [value for rank, value in told if rank == other] == list(range(n))
    else:
        descriptor = bytearray(64)
        comm.recv(descriptor, 0)
        remote = comm.open(descriptor)
        for i in range(n):
            comm.iwrite(bytes([i & 255]) * 8, remote, 8 * comm.rank, notify=i)
    comm.barrier()


def test_notifications_of_any_source(world, scale):
    world(3, gathered, scale.rounds(300, 20))
