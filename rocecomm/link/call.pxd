# cython: language_level=3
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t
from rocecomm.link.core cimport engine_t, group_t, peer_t
from rocecomm.verbs.libibverbs cimport ibv_wc

cdef extern from *:
    """
    #ifndef ROCECOMM_CALL_H
    #define ROCECOMM_CALL_H
    #include <stdint.h>
    #define CALL_MAGIC 0x4343u
    /* Little-endian, no padding; behind 40 bytes of routing header where it arrives. */
    typedef struct __attribute__((packed)) {
        uint16_t magic;      /*  0 */
        uint8_t  version;    /*  2 */
        uint8_t  kind;       /*  3 */
        uint8_t  flags;      /*  4 */
        uint8_t  zero[3];    /*  5 */
        uint32_t source;     /*  8 ranks */
        uint32_t target;     /* 12 */
        uint64_t instance;   /* 16 of the sender */
        uint64_t to;         /* 24 of the receiver */
        uint32_t qpn;        /* 32 message queue pair: number, first packet */
        uint32_t psn;        /* 36 */
        uint32_t lane_out;   /* 40 */
        uint32_t lane_in;    /* 44 */
        uint32_t lane_psn;   /* 48 */
        uint32_t eager;      /* 52 slots that the receiver may fill */
        uint32_t ctrl;       /* 56 */
        uint32_t group;      /* 60 CALL_FAILED: from here on what an ABORT message says */
        int32_t  cls;        /* 64 */
        int32_t  who;        /* 68 */
        int32_t  rank_a;     /* 72 */
        int32_t  rank_b;     /* 76 */
        char     sig_a[32];  /* 80 */
        char     sig_b[32];  /* 112 */
        char     text[96];   /* 144 cut off where it is longer */
        uint64_t mac[2];     /* 240 of all before */
    } rc_call;
    _Static_assert(sizeof(rc_call) == 256, "a datagram fits every path MTU");
    #endif
    """
    enum:
        CALL_MAGIC
    ctypedef struct rc_call:
        uint16_t magic
        uint8_t version
        uint8_t kind
        uint8_t flags
        uint8_t zero[3]
        uint32_t source
        uint32_t target
        uint64_t instance
        uint64_t to
        uint32_t qpn
        uint32_t psn
        uint32_t lane_out
        uint32_t lane_in
        uint32_t lane_psn
        uint32_t eager
        uint32_t ctrl
        uint32_t group
        int32_t cls
        int32_t who
        int32_t rank_a
        int32_t rank_b
        char sig_a[32]
        char sig_b[32]
        char text[96]
        uint64_t mac[2]

cdef enum:
    # rc_call.kind
    CALL_NUMBERS = 1        # these are my queue pairs
    CALL_LEFT = 2           # I close, and never was connected to you
    CALL_FAILED = 3         # a collective of a group has failed
    CALL_REFUSED = 4        # our end of the connection is broken
    # rc_call.flags
    CALL_HAVE = 1           # I am connected to yours
    CALL_ANSWER = 2         # and want to know whether you are to mine

    CALL_SLOT = 320         # bytes: routing header and datagram

cdef bint send_call(engine_t *e, peer_t *p, uint8_t kind, uint8_t flags, const group_t *g) noexcept nogil
cdef bint post_call(engine_t *e, uint32_t slot) noexcept nogil
cdef peer_t *take_call(engine_t *e, ibv_wc *wc, rc_call *out) noexcept nogil
cdef int on_call_sent(engine_t *e, ibv_wc *wc) noexcept nogil
