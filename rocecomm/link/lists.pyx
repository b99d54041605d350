# cython: language_level=3
"""Lists of buffers as one message: the Python side."""
from libc.stdint cimport uint16_t, uint64_t
from rocecomm.link.base cimport Base, hold, mem_t
from rocecomm.link.core cimport F_OWN_MR, K_SEND, req_t
from rocecomm.link.pieces cimport LIST_MAX, pieces_free, pieces_new, pieces_t
from rocecomm.link.region cimport covering
from rocecomm.verbs.buffer cimport Buffer
from rocecomm.verbs.libibverbs cimport IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, ibv_mr


cdef class PieceList:
    """Holds the buffers of a list, and their table until a request has it."""

    def __dealloc__(self):
        if self.s != NULL:
            pieces_free(self.s)
            self.s = NULL

    cdef void measure(self, mem_t *m) noexcept:
        m.ptr = NULL
        m.n = self.nbytes
        m.dtype = self.dtype

    cdef void give(self, req_t *r) noexcept:
        """Makes it the request's memory. The request frees the table; the buffers stay held here."""
        r.pieces = self.s
        self.s = NULL
        if self.own and r.kind == K_SEND:
            r.flags |= F_OWN_MR


cdef object hold_any(Base g, object obj, bint writable, mem_t *m):
    """What holds the memory of a buffer (a Buffer) or of a list of them (a PieceList).

    m.n is the total. A list has its elements' dtype if all that are not empty have the same,
    else it is plain bytes. One of a single buffer with bytes is that buffer.
    """
    cdef PieceList made
    cdef Buffer b
    cdef Py_ssize_t i, n
    cdef mem_t one
    cdef uint64_t total = 0
    cdef uint16_t dtype = 0
    cdef list held
    cdef list kept = []
    if type(obj) is not list and type(obj) is not tuple:
        return hold(obj, writable, m)
    made = PieceList.__new__(PieceList)
    made.buffers = held = []
    items = tuple(obj)
    if len(items) > LIST_MAX:
        raise ValueError(f"a list of {len(items)} buffers is too long for one message: at most {LIST_MAX}; "
                         "send several messages, or join the buffers with numpy.concatenate")
    made.s = pieces_new(max(1, len(items)))
    if made.s == NULL:
        raise MemoryError(f"no memory for a message of {len(items)} buffers")
    n = 0
    for i, item in enumerate(items):
        try:
            b = hold(item, writable, &one)
        except (BufferError, TypeError) as error:
            raise explained(error, obj, i, item) from None
        if one.n == 0:
            continue
        dtype = one.dtype if n == 0 or one.dtype == dtype else 0
        held.append(b)
        kept.append(item)
        made.s.v[n].addr = one.ptr
        made.s.v[n].size = one.n
        total += one.n
        n += 1
    m.n = total
    m.dtype = dtype
    m.ptr = made.s.v[0].addr
    if n <= 1:
        return held[0] if n else hold(b"" if not writable else bytearray(), writable, &one)
    made.s.n = n
    made.nbytes = total
    made.dtype = dtype
    made.own = True
    if total > g.e.eager_limit:
        made.entries = []
        for i in range(n):
            entry = covering(g, kept[i], held[i], IBV_ACCESS_LOCAL_WRITE if writable
                             else IBV_ACCESS_REMOTE_READ)
            if entry is not None:
                made.entries.append(entry)
                made.own = False
                made.s.v[i].lkey = entry.lkey
                made.s.v[i].rkey = entry.rkey
                made.s.v[i].mr = <ibv_mr *><size_t>entry.handle
    return made


cdef object explained(object error, object obj, Py_ssize_t i, object item):
    """The same error, saying which element it is about."""
    name = type(obj).__name__
    if isinstance(item, (int, float, complex)) and not hasattr(item, "dtype"):
        return TypeError(f"a {name} is taken as a list of buffers, and its element {i} is the number "
                         f"{item!r}; numpy.asarray(obj) makes an array of a list of numbers")
    if isinstance(item, (list, tuple)):
        return TypeError(f"element {i} of a {name} of buffers is a {type(item).__name__} itself: lists "
                         "are not nested; numpy.asarray(obj) makes an array of nested numbers")
    return type(error)(f"element {i} of a {name} of buffers: {error}")
