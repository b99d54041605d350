"""An error about a wrong argument is one line, also where the argument is a large array."""

import numpy as np
import pytest

import rocecomm
from rocecomm.errors import brief


@pytest.mark.parametrize("value, text", [
    (3, "3"), ("rw", "'rw'"), (None, "None"), (np.arange(3), "array([0, 1, 2])"), (2.5, "2.5")])
def test_short_values_are_shown_whole(value, text):
    assert brief(value) == text


@pytest.mark.parametrize("value", [
    np.zeros((40, 40)), "x" * 10**6, [list(range(100))] * 100, 10**300, {1: "y" * 999}])
def test_long_values_are_one_short_line(value):
    assert len(brief(value)) < 200 and "\n" not in brief(value) and "..." in brief(value)


def wrong(comm):
    large, target = np.ones((40, 40)), np.zeros(4)
    region = comm.register(target, "rw")
    remote = comm.open(region.descriptor())
    calls = {
        "dst": lambda: comm.send(target, large), "src": lambda: comm.recv(target, large),
        "tag": lambda: comm.isend(target, 0, tag=large),
        "seconds": lambda: comm.recv(target, 0, timeout=large),
        "access": lambda: comm.register(target, large), "offset": lambda: comm.read(target, remote, large),
        "value": lambda: comm.fetch_add(remote, 0, large),
        "reduction": lambda: comm.all_reduce(target, large),
    }
    texts = {}
    for name, call in calls.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        texts[name] = str(caught.value)
    region.close()
    return texts


def test_errors_are_one_line(world):
    for name, text in world(1, wrong)[0].items():
        assert name in text and len(text) < 300 and "\n" not in text, text


@pytest.mark.parametrize("arguments", [{"store": np.ones(999)}, {"rank": np.arange(999), "world_size": 2},
                                       {"timeout": np.ones(999)}, {"progress": np.ones(999)}])
def test_errors_of_init_are_one_line(arguments):
    with pytest.raises((TypeError, ValueError)) as caught:
        rocecomm.init(**arguments)
    text = str(caught.value)
    assert next(iter(arguments)) in text and len(text) < 300 and "\n" not in text, text
