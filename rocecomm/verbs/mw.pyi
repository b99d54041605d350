from rocecomm.verbs.handle import Handle
from rocecomm.verbs.mr import MR
from rocecomm.verbs.pd import PD
from rocecomm.verbs.qp import QP

class MW(Handle):
    pd: PD
    def __init__(self, pd: PD, mw_type: int = 2) -> None: ...
    @property
    def rkey(self) -> int: ...
    @property
    def mw_type(self) -> int: ...
    def bind(self, qp: QP, mr: MR | None, offset: int = 0, length: int | None = None,
             access: int = ..., *, wr_id: int = 0, flags: int = ...) -> int: ...
