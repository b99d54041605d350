"""The catalogue of completion statuses: each is provoked in every kind of request (H7).

Every pending request ends with an error that names peer, operation, bytes, status, cause and
setting; later calls fail at once with the first cause; the other peers go on.
"""

import errno
import re
import time
from pathlib import Path

import numpy as np
import pytest
from together import close, start

import rocecomm
from rocecomm.enums import WCStatus
from rocecomm.errors import VerbsError
from rocecomm.link.statuses import STATUSES
from rocecomm.verbs import soft

ROOT = Path(__file__).resolve().parent.parent.parent


def row(number):
    entry = STATUSES[number]
    name = f"`{entry.name}`" if number >= 0 else entry.name
    return f"| {number} {name} | {entry.meaning} | {entry.cause} | {entry.remedy} |"


def test_the_page_is_the_catalogue():
    page = (ROOT / "docs/reference/errors.md").read_text().splitlines()
    for number in STATUSES:
        assert row(number) in page, f"docs/reference/errors.md should have the row\n{row(number)}"
    assert {int(s) for s in WCStatus} == set(range(24)) <= set(STATUSES)
    assert all(entry.meaning and (number == 0 or entry.cause and entry.remedy)
               for number, entry in STATUSES.items())


def test_settings_that_remedies_name_exist():
    from rocecomm.config import settings
    known = {field.metadata["env"] for field in settings()}
    named = {word for entry in STATUSES.values() for word in re.findall(r"ROCECOMM_\w+", entry.remedy)}
    assert named <= known and len(named) > 8


def inject(status, **options):
    """The fault, or a skip where the device says that it has no such thing."""
    try:
        return soft.inject(status, **options)
    except VerbsError as error:
        if error.errno == errno.EOPNOTSUPP:
            pytest.skip(f"the device cannot inject faults: {error}")
        raise


def raised(call, *args, **options):
    with pytest.raises(rocecomm.RocecommError) as caught:
        call(*args, **options)
    return caught.value


# what is under way when the fault strikes -> the work requests it strikes, their name, bytes
SCENES = {
    "eager": ("send", "send", "32 bytes"),
    "announced": ("send", "send", None),
    "pull": ("rdma_read", "read of the peer's buffer", "160000 bytes"),
    "heartbeat": ("rdma_write", "heartbeat", None),
    "receive": ("recv", "receive", None),
}


def strike(a, b, scene):
    """Rank 0 (`a`) posts what the scene says to rank 1 (`b`); returns the requests of both."""
    small, large = np.full(4, 3.0), np.full(20000, 3.0)
    mine = [a.irecv(np.zeros(4), 1, tag=50), a.irecv(np.zeros(20000), 1, tag=51)]
    theirs = []
    if scene == "eager":
        a.send(small, 1)                    # it has left: what became of it shows in what follows
    elif scene == "announced":
        mine += [a.isend(large, 1, tag=1), a.isend(large, 1, tag=2)]
    elif scene == "pull":
        theirs.append(b.isend(large, 0, tag=3))
        mine.append(a.irecv(np.zeros(20000), 1, tag=3))
    elif scene == "receive":
        theirs.append(b.isend(small, 0, tag=4))
        mine.append(a.irecv(np.zeros(4), 1, tag=4))
    return mine, theirs


def one_status(comms, scene, status):
    a, b, c = comms
    operation, words, nbytes = SCENES[scene]
    with inject(status, op=operation, times=1, qp=a._engine.queue_pairs()[1]) as fault:
        mine, theirs = strike(a, b, scene)
        errors = [raised(request.wait, 10) for request in mine]
        assert fault.hit == 1
        assert all(request.done and request.error is not None for request in mine)
    big, begin = np.zeros(20000), time.monotonic()
    errors += [raised(call, big, 1) for call in (a.send, a.recv)]
    errors += [raised(call(big, 1).wait) for call in (a.isend, a.irecv)]
    errors += [raised(a.sendrecv, big, 1, big.copy(), 1)]
    assert time.monotonic() - begin < 2
    causes = {str(error).partition(": ")[2] for error in errors}
    assert len(causes) == 1, causes                         # the first one
    text, entry = causes.pop(), STATUSES[status]
    for part in ("rank 1", a.device, f"a {words}", entry.name, entry.cause, entry.remedy, nbytes or ""):
        assert part in text, (part, text)
    kind = rocecomm.PeerDeadError if entry.dead else rocecomm.CompletionError
    for error in errors:
        assert type(error) is kind and error.peer == 1
        assert entry.dead or error.status == status
    got = np.zeros(20000)                                   # the others go on
    there, sending = c.irecv(got, 0), a.isend(big + 5, 2)
    while not (there.test() and sending.test()):
        pass
    assert (got == 5).all()
    return theirs


@pytest.mark.parametrize("scene", SCENES)
def test_every_status_in_every_kind_of_request(device, scene):
    comms, theirs = [], []
    try:
        for status in list(WCStatus)[1:]:
            comms += start(3, device, dead_after=1)
            theirs += one_status(comms[-3:], scene, status)
    finally:
        close(comms)                                        # those that wait for the lost ones too
    assert len(comms) == 69 and all(request.done for request in theirs)
