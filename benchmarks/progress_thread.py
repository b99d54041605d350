"""What ``init(progress="thread")`` costs blocking calls: the same ping-pong with it and without."""

import contextlib
import os

from benchmarks import figures
from benchmarks.messages import pingpongs
from benchmarks.rivals import Rocecomm

SIZES = {"8 B": 8, "1 MiB": 1 << 20}

TITLE = "The progress thread"
TEXT = ('Half a round trip of a ping-pong, blocking `send` and `recv`: two ranks with `progress="thread"` '
        '(the column rocecomm) against two with `progress="calls"`.')
ROWS = tuple(f'progress="thread" {label}' for label in SIZES)


class WithThread(Rocecomm):
    @classmethod
    def commands(cls, device):
        own = {"ROCECOMM_PROGRESS": "thread", "ROCECOMM_JOB_ID": f"bench-thread-{os.getpid()}"}
        return [(command, {**env, **own}) for command, env in super().commands(device)]


def measure(rounds, device="soft0", wanted=lambda name: True):
    with contextlib.ExitStack() as stack:
        running = {kind: stack.enter_context(rival.start(device))
                   for kind, rival in (("thread", WithThread), ("calls", Rocecomm))}
        for name, size in zip(ROWS, SIZES.values(), strict=True):
            if wanted(name):
                found = pingpongs(running, size, rounds)
                yield figures.row(name, "us", [t for t, _ in found["thread"]], [t for t, _ in found["calls"]],
                                  'progress="calls"', "<= 1.1x")
