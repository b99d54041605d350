"""One rank of a competitor: connects, then measures what it is asked to. Started by ``Rival.start``."""

import resource
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
for place in [p for p in sys.path[1:] if p.endswith("benchmarks/rivals")]:
    sys.path.remove(place)

import numpy as np  # noqa: E402

from benchmarks import processes, rivals  # noqa: E402


def cpu():
    """CPU seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Measurements:
    """What a rank can be asked; each method is an order's ``do``."""

    def __init__(self, rival):
        self.rival, self.buffers = rival, {}

    def arrays(self, size, n=1):
        """``n`` arrays to send, and ``n`` to receive into; kept, as a program would."""
        if (size, n) not in self.buffers:
            if size >= 1 << 20:
                self.buffers.clear()            # one pair of large buffers at a time
            self.buffers[size, n] = ([np.arange(i, i + size, dtype=np.uint8) for i in range(n)],
                                     [np.zeros(size, np.uint8) for _ in range(n)])
        return self.buffers[size, n]

    def check(self, out, into):
        if not all(np.array_equal(a, b) for a, b in zip(out, into, strict=True)):
            raise AssertionError(f"{self.rival.name}: wrong bytes of size {len(out[0])}")

    def pingpong(self, size, count):
        """``count`` round trips after a few warm ones; seconds and CPU seconds of this rank."""
        (out,), (into,) = self.arrays(size)
        into[:] = 0
        send, recv = self.rival.send, self.rival.recv
        for warm in (max(1, count // 20), count):
            used, start = cpu(), time.perf_counter()
            if self.rival.me == 0:
                for _ in range(warm):
                    send(out)
                    recv(into)
            else:
                for _ in range(warm):
                    recv(into)
                    send(out)
            took, used = time.perf_counter() - start, cpu() - used
        self.check([out], [into])
        return {"s": took, "cpu": used}

    def tail(self, size, count):
        """Half round trips of ``count`` single ones: percentiles in seconds."""
        (out,), (into,) = self.arrays(size)
        send, recv, clock = self.rival.send, self.rival.recv, time.perf_counter
        times = np.zeros(count)
        for i in range(count):
            start = clock()
            if self.rival.me == 0:
                send(out)
                recv(into)
            else:
                recv(into)
                send(out)
            times[i] = clock() - start
        return {str(p): float(np.percentile(times, p) / 2) for p in (50, 99, 99.9)}

    def window(self, size, window, count):
        """``count`` windows of ``window`` messages from rank 0 to rank 1, each acknowledged by one byte."""
        out, into = self.arrays(size, window)
        into[-1][:] = 0
        rival = self.rival
        (ack,), (got,) = self.arrays(1)
        for warm in (1, count):
            used, start = cpu(), time.perf_counter()
            for _ in range(warm):
                if rival.me == 0:
                    rival.wait([rival.isend(b) for b in out])
                    rival.recv(got)
                else:
                    rival.wait([rival.irecv(b) for b in into])
                    rival.send(ack)
            took, used = time.perf_counter() - start, cpu() - used
        if rival.me == 1:
            self.check(out, into)
        return {"s": took, "cpu": used}

    def idle(self, seconds):
        """Rank 1 waits in a receive while rank 0 sleeps; CPU seconds of this rank."""
        (out,), (into,) = self.arrays(8)
        used = cpu()
        if self.rival.me == 0:
            time.sleep(seconds)
            self.rival.send(out)
        else:
            self.rival.recv(into)
        return {"cpu": cpu() - used}


def main():
    rival = rivals.BY_NAME[sys.argv[1]]()
    m = Measurements(rival)
    processes.serve(rival.me, {"pingpong": m.pingpong, "tail": m.tail, "window": m.window, "idle": m.idle})
    rival.close()


if __name__ == "__main__":
    main()
