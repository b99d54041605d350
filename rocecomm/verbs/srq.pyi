from typing import Any

from numpy.typing import NDArray

from rocecomm.verbs.attrs import SRQAttr
from rocecomm.verbs.handle import Handle
from rocecomm.verbs.pd import PD
from rocecomm.verbs.qp import Local

class SRQ(Handle):
    pd: PD
    max_wr: int
    max_sge: int
    def __init__(self, pd: PD, max_wr: int, max_sge: int = 1, srq_limit: int = 0) -> None: ...
    def query(self) -> SRQAttr: ...
    def modify(self, *, max_wr: int | None = None, srq_limit: int | None = None) -> None: ...
    def post_recv(self, local: Local = None, wr_id: int = 0) -> None: ...
    def post_recv_array(self, wrs: NDArray[Any], sges: NDArray[Any] | None = None) -> int: ...
