"""Where kernel Soft-RoCE (rdma_rxe) departs from the InfiniBand specification.

Seen with Linux 6.1. soft0 follows the specification; a test that meets one of these asks
``rxe(ctx)`` and names the entry.

* ``length``: a message longer than the receive ends at the sender with REM_OP_ERR and at
  the receiver with LOC_QP_OP_ERR or LOC_LEN_ERR (specification: REM_INV_REQ_ERR and
  LOC_LEN_ERR).
* ``late-recv``: a receive posted to a queue pair in state ERR is never flushed
  (specification: it completes with WR_FLUSH_ERR).
* ``alignment``: an atomic on an unaligned address is refused when it is posted, with EINVAL
  (specification: the responder answers REM_INV_REQ_ERR).
* ``local-key``: a wrong key or missing right of local memory ends with LOC_QP_OP_ERR where it
  is the source of a send or write, or the target of a receive (specification: LOC_PROT_ERR).
* ``shared-file``: memory of a file that is mapped read-only and shared cannot be
  registered, EFAULT (a limit of Linux before 6.2, for every device of the kernel).
"""

VENDOR = 0xFFFFFF       # what rxe puts into ibv_device_attr.vendor_id


def rxe(ctx):
    """True if the context's device is kernel Soft-RoCE."""
    return ctx.provider.name == "libibverbs" and ctx.query_device().vendor_id == VENDOR
