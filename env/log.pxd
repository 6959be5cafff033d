# C types of log.py.
cimport cython
from libc.math cimport rint

from env.reward cimport GradeRewardKernel

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
    cdef GradeRewardKernel grade
    cdef tuple part_names
    cdef list class_names
    cdef double[:, ::1] queue, missed
    cdef double[::1] missed_before, missed_in_step

    @cython.locals(second=Py_ssize_t, i=Py_ssize_t, c=Py_ssize_t)
    cpdef void add(self)
    @cython.locals(second=Py_ssize_t)
    cpdef list entries(self)
    @cython.locals(seconds=Py_ssize_t, second=Py_ssize_t, metrics=dict, terms=dict, found=dict,
        i=Py_ssize_t)
    cpdef dict info(self)
    cpdef dict workload(self)
    @cython.locals(found=dict, i=Py_ssize_t, value=double)
    cdef dict _metrics(self, Py_ssize_t second)
    @cython.locals(score=double, parts=dict, i=Py_ssize_t)
    cdef dict _grade_so_far(self)
    @cython.locals(found=dict, c=Py_ssize_t)
    cdef dict _by_class(self)
    @cython.locals(action=dict)
    cdef dict _action(self)
    @cython.locals(found=dict)
    cdef dict _fleet(self)
