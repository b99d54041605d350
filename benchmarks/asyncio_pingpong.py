"""asyncio ping-pong between two processes: rocecomm against bare pipes, and against UCXX's own asyncio.

rocecomm: both sides ``await comm.isend(...)`` and ``await comm.irecv(...)``. Pipes: the least that
asyncio can do between two processes, ``os.write`` into a pipe, and ``loop.add_reader`` with ``os.read``
and a future on the other side. UCXX: ``await ep.send(...)`` and ``await ep.recv(...)``.
"""

import asyncio
import contextlib
import importlib.util
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import figures, processes  # noqa: E402

SIZES = {"8 B": 8, "4 KiB": 4096}       # a pipe takes up to 4 KiB as a whole
SECONDS = 0.15

TITLE = "asyncio"
TEXT = ("Half a round trip of a ping-pong of two event loops. Pipes: the least that asyncio can do between "
        "two processes: `os.write` into a pipe, `loop.add_reader` and a future at the other end. UCXX is its "
        "own asyncio interface, `await ep.send(...)`, `await ep.recv(...)`. With `spin=0` rocecomm never "
        "polls before the loop sleeps, as pipes cannot.")


def name_of(label, rival):
    return f"asyncio {label} : {rival}"


ROWS = (*(name_of(label, rival) for label in SIZES for rival in ("pipes", "ucxx")),
        name_of("8 B, spin=0", "pipes"))


# ------------------------------------------------------------------------- in the child

class Pipes:
    def __init__(self, rank, loop):
        folder = Path(os.environ["BENCH_FOLDER"])
        for name in ("0", "1"):
            try:
                os.mkfifo(folder / f"pipe-{name}")
            except FileExistsError:
                continue
        # read and write, so that opening waits for nobody
        self.mine, self.theirs = (os.open(folder / f"pipe-{r}", os.O_RDWR) for r in (rank, 1 - rank))
        self.loop, self.next = loop, loop.create_future()
        loop.add_reader(self.mine, self.readable)

    def readable(self):
        self.next.set_result(os.read(self.mine, 4096))

    async def pingpong(self, first, out, into, count):
        data = out.tobytes()
        for i in range(2 * count):
            if i % 2 == first:
                got = await self.next
                self.next = self.loop.create_future()
            else:
                os.write(self.theirs, data)
        into.data[:len(got)] = got


class Ours:
    def __init__(self, rank, loop):
        import rocecomm

        self.comm = rocecomm.init()
        self.other = 1 - rank

    async def pingpong(self, first, out, into, count):
        comm, other = self.comm, self.other
        for i in range(2 * count):
            if i % 2 == first:
                await comm.irecv(into, other)
            else:
                await comm.isend(out, other)


class Ucxx:
    def __init__(self, rank, loop):
        loop.run_until_complete(self.connect(rank))

    async def connect(self, rank):
        import ucxx

        ucxx.init()
        where = Path(os.environ["BENCH_FOLDER"]) / "ucxx-port"
        if rank == 0:
            came = asyncio.get_running_loop().create_future()

            async def accept(ep):
                came.set_result(ep)

            self.listener = ucxx.create_listener(accept)
            part = where.with_suffix(".part")
            part.write_text(str(self.listener.port))
            part.rename(where)
            self.ep = await asyncio.wait_for(came, 30)
        else:
            end = time.monotonic() + 30
            while not where.exists():
                if time.monotonic() > end:
                    raise TimeoutError("ucxx: no listener within 30 s")
                await asyncio.sleep(0.01)
            self.ep = await ucxx.create_endpoint("127.0.0.1", int(where.read_text()))

    async def pingpong(self, first, out, into, count):
        ep = self.ep
        for i in range(2 * count):
            if i % 2 == first:
                await ep.recv(into)
            else:
                await ep.send(out)


KINDS = {"rocecomm": Ours, "rocecomm, spin=0": Ours, "pipes": Pipes, "ucxx": Ucxx}


def child(kind, rank):
    import numpy as np

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    side = KINDS[kind](rank, loop)

    def pingpong(size, count):
        out, into = np.arange(size, dtype=np.uint8), np.zeros(size, np.uint8)
        for warm in (max(1, count // 20), count):
            start = time.perf_counter()
            loop.run_until_complete(side.pingpong(0 if rank else 1, out, into, warm))
            took = time.perf_counter() - start
        if not np.array_equal(out, into):
            raise AssertionError(f"{kind}: wrong bytes of size {size}")
        return {"s": took}

    processes.serve(rank, {"pingpong": pingpong})
    os._exit(0)         # the loop and UCXX's listener go with the process


# ------------------------------------------------------------------------ in the parent

def start(kind, device):
    env = {"ROCECOMM_WORLD_SIZE": "2", "ROCECOMM_IB_HCA": device, "UCX_LOG_LEVEL": "error",
           "ROCECOMM_JOB_ID": f"bench-asyncio-{os.getpid()}-{kind}"}
    if kind == "rocecomm, spin=0":
        env["ROCECOMM_SPIN"] = "0"
    return processes.Ranks(f"asyncio, {kind}", 2, [
        ([sys.executable, __file__, kind, rank], {**env, "ROCECOMM_RANK": rank}) for rank in ("0", "1")])


def measure(rounds, device="soft0", wanted=lambda name: True):
    rows = [(label, size, "rocecomm", rival) for label, size in SIZES.items() for rival in ("pipes", "ucxx")]
    rows.append(("8 B, spin=0", 8, "rocecomm, spin=0", "pipes"))
    rows = [row for row in rows if wanted(name_of(row[0], row[3]))]
    if any(row[3] == "ucxx" for row in rows) and importlib.util.find_spec("ucxx") is None:
        yield "ucxx is not installed (tools/setup.sh bench)"
        rows = [row for row in rows if row[3] != "ucxx"]
    with contextlib.ExitStack() as stack:
        running = {kind: stack.enter_context(start(kind, device))
                   for kind in KINDS if any(kind in row[2:] for row in rows)}
        for size in SIZES.values():
            now = [row for row in rows if row[1] == size]
            kinds = [kind for kind in KINDS if any(kind in row[2:] for row in now)]
            found = pingpongs({kind: running[kind] for kind in kinds}, size, rounds)
            for label, _, ours, rival in now:
                yield figures.row(name_of(label, rival), "us", found[ours], found[rival], rival,
                                  "<= 1.25x" if rival == "pipes" else "<= 1x")


def pingpongs(running, size, rounds):
    """{kind: [half round trip in us]}, in turn in every round."""
    order, counts = {"do": "pingpong", "size": size}, {}
    for kind, ranks in running.items():
        each = ranks.ask({**order, "count": 200})[0]["s"] / 200
        counts[kind] = max(20, min(20000, int(SECONDS / each)))
    found = {kind: [] for kind in running}
    for _ in range(rounds):
        for kind, ranks in running.items():
            took = ranks.ask({**order, "count": counts[kind]})[0]["s"]
            found[kind].append(took / counts[kind] / 2 * 1e6)
    return found


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]))
