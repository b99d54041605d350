"""Every verb that a communicator uses made to fail (H7): an exception in the caller that names it,
nothing on stderr, and what is left is of use or says why not."""

import subprocess
import sys

import pytest
from shim import build


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build(tmp_path_factory.mktemp("shim"))


HEAD = """
import ctypes, errno, os, sys, time
sys.path.insert(0, "tests")
os.environ["ROCECOMM_SOFTNIC"] = sys.argv[1]
import numpy as np
import rocecomm
from rocecomm import ClosedError, JoinError, PeerDeadError, RocecommError, VerbsError
from together import close, start, together
lib = ctypes.CDLL(sys.argv[1])

def fail(verb, times=1, err=errno.EIO, skip=0):
    (ctypes.c_char * 64).in_dll(lib, "shim_verb").value = verb.encode()
    ctypes.c_int.in_dll(lib, "shim_errno").value = err
    ctypes.c_int.in_dll(lib, "shim_skip").value = skip
    ctypes.c_int.in_dll(lib, "shim_times").value = times

def never_failed():
    return ctypes.c_int.in_dll(lib, "shim_times").value

def raises(act, verb, err=errno.EIO):
    try:
        act()
    except VerbsError as error:
        assert (error.verb, error.errno, error.device) == (verb, err, "soft0"), (verb, error, error.verb)
        assert verb in str(error) and "soft0" in str(error) or "memory" in str(error), error
        return error
    raise AssertionError(f"{verb}: nothing was raised")

def exchange(a, b, n=20000):
    got = np.zeros(n)
    receiving, sending = b.irecv(got, a.rank), a.isend(np.ones(n), b.rank)
    while not (receiving.test() and sending.test()):
        pass
    receiving.wait(), sending.wait()
    assert (got == 1).all()
"""


def run(shim, code):
    done = subprocess.run([sys.executable, "-W", "always", "-c", HEAD + code, str(shim)], text=True,
                          capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_while_starting(shim):
    """One rank of two meets the fault; the other is told, and both can start again."""
    run(shim, """
for verb, skips, times in (("ibv_alloc_pd", 1, 1), ("ibv_create_comp_channel", 1, 1),
                           ("ibv_create_cq", 1, 1), ("ibv_create_srq", 1, 1), ("ibv_create_qp", 1, 99),
                           ("ibv_reg_mr", 3, 1), ("ibv_modify_qp", 5, 2), ("ibv_query_device", 1, 1),
                           ("ibv_post_srq_recv", 2, 1)):
    for skip in range(0, skips, 2):
        fail(verb, times=times, skip=skip)
        begin = time.monotonic()
        made = start(2, "soft0", timeout=10)
        assert time.monotonic() - begin < 5, (verb, skip)
        assert never_failed() < times, (verb, skip)
        fail("")
        errors = [x for x in made if isinstance(x, BaseException)]
        assert any(isinstance(x, VerbsError) and x.verb == verb for x in errors), (verb, skip, errors)
        assert len(errors) == 2, (verb, skip, made)
        for error in errors:
            if not isinstance(error, VerbsError):
                assert isinstance(error, JoinError) and verb in str(error), (verb, skip, error)
with together(2, "soft0") as comms:
    exchange(*comms)
""")


def test_in_a_transfer(shim):
    run(shim, """
big = np.zeros(20000)
# posting: that connection is gone, with this cause, and others are not
for large in (False, True):
    with together(3, "soft0", dead_after=1) as (a, b, c):
        pending = a.irecv(np.zeros(3), 1, tag=9)
        fail("ibv_post_send", err=errno.ENOMEM)
        data = big if large else big[:3]
        first = raises(lambda: a.isend(data, 1).wait(), "ibv_post_send", errno.ENOMEM)
        assert "rank 1" in str(first) and "ROCECOMM" not in first.verb
        for call in (lambda: a.send(data, 1), lambda: a.recv(np.zeros(3), 1), pending.wait):
            again = raises(call, "ibv_post_send", errno.ENOMEM)
            assert str(again).partition(": ")[2] == str(first).partition(": ")[2]
        exchange(a, c)
        exchange(c, b)
# posting a read
with together(3, "soft0", dead_after=1) as (a, b, c):
    sending = b.isend(big, 0)
    receiving = None
    fail("ibv_post_send", err=errno.ENOMEM)
    raises(lambda: a.recv(big.copy(), 1), "ibv_post_send", errno.ENOMEM)
    exchange(a, c)
    a.close()
# registering: the transfer fails, the connection does not
with together(2, "soft0") as (a, b):
    fail("ibv_reg_mr", err=errno.ENOMEM)
    raises(lambda: a.send(big, 1), "ibv_reg_mr", errno.ENOMEM)
    exchange(a, b)
    sending = b.isend(big, 0)
    fail("ibv_reg_mr", err=errno.ENOMEM)
    raises(lambda: a.recv(big.copy(), 1), "ibv_reg_mr", errno.ENOMEM)
    assert sending.wait(5) == big.nbytes                 # as documented: the sender does not notice
    exchange(a, b)
# the queues that all share: the communicator is of no use, and says so
for verb in ("ibv_poll_cq", "ibv_post_srq_recv", "ibv_req_notify_cq"):
    with together(2, "soft0", dead_after=1) as (a, b):
        pending = a.irecv(big.copy(), 1, tag=9)
        if verb == "ibv_post_srq_recv":
            for _ in range(40):
                b.send(big[:3], 0)
        fail(verb)
        raises(lambda: [a.recv(np.zeros(3), 1, timeout=5) for _ in range(40)], verb)
        assert never_failed() == 0
        for call in (lambda: a.send(big[:3], 1), lambda: a.send(big, 1), pending.wait,
                     lambda: a.recv(big.copy(), 1)):
            raises(call, verb)
        a.close()
        a.close()
        try:
            a.send(big, 1)
        except (ClosedError, VerbsError):
            pass
""")


def test_while_closing(shim):
    """What the device refuses to let go of is said; everything else is given back."""
    run(shim, """
for verb in ("ibv_destroy_qp", "ibv_destroy_cq", "ibv_destroy_srq", "ibv_dereg_mr", "ibv_dealloc_pd",
             "ibv_destroy_comp_channel", "ibv_close_device"):
    made = start(2, "soft0")
    exchange(*made)
    made[1].close()
    fail(verb)
    raises(made[0].close, verb)
    assert never_failed() == 0 and made[0].closed
    made[0].close()                                     # the second time there is nothing to do
# a registration of one message that does not go is tried again, the message itself is fine
with together(2, "soft0") as (a, b):
    fail("ibv_dereg_mr")
    exchange(a, b)
    assert never_failed() == 0
    exchange(a, b)
""")
