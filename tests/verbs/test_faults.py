"""Every verb made to fail once (case H7): an exception in the caller that names it, nothing
on stderr, nothing lost; and what happens when memory cannot be given back."""

import subprocess
import sys

import pytest
from shim import build


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build(tmp_path_factory.mktemp("shim"))


HEAD = """
import ctypes, errno, gc, os, sys, warnings, weakref
sys.path.insert(0, "tests")
import numpy as np
os.environ["ROCECOMM_SOFTNIC"] = sys.argv[1]
from verbs.pair import *
from rocecomm.errors import *
lib = ctypes.CDLL(sys.argv[1])
def fail(verb, times=1, err=errno.EIO):
    (ctypes.c_char * 64).in_dll(lib, "shim_verb").value = verb.encode()
    ctypes.c_int.in_dll(lib, "shim_errno").value = err
    ctypes.c_int.in_dll(lib, "shim_times").value = times
def raises(verb, act, err=errno.EIO):
    try:
        act()
    except VerbsError as e:
        assert (e.verb, e.errno, e.device) == (verb, err, "soft0"), (e, e.verb, e.errno, e.device)
        assert verb in str(e) and "soft0" in str(e), e
    else:
        raise AssertionError(f"{verb}: nothing was raised")
"""


def run(shim, code):
    done = subprocess.run([sys.executable, "-W", "always", "-c", HEAD + code, str(shim)], capture_output=True,
                          text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_every_verb_that_makes_or_asks(shim):
    run(shim, """
fail("ibv_open_device", err=errno.EACCES)
try:
    v.open_device("soft0")
except DeviceNotFoundError as e:
    assert "Permission denied" in str(e) and "soft0" in str(e), e
else:
    raise AssertionError()
p = Pair("soft0", channel=True, srq=dict(max_wr=8))
q = Pair("soft0")
a, b, plain = p.a, p.b, q.a
mr = a.mr(bytearray(64))
acts = {
    "ibv_alloc_pd": lambda: v.PD(a.ctx),
    "ibv_reg_mr": lambda: v.MR(a.pd, bytearray(8)),
    "ibv_create_comp_channel": lambda: v.CompChannel(a.ctx),
    "ibv_create_cq": lambda: v.CQ(a.ctx, 4),
    "ibv_create_srq": lambda: v.SRQ(a.pd, 4),
    "ibv_create_qp": lambda: v.QP(a.pd, a.send_cq),
    "ibv_create_ah": lambda: v.AH(a.pd, v.AHAttr(dgid=a.gid.gid, sgid_index=a.gid.index)),
    "ibv_query_device": a.ctx.query_device,
    "ibv_query_pkey": a.ctx.query_pkey,
    "ibv_modify_qp": lambda: a.qp.modify(v.IBV_QPS_RTS),
    "ibv_query_qp": a.qp.query,
    "ibv_modify_srq": lambda: a.srq.modify(srq_limit=0),
    "ibv_query_srq": a.srq.query,
    "ibv_resize_cq": lambda: a.send_cq.resize(64),
    "ibv_post_send": lambda: a.qp.post_send(v.IBV_WR_SEND, mr),
    "ibv_post_recv": lambda: plain.qp.post_recv(),
    "ibv_post_srq_recv": lambda: a.srq.post_recv(),
    "ibv_poll_cq": lambda: a.send_cq.poll(4),
    "ibv_req_notify_cq": a.send_cq.req_notify,
}
for verb, act in acts.items():
    fail(verb)
    raises(verb, act)
for verb, act in (("ibv_poll_cq", lambda: a.send_cq.poll(100)),
                  ("ibv_poll_cq", lambda: a.send_cq.poll_array(np.zeros(4, v.WC_DTYPE))),
                  ("ibv_post_send", lambda: a.qp.post_send_array(np.zeros(3, v.SEND_WR_DTYPE))),
                  ("ibv_post_recv", lambda: plain.qp.post_recv_array(np.zeros(3, v.RECV_WR_DTYPE))),
                  ("ibv_post_srq_recv", lambda: a.srq.post_recv_array(np.zeros(3, v.RECV_WR_DTYPE)))):
    fail(verb)
    raises(verb, act)
# nothing was lost by it
b.srq.post_recv()
a.qp.post_send(v.IBV_WR_SEND, None)
drain(b.recv_cq, 1)[0].check()
drain(a.send_cq, 1)[0].check()
for x in (a, b, q.a, q.b):
    x.close()
""")


def test_every_verb_that_ends_something(shim):
    """close() raises and leaves the object open; the next close() works."""
    run(shim, """
end = End("soft0", channel=True, srq=dict(max_wr=4))
mr = end.mr(bytearray(64))
ah = v.AH(end.pd, v.AHAttr(dgid=end.gid.gid, sgid_index=end.gid.index))
for verb, obj in (("ibv_destroy_ah", ah), ("ibv_dereg_mr", mr), ("ibv_destroy_qp", end.qp),
                  ("ibv_destroy_srq", end.srq), ("ibv_destroy_cq", end.send_cq),
                  ("ibv_destroy_comp_channel", end.channel), ("ibv_dealloc_pd", end.pd),
                  ("ibv_close_device", end.ctx)):
    fail(verb, err=errno.EBUSY)
    raises(verb, obj.close, errno.EBUSY)
    assert not obj.closed, verb
    obj._ensure_open()
    obj.close()
    assert obj.closed, verb
# a child that cannot be closed keeps its parents open
end = End("soft0")
mr = end.mr(bytearray(64))
fail("ibv_dereg_mr", err=errno.EBUSY)
raises("ibv_dereg_mr", end.ctx.close, errno.EBUSY)
assert not end.ctx.closed and not end.pd.closed and not mr.closed and mr.rkey
end.ctx.close()
assert mr.closed
""")


def test_busy_registration_keeps_its_memory(shim):
    """A peer stopped in the middle of a copy: the export stays held until dereg works."""
    run(shim, """
end = End("soft0")
block = bytearray(4096)
mr = v.MR(end.pd, block)
fail("ibv_dereg_mr", 2, errno.EBUSY)
for _ in range(2):
    try:
        mr.close()
    except VerbsError as e:
        assert e.errno == errno.EBUSY and "stopped in the middle of a copy" in str(e), e
    else:
        raise AssertionError()
    try:
        block.extend(b"x" * 10**6)
    except BufferError:
        pass
    else:
        raise AssertionError("the memory moved under a registration")
mr.close()
block.extend(b"x" * 10**6)
end.close()
""")


def test_dropped_busy_registration_is_leaked_and_said(shim):
    run(shim, """
end = End("soft0")
array = np.zeros(10**6, "u1").view(type("Array", (np.ndarray,), {}))
ref = weakref.ref(array)
mr = v.MR(end.pd, array)
del array
fail("ibv_dereg_mr", 100, errno.EBUSY)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    del mr
    gc.collect()
text = [str(w.message) for w in seen if w.category is ResourceWarning]
assert len(text) == 1 and "a MR of soft0 could not be freed" in text[0] and "ibv_dereg_mr" in text[0], text
assert ref() is not None and ref().sum() == 0     # never handed out again
with warnings.catch_warnings():
    warnings.simplefilter("error")              # even as an error it cannot leave a destructor
    mr2 = v.MR(end.pd, bytearray(10))
    del mr2
    gc.collect()
""")


def test_out_of_memory_and_locked_memory(shim):
    out = run(shim, """
import resource
end = End("soft0")
fail("ibv_reg_mr", err=errno.ENOMEM)
raises("ibv_reg_mr", lambda: v.MR(end.pd, bytearray(8)), errno.ENOMEM)
soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, soft))
for err, word in ((errno.ENOMEM, "'ulimit -l', which is 8 KiB here"), (errno.EFAULT, "mapped read-only")):
    fail("ibv_reg_mr", err=err)
    try:
        v.MR(end.pd, bytearray(8))
    except VerbsError as e:
        assert word in str(e), e
        print(e)
    else:
        raise AssertionError()
end.close()
""")
    assert "8 bytes with access LOCAL_WRITE" in out


def test_no_device_list(shim):
    run(shim, """
fail("ibv_get_device_list", 100, errno.ENOSYS)
assert not [d for d in v.devices() if d.provider == "softnic"]
try:
    v.open_device("soft0")
except DeviceNotFoundError as e:
    assert "no RDMA support" in str(e), e
else:
    raise AssertionError()
""")
