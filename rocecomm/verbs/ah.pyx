"""Address handles, and the conversion of AHAttr."""

cimport cython
from libc.errno cimport errno
from libc.string cimport memcpy, memset
from rocecomm.verbs.handle cimport Handle, verbs_error
from rocecomm.verbs.libibverbs cimport *
from rocecomm.verbs.pd cimport PD

from rocecomm.verbs.attrs import AHAttr


cdef int fill_ah_attr(ibv_ah_attr *out, object attr) except -1:
    cdef bytes raw
    cdef const unsigned char *p
    if not isinstance(attr, AHAttr):
        raise TypeError(f"expected an AHAttr, not a {type(attr).__name__}")
    memset(out, 0, sizeof(ibv_ah_attr))
    if attr.dgid is not None:
        raw = bytes(attr.dgid)
        if len(raw) != 16:
            raise ValueError(f"a GID has 16 bytes, not {len(raw)}")
        p = raw
        memcpy(out.grh.dgid.raw, p, 16)
        out.is_global = 1
        out.grh.sgid_index = byte(attr.sgid_index, "sgid_index")
        out.grh.hop_limit = byte(attr.hop_limit, "hop_limit")
        out.grh.traffic_class = byte(attr.traffic_class, "traffic_class")
        if not 0 <= attr.flow_label < 1 << 20:
            raise ValueError(f"flow_label must lie in 0..2**20-1, not {attr.flow_label}")
        out.grh.flow_label = attr.flow_label
    if not 0 <= attr.dlid < 1 << 16:
        raise ValueError(f"dlid must lie in 0..65535, not {attr.dlid}")
    out.dlid = attr.dlid
    out.sl = byte(attr.sl, "sl")
    out.src_path_bits = byte(attr.src_path_bits, "src_path_bits")
    out.static_rate = byte(attr.static_rate, "static_rate")
    out.port_num = byte(attr.port_num, "port_num")
    return 0


cdef object read_ah_attr(const ibv_ah_attr *attr):
    return AHAttr(
        dgid=bytes(attr.grh.dgid.raw[:16]) if attr.is_global else None,
        sgid_index=attr.grh.sgid_index, port_num=attr.port_num, dlid=attr.dlid, sl=attr.sl,
        src_path_bits=attr.src_path_bits, static_rate=attr.static_rate,
        traffic_class=attr.grh.traffic_class, hop_limit=attr.grh.hop_limit,
        flow_label=attr.grh.flow_label)


cdef int byte(object value, str what) except -1:
    if not 0 <= value <= 255:
        raise ValueError(f"{what} must lie in 0..255, not {value}")
    return value


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class AH(Handle):
    """Address handle for UD sends (``ibv_create_ah``): ``AH(pd, AHAttr(dgid=..., ...))``."""

    def __cinit__(self, PD pd not None, attr):
        cdef ibv_ah_attr a
        cdef int err
        fill_ah_attr(&a, attr)
        self.pd = pd
        pd.enter()
        try:
            with nogil:
                self.ah = pd.context.provider.ops.create_ah(pd.pd, &a)
                err = errno
            if self.ah == NULL:
                raise verbs_error("ibv_create_ah", err, pd.context.name,
                                  f"{attr}; RoCE needs a dgid, and a sgid_index that exists")
            self.opened((pd,))
        finally:
            pd.leave()

    cdef int free_handle(self) noexcept:
        cdef int rc
        with nogil:
            rc = self.pd.context.provider.ops.destroy_ah(self.ah)
        if rc == 0:
            self.ah = NULL
        return rc if rc >= 0 else errno

    cdef str free_verb(self):
        return "ibv_destroy_ah"

    cdef str device_name(self):
        return self.pd.context.name
