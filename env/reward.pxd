# C types of reward.py.
cimport cython
from libc.math cimport log1p, rint, sqrt

cdef double TTFT_CEILING_MS

@cython.final
cdef class RewardKernel:
    cdef public double alpha, beta, gamma, delta, max_throughput_tps, slo_ms, budget_per_step, latency_scale
    cdef public double memory_limit_gb, memory_slope_gb
    cdef public double[::1] tokens_per_sec, ttft_p50_ms, violation_share, cost_per_1k, gpu_memory_gb, reward
    cdef public double[:, ::1] terms

    @cython.locals(b=Py_ssize_t, throughput=double, latency=double, beyond=double, violations=double, cost=double)
    cpdef void compute(self, Py_ssize_t lo, Py_ssize_t hi)

@cython.final
cdef class GradeRewardKernel:
    cdef public double n_steps, memory_limit_gb, memory_slope_gb, start_replicas, min_billed_ktokens_per_s
    cdef public double[::1] weights, shares, lowest, of_episode, parts
    cdef public double[:, ::1] factors, terms, sums, earned
    cdef public bint pays_score
    cdef public long long[::1] time
    cdef public double[::1] tokens_per_sec, ttft_p50_ms, slo_violations, cost_per_1k, gpu_memory_gb
    cdef public double[::1] batch_size, kv_budget, replicas, replicas_before, reward
    cdef public double[::1] memory_loss, action_variance
    cdef public double[::1] batch_before, batch_mean, batch_squares, kv_before, kv_mean, kv_squares

    @cython.locals(b=Py_ssize_t)
    cpdef void compute(self, Py_ssize_t lo, Py_ssize_t hi)
    @cython.locals(p=Py_ssize_t, grade=double)
    cpdef double grade_so_far(self, Py_ssize_t b)
    @cython.locals(k=Py_ssize_t, part=double, over=double)
    cdef double _part_so_far(self, Py_ssize_t p, Py_ssize_t b) noexcept nogil
    @cython.locals(p=Py_ssize_t, n_parts=Py_ssize_t, played=double, grade=double, part=double)
    cdef void _pay_score(self, Py_ssize_t b, bint first) noexcept nogil
    @cython.locals(p=Py_ssize_t, k=Py_ssize_t, first=bint, loss_before=double, variance_before=double, beyond=double, growth=double,
        variance_growth=double, violations=double, gpu_cost=double, before=double, changes=double, total=double,
        share=double)
    cdef void _compute_row(self, Py_ssize_t b) noexcept nogil
    @cython.locals(n=double, change=double, off=double, spread=double)
    cdef void _add_change(self, Py_ssize_t b, bint first) noexcept nogil
