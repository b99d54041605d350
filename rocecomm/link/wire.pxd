# cython: language_level=3
"""The header that precedes every message, and the numbers in it (docs/design/messaging.md)."""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from *:
    """
    #ifndef ROCECOMM_WIRE_H
    #define ROCECOMM_WIRE_H
    #include <stddef.h>
    #include <stdint.h>
    #define RC_MAGIC 0x4352u
    #define RC_VERSION 2u
    /* Little-endian, no padding. Ranks of another byte order are refused when joining. With
       FLAG_SHORT the header ends after `group`: what follows counts as 0, and the size is what
       is left of the message. A few bytes and their header then lie in one cache line. */
    typedef struct __attribute__((packed)) {
        uint16_t magic;      /*  0 */
        uint8_t  version;    /*  2 */
        uint8_t  kind;       /*  3 */
        uint16_t flags;      /*  4 */
        uint16_t dtype;      /*  6 kind << 8 | size: see wire.pyx */
        uint32_t source;     /*  8 rank of the sender */
        uint32_t eager_back; /* 12 eager slots given so far beyond the first grant, modulo 2^32 */
        uint64_t instance;   /* 16 of the receiver: a stranger's message is refused */
        uint64_t tag;        /* 24 */
        uint64_t seq;        /* 32 counts matchable messages of this pair */
        uint32_t ctrl_back;  /* 40 control slots given back so far, modulo 2^32 */
        uint32_t group;      /* 44 0: user messages, else whose signature follows */
        uint64_t size;       /* 48 payload bytes, or status in an answer */
        uint64_t req;        /* 56 the sender's request, echoed in answers */
        uint64_t addr;       /* 64 announcements: where the payload lies */
        uint32_t rkey;       /* 72 and its key */
        uint32_t gen;        /* 76 generation of the sender's request: a late answer finds it gone */
        uint64_t coll_seq;   /* 80 number of the collective in its group */
        uint64_t count;      /* 88 its element count */
        uint8_t  op;         /* 96 */
        uint8_t  reduction;  /* 97 */
        uint16_t coll_dtype; /* 98 */
        uint32_t root;       /* 100 */
    } rc_header;
    _Static_assert(sizeof(rc_header) == 104, "wire header");
    #define RC_SHORT 48u
    _Static_assert(offsetof(rc_header, size) == RC_SHORT, "short wire header");
    #endif
    """
    enum:
        RC_MAGIC
        RC_VERSION
        RC_SHORT

    ctypedef struct rc_header:
        uint16_t magic
        uint8_t version
        uint8_t kind
        uint16_t flags
        uint16_t dtype
        uint32_t source
        uint32_t eager_back
        uint64_t instance
        uint64_t tag
        uint64_t seq
        uint32_t ctrl_back
        uint32_t group
        uint64_t size
        uint64_t req
        uint64_t addr
        uint32_t rkey
        uint32_t gen
        uint64_t coll_seq
        uint64_t count
        uint8_t op
        uint8_t reduction
        uint16_t coll_dtype
        uint32_t root

cpdef enum Kind:
    EAGER = 1           # header and payload in one slot
    ANNOUNCE = 2        # the payload stays at the sender, the receiver pulls it
    DONE = 3            # answer to ANNOUNCE: pulled (or refused), the buffer is free
    WITHDRAW = 4        # the sender wants an announcement back
    WITHDRAWN = 5       # answer: it was not matched, nothing will be read
    CREDIT = 6          # gives back slots, nothing else
    ABORT = 7           # a collective failed; the payload says why
    GOODBYE = 8         # the sender closes; nothing follows
    CYCLE = 9           # both block in sends to each other, is that so?
    CYCLE_YES = 10      # it is: both sends have failed
    RECALL = 11         # others need slots: give back what you do not use, up to `size`
    RETURN = 12         # answer: `size` credits for payloads, unused
    LANE_RESET = 13     # the sender's lane begins anew: number in req, first packet in size
    LANE_READY = 14     # answer: it may be used
    NOTED = 15          # how many notifications were taken so far, in size

cpdef enum Flag:
    FLAG_BLOCKING = 1   # the sender does nothing else until this is taken
    FLAG_LIST = 2       # ANNOUNCE: of `addr` buffers; a table of them follows, or says where it is
    FLAG_SHORT = 4      # EAGER, outside a collective: the header ends after `group`

cpdef enum Answer:
    ANSWER_OK = 0
    ANSWER_TRUNCATED = 1        # the receiver's buffer was too small
    ANSWER_MISMATCH = 2         # dtypes or signatures disagree
    ANSWER_FAILED = 3           # the receiver could not register its buffer

cdef inline size_t header_size(const rc_header *h) noexcept nogil:
    return RC_SHORT if h.flags & FLAG_SHORT else sizeof(rc_header)

# What ranks must agree on in a collective.
ctypedef struct sig_t:
    uint64_t coll_seq
    uint64_t count
    uint32_t group
    uint32_t root
    uint16_t dtype
    uint8_t op
    uint8_t reduction

cdef inline bint same_sig(const sig_t *s, const rc_header *h) noexcept nogil:
    return (s.coll_seq == h.coll_seq and s.count == h.count and s.group == h.group
            and s.root == h.root and s.dtype == h.coll_dtype and s.op == h.op
            and s.reduction == h.reduction)

cdef inline void sig_of(sig_t *s, const rc_header *h) noexcept nogil:
    s.coll_seq = h.coll_seq
    s.count = h.count
    s.group = h.group
    s.root = h.root
    s.dtype = h.coll_dtype
    s.op = h.op
    s.reduction = h.reduction

# Bytes are bytes: uint8, int8, byte strings, structures and void match every dtype. Others must be equal.
cdef inline bint dtypes_agree(uint16_t a, uint16_t b) noexcept nogil:
    if a == b:
        return True
    return raw_dtype(a) or raw_dtype(b)

cdef inline bint raw_dtype(uint16_t code) noexcept nogil:
    return code == 0 or (code >> 8) == 86 or code == ((117 << 8) | 1) or code == ((105 << 8) | 1)

cdef uint16_t code_of(str name) except? 0xFFFF
cdef str describe_sig(const sig_t *s)
