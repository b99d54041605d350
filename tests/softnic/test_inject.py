"""rocecomm.verbs.soft: faults by request from Python, their counters, and what is refused."""

import errno
import gc
import os
import pickle
import subprocess
import sys
import time
import warnings

import pytest

from rocecomm import verbs as v
from rocecomm.enums import WCStatus
from rocecomm.errors import DeviceNotFoundError, VerbsError
from rocecomm.verbs import provider, soft

pytest_plugins = ["rocecomm.testing"]

SEND, WRITE, READ = v.IBV_WR_SEND, v.IBV_WR_RDMA_WRITE, v.IBV_WR_RDMA_READ


def write(pair, opcode=WRITE, wr_id=0):
    """One request of side a and the status that it ends with."""
    pair.a.qp.post_send(opcode, pair.a.mr, wr_id=wr_id, remote_addr=pair.b.mr.addr, rkey=pair.b.mr.rkey)
    (wc,) = pair.a.wait()
    assert wc.wr_id == wr_id
    return wc.status


def test_a_rule_acts_until_it_is_removed(soft_pair):
    with soft.inject("delay", op="rdma_write", seconds=0.03) as fault:
        assert fault.rule == "delay:op=rdma_write,s=0.03" and fault.active
        start = time.monotonic()
        assert write(soft_pair) == v.IBV_WC_SUCCESS
        assert time.monotonic() - start >= 0.03
        assert write(soft_pair, READ) == v.IBV_WC_SUCCESS
        assert (fault.matched, fault.hit) == (1, 1)
    assert not fault.active and (fault.matched, fault.hit) == (1, 1)
    assert write(soft_pair) == v.IBV_WC_SUCCESS
    assert fault.matched == 1
    fault.remove()      # twice is fine
    assert "removed" in repr(fault)
    with pytest.raises(TypeError):
        pickle.dumps(fault)
    with pytest.raises(TypeError):
        soft.Fault()


@pytest.mark.parametrize("status", [s for s in WCStatus if s])
@pytest.mark.parametrize("spelling", ["member", "short"])
def test_every_status_of_the_catalogue(make_soft_pair, status, spelling):
    pair = make_soft_pair()
    kind = status if spelling == "member" else status.name.removeprefix("IBV_WC_").lower()
    with soft.inject(kind, context=pair.a.ctx, after=1) as fault:
        assert write(pair, wr_id=1) == v.IBV_WC_SUCCESS
        assert write(pair, wr_id=2) == status
        assert write(pair, wr_id=3) == v.IBV_WC_WR_FLUSH_ERR
        assert (fault.matched, fault.hit) == (2, 1)
    assert pair.a.qp.query().qp_state == v.IBV_QPS_ERR


def hits(pair, n, **settings):
    found, before = [], 0
    with soft.inject("delay", seconds=1e-6, **settings) as fault:
        for i in range(n):
            assert write(pair) == v.IBV_WC_SUCCESS
            if fault.hit > before:
                found.append(i)
            before = fault.hit
    return found


def test_the_same_seed_hits_the_same_requests(soft_pair):
    a = hits(soft_pair, 40, p=0.3, seed=7)
    assert a == [0, 2, 6, 9, 11, 22, 27, 32, 34, 37, 39]      # on every machine
    assert hits(soft_pair, 40, p=0.3, seed=7) == a != hits(soft_pair, 40, p=0.3, seed=8)
    assert hits(soft_pair, 10, after=2, times=3) == [2, 3, 4]
    assert hits(soft_pair, 10, p=0) == []


def test_which_requests(soft_pair, make_soft_pair):
    other = make_soft_pair()
    one = soft.inject("delay", seconds=1e-6, qp=soft_pair.a.qp)
    number = soft.inject("delay", seconds=1e-6, qp=other.a.qp.qp_num)
    context = soft.inject("delay", seconds=1e-6, context=soft_pair.a.ctx)
    everywhere = soft.inject("delay", seconds=1e-6, device="soft0")
    elsewhere = soft.inject("delay", seconds=1e-6, device="soft1")
    reads = soft.inject("delay", seconds=1e-6, op=[READ, "atomic"])
    for pair in (soft_pair, other):
        assert write(pair) == v.IBV_WC_SUCCESS
    assert write(soft_pair, READ) == v.IBV_WC_SUCCESS
    assert [f.matched for f in (one, number, context, everywhere, elsewhere, reads)] == [2, 1, 2, 3, 0, 1]
    soft_pair.a.close()
    assert not one.active and not context.active      # they were for that context
    assert number.active and everywhere.active
    for fault in (number, everywhere, elsewhere, reads):
        fault.remove()


def test_a_text_of_several_rules(soft_pair, soft_faults):
    fault = soft_faults("delay:us=1,times=1;general_err:after=1")
    assert write(soft_pair) == v.IBV_WC_SUCCESS
    assert write(soft_pair) == v.IBV_WC_GENERAL_ERR
    assert (fault.matched, fault.hit) == (4, 2)
    soft_faults.clear()
    assert not fault.active


def test_receives_end_with_a_status(soft_pair, soft_faults):
    soft_faults("loc_access_err", context=soft_pair.b.ctx, op="recv")
    soft_pair.b.qp.post_recv(soft_pair.b.mr)
    soft_pair.a.qp.post_send(SEND, soft_pair.a.mr)
    assert soft_pair.a.wait()[0].status == v.IBV_WC_SUCCESS
    assert soft_pair.b.wait()[0].status == v.IBV_WC_LOC_ACCESS_ERR


def test_access_error_at_both_ends(soft_pair, soft_faults):
    soft_faults("access")
    assert write(soft_pair) == v.IBV_WC_REM_ACCESS_ERR
    event = soft_pair.b.ctx.get_async_event(5)
    assert event == (v.IBV_EVENT_QP_ACCESS_ERR, soft_pair.b.qp)


def test_port(make_soft_pair):
    pair = make_soft_pair(timeout=12, retry_cnt=1)
    ctx = pair.b.ctx
    with soft.port_down(ctx):
        assert ctx.query_port().state == v.IBV_PORT_DOWN
        assert pair.a.ctx.query_port().state == v.IBV_PORT_ACTIVE
        assert ctx.get_async_event(5) == (v.IBV_EVENT_PORT_ERR, 1)
        start = time.monotonic()
        assert write(pair) == v.IBV_WC_RETRY_EXC_ERR
        assert time.monotonic() - start > 2 * 0.0167
    assert ctx.query_port().state == v.IBV_PORT_ACTIVE
    assert ctx.get_async_event(5) == (v.IBV_EVENT_PORT_ACTIVE, 1)
    with soft.port_down(ctx):
        pair.close()


def test_peer_death(make_soft_pair):
    pair = make_soft_pair(timeout=20)       # 34 s: a death is not waited for
    start = time.monotonic()
    pair.a.qp.post_send(SEND, pair.a.mr)
    assert not pair.a.cq.poll(1)
    soft.peer_death(pair.a.qp)
    assert pair.a.wait()[0].status == v.IBV_WC_RETRY_EXC_ERR
    assert time.monotonic() - start < 10
    assert pair.b.qp.query().qp_state == v.IBV_QPS_RTS
    lonely = v.QP(pair.a.pd, pair.a.cq)
    with pytest.raises(VerbsError, match="not connected") as caught:
        soft.peer_death(lonely)
    assert caught.value.errno == errno.ENOTCONN


def test_cq_overrun(soft_pair):
    soft.cq_overrun(soft_pair.a.cq)
    assert soft_pair.a.ctx.get_async_event(5) == (v.IBV_EVENT_CQ_ERR, soft_pair.a.cq)
    assert soft_pair.a.ctx.get_async_event(5) == (v.IBV_EVENT_QP_FATAL, soft_pair.a.qp)
    with pytest.raises(VerbsError) as caught:
        soft_pair.a.cq.poll(1)
    assert caught.value.errno == errno.EOVERFLOW


@pytest.mark.parametrize("kind, settings, word", [
    ("dorp", {}, "begins with dorp"), ("delay", {}, "how long"), ("drop", {"op": "fly"}, "op=fly"),
    ("drop", {"device": "mlx5_0"}, "soft0 to soft7"), ("drop", {"times": 0}, "never act"),
    ("rnr", {"op": READ}, "cannot happen"), ("drop", {"after": -1}, "after=-1"),
    ("drop", {"seconds": 1.0}, "takes no s="), ("drop", {"qp": 1 << 24}, "qp=16777216"),
    ("drop:p=0.1;delay", {}, '"delay"'), ("", {}, "no fault rule")])
def test_what_cannot_be_used_is_refused_in_words(kind, settings, word):
    with pytest.raises(VerbsError) as caught:
        soft.inject(kind, **settings)
    assert caught.value.errno == errno.EINVAL and word in str(caught.value), caught.value


@pytest.mark.parametrize("kind, settings, error", [
    (7, {}, TypeError), ("drop", {"p": "0.1"}, TypeError), ("drop", {"p": float("nan")}, ValueError),
    ("drop", {"p": -0.5}, ValueError), ("delay", {"seconds": -1}, ValueError),
    ("drop", {"times": 1.5}, TypeError), ("drop;drop", {"times": 1}, ValueError),
    ("drop", {"context": "soft0"}, TypeError), ("drop\0", {}, ValueError)])
def test_wrong_arguments(kind, settings, error):
    with pytest.raises(error):
        soft.inject(kind, **settings)


def test_too_many_rules(soft_device):
    faults = [soft.inject("drop", context=soft_device) for _ in range(64)]
    with pytest.raises(VerbsError, match="remove some") as caught:
        soft.inject("drop")
    assert caught.value.errno == errno.ENOSPC
    for fault in faults:
        fault.remove()


def test_environment_is_refused_when_the_device_is_opened(soft_dir, soft_faults):
    soft_faults.environment("delay:us=10;drop:p=often")
    with pytest.raises(DeviceNotFoundError) as caught:
        v.open_device("soft0")
    assert "ROCECOMM_SOFT_FAULT" in str(caught.value) and '"drop:p=often"' in str(caught.value)
    assert "between 0 and 1" in str(caught.value)


def test_environment_acts(make_soft_pair, soft_faults):
    soft_faults.environment("IBV_WC_FATAL_ERR:after=1")
    pair = make_soft_pair()
    assert write(pair) == v.IBV_WC_SUCCESS
    assert write(pair) == v.IBV_WC_FATAL_ERR


def test_a_device_that_is_not_soft_says_so(tmp_path, soft_dir):
    """A library with libibverbs' ABI and none of our extras, as libibverbs is."""
    hide, own = tmp_path / "plain.so", provider.library_path("softnic")
    code = ["#include <dlfcn.h>", "#include <stddef.h>", "typedef void *P; typedef P (*F)(P, P, P, P, P);",
            f'static F of(const char *n) {{ return dlsym(dlopen("{own}", 2), n); }}']
    code += [f'P {name}(P a, P b, P c, P d, P e) {{ return of("{name}")(a, b, c, d, e); }}' for name in VERBS]
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", hide, "-"], text=True, check=True,
                   input="\n".join(code))
    plain = provider.Provider("libibverbs", str(hide))
    with v.Context(plain, "soft0") as ctx:
        for call in (lambda: soft.inject("drop", context=ctx), lambda: soft.port_down(ctx)):
            with pytest.raises(VerbsError, match=r"soft devices .* only, .* to .*plain\.so") as caught:
                call()
            assert caught.value.errno == errno.EOPNOTSUPP


VERBS = ["ibv_" + name for name in """get_device_list free_device_list open_device close_device query_device
query_gid query_pkey get_async_event ack_async_event alloc_pd dealloc_pd reg_mr dereg_mr create_comp_channel
destroy_comp_channel create_cq destroy_cq get_cq_event ack_cq_events create_srq modify_srq query_srq
destroy_srq create_qp modify_qp query_qp destroy_qp create_ah destroy_ah""".split()]


def test_a_forked_child_has_no_rules_of_its_parent(soft_pair, soft_faults):
    fault = soft_faults("general_err")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert not fault.active
            fault.remove()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert fault.active and write(soft_pair) == v.IBV_WC_GENERAL_ERR


def test_import_loads_no_library():
    code = """if True:
        import sys
        import rocecomm.verbs.soft
        assert "pytest" not in sys.modules and "rocecomm.testing" not in sys.modules
        assert "libsoftnic" not in open("/proc/self/maps").read()"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_control_verbs_refused(soft_device, soft_faults):
    """The nth call of a verb fails with the errno that was asked for; the next one does not."""
    pd = v.PD(soft_device)
    cq = v.CQ(soft_device, 8)
    acts = {
        "alloc_pd": lambda: v.PD(soft_device).close(),
        "reg_mr": lambda: v.MR(pd, bytearray(64)).close(),
        "dereg_mr": lambda: v.MR(pd, bytearray(64)).close(),
        "create_comp_channel": lambda: v.CompChannel(soft_device).close(),
        "create_cq": lambda: v.CQ(soft_device, 4).close(),
        "destroy_cq": lambda: v.CQ(soft_device, 4).close(),
        "create_srq": lambda: v.SRQ(pd, 4).close(),
        "destroy_srq": lambda: v.SRQ(pd, 4).close(),
        "create_qp": lambda: v.QP(pd, cq).close(),
        "modify_qp": lambda: qp.to_init(),
        "destroy_qp": lambda: v.QP(pd, cq).close(),
    }
    qp = v.QP(pd, cq)
    for verb, act in acts.items():
        fault = soft_faults("refuse", verb=verb, errno="ENOSPC", after=1, times=1)
        act()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)        # what a refused destroy leaves
            with pytest.raises(VerbsError, match="ibv_" + verb) as caught:
                act()
            caught.value.__traceback__ = None
            gc.collect()
        assert (caught.value.errno, caught.value.verb) == (errno.ENOSPC, "ibv_" + verb)
        act()
        assert fault.hit == 1
    with soft_faults("refuse", verb=["reg_mr", "create_cq"]) as fault:
        for act in (acts["reg_mr"], acts["create_cq"], acts["reg_mr"]):
            with pytest.raises(VerbsError) as caught:
                act()
            assert caught.value.errno == errno.EIO
    assert fault.hit == 3


@pytest.mark.parametrize("rule, words", [
    ("refuse", "add verb="), ("refuse:verb=post_send", "verbs are alloc_pd"),
    ("refuse:verb=reg_mr,errno=EWHAT", "errno=EWHAT"), ("refuse:op=send", "takes verb="),
    ("drop:verb=reg_mr", "takes op")])
def test_refusals_that_make_no_sense(rule, words):
    with pytest.raises(VerbsError, match=words):
        soft.inject(rule)
