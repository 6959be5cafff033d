# C types of observation.py.
cimport cython

@cython.final
cdef class ObservationKernel:
    cdef public int n_classes
    cdef public double nominal_prompt
    cdef public double[::1] nominal_share
    cdef public double[::1] first_fleet, spec_values, kv_budget, batch_size, rollout_share
    cdef public long long[::1] class_slot, time, spec_index, disagg, tier
    cdef public double[::1] prompt_window_requests, prompt_window_tokens, rate_ema, cost_so_far
    cdef public double[:, ::1] class_window, observation, fleet
    cdef public double[::1] queue_requests, kv_occupancy, ttft_p50_ms, tpot_ms, violation_share, gpu_memory_gb
    cdef public double[::1] spec_accept_rate, replicas, replicas_ready, replicas_draining

    @cython.locals(b=Py_ssize_t)
    cpdef void write(self, Py_ssize_t lo, Py_ssize_t hi)
    @cython.locals(c=Py_ssize_t, k=Py_ssize_t, prompt=double, total=double, share=double)
    cdef void _write_row(self, Py_ssize_t b) noexcept nogil
    @cython.locals(k=Py_ssize_t, spec=double, same=bint)
    cdef void _write_fleet(self, Py_ssize_t b) noexcept nogil
