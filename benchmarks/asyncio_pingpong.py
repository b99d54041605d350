"""asyncio ping-pong between two processes: rocecomm against bare pipes, and against UCXX's own asyncio.

rocecomm: both sides ``await comm.isend(...)`` and ``await comm.irecv(...)``. Pipes: the least that
asyncio can do between two processes, ``os.write`` into a pipe, and ``loop.add_reader`` with ``os.read``
and a future on the other side. UCXX: ``await ep.send(...)`` and ``await ep.recv(...)``.
"""

import asyncio
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
        "own asyncio interface, `await ep.send(...)`, `await ep.recv(...)`.")


def name_of(label, rival):
    return f"asyncio {label} : {rival}"


ROWS = tuple(name_of(label, rival) for label in SIZES for rival in ("pipes", "ucxx"))


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
        self.loop, self.waiter = loop, None
        loop.add_reader(self.mine, self.readable)

    def readable(self):
        data = os.read(self.mine, 4096)
        waiter, self.waiter = self.waiter, None
        waiter.set_result(data)

    async def pingpong(self, first, out, into, count):
        data = out.tobytes()
        for i in range(2 * count):
            if i % 2 == first:
                self.waiter = self.loop.create_future()
                got = await self.waiter
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


KINDS = {"rocecomm": Ours, "pipes": Pipes, "ucxx": Ucxx}


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
           "ROCECOMM_JOB_ID": f"bench-asyncio-{os.getpid()}"}
    return processes.Ranks(f"asyncio, {kind}", 2, [
        ([sys.executable, __file__, kind, rank], {**env, "ROCECOMM_RANK": rank}) for rank in ("0", "1")])


def measure(rounds, device="soft0", wanted=lambda name: True):
    needed = [k for k in ("pipes", "ucxx") if any(wanted(name_of(label, k)) for label in SIZES)]
    if "ucxx" in needed and importlib.util.find_spec("ucxx") is None:
        needed.remove("ucxx")
        yield "ucxx is not installed (tools/setup.sh bench)"
    running = {}
    try:
        for kind in ("rocecomm", *needed):
            running[kind] = start(kind, device)
        for label, size in SIZES.items():
            names = [k for k in needed if wanted(name_of(label, k))]
            if not names:
                continue
            counts, found = {}, {k: [] for k in ("rocecomm", *names)}
            for kind in found:
                each = running[kind].ask({"do": "pingpong", "size": size, "count": 200})[0]["s"] / 200
                counts[kind] = max(20, min(20000, int(SECONDS / each)))
            for _ in range(rounds):
                for kind, figures_ in found.items():
                    count = counts[kind]
                    took = running[kind].ask({"do": "pingpong", "size": size, "count": count})[0]["s"]
                    figures_.append(took / count / 2 * 1e6)
            for kind in names:
                yield figures.row(name_of(label, kind), "us", found["rocecomm"], found[kind], kind,
                                  "<= 1.25x" if kind == "pipes" else "<= 1x")
    finally:
        for ranks in running.values():
            ranks.close()


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]))
