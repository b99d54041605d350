from rocecomm.verbs.attrs import AHAttr
from rocecomm.verbs.handle import Handle
from rocecomm.verbs.pd import PD

class AH(Handle):
    pd: PD
    def __init__(self, pd: PD, attr: AHAttr) -> None: ...
