"""What is measured: one row per perftest command, its baseline and its target."""

import dataclasses

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
# what a bandwidth row moves per measurement, on either side: about 0.3 s
VOLUME = 2 << 30


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. ``{cpu}``, ``{peer}`` and ``{folder}`` are filled in by the runner."""

    name: str
    command: tuple      # of perftest, the same for both ends
    column: str         # of perftest's table: the figure
    unit: str           # usec, MB/s (10^6 bytes) or M/s (10^6 messages)
    target: float       # most (usec) or least (others), relative to the baseline if there is one
    raw: tuple = ()     # the baseline program
    mapped: bool = False    # both ends with --mmap on files in shared memory
    one_cpu: bool = False

    @property
    def words(self):
        """The command as somebody would type it."""
        return " ".join(self.command) + (" --mmap=FILE" if self.mapped else "")

    @property
    def lower_is_better(self):
        return self.unit == "usec"

    def passes(self, value):
        return value <= self.target if self.lower_is_better else value >= self.target


def size_name(size):
    return f"{size // MIB}MiB" if size >= MIB else f"{size // KIB}KiB"


def latency_rows():
    typical = "t_typical[usec]"
    line = ("cacheline", "{cpu}", "{peer}", "200000")
    yield Row("send_lat 8B", ("ib_send_lat", "-s", "8", "-n", "50000"), typical, "usec", 5, line)
    yield Row("write_lat 8B", ("ib_write_lat", "-s", "8", "-n", "50000"), typical, "usec", 2,
              ("vmcopy", "write", "8", "100000", "{cpu}", "{peer}", "poll"))
    yield Row("write_lat 8B mapped", ("ib_write_lat", "-s", "8", "-n", "50000"), typical, "usec", 4,
              line, mapped=True)
    yield Row("send_lat 8B one CPU", ("ib_send_lat", "-s", "8", "-n", "20000"), typical, "usec", 5,
              one_cpu=True)
    yield Row("send_lat 8B events", ("ib_send_lat", "-s", "8", "-n", "10000", "-e"), typical,
              "usec", 2, ("wakeup", "{cpu}", "{peer}", "10000"))


def bandwidth_rows():
    average = "BW average[MB/sec]"
    for mapped in (False, True):
        for verb, move, peer in (("write", "write", "sleep"), ("read", "read", "sleep"),
                                 ("send", "write", "poll")):
            for size in SIZES:
                count = str(max(50, VOLUME // size))
                both = verb == "send" and size >= 4 * MIB and not mapped
                raw = (("memcopy", str(size), count, "{cpu}", "{folder}") if mapped else
                       ("vmcopy", move, str(size), count, "{cpu}", "{peer}", peer))
                yield Row(f"{verb}_bw {size_name(size)}" + (" mapped" if mapped else ""),
                          (f"ib_{verb}_bw", "-s", str(size), "-n", count), average, "MB/s",
                          1.4 if both else 0.9, raw, mapped)


def rate_rows():
    # lists of 32 in short queues: entries stay in the cache; -N: no clock reading per message
    rate, posts = "MsgRate[Mpps]", ("-s", "8", "-l", "32", "-t", "256", "-N", "-n", "1000000")
    yield Row("send_bw 8B post lists", ("ib_send_bw", *posts, "-r", "512", "--recv_post_list", "32"),
              rate, "M/s", 5)
    yield Row("write_bw 8B post lists mapped", ("ib_write_bw", *posts), rate, "M/s", 15, mapped=True)


ROWS = (*latency_rows(), *rate_rows(), *bandwidth_rows())
