# C types of snapping.py.
cimport cython
from libc.math cimport rint

@cython.final
cdef class SnapKernel:
    cdef public double[::1] low, high, forced, spec_values, spec_edges, kv_budget, batch_size
    cdef public long long[::1] offered, spec, disagg, tier

    @cython.locals(b=Py_ssize_t)
    cdef void _snap(self, const double[:, :] actions, double[:, ::1] snapped) noexcept nogil
    @cython.locals(b=Py_ssize_t)
    cdef void _write(self, const double[:, :] actions, Py_ssize_t lo, Py_ssize_t hi) noexcept nogil
    cdef double _clamped(self, Py_ssize_t knob, double value) noexcept nogil
    @cython.locals(i=Py_ssize_t, length=double)
    cdef Py_ssize_t _spec_index(self, double value) noexcept nogil
