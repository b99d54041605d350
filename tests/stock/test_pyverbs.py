"""rdma-core's Python bindings on the device, under the system's Python."""

import pytest

PYTHON = "/usr/bin/python3"
SCRIPT = """
import sys
import pyverbs.enums as e
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.wr import SGE, RecvWR, SendWR

name = sys.argv[1]
assert name in [d.name.decode() for d in get_device_list()]
context = Context(name=name)
assert context.query_device().max_qp > 100 and context.query_port(1).state == e.IBV_PORT_ACTIVE
pd, cq = PD(context), CQ(context, 16)
mr = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)
caps = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=caps))
attr = QPAttr(port_num=1)
attr.dest_qp_num, attr.path_mtu = qp.qp_num, e.IBV_MTU_1024
attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
attr.ah_attr = AHAttr(gr=GlobalRoute(dgid=context.query_gid(1, 1), sgid_index=1), is_global=1, port_num=1)
qp.to_rts(attr)                                  # with itself
mr.write("to myself", 9)
qp.post_recv(RecvWR(wr_id=7, num_sge=1, sg=[SGE(mr.buf + 100, 100, mr.lkey)]))
qp.post_send(SendWR(wr_id=8, num_sge=1, sg=[SGE(mr.buf, 9, mr.lkey)], send_flags=e.IBV_SEND_SIGNALED))
done = []
while len(done) < 2:
    done += cq.poll(2)[1]
assert sorted((wc.wr_id, wc.status) for wc in done) == [(7, 0), (8, 0)]
print(mr.read(9, 100).decode(), mr.length)
"""


def test_pyverbs(programs):
    if programs.alone(PYTHON, "-c", "import importlib.util as u; print(u.find_spec('pyverbs'))") == "None\n":
        pytest.skip("pyverbs is not installed (Debian: python3-pyverbs)")
    assert programs.alone(PYTHON, "-c", SCRIPT, programs.device) == "to myself 4096\n"
