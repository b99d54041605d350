# cython: language_level=3
"""Requests and small nodes: taken from blocks, so the data path never calls malloc in the long run."""
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset
from rocecomm.link.pieces cimport pieces_free, pieces_unregister
from rocecomm.link.store cimport store_end, store_put

cdef extern from "<errno.h>" nogil:
    int errno
    int EBUSY

cdef extern from "<unistd.h>" nogil:
    ssize_t c_write "write"(int, const void *, size_t) noexcept

cdef enum:
    BLOCK = 256


cdef req_t *req_new(engine_t *e) noexcept nogil:
    """A zeroed request, or NULL without memory. Its id is stable, its generation new."""
    cdef req_t *block
    cdef req_t **blocks
    cdef req_t *r
    cdef uint32_t i, id, gen
    if e.free == NULL:
        blocks = <req_t **>realloc(e.blocks, (e.n_blocks + 1) * sizeof(req_t *))
        if blocks == NULL:
            return NULL
        e.blocks = blocks
        block = <req_t *>calloc(BLOCK, sizeof(req_t))
        if block == NULL:
            return NULL
        for i in range(BLOCK):
            block[BLOCK - 1 - i].id = e.n_blocks * BLOCK + BLOCK - 1 - i
            block[BLOCK - 1 - i].next = e.free
            e.free = &block[BLOCK - 1 - i]
        e.blocks[e.n_blocks] = block
        e.n_blocks += 1
    r = e.free
    e.free = r.next
    id = r.id
    gen = r.gen + 1
    memset(r, 0, sizeof(req_t))
    r.id = id
    r.gen = gen
    e.live += 1
    return r


cdef void req_free(engine_t *e, req_t *r) noexcept nogil:
    if r.pieces != NULL:
        pieces_free(r.pieces)
        r.pieces = NULL
    if r.one != NULL:
        r.one.next = e.one_free
        e.one_free = r.one
        r.one = NULL
    r.state = S_FREE
    r.owner = NULL
    r.next = e.free
    e.free = r
    e.live -= 1


cdef req_t *req_find(engine_t *e, uint64_t id, uint32_t gen) noexcept nogil:
    """The live request that a peer's answer is about; NULL if it is long gone."""
    cdef req_t *r
    if id >= <uint64_t>e.n_blocks * BLOCK:
        return NULL
    r = &e.blocks[id // BLOCK][id % BLOCK]
    if r.state == S_FREE or r.gen != gen:
        return NULL
    return r


cdef bint req_register(engine_t *e, req_t *r, int access) noexcept nogil:
    """Registers the request's buffer for itself, unless it came with a registration."""
    if r.mr != NULL or r.size == 0:
        return True
    r.mr = e.ops.reg_mr(e.pd, r.buf, r.size, access)
    if r.mr == NULL:
        r.err = errno
        return False
    r.flags |= F_OWN_MR
    r.lkey = r.mr.lkey
    r.rkey = r.mr.rkey
    return True


cdef bint req_unregister(engine_t *e, req_t *r) noexcept nogil:
    """False if a peer still touches the memory (soft0: it was stopped in mid copy)."""
    if r.pieces != NULL and not pieces_unregister(e.ops, r.pieces):
        return False
    if r.mr != NULL and r.flags & F_OWN_MR:
        if e.ops.dereg_mr(r.mr) != 0:
            return False
        r.flags &= ~<uint32_t>F_OWN_MR
    r.mr = NULL
    return True


cdef void finish(engine_t *e, req_t *r) noexcept nogil:
    if r.flags & F_ORPHAN:
        if r.owner == NULL:
            req_free(e, r)
        else:
            r.next = e.done_owned
            rc_set_ptr(&e.done_owned, r)        # waiters look without the mutex


cdef void req_end(engine_t *e, req_t *r, int status) noexcept nogil:
    """The transfer is over. `r` is in no list. May free `r` if nobody waits for it."""
    r.status = status
    rc_set8(&r.state, S_DONE)
    e.ended += 1
    if r.flags & F_AWAITED:
        tell_loops(e)
    if req_unregister(e, r):
        finish(e, r)
        return
    # the caller sees the end, but memory and registration stay until the holder lets go
    r.flags |= F_ZOMBIE
    push(&e.zombies, r)


cdef void retry_zombies(engine_t *e) noexcept nogil:
    cdef req_t *r = e.zombies.head
    cdef req_t *after
    while r != NULL:
        after = r.next
        if req_unregister(e, r):
            unlink(&e.zombies, r)
            r.flags &= ~<uint32_t>F_ZOMBIE
            finish(e, r)
        r = after


cdef one_t *one_new(engine_t *e) noexcept nogil:
    """A zeroed one_t, or NULL without memory; `req_free` takes it back."""
    cdef one_t *o = e.one_free
    if o != NULL:
        e.one_free = o.next
    else:
        o = <one_t *>malloc(sizeof(one_t))
        if o == NULL:
            return NULL
    memset(o, 0, sizeof(one_t))
    return o


cdef unx_t *unx_new(engine_t *e) noexcept nogil:
    cdef unx_t *u = e.unx_free
    if u != NULL:
        e.unx_free = u.next
    else:
        u = <unx_t *>malloc(sizeof(unx_t))
        if u == NULL:
            return NULL
    u.next = u.prev = NULL
    u.local = NULL
    u.copy = NULL
    u.slot = <uint32_t>NO_SLOT
    return u


cdef void unx_free(engine_t *e, unx_t *u) noexcept nogil:
    store_put(&e.store, u.copy)
    u.copy = NULL
    u.next = e.unx_free
    e.unx_free = u


cdef group_t *find_group(engine_t *e, uint32_t id, bint make) noexcept nogil:
    """Needs the mutex only to `make` one."""
    cdef group_t *g = <group_t *>rc_get_ptr(&e.groups)
    while g != NULL:
        if g.id == id:
            return g
        g = g.next
    if not make:
        return NULL
    g = <group_t *>calloc(1, sizeof(group_t))
    if g == NULL:
        return NULL
    g.id = id
    g.next = e.groups
    rc_set_ptr(&e.groups, g)
    return g


cdef void tell_loops(engine_t *e) noexcept nogil:
    """Something that an event loop may wait for has ended. With the mutex held."""
    cdef uint64_t one = 1
    cdef loop_t *l = e.loops
    while l != NULL:
        if rc_get(&l.waiting) > 0 and not l.told:
            l.told = True
            c_write(l.fd, &one, 8)
        l = l.next


cdef void poke_worker(engine_t *e) noexcept nogil:
    """Ends the progress thread's sleep. With the mutex held."""
    cdef uint64_t one = 1
    e.worker_parked = False
    if e.worker_fd >= 0:
        c_write(e.worker_fd, &one, 8)


cdef void free_unexpected(engine_t *e, unx_t *u) noexcept nogil:
    cdef unx_t *after
    while u != NULL:
        after = u.next
        store_put(&e.store, u.copy)
        free(u)
        u = after


cdef void free_all(engine_t *e) noexcept nogil:
    """Gives back every C block. The queue pairs and registrations are gone already."""
    cdef int32_t i
    cdef uint32_t b, k
    cdef ctl_t *c
    cdef ctl_t *after
    cdef group_t *g
    cdef one_t *o
    if e.peers != NULL:
        for i in range(e.size):
            free_unexpected(e, e.peers[i].unexpected.head)
            free(e.peers[i].sq)
            free(e.peers[i].lane.sq)
            free(e.peers[i].lane.notes)
            c = e.peers[i].ctl_head
            while c != NULL:
                after = c.next
                free(c)
                c = after
    free(e.peers)
    free(e.joins)
    free(e.caller)
    e.joins = NULL
    e.caller = NULL
    free_unexpected(e, e.unx_free)
    store_end(&e.store)
    c = e.ctl_free
    while c != NULL:
        after = c.next
        free(c)
        c = after
    for b in range(e.n_blocks):
        for k in range(<uint32_t>BLOCK):
            free(e.blocks[b][k].one)
        free(e.blocks[b])
    while e.one_free != NULL:
        o = e.one_free
        e.one_free = o.next
        free(o)
    free(e.chain)
    free(e.chain_sge)
    free(e.cell_free)
    e.chain = NULL
    e.chain_sge = NULL
    e.cell_free = NULL
    free(e.blocks)
    free(e.send_free)
    while e.groups != NULL:
        g = e.groups
        e.groups = g.next
        free(g)
    e.peers = NULL
    e.unx_free = NULL
    e.ctl_free = NULL
    e.blocks = NULL
    e.n_blocks = 0
    e.free = NULL
    e.send_free = NULL
