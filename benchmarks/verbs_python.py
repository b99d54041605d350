"""rocecomm.verbs from Python against perftest's C programs, on the same device.

The Python side is what somebody would write who knows the module: work requests made ready once
(`SendChain`, `RecvChain`), one call to post them, one call that polls until completions are there.
"""

import mmap
import os
import statistics
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import figures, processes
from benchmarks.softnic import perftest

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}
VERBS = ("write", "read", "send")
VOLUME = 1 << 30        # bytes of a bandwidth measurement, on either side
ROUND_TRIPS = 20000
AHEAD = 16              # requests in a chain; two chains are under way
RECEIVES = 16           # chains of receives that are posted
LIMIT = {"latency": "<= +0.4", "bandwidth": ">= 0.95x"}

TITLE = "Verbs from Python against perftest"
TEXT = ("`rocecomm.verbs` (`SendChain`, `RecvChain`, `CQ.poll_until`) against perftest's programs, which "
        "are C. Ping-pong: half a round trip of 8 bytes, inline, typical (perftest) or median of batches "
        "of 100. Bandwidth: 10^6 bytes per second in one direction.")
LATENCY = "verbs ping-pong 8 B"


def name_of(verb, size):
    return f"verbs {verb} {size}"


ROWS = (LATENCY, *(name_of(verb, size) for verb in VERBS for size in SIZES))

# ---- the parent -----------------------------------------------------------------------------------------


def cpus():
    found = sorted(os.sched_getaffinity(0))[:2]
    if len(found) < 2:
        raise figures.Missing("two CPUs are needed, one for each process")
    return found


def rivals_figure(command, column, device, where):
    try:
        return perftest.pair(command, device, where)[column]
    except FileNotFoundError:
        raise figures.Missing("perftest is not installed: apt-get install perftest") from None


def measure(rounds, device="soft0", wanted=lambda name: True):
    where = cpus()
    me = [(([sys.executable, __file__, device]), {"BENCH_RANK": str(r), "BENCH_CPU": str(where[1 - r])})
          for r in (0, 1)]
    with processes.Ranks("rocecomm.verbs", 2, me) as ranks:
        ends = ranks.ask({"do": "open"})

        def row(name, unit, order, key, command, column, scale, target):
            ours, theirs = [], []
            for _ in range(rounds):
                ranks.ask({"do": "connect", "ends": ends})
                ours.append(ranks.ask(order)[0][key])
                theirs.append(scale * rivals_figure(command, column, device, where))
            return figures.row(name, unit, ours, theirs, command[0], target)

        if wanted(LATENCY):
            command = ("ib_send_lat", "-s", "8", "-n", str(ROUND_TRIPS))
            yield row(LATENCY, "us", {"do": "pingpong", "count": ROUND_TRIPS}, "us", command,
                      "t_typical[usec]", 1, LIMIT["latency"])
        for verb in VERBS:
            for label, size in SIZES.items():
                if wanted(name_of(verb, label)):
                    count = min(4096, max(4 * AHEAD, VOLUME // size // AHEAD * AHEAD))
                    order = {"do": "bandwidth", "verb": verb, "size": size, "count": count}
                    command = (f"ib_{verb}_bw", "-s", str(size), "-n", str(count))
                    yield row(name_of(verb, label), "MB/s", order, "mb_s", command, "BW average[MB/sec]",
                              MIB / 1e6, LIMIT["bandwidth"])

# ---- a child --------------------------------------------------------------------------------------------


class End:
    """One of the two processes: a queue pair, memory for the largest message, chains made ready."""

    def __init__(self, device):
        import numpy as np

        from rocecomm import verbs as v
        self.np, self.v, self.rank = np, v, int(os.environ["BENCH_RANK"])
        os.sched_setaffinity(0, {int(os.environ["BENCH_CPU"])})
        self.context = v.open_device(device)
        self.pd = v.PD(self.context)
        self.cq = v.CQ(self.context, 512)
        self.qp = v.QP(self.pd, self.cq, max_send_wr=2 * AHEAD, max_recv_wr=RECEIVES * AHEAD,
                       max_inline_data=8)
        size = 2 * max(SIZES.values())
        # memory as perftest's: page-aligned, touched, in small pages (numpy asks for huge ones)
        self.memory = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        self.memory[:] = 1 + self.rank
        self.mr = v.MR(self.pd, self.memory, v.IBV_ACCESS_LOCAL_WRITE | v.IBV_ACCESS_REMOTE_WRITE
                       | v.IBV_ACCESS_REMOTE_READ)
        self.wcs = np.zeros(AHEAD, v.WC_DTYPE)

    def open(self):
        gid = next(g for g in self.context.query_gid_table() if any(g.gid[8:]) and g.gid[:2] != b"\xfe\x80")
        self.gid = gid
        return {"qpn": self.qp.qp_num, "gid": gid.gid.hex(), "rkey": self.mr.rkey,
                "addr": self.mr.addr}

    def connect(self, ends):
        v = self.v
        self.peer = peer = ends[1 - self.rank]
        self.qp.modify(v.IBV_QPS_RESET)     # nothing of an earlier measurement is left
        self.qp.to_init(qp_access_flags=v.IBV_ACCESS_REMOTE_WRITE | v.IBV_ACCESS_REMOTE_READ)
        self.qp.to_rtr(peer["qpn"], v.AHAttr(dgid=bytes.fromhex(peer["gid"]), sgid_index=self.gid.index),
                       path_mtu=v.IBV_MTU_4096, max_dest_rd_atomic=16)
        self.qp.to_rts(max_rd_atomic=16)

    def sends(self, opcode, size, n, flags=0):
        """A chain of n requests, the last one signaled."""
        wrs = self.np.zeros(n, self.v.SEND_WR_DTYPE)
        wrs["opcode"], wrs["send_flags"] = opcode, flags
        wrs["addr"], wrs["length"], wrs["lkey"] = self.mr.addr, size, self.mr.lkey
        wrs["remote_addr"], wrs["rkey"] = self.peer["addr"] + max(SIZES.values()), self.peer["rkey"]
        wrs["send_flags"][-1] |= self.v.IBV_SEND_SIGNALED
        return self.v.SendChain(self.qp, wrs)

    def receives(self, size, n):
        wrs = self.np.zeros(n, self.v.RECV_WR_DTYPE)
        wrs["addr"], wrs["length"], wrs["lkey"] = self.mr.addr + max(SIZES.values()), size, self.mr.lkey
        return self.v.RecvChain(self.qp, wrs)

    def take(self, n):
        """Exactly n completions, all good."""
        wcs = self.wcs[:n]
        if self.cq.poll_until(wcs, n, 20) < n:
            raise RuntimeError(f"no {n} completions within 20 s")
        self.good(wcs)

    def good(self, wcs):
        if wcs["status"].any():
            raise RuntimeError(f"completions failed: {wcs['status']}")

    def pingpong(self, count):
        from time import perf_counter
        send = self.sends(self.v.IBV_WR_SEND, 8, 1, self.v.IBV_SEND_INLINE)
        receive, many, wcs, cq = self.receives(8, 1), self.receives(8, AHEAD), self.wcs[:2], self.cq
        many.post()
        times, batch = [], 100
        poll, post, again = cq.poll_until, send.post, receive.post
        rounds = range(batch)
        if self.rank == 1:
            poll(wcs, 1)        # the first message
            again()
        post()
        for _batch in range(count // batch):
            start = perf_counter()
            for _ in rounds:
                poll(wcs, 2)    # our send is done and the answer is here
                post()
                again()
            times.append((perf_counter() - start) / batch / 2)
        self.take(2 - self.rank)    # rank 1 sent the last one, which rank 0 answers no more
        return {"us": statistics.median(times) * 1e6}

    def bandwidth(self, verb, size, count):
        from time import perf_counter
        v = self.v
        ahead = max(1, min(AHEAD, count // 2))
        if self.rank == 1 and verb != "send":
            return {}           # the other one reaches our memory alone
        if self.rank == 1:
            receive = self.receives(size, ahead)
            for _ in range(RECEIVES):
                receive.post()
            for _ in range(count // ahead):
                self.take(ahead)
                receive.post()
            return {}
        opcode = {"write": v.IBV_WR_RDMA_WRITE, "read": v.IBV_WR_RDMA_READ, "send": v.IBV_WR_SEND}[verb]
        chain = self.sends(opcode, size, ahead)
        start = perf_counter()
        chain.post()
        for _ in range(count // ahead - 1):
            chain.post()
            self.take(1)
        self.take(1)
        took = perf_counter() - start
        return {"mb_s": count // ahead * ahead * size / took / 1e6}


def main():
    end = End(sys.argv[1])
    processes.serve(end.rank, {"open": end.open, "connect": end.connect, "pingpong": end.pingpong,
                               "bandwidth": end.bandwidth})


if __name__ == "__main__":
    main()
