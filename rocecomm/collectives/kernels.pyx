# cython: language_level=3
"""Element-wise reduction of two arrays into a third, without the GIL.

One C function for each pair of dtype and operation, in a table. To add a dtype or an
operation, add a row or a column to the table below; everything above asks `supported`.
"""
from libc.stdint cimport uintptr_t

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>

    typedef void (*rc_kernel)(void *, const void *, const void *, size_t);

    /* out may be a or b itself, never a shifted copy of them, so the iterations do not
       depend on each other. Integers are added as unsigned: overflow wraps, as in numpy. */
    #define RC_KERNEL(name, type, expression)                                              \\
        __attribute__((optimize("O3")))                                                    \\
        static void name(void *out, const void *a, const void *b, size_t n) {              \\
            type *o = (type *)out;                                                         \\
            const type *x = (const type *)a, *y = (const type *)b;                         \\
            _Pragma("GCC ivdep")                                                           \\
            for (size_t i = 0; i < n; i++) o[i] = expression;                              \\
        }

    RC_KERNEL(rc_sum_f4, float, x[i] + y[i])
    RC_KERNEL(rc_sum_f8, double, x[i] + y[i])
    RC_KERNEL(rc_sum_4, uint32_t, x[i] + y[i])
    RC_KERNEL(rc_sum_8, uint64_t, x[i] + y[i])

    static const struct { const char *dtype; int size; rc_kernel sum; } rc_kernels[] = {
        { "float32", 4, rc_sum_f4 },
        { "float64", 8, rc_sum_f8 },
        { "int32", 4, rc_sum_4 },
        { "int64", 8, rc_sum_8 },
    };
    enum { RC_KERNELS = sizeof rc_kernels / sizeof *rc_kernels };
    """
    ctypedef void (*rc_kernel)(void *, const void *, const void *, size_t) noexcept nogil
    ctypedef struct rc_row:
        const char *dtype
        int size
        rc_kernel sum
    const rc_row *rc_kernels
    enum:
        RC_KERNELS

OPERATIONS = ("sum",)
DTYPES = tuple([(<bytes>rc_kernels[i].dtype).decode() for i in range(RC_KERNELS)])

cdef dict _rows = {name: i for i, name in enumerate(DTYPES)}


def supported(str dtype, str op):
    """Whether there is a kernel."""
    return op in OPERATIONS and dtype in _rows


def reduce(str dtype, str op, uintptr_t out, uintptr_t a, uintptr_t b, size_t count):
    """``out[i] = a[i] op b[i]`` for ``count`` elements at three addresses.

    ``out`` may be ``a`` or ``b``; any other overlap gives garbage. Raises KeyError for what
    `supported` denies. The caller holds the memory.
    """
    if op != "sum":
        raise KeyError(op)
    cdef rc_kernel kernel = rc_kernels[<int>_rows[dtype]].sum
    with nogil:
        kernel(<void *>out, <const void *>a, <const void *>b, count)
