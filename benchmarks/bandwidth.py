"""Windows of isend/irecv against all competitors: bandwidth, rate, CPU time; and a rank that waits."""

import contextlib

from benchmarks import figures
from benchmarks.messages import RIVAL_NAMES, start_all
from benchmarks.rivals import Rocecomm

KIB, MIB = 1 << 10, 1 << 20
#: label: (bytes of a message, messages in flight)
WINDOWS = {"8 B": (8, 64), "64 KiB": (64 * KIB, 64), "1 MiB": (MIB, 16)}
SECONDS = 0.1
IDLE = 0.5

TITLE = "Windows of isend and irecv"
TEXT = ("One direction: 64 messages (16 of 1 MiB) are begun with `isend` on one side and `irecv` on the "
        "other, waited for, and acknowledged by one byte. CPU time is that of both processes with all "
        "threads. A waiting rank sits in a blocking `recv` for half a second: its own CPU time in per cent "
        "of that.")


def name_of(label, rival):
    return f"window {label} : {rival}"


def cpu_name(rival):
    return f"CPU time window 1 MiB : {rival}"


def idle_name(rival):
    return f"waiting rank : {rival}"


ROWS = (*(name_of(label, rival) for label in WINDOWS for rival in RIVAL_NAMES),
        *(f(rival) for f in (cpu_name, idle_name) for rival in RIVAL_NAMES))


def windows(running, label, rounds):
    """{name: [(seconds per window, CPU seconds per window)]}, in turn in every round."""
    size, window = WINDOWS[label]
    order = {"do": "window", "size": size, "window": window}
    counts = {}
    for name, ranks in running.items():
        each = min(ranks.ask({**order, "count": 2})[0]["s"] / 2 for _ in range(2))
        counts[name] = max(2, min(2000, int(SECONDS / each)))
    found = {name: [] for name in running}
    for _ in range(rounds):
        for name, ranks in running.items():
            count = counts[name]
            answers = ranks.ask({**order, "count": count})
            found[name].append((answers[0]["s"] / count, sum(a["cpu"] for a in answers) / count))
    return found


def measure(rounds, device="soft0", wanted=lambda name: True):
    named = {rival: [name for name in ROWS if name.endswith(f" : {rival}")] for rival in RIVAL_NAMES}
    cpu_rows = []
    with contextlib.ExitStack() as stack:
        running, missing = start_all(stack, device, {Rocecomm.name, *(
            rival for rival in RIVAL_NAMES if any(map(wanted, named[rival])))})
        yield from missing
        for label, (size, window) in WINDOWS.items():
            with_cpu = label == "1 MiB"
            names = [r for r in running if r != Rocecomm.name
                     and (wanted(name_of(label, r)) or with_cpu and wanted(cpu_name(r)))]
            if not names:
                continue
            found = windows({n: running[n] for n in (Rocecomm.name, *names)}, label, rounds)
            unit, amount = ("M/s", window / 1e6) if size < KIB else ("MB/s", size * window / 1e6)
            for rival in names:
                ours, theirs = found[Rocecomm.name], found[rival]
                if wanted(name_of(label, rival)):
                    yield figures.row(name_of(label, rival), unit, [amount / s for s, _ in ours],
                                      [amount / s for s, _ in theirs], rival, ">= 1x")
                if with_cpu and wanted(cpu_name(rival)):
                    gb = amount / 1e3
                    cpu_rows.append(figures.row(cpu_name(rival), "s/GB", [c / gb for _, c in ours],
                                                [c / gb for _, c in theirs], rival, "<= 1x"))
        yield from cpu_rows
        idle = {n: r for n, r in running.items() if n == Rocecomm.name or wanted(idle_name(n))}
        if len(idle) > 1:
            yield from idle_rows(idle, min(rounds, 5))


def idle_rows(running, rounds):
    found = {name: [] for name in running}
    for _ in range(rounds):
        for name, ranks in running.items():
            answers = ranks.ask({"do": "idle", "seconds": IDLE})
            found[name].append(answers[1]["cpu"] / IDLE * 100)
    for name in running:
        if name != Rocecomm.name:
            yield figures.row(idle_name(name), "%", found[Rocecomm.name], found[name], name, "<= 5")
