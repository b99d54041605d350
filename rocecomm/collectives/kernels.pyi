"""Element-wise reduction of two arrays into a third, without the GIL."""

OPERATIONS: tuple[str, ...]
DTYPES: tuple[str, ...]

def supported(dtype: str, op: str) -> bool:
    """Whether there is a kernel."""

def reduce(dtype: str, op: str, out: int, a: int, b: int, count: int) -> None:
    """``out[i] = a[i] op b[i]`` for ``count`` elements at three addresses.

    ``out`` may be ``a`` or ``b``; any other overlap gives garbage. Raises KeyError for what
    `supported` denies. The caller holds the memory.
    """
