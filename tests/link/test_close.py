"""close() at any moment, against threads that wait, poll and send."""

import threading
import time

import numpy as np

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
