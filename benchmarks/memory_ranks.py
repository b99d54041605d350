"""The ranks of a world whose memory is measured: forks of a process that has imported (memory.py)."""

import gc
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np  # noqa: E402

import rocecomm  # noqa: E402
from benchmarks import processes  # noqa: E402


def resident():
    """Bytes of this process: its resident set (rss), and that with each page divided by the number of
    processes that have it (pss): these add up to what the world takes."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss"):
            found[name.lower()] = int(rest.split()[0]) << 10
    return found


class Rank:
    """What a rank can be asked."""

    def __init__(self, rank):
        self.rank, self.comm = rank, None

    def init(self):
        """Joins; the memory before and after, and what the library has registered."""
        gc.collect()
        before = resident()
        self.comm = rocecomm.init()
        after = resident()
        return {"before": before, "after": after, "registered": self.comm.counters["slot_bytes"]}

    def traffic(self, small, count, large):
        """Every rank with every other: ``count`` messages through slots, and one that is read in place."""
        comm = self.comm
        out, into = ([np.zeros(size, np.uint8) for size in (small, large)] for _ in range(2))
        for a in out:
            a[:] = self.rank
        for step in range(1, comm.size):
            to, source = (self.rank + step) % comm.size, (self.rank - step) % comm.size
            for a, b in (*[(out[0], into[0])] * count, (out[1], into[1])):
                comm.sendrecv(a, to, b, source)
                assert b[0] == b[-1] == source, (self.rank, source, len(b))
        del out, into
        gc.collect()
        return {"after": resident()}

    def close(self):
        self.comm.close()
        return {}


def main(size):
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.environ["ROCECOMM_RANK"] = str(rank)
            me = Rank(rank)
            processes.serve(rank, {"init": me.init, "traffic": me.traffic, "close": me.close})
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
