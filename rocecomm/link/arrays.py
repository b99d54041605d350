"""Arrays in memory that peers on this host can map, where the device offers that."""

import math

import numpy as np

from ..config import Config
from .wireup import choose_device

__all__ = ["empty"]

_contexts = {}


def empty(shape, dtype=float, device=None):
    """An ndarray in memory from the device's own allocator; its contents are zero.

    On soft0 peers map it, so transfers from and into it are plain copies without a system
    call; on other devices it is ordinary page-aligned memory. It is shared memory: after a
    fork the child's writes are the parent's. `device`: a device name, default the
    configured one. The memory lives as long as an array or view of it.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"rocecomm.empty: dtype {dtype} holds Python objects")
    shape = (shape,) if np.isscalar(shape) else tuple(shape)
    nbytes = math.prod(int(n) for n in shape) * dtype.itemsize
    if min((int(n) for n in shape), default=0) < 0:
        raise ValueError(f"rocecomm.empty: shape {shape} has a negative length")
    if nbytes == 0:
        return np.empty(shape, dtype)
    config = Config.from_env(device=device)
    context = _contexts.get(config.device)
    if context is None or context.closed:
        context = _contexts[config.device] = choose_device(config)[0]
    return np.frombuffer(context.alloc(nbytes), dtype, nbytes // dtype.itemsize).reshape(shape)
