"""Two connected queue pairs, and small helpers that all verbs tests use."""

import os
import time

import numpy as np

from rocecomm import verbs as v
from rocecomm.errors import VerbsError

LOCAL = v.IBV_ACCESS_LOCAL_WRITE
WRITE = v.IBV_ACCESS_REMOTE_WRITE
READ = v.IBV_ACCESS_REMOTE_READ
ATOMIC = v.IBV_ACCESS_REMOTE_ATOMIC
ALL = LOCAL | WRITE | READ | ATOMIC
SMALL = os.environ.get("ROCECOMM_TEST_SIZES") == "small"    # starting a process takes long
SANITIZED = "ROCECOMM_TEST_SANITIZER" in os.environ
WITHIN = 6.0        # seconds that a completion may take, before the device's factor


def gid_of(ctx):
    """The GID to use: RoCE v2 of an IPv4 address if there is one."""
    table = ctx.query_gid_table()
    table.sort(key=lambda e: (e.gid_type != v.IBV_GID_TYPE_ROCE_V2, e.address.ipv4_mapped is None,
                              e.index))
    return table[0]


class End:
    """One side: context, PD, CQs and a queue pair in RESET."""

    def __init__(self, device, qp_type=v.IBV_QPT_RC, *, depth=64, channel=False, srq=None, ctx=None,
                 **caps):
        self.ctx = v.open_device(device) if ctx is None else ctx
        self.pd = v.PD(self.ctx)
        self.channel = v.CompChannel(self.ctx) if channel else None
        self.send_cq = v.CQ(self.ctx, depth, self.channel)
        self.recv_cq = v.CQ(self.ctx, depth, self.channel)
        self.srq = v.SRQ(self.pd, **srq) if srq else None
        self.qp = v.QP(self.pd, self.send_cq, self.recv_cq, qp_type, srq=self.srq, **caps)
        self.mrs = []
        self.gid = gid_of(self.ctx)
        self.mtu = self.ctx.query_port().active_mtu

    def address(self):
        return self.qp.qp_num, self.gid.gid

    def connect(self, address, *, access=ALL, **options):
        """RESET to RTS, towards an address() of the other side."""
        number, gid = address
        rtr = {k: options.pop(k) for k in ("max_dest_rd_atomic", "min_rnr_timer", "path_mtu")
               if k in options}
        rtr.setdefault("path_mtu", self.mtu)
        self.qp.to_init(qp_access_flags=access)
        self.qp.to_rtr(number, v.AHAttr(dgid=gid, sgid_index=self.gid.index), **rtr)
        self.qp.to_rts(**options)

    def mr(self, obj, access=ALL):
        """A registration that lives as long as this side: a post does not keep it."""
        self.mrs.append(v.MR(self.pd, obj, access))
        return self.mrs[-1]

    def close(self):
        self.ctx.close()


class Pair:
    """Two sides in this process; with ``with`` both are closed."""

    def __init__(self, device, qp_type=v.IBV_QPT_RC, *, access=ALL, options=None, **kw):
        self.a, self.b = End(device, qp_type, **kw), End(device, qp_type, **kw)
        self.a.connect(self.b.address(), access=access, **(options or {}))
        self.b.connect(self.a.address(), access=access, **(options or {}))

    def __enter__(self):
        return self.a, self.b

    def __exit__(self, *exc):
        self.a.close()
        self.b.close()


def drain(cq, n, factor=1.0, poke=()):
    """Exactly `n` completions of a CQ; polls `poke` meanwhile (a software device may need
    a side's calls to move on)."""
    got = []
    end = time.monotonic() + WITHIN * factor
    while len(got) < n:
        got += cq.poll(n - len(got))
        for other in poke:
            assert not other.poll(1), "a completion that nobody expected"
        assert time.monotonic() < end, f"{len(got)} of {n} completions came: {got}"
    assert not cq.poll(1)
    return got


def quiet(*cqs, seconds=0.05):
    """Asserts that nothing completes for a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for cq in cqs:
            found = cq.poll(4)
            assert not found, found


def status(cq, factor=1.0):
    return drain(cq, 1, factor)[0].status


def pattern(nbytes, seed=0):
    """Bytes that differ from cell to cell and from seed to seed."""
    i = np.arange(nbytes, dtype=np.uint64) + np.uint64(seed * 1000003)
    return ((i * np.uint64(2654435761)) >> np.uint64(24)).astype(np.uint8)


def supported(make):
    """make(), or a skip where the device says that it has no such thing."""
    import errno

    import pytest
    try:
        return make()
    except VerbsError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTSUP):
            pytest.skip(f"not supported: {error}")
        raise
