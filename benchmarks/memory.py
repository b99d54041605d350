"""What worlds of 2 to 64 ranks cost in memory: idle after init, and after traffic with every peer."""

import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import figures, processes

WORLDS = (2, 4, 8, 16, 32, 64)
#: the last world again with settings that need less
LEAN = {"ROCECOMM_PEER_CREDITS": "2", "ROCECOMM_RECV_POOL": "64", "ROCECOMM_EAGER_LIMIT": "2K"}
#: traffic with each peer: more small messages than the slots set aside for it, so that all are used
SMALL, COUNT, LARGE = 1024, 100, 65536
KIB = 1 << 10

TITLE = "Memory per peer"
TEXT = ("Worlds of ranks on soft0, KiB, medians over the ranks. *Registered*: receive and send slots of one "
        "rank (`comm.counters[\"slot_bytes\"]`). *Shared memory*: the world's files in `/dev/shm`, divided "
        "by its ranks. *Grown*: by how much a rank's share of memory (`Pss` in `/proc/self/smaps_rollup`, "
        "shared memory and used slots included) has grown since before `init`; after `init`, and after "
        f"traffic with every peer: {COUNT} messages of 1 KiB and one of 64 KiB each way, so that every slot "
        "was used. *Per peer*: the last, divided by the peers. *Lean*: `"
        + " ".join(f"{k}={v}" for k, v in LEAN.items()) + "`.")


def name_of(size, lean=False):
    return f"memory, {size} ranks" + (", lean" if lean else "")


ROWS = (*map(name_of, WORLDS), name_of(WORLDS[-1], True))


def used(folder):
    """Bytes of shared memory that the files below a folder take."""
    return sum(p.lstat().st_blocks * 512 for p in Path(folder).rglob("*") if p.is_file())


def world(size, device, env):
    """Starts a world, measures, ends it: one row's figures in bytes."""
    folder = tempfile.mkdtemp(prefix="rocecomm-bench-", dir="/dev/shm")
    os.chmod(folder, 0o700)
    env = {"ROCECOMM_SOFT_DIR": folder, "ROCECOMM_WORLD_SIZE": str(size), "ROCECOMM_IB_HCA": device,
           "ROCECOMM_JOB_ID": f"bench-memory-{os.getpid()}-{size}", **env}
    command = [sys.executable, str(Path(__file__).with_name("memory_ranks.py")), str(size)]
    limit = 60 + size
    try:
        with processes.Ranks(f"memory of {size} ranks", size, [(command, env)], limit) as ranks:
            joined = ranks.ask({"do": "init"})
            shared = used(folder) / size
            after = ranks.ask({"do": "traffic", "small": SMALL, "count": COUNT, "large": LARGE})
            ranks.ask({"do": "close"})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    median = statistics.median
    before = [j["before"]["pss"] for j in joined]
    idle = [j["after"]["pss"] - b for j, b in zip(joined, before, strict=True)]
    busy = [a["after"]["pss"] - b for a, b in zip(after, before, strict=True)]
    return {"ranks": size, "registered": joined[0]["registered"], "shared": shared, "idle": median(idle),
            "busy": median(busy), "rss": median(a["after"]["rss"] for a in after),
            "per_peer": [b / (size - 1) for b in busy]}


def measure(rounds, device="soft0", wanted=lambda name: True):
    for size, lean in (*((size, False) for size in WORLDS), (WORLDS[-1], True)):
        if wanted(name_of(size, lean)):
            found = world(size, device, LEAN if lean else {})
            row = figures.row(name_of(size, lean), "KiB/peer", [b / KIB for b in found.pop("per_peer")],
                              note=f"registered {found['registered'] / KIB:.0f} KiB a rank")
            row["memory"] = found
            yield row


def table(rows):
    """Lines of this group's own table in the page."""
    head = ("world", "registered", "shared memory", "grown after init", "after traffic", "resident set",
            "per peer")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        found = row["memory"]
        columns = [found[key] / KIB for key in ("registered", "shared", "idle", "busy", "rss")]
        cells = [f"{kib:.0f}" for kib in (*columns, row["ours"]["median"])]
        lines.append(f"| {' | '.join([row['name'].removeprefix('memory, '), *cells])} |")
    return lines
