"""``rocecomm pingpong``: a two-sided latency test that talks to rdma-core's ibv_rc_pingpong.

Either side may be the C program: the TCP exchange, the defaults and the flags are the
same. Without a host name it is the server and waits for one client; with one it is the
client. RC queue pairs, one message in each direction per iteration.
"""

import argparse
import random
import socket
import sys
import time

import numpy as np

from rocecomm import verbs as v
from rocecomm.errors import RocecommError

# "lid:qpn:psn:gid" in hex and a zero byte, as ibv_rc_pingpong sends it
_MESSAGE = len("0000:000000:000000:") + 32 + 1
_DONE = b"done\0"
_SEND, _RECV = 2, 1


class Address:
    """What one side tells the other: LID, queue pair number, packet sequence number, GID."""

    def __init__(self, lid, qpn, psn, gid):
        self.lid, self.qpn, self.psn, self.gid = lid, qpn, psn, gid

    def pack(self):
        text = f"{self.lid:04x}:{self.qpn:06x}:{self.psn:06x}:{self.gid.hex()}"
        return text.encode() + b"\0"

    @classmethod
    def unpack(cls, data):
        try:
            lid, qpn, psn, gid = data.rstrip(b"\0").decode("ascii").split(":")
            return cls(int(lid, 16), int(qpn, 16), int(psn, 16), bytes.fromhex(gid))
        except ValueError:
            raise RocecommError(f"the peer sent {data[:80]!r} where its address was expected; is "
                                f"it an ibv_rc_pingpong or rocecomm pingpong?") from None

    def __str__(self):
        gid = socket.inet_ntop(socket.AF_INET6, self.gid)
        return f"LID 0x{self.lid:04x}, QPN 0x{self.qpn:06x}, PSN 0x{self.psn:06x}, GID {gid}"


class Side:
    """Device objects of one side, from context to queue pair."""

    def __init__(self, options):
        self.options = options
        name = options.device or _first_device()
        self.ctx = v.open_device(name)
        self.port = self.ctx.query_port(options.ib_port)
        if self.port.state != v.IBV_PORT_ACTIVE:
            raise RocecommError(f"port {options.ib_port} of {name} is {self.port.state.name}, not active")
        self.gid = self._choose_gid()
        self.pd = v.PD(self.ctx)
        self.channel = v.CompChannel(self.ctx) if options.events else None
        self.cq = v.CQ(self.ctx, options.rx_depth + 1, self.channel)
        self.data = np.full(options.size, 0x7B, np.uint8)
        self.mr = v.MR(self.pd, self.data) if options.size else None
        self.qp = v.QP(self.pd, self.cq, max_send_wr=1, max_recv_wr=options.rx_depth)
        self.qp.to_init(port_num=options.ib_port)
        self.posted = 0
        self.post_receives()
        if self.channel:
            self.cq.req_notify()
        self.address = Address(self.port.lid, self.qp.qp_num, random.getrandbits(24), self.gid.gid)

    def _choose_gid(self):
        port, index = self.options.ib_port, self.options.gid_idx
        if index >= 0:
            return self.ctx.query_gid(port, index)
        table = self.ctx.query_gid_table(port)
        if not table:
            raise RocecommError(f"port {port} of {self.ctx.name} has no GID; give its interface an address")
        return min(table, key=lambda e: (e.gid_type != v.IBV_GID_TYPE_ROCE_V2, e.address.ipv4_mapped is None,
                                         e.address.is_link_local, e.index))

    def post_receives(self):
        n = self.options.rx_depth - self.posted
        wrs = np.zeros(n, v.RECV_WR_DTYPE)
        wrs["wr_id"] = _RECV
        if self.mr:
            wrs["addr"], wrs["length"], wrs["lkey"] = self.mr.addr, self.mr.length, self.mr.lkey
        self.posted += self.qp.post_recv_array(wrs)

    def connect(self, peer):
        path = v.AHAttr(dgid=peer.gid if any(peer.gid) else None, sgid_index=self.gid.index, dlid=peer.lid,
                        sl=self.options.sl, port_num=self.options.ib_port, hop_limit=1)
        self.qp.to_rtr(peer.qpn, path, path_mtu=v.MTU.of(self.options.mtu), rq_psn=peer.psn)
        self.qp.to_rts(sq_psn=self.address.psn)

    def run(self, first):
        """The iterations; the client sends first. Returns seconds."""
        sent = received = 0
        iters, pending = self.options.iters, _RECV
        start = time.perf_counter()
        if first and iters:
            self.qp.post_send(v.IBV_WR_SEND, self.mr, wr_id=_SEND)
            pending |= _SEND
        quiet_since = time.monotonic()
        while sent < iters or received < iters:
            done = self.cq.poll(2)
            if not done:
                if self.channel and self.channel.get_event(1.0) is not None:
                    self.cq.req_notify()
                elif time.monotonic() - quiet_since > self.options.timeout:
                    raise RocecommError(f"nothing came from the peer for {self.options.timeout:g} s, after "
                                        f"{sent} sends and {received} receives of {iters}")
                continue
            quiet_since = time.monotonic()
            for wc in done:
                wr_id = wc.wr_id
                if not wc.ok:
                    raise RocecommError(f"a {'send' if wr_id == _SEND else 'receive'} failed with "
                                        f"{wc.status.name} after {sent} sends and {received} receives")
                if wr_id == _SEND:
                    sent += 1
                else:
                    received += 1
                    self.posted -= 1
                    if self.posted <= 1:
                        self.post_receives()
                pending &= ~wr_id
                if sent < iters and not pending:
                    self.qp.post_send(v.IBV_WR_SEND, self.mr, wr_id=_SEND)
                    pending = _SEND | _RECV
        return time.perf_counter() - start

    def close(self):
        self.ctx.close()


def _first_device():
    found = v.devices()
    if not found:
        raise RocecommError("no RDMA device found, and libsoftnic.so is not built; run: make")
    return found[0].name


def _read(sock, n):
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            raise RocecommError(f"the peer closed the connection after {len(data)} of {n} bytes")
        data += part
    return data


def _as_client(side, options):
    with socket.create_connection((options.servername, options.port), options.timeout) as sock:
        sock.settimeout(options.timeout)
        sock.sendall(side.address.pack())
        peer = Address.unpack(_read(sock, _MESSAGE))
        sock.sendall(_DONE)
    side.connect(peer)
    return peer


def _as_server(side, options):
    with socket.create_server(("", options.port), reuse_port=False) as listener:
        sock, _ = listener.accept()
    with sock:
        sock.settimeout(options.timeout)
        peer = Address.unpack(_read(sock, _MESSAGE))
        side.connect(peer)
        sock.sendall(side.address.pack())
        _read(sock, len(_DONE))
    return peer


def parser():
    """The command line, with ibv_rc_pingpong's flags and defaults."""
    p = argparse.ArgumentParser(prog="rocecomm pingpong", description=__doc__.splitlines()[0])
    p.add_argument("servername", nargs="?", help="the server's host; without it, be the server")
    p.add_argument("-p", "--port", type=int, default=18515, help="TCP port of the exchange (18515)")
    p.add_argument("-d", "--ib-dev", dest="device", help="device (default: the first)")
    p.add_argument("-i", "--ib-port", type=int, default=1, help="port of the device (1)")
    p.add_argument("-s", "--size", type=int, default=4096, help="bytes of a message (4096)")
    p.add_argument("-m", "--mtu", type=int, default=1024, help="path MTU in bytes (1024)")
    p.add_argument("-r", "--rx-depth", type=int, default=500, help="receives posted at a time (500)")
    p.add_argument("-n", "--iters", type=int, default=1000, help="messages each way (1000)")
    p.add_argument("-l", "--sl", type=int, default=0, help="service level (0)")
    p.add_argument("-e", "--events", action="store_true", help="sleep on completion events")
    p.add_argument("-g", "--gid-idx", type=int, default=-1,
                   help="index of the local GID (default: RoCE v2 over IPv4 if there is one)")
    p.add_argument("-t", "--timeout", type=float, default=60.0,
                   help="seconds without any progress before giving up (60)")
    return p


def main(argv=None):
    """Runs the command; returns its exit status."""
    options = parser().parse_args(argv)
    try:
        v.MTU.of(options.mtu)
        if options.size < 0 or options.iters < 0 or options.rx_depth < 1:
            raise ValueError("size and iters must be 0 or more, rx-depth at least 1")
        side = Side(options)
        try:
            print(f"  local address:  {side.address}", flush=True)
            peer = (_as_client if options.servername else _as_server)(side, options)
            print(f"  remote address: {peer}", flush=True)
            seconds = side.run(first=bool(options.servername))
        finally:
            side.close()
    except (RocecommError, OSError, ValueError) as error:
        print(f"rocecomm pingpong: {error}", file=sys.stderr)
        return 1
    nbytes = options.size * options.iters * 2
    print(f"{nbytes} bytes in {seconds:.2f} seconds = {nbytes * 8 / seconds / 1e6:.2f} Mbit/sec")
    if options.iters:
        each = seconds * 1e6 / options.iters
        print(f"{options.iters} iters in {seconds:.2f} seconds = {each:.2f} usec/iter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
