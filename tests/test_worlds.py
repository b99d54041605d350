"""The test worlds themselves: results, errors, deaths, hangs, and nothing left behind."""

import os
import signal
import time

import pytest
import worlds


def exchange(peers, base):
    peers.barrier()
    return peers.all_gather("numbers", base + peers.rank)


def fail_on_one(peers):
    if peers.rank == 1:
        raise ValueError("seven")


def hang_on_zero(peers):
    if peers.rank == 0:
        time.sleep(600)


def die(peers):
    if peers.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_results_come_by_rank():
    assert worlds.run_world(3, exchange, 10, device=None, plain=True) == [[10, 11, 12]] * 3


def test_error_names_rank_and_line():
    with pytest.raises(worlds.RankError, match=r"(?s)rank 1 of 2 raised ValueError: seven.*fail_on_one"):
        worlds.run_world(2, fail_on_one, device=None, plain=True)


def test_hang_shows_stacks_and_ends_processes():
    w = worlds.World(2, hang_on_zero, (), device=None, plain=True, timeout=2.0)
    try:
        with pytest.raises(worlds.RankError, match=r"(?s)did not end.*hang_on_zero"):
            w.wait()
    finally:
        w.end()
    assert all(p.returncode is not None for p in w.procs) and not w.folder.exists()


def test_death():
    got = worlds.run_world(2, die, device=None, plain=True, mortal=[1])
    assert got == ["alive", worlds.Died(signal.SIGKILL)]
    with pytest.raises(worlds.RankError, match="killed by SIGKILL"):
        worlds.run_world(2, die, device=None, plain=True)


def test_script_output(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("import os; print('rank', os.environ['ROCECOMM_RANK'])")
    assert worlds.run_world(2, script, device=None) == ["rank 0\n", "rank 1\n"]
