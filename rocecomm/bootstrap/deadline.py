"""A point in time that may be never."""

import math
import time

from ..config import check_timeout


class Deadline:
    """``Deadline(seconds)``; None never passes, 0 has passed at once."""

    def __init__(self, timeout):
        self.timeout = check_timeout(timeout)
        self._end = math.inf if self.timeout is None else time.monotonic() + self.timeout

    def remaining(self):
        """Seconds left, 0 when it has passed, ``math.inf`` for never."""
        return max(0.0, self._end - time.monotonic())

    def expired(self):
        return time.monotonic() >= self._end

    def slice(self, seconds):
        """The smaller of ``seconds`` and what is left."""
        return min(seconds, self.remaining())

    def __str__(self):
        return "for ever" if self.timeout is None else f"{self.timeout:g} s"


def backoff(start=0.001, limit=0.02):
    """Sleeping times that grow from ``start`` to ``limit`` seconds."""
    pause = start
    while True:
        yield pause
        pause = min(limit, pause * 1.3)
