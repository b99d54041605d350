"""rocecomm's queue pair against one of pyverbs, rdma-core's own Python bindings.

Every operation in both directions. pyverbs lives in Debian's python3-pyverbs and runs
under the system's Python in a process of its own; on soft0 it gets the library by
LD_PRELOAD.
"""

import ipaddress
import json
import os
import select
import subprocess
from pathlib import Path

import numpy as np
import pytest
from verbs.pair import End, drain, pattern

from rocecomm import verbs as v
from rocecomm.verbs import provider

PYTHON = "/usr/bin/python3"
SIZE = 1 << 16


class Remote:
    """The process with pyverbs; a method call is one order and its answer."""

    def __init__(self, env, limit):
        self.limit = limit
        script = Path(__file__).with_name("pyverbs_peer.py")
        self.proc = subprocess.Popen([PYTHON, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     text=True, bufsize=1, env=env)

    def __call__(self, act, **order):
        self.start(act, **order)
        return self.answer()

    def start(self, act, **order):
        self.proc.stdin.write(json.dumps({"act": act, **order}) + "\n")
        self.proc.stdin.flush()

    def answer(self):
        assert select.select([self.proc.stdout], [], [], self.limit)[0], "pyverbs does not answer"
        line = self.proc.stdout.readline()
        assert line, f"pyverbs ended with {self.proc.wait(5)}"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer

    def close(self):
        self.proc.stdin.close()
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        self.proc.stdout.close()


@pytest.fixture(scope="module")
def environment(device):
    env = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        env.pop(name, None)
    if [d.provider for d in v.devices() if d.name == device] == ["softnic"]:
        env["LD_PRELOAD"] = f"{env.get('LD_PRELOAD', '')} {provider.library_path('softnic')}".strip()
    probe = subprocess.run([PYTHON, "-c", "import pyverbs.device"], capture_output=True, env=env)
    if probe.returncode:
        pytest.skip("pyverbs is not installed (Debian: python3-pyverbs)")
    return env


@pytest.fixture
def joined(device, scale, environment):
    """(our End, our MR, our array, the remote, its address and key), connected."""
    ours = End(device)
    data = np.zeros(SIZE, "u1")
    mr = ours.mr(data)
    remote = Remote(environment, 30 * scale.time)
    try:
        hello = remote("open", device=device, gid_index=ours.gid.index, nbytes=SIZE)
        gid = ipaddress.IPv6Address(ours.gid.gid).exploded
        remote("connect", qpn=ours.qp.qp_num, gid=gid)
        ours.connect((hello["qpn"], ipaddress.IPv6Address(hello["gid"]).packed), path_mtu=v.IBV_MTU_1024)
        yield ours, mr, data, remote, hello
    finally:
        remote.close()
        ours.close()


def text(n, seed=0):
    return (pattern(n, seed) % 26 + 97).tobytes().decode()


@pytest.mark.parametrize("n", [1, 1024, 1025, 50000])
def test_we_send(joined, scale, n):
    ours, mr, data, remote, _ = joined
    data[:n] = np.frombuffer(text(n).encode(), "u1")
    remote("recv", length=SIZE, offset=0, wr_id=8)
    ours.qp.post_send(v.IBV_WR_SEND_WITH_IMM, mr.sge(0, n), imm_data=0x89ABCDEF)
    drain(ours.send_cq, 1, scale.time)[0].check()
    (wc,) = remote("wait", n=1, seconds=10 * scale.time)["wcs"]
    assert wc == {"wr_id": 8, "status": 0, "opcode": int(v.IBV_WC_RECV), "byte_len": n, "imm": 0x89ABCDEF}
    assert bytes.fromhex(remote("show", length=n, offset=0)["hex"]) == text(n).encode()


@pytest.mark.parametrize("n", [1, 1024, 1025, 50000])
def test_they_send(joined, scale, n):
    ours, mr, data, remote, _ = joined
    ours.qp.post_recv(mr, wr_id=3)
    remote("fill", text=text(n, 1), offset=0)
    remote("send", op="IBV_WR_SEND_WITH_IMM", length=n, offset=0, wr_id=9, imm=0xFFFFFFFE)
    wc = drain(ours.recv_cq, 1, scale.time)[0].check()
    assert (wc.wr_id, wc.byte_len, wc.imm_data) == (3, n, 0xFFFFFFFE)
    assert data[:n].tobytes() == text(n, 1).encode() and not data[n:].any()
    assert remote("wait", n=1, seconds=10 * scale.time)["wcs"][0]["status"] == 0


def test_we_write_and_read(joined, scale):
    ours, mr, data, remote, peer = joined
    n = 30000
    data[:n] = np.frombuffer(text(n, 2).encode(), "u1")
    ours.qp.post_send(v.IBV_WR_RDMA_WRITE, mr.sge(0, n), remote_addr=peer["addr"] + 100, rkey=peer["rkey"])
    drain(ours.send_cq, 1, scale.time)[0].check()
    assert bytes.fromhex(remote("show", length=n, offset=100)["hex"]) == text(n, 2).encode()
    remote("fill", text=text(n, 3), offset=0)
    ours.qp.post_send(v.IBV_WR_RDMA_READ, mr.sge(500, n), remote_addr=peer["addr"], rkey=peer["rkey"])
    drain(ours.send_cq, 1, scale.time)[0].check()
    assert data[500:500 + n].tobytes() == text(n, 3).encode()
    remote("recv", length=8, offset=0, wr_id=5)
    ours.qp.post_send(v.IBV_WR_RDMA_WRITE_WITH_IMM, mr.sge(0, 64), imm_data=77, remote_addr=peer["addr"],
                      rkey=peer["rkey"])
    drain(ours.send_cq, 1, scale.time)[0].check()
    (wc,) = remote("wait", n=1, seconds=10 * scale.time)["wcs"]
    assert wc == {"wr_id": 5, "status": 0, "opcode": int(v.IBV_WC_RECV_RDMA_WITH_IMM), "byte_len": 64,
                  "imm": 77}


def test_they_write_and_read(joined, scale):
    ours, mr, data, remote, _ = joined
    n = 30000
    remote("fill", text=text(n, 4), offset=0)
    remote("send", op="IBV_WR_RDMA_WRITE", length=n, offset=0, wr_id=1, raddr=mr.addr + 7, rkey=mr.rkey)
    assert remote("wait", n=1, seconds=10 * scale.time)["wcs"][0]["status"] == 0
    assert data[7:7 + n].tobytes() == text(n, 4).encode() and not data[:7].any()
    data[:n] = np.frombuffer(text(n, 5).encode(), "u1")
    remote("send", op="IBV_WR_RDMA_READ", length=n, offset=200, wr_id=2, raddr=mr.addr, rkey=mr.rkey)
    assert remote("wait", n=1, seconds=10 * scale.time)["wcs"][0]["status"] == 0
    assert bytes.fromhex(remote("show", length=n, offset=200)["hex"]) == text(n, 5).encode()


def test_atomics_both_ways(joined, scale):
    ours, mr, data, remote, peer = joined
    words = data.view("u8")
    remote("fill", text="\x05" + "\0" * 7, offset=0)
    for op, kw, expected in ((v.IBV_WR_ATOMIC_FETCH_AND_ADD, dict(compare_add=10), 5),
                             (v.IBV_WR_ATOMIC_CMP_AND_SWP, dict(compare_add=15, swap=99), 15),
                             (v.IBV_WR_ATOMIC_CMP_AND_SWP, dict(compare_add=15, swap=1), 99)):
        ours.qp.post_send(op, mr.sge(8, 8), remote_addr=peer["addr"], rkey=peer["rkey"], **kw)
        drain(ours.send_cq, 1, scale.time)[0].check()
        assert words[1] == expected
    words[4] = 2**64 - 1
    for op, kw, expected in (("IBV_WR_ATOMIC_FETCH_AND_ADD", dict(compare_add=4), 2**64 - 1),
                             ("IBV_WR_ATOMIC_CMP_AND_SWP", dict(compare_add=3, swap=42), 3)):
        remote("send", op=op, length=8, offset=16, wr_id=1, raddr=mr.addr + 32, rkey=mr.rkey, **kw)
        assert remote("wait", n=1, seconds=10 * scale.time)["wcs"][0]["status"] == 0
        assert int.from_bytes(bytes.fromhex(remote("show", length=8, offset=16)["hex"]), "little") == expected
    assert words[4] == 42


def test_errors_are_seen_alike(joined, scale):
    """A wrong key of theirs, then flushing: the same statuses as between our own."""
    ours, mr, data, remote, _ = joined
    ours.qp.post_recv(mr, wr_id=6)
    remote("send", op="IBV_WR_RDMA_WRITE", length=8, offset=0, wr_id=1, raddr=mr.addr, rkey=mr.rkey ^ 0x55500)
    assert remote("wait", n=1, seconds=10 * scale.time)["wcs"][0]["status"] == v.IBV_WC_REM_ACCESS_ERR
    wc = drain(ours.recv_cq, 1, scale.time)[0]
    assert (wc.wr_id, wc.status) == (6, v.IBV_WC_WR_FLUSH_ERR) and not data.any()


def test_the_peer_dies(device, scale, environment):
    ours = End(device)
    mr = ours.mr(np.zeros(64, "u1"))
    remote = Remote(environment, 30 * scale.time)
    try:
        hello = remote("open", device=device, gid_index=ours.gid.index, nbytes=4096)
        remote("connect", qpn=ours.qp.qp_num, gid=ipaddress.IPv6Address(ours.gid.gid).exploded)
        ours.connect((hello["qpn"], ipaddress.IPv6Address(hello["gid"]).packed), timeout=10, retry_cnt=3)
        remote.proc.kill()
        remote.proc.wait(20)
        ours.qp.post_send(v.IBV_WR_RDMA_WRITE, mr, remote_addr=hello["addr"], rkey=hello["rkey"])
        assert drain(ours.send_cq, 1, scale.time)[0].status == v.IBV_WC_RETRY_EXC_ERR
    finally:
        remote.close()
        ours.close()
