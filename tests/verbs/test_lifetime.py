"""Closing in any order, dropping, using after close, copying, threads, forks, the end."""

import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from verbs.pair import ALL, SMALL, End, Pair, drain

from rocecomm import verbs as v
from rocecomm.errors import ClosedError

ORDERS = list(itertools.permutations(("context", "registration", "endpoint", "completions")))


def build(device):
    """Context, registration, connected queue pair with a pending receive, completion queue."""
    end = End(device, channel=True)
    end.connect(end.address())
    mr = end.mr(np.zeros(4096, "u1"))
    end.qp.post_recv(mr)
    end.recv_cq.req_notify()
    objs = {"context": end.ctx, "registration": mr, "endpoint": end.qp, "completions": end.recv_cq}
    every = [end.ctx, end.pd, end.channel, end.send_cq, end.recv_cq, end.qp, mr]
    return objs, every


@pytest.fixture(autouse=True)
def quick_collections():
    """gc.collect() looks only at what the test made, not at all that was imported before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def fds():
    return len(os.listdir("/proc/self/fd"))


# --------------------------------------------------------------------------- B1
@pytest.mark.parametrize("collect", [False, True])
def test_close_in_every_order(device, scale, collect, recwarn):
    orders = ORDERS if scale.share == 1 else ORDERS[::5]
    build(device)[0]["context"].close()
    gc.collect()
    before = fds()
    for order in orders:
        objs, every = build(device)
        for name in order:
            objs[name].close()
            objs[name].close()
            if collect:
                gc.collect()
        assert all(o.closed for o in every)
        for o in every:
            o.close()
            with pytest.raises(ClosedError, match="is closed"):
                o._ensure_open()
    del objs, every, o
    gc.collect()
    assert fds() == before and not [w for w in recwarn if w.category is ResourceWarning]


@pytest.mark.parametrize("collect", [False, True])
def test_drop_in_every_order(device, scale, collect, recwarn):
    orders = ORDERS if scale.share == 1 else ORDERS[::5]
    build(device)[0]["context"].close()
    gc.collect()
    before = fds()
    for order in orders:
        objs, every = build(device)
        del every
        refs = [weakref.ref(o) for o in objs.values()]
        for name in order:
            del objs[name]
            if collect:
                gc.collect()
        gc.collect()
        assert not any(r() for r in refs)
    assert fds() == before and not [w for w in recwarn if w.category is ResourceWarning]


def test_nothing_is_left_in_the_kernel(device):
    """B1: afterwards `rdma resource show` lists nothing for this process."""
    build(device)[0]["context"].close()
    objs, every = build(device)
    del objs, every
    gc.collect()
    try:
        shown = subprocess.run(["rdma", "resource", "show", "qp"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        shown = None                # no iproute2: the fd counts above have to do
    if shown is not None and shown.returncode == 0:
        assert f"pid {os.getpid()} " not in shown.stdout


def test_children_keep_parents_alive(device, scale):
    def only_ends(device):
        with_parents = Pair(device)
        return with_parents.a.qp, with_parents.b.qp, with_parents.a.send_cq, with_parents.b.recv_cq
    qa, qb, cq, rcq = only_ends(device)
    gc.collect()
    qb.post_recv(None)
    qa.post_send(v.IBV_WR_SEND, None)
    drain(rcq, 1, scale.time)[0].check()
    drain(cq, 1, scale.time)[0].check()


def test_closing_a_parent_closes_its_children(device):
    end = End(device, channel=True)
    mr, ah_pd = end.mr(bytearray(10)), v.PD(end.ctx)
    end.pd.close()
    assert end.qp.closed and mr.closed and not end.send_cq.closed and not ah_pd.closed
    qp = v.QP(ah_pd, end.send_cq)
    end.send_cq.close()
    assert qp.closed and not end.recv_cq.closed
    end.channel.close()
    assert end.recv_cq.closed
    end.close()
    assert ah_pd.closed


def test_reference_cycles_are_collected(device, recwarn):
    end = End(device)
    class Holder:
        pass
    h = Holder()
    h.qp, h.mr, h.me = end.qp, end.mr(np.zeros(64)), h
    ref = weakref.ref(end.qp)
    end.qp.__class__                # noqa: B018
    del end, h
    gc.collect()
    assert ref() is None and not [w for w in recwarn if w.category is ResourceWarning]


def test_context_managers(device):
    with v.open_device(device) as ctx, v.PD(ctx) as pd, v.CQ(ctx, 4) as cq, v.QP(pd, cq) as qp, \
            v.MR(pd, bytearray(8)) as mr:
        assert not any(x.closed for x in (ctx, pd, cq, qp, mr))
    assert all(x.closed for x in (ctx, pd, cq, qp, mr))


# --------------------------------------------------------------------------- D9
def test_copy_and_pickle_are_refused(device):
    end = End(device, channel=True, srq=dict(max_wr=4))
    mr = end.mr(bytearray(10))
    for obj in (end.ctx, end.pd, end.channel, end.send_cq, end.qp, end.srq, mr, mr.buffer,
                end.ctx.alloc(10), end.ctx.provider):
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled: it"):
                act(obj)
    end.close()


def test_plain_records_can_be_pickled(device, scale):
    with Pair(device) as (a, b):
        b.qp.post_recv(None)
        a.qp.post_send(v.IBV_WR_SEND, None)
        wc = drain(a.send_cq, 1, scale.time)[0]
        for obj in (wc, a.qp.query(), a.ctx.query_device(), a.ctx.query_port(), a.gid,
                    v.Device("x", "softnic", 1, 0)):
            assert pickle.loads(pickle.dumps(obj)) == obj == copy.copy(obj)
        assert hash(wc) == hash(copy.copy(wc))


# --------------------------------------------------------------------------- threads
def use_until_closed(act, bad):
    try:
        while True:
            act()
    except ClosedError:
        pass
    except BaseException as error:
        bad.append(error)


def close_under_others(device, factor):
    end = End(device)
    end.connect(end.address())
    mr = end.mr(np.zeros(64, "u1"))
    out, bad = np.zeros(8, v.WC_DTYPE), []
    acts = (lambda: end.send_cq.poll(32), lambda: end.recv_cq.poll_array(out),
            lambda: end.qp.query(), lambda: mr.sge(0, 8), lambda: end.ctx.query_port())
    threads = [threading.Thread(target=use_until_closed, args=(act, bad)) for act in acts]
    for t in threads:
        t.start()
    time.sleep(0.01)
    end.ctx.close()
    for t in threads:
        t.join(20 * factor)
    assert not bad and not any(t.is_alive() for t in threads)


def test_close_while_others_use_it(device, scale):
    """Other threads poll and post until the object is closed under them: ClosedError, no crash."""
    for _ in range(scale.rounds(10, 2)):
        close_under_others(device, scale.time)


def test_two_threads_close_the_same(device):
    for _ in range(10):
        end = End(device)
        threads = [threading.Thread(target=o.close) for o in (end.ctx, end.ctx, end.qp, end.pd, end.qp)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        assert end.ctx.closed and end.qp.closed


# --------------------------------------------------------------------------- forks
def script(code, *args, timeout=200, **env):
    return subprocess.run([sys.executable, "-W", "always", "-c", code, *args], capture_output=True, text=True,
                          timeout=timeout, env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **env})


FORK = """
import gc, os, sys
sys.path.insert(0, "tests")
from verbs.pair import *
from rocecomm.errors import ClosedError
p = Pair(sys.argv[1], channel=True)
a, b = p.a, p.b
mr = b.mr(bytearray(4096))
pid = os.fork()
if pid == 0:
    try:
        for o in (a.ctx, a.pd, a.channel, a.send_cq, a.qp, mr):
            assert o.closed
            try:
                o._ensure_open()
            except ClosedError as e:
                assert f"belongs to process {os.getppid()}" in str(e) and "forked child" in str(e), e
            else:
                raise AssertionError(o)
            o.close()
        for act in (lambda: a.qp.post_send(v.IBV_WR_SEND, None), lambda: a.send_cq.poll(), lambda: mr.rkey,
                    lambda: v.PD(a.ctx), lambda: a.ctx.query_port()):
            try:
                act()
            except ClosedError:
                pass
            else:
                raise AssertionError(act)
        del a, b, p, mr, o
        gc.collect()
        end = End(sys.argv[1])          # the child may open the device for itself
        end.connect(end.address())
        end.qp.post_recv(None)
        end.qp.post_send(v.IBV_WR_SEND, None)
        drain(end.recv_cq, 1, 10)[0].check()
        end.close()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
_, code = os.waitpid(pid, 0)
assert code == 0, code
b.qp.post_recv(mr)
a.qp.post_send(v.IBV_WR_SEND, a.mr(b"still works", 0))
assert drain(b.recv_cq, 1, 10)[0].check().byte_len == 11
drain(a.send_cq, 1, 10)[0].check()
a.close()
b.close()
"""


def test_forked_child_harms_nothing(device):
    done = script(FORK, device)
    assert (done.returncode, done.stderr) == (0, "")


PAGES = """
import os, subprocess, sys
import numpy as np
sys.path.insert(0, "tests")
from verbs.pair import *
p = Pair(sys.argv[1], depth=256, max_recv_wr=100)
a, b = p.a, p.b
arrays = [np.zeros(64, "u1") for _ in range(1000)]
regs = [b.mr(x) for x in arrays[::2]]
src = np.zeros(64, "u1")
smr = a.mr(src)
for i in range(50):
    b.qp.post_recv(regs[i])
pid = os.fork()
if pid == 0:
    total = 0
    for x in arrays[1::2]:
        x[:] = 1
        total += int(x.sum())
    os._exit(0 if total == 500 * 64 else 1)
if sys.argv[2] == "subprocess":
    subprocess.run(["true"], check=True)
for i in range(100):
    src[:] = i + 1
    a.qp.post_send(v.IBV_WR_SEND, smr)
    drain(a.send_cq, 1, 10)[0].check()
    drain(b.recv_cq, 1, 10)[0].check()
    assert (arrays[::2][i] == i + 1).all(), i
    if i < 50:
        b.qp.post_recv(regs[50 + i])
_, code = os.waitpid(pid, 0)
assert code == 0
assert not any(x.any() for x in arrays[1::2])
"""


@pytest.mark.parametrize("how", ["fork", "subprocess"])
def test_pages_shared_with_a_child(device, how):
    """B10: a child writes neighbours of registered memory while the parent receives."""
    done = script(PAGES, device, how)
    assert (done.returncode, done.stderr) == (0, "")


# --------------------------------------------------------------------------- H4: the end
EXIT = """
import os, sys, threading, time
sys.path.insert(0, "tests")
from verbs.pair import *
p = Pair(sys.argv[1], channel=True)
a, b = p.a, p.b
mr = b.mr(np.zeros(100000, "u1"))
b.qp.post_recv(mr)
cycle = [mr, a.qp]; cycle.append(cycle)
memory = np.frombuffer(a.ctx.alloc(4096), "u1")
if "thread" in sys.argv[2]:
    threading.Thread(target=b.channel.get_event, daemon=True).start()
    time.sleep(0.1)
if "peer gone" in sys.argv[2]:
    b.qp.close()
how = sys.argv[2].split()[-1]
if how == "exit3":
    sys.exit(3)
if how == "raise":
    raise ValueError("the user's own")
if how == "hard":
    os._exit(0)
"""


ENDS = [("raise", 1), ("thread exit3", 3), ("peer gone end", 0), ("end", 0), ("exit3", 3), ("hard", 0),
        ("thread end", 0)]


@pytest.mark.parametrize("how, code", ENDS[:3] if SMALL else ENDS)
def test_end_of_the_interpreter(device, scale, how, code):
    start = time.monotonic()
    done = script(EXIT, device, how)
    took = time.monotonic() - start
    assert done.returncode == code, done.stderr
    if how == "raise":
        assert done.stderr.count("Traceback") == 1
        assert done.stderr.strip().endswith("ValueError: the user's own")
    else:
        assert done.stderr == ""
    assert took < 15 * scale.time


def test_import_has_no_side_effects():
    code = """
import os, sys, threading
before = dict(os.environ), set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))
import rocecomm.verbs
assert before == (dict(os.environ), set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd")))
assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
with open("/proc/self/maps") as f:
    text = f.read()
assert "libibverbs" not in text and "libsoftnic" not in text
"""
    done = script(code, OPENBLAS_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_type_of_arguments(device):
    with v.open_device(device) as ctx:
        pd = v.PD(ctx)
        for act in (lambda: v.PD(None), lambda: v.PD("x"), lambda: v.MR(ctx, b""), lambda: v.CQ(pd, 3),
                    lambda: v.QP(pd, None), lambda: v.QP(ctx, ctx), lambda: v.MR(pd), lambda: v.SRQ(pd),
                    lambda: v.CQ(ctx, "many"), lambda: v.AH(pd, None)):
            with pytest.raises(TypeError):
                act()


def test_fields_of_parents(device):
    end = End(device, channel=True, srq=dict(max_wr=4))
    assert end.qp.pd is end.pd and end.qp.send_cq is end.send_cq and end.qp.recv_cq is end.recv_cq
    assert end.qp.srq is end.srq and end.srq.pd is end.pd and end.pd.context is end.ctx
    assert end.send_cq.channel is end.channel and end.channel.context is end.ctx
    assert v.MR(end.pd, bytearray(8), ALL).access_bits == ALL
    end.close()


def make_until_closed(ctx, pd, bad):
    def once():
        v.MR(pd, bytearray(64))
        v.QP(pd, v.CQ(ctx, 4, v.CompChannel(ctx)), srq=v.SRQ(pd, 4))
        v.PD(ctx)
    use_until_closed(once, bad)


def test_close_while_others_make_children(device, scale):
    for _ in range(scale.rounds(20, 3)):
        ctx = v.open_device(device)
        pd, bad = v.PD(ctx), []
        threads = [threading.Thread(target=make_until_closed, args=(ctx, pd, bad)) for _ in range(4)]
        for t in threads:
            t.start()
        time.sleep(0.005)
        ctx.close()
        for t in threads:
            t.join(20 * scale.time)
        assert not bad and not any(t.is_alive() for t in threads)
