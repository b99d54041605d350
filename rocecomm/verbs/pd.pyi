from rocecomm.verbs.context import Context
from rocecomm.verbs.handle import Handle

class PD(Handle):
    context: Context
    def __init__(self, context: Context) -> None: ...
