# C types of knobs.py.
cimport cython
from libc.math cimport exp, log, rint

@cython.final
cdef class KnobKernel:
    cdef public double[::1] low, high, default, spec_values, spec_edges, kv_budget, batch_size, replicas
    cdef public long long[::1] offered, spec_index, disagg, tier

    @cython.locals(b=Py_ssize_t)
    cdef void _snap(self, const double[:, :] actions, double[:, ::1] snapped) noexcept nogil
    @cython.locals(b=Py_ssize_t, replicas=double)
    cdef void _write(self, const double[:, :] actions, Py_ssize_t lo, Py_ssize_t hi) noexcept nogil
    cdef void _write_row(
        self, Py_ssize_t b, double kv, double spec, double batch, double disagg, double tier, double replicas
    ) noexcept nogil
    cdef double _clamped(self, Py_ssize_t knob, double value) noexcept nogil
    @cython.locals(i=Py_ssize_t, length=double)
    cdef Py_ssize_t _nearest_spec(self, double value) noexcept nogil

@cython.final
cdef class ActionDecoder:
    cdef public long long[::1] n_levels
    cdef public double[:, ::1] level
    cdef public double[::1] low, high

    @cython.locals(b=Py_ssize_t, knob=Py_ssize_t, chosen=cython.longlong)
    cdef bint _levels(self, const long long[:, :] actions, double[:, ::1] knobs) noexcept nogil
    @cython.locals(b=Py_ssize_t, knob=Py_ssize_t, unit=double)
    cdef void _box(self, const double[:, :] actions, double[:, ::1] knobs) noexcept nogil
    @cython.locals(last=cython.longlong)
    cdef double _knob(self, Py_ssize_t knob, double unit) noexcept nogil
