"""send/recv of numpy arrays by size against all competitors, and the CPU time that a message costs."""

import contextlib

from benchmarks import figures, processes
from benchmarks.rivals import RIVALS, Rocecomm

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"8 B": 8, "1 KiB": KIB, "8 KiB": 8 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB,
         "64 MiB": 64 * MIB}
TARGETS = {
    "mpi4py": {"8 B": 0.8, "1 KiB": 0.8, "8 KiB": 0.8, "64 KiB": 1.0, "1 MiB": 1.0,
               "16 MiB": 0.7, "64 MiB": 0.7},
    "gloo": {"8 B": 0.05, "64 MiB": 0.5},
}
AHEAD = 1.0             # of gloo, pyzmq and UCXX in every row without a target of its own
SECONDS = 0.06          # of one measurement
CPU_SIZES = ("8 B", "64 MiB")

TITLE = "send and recv of numpy arrays"
TEXT = ("Half a round trip of a ping-pong between two processes, blocking `send` and `recv` into the same "
        "two arrays. Rows with CPU time come from the same measurements: time of both processes with all "
        "their threads, per message and per 10^9 bytes.")


def name_of(size, rival):
    return f"send/recv {size} : {rival}"


RIVAL_NAMES = tuple(r.name for r in RIVALS if r is not Rocecomm)
TAIL = {rival: f"p99 of single round trips 8 B : {rival}" for rival in RIVAL_NAMES}
CPU = {(size, rival): f"CPU time {size} : {rival}" for size in CPU_SIZES for rival in RIVAL_NAMES}
ROWS = (*(name_of(size, rival) for size in SIZES for rival in RIVAL_NAMES), *TAIL.values(), *CPU.values())


def target_of(size, rival):
    return f"<= {TARGETS.get(rival, {}).get(size, AHEAD):g}x"


def start_all(stack, device, names):
    """Starts the competitors that are called for: ({name: Ranks}, [why one is missing])."""
    running, missing = {}, []
    for rival in RIVALS:
        if rival.name in names:
            try:
                running[rival.name] = stack.enter_context(rival.start(device))
            except (figures.Missing, processes.Failed) as why:
                if rival is Rocecomm:
                    raise
                missing.append(str(why))
    return running, missing


def calibrated(ranks, size):
    """How many round trips take about SECONDS."""
    each = ranks.ask({"do": "pingpong", "size": size, "count": 3})[0]["s"] / 3
    return max(2, min(20000, int(SECONDS / each)))


def pingpongs(running, size, rounds):
    """{name: [(half round trip in us, CPU seconds per message)]}, in turn in every round."""
    counts = {name: calibrated(ranks, size) for name, ranks in running.items()}
    for name in [n for n, count in counts.items() if count > 50]:      # the first time was cold
        counts[name] = calibrated(running[name], size)
    found = {name: [] for name in running}
    for _ in range(rounds):
        for name, ranks in running.items():
            answers = ranks.ask({"do": "pingpong", "size": size, "count": counts[name]})
            messages = 2 * counts[name]
            found[name].append((answers[0]["s"] / messages * 1e6, sum(a["cpu"] for a in answers) / messages))
    return found


def measure(rounds, device="soft0", wanted=lambda name: True):
    needed = {rival for rival in RIVAL_NAMES
              if any(map(wanted, [*(name_of(size, rival) for size in SIZES), TAIL[rival], CPU["8 B", rival],
                                  CPU["64 MiB", rival]]))}
    cpu_rows = []
    with contextlib.ExitStack() as stack:
        running, missing = start_all(stack, device, {Rocecomm.name, *needed})
        yield from missing
        for label, size in SIZES.items():
            names = [r for r in running if r != Rocecomm.name
                     and (wanted(name_of(label, r)) or wanted(CPU.get((label, r), "")) and (label, r) in CPU)]
            if not names:
                continue
            found = pingpongs({n: running[n] for n in (Rocecomm.name, *names)}, size, rounds)
            for rival in names:
                ours, theirs = found[Rocecomm.name], found[rival]
                if wanted(name_of(label, rival)):
                    yield figures.row(name_of(label, rival), "us", [t for t, _ in ours],
                                      [t for t, _ in theirs], rival, target_of(label, rival))
                if (label, rival) in CPU and wanted(CPU[label, rival]):
                    unit, factor = ("us", 1e6) if size < MIB else ("s/GB", 1e9 / size)
                    cpu_rows.append(figures.row(
                        CPU[label, rival], unit, [c * factor for _, c in ours],
                        [c * factor for _, c in theirs], rival, f"<= {AHEAD:g}x"))
        tails = {n: r for n, r in running.items() if n == Rocecomm.name or wanted(TAIL[n])}
        if len(tails) > 1:
            yield from tail_rows(tails, rounds)
        yield from cpu_rows


def tail_rows(running, rounds, count=2000):
    found = {name: [] for name in running}
    for _ in range(rounds):
        for name, ranks in running.items():
            found[name].append(ranks.ask({"do": "tail", "size": 8, "count": count})[0]["99"] * 1e6)
    for name in running:
        if name != Rocecomm.name:
            yield figures.row(TAIL[name], "us", found[Rocecomm.name], found[name], name, f"<= {AHEAD:g}x")
