# cython: language_level=3
"""What connecting on first use needs, for one peer and in all (plain data, no functions)."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from rocecomm.verbs.libibverbs cimport ibv_ah, ibv_ah_attr, ibv_qp

cdef enum:
    # join_t.stage
    J_NONE = 0
    J_CALLING = 1           # our queue pairs are made; the peer's numbers are not known yet
    J_HEARD = 2             # ours are connected; whether the peer's are is not known yet
    J_DONE = 3

# How to reach a peer that is not connected, and how far connecting has got.
ctypedef struct join_t:
    uint8_t stage
    # where it takes datagrams, and the path to it
    uint32_t call_qpn
    uint32_t call_qkey
    ibv_ah_attr attr
    ibv_ah *ah
    # for the message queue pair
    uint8_t mtu
    uint8_t timeout
    uint8_t retry
    uint8_t reads
    uint8_t serves
    uint32_t qpn            # of our queue pair: peer_t.qpn stays 0 until the connection is ready
    uint32_t psn
    int64_t again_at        # when the next datagram is due, and how long the pause after it will be
    int64_t pause
    # its process, if it runs on this host: number (else 0) and start time, as /proc says
    int32_t pid
    uint64_t started
    int64_t looked_at
    bint ended              # it has ended, as we saw when we looked last

# One rank's datagrams, and what queue pairs are made like.
ctypedef struct caller_t:
    ibv_qp *qp
    char *slots             # n_recv for datagrams that come, then n_send for those that go
    uint32_t lkey
    uint32_t n_recv
    uint32_t n_send
    uint32_t head
    uint32_t tail
    uint64_t key[4]
    uint32_t depth          # of a message queue pair, and of a lane
    uint32_t lane_depth
    uint32_t max_inline
    uint32_t lane_inline
    uint32_t lane_access
    uint8_t port
    uint32_t per_peer       # receive slots that a connection adds
    uint32_t posted         # receive slots so far
    uint32_t connections    # queue pairs were made for so many peers
    int64_t watched_at
    uint64_t sent           # datagrams
    uint64_t refused
