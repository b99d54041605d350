"""Queue pair states, attributes, limits."""

import pytest
from verbs.pair import ALL, End, Pair, gid_of, supported

from rocecomm import verbs as v
from rocecomm.errors import ClosedError, VerbsError


@pytest.fixture
def end(device):
    e = End(device)
    yield e
    e.close()


def test_walk_through_the_states(end):
    qp = end.qp
    assert qp.state == v.IBV_QPS_RESET and qp.qp_type == v.IBV_QPT_RC and 0 < qp.qp_num < 1 << 24
    qp.to_init(qp_access_flags=ALL)
    assert qp.state == v.IBV_QPS_INIT
    path = v.AHAttr(dgid=end.gid.gid, sgid_index=end.gid.index, hop_limit=3, traffic_class=5)
    qp.to_rtr(qp.qp_num, path, path_mtu=v.IBV_MTU_1024, rq_psn=77, min_rnr_timer=13)
    assert qp.state == v.IBV_QPS_RTR
    qp.to_rts(sq_psn=99, timeout=11, retry_cnt=3, rnr_retry=2, max_rd_atomic=1)
    a = qp.query()
    assert (a.qp_state, a.dest_qp_num, a.path_mtu) == (v.IBV_QPS_RTS, qp.qp_num, v.IBV_MTU_1024)
    assert (a.timeout, a.retry_cnt, a.rnr_retry, a.min_rnr_timer) == (11, 3, 2, 13)
    assert (a.qp_access_flags, a.port_num) == (ALL, 1) and a.max_send_wr >= 16
    assert a.ah_attr.dgid == end.gid.gid and a.ah_attr.sgid_index == end.gid.index
    qp.modify(v.IBV_QPS_ERR)
    assert qp.state == v.IBV_QPS_ERR
    qp.modify(v.IBV_QPS_RESET)
    assert qp.state == v.IBV_QPS_RESET
    qp.to_init()
    assert qp.state == v.IBV_QPS_INIT


@pytest.mark.parametrize("steps", ["rtr", "rts", "init,rts", "init,rtr,init"])
def test_forbidden_transitions(end, steps):
    path = v.AHAttr(dgid=end.gid.gid, sgid_index=end.gid.index)
    act = {"init": lambda: end.qp.to_init(), "rtr": lambda: end.qp.to_rtr(end.qp.qp_num, path),
           "rts": lambda: end.qp.to_rts()}
    *good, bad = steps.split(",")
    for step in good:
        act[step]()
    before = end.qp.state
    with pytest.raises(VerbsError) as e:
        act[bad]()
    assert e.value.verb == "ibv_modify_qp" and e.value.errno == 22 and end.qp.state == before


def test_missing_and_surplus_attributes(end):
    with pytest.raises(VerbsError):
        end.qp.modify(v.IBV_QPS_INIT, port_num=1, pkey_index=0)         # no access flags
    with pytest.raises(VerbsError):
        end.qp.modify(v.IBV_QPS_INIT, port_num=1, pkey_index=0, qp_access_flags=0, rq_psn=1)
    with pytest.raises(VerbsError):
        end.qp.to_init(port_num=77)
    assert end.qp.state == v.IBV_QPS_RESET


def test_arguments(end):
    with pytest.raises(TypeError, match="no attribute 'speed'"):
        end.qp.modify(v.IBV_QPS_INIT, speed=3)
    with pytest.raises(ValueError, match="timeout must lie in"):
        end.qp.modify(None, timeout=256)
    with pytest.raises(ValueError, match="16 bytes"):
        end.qp.modify(None, ah_attr=v.AHAttr(dgid=b"short"))
    with pytest.raises(TypeError, match="AHAttr"):
        end.qp.modify(None, ah_attr=object())
    with pytest.raises(TypeError, match="dest_qp_num"):
        end.qp.to_rtr()


def test_granted_limits(device):
    end = End(device, max_send_wr=33, max_recv_wr=17, max_send_sge=3, max_recv_sge=4, max_inline_data=32)
    qp = end.qp
    assert qp.max_send_wr >= 33 and qp.max_recv_wr >= 17 and qp.max_send_sge >= 3
    assert qp.max_recv_sge >= 4 and qp.max_inline_data >= 32
    end.close()


def test_beyond_the_limits(device):
    with v.open_device(device) as ctx:
        limit = ctx.query_device()
        pd, cq = v.PD(ctx), v.CQ(ctx, 8)
        for caps in (dict(max_send_wr=limit.max_qp_wr + 1), dict(max_recv_wr=limit.max_qp_wr + 1),
                     dict(max_send_sge=limit.max_sge + 1)):
            with pytest.raises(VerbsError) as e:
                v.QP(pd, cq, **caps)
            assert e.value.verb == "ibv_create_qp"
        with pytest.raises(VerbsError):
            v.CQ(ctx, limit.max_cqe + 1)
        with pytest.raises(VerbsError):
            v.CQ(ctx, 0)


def test_type_that_does_not_exist(device):
    with v.open_device(device) as ctx:
        with pytest.raises(VerbsError, match="ibv_create_qp failed"):
            v.QP(v.PD(ctx), v.CQ(ctx, 8), None, 55)


def test_numbers_are_distinct(device, scale):
    with v.open_device(device) as ctx:
        pd, cq = v.PD(ctx), v.CQ(ctx, 8)
        qps = [v.QP(pd, cq) for _ in range(scale.rounds(200, 20))]
        assert len({q.qp_num for q in qps}) == len(qps)


def test_objects_of_two_contexts_do_not_mix(device):
    a, b = End(device), End(device)
    with pytest.raises(ValueError, match="same context"):
        v.QP(a.pd, b.send_cq)
    with pytest.raises(ValueError, match="same context"):
        v.CQ(a.ctx, 4, v.CompChannel(b.ctx))
    a.close()
    b.close()


def test_posting_in_the_wrong_state(end):
    mr = end.mr(bytearray(64))
    for act in (lambda: end.qp.post_send(v.IBV_WR_SEND, mr), lambda: end.qp.post_recv(mr)):
        with pytest.raises(VerbsError, match="state"):
            act()
    end.qp.to_init()
    end.qp.post_recv(mr)        # receives may be posted from INIT on
    with pytest.raises(VerbsError):
        end.qp.post_send(v.IBV_WR_SEND, mr)


def test_use_after_close(device):
    with Pair(device) as (a, _):
        qp = a.qp
        qp.close()
        qp.close()
        assert qp.closed and repr(qp) == "<QP closed>"
        for act in (lambda: qp.qp_num, lambda: qp.state, lambda: qp.modify(v.IBV_QPS_ERR),
                    lambda: qp.post_send(v.IBV_WR_SEND), lambda: qp.post_recv()):
            with pytest.raises(ClosedError):
                act()


@pytest.mark.parametrize("kind", [v.IBV_QPT_UC, v.IBV_QPT_UD])
def test_other_types_walk(device, kind):
    end = supported(lambda: End(device, kind))
    qp = end.qp
    qp.to_init(qkey=0x11111111 if kind == v.IBV_QPT_UD else None)
    if kind == v.IBV_QPT_UD:
        qp.to_rtr()
    else:
        qp.to_rtr(qp.qp_num, v.AHAttr(dgid=end.gid.gid, sgid_index=end.gid.index))
    qp.to_rts()
    assert qp.state == v.IBV_QPS_RTS and qp.qp_type == kind
    end.close()


def test_address_handle(device):
    with v.open_device(device) as ctx:
        pd, gid = v.PD(ctx), gid_of(ctx)
        ah = supported(lambda: v.AH(pd, v.AHAttr(dgid=gid.gid, sgid_index=gid.index)))
        ah.close()
        ah.close()
        assert ah.closed
        with pytest.raises(VerbsError):
            v.AH(pd, v.AHAttr(dlid=5))                          # RoCE without a GRH
        with pytest.raises(VerbsError):
            v.AH(pd, v.AHAttr(dgid=gid.gid, sgid_index=200))
        with pytest.raises(ValueError):
            v.AH(pd, v.AHAttr(dgid=gid.gid, sgid_index=256))
