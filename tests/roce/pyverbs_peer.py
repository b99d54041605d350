"""The other side of test_pyverbs.py, on rdma-core's own Python bindings.

Runs under the system's Python (Debian: python3-pyverbs), takes one JSON object a line on
stdin, answers with one on stdout. It shares no code with rocecomm on purpose.
"""

import json
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ACCESS = (e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
          | e.IBV_ACCESS_REMOTE_ATOMIC)


class Peer:
    def __init__(self, device, gid_index, nbytes):
        self.gid_index = gid_index
        self.ctx = Context(name=device)
        self.pd = PD(self.ctx)
        self.cq = CQ(self.ctx, 64)
        self.mr = MR(self.pd, nbytes, ACCESS)
        caps = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=caps))

    def hello(self):
        return {"qpn": self.qp.qp_num, "gid": str(self.ctx.query_gid(1, self.gid_index)),
                "addr": self.mr.buf, "rkey": self.mr.rkey}

    def connect(self, qpn, gid):
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = qpn
        attr.path_mtu = e.IBV_MTU_1024
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.rq_psn = attr.sq_psn = 0
        route = GlobalRoute(dgid=GID(val=gid), sgid_index=self.gid_index)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.qp.to_rts(attr)
        return {}

    def fill(self, text, offset):
        self.mr.write(text, len(text), offset)
        return {}

    def show(self, length, offset):
        return {"hex": self.mr.read(length, offset).hex()}

    def sge(self, length, offset):
        return [SGE(self.mr.buf + offset, length, self.mr.lkey)]

    def recv(self, length, offset, wr_id):
        self.qp.post_recv(RecvWR(wr_id=wr_id, num_sge=1, sg=self.sge(length, offset)))
        return {}

    def send(self, op, length, offset, wr_id, imm=0, raddr=0, rkey=0, compare_add=0, swap=0):
        wr = SendWR(wr_id=wr_id, opcode=getattr(e, op), num_sge=1, sg=self.sge(length, offset),
                    send_flags=e.IBV_SEND_SIGNALED, imm_data=socket.htonl(imm))
        if "ATOMIC" in op:
            wr.set_wr_atomic(rkey, raddr, compare_add, swap)
        elif "RDMA" in op:
            wr.set_wr_rdma(rkey, raddr)
        self.qp.post_send(wr)
        return {}

    def wait(self, n, seconds):
        got, end = [], time.monotonic() + seconds
        while len(got) < n and time.monotonic() < end:
            for wc in self.cq.poll(n - len(got))[1]:
                imm = socket.ntohl(wc.imm_data) if wc.wc_flags & e.IBV_WC_WITH_IMM else None
                got.append({"wr_id": wc.wr_id, "status": wc.status, "opcode": wc.opcode,
                            "byte_len": wc.byte_len, "imm": imm})
        return {"wcs": got}


def main():
    peer = None
    for line in sys.stdin:
        order = json.loads(line)
        act = order.pop("act")
        try:
            if act == "open":
                peer = Peer(**order)
                answer = peer.hello()
            else:
                answer = getattr(peer, act)(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
