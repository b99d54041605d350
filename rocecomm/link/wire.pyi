"""Numbers and names of the wire header; see wire.pxd for its layout."""
from enum import IntEnum

HEADER_SIZE: int
SHORT_SIZE: int
OPERATIONS: tuple[str, ...]
REDUCTIONS: tuple[str, ...]

class Kind(IntEnum):
    EAGER = 1
    ANNOUNCE = 2
    DONE = 3
    WITHDRAW = 4
    WITHDRAWN = 5
    CREDIT = 6
    ABORT = 7
    GOODBYE = 8
    CYCLE = 9
    CYCLE_YES = 10

class Answer(IntEnum):
    ANSWER_OK = 0
    ANSWER_TRUNCATED = 1
    ANSWER_MISMATCH = 2
    ANSWER_FAILED = 3

class Flag(IntEnum):
    FLAG_BLOCKING = 1
    FLAG_LIST = 2
    FLAG_SHORT = 4

def dtype_code(name: object) -> int: ...
def dtype_name(code: int) -> str: ...
def op_code(name: str) -> int: ...
def reduction_code(name: str | None) -> int: ...
def unpack_header(data: bytes) -> dict[str, int]: ...
