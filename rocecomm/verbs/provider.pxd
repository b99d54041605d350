# cython: language_level=3
"""THE SEAM: the control verbs of one shared library with libibverbs' ABI.

`provider.ops.create_qp(...)` is `ibv_create_qp(...)` of that library. Pointers that a
library lacks are never NULL: a default takes their place (EOPNOTSUPP, or what
docs/design/foundation.md says), so callers need no check.
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from rocecomm.verbs.libibverbs cimport (
    ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq,
    ibv_device, ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr,
    ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr)

ctypedef struct provider_ops:
    # device
    ibv_device **(*get_device_list)(int *num_devices) noexcept nogil
    void (*free_device_list)(ibv_device **devices) noexcept nogil
    ibv_context *(*open_device)(ibv_device *device) noexcept nogil
    int (*close_device)(ibv_context *context) noexcept nogil
    int (*query_device)(ibv_context *context, ibv_device_attr *attr) noexcept nogil
    int (*query_port)(ibv_context *context, uint8_t port, ibv_port_attr *attr) noexcept nogil
    int (*query_gid)(ibv_context *context, uint8_t port, int index, ibv_gid *gid) noexcept nogil
    int (*query_gid_ex)(ibv_context *context, uint32_t port, uint32_t index,
                        ibv_gid_entry *entry, uint32_t flags, size_t size) noexcept nogil
    ssize_t (*query_gid_table)(ibv_context *context, ibv_gid_entry *entries, size_t max_entries,
                               uint32_t flags, size_t size) noexcept nogil
    int (*query_pkey)(ibv_context *context, uint8_t port, int index, uint16_t *pkey) noexcept nogil
    int (*get_async_event)(ibv_context *context, ibv_async_event *event) noexcept nogil
    void (*ack_async_event)(ibv_async_event *event) noexcept nogil
    # protection domain, memory
    ibv_pd *(*alloc_pd)(ibv_context *context) noexcept nogil
    int (*dealloc_pd)(ibv_pd *pd) noexcept nogil
    ibv_mr *(*reg_mr)(ibv_pd *pd, void *addr, size_t length, int access) noexcept nogil
    ibv_mr *(*reg_mr_iova2)(ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                            unsigned int access) noexcept nogil
    int (*dereg_mr)(ibv_mr *mr) noexcept nogil
    # completion
    ibv_comp_channel *(*create_comp_channel)(ibv_context *context) noexcept nogil
    int (*destroy_comp_channel)(ibv_comp_channel *channel) noexcept nogil
    ibv_cq *(*create_cq)(ibv_context *context, int cqe, void *cq_context,
                         ibv_comp_channel *channel, int comp_vector) noexcept nogil
    int (*resize_cq)(ibv_cq *cq, int cqe) noexcept nogil
    int (*destroy_cq)(ibv_cq *cq) noexcept nogil
    int (*get_cq_event)(ibv_comp_channel *channel, ibv_cq **cq, void **cq_context) noexcept nogil
    void (*ack_cq_events)(ibv_cq *cq, unsigned int nevents) noexcept nogil
    # shared receive queue
    ibv_srq *(*create_srq)(ibv_pd *pd, ibv_srq_init_attr *attr) noexcept nogil
    int (*modify_srq)(ibv_srq *srq, ibv_srq_attr *attr, int mask) noexcept nogil
    int (*query_srq)(ibv_srq *srq, ibv_srq_attr *attr) noexcept nogil
    int (*destroy_srq)(ibv_srq *srq) noexcept nogil
    # queue pair
    ibv_qp *(*create_qp)(ibv_pd *pd, ibv_qp_init_attr *attr) noexcept nogil
    int (*modify_qp)(ibv_qp *qp, ibv_qp_attr *attr, int mask) noexcept nogil
    int (*query_qp)(ibv_qp *qp, ibv_qp_attr *attr, int mask, ibv_qp_init_attr *init) noexcept nogil
    int (*destroy_qp)(ibv_qp *qp) noexcept nogil
    # address handle
    ibv_ah *(*create_ah)(ibv_pd *pd, ibv_ah_attr *attr) noexcept nogil
    int (*destroy_ah)(ibv_ah *ah) noexcept nogil
    # process
    int (*fork_init)() noexcept nogil
    int (*is_fork_initialized)() noexcept nogil
    # extras of libsoftnic, with defaults
    int (*alloc)(ibv_context *context, size_t length, void **addr) noexcept nogil
    int (*free)(ibv_context *context, void *addr, size_t length) noexcept nogil
    int (*reg_is_free)() noexcept nogil


cdef class Provider:
    cdef provider_ops table
    cdef provider_ops *ops          # = &self.table once loaded
    cdef void *handle               # never dlclosed
    cdef readonly str name          # "softnic" or "libibverbs"
    cdef readonly str path          # what was dlopened
    cdef void *symbol(self, str name, bint required) except? NULL
    cdef int load(self) except -1
