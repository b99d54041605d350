"""`await` of requests: event loops, cancellation, several loops and threads, the end."""

import asyncio
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from worlds import Died, threads

import rocecomm
from rocecomm import ClosedError, MessageTruncatedError, PeerDeadError, RocecommError, TimeoutError


def run(kind, coroutine):
    if kind == "uvloop":
        import uvloop

        return uvloop.run(coroutine)
    return asyncio.run(coroutine, debug=kind == "debug")


def files():
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------- what is awaited


async def exchange(comm, rounds, sizes):
    other = 1 - comm.rank
    for size in sizes:
        for i in range(rounds if size < 100000 else 3):
            out, into = np.full(size, i + comm.rank, "u1"), np.zeros(size, "u1")
            if comm.rank:
                assert await comm.irecv(into, other) == size
                assert await comm.isend(out, other) == size
            else:
                request = comm.isend(out, other)
                assert await comm.irecv(into, other) == size
                assert await request == await request == request.wait() == size
            assert (into == i + other).all(), (size, i)
    # many at once, in any order
    n = rounds
    into = [np.zeros(1000 + 20000 * (i % 3 == 0), "u1") for i in range(n)]
    receives = [comm.irecv(into[i], other, tag=i) for i in range(n)]
    sends = [comm.isend(np.full(into[i].size, i % 251, "u1"), other, tag=i) for i in reversed(range(n))]
    got = await asyncio.gather(*receives, *sends)
    assert sum(got) == 2 * sum(a.nbytes for a in into)
    assert all((a == i % 251).all() for i, a in enumerate(into))
    # errors are those of wait()
    await comm.isend(b"123456789", other, tag=1 << 40)
    late = comm.irecv(bytearray(4), other, tag=1 << 40)
    with pytest.raises(MessageTruncatedError) as first:
        await late
    with pytest.raises(MessageTruncatedError) as again:
        await late
    assert first.value is again.value is late.error


def exchanges(comm, kind, rounds, sizes):
    before = threads()
    run(kind, exchange(comm, rounds, sizes))
    after = threads()
    assert len(after) == len(before), f"a thread was started: {after}"


SIZES = 0, 1, 8, 8192, 8193, 300000, 20 << 20


def test_messages_of_all_sizes(world, scale):
    world(2, exchanges, "asyncio", scale.rounds(200, 20), scale.sizes(*SIZES))


def test_messages_of_all_sizes_with_uvloop(soft_world):
    soft_world(2, exchanges, "uvloop", 100, SIZES)


async def waits_only(comm):
    """Every message comes while its receiver sleeps in the selector."""
    other = 1 - comm.rank
    loop = asyncio.get_running_loop()
    into = np.zeros(1, "i8")
    for i in range(30):
        if comm.rank == i % 2:
            await asyncio.sleep(0.002)
            await comm.isend(np.full(1, i, "i8"), other)
        else:
            before = loop.time()
            await comm.irecv(into, other)
            assert into[0] == i
            assert loop.time() - before < 0.5, "not woken by the message"


def waiting(comm):
    asyncio.run(waits_only(comm))


def test_a_message_wakes_the_loop_without_polling(world):
    world(2, waiting, env={"ROCECOMM_SPIN": "0"})


async def one_sided(comm):
    note = bytearray(64)
    if comm.rank == 0:
        await comm.irecv(note, 1)
        remote = comm.open(bytes(note))
        assert await comm.iwrite(np.arange(1000), remote, offset=800) == 8000
        got = np.zeros(1000, int)
        assert await comm.iread(got, remote, offset=800) == 8000
        assert (got == np.arange(1000)).all()
        both = await asyncio.gather(comm.iread(got, remote), comm.iwrite(got[:10], remote))
        assert both == [8000, 80]
        await comm.isend(b"x", 1)
    else:
        memory = np.zeros(2000, int)
        with comm.register(memory) as region:
            await comm.isend(region.descriptor(), 0)
            await comm.irecv(note, 0)
            assert (memory[100:1100] == np.arange(1000)).all()


def awaiting_one_sided(comm):
    asyncio.run(one_sided(comm))


def test_one_sided_operations(world):
    world(2, awaiting_one_sided)


async def with_ticker(comm):
    ticks, stop = 0, False

    async def ticker():
        nonlocal ticks
        while not stop:
            ticks += 1
            await asyncio.sleep(0)
    task = asyncio.create_task(ticker())
    end = time.monotonic() + 0.3
    data, n = np.zeros(8, "u1"), 0
    while time.monotonic() < end:           # each of these has ended before it is awaited
        await comm.isend(data, comm.rank)
        assert await comm.irecv(data, comm.rank) == 8
        n += 1
    stop = True
    await task
    return ticks, n


def fair(comm):
    ticks, n = asyncio.run(with_ticker(comm))
    assert ticks > 20 and n > 20, (ticks, n)


def test_other_tasks_do_not_starve(soft_world):
    soft_world(1, fair)


# -------------------------------------------------------------------- cancellation


async def cancelled(comm):
    if comm.rank == 0:
        into = np.zeros(4)
        request = comm.irecv(into, 1, tag=1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(request, 0.05)
        assert request.done and "cancelled" in str(request.error)
        await comm.isend(b"x", 1)
        second = np.zeros(4)
        assert await comm.irecv(second, 1, tag=1) == 32
        assert (second == 3).all() and not into.any(), "a late message touched the old buffer"

        # one of several awaiters leaves, the others go on
        request = comm.irecv(into, 1, tag=2)

        async def wait():
            return await request
        tasks = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0.02)
        tasks[1].cancel()
        await asyncio.sleep(0.02)
        assert tasks[1].cancelled() and not request.done
        await comm.isend(b"x", 1)
        assert [await tasks[0], await tasks[2]] == [32, 32] and (into == 4).all()

        # shield() keeps the receive
        request = comm.irecv(into, 1, tag=3)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(request), 0.02)
        assert not request.done
        await comm.isend(b"x", 1)
        assert await request == 32 and (into == 5).all()

        # a large send is asked back, and holds its memory until that is answered
        big = comm.isend(np.ones(200000), 1, tag=4)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(big, 0.05)
        await comm.isend(b"x", 1)
        for _ in range(2000):
            if big.done:
                break
            await asyncio.sleep(0.005)          # nobody awaits it: the loop sees it through
        assert "cancelled" in str(big.error)
        await comm.irecv(bytearray(1), 1)
    else:
        note = bytearray(1)
        await comm.irecv(note, 0)
        await comm.isend(np.full(4, 3.0), 0, tag=1)
        await comm.irecv(note, 0)
        await comm.isend(np.full(4, 4.0), 0, tag=2)
        await comm.irecv(note, 0)
        await comm.isend(np.full(4, 5.0), 0, tag=3)
        await comm.irecv(note, 0)
        with pytest.raises(asyncio.TimeoutError):   # the large one was withdrawn
            await asyncio.wait_for(comm.irecv(np.zeros(200000), 0, tag=4), 0.05)
        await comm.isend(note, 0)


def cancelling(comm, kind):
    run(kind, cancelled(comm))


def test_cancellation(world):
    world(2, cancelling, "debug")


def test_cancellation_with_uvloop(soft_world):
    soft_world(2, cancelling, "uvloop")


# ------------------------------------------------------------- loops and threads at once


def loops_in_threads(comm, rounds):
    other, failures = 1 - comm.rank, []

    async def task(tag):
        out, into = np.zeros(1, "i8"), np.zeros(1, "i8")
        for i in range(rounds):
            out[0] = i * 100 + tag
            send = comm.isend(out, other, tag=tag)
            assert await comm.irecv(into, other, tag=tag) == 8
            assert into[0] == out[0], (into[0], out[0])
            await send

    async def several(first):
        await asyncio.gather(*(task(first + i) for i in range(4)))

    def in_loop(first):
        try:
            asyncio.run(several(first))
        except BaseException as error:
            failures.append(repr(error))

    def blocking(tag):
        try:
            out, into = np.zeros(1, "i8"), np.zeros(1, "i8")
            for i in range(rounds):
                out[0] = i * 100 + tag
                comm.send(out, other, tag=tag)
                comm.recv(into, other, tag=tag)
                assert into[0] == out[0]
        except BaseException as error:
            failures.append(repr(error))
    shared = comm.irecv(np.zeros(1), other, tag=99)

    async def wait_shared():
        assert await shared == 8

    def share():
        try:
            asyncio.run(wait_shared())
        except BaseException as error:
            failures.append(repr(error))
    threads = [threading.Thread(target=in_loop, args=(0,)), threading.Thread(target=in_loop, args=(10,)),
               threading.Thread(target=blocking, args=(20,)), threading.Thread(target=share),
               threading.Thread(target=share)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    comm.send(np.zeros(1), other, tag=99)
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert shared.wait() == 8


def test_several_loops_and_a_blocking_thread(world, scale):
    world(2, loops_in_threads, scale.rounds(300, 20), timeout=60)


def test_several_loops_that_sleep(soft_world, scale):
    soft_world(2, loops_in_threads, scale.rounds(300, 20), timeout=60, env={"ROCECOMM_SPIN": "0"})


# ---------------------------------------------------------------------------- the end


def readers(loop):
    return {key.fd for key in loop._selector.get_map().values()}


async def leaves_nothing(comm):
    loop = asyncio.get_running_loop()
    before = readers(loop)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(comm.irecv(bytearray(1), comm.rank), 0.01)
    assert len(readers(loop)) == len(before) + 2
    for _ in range(60):
        await asyncio.sleep(0.1)
        if readers(loop) == before:
            return
    raise AssertionError(f"{readers(loop) - before} are still watched")


async def once(comm):
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(comm.irecv(bytearray(1), comm.rank), 0.001)


def pending_at_the_end(comm):
    """A loop that is closed with tasks pending."""
    loop = asyncio.new_event_loop()
    request = comm.irecv(bytearray(1), comm.rank, tag=5)

    async def wait():
        await request
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False
    loop.close()
    del task
    gc.collect()
    comm.send(b"x", comm.rank, tag=5)
    assert request.wait() == 1


def no_leaks(comm):
    asyncio.run(leaves_nothing(comm))
    asyncio.run(once(comm))
    pending_at_the_end(comm)
    gc.collect()
    before = files()
    for _ in range(20):
        asyncio.run(once(comm))
        pending_at_the_end(comm)
    gc.collect()
    assert files() <= before + 1, f"{before} descriptors before, {files()} after"


def test_a_loop_is_left_as_it_was(soft_world):
    soft_world(1, no_leaks)


def closed_elsewhere(comm, kind):
    seen = []

    async def wait(tag):
        try:
            await comm.irecv(bytearray(1), 1 - comm.rank, tag=tag)
        except RocecommError as error:
            seen.append(error)

    async def main(thread):
        tasks = [asyncio.create_task(wait(tag)) for tag in range(3)]
        await asyncio.sleep(0.05)
        if thread:
            closer = threading.Thread(target=comm.close)
            closer.start()
        else:
            comm.close()
        await asyncio.gather(*tasks)
        if thread:
            closer.join()
        with pytest.raises(ClosedError):
            comm.irecv(bytearray(1), 1 - comm.rank)
        # the loop goes on, with other descriptors under the same numbers
        there, back = os.pipe()
        got = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(there, lambda: got.done() or got.set_result(1))
        os.write(back, b"x")
        await asyncio.wait_for(got, 5)
        asyncio.get_running_loop().remove_reader(there)
        os.close(there)
        os.close(back)
    run(kind, main(comm.rank == 0))
    assert len(seen) == 3 and all(isinstance(e, (ClosedError, PeerDeadError)) for e in seen), seen


def test_close_ends_awaits(world):
    world(2, closed_elsewhere, "debug")


def test_close_ends_awaits_with_uvloop(soft_world):
    soft_world(2, closed_elsewhere, "uvloop")


async def until_dead(comm):
    with pytest.raises(PeerDeadError) as caught:
        await comm.irecv(np.zeros(1), 1)
    assert "rank 1" in str(caught.value)


def dying(comm):
    if comm.rank == 1:
        comm.send(b"x", 0)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(bytearray(1), 1)
    asyncio.run(until_dead(comm))


def test_death_of_the_peer_reaches_a_sleeping_loop(world):
    assert world(2, dying, mortal=[1], timeout=30)[1] == Died(signal.SIGKILL)


async def until_timeout(comm):
    start = time.monotonic()
    request = comm.irecv(np.zeros(1), 1 - comm.rank)
    slept, sleep = [], time.sleep
    time.sleep = slept.append           # the peer is asked what it does, and the loop goes on meanwhile
    try:
        with pytest.raises(TimeoutError) as caught:
            await request
    finally:
        time.sleep = sleep
    assert not slept and caught.value.peer_state in ("waiting", "stopped")
    assert time.monotonic() - start < 10
    assert not request.done and request.cancel()


def timing_out(comm):
    if comm.rank == 0:
        asyncio.run(until_timeout(comm))
        comm.send(b"x", 1)
    else:
        comm.recv(bytearray(1), 0, timeout=120)


def test_the_default_timeout_holds(world, scale):
    world(2, timing_out, options={"timeout": 0.3 * scale.time})


def outside(comm):
    async def wait():
        await comm.irecv(bytearray(1), comm.rank)
    coroutine = wait()
    with pytest.raises(RuntimeError, match="no running event loop"):
        coroutine.send(None)
    with pytest.raises(TypeError):
        rocecomm.link.aio.Awaiter()


def test_without_a_loop(soft_world):
    soft_world(1, outside)
