# C types of log.py.
cimport cython
from libc.math cimport rint

@cython.final
cdef class EpisodeLog:
    cdef object batch, stamp
    cdef list names, term_names, written
    cdef public list actions
    cdef public Py_ssize_t seconds
    cdef Py_ssize_t hold, length
    cdef double n_replicas
    cdef bint scales
    cdef long long[::1] columns, kinds, step_seconds
    cdef long long[:, ::1] phases
    cdef double[:, ::1] observation, fleet, terms, metrics
    cdef double[::1] rewards
    cdef double[:, :, :] step_metrics
    cdef double[:, :] step_rewards

    @cython.locals(second=Py_ssize_t, i=Py_ssize_t)
    cpdef void add(self)
    @cython.locals(second=Py_ssize_t)
    cpdef list entries(self)
    @cython.locals(seconds=Py_ssize_t, second=Py_ssize_t, metrics=dict, terms=dict, i=Py_ssize_t)
    cpdef dict info(self)
    cpdef dict workload(self)
    @cython.locals(found=dict, i=Py_ssize_t, value=double)
    cdef dict _metrics(self, Py_ssize_t second)
    @cython.locals(action=dict)
    cdef dict _action(self)
    @cython.locals(found=dict)
    cdef dict _fleet(self)
