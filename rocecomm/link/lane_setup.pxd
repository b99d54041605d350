# cython: language_level=3
from libc.stdint cimport uint32_t
from rocecomm.link.base cimport Base
from rocecomm.link.core cimport engine_t, peer_t

cdef uint32_t lane_depth(int others, object device) except 0
cdef int make_chain(engine_t *e, uint32_t depth) except -1
cdef tuple make_lane(Base g, int rank, uint32_t depth, int port, object device)
cdef int plan_lane(Base g, peer_t *p, object agreement, object config, int port) except -1
cdef int join_lane(Base g, object mine, object other, object agreement, object config,
                   int port) except -1
