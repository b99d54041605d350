"""`rocecomm pingpong` with itself and with the C program of rdma-core, both ways round."""

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
from verbs.pair import SMALL, gid_of

from rocecomm import pingpong
from rocecomm.errors import RocecommError
from rocecomm.verbs import devices, provider

OURS = [sys.executable, "-m", "rocecomm.pingpong"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listening(port, proc, limit):
    """Waits until somebody listens on the TCP port, without connecting to it."""
    want = f":{port:04X}"
    end = time.monotonic() + limit
    while time.monotonic() < end and proc.poll() is None:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(table) as f:
                for line in f.readlines()[1:]:
                    fields = line.split()
                    if fields[1].endswith(want) and fields[3] == "0A":
                        return
        time.sleep(0.02)
    raise AssertionError(f"nobody listens on {port}: {proc.poll()}")


def both(server, client, port, scale, env=None):
    """Runs a server and a client; returns what each printed; both must end well."""
    full = {**os.environ, **(env or {})}
    s = subprocess.Popen([*server, "-p", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, env=full)
    try:
        listening(port, s, 20 * scale.time)
        c = subprocess.run([*client, "-p", str(port), "127.0.0.1"], capture_output=True, text=True,
                           timeout=40 * scale.time, env=full)
        out, _ = s.communicate(timeout=20 * scale.time)
    finally:
        if s.poll() is None:
            s.kill()
            s.wait()
    assert s.returncode == 0 and c.returncode == 0, (out, c.stdout, c.stderr)
    return out, c.stdout


@pytest.fixture
def theirs(device):
    """Command, environment and GID index for ibv_rc_pingpong on the device under test."""
    program = shutil.which("ibv_rc_pingpong")
    if program is None:
        pytest.skip("ibv_rc_pingpong is not installed (Debian: ibverbs-utils)")
    found = [d for d in devices() if d.name == device][0]
    env = {}
    if found.provider == "softnic":     # after a sanitizer's library, if there is one
        env["LD_PRELOAD"] = f"{os.environ.get('LD_PRELOAD', '')} {provider.library_path('softnic')}".strip()
    with found.open() as ctx:
        index = gid_of(ctx).index
    return [program, "-d", device, "-g", str(index)], env


FLAGS = [["-s", "65537", "-m", "4096"], ["-e", "-r", "3"], [], ["-s", "1"], ["-s", "0"]]


@pytest.mark.parametrize("flags", FLAGS[:2] if SMALL else FLAGS)
def test_with_itself(device, scale, flags):
    n = str(scale.rounds(1000, 20))
    cmd = [*OURS, "-d", device, "-n", n, *flags]
    for out in both(cmd, cmd, free_port(), scale):
        assert "local address:  LID 0x" in out and "remote address: LID" in out and f"{n} iters in " in out


C_FLAGS = [[], ["-e", "-s", "65536", "-m", "2048"], ["-s", "100"], ["-e"]]


@pytest.mark.parametrize("flags", C_FLAGS[:2] if SMALL else C_FLAGS)
@pytest.mark.parametrize("role", ["server", "client"])
def test_with_the_c_program(device, scale, theirs, role, flags):
    command, env = theirs
    n = str(scale.rounds(1000, 20))
    ours = [*OURS, "-d", device, "-n", n, *flags]
    c = [*command, "-n", n, *flags]
    pair = (ours, c) if role == "server" else (c, ours)
    for out in both(*pair, free_port(), scale, env if env else None):
        assert f"{n} iters in " in out and "usec/iter" in out


def test_errors_are_one_line(device):
    for args, text in ((["-d", "nosuch7"], "'nosuch7' cannot be used"),
                       (["-m", "1500"], "1500 bytes does not exist"),
                       (["-d", device, "-p", str(free_port()), "127.0.0.1"], "refused"),
                       (["-d", device, "-g", "9999"], "ibv_query_gid")):
        done = subprocess.run([*OURS, *args], capture_output=True, text=True, timeout=200)
        assert done.returncode == 1 and text in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_stranger_on_the_port(device, scale):
    """A client that is no pingpong is refused with what it said."""
    port = free_port()
    s = subprocess.Popen([*OURS, "-d", device, "-p", str(port)], stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    listening(port, s, 20 * scale.time)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\nAccept: */*\r\n\r\n")
        _, err = s.communicate(timeout=20 * scale.time)
    assert s.returncode == 1 and "the peer sent b'GET / HTTP" in err


def test_address_format():
    a = pingpong.Address(0x12, 0x34, 0xABCDEF, bytes(range(16)))
    data = a.pack()
    assert data == b"0012:000034:abcdef:000102030405060708090a0b0c0d0e0f\0" and len(data) == 52
    b = pingpong.Address.unpack(data)
    assert (b.lid, b.qpn, b.psn, b.gid) == (a.lid, a.qpn, a.psn, a.gid)
    with pytest.raises(RocecommError, match="expected"):
        pingpong.Address.unpack(b"x:y:z")
