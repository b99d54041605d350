"""all_reduce and barrier on a device: values, memory, disagreement, death."""

import hashlib
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import rocecomm
from rocecomm.errors import MismatchError, PeerDeadError, RocecommError, TimeoutError

#: A slow machine, such as an emulated one: fewer variants of the same thing.
SMALL = os.environ.get("ROCECOMM_TEST_SIZES") == "small"
DTYPES = ("float32", "float64", "int32", "int64")


def expected(count, size, dtype="i8"):
    return (size * np.arange(count) + size * (size - 1) // 2).astype(dtype)


def values(comm, counts):
    for count in counts:
        guarded = np.full(count + 32, -7, "i8")
        array = guarded[16:count + 16]
        array[:] = np.arange(count) + comm.rank
        assert comm.all_reduce(array) is array
        assert np.array_equal(array, expected(count, comm.size))
        assert (guarded[:16] == -7).all() and (guarded[count + 16:] == -7).all()
    for dtype in DTYPES:
        array = (np.arange(1009) % 100 + comm.rank).astype(dtype)
        comm.all_reduce(array)
        assert (array == (comm.size * (np.arange(1009) % 100)
                          + comm.size * (comm.size - 1) // 2)).all()
    return True


@pytest.mark.parametrize("size", [1, 3] if SMALL else [1, 2, 3, 5, 7])
def test_counts_that_do_not_divide(world, scale, size):
    counts = [0, 1, 2, size - 1, size, size + 1, 1009, 100_003, 1_000_003]
    counts = [n for n in counts if 8 * n <= scale.bytes]
    assert world(size, values, counts) == [True] * size


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_both_algorithms_and_small_segments(world, algorithm):
    env = {"ROCECOMM_ALGO": algorithm, "ROCECOMM_SEGMENT": "4096"}
    assert world(4, values, [0, 1, 3, 4, 5, 1009, 20_000], env=env) == [True] * 4


def by_rendezvous(comm):
    return values(comm, [1, 5, 1009, 20_000])


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_without_eager_messages(world, algorithm):
    env = {"ROCECOMM_ALGO": algorithm, "ROCECOMM_SEGMENT": "2048", "ROCECOMM_EAGER_LIMIT": "0"}
    assert world(3, by_rendezvous, env=env) == [True] * 3


def nothing(comm):
    for shape in ((0,), (1, 0, 2)):
        array = np.empty(shape, "f4")
        assert comm.all_reduce(array).shape == shape
    scalar = np.array(1.5)
    assert comm.all_reduce(scalar) is scalar and scalar == 1.5 * comm.size
    return comm.all_reduce(np.full(3, comm.rank)).tolist()


@pytest.mark.parametrize("size", [3] if SMALL else [1, 3])
def test_nothing_to_reduce_and_scalars(world, size):
    assert world(size, nothing) == [[size * (size - 1) // 2] * 3] * size


def inputs_unchanged(comm, nbytes, rounds):
    source = np.random.default_rng(comm.rank).integers(0, 1000, nbytes // 8)
    total = sum(np.random.default_rng(r).integers(0, 1000, nbytes // 8)
                for r in range(comm.size))
    before = hashlib.sha256(source).digest()
    source.flags.writeable = False
    out = np.empty_like(source)
    for _ in range(rounds):
        out[:] = 5
        assert comm.all_reduce(source, out=out) is out
        assert np.array_equal(out, total)
    assert hashlib.sha256(source).digest() == before
    return True


@pytest.mark.parametrize("nbytes, rounds", [(256, 50), (256 << 10, 50)] if SMALL
                         else [(256, 50), (256 << 10, 50), (16 << 20, 10)])
def test_the_input_does_not_change(world, scale, nbytes, rounds):
    nbytes = min(nbytes, scale.bytes)
    assert world(3, inputs_unchanged, nbytes, scale.rounds(rounds, 2)) == [True] * 3


def overlapping(comm):
    x = np.arange(1000.0)
    with pytest.raises(ValueError, match="overlaps"):
        comm.all_reduce(x[:-1], out=x[1:])
    assert comm.all_reduce(x, out=x) is x
    twin = x[:]                                       # another object, the same memory
    comm.all_reduce(x, out=twin)
    half = np.arange(10.0)
    comm.all_reduce(half[:5], out=half[5:])
    return x[10], half.tolist()


def test_in_place_and_overlapping(world):
    assert world(2, overlapping) == [(40.0, [0.0, 1.0, 2.0, 3.0, 4.0] + [0, 2, 4, 6, 8])] * 2


def bits(comm, dtype, counts, rounds):
    hashes = []
    for count in counts * rounds:
        random = np.random.default_rng((comm.rank, len(hashes)))
        array = random.standard_normal(count).astype(dtype)
        hashes.append(hashlib.sha256(comm.all_reduce(array)).hexdigest())
    return hashes


@pytest.mark.parametrize("dtype", ["float32"] if SMALL else ["float32", "float64"])
def test_the_same_bits_on_all_ranks_and_in_every_run(world, scale, dtype):
    counts = [101, min(1_000_003, scale.bytes // 8)]
    first, second = (world(4, bits, dtype, counts, 2) for _ in range(2))
    assert first == second and len(set(map(tuple, first))) == 1


def other_buffers(comm):
    import array
    plain = array.array("d", [1.0, 2.0, 3.0])
    comm.all_reduce(plain)
    shared = rocecomm.empty(70_000, "f4")
    shared[:] = comm.rank
    comm.all_reduce(shared)
    view = memoryview(bytearray(np.full(4, comm.rank, "i4").tobytes())).cast("i")
    comm.all_reduce(view)
    return plain.tolist(), float(shared.max()), view.tolist()


def test_other_buffers(world):
    assert world(2, other_buffers) == [([2.0, 4.0, 6.0], 1.0, [1, 1, 1, 1])] * 2


def torch_tensors(comm):
    import torch
    small, large = torch.full((3,), comm.rank + 1.0), torch.ones(300, 300, dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.sum().backward()
    assert comm.all_reduce(small) is small
    comm.all_reduce(large)
    comm.all_reduce(parameter.grad)
    with torch.no_grad():
        comm.all_reduce(parameter)
    assert parameter.requires_grad
    with pytest.raises(TypeError, match="bfloat16"):
        comm.all_reduce(torch.ones(2, dtype=torch.bfloat16))
    return small.tolist(), large.sum().item(), parameter.grad.tolist(), parameter.tolist()


def test_torch_tensors(world):
    pytest.importorskip("torch")
    two = [2.0] * 4
    assert world(2, torch_tensors) == [([3.0] * 3, 180_000.0, two, two)] * 2


# --- disagreement

def counts_differ(comm, counts):
    start = time.monotonic()
    try:
        comm.all_reduce(np.zeros(counts[comm.rank], "f4"), timeout=20)
    except MismatchError as error:
        text = str(error)
        assert text.startswith("all_reduce: ")          # what was called, not the message that found it
    else:
        return "no error"
    with pytest.raises(RocecommError):
        comm.all_reduce(np.zeros(2), timeout=20)     # the group stays of no use, at once
    assert time.monotonic() - start < 19
    return text


@pytest.mark.parametrize("counts", [(100, 101, 101), (25_600, 51_200, 25_600)] if SMALL
                         else [(100, 101, 101), (25_600, 51_200, 25_600), (0, 1, 1),
                               (10, 100_000, 100_000)])
def test_counts_that_differ_are_an_error_everywhere(world, counts):
    """F1: on every rank, with both sizes; later calls fail at once."""
    for text in world(3, counts_differ, counts):
        assert str(counts[0]) in text and str(counts[1]) in text


def operations_differ(comm):
    start = time.monotonic()
    with pytest.raises(MismatchError, match=r"all_reduce[^$]*barrier|barrier[^$]*all_reduce"):
        if comm.rank == 0:
            comm.all_reduce(np.zeros(10), timeout=20)
            comm.barrier(timeout=20)
        else:
            comm.barrier(timeout=20)
            comm.all_reduce(np.zeros(10), timeout=20)
    return time.monotonic() - start


def test_different_operations(world, scale):
    """F6: another order of calls is an error that names both operations."""
    assert max(world(3, operations_differ)) < 10 * scale.time


def dtypes_differ(comm):
    with pytest.raises(MismatchError, match="float32|int32"):
        comm.all_reduce(np.zeros(1000, ("f4", "i4")[comm.rank]), timeout=20)
    return True


def test_different_dtypes(world):
    assert world(2, dtypes_differ) == [True] * 2


def one_refuses(comm):
    if comm.rank == 1:
        for bad, error in ((np.array([None]), BufferError), (np.zeros((4, 4))[:, 1], BufferError),
                           (np.array(["ab"]), TypeError), (b"bytes", BufferError)):
            with pytest.raises(error):
                comm.all_reduce(bad)
        with pytest.raises(ValueError):
            comm.all_reduce(np.zeros(3), op="median")
    return comm.all_reduce(np.full(50_000, comm.rank + 1.0))[[0, -1]].tolist()


def test_a_rank_that_refuses_its_argument_can_call_again(world):
    """F8: the others are matched with its second call."""
    assert world(3, one_refuses) == [[6.0, 6.0]] * 3


def one_leaves(comm):
    if comm.rank == 1:
        return 0.0                                    # closes the communicator
    start = time.monotonic()
    with pytest.raises((PeerDeadError, MismatchError)):
        comm.all_reduce(np.zeros(100_000), timeout=30)
    return time.monotonic() - start


def test_a_rank_that_leaves_is_an_error_for_the_others(world, scale):
    """F6, F8: one call more on some ranks than on the one that ended."""
    results = world(3, one_leaves)
    assert max(results) < 8 * scale.time


def left_before(comm):
    """Rank 1 knows that rank 2 has left before it begins; rank 0 exchanges nothing with rank 2."""
    if comm.rank == 2:
        return True
    if comm.rank == 1:
        with pytest.raises(PeerDeadError):
            comm.recv(bytearray(1), 2)
    for _ in range(2):
        with pytest.raises(PeerDeadError, match="^all_reduce") as caught:
            comm.all_reduce(np.zeros(1000, "f4"), timeout=60)
        assert caught.value.peer == 2 and "irecv" not in str(caught.value)
    return True


def test_a_rank_that_left_before_is_an_error_for_those_behind_its_neighbours(world):
    """F3, F6: they are told, and do not wait for their timeout."""
    assert world(3, left_before) == [True] * 3


def absent(comm):
    """The first cause, its class included, is what every rank raises, then and in every later call."""
    start = time.monotonic()
    if comm.rank == 0:
        time.sleep(2.5)
        with pytest.raises(TimeoutError) as caught:
            comm.all_reduce(np.zeros(10))
    else:
        with pytest.raises(TimeoutError) as caught:
            comm.all_reduce(np.zeros(10), timeout=0.5)
        assert 0.4 < time.monotonic() - start
    for call in (comm.barrier, lambda: comm.all_reduce(np.zeros(10)), comm.barrier):
        with pytest.raises(TimeoutError, match="all_reduce.* did not end within 0.5 s") as again:
            call()
        assert again.value.peer_state == caught.value.peer_state
    return str(caught.value)


def test_a_timeout_is_an_error_for_all(world):
    assert all("0.5" in text for text in world(3, absent))


def bad_timeouts(comm):
    for bad, error in ((-1, ValueError), ("5", TypeError), (1e12, ValueError)):
        with pytest.raises(error):
            comm.barrier(timeout=bad)
        with pytest.raises(error):
            comm.all_reduce(np.zeros(3), timeout=bad)
    comm.barrier(timeout=None)
    return comm.all_reduce(np.ones(1), timeout=None)[0]


def test_timeouts_that_make_no_sense(world):
    assert world(2, bad_timeouts) == [2.0] * 2


# --- threads (case F5)

def two_communicators(comm, rounds):
    """Each thread on a communicator of its own."""
    failures = []

    def work(comm, base):
        try:
            for _ in range(rounds):
                array = comm.all_reduce(np.full(3000, base + comm.rank, "f8"))
                assert (array == comm.size * base + 1).all()
        except BaseException as error:
            failures.append(error)
            raise

    with rocecomm.init() as other:
        threads = [threading.Thread(target=work, args=pair)
                   for pair in ((comm, 1000.0), (other, 1.0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return failures


def test_threads_with_communicators_of_their_own(world, scale):
    """F5: each counts its calls apart."""
    assert world(2, two_communicators, scale.rounds(500, 20)) == [[], []]


def one_communicator(comm):
    """A second thread is refused while rank 1 keeps the first one waiting."""
    if comm.rank == 1:
        comm.recv(bytearray(1), 0)
        return comm.all_reduce(np.ones(3)).tolist()
    results = []
    thread = threading.Thread(target=lambda: results.append(comm.all_reduce(np.ones(3)).tolist()))
    thread.start()
    while not comm.collectives._lock.locked():
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="another thread"):
        comm.all_reduce(np.ones(3))
    with pytest.raises(RuntimeError, match="another thread"):
        comm.barrier()
    comm.send(b"1", 1)
    thread.join()
    return results[0]


def test_a_second_thread_on_one_communicator_is_refused(world):
    """F5: at the second call; values never mix."""
    assert world(2, one_communicator) == [[2.0] * 3] * 2


# --- barrier

def entries_and_exits(comm, many):
    comm.barrier()
    time.sleep(0.1 * comm.rank)
    entered = time.monotonic()
    comm.barrier()
    left = time.monotonic()
    for _ in range(many):
        comm.barrier()
    return entered, left


@pytest.mark.parametrize("size", [3] if SMALL else [1, 2, 3, 4, 5, 8])
def test_nobody_leaves_a_barrier_before_all_have_come(world, scale, size):
    times = world(size, entries_and_exits, scale.rounds(1000 if size < 5 else 100))
    assert min(left for _, left in times) >= max(entered for entered, _ in times)


# --- death (case F3)

def loop_until_error(comm, victim, seed, timeout):
    """All-reduce for ever; the victim kills itself at a random moment inside the loop."""
    if comm.rank == victim:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 0.05 + random.Random(seed).random() * 0.3)
    arrays = [np.ones(n) for n in (10, 1000, 50_000, 300_000)]
    start = time.monotonic()
    try:
        for i in range(10**9):
            start = time.monotonic()
            comm.all_reduce(arrays[i % 4], timeout=timeout)
    except RocecommError as error:
        took = time.monotonic() - start
        first = f"{type(error).__name__}: {error}"
    start = time.monotonic()
    with pytest.raises(RocecommError):
        comm.all_reduce(arrays[0], timeout=timeout)
    again = time.monotonic() - start
    start = time.monotonic()
    comm.close()
    return took, again, time.monotonic() - start, first


def killed_rank(world, scale, seed):
    victim = random.Random(seed).randrange(4)
    results = world(4, loop_until_error, victim, seed, 20.0, mortal=[victim])
    assert results[victim].signal == signal.SIGKILL
    for rank, result in enumerate(results):
        if rank != victim:
            took, again, closing, text = result
            assert took < 8 * scale.time, (rank, text)
            assert again < 1 * scale.time and closing < 5 * scale.time
            assert f"rank {victim}" in text or "PeerDead" in text, text


@pytest.mark.parametrize("seed", range(1 if SMALL else 2))
def test_every_survivor_of_a_killed_rank_raises(world, scale, seed):
    killed_rank(world, scale, seed)


@pytest.mark.stress
@pytest.mark.timeout(400)
def test_twenty_killed_ranks(world, scale):
    for seed in range(100, 100 + scale.rounds(20, 3)):
        killed_rank(world, scale, seed)


def known_before(comm, left):
    """Messages have told all of a death; no collective has begun, and most ranks do nothing with the dead
    one in theirs."""
    gone = comm.size // 2
    if comm.rank == gone:
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    with pytest.raises(PeerDeadError):
        comm.recv(bytearray(1), gone)
    start = time.monotonic()
    for call in (comm.barrier, lambda: comm.all_reduce(np.ones(4)), lambda: comm.all_reduce(np.ones(10**5))):
        with pytest.raises(PeerDeadError, match=f"rank {gone} (died|does not answer|closed|has closed)"):
            call()
    took = time.monotonic() - start
    # nobody leaves before all know: it is that rank of which they hear
    others = [r for r in range(comm.size) if r not in (comm.rank, gone)]
    comm.wait_all([comm.irecv(bytearray(1), r) for r in others] + [comm.isend(b"x", r) for r in others])
    return took


@pytest.mark.parametrize("left", [False, True], ids=["died", "left"])
def test_a_collective_ends_at_once_after_a_death_that_messages_told_of(world, scale, left):
    ranks = 6 if scale.share == 1 else scale.ranks
    results = world(ranks, known_before, left, mortal=[ranks // 2])
    assert max(r for i, r in enumerate(results) if i != ranks // 2) < 5 * scale.time


def interrupted(comm):
    """Ctrl-C in a collective of which the others are not part yet."""
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(np.zeros(100_000), timeout=30)
        return time.monotonic() - start
    time.sleep(1.0)
    start = time.monotonic()
    with pytest.raises(RocecommError):
        comm.all_reduce(np.zeros(100_000), timeout=30)
    return time.monotonic() - start


def test_ctrl_c_ends_the_call_and_the_others_are_told(world, scale):
    results = world(3, interrupted)
    assert 0.4 < results[0] < 2.0 * scale.time and max(results[1:]) < 8 * scale.time
