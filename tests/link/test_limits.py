"""Limits of devices: message length, MTU, outstanding reads, region size (C2, G7, D7, B9).

The variables ROCECOMM_SOFT_* shape soft0; other devices ignore them and must pass as well.
"""

import numpy as np
import pytest

from rocecomm import VerbsError
from rocecomm.verbs.device import open_device


def exchange(comm, sizes):
    other = 1 - comm.rank
    for n in sizes:
        out = ((np.arange(n, dtype="u8") * 2654435761 >> 24) + comm.rank & 255).astype("u1")
        got = np.full(n + 3, 7, "u1")
        assert comm.sendrecv(out, other, got, other) == n
        assert (got[:n] == out - np.uint8(comm.rank) + np.uint8(other)).all(), n
        assert (got[n:] == 7).all()
    agreement = comm._engine.describe()[other]
    with open_device(comm.device) as context:
        own_mtu = 128 << int(context.query_port().active_mtu)
    return agreement.mtu, agreement.reads, agreement.max_message, own_mtu


@pytest.mark.parametrize("limited", [(0, 1), (1,)])
def test_messages_longer_than_the_device_sends_at_once(world, limited):
    short = {r: {"ROCECOMM_SOFT_MAX_MSG": "4096"} for r in limited}
    a, b = world(2, exchange, [0, 3991, 3992, 3993, 4095, 4096, 4097, 8191, 12289, 100000],
                 env_by_rank=short)
    assert a[2] == b[2]


def test_the_smaller_mtu_is_agreed(world):
    a, b = world(2, exchange, [1, 1024, 1025, 4097, 1 << 20],
                 env_by_rank={1: {"ROCECOMM_SOFT_MTU": "1024"}})
    assert a[0] == b[0] == min(a[3], b[3])
    c, d = world(2, exchange, [1, 5000], env={"ROCECOMM_IB_MTU": "512"})
    assert c[0] == d[0] == 512


def too_large_a_region(comm):
    other = 1 - comm.rank
    data = np.zeros(3 << 20, "u1")
    if comm.rank == 0:
        try:
            comm.send(data, 1)
        except VerbsError as error:
            assert error.verb == "ibv_reg_mr" and str(data.nbytes) in str(error)
            comm.send(b"no", 1)
    else:
        got = np.ones(3 << 20, "u1")
        n = comm.recv(got, 0)
        assert n == 2 or not got.any()
    exchange(comm, [8, 60000, 1 << 19])
    assert other in (0, 1)


def test_a_buffer_beyond_the_region_limit(world):
    world(2, too_large_a_region, env={"ROCECOMM_SOFT_MAX_MR": str(1 << 20)})
