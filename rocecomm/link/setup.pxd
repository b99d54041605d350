# cython: language_level=3
from rocecomm.link.base cimport Base

cdef class Links(Base):
    cdef int local_ranks

    cdef object tear_down(self)
