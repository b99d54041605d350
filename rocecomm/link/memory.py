"""Buffers for the layers above: what ``verbs.acquire`` does, without naming the verbs there."""

from rocecomm.verbs.buffer import Buffer
from rocecomm.verbs.buffer import py_acquire as acquire

__all__ = ["Buffer", "acquire"]
