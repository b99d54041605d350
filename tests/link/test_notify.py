"""`iwait_notify`: waiting for notifications as a Request (D8)."""

import asyncio

import numpy as np
import pytest

import rocecomm
from rocecomm import RocecommError, TimeoutError


def two_ranks(comm):
    """Rank 1 writes and notifies, rank 0 waits for it in every way."""
    note = bytearray(64)
    if comm.rank == 1:
        comm.recv(note, 0)
        for value in range(8):
            comm.write(b"x", bytes(note), notify=value)
            if value == 1:
                comm.recv(note[:0], 0, tag=1)           # the first two have been taken
        comm.recv(note[:0], 0, tag=2)
        return
    with comm.register(np.zeros(8, "u1")) as region:
        first = comm.iwait_notify(1, 2)
        with pytest.raises(TimeoutError, match="iwait_notify with rank 1"):
            first.wait(0)
        comm.send(region.descriptor(), 1)
        assert first.wait() == [0, 1] and first.done and first.wait(0) == [0, 1]
        given_up, dropped = comm.iwait_notify(1), comm.iwait_notify(rocecomm.ANY_SOURCE)
        assert given_up.cancel() and not given_up.cancel()
        with pytest.raises(RocecommError, match="iwait_notify: the request was cancelled"):
            given_up.wait()
        del dropped
        comm.send(b"", 1, tag=1)

        async def awaited():
            assert await comm.iwait_notify(1) == [2]
            assert await asyncio.gather(comm.iwait_notify(1, 2), comm.iwait_notify(1)) == [[3, 4], [5]]

        asyncio.run(awaited())
        both = [comm.iwait_notify(rocecomm.ANY_SOURCE, with_source=True), comm.iwait_notify(1)]
        comm.wait_all(both)
        assert [request.wait() for request in both] == [[(1, 6)], [7]]
        for bad in (0, -1, 65537):
            with pytest.raises(ValueError, match="iwait_notify: count"):
                comm.iwait_notify(1, bad)
        comm.send(b"", 1, tag=2)


def test_waiting_as_a_request(world):
    world(2, two_ranks)
