from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from rocecomm.enums import QPState, QPType
from rocecomm.verbs.ah import AH
from rocecomm.verbs.attrs import AHAttr, QPAttr
from rocecomm.verbs.cq import CQ
from rocecomm.verbs.handle import Handle
from rocecomm.verbs.mr import MR, SGE
from rocecomm.verbs.pd import PD
from rocecomm.verbs.srq import SRQ

Local = MR | SGE | Sequence[MR | SGE] | None

class QP(Handle):
    pd: PD
    send_cq: CQ
    recv_cq: CQ
    srq: SRQ | None
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int
    sq_sig_all: bool
    def __init__(self, pd: PD, send_cq: CQ, recv_cq: CQ | None = None, qp_type: int = ..., *,
                 srq: SRQ | None = None, max_send_wr: int = 16, max_recv_wr: int = 16,
                 max_send_sge: int = 1, max_recv_sge: int = 1, max_inline_data: int = 0,
                 sq_sig_all: bool = False) -> None: ...
    @property
    def qp_num(self) -> int: ...
    @property
    def qp_type(self) -> QPType: ...
    @property
    def state(self) -> QPState: ...
    def query(self, mask: int = 0x1FFFFF) -> QPAttr: ...
    def modify(self, state: int | None = None, **attrs: Any) -> None: ...
    def to_init(self, *, port_num: int = 1, pkey_index: int = 0, qp_access_flags: int = 0,
                qkey: int | None = None) -> None: ...
    def to_rtr(self, dest_qp_num: int | None = None, ah_attr: AHAttr | None = None, *,
               path_mtu: int = 3, rq_psn: int = 0, max_dest_rd_atomic: int = 1,
               min_rnr_timer: int = 12) -> None: ...
    def to_rts(self, *, sq_psn: int = 0, timeout: int = 14, retry_cnt: int = 7, rnr_retry: int = 7,
               max_rd_atomic: int = 1) -> None: ...
    def post_send(self, opcode: int, local: Any = None, *, wr_id: int = 0, flags: int = ...,
                  imm_data: int | None = None, remote_addr: int | None = None,
                  rkey: int | None = None, compare_add: int = 0, swap: int = 0,
                  ah: AH | None = None, remote_qpn: int = 0, remote_qkey: int = 0,
                  invalidate_rkey: int | None = None) -> None: ...
    def post_send_array(self, wrs: NDArray[Any], sges: NDArray[Any] | None = None, *,
                        ah: AH | None = None, remote_qpn: int = 0, remote_qkey: int = 0) -> int: ...
    def post_recv(self, local: Local = None, wr_id: int = 0) -> None: ...
    def post_recv_array(self, wrs: NDArray[Any], sges: NDArray[Any] | None = None) -> int: ...
