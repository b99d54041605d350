"""The parameter server: values, rounds, sharding, refusals, deaths."""

import os
import signal
import time

import numpy as np
import pytest

from rocecomm import ps
from rocecomm.errors import MismatchError, PeerDeadError, TimeoutError
from rocecomm.ps.sharding import roles, server_of

SERVER = 0
SMALL = os.environ.get("ROCECOMM_TEST_SIZES") == "small"       # a slow machine


def serve_or(comm, work, servers=(0,), **options):
    """Run ``work(worker)`` on the workers while the servers serve."""
    if comm.rank in servers:
        values = ps.Server(comm, servers, **options).run()
        return {key: value.tolist() for key, value in values.items()}
    with ps.Worker(comm, servers) as worker:
        return work(worker)


def rounds(comm, count, size):
    def work(worker):
        value = np.zeros(size, "f8")
        worker.init("w", value)
        seen = []
        for i in range(count):
            worker.push("w", np.full(size, comm.rank + i, "f8"))
            assert worker.pull("w", value) is value
            assert (value == value[0]).all()
            seen.append(value[0])
        return seen

    return serve_or(comm, work)


@pytest.mark.parametrize("size", [1000, 50_000] if SMALL else [1, 1000, 50_000])
def test_pushes_of_a_round_are_added_and_every_worker_sees_the_same(world, size):
    results = world(4, rounds, 5, size)
    expected = np.cumsum([sum(rank + i for rank in (1, 2, 3)) for i in range(5)]).tolist()
    assert results[1:] == [expected] * 3
    assert results[SERVER] == {"w": [expected[-1]] * size}


def momentum(comm, count):
    def work(worker):
        value = np.array([1.0, -2.0, 3.0])
        worker.init(7, value)
        for i in range(count):
            gradient = value * comm.rank + i
            worker.push_pull(7, gradient, out=value)
        return value.tolist()

    return serve_or(comm, work, optimizer=ps.SGD(0.05, momentum=0.9), aggregate="mean")


def test_sgd_with_momentum_is_the_textbooks(world):
    value, velocity = np.array([1.0, -2.0, 3.0]), np.zeros(3)
    for i in range(6):
        velocity = 0.9 * velocity + ((value * 1 + i) + (value * 2 + i)) / 2
        value = value - 0.05 * velocity
    results = world(3, momentum, 6)
    assert results[1] == results[2]
    np.testing.assert_allclose(results[1], value, rtol=1e-12)


KEYS = [0, 1, 2**31, 2**63 - 1, "weights", "ein Schlüssel", "0"]


def many_keys(comm, servers):
    def work(worker):
        keys = [*KEYS, *range(10, 60)]
        order = np.random.default_rng(comm.rank).permutation(len(keys))
        for i, key in enumerate(keys):
            worker.init(key, np.full(i + 1, float(i)))
        for i in order:
            worker.push(keys[i], np.full(i + 1, 1.0))
        for i in order[::-1]:
            out = worker.pull(keys[i], np.empty(i + 1))
            assert (out == i + comm.size - len(servers)).all(), (keys[i], out)
        return len(keys)

    return serve_or(comm, work, servers)


@pytest.mark.parametrize("servers", [(0, 3)] if SMALL else [(0,), (0, 3), (1, 2, 3)])
def test_keys_are_spread_over_servers(world, servers):
    results = world(5, many_keys, servers)
    held = [results[rank] for rank in servers]
    assert sum(map(len, held)) == len(KEYS) + 50
    assert all(held), "a server holds nothing"


def winner(comm, count):
    def work(worker):
        values = []
        for i in range(count):
            time.sleep(0.001 * ((comm.rank * 7 + i * 3) % 5))
            worker.init(i, np.full(3, comm.rank + 1.0))
            values.append(worker.pull(i, np.empty(3)).tolist())
        worker.init(0, np.full(3, 99.0))
        values.append(worker.pull(0, np.empty(3)).tolist())
        return values

    return serve_or(comm, work)


def test_the_lowest_workers_initial_value_counts(world):
    for values in world(5, winner, 20)[1:]:
        assert values == [[2.0, 2.0, 2.0]] * 21


def refusals(comm):
    def work(worker):
        errors = []

        def refused(kind, call, *args):
            try:
                call(*args)
            except kind as error:
                errors.append(str(error))
            else:
                raise AssertionError(f"{call} took {args}")

        a = np.arange(8, dtype="f4")
        refused(ps.UnknownKeyError, worker.pull, "k", np.empty(8, "f4"))
        refused(ps.UnknownKeyError, worker.push, "k", a)
        worker.init("k", a)
        for bad in (np.zeros(9, "f4"), np.zeros(4, "f8"), np.zeros(8, "i4"),
                    np.zeros((2, 4), "f4")):
            refused(MismatchError, worker.push, "k", bad)
        for bad in (np.zeros(4, "f4"), np.zeros(16, "f4")):
            refused(MismatchError, worker.pull, "k", bad)
        refused(BufferError, worker.push, "k", np.zeros((8, 2), "f4")[:, 0])
        refused(BufferError, worker.pull, "k", bytes(32))
        refused(TypeError, worker.push, 1.5, a)
        refused(TypeError, worker.init, "dates", np.zeros(2, "M8[D]"))
        refused(ValueError, worker.init, "x" * 3000, a)
        out = worker.pull("k", np.empty(8, "f4"))
        assert (out == a).all()                       # nothing of it was stored
        worker.push("k", a)
        assert (worker.pull("k", out) == (comm.size) * a).all()
        worker.init("later", a)
        assert (worker.pull("later", out) == a).all()
        return errors

    return serve_or(comm, work)


def test_refusals_say_what_was_passed_and_what_is_held(world):
    results = world(3, refusals)
    for errors in results[1:]:
        assert "pull of key 'k': no such key" in errors[0]
        assert "float32 of shape (9,)" in errors[2] and "float32 of shape (8,)" in errors[2]
        assert "float64 of shape (4,)" in errors[3]


def differing_init(comm):
    def work(worker):
        time.sleep(0.2 * (comm.rank - 1))
        try:
            worker.init("k", np.zeros(comm.rank, "f4"), timeout=1.0)
        except MismatchError as error:
            return str(error)
        except TimeoutError as error:
            return str(error)

    return serve_or(comm, work)


def test_workers_that_disagree_about_a_key(world):
    results = world(3, differing_init)
    assert "float32 of shape (2,)" in results[2] and "shape (1,)" in results[2]
    assert "worker rank 2 did not init" in results[1]


def buffer_reuse(comm):
    def work(worker):
        g = np.ones(50_000)
        worker.init("k", np.zeros_like(g))
        worker.push("k", g)
        g[:] = 999
        return worker.pull("k", np.empty_like(g)).max()

    return serve_or(comm, work)


def test_the_gradient_buffer_is_free_after_push(world):
    assert world(3, buffer_reuse)[1:] == [2.0, 2.0]


def ahead(comm):
    def work(worker):
        worker.init("k", np.zeros(4))
        if comm.rank == 2:
            time.sleep(0.5)
        for _ in range(3):
            worker.push("k", np.ones(4))            # without a pull in between
        return worker.pull("k", np.empty(4)).tolist()

    return serve_or(comm, work)


def test_a_worker_may_be_ahead(world):
    assert world(3, ahead)[1:] == [[6.0] * 4] * 2


def late(comm):
    def work(worker):
        worker.init("k", np.zeros(4))
        if comm.rank == 2:
            time.sleep(1.5)
            worker.push("k", np.ones(4))
            return worker.pull("k", np.empty(4)).tolist()
        worker.push("k", np.ones(4))
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="worker rank 2 did not push") as caught:
            worker.pull("k", np.empty(4), timeout=0.5)
        assert caught.value.peer == 2 and 0.4 < time.monotonic() - start
        return worker.pull("k", np.empty(4)).tolist()

    return serve_or(comm, work)


def test_a_late_worker_is_named_and_the_others_may_try_again(world):
    assert world(3, late)[1:] == [[2.0] * 4] * 2


def worker_dies(comm):
    def work(worker):
        worker.init("k", np.zeros(4))
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.push("k", np.ones(4))
        start = time.monotonic()
        with pytest.raises(PeerDeadError, match="worker rank 2") as caught:
            worker.pull("k", np.empty(4))
        assert caught.value.peer == 2
        return time.monotonic() - start

    return serve_or(comm, work)


def test_the_death_of_a_worker_reaches_the_others(world, scale):
    results = world(4, worker_dies, mortal=[2])
    assert max(results[1], results[3]) < 6 * scale.time


def server_dies(comm):
    servers = (0, 1)
    if comm.rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    if comm.rank in servers:
        return len(ps.Server(comm, servers).run())
    with ps.Worker(comm, servers) as worker:
        on = {server: next(k for k in range(99) if server_of(k, servers) == server)
              for server in servers}
        for key in on.values():
            worker.init(key, np.full(4, 5.0))
        time.sleep(1.5)
        start = time.monotonic()
        for _ in range(2):
            with pytest.raises(PeerDeadError, match="rank 1"):
                worker.pull(on[1], np.empty(4))
        seconds = time.monotonic() - start
        return seconds, worker.pull(on[0], np.empty(4)).tolist()


def test_the_death_of_a_server_leaves_the_others_keys(world, scale):
    results = world(4, server_dies, mortal=[1])
    assert results[0] == 1
    for seconds, value in results[2:]:
        assert seconds < 6 * scale.time and value == [5.0] * 4


@pytest.mark.parametrize("size, servers, workers, expected", [
    (4, (0,), None, ((0,), (1, 2, 3))), (4, (3, 1), None, ((3, 1), (0, 2))),
    (1, (0,), None, ((0,), (0,))), (3, (0,), (2, 1), ((0,), (1, 2)))])
def test_roles(size, servers, workers, expected):
    assert roles(size, servers, workers) == expected


@pytest.mark.parametrize("servers, workers", [((), None), ((0, 0), None), ((4,), None),
                                              ((0,), (9,)), ((-1,), None), ((0,), ())])
def test_roles_that_make_no_sense(servers, workers):
    with pytest.raises(ValueError, match="must be different ranks"):
        roles(4, servers, workers)


def test_sharding_is_stable_and_even():
    servers = (3, 5, 9)
    counts = {s: 0 for s in servers}
    for key in range(3000):
        counts[server_of(key, servers)] += 1
    assert min(counts.values()) > 800
    assert server_of("0", servers) == server_of("0", servers)
    assert [server_of(k, servers) for k in (0, "weights", 2**63 - 1)] == [3, 9, 3]


@pytest.mark.parametrize("arguments", [{"lr": 0}, {"lr": 1, "momentum": 1},
                                       {"lr": 1, "weight_decay": -1}, {"lr": float("nan")}])
def test_sgd_arguments(arguments):
    with pytest.raises(ValueError, match="SGD needs"):
        ps.SGD(**arguments)
