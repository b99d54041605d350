"""close() at any moment, against threads that wait, poll and send."""

import threading
import time

import numpy as np
import pytest

from rocecomm import ClosedError, PeerDeadError, RocecommError, TimeoutError


def hammered(comm, seconds):
    other = 1 - comm.rank
    seen, stop = [], time.monotonic() + seconds + 20

    def worker(kind):
        small, large = np.zeros(8), np.zeros(40000)
        try:
            while time.monotonic() < stop:
                try:
                    if kind == 0:
                        comm.recv(small, other, tag=50, timeout=0.05)
                    elif kind == 1:
                        comm.irecv(large, other, tag=51).wait(0.02)
                    elif kind == 2:
                        comm.progress()
                    elif kind == 3:
                        comm.sendrecv(large, other, large.copy(), other, 52, 52, timeout=1)
                    else:
                        request = comm.isend(small, other, tag=53)
                        request.test()
                        comm.recv(small, other, tag=53, timeout=0.5)
                except TimeoutError:
                    pass
        except (ClosedError, PeerDeadError, RocecommError) as error:
            seen.append(error)
        except BaseException as error:
            seen.append(("unexpected", kind, repr(error)))
    crowd = [threading.Thread(target=worker, args=(kind,)) for kind in range(5)]
    for thread in crowd:
        thread.start()
    time.sleep(seconds)
    comm.close()
    for thread in crowd:
        thread.join(15)
        assert not thread.is_alive()
    assert len(seen) == 5 and not [e for e in seen if isinstance(e, tuple)], seen


def test_close_under_fire(world, scale):
    for seconds in (0.05, 0.3, 0.31)[:scale.rounds(3, 1)]:
        world(2, hammered, seconds)


def names_of_calls(comm):
    region = comm.register(np.zeros(64, "u1"))
    descriptor, one = region.descriptor(), np.zeros(1, "u8")
    remote = comm.open(descriptor)
    calls = {
        "send": lambda: comm.send(one, 0), "recv": lambda: comm.recv(one, 0),
        "isend": lambda: comm.isend(one, 0), "irecv": lambda: comm.irecv(one, 0),
        "probe": lambda: comm.probe(0), "iprobe": lambda: comm.iprobe(0),
        "write": lambda: comm.write(one, remote), "read": lambda: comm.read(one, descriptor),
        "iwrite": lambda: comm.iwrite(one, descriptor), "iread": lambda: comm.iread(one, remote),
        "writev": lambda: comm.writev(one, remote, [0], [0], 8),
        "ireadv": lambda: comm.ireadv(one, remote, [0], [0], 8),
        "fetch_add": lambda: comm.fetch_add(remote, 0, 1),
        "icompare_swap": lambda: comm.icompare_swap(remote, 0, 1, 2),
        "wait_notify": lambda: comm.wait_notify(0), "iwait_notify": lambda: comm.iwait_notify(0),
        "register": lambda: comm.register(one), "open": lambda: comm.open(descriptor),
        "wait_all": lambda: comm.wait_all([]), "wait_any": lambda: comm.wait_any([]),
        "progress": comm.progress, "trim": comm.trim, "barrier": comm.barrier}
    comm.close()
    said = {}
    for name, call in calls.items():
        with pytest.raises(ClosedError) as caught:
            call()
        said[name] = str(caught.value)
    assert {name for name, text in said.items() if not text.startswith(name + ":")} == set(), said


def test_every_call_of_a_closed_communicator_is_named(soft_world):
    soft_world(1, names_of_calls)
