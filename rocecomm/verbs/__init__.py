"""libibverbs for Python: one class per verbs object; mechanism only, no policy, no threads.

    from rocecomm import verbs
    ctx = verbs.open_device("soft0")
    pd = verbs.PD(ctx)
    cq = verbs.CQ(ctx, 64)
    mr = verbs.MR(pd, array, verbs.IBV_ACCESS_LOCAL_WRITE)
    qp = verbs.QP(pd, cq)

A child takes its parents in the constructor and keeps them alive. Every object has
``close()``, ``closed`` and is a context manager. Nothing is loaded or opened at import.
"""

from rocecomm import enums as _enums
from rocecomm.enums import *  # noqa: F403  (libibverbs' names, the module's whole point)
from rocecomm.verbs.ah import AH
from rocecomm.verbs.attrs import AHAttr, AsyncEvent, DeviceAttr, GIDEntry, PortAttr, QPAttr, SRQAttr
from rocecomm.verbs.buffer import Buffer
from rocecomm.verbs.buffer import py_acquire as acquire
from rocecomm.verbs.chain import RecvChain, SendChain
from rocecomm.verbs.columns import RECV_WR_DTYPE, SEND_WR_DTYPE, SGE_DTYPE, WC_DTYPE
from rocecomm.verbs.context import Context, Memory
from rocecomm.verbs.cq import CQ, WC, CompChannel
from rocecomm.verbs.device import Device, devices, open_device
from rocecomm.verbs.mr import MR, SGE
from rocecomm.verbs.mw import MW
from rocecomm.verbs.pd import PD
from rocecomm.verbs.qp import QP
from rocecomm.verbs.srq import SRQ

__all__ = [
    "AH", "AHAttr", "AsyncEvent", "Buffer", "CQ", "CompChannel", "Context", "Device",
    "DeviceAttr", "GIDEntry", "MR", "MW", "Memory", "PD", "PortAttr", "QP", "QPAttr",
    "RECV_WR_DTYPE", "RecvChain", "SEND_WR_DTYPE", "SGE", "SGE_DTYPE", "SRQ", "SRQAttr", "SendChain",
    "WC", "WC_DTYPE",
    "acquire", "devices", "open_device",
]
__all__ += _enums.__all__
