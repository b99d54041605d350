"""The executors over an unkind engine: values, order of memory use, disagreement, clean-up."""

import hashlib
import threading

import fake_engine
import numpy as np
import pytest

from rocecomm.config import Config
from rocecomm.errors import MismatchError, TimeoutError

SMALL = Config(segment=64, doubling_limit=256)


def expected(count, size, dtype):
    return (size * np.arange(count) + size * (size - 1) // 2).astype(dtype)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "doubling"])
@pytest.mark.parametrize("eager", [0, 100, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_values(size, eager, algorithm):
    config = Config(segment=64, doubling_limit=256, algorithm=algorithm)

    def work(comm, rank):
        for count in (0, 1, 2, size - 1, size, size + 1, 100, 1009):
            for dtype in ("int64", "float32", "int32", "float64"):
                guarded = np.full(count + 16, 77, dtype)
                array = guarded[8:count + 8]
                array[:] = np.arange(count) + rank
                assert comm.all_reduce(array) is array
                assert np.array_equal(array, expected(count, size, dtype))
                assert (guarded[:8] == 77).all() and (guarded[count + 8:] == 77).all()

    results, _ = fake_engine.run(size, work, seed=size, eager=eager, config=config)
    assert results == [None] * size


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
@pytest.mark.parametrize("seed", range(5))
def test_out_of_place_leaves_the_input_alone(algorithm, seed):
    config = Config(segment=64, algorithm=algorithm)

    def work(comm, rank):
        array = np.arange(1009, dtype="i8") + rank
        before = hashlib.sha256(array).digest()
        array.flags.writeable = False
        out = np.full(1009, 5, "i8")
        assert comm.all_reduce(array, out=out) is out
        assert hashlib.sha256(array).digest() == before
        assert np.array_equal(out, expected(1009, 5, "i8"))

    results, _ = fake_engine.run(5, work, seed=seed, config=config)
    assert results == [None] * 5


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_same_bits_on_all_ranks_and_in_all_runs(algorithm, dtype):
    config = Config(segment=256, algorithm=algorithm)

    def work(comm, rank):
        array = np.random.default_rng(rank).standard_normal(10_003).astype(dtype)
        return hashlib.sha256(comm.all_reduce(array)).hexdigest()

    hashes = {h for seed in range(4)
              for h in fake_engine.run(6, work, seed=seed, config=config)[0]}
    assert len(hashes) == 1


def test_a_ring_moves_the_least_bytes_possible():
    size, count = 4, 4096

    def work(comm, rank):
        comm.all_reduce(np.zeros(count, "f4"))

    _, fabric = fake_engine.run(size, work, config=Config(segment=1 << 20, algorithm="ring"))
    assert fabric.messages == size * 2 * (size - 1)


@pytest.mark.parametrize("shape", [(0,), (1, 0, 2), (), (2, 3), (1,)])
def test_shapes(shape):
    def work(comm, rank):
        array = np.ones(shape, "f8")
        result = comm.all_reduce(array)
        assert result.shape == shape and (result == 3).all()
        follow = np.arange(5.0)
        return np.array_equal(comm.all_reduce(follow), 3 * np.arange(5.0))

    assert fake_engine.run(3, work, config=SMALL)[0] == [True] * 3


def test_barrier_holds_everyone():
    for size in (1, 2, 3, 5, 8):
        entered = []

        def work(comm, rank, entered=entered, size=size):
            threading.Event().wait(0.01 * rank)
            entered.append(rank)
            comm.barrier()
            return len(entered) == size

        assert fake_engine.run(size, work)[0] == [True] * size


@pytest.mark.parametrize("counts", [(100, 101, 101), (25_600, 51_200, 25_600), (0, 1, 0)])
def test_counts_that_disagree(counts):
    results, _ = fake_engine.run(
        3, lambda comm, rank: comm.all_reduce(np.zeros(counts[rank], "f4")), config=SMALL)
    assert all(isinstance(result, MismatchError) for result in results)


def test_a_rank_that_refuses_its_argument_may_call_again():
    def work(comm, rank):
        if rank == 1:
            with pytest.raises(BufferError):
                comm.all_reduce(np.array([None, 1]))
            with pytest.raises(TypeError, match="float16"):
                comm.all_reduce(np.zeros(3, "f2"))
        return comm.all_reduce(np.full(3, rank + 1.0)).tolist()

    assert fake_engine.run(3, work)[0] == [[6.0, 6.0, 6.0]] * 3


def test_a_timeout_on_one_rank_is_an_error_on_all():
    def work(comm, rank):
        if rank == 2:
            return None
        comm.all_reduce(np.zeros(1000), timeout=0.3 if rank == 0 else 20)

    results, _ = fake_engine.run(3, work, config=SMALL)
    assert isinstance(results[0], TimeoutError) and isinstance(results[1], TimeoutError)
    assert "rank 0" in str(results[1]) and "0.3 s" in str(results[1])


@pytest.mark.parametrize("array, out, error, words", [
    (np.zeros(3), np.zeros(4), ValueError, "3 elements of float64, out has 4"),
    (np.zeros(3), np.zeros(3, "f4"), ValueError, "float32"),
    (np.zeros(3, "M8[D]"), None, TypeError, "datetime64"),
    (np.zeros(3, [("x", "f4")]), None, TypeError, "dtype"),
    (np.zeros((4, 4))[:, 1], None, BufferError, "contiguous"),
    (np.asfortranarray(np.zeros((2, 3))), None, BufferError, "Fortran"),
    (np.broadcast_to(np.float32(1), (8,)), np.zeros(8, "f4"), BufferError, "stride 0"),
    (bytes(8), None, BufferError, "read-only"),
    (3.0, None, TypeError, "asarray"),
])
def test_arguments_that_are_refused(array, out, error, words):
    def work(comm, rank):
        with pytest.raises(error, match=words):
            comm.all_reduce(array, out=out)

    assert fake_engine.run(1, work)[0] == [None]


def test_partial_overlap_and_unknown_reduction():
    def work(comm, rank):
        x = np.arange(10.0)
        with pytest.raises(ValueError, match="overlaps its input by 64 of 72 bytes"):
            comm.all_reduce(x[:-1], out=x[1:])
        with pytest.raises(ValueError, match="'mean'"):
            comm.all_reduce(x, op="mean")
        with pytest.raises(TypeError, match="timeout"):
            comm.all_reduce(x, timeout="5")
        assert comm.all_reduce(x, out=x) is x
        return comm.all_reduce(x[:5], out=x[5:]).tolist()

    assert fake_engine.run(1, work)[0] == [[0.0, 1.0, 2.0, 3.0, 4.0]]
