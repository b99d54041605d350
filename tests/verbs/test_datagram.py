"""UC and UD: what they promise, and what they drop in silence."""

import numpy as np
import pytest
from verbs.pair import End, drain, pattern, quiet, supported

from rocecomm import verbs as v

SEND, SEND_IMM = v.IBV_WR_SEND, v.IBV_WR_SEND_WITH_IMM
QKEY = 0x0BADCAFE


def ud(device, **kw):
    end = supported(lambda: End(device, v.IBV_QPT_UD, **kw))
    end.qp.to_init(qkey=QKEY)
    end.qp.to_rtr()
    end.qp.to_rts()
    return end


@pytest.fixture
def two(device):
    a = ud(device, max_send_sge=2)
    b = ud(device, max_send_sge=2)
    yield a, b
    a.close()
    b.close()


def handle(a, b):
    return v.AH(a.pd, v.AHAttr(dgid=b.gid.gid, sgid_index=a.gid.index))


def test_datagram(two, scale):
    a, b = two
    ah = handle(a, b)
    for n in (0, 1, 100, 1024):
        target = np.zeros(2048, "u1")
        b.qp.post_recv(b.mr(target), wr_id=n)
        a.qp.post_send(SEND_IMM, a.mr(pattern(n, n)) if n else None, imm_data=0x89ABCDEF, ah=ah,
                       remote_qpn=b.qp.qp_num, remote_qkey=QKEY)
        drain(a.send_cq, 1, scale.time)[0].check()
        w = drain(b.recv_cq, 1, scale.time)[0].check()
        assert (w.byte_len, w.src_qp, w.imm_data, w.wr_id) == (n + 40, a.qp.qp_num, 0x89ABCDEF, n)
        assert w.wc_flags & v.IBV_WC_GRH and (target[40:40 + n] == pattern(n, n)).all()


def test_answer_to_the_sender(two, scale):
    a, b = two
    b.qp.post_recv(b.mr(bytearray(256)))
    a.qp.post_send(SEND, None, ah=handle(a, b), remote_qpn=b.qp.qp_num, remote_qkey=QKEY)
    w = drain(b.recv_cq, 1, scale.time)[0].check()
    a.qp.post_recv(a.mr(bytearray(256)))
    b.qp.post_send(SEND, None, ah=handle(b, a), remote_qpn=w.src_qp, remote_qkey=QKEY)
    assert drain(a.recv_cq, 1, scale.time)[0].check().src_qp == b.qp.qp_num


def test_without_a_receive_it_is_dropped(two, scale):
    a, b = two
    a.qp.post_send(SEND, None, ah=handle(a, b), remote_qpn=b.qp.qp_num, remote_qkey=QKEY)
    drain(a.send_cq, 1, scale.time)[0].check()
    b.qp.post_recv(b.mr(bytearray(256)))
    quiet(b.recv_cq, seconds=0.1)


def test_wrong_qkey_is_dropped(two, scale):
    a, b = two
    b.qp.post_recv(b.mr(bytearray(256)))
    a.qp.post_send(SEND, None, ah=handle(a, b), remote_qpn=b.qp.qp_num, remote_qkey=QKEY ^ 1)
    drain(a.send_cq, 1, scale.time)[0].check()
    quiet(b.recv_cq, seconds=0.1)
    assert b.qp.state == v.IBV_QPS_RTS


def test_one_queue_pair_for_many_peers(device, scale):
    hub, peers = ud(device), [ud(device) for _ in range(3)]
    for i in range(6):
        hub.qp.post_recv(hub.mr(bytearray(256)), wr_id=i)
    for p in peers * 2:
        p.qp.post_send(SEND, None, ah=(ah := handle(p, hub)), remote_qpn=hub.qp.qp_num, remote_qkey=QKEY)
        drain(p.send_cq, 1, scale.time)[0].check()
        ah.close()
    got = drain(hub.recv_cq, 6, scale.time)
    assert sorted(w.src_qp for w in got) == sorted([p.qp.qp_num for p in peers] * 2)
    for e in (hub, *peers):
        e.close()


@pytest.fixture
def unreliable(device):
    a, b = (supported(lambda: End(device, v.IBV_QPT_UC)) for _ in range(2))
    a.connect(b.address())
    b.connect(a.address())
    yield a, b
    a.close()
    b.close()


def test_uc_send_and_write(unreliable, scale):
    a, b = unreliable
    target = np.zeros(5000, "u1")
    sink = b.mr(target)
    b.qp.post_recv(sink)
    a.qp.post_send(SEND, a.mr(pattern(5000, 1)))
    drain(a.send_cq, 1, scale.time)[0].check()
    assert drain(b.recv_cq, 1, scale.time)[0].check().byte_len == 5000 and (target == pattern(5000, 1)).all()
    b.qp.post_recv(None)
    a.qp.post_send(v.IBV_WR_RDMA_WRITE_WITH_IMM, a.mr(pattern(5000, 2)), imm_data=6, remote_addr=sink.addr,
                   rkey=sink.rkey)
    drain(a.send_cq, 1, scale.time)[0].check()
    assert drain(b.recv_cq, 1, scale.time)[0].check().imm_data == 6 and (target == pattern(5000, 2)).all()


def test_uc_without_a_receive_is_dropped(unreliable, scale):
    a, b = unreliable
    a.qp.post_send(SEND, None)
    drain(a.send_cq, 1, scale.time)[0].check()
    b.qp.post_recv(None)
    quiet(b.recv_cq, seconds=0.1)
    assert b.qp.state == v.IBV_QPS_RTS
