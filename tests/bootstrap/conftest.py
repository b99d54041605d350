"""Joining needs no device: these tests do not depend on which one is under test."""

import os

import pytest
import worlds


@pytest.fixture
def world():
    """``world(n, fn, *args, ...)``: see tests/worlds.py."""
    slow = float(os.environ.get("ROCECOMM_TEST_SLOW", "1"))

    def run(n, what, *args, timeout=40.0, **options):
        return worlds.run_world(n, what, *args, device=None, timeout=timeout * slow, **options)

    return run
