"""Loads a shared library with libibverbs' ABI and fills the table of its control verbs.

Two libraries exist: libibverbs.so.1 of the system and the project's own libsoftnic.so.
Nothing is loaded at import, and nothing is ever unloaded.
"""

from libc.errno cimport EOPNOTSUPP, errno
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset
from rocecomm.verbs.handle cimport reason_fn, use_reasons
from rocecomm.verbs.libibverbs cimport *

import os
import threading

from rocecomm.errors import DeviceNotFoundError

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *path, int flags) noexcept
    void *dlsym(void *handle, const char *name) noexcept
    char *dlerror() noexcept
    int RTLD_NOW
    int RTLD_LOCAL

cdef extern from *:
    """
    #include <errno.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <infiniband/verbs.h>

    /* ibv_query_port of the header calls an exported symbol; the extended slot has the
       full structure and every provider since 2017 fills it. */
    static int rc_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr)
    {
        struct verbs_context *v = verbs_get_ctx_op(ctx, query_port);
        memset(attr, 0, sizeof *attr);
        return v ? v->query_port(ctx, port, attr, sizeof *attr) : EOPNOTSUPP;
    }

    static int rc_query_gid_ex(struct ibv_context *ctx, uint32_t port, uint32_t index,
                               struct ibv_gid_entry *entry, uint32_t flags, size_t size)
    {
        (void)ctx; (void)port; (void)index; (void)entry; (void)flags; (void)size;
        return EOPNOTSUPP;
    }

    static ssize_t rc_query_gid_table(struct ibv_context *ctx, struct ibv_gid_entry *entries,
                                      size_t max_entries, uint32_t flags, size_t size)
    {
        (void)ctx; (void)entries; (void)max_entries; (void)flags; (void)size;
        return -EOPNOTSUPP;
    }

    static struct ibv_mr *rc_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length,
                                          uint64_t iova, unsigned int access)
    {
        (void)pd; (void)addr; (void)length; (void)iova; (void)access;
        errno = EOPNOTSUPP;
        return NULL;
    }

    static int rc_resize_cq(struct ibv_cq *cq, int cqe)
    {
        (void)cq; (void)cqe;
        return EOPNOTSUPP;
    }

    static int rc_no(void) { return 0; }
    static int rc_fork_unneeded(void) { return IBV_FORK_UNNEEDED; }

    static int rc_alloc(struct ibv_context *ctx, size_t length, void **addr)
    {
        (void)ctx;
        *addr = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return *addr == MAP_FAILED ? errno : 0;
    }

    static int rc_free(struct ibv_context *ctx, void *addr, size_t length)
    {
        (void)ctx;
        return munmap(addr, length) ? errno : 0;
    }
    """
    int rc_query_port(ibv_context *, uint8_t, ibv_port_attr *) noexcept nogil
    int rc_query_gid_ex(ibv_context *, uint32_t, uint32_t, ibv_gid_entry *, uint32_t,
                        size_t) noexcept nogil
    ssize_t rc_query_gid_table(ibv_context *, ibv_gid_entry *, size_t, uint32_t,
                               size_t) noexcept nogil
    ibv_mr *rc_reg_mr_iova2(ibv_pd *, void *, size_t, uint64_t, unsigned int) noexcept nogil
    int rc_resize_cq(ibv_cq *, int) noexcept nogil
    int rc_no() noexcept nogil
    int rc_fork_unneeded() noexcept nogil
    int rc_alloc(ibv_context *, size_t, void **) noexcept nogil
    int rc_free(ibv_context *, void *, size_t) noexcept nogil


cdef class Provider:
    """One loaded library. Use `get(name)`, which loads each library once.

    ``name`` is "softnic" or "libibverbs", ``path`` what was loaded. Raises
    DeviceNotFoundError with the loader's message if that cannot be done.
    """

    def __cinit__(self, str name, str path):
        self.name = name
        self.path = path
        self.load()

    cdef void *symbol(self, str name, bint required) except? NULL:
        cdef bytes raw = name.encode()
        cdef void *found = dlsym(self.handle, raw)
        if found == NULL and required:
            raise DeviceNotFoundError(
                f"{self.path} has no {name} and so is not a library that rocecomm can use; "
                f"install a current rdma-core, or unset the variable that names the library")
        return found

    cdef int load(self) except -1:
        cdef provider_ops *t = &self.table
        cdef bytes raw = os.fsencode(self.path)
        cdef const char *c_path = raw
        cdef char *why
        cdef void *p
        with nogil:
            self.handle = dlopen(c_path, RTLD_NOW | RTLD_LOCAL)
        if self.handle == NULL:
            why = dlerror()
            raise DeviceNotFoundError(
                f"the library {self.path} cannot be loaded: "
                f"{why.decode('utf-8', 'replace') if why != NULL else 'unknown reason'}")
        memset(t, 0, sizeof(provider_ops))
        t.get_device_list = <ibv_device **(*)(int *) noexcept nogil> self.symbol("ibv_get_device_list", True)
        t.free_device_list = <void (*)(ibv_device **) noexcept nogil> self.symbol("ibv_free_device_list", True)
        t.open_device = <ibv_context *(*)(ibv_device *) noexcept nogil> self.symbol("ibv_open_device", True)
        t.close_device = <int (*)(ibv_context *) noexcept nogil> self.symbol("ibv_close_device", True)
        t.query_device = <int (*)(ibv_context *, ibv_device_attr *) noexcept nogil> self.symbol("ibv_query_device", True)
        t.query_port = rc_query_port
        t.query_gid = <int (*)(ibv_context *, uint8_t, int, ibv_gid *) noexcept nogil> self.symbol("ibv_query_gid", True)
        t.query_pkey = <int (*)(ibv_context *, uint8_t, int, uint16_t *) noexcept nogil> self.symbol("ibv_query_pkey", True)
        t.get_async_event = <int (*)(ibv_context *, ibv_async_event *) noexcept nogil> self.symbol("ibv_get_async_event", True)
        t.ack_async_event = <void (*)(ibv_async_event *) noexcept nogil> self.symbol("ibv_ack_async_event", True)
        t.alloc_pd = <ibv_pd *(*)(ibv_context *) noexcept nogil> self.symbol("ibv_alloc_pd", True)
        t.dealloc_pd = <int (*)(ibv_pd *) noexcept nogil> self.symbol("ibv_dealloc_pd", True)
        t.reg_mr = <ibv_mr *(*)(ibv_pd *, void *, size_t, int) noexcept nogil> self.symbol("ibv_reg_mr", True)
        t.dereg_mr = <int (*)(ibv_mr *) noexcept nogil> self.symbol("ibv_dereg_mr", True)
        t.create_comp_channel = <ibv_comp_channel *(*)(ibv_context *) noexcept nogil> self.symbol("ibv_create_comp_channel", True)
        t.destroy_comp_channel = <int (*)(ibv_comp_channel *) noexcept nogil> self.symbol("ibv_destroy_comp_channel", True)
        t.create_cq = <ibv_cq *(*)(ibv_context *, int, void *, ibv_comp_channel *, int) noexcept nogil> self.symbol("ibv_create_cq", True)
        t.destroy_cq = <int (*)(ibv_cq *) noexcept nogil> self.symbol("ibv_destroy_cq", True)
        t.get_cq_event = <int (*)(ibv_comp_channel *, ibv_cq **, void **) noexcept nogil> self.symbol("ibv_get_cq_event", True)
        t.ack_cq_events = <void (*)(ibv_cq *, unsigned int) noexcept nogil> self.symbol("ibv_ack_cq_events", True)
        t.create_srq = <ibv_srq *(*)(ibv_pd *, ibv_srq_init_attr *) noexcept nogil> self.symbol("ibv_create_srq", True)
        t.modify_srq = <int (*)(ibv_srq *, ibv_srq_attr *, int) noexcept nogil> self.symbol("ibv_modify_srq", True)
        t.query_srq = <int (*)(ibv_srq *, ibv_srq_attr *) noexcept nogil> self.symbol("ibv_query_srq", True)
        t.destroy_srq = <int (*)(ibv_srq *) noexcept nogil> self.symbol("ibv_destroy_srq", True)
        t.create_qp = <ibv_qp *(*)(ibv_pd *, ibv_qp_init_attr *) noexcept nogil> self.symbol("ibv_create_qp", True)
        t.modify_qp = <int (*)(ibv_qp *, ibv_qp_attr *, int) noexcept nogil> self.symbol("ibv_modify_qp", True)
        t.query_qp = <int (*)(ibv_qp *, ibv_qp_attr *, int, ibv_qp_init_attr *) noexcept nogil> self.symbol("ibv_query_qp", True)
        t.destroy_qp = <int (*)(ibv_qp *) noexcept nogil> self.symbol("ibv_destroy_qp", True)
        t.create_ah = <ibv_ah *(*)(ibv_pd *, ibv_ah_attr *) noexcept nogil> self.symbol("ibv_create_ah", True)
        t.destroy_ah = <int (*)(ibv_ah *) noexcept nogil> self.symbol("ibv_destroy_ah", True)

        # what an older library or libibverbs lacks gets a default
        t.query_gid_ex = rc_query_gid_ex
        t.query_gid_table = rc_query_gid_table
        t.reg_mr_iova2 = rc_reg_mr_iova2
        t.resize_cq = rc_resize_cq
        t.fork_init = rc_no
        t.is_fork_initialized = rc_fork_unneeded
        t.alloc = rc_alloc
        t.free = rc_free
        t.reg_is_free = rc_no
        p = self.symbol("_ibv_query_gid_ex", False)
        if p != NULL:
            t.query_gid_ex = <int (*)(ibv_context *, uint32_t, uint32_t, ibv_gid_entry *, uint32_t, size_t) noexcept nogil> p
        p = self.symbol("_ibv_query_gid_table", False)
        if p != NULL:
            t.query_gid_table = <ssize_t (*)(ibv_context *, ibv_gid_entry *, size_t, uint32_t, size_t) noexcept nogil> p
        p = self.symbol("ibv_reg_mr_iova2", False)
        if p != NULL:
            t.reg_mr_iova2 = <ibv_mr *(*)(ibv_pd *, void *, size_t, uint64_t, unsigned int) noexcept nogil> p
        p = self.symbol("ibv_resize_cq", False)
        if p != NULL:
            t.resize_cq = <int (*)(ibv_cq *, int) noexcept nogil> p
        p = self.symbol("ibv_fork_init", False)
        if p != NULL:
            t.fork_init = <int (*)() noexcept nogil> p
        p = self.symbol("ibv_is_fork_initialized", False)
        if p != NULL:
            t.is_fork_initialized = <int (*)() noexcept nogil> p
        p = self.symbol("softnic_alloc", False)
        if p != NULL:
            t.alloc = <int (*)(ibv_context *, size_t, void **) noexcept nogil> p
            t.free = <int (*)(ibv_context *, void *, size_t) noexcept nogil> self.symbol("softnic_free", True)
        p = self.symbol("softnic_reason", False)
        if p != NULL:
            use_reasons(<reason_fn> p)
        p = self.symbol("softnic_reg_is_free", False)
        if p != NULL:
            t.reg_is_free = <int (*)() noexcept nogil> p
        self.ops = t
        return 0

    def device_list(self):
        """Devices of this library: list of (name, node_type, transport_type, sysfs path).

        Raises OSError if the library cannot say (ENOSYS: the kernel has no ib_uverbs).
        """
        cdef int n = 0
        cdef int i
        cdef int err
        cdef ibv_device **devices
        with nogil:
            devices = self.ops.get_device_list(&n)
            err = errno
        if devices == NULL:
            raise OSError(err, os.strerror(err))
        try:
            return [(devices[i].name.decode(), devices[i].node_type, devices[i].transport_type,
                     devices[i].ibdev_path.decode()) for i in range(n)]
        finally:
            self.ops.free_device_list(devices)

    def symbol_address(self, str name):
        """Address of an exported symbol of the library, 0 if it has none (for tests)."""
        return <size_t> self.symbol(name, False)

    @property
    def registration_is_free(self):
        """True where registering memory costs nothing, so that a cache is pointless."""
        return self.ops.reg_is_free() != 0

    @property
    def fork_status(self):
        """0: fork is unsafe for registered memory, 1: made safe, 2: safe by the kernel."""
        return self.ops.is_fork_initialized()

    def __reduce__(self):
        raise TypeError("a Provider cannot be copied or pickled: it is a library loaded "
                        "into this process")


_providers = {}
_lock = threading.Lock()


def library_path(str name):
    """Where the library of a provider is looked for: a path or a name for the loader."""
    if name == "softnic":
        own = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                           "softnic", "libsoftnic.so")
        return os.environ.get("ROCECOMM_SOFTNIC") or own
    if name == "libibverbs":
        return "libibverbs.so.1"
    raise ValueError(f"there is no provider {name!r}, only 'softnic' and 'libibverbs'")


def get(str name):
    """The provider "softnic" or "libibverbs", loaded on first use.

    Raises DeviceNotFoundError saying why the library cannot be loaded.
    """
    path = library_path(name)
    with _lock:
        provider = _providers.get(path)
        if provider is None:
            provider = _providers[path] = Provider(name, path)
        return provider
