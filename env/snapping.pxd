# C types of snapping.py.
cimport cython
from libc.math cimport rint

@cython.final
cdef class SnapKernel:
    cdef public double[::1] low, high, forced, spec_values, spec_edges

    @cython.locals(b=Py_ssize_t, i=Py_ssize_t, k=Py_ssize_t, a=double)
    cdef void _snap(self, const double[:, :] actions, const unsigned char[::1] mask, double[:, ::1] snapped) noexcept nogil
