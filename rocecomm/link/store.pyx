# cython: language_level=3
"""Memory for messages that nobody has asked for yet: given back when they are gone.

Such messages come in floods and leave roughly in order. malloc would keep what a flood took:
blocks of the system's, filled one after the other, go back as soon as the last message in them
is gone. SPARE empty ones are kept.
"""
from libc.stdint cimport uintptr_t

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long) noexcept
    int munmap(void *, size_t) noexcept
    void *MAP_FAILED
    int PROT_READ
    int PROT_WRITE
    int MAP_PRIVATE
    int MAP_ANONYMOUS

cdef enum:
    SLAB = 1 << 20
    HEAD = 64
    SPARE = 4


cdef slab_t *slab_new(size_t n) noexcept nogil:
    """A block with room for `n` bytes at least; NULL without memory."""
    cdef size_t room = (n + HEAD + SLAB - 1) & ~<size_t>(SLAB - 1)
    cdef char *p = <char *>mmap(NULL, room + SLAB, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    cdef size_t before
    if p == <char *>MAP_FAILED:
        return NULL
    before = (SLAB - (<uintptr_t>p & (SLAB - 1))) & (SLAB - 1)
    if before:
        munmap(p, before)
    munmap(p + before + room, SLAB - before)
    (<slab_t *>(p + before)).room = room
    return <slab_t *>(p + before)


cdef void retire(store_t *s, slab_t *b) noexcept nogil:
    """An empty block: kept, or given back."""
    if b.room == SLAB and s.n_spare < SPARE:
        b.next = s.spare
        s.spare = b
        s.n_spare += 1
    else:
        munmap(b, b.room)


cdef char *store_get(store_t *s, size_t n) noexcept nogil:
    """Room for `n` bytes; NULL without memory."""
    cdef slab_t *b = s.now
    cdef size_t need = (n + 16) & ~<size_t>15
    cdef char *p
    if b == NULL or b.used + need > b.room:
        if need + HEAD <= SLAB and s.spare != NULL:
            b = s.spare
            s.spare = b.next
            s.n_spare -= 1
        else:
            b = slab_new(need)
            if b == NULL:
                return NULL
        if s.now != NULL and s.now.live == 0:
            retire(s, s.now)
        b.used = HEAD
        b.live = 0
        s.now = b
    p = <char *>b + b.used
    b.used += need
    b.live += 1
    if b.room > SLAB:
        s.now = NULL                    # of one message: only in its first SLAB bytes is it found again
    return p


cdef void store_put(store_t *s, char *p) noexcept nogil:
    """The message at `p` is gone. NULL is none."""
    cdef slab_t *b = <slab_t *>(<uintptr_t>p & ~<uintptr_t>(SLAB - 1))
    if p == NULL:
        return
    b.live -= 1
    if b.live == 0:
        if b == s.now:
            b.used = HEAD
        else:
            retire(s, b)


cdef void store_end(store_t *s) noexcept nogil:
    """Gives back what is kept, when no message is stored any more."""
    cdef slab_t *b
    if s.now != NULL and s.now.live == 0:
        munmap(s.now, s.now.room)
    s.now = NULL
    while s.spare != NULL:
        b = s.spare
        s.spare = b.next
        munmap(b, b.room)
    s.n_spare = 0
