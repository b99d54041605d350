"""For scripts that tests run: the limit on locked memory holds for root, too."""

#: Imports resource and sys on the way.
WITHOUT_IPC_LOCK = """
import ctypes, resource, sys
class Head(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
class Caps(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]
libc = ctypes.CDLL(None, use_errno=True)
head, caps = Head(0x20080522, 0), (Caps * 2)()
assert libc.capget(ctypes.byref(head), caps) == 0
caps[0].effective &= ~(1 << 14)     # CAP_IPC_LOCK: the limit does not hold for who has it
caps[0].permitted &= ~(1 << 14)
assert libc.capset(ctypes.byref(head), caps) == 0
"""
