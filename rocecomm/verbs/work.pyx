"""Work request chains for QP and SRQ: from Python arguments, and from structured arrays."""

from libc.stdint cimport uint32_t, uint64_t
from cpython.buffer cimport PyBuffer_Release
from libc.errno cimport EINVAL, ENOMEM, errno
from libc.stdlib cimport free, malloc
from rocecomm.verbs.buffer cimport Buffer, acquire
from rocecomm.verbs.columns cimport RecvRow, SendRow, rows
from rocecomm.verbs.handle cimport verbs_error
from rocecomm.verbs.libibverbs cimport *
from rocecomm.verbs.mr cimport MR, SGE

from rocecomm.verbs.columns import RECV_WR_DTYPE, SEND_WR_DTYPE, SGE_DTYPE

cdef enum:
    CHUNK = 256         # work requests of one chain


cdef class SgeList:
    def __dealloc__(self):
        if self.items != self.inside:
            free(self.items)


cdef SgeList sge_list(object local, bint inlined):
    """Elements from None, an SGE, an MR (all of it), or a sequence of those; for an inline
    post also from anything with memory, which need not be registered."""
    cdef SgeList out = SgeList.__new__(SgeList)
    cdef Py_ssize_t n
    cdef int i
    out.items = out.inside
    if local is None:
        return out
    if isinstance(local, (list, tuple)):
        n = len(local)
        if n > SGES_INSIDE:
            if n > 0xFFFF:
                raise ValueError(f"{n} elements are more than any device takes in one request")
            out.items = <ibv_sge *> malloc(n * sizeof(ibv_sge))
            if out.items == NULL:
                raise MemoryError()
        for i in range(<int> n):
            put(out, i, local[i], inlined)
        out.count = <int> n
    else:
        put(out, 0, local, inlined)
        out.count = 1
    return out


cdef int put(SgeList out, int i, object item, bint inlined) except -1:
    cdef MR mr
    cdef Buffer buffer
    if isinstance(item, SGE):
        out.items[i] = (<SGE> item).sge
        return 0
    if isinstance(item, MR):
        mr = <MR> item
        mr.ensure_open()
        if mr.buffer.nbytes > 0xFFFFFFFF:
            raise ValueError(
                f"a registration of {mr.buffer.nbytes} bytes does not fit one element, which "
                f"holds 2**32-1 bytes at most; pass parts of it: mr.sge(offset, length)")
        out.items[i].addr = <uint64_t> mr.buffer.ptr
        out.items[i].length = <uint32_t> mr.buffer.nbytes
        out.items[i].lkey = mr.mr.lkey
        return 0
    if not inlined:
        raise TypeError(f"expected an MR, an SGE or a sequence of them, not a "
                        f"{type(item).__name__}; memory must be registered first: MR(pd, obj)")
    buffer = acquire(item, False)
    if buffer.nbytes > 0xFFFFFFFF:
        raise ValueError(f"{buffer.nbytes} bytes are too many for an inline post")
    if out.keep is None:
        out.keep = []
    out.keep.append(buffer)
    out.items[i].addr = <uint64_t> buffer.ptr
    out.items[i].length = <uint32_t> buffer.nbytes
    out.items[i].lkey = 0
    return 0


cdef inline bint elements(ibv_sge **sg_list, int *num_sge, ibv_sge *own, uint64_t addr, uint32_t length,
                          uint32_t lkey, size_t start, uint32_t count, ibv_sge *all_sges,
                          size_t num_sges) noexcept nogil:
    """The memory of a row: some rows of the SGE array, or one element of its own. False: it names
    rows that the array does not have."""
    if count:
        if start + count > num_sges:
            return False
        sg_list[0] = all_sges + start
        num_sge[0] = <int> count
        return True
    own.addr = addr
    own.length = length
    own.lkey = lkey
    sg_list[0] = own
    num_sge[0] = 1 if length else 0
    return True


cdef Py_ssize_t chain_sends(ibv_send_wr *wrs, ibv_sge *sges, const SendRow *from_rows, Py_ssize_t n,
                            ibv_sge *all_sges, size_t num_sges, ibv_ah *ah,
                            unsigned int remote_qpn, unsigned int remote_qkey) noexcept nogil:
    cdef Py_ssize_t i
    cdef ibv_send_wr *wr
    cdef const SendRow *row
    for i in range(n):
        wr = &wrs[i]
        row = &from_rows[i]
        wr.wr_id = row.wr_id
        wr.next = wr + 1
        wr.opcode = <int> row.opcode
        wr.send_flags = row.send_flags
        wr.imm_data = htonl(row.imm_data)
        if not elements(&wr.sg_list, &wr.num_sge, &sges[i], row.addr, row.length, row.lkey,
                        row.sge_start, row.num_sge, all_sges, num_sges):
            return i
        if ah != NULL:
            wr.wr.ud.ah = ah
            wr.wr.ud.remote_qpn = remote_qpn
            wr.wr.ud.remote_qkey = remote_qkey
        elif row.opcode == IBV_WR_ATOMIC_CMP_AND_SWP or row.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD:
            wr.wr.atomic.remote_addr = row.remote_addr
            wr.wr.atomic.compare_add = row.compare_add
            wr.wr.atomic.swap = row.swap
            wr.wr.atomic.rkey = row.rkey
        else:
            wr.wr.rdma.remote_addr = row.remote_addr
            wr.wr.rdma.rkey = row.rkey
    wrs[n - 1].next = NULL
    return -1


cdef Py_ssize_t chain_recvs(ibv_recv_wr *wrs, ibv_sge *sges, const RecvRow *from_rows, Py_ssize_t n,
                            ibv_sge *all_sges, size_t num_sges) noexcept nogil:
    cdef Py_ssize_t i
    cdef ibv_recv_wr *wr
    cdef const RecvRow *row
    for i in range(n):
        wr = &wrs[i]
        row = &from_rows[i]
        wr.wr_id = row.wr_id
        wr.next = wr + 1
        if not elements(&wr.sg_list, &wr.num_sge, &sges[i], row.addr, row.length, row.lkey,
                        row.sge_start, row.num_sge, all_sges, num_sges):
            return i
    wrs[n - 1].next = NULL
    return -1


cdef void free_send_room(SendRoom *room) noexcept:
    free(room.wrs)
    free(room.sges)
    room.wrs = NULL
    room.sges = NULL


cdef void free_recv_room(RecvRoom *room) noexcept:
    free(room.wrs)
    free(room.sges)
    room.wrs = NULL
    room.sges = NULL


cdef int post_send_rows(ibv_qp *qp, object array, object sge_array, ibv_ah *ah, uint32_t remote_qpn,
                        uint32_t remote_qkey, SendRoom *room, Py_ssize_t *posted) except -1:
    cdef SendRoom mine
    cdef SendRoom *r = &mine if room == NULL else room
    cdef Py_buffer wr_view
    cdef Py_buffer sge_view
    cdef bint has_sges = False
    cdef Py_ssize_t n = 0
    cdef Py_ssize_t num_sges = 0
    cdef Py_ssize_t done = 0
    cdef Py_ssize_t chunk
    cdef Py_ssize_t bad_row = -1
    cdef ibv_send_wr *bad
    cdef int rc = 0
    mine.wrs = NULL
    mine.sges = NULL
    n = rows(array, SEND_WR_DTYPE, False, &wr_view, sizeof(SendRow))
    try:
        check_opcodes(<const SendRow *> wr_view.buf, n)
        if sge_array is not None:
            num_sges = rows(sge_array, SGE_DTYPE, False, &sge_view, sizeof(ibv_sge))
            has_sges = True
        if r.wrs == NULL:
            r.wrs = <ibv_send_wr *> malloc(CHUNK * sizeof(ibv_send_wr))
            r.sges = <ibv_sge *> malloc(CHUNK * sizeof(ibv_sge))
            if r.wrs == NULL or r.sges == NULL:
                free_send_room(r)
                raise MemoryError()
        with nogil:
            while done < n:
                chunk = min(n - done, <Py_ssize_t> CHUNK)
                bad_row = chain_sends(r.wrs, r.sges, <const SendRow *> wr_view.buf + done, chunk,
                                      <ibv_sge *> sge_view.buf if has_sges else NULL, num_sges,
                                      ah, remote_qpn, remote_qkey)
                if bad_row >= 0:
                    break
                bad = NULL
                rc = ibv_post_send(qp, r.wrs, &bad)
                if rc:
                    if rc < 0:
                        rc = errno
                    done += bad - r.wrs if bad != NULL else 0
                    break
                done += chunk
    finally:
        PyBuffer_Release(&wr_view)
        if has_sges:
            PyBuffer_Release(&sge_view)
        free_send_room(&mine)
    posted[0] = done
    if bad_row >= 0:
        raise_bad_row(done, done + bad_row, num_sges)
    return rc


cdef int post_recv_rows(ibv_qp *qp, ibv_srq *srq, object array, object sge_array, RecvRoom *room,
                        Py_ssize_t *posted) except -1:
    cdef RecvRoom mine
    cdef RecvRoom *r = &mine if room == NULL else room
    cdef Py_buffer wr_view
    cdef Py_buffer sge_view
    cdef bint has_sges = False
    cdef Py_ssize_t n = 0
    cdef Py_ssize_t num_sges = 0
    cdef Py_ssize_t done = 0
    cdef Py_ssize_t chunk
    cdef Py_ssize_t bad_row = -1
    cdef ibv_recv_wr *bad
    cdef int rc = 0
    mine.wrs = NULL
    mine.sges = NULL
    n = rows(array, RECV_WR_DTYPE, False, &wr_view, sizeof(RecvRow))
    try:
        if sge_array is not None:
            num_sges = rows(sge_array, SGE_DTYPE, False, &sge_view, sizeof(ibv_sge))
            has_sges = True
        if r.wrs == NULL:
            r.wrs = <ibv_recv_wr *> malloc(CHUNK * sizeof(ibv_recv_wr))
            r.sges = <ibv_sge *> malloc(CHUNK * sizeof(ibv_sge))
            if r.wrs == NULL or r.sges == NULL:
                free_recv_room(r)
                raise MemoryError()
        with nogil:
            while done < n:
                chunk = min(n - done, <Py_ssize_t> CHUNK)
                bad_row = chain_recvs(r.wrs, r.sges, <const RecvRow *> wr_view.buf + done, chunk,
                                      <ibv_sge *> sge_view.buf if has_sges else NULL, num_sges)
                if bad_row >= 0:
                    break
                bad = NULL
                rc = ibv_post_recv(qp, r.wrs, &bad) if qp != NULL \
                    else ibv_post_srq_recv(srq, r.wrs, &bad)
                if rc:
                    if rc < 0:
                        rc = errno
                    done += bad - r.wrs if bad != NULL else 0
                    break
                done += chunk
    finally:
        PyBuffer_Release(&wr_view)
        if has_sges:
            PyBuffer_Release(&sge_view)
        free_recv_room(&mine)
    posted[0] = done
    if bad_row >= 0:
        raise_bad_row(done, done + bad_row, num_sges)
    return rc


cdef int check_opcodes(const SendRow *from_rows, Py_ssize_t n) except -1:
    """Only operations whose fields the row has: a device would follow stray pointers."""
    cdef Py_ssize_t i
    cdef uint32_t worst = 0
    for i in range(n):
        if from_rows[i].opcode > worst:
            worst = from_rows[i].opcode
    if worst > IBV_WR_ATOMIC_FETCH_AND_ADD:
        raise ValueError(f"opcode {worst} cannot be posted; use the operations send, write, read and "
                         f"atomics of WROpcode")
    return 0


cdef int raise_bad_row(Py_ssize_t posted, Py_ssize_t row, Py_ssize_t num_sges) except -1:
    error = ValueError(f"row {row} names elements outside of the {num_sges} rows of the SGE array "
                       f"({posted} rows before it were posted)")
    error.posted = posted
    raise error


cdef object recv_error(str verb, int err, str device, int elements, int max_wr, int max_sge):
    detail = f"{elements} element(s) of at most {max_sge}"
    if err == ENOMEM:
        detail += (f"; the queue takes {max_wr} requests and is full: poll for completions of "
                   f"earlier receives first, or make it larger")
    elif err == EINVAL:
        detail += "; the queue pair must be at least in state INIT"
    return verbs_error(verb, err, device, detail)
