# C types of reward.py.
cimport cython
from libc.math cimport log1p

cdef double TTFT_CEILING_MS

@cython.final
cdef class RewardKernel:
    cdef public double alpha, beta, gamma, delta, max_throughput_tps, slo_ms, budget_per_step, latency_scale
    cdef public double memory_limit_gb, memory_slope_gb
    cdef public double[::1] tokens_per_sec, ttft_p50_ms, violation_share, cost_per_1k, gpu_memory_gb, reward
    cdef public double[:, ::1] terms

    @cython.locals(b=Py_ssize_t, throughput=double, latency=double, beyond=double, violations=double, cost=double)
    cpdef void compute(self, Py_ssize_t lo, Py_ssize_t hi)
