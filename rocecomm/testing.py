"""pytest fixtures for programs that use RDMA: a device without hardware, and faults on request.

In the ``conftest.py`` at the top of your tests::

    pytest_plugins = ["rocecomm.testing"]

Then a test asks for what it needs::

    def test_survives_a_dead_peer(soft_pair, soft_faults):
        soft_faults("drop", op="send", times=1)
        soft_pair.a.qp.post_send(verbs.IBV_WR_SEND, soft_pair.a.mr)
        (wc,) = soft_pair.a.wait()
        assert wc.status == verbs.IBV_WC_RETRY_EXC_ERR

* ``soft_dir``: a place of its own for the soft devices of this test and of the processes that
  it starts, apart from all others on the machine.
* ``soft_device``: soft0, opened there.
* ``soft_pair``, ``make_soft_pair``: two connected queue pairs, see :class:`Pair`.
* ``soft_faults``: ``inject()`` whose rules end with the test, see :class:`Faults`.

After each test everything is closed and ``/dev/shm`` is as it was. This module alone of
rocecomm imports pytest, and nothing of rocecomm imports this module.
"""

import contextlib
import os
import shutil
import tempfile
import time

import numpy as np
import pytest

from rocecomm import verbs
from rocecomm.verbs import soft

__all__ = ["End", "Faults", "Pair", "make_soft_pair", "soft_device", "soft_dir", "soft_faults",
           "soft_pair"]

ALL_ACCESS = (verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_WRITE
              | verbs.IBV_ACCESS_REMOTE_READ | verbs.IBV_ACCESS_REMOTE_ATOMIC)


class End:
    """One end of a :class:`Pair`: ``ctx pd channel cq qp``, and ``data``, a numpy array of
    bytes that is registered with all rights as ``mr``."""

    def __init__(self, device="soft0", qp_type=verbs.IBV_QPT_RC, *, nbytes=4096, depth=64, **caps):
        self.ctx = verbs.open_device(device)
        try:
            self.pd = verbs.PD(self.ctx)
            self.channel = verbs.CompChannel(self.ctx)
            self.cq = verbs.CQ(self.ctx, 2 * depth, self.channel)
            caps = {"max_send_wr": depth, "max_recv_wr": depth, **caps}
            self.qp = verbs.QP(self.pd, self.cq, qp_type=qp_type, **caps)
            self.data = np.zeros(nbytes, np.uint8)
            self.mr = verbs.MR(self.pd, self.data, ALL_ACCESS)
        except BaseException:
            self.ctx.close()
            raise

    def connect(self, other, *, timeout=14, retry_cnt=7, rnr_retry=7, min_rnr_timer=12):
        """RESET to RTS towards another End: transport timeout 4.096 us * 2^timeout,
        otherwise the attributes of ``ibv_modify_qp``."""
        gid = other.ctx.query_gid(1, 1)
        self.qp.to_init(qp_access_flags=ALL_ACCESS)
        self.qp.to_rtr(other.qp.qp_num, verbs.AHAttr(dgid=gid.gid, sgid_index=1),
                       min_rnr_timer=min_rnr_timer)
        self.qp.to_rts(timeout=timeout, retry_cnt=retry_cnt, rnr_retry=rnr_retry)

    def wait(self, n=1, timeout=10.0):
        """The next `n` completions of this end (list of WC); AssertionError after `timeout` seconds."""
        got, end = [], time.monotonic() + timeout
        while len(got) < n:
            got += self.cq.poll(n - len(got))
            assert time.monotonic() < end, f"{len(got)} of {n} completions came in {timeout} s: {got}"
        return got

    def close(self):
        """Closes the device and all that was made from it."""
        self.ctx.close()


class Pair:
    """Two connected ends, ``a`` and ``b``, each with a context of its own in this process."""

    def __init__(self, qp_type=verbs.IBV_QPT_RC, *, device="soft0", nbytes=4096, depth=64, caps=None,
                 **options):
        with contextlib.ExitStack() as undo:
            self.a = End(device, qp_type, nbytes=nbytes, depth=depth, **(caps or {}))
            undo.callback(self.a.close)
            self.b = End(device, qp_type, nbytes=nbytes, depth=depth, **(caps or {}))
            undo.callback(self.b.close)
            self.a.connect(self.b, **options)
            self.b.connect(self.a, **options)
            undo.pop_all()

    def close(self):
        """Closes both ends."""
        self.a.close()
        self.b.close()


class Faults:
    """Call it as ``rocecomm.verbs.soft.inject``: the Fault that it returns ends with the test."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self._active = []

    def __call__(self, kind, **settings):
        fault = soft.inject(kind, **settings)
        self._active.append(fault)
        return fault

    def environment(self, rules):
        """Rules for the programs that this test starts from here on (ROCECOMM_SOFT_FAULT),
        and for this process once it opens its first device."""
        self._monkeypatch.setenv("ROCECOMM_SOFT_FAULT", rules)

    def clear(self):
        """Takes away all rules that were put in force here."""
        while self._active:
            self._active.pop().remove()


@pytest.fixture
def soft_dir(monkeypatch):
    """Path of a new directory in which the soft devices of this test meet, and nobody else.

    It holds for this process as long as it has no soft device open yet, and for every process
    started from here on.
    """
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="rocecomm-fixture-", dir=where)
    monkeypatch.setenv("ROCECOMM_SOFT_DIR", path)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def soft_device(soft_dir):
    """soft0, opened in ``soft_dir``: ``rocecomm.verbs.Context``."""
    with verbs.open_device("soft0") as ctx:
        yield ctx


@pytest.fixture
def make_soft_pair(soft_dir):
    """``make_soft_pair(qp_type, nbytes=..., timeout=..., ...)``: a Pair, closed after the test."""
    made = []

    def make(*args, **options):
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def soft_pair(make_soft_pair):
    """Two connected RC queue pairs: a :class:`Pair` with the usual options."""
    return make_soft_pair()


@pytest.fixture
def soft_faults(monkeypatch):
    """Faults on request that end with the test: :class:`Faults`."""
    faults = Faults(monkeypatch)
    yield faults
    faults.clear()
