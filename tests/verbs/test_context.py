"""Devices: listing, opening, refusing with a reason (case G1), and what they say of themselves."""

import os
import subprocess
import sys

import numpy as np
import pytest
from verbs.pair import gid_of

from rocecomm import verbs as v
from rocecomm.errors import ClosedError, DeviceNotFoundError, VerbsError
from rocecomm.verbs import device as devmod


@pytest.fixture
def ctx(device):
    with v.open_device(device) as c:
        yield c


def test_listed_and_opened(device):
    found = [d for d in v.devices() if d.name == device]
    assert len(found) == 1 and found[0] == found[0] and device in repr(found[0])
    assert found[0].transport_type == v.IBV_TRANSPORT_IB and found[0].node_type == v.IBV_NODE_CA
    with found[0].open() as c:
        assert c.name == device and not c.closed and c.num_comp_vectors >= 1
    assert c.closed


def test_query_device(ctx):
    a = ctx.query_device()
    assert a.max_qp > 0 and a.max_cqe > 0 and a.max_mr > 0 and a.max_sge >= 1 and a.phys_port_cnt >= 1
    assert a.max_mr_size >= 1 << 30 and a.max_qp_wr >= 64 and a.max_qp_rd_atom >= 1
    assert a.atomic_cap != v.IBV_ATOMIC_NONE and len(a.node_guid) == 19


def test_query_port(ctx):
    p = ctx.query_port(1)
    assert p.state == v.IBV_PORT_ACTIVE and p.link_layer == v.IBV_LINK_LAYER_ETHERNET
    assert v.IBV_MTU_256 <= p.active_mtu <= p.max_mtu and p.max_msg_sz >= 1 << 20
    assert p.gid_tbl_len >= 1 and p.pkey_tbl_len >= 1
    with pytest.raises(VerbsError) as e:
        ctx.query_port(99)
    assert e.value.verb == "ibv_query_port" and e.value.device == ctx.name and e.value.errno > 0
    with pytest.raises(ValueError):
        ctx.query_port(256)


def test_gids(ctx):
    table = ctx.query_gid_table()
    assert table == [e for e in (ctx.query_gid(1, i) for i in range(len(table))) if any(e.gid)]
    best = gid_of(ctx)
    assert best.gid_type == v.IBV_GID_TYPE_ROCE_V2 and len(best.gid) == 16
    assert best.address.ipv4_mapped is not None and "ROCE_V2" in str(best)
    size = ctx.query_port().gid_tbl_len
    assert not any(ctx.query_gid(1, size - 1).gid)          # an empty entry is zero, no error
    with pytest.raises(VerbsError):
        ctx.query_gid(1, size + 7)


def test_pkey(ctx):
    assert ctx.query_pkey(1, 0) == 0xFFFF
    with pytest.raises(VerbsError):
        ctx.query_pkey(1, 30000)


def test_no_event_is_no_wait(ctx):
    assert ctx.get_async_event(0) is None and ctx.get_async_event(0.05) is None
    assert ctx.async_fd > 0
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError):
            ctx.get_async_event(bad)
    for bad in ("1", True):
        with pytest.raises(TypeError):
            ctx.get_async_event(bad)


def test_memory(ctx):
    m = ctx.alloc(100000)
    a = np.frombuffer(m, "u1")
    assert len(a) == len(m) == m.nbytes == 100000 and not a.any() and m.address % 4096 == 0
    a[:] = 7
    with pytest.raises(BufferError, match="still used"):
        m.close()
    pd = v.PD(ctx)
    mr = v.MR(pd, a)
    assert mr.addr == m.address
    with pytest.raises(ValueError, match="0 bytes"):
        ctx.alloc(0)


def test_memory_outlives_its_context(device):
    c = v.open_device(device)
    a = np.frombuffer(c.alloc(8192), "u8")
    c.close()
    a[:] = 5                        # would crash if closing had unmapped it
    assert a.sum() == 5 * 1024
    del a


def test_use_after_close(device):
    c = v.open_device(device)
    c.close()
    c.close()
    for act in (c.query_device, c.query_port, c.query_gid_table, lambda: c.async_fd,
                lambda: c.get_async_event(0), lambda: v.PD(c), lambda: v.CQ(c, 4),
                lambda: v.CompChannel(c), lambda: c.alloc(10), c.__enter__):
        with pytest.raises(ClosedError, match="this Context is closed"):
            act()


# --------------------------------------------------------------------------- case G1
def test_unknown_name_lists_what_exists(device):
    with pytest.raises(DeviceNotFoundError, match=f"'mlx5_77' cannot be used.*exist here: .*{device}") as e:
        v.open_device("mlx5_77")
    assert e.value.device == "mlx5_77"
    with pytest.raises(TypeError):
        v.open_device(None)


def run(code, **env):
    full = {**os.environ, **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env=full)


def test_without_libibverbs(device):
    """(a) no libibverbs.so.1: import and listing work, asking says what to install."""
    code = f"""
from rocecomm.verbs import provider
real = provider.library_path
provider.library_path = lambda n: "libibverbs-absent.so.1" if n == "libibverbs" else real(n)
from rocecomm import verbs as v
names = [d.name for d in v.devices()]
try:
    v.open_device("mlx5_0")
except LookupError as e:
    assert "libibverbs-absent.so.1 cannot be loaded" in str(e) and "apt-get" in str(e), e
else:
    raise SystemExit("opened?")
if {device!r} in names:
    v.open_device({device!r}).close()
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_softnic(device):
    done = run("from rocecomm import verbs as v\n"
               "try: v.open_device('soft0')\n"
               "except LookupError as e: print(e)\n"
               "print([d.name for d in v.devices() if d.provider == 'softnic'])",
               ROCECOMM_SOFTNIC="/nonexistent/libsoftnic.so")
    assert done.returncode == 0 and done.stderr == ""
    assert "/nonexistent/libsoftnic.so cannot be loaded" in done.stdout and "[]" in done.stdout


def test_library_that_is_no_verbs_library():
    done = run("from rocecomm import verbs as v\n"
               "try: v.open_device('soft0')\n"
               "except LookupError as e: print(e)", ROCECOMM_SOFTNIC="libc.so.6")
    assert done.returncode == 0 and "has no ibv_get_device_list" in done.stdout


@pytest.fixture
def fake_system(tmp_path, monkeypatch):
    """A kernel device in a made-up sysfs that no library lists."""
    sysfs, nodes = tmp_path / "sys" / "infiniband", tmp_path / "dev"
    (sysfs / "mlx5_9" / "device" / "infiniband_verbs" / "uverbs9").mkdir(parents=True)
    monkeypatch.setattr(devmod, "SYSFS", str(sysfs))
    monkeypatch.setattr(devmod, "NODES", str(nodes))
    return nodes


def test_no_device_nodes(fake_system):
    """(b) the kernel knows the device, but /dev/infiniband is missing."""
    with pytest.raises(DeviceNotFoundError, match="does not exist; load the module ib_uverbs"):
        v.open_device("mlx5_9")


def test_node_missing(fake_system):
    fake_system.mkdir()
    with pytest.raises(DeviceNotFoundError, match="its node .*uverbs9 does not exist"):
        v.open_device("mlx5_9")


def test_no_permission(fake_system, monkeypatch):
    """(c) a node that this user may not open (root may open all, so access() is told no)."""
    fake_system.mkdir()
    (fake_system / "uverbs9").touch(mode=0o000)
    monkeypatch.setattr(devmod.os, "access", lambda path, mode: False)
    with pytest.raises(DeviceNotFoundError, match="no permission to open its node .*mode 0o0"):
        v.open_device("mlx5_9")


def test_no_driver(fake_system):
    fake_system.mkdir()
    (fake_system / "uverbs9").touch()
    with pytest.raises(DeviceNotFoundError, match="no driver for it|no RDMA support loaded"):
        v.open_device("mlx5_9")


def test_open_that_fails_names_the_reason(device, monkeypatch):
    listed = [d for d in v.devices() if d.name == device][0]
    gone = v.Device("nosuch0", listed.provider, listed.node_type, listed.transport_type)
    with pytest.raises(DeviceNotFoundError, match="gone away"):
        gone.open()
