# C types of kernel.py; arrays are documented in serving.py.
cimport cython
from libc.math cimport erfc, exp, log, sqrt

cdef int SWEEPS
cdef double SLOT_DEVIATION, TRANSIENT, CHURNED_OUTPUT, DUST

@cython.final
cdef class ServingKernel:
    # sizes and constants of the fleet
    cdef public int n_classes, grid_cells, n_batch_points, n_iteration_points, n_context_points, max_segments, record_rows
    cdef public int class_window_steps, prompt_window_steps, reuse_points
    cdef public double n_replicas, dt_s, dt_ms, queue_limit, closed_clients, price
    cdef public double memory_gb, memory_limit_gb, activation_gb, workspace_gb, sequence_gb, draft_gb, kv_bytes_per_token
    cdef public double disagg_limit, churn_factor, load_weight, recompute_factor, kv_fill, block_slack
    cdef public double tau_ms, handoff_ms_per_token, chunk_tokens, jitter, ema_weight, eviction_rate
    cdef public double grid_inv, reuse_log2_first
    # tables
    cdef public double[::1] weights_gb, reload_s, spec_tokens, spec_length, batch_points, iteration_points, context_points
    cdef public double[::1] slo_ms, mean_prompt, work_cv2, accept_scale, output_gini, reuse_hit
    cdef public double[:, :, ::1] marginal_ratio, saturated_ratio
    cdef public double[:, ::1] length_int
    cdef public double[::1] longest_output
    cdef public double[:, ::1] alone_ratio, apart_ratio, mean_work_ms
    cdef public double[:, :, :, ::1] decode_ms
    # offered load
    cdef public double[:, :, ::1] arrivals, prompt_tokens, noise
    cdef public double[:, :, :, ::1] prefill_work_ms, saved_work_ms
    # action
    cdef public double[::1] kv_budget, batch_size
    cdef public long long[::1] spec, disagg, tier
    # state
    cdef public long long[::1] time, load_index, tier_to, tier_from, disagg_to, disagg_from, n_segments, n_recorded
    cdef public long long[::1] iteration_cell, context_cell, batch_cell
    cdef public long long[:, ::1] wait_head, age_head
    cdef public double[::1] converted, share_to, restarted, up, last_gain, next_gain, overcommit, recompute_ms
    cdef public double[::1] prompt_window_requests, prompt_window_tokens, rate_ema, cost_so_far, cached_tokens
    cdef public double[:, ::1] queue, queue_before, in_flight, prompt_in_flight, position_in_flight, class_window, progress
    cdef public double[:, ::1] written_tokens
    cdef public double[:, :, ::1] waiting, density, segments, record
    # scratch of one step
    cdef public double[:, ::1] work_ratio, class_load, each_ms, shift_ms, rest_ms, spread
    cdef public double[::1] prefill_load, iteration_ms, resident, kv_context, prefill_apart, prefill_cap, kv_pressure, kv_bound, prefilling
    cdef public double[::1] kv_pool_tokens, late_requests, judged_requests, prefix_hit
    cdef public double[:, ::1] admit, room, after, after_pos, after_prompt
    cdef public double[:, :, ::1] survive
    cdef public double[:, ::1] edge_part
    cdef public int[:, ::1] edge_at
    cdef public double[:, ::1] head_prompt, head_work_ms, churned_prompts, base_ms, base_p99_ms
    # metrics
    cdef public double[::1] ttft_p50_ms, ttft_p99_ms, tpot_ms, tokens_per_sec, gpu_memory_gb, cost_per_1k, spec_accept_rate
    cdef public double[::1] eviction_events, slo_violations, oom, violation_share, queue_requests, running_requests
    cdef public double[::1] kv_occupancy, admitted, completed, rejected

    @cython.locals(b=Py_ssize_t)
    cpdef void step(self, Py_ssize_t lo, Py_ssize_t hi)
    @cython.locals(t=Py_ssize_t, w=Py_ssize_t, gain=double)
    cdef void _step_row(self, Py_ssize_t b) noexcept nogil
    @cython.locals(disagg=Py_ssize_t, tier=Py_ssize_t, done=double, fleet_s=double, part=double)
    cdef void _roll_out(self, Py_ssize_t b, Py_ssize_t t) noexcept nogil
    @cython.locals(c=Py_ssize_t, a=double, tokens=double, total=double)
    cdef void _receive(self, Py_ssize_t b, Py_ssize_t t, Py_ssize_t w) noexcept nogil
    @cython.locals(draft_gb=double, pool=double, pool_gb=double, share=double, used=double, weights=double)
    cdef void _configure(self, Py_ssize_t b) noexcept nogil
    @cython.locals(c=Py_ssize_t, j=Py_ssize_t, each=double, hit=double, left=double, limit=double, part=double, share=double, taken=double, tokens=double, work=double, x=double)
    cdef void _head_of_line(self, Py_ssize_t b, Py_ssize_t t, Py_ssize_t w) noexcept nogil
    @cython.locals(i=Py_ssize_t, x=double)
    cdef double _prefix_hit(self, double cached) noexcept nogil
    @cython.locals(c=Py_ssize_t, first=Py_ssize_t, i=int, s=Py_ssize_t, p=double, per_token=double, x=double)
    cdef void _locate_edges(self, Py_ssize_t b, Py_ssize_t t, double gain) noexcept nogil
    @cython.locals(at=Py_ssize_t, c=Py_ssize_t, s=Py_ssize_t, count=double, d=double, older=double, older_pos=double, position=double, u=double, younger=double, younger_pos=double)
    cdef void _survivors(self, Py_ssize_t b, Py_ssize_t t, double gain) noexcept nogil
    @cython.locals(at=Py_ssize_t, c=Py_ssize_t, i=Py_ssize_t, apart=double, limit=double, churn=double, fit=double, admit=double, budget_ms=double, each_kv=double, each_ms=double, held=double, keep=double, kv_tokens=double, mean_tokens=double, p=double, pool=double, recompute_ms=double, room=double, running=double, slots=double, stay=double, stay_pos=double, thrash=double, u=double, up=double, work_ms=double)
    cdef void _solve(self, Py_ssize_t b, Py_ssize_t t, double gain) noexcept nogil
    @cython.locals(c=Py_ssize_t, spec=Py_ssize_t, context=double, fit=double, gain=double, chunk=double, full=double, rows=double, iteration=double, at_least_one=double, load=double, n=double, over=double, per_verify=double, resident=double, share=double, stolen=double, tpot=double)
    cdef void _advance(self, Py_ssize_t b, double up, double held, double tokens, double work_ms) noexcept nogil
    @cython.locals(c=Py_ssize_t, count=double, work=double, tokens=double)
    cdef double _token_ms(self, Py_ssize_t b) noexcept nogil
    @cython.locals(c=Py_ssize_t, spec=Py_ssize_t, count=double, rate=double, total=double)
    cdef double _tokens_per_verify(self, Py_ssize_t b) noexcept nogil
    @cython.locals(i=Py_ssize_t, j=Py_ssize_t, u=double, v=double)
    cdef double _decode_ms(self, Py_ssize_t b, Py_ssize_t tier, Py_ssize_t spec, double n, double context) noexcept nogil
    @cython.locals(i=Py_ssize_t, u=double, lone=double, full=double)
    cdef double _work_ratio(self, Py_ssize_t b, Py_ssize_t c, Py_ssize_t tier, double n, double load) noexcept nogil
    @cython.locals(c=Py_ssize_t, s=Py_ssize_t, load=double, output=double, lost_tokens=double, churned=double, done=double, ended=double, held=double, kv=double, lost=double, pool=double, scale=double, total=double, written=double, wrote=double, x=double)
    cdef void _commit(self, Py_ssize_t b, Py_ssize_t t, Py_ssize_t w, double gain) noexcept nogil
    @cython.locals(at=Py_ssize_t, s=Py_ssize_t, before=double, bend=double, d=double, half_cell=double, part=double, total=double, u=double, wrote=double)
    cdef double _wrote(self, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c, double x) noexcept nogil
    @cython.locals(c=Py_ssize_t, judged=double, late=double, prefilling=double, stale=double)
    cdef void _measure_latency(self, Py_ssize_t b, Py_ssize_t t, Py_ssize_t w) noexcept nogil
    @cython.locals(c=Py_ssize_t, tier=Py_ssize_t, alone=double, apart=double, admitted=double, ahead=double, away=double, deviation=double, excess=double, full=double, margin=double, most=double, most_admitted=double, pooled=double, replicas=double, brief_work=double, running=double, slot_wait=double, backlog=double, before=double, busy=double, cap=double, chunks=double, crowd=double, cycle=double, decodes=double, each=double, fill=double, here=double, iteration=double, load=double, lengthy=double, mean=double, own=double, packed=double, prompt=double, queueing=double, residual=double, seen=double, share=double, shift=double, brief=double, spread2=double, transient=double, up=double, upto=double, variance=double, whole=double, work=double)
    cdef void _after_admission(self, Py_ssize_t b) noexcept nogil
    @cython.locals(j=Py_ssize_t, admit=double, first=double, have=double, hi=double, last=double, late=double, left=double, lo=double, room=double, taken=double, whole=double, x=double)
    cdef double _segments(self, Py_ssize_t b, Py_ssize_t t, Py_ssize_t w, Py_ssize_t c) noexcept nogil
    @cython.locals(k=Py_ssize_t, r=Py_ssize_t)
    cdef void _keep_segment(self, Py_ssize_t b, Py_ssize_t c, double weight, double lo, double hi) noexcept nogil
    @cython.locals(left=double, rest=double, slo=double, spread=double)
    cdef double _share_late(self, Py_ssize_t b, Py_ssize_t c, double lo, double hi) noexcept nogil
    @cython.locals(j=Py_ssize_t, fresh=double, slo=double, span=double)
    cdef double _stale(self, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c) noexcept nogil
    @cython.locals(end=Py_ssize_t, k=Py_ssize_t, n=Py_ssize_t, base=double, below=double, goal=double, half=double, high=double, lo=double, low=double, rise=double, total=double, under=double, wait=double, x=double)
    cdef double _quantile(self, Py_ssize_t b, double q, Py_ssize_t tail) noexcept nogil
    @cython.locals(k=Py_ssize_t, base=double, below=double, hi=double, lo=double, wait=double)
    cdef double _weight_below(self, Py_ssize_t b, double x, Py_ssize_t tail) noexcept nogil
    @cython.locals(c=Py_ssize_t, j=Py_ssize_t, age=double, base=double, high=double)
    cdef void _idle_latency(self, Py_ssize_t b, Py_ssize_t t) noexcept nogil
    @cython.locals(c=Py_ssize_t, j=Py_ssize_t, drop=double, over=double, total=double, x=double)
    cdef void _shed(self, Py_ssize_t b, Py_ssize_t t) noexcept nogil
    @cython.locals(c=Py_ssize_t, spec=Py_ssize_t, cost=double, gpus=double, judged=double, late=double, queue=double, share=double)
    cdef void _report(self, Py_ssize_t b, Py_ssize_t t, Py_ssize_t w, double gain) noexcept nogil

cdef double beyond(double median_ms, double spread, double limit_ms) noexcept nogil
