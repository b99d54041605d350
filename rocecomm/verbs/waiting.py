"""Sleeping on a file descriptor without the GIL, with signals and close() in mind."""

import math
import select
import time

# how soon close() by another thread is noticed by a sleeper, in seconds
_SLICE = 0.1


def check_timeout(timeout):
    """Returns a number of seconds; TypeError or ValueError for what is none."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds or None, "
                        f"not {type(timeout).__name__}")
    if math.isnan(timeout) or timeout < 0:
        raise ValueError(f"timeout must be 0 or more seconds, not {timeout}")
    return timeout


def wait_readable(owner, fd, timeout):
    """True when `fd` is readable, False after `timeout` seconds (None waits, 0 polls).

    Raises ClosedError if `owner` is closed meanwhile; Python signal handlers run.
    """
    if timeout is not None:
        check_timeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while True:
        left = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
        if poller.poll(math.ceil(max(left, 0) * 1000)):
            return True
        owner._ensure_open()
        if deadline is not None and time.monotonic() >= deadline:
            return False
