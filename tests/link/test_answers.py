"""A receiver that has everything may leave: its answers need neither its CPU nor the sender's."""

import time
from pathlib import Path

import numpy as np
import pytest


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def burst(comm, folder, count, leaves):
    """Rank 0 announces many messages and computes while rank 1 receives them all; then rank 1
    computes while rank 0 waits. The folder tells each where the other is: no call does."""
    received, waited = Path(folder, "received"), Path(folder, "waited")
    size = comm.config.eager_limit + 100
    if comm.rank == 0:
        data = np.arange(count * size, dtype="u4").view("u1")[:count * size].reshape(count, size)
        requests = [comm.isend(data[i], 1, tag=i) for i in range(count)]
        until(lambda: comm.progress() >= 0 and comm._engine.peers()[1]["announced"] == count)
        until(received.exists)
        counts = comm.wait_all(requests, timeout=10)
        waited.touch()
        return counts == [size] * count
    into = np.zeros((count, size), "u1")
    expected = np.arange(count * size, dtype="u4").view("u1")[:count * size].reshape(count, size)
    until(lambda: comm.progress() >= 0 and comm._engine.peers()[0]["unexpected"] == count)
    requests = [comm.irecv(into[i], 0, tag=i) for i in reversed(range(count))]
    comm.wait_all(requests)
    if leaves:
        comm.close()
    received.touch()
    until(waited.exists)
    return bool((into == expected).all())


@pytest.mark.parametrize("leaves", [False, True])
def test_more_answers_than_credits(world, scale, tmp_path, leaves):
    """Far more than the 16 short messages for which there are credits, and than the send queue
    holds. With `leaves` the receiver has closed before the sender looks."""
    assert world(2, burst, str(tmp_path), scale.rounds(300, 60), leaves) == [True, True]
