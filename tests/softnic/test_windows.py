"""Memory windows where rdma-core's rxe library cannot follow: see device-differences.md."""

import numpy as np

from rocecomm import verbs as v

pytest_plugins = ["rocecomm.testing"]
BIND = v.IBV_ACCESS_LOCAL_WRITE | v.IBV_ACCESS_MW_BIND


def write(pair, addr, rkey):
    pair.a.qp.post_send(v.IBV_WR_RDMA_WRITE, pair.a.mr.sge(0, 64), remote_addr=addr, rkey=rkey)
    (wc,) = pair.a.wait()
    return wc.status


def test_a_window_ends_where_it_ends(soft_pair):
    with v.MR(soft_pair.b.pd, np.zeros(4096, "u1"), BIND) as target, \
            v.MW(soft_pair.b.pd, 1) as window:
        rkey = window.bind(soft_pair.b.qp, target, 1024, 1024)
        soft_pair.b.wait()
        assert write(soft_pair, target.addr + 1024 + 960, rkey) == v.IBV_WC_SUCCESS
        assert write(soft_pair, target.addr + 1024 + 961, rkey) == v.IBV_WC_REM_ACCESS_ERR


def test_a_type_1_window_is_unbound(soft_pair):
    with v.MR(soft_pair.b.pd, np.zeros(4096, "u1"), BIND) as target, \
            v.MW(soft_pair.b.pd, 1) as window:
        rkey = window.bind(soft_pair.b.qp, target)
        window.bind(soft_pair.b.qp, None)
        soft_pair.b.wait(2)
        assert write(soft_pair, target.addr, rkey) == v.IBV_WC_REM_ACCESS_ERR
