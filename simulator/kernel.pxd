# C types of kernel.py. What the arrays mean, with shapes and units: arrays.py; the constants: serving.py.
cimport cython
from libc.math cimport erfc, exp, log, sqrt

cdef int MAX_SWEEPS
cdef double GAIN_RESIDUAL, MIN_FALL, FIRST_GUESS_TOKENS_PER_MS, MIN_GAIN_TOKENS, EPS_REQUESTS, EPS_FLOW, EPS, EPS_WEIGHT, MIN_REPLICAS_UP
cdef double EPS_SHARE, MIN_DRAINING, STEP_SMOOTHING
cdef double MAX_PREFILLING_SHARE, MIN_PREFILL_SHARE, MAX_CHURN_PROMPTS, CHURNED_OUTPUT_TOKENS, NO_SLO_MS
cdef double MAX_UTILISATION, SLOT_DEVIATION, STEP_GROWTH, MIN_WAIT_PROBABILITY, MIN_NO_SLOT_PROBABILITY
cdef double MAX_SLOT_WAIT_STEPS, MIN_KV_OCCUPANCY, MIN_BACKLOG, SAME_WAIT
cdef double LN_2, SQRT_2, SQRT_HALF, NORMAL_PEAK, NORMAL_P99

cdef class Views:
    pass

@cython.final
cdef class Params(Views):
    # sizes
    cdef public int n_classes, grid_cells, n_batch_points, n_iteration_points, n_context_points, reuse_points
    cdef public int scales, max_pieces, record_rows, class_window_steps, prompt_window_steps
    # scheduler
    cdef public bint prefill_first, occupancy_in_blocks
    # fleet
    cdef public double dt_s, dt_ms, queue_limit, closed_clients, price, ema_weight
    cdef public double[::1] slo_ms, reload_s, start_s
    # memory of a replica
    cdef public double memory_gb, memory_limit_gb, activation_gb, workspace_gb, sequence_gb, draft_gb
    cdef public double kv_bytes_per_token
    cdef public double[::1] weights_gb
    # engine
    cdef public double disagg_limit, churn_factor, load_weight
    cdef public double handoff_ms_per_token, jitter, ttft_offset_ms, token_budget, output_delay
    # conventions of the metrics
    cdef public double oom_slowdown, oom_penalty, max_tpot_steps, min_billed_ktokens_per_s
    # decode iterations and speculation
    cdef public double[:, :, :, ::1] decode_ms
    cdef public double[::1] iteration_points, context_points, spec_tokens, spec_length, accept_scale
    cdef public double[::1] block_slack_tokens, block_growth
    # prompts and their prefill
    cdef public double[::1] batch_points, mean_prompt_tokens, work_cv2
    cdef public double[:, ::1] mean_work_ms, alone_ratio, dedicated_ratio
    cdef public double[:, :, ::1] fused_ratio, saturated_ratio
    # output lengths and prefix reuse
    cdef public double cells_per_token, reuse_log2_first
    cdef public double[:, ::1] length_integrals
    cdef public double[::1] longest_output, output_gini, reuse_hit

@cython.final
cdef class Load(Views):
    cdef public long long[::1] index
    cdef public double[:, :, ::1] arrivals, prompt_tokens, noise
    cdef public double[:, :, :, ::1] prefill_work_ms, saved_work_ms

@cython.final
cdef class Knobs(Views):
    cdef public double[::1] kv_budget, batch_size, replicas
    cdef public long long[::1] spec, disagg, tier

@cython.final
cdef class State(Views):
    cdef public long long[::1] time, tier_new, tier_old, disagg_new, disagg_old, n_recorded
    cdef public long long[::1] iteration_cell, context_cell, batch_cell
    cdef public double[::1] rollout_share, gain_tokens, prefill_share, prefilling
    cdef public double[::1] prompt_window_requests, prompt_window_tokens, rate_ema, cost_so_far, cached_tokens
    cdef public double[:, ::1] queue, in_flight, prompts_in_flight, positions_in_flight, written_tokens
    cdef public double[:, ::1] class_window, prefill_load, progress
    cdef public double[:, ::1] preempted, preempted_prompts, preempted_positions
    cdef public long long[:, ::1] first_waiting, first_running
    cdef public double[:, :, ::1] waiting, density
    cdef public double[::1] replicas_up, resident, context_tokens
    cdef public long long[::1] first_loading
    cdef public double[::1] replicas_ready, replicas_draining, draining_requests
    cdef public double[:, ::1] loading
    cdef public double[:, :, ::1] record

@cython.final
cdef class Scratch(Views):
    # the fleet in this step
    cdef public double joining, staying_share, paid_replicas
    cdef public double new_share, restarted_share, up, disagg_share, kv_pool_tokens, prefix_hit
    # preemption
    cdef public double preempted, cohort_requests, cohort_positions, cohort_written
    # heads of the queues
    cdef public double[::1] head_prompt_tokens, head_work_ms, churn_prompts
    # prefill beside the batch with which the step begins
    cdef public double full_ms, prefill_cap, prefill_limit, prompts_ms, prompts_work_share
    cdef public double[::1] prefill_ratio
    # fixed point: survivors of what ran before the step
    cdef public int[::1] edge_at
    cdef public double[::1] edge_part
    cdef public double[:, ::1] survivors
    # fixed point: admissions and the mean batch
    cdef public double[::1] prompt_ms, admitted, admissible, end_requests, end_prompts, end_positions
    cdef public double[::1] resumed, kv_bound
    cdef public double prefill_ms, iteration_ms
    # prefill queue of a replica
    cdef public double p_busy, decode_share_ms, cycle_ms, packed_ms, load, utilisation, residual_ms, residual_chunk_ms
    cdef public double pooling, growth_ms, p_no_slot, slot_wait_ms
    # time from admission to first token
    cdef public double[::1] fixed_ms, median_ms, sigma, first_token_p50_ms, first_token_p99_ms
    # TTFT of the step's admissions
    cdef public int n_pieces
    cdef public double[::1] piece_requests
    cdef public double[:, ::1] piece_wait_ms, piece_after_ms
    cdef public double missed_requests, judged_requests

@cython.final
cdef class Metrics(Views):
    cdef public double[::1] ttft_p50_ms, ttft_p99_ms, tpot_ms, tokens_per_sec, gpu_memory_gb, cost_per_1k
    cdef public double[::1] spec_accept_rate, eviction_events, slo_violations, oom, violation_share, queue_requests
    cdef public double[::1] running_requests, kv_occupancy, admitted, completed, rejected

@cython.final
cdef class ServingKernel:
    cdef public Params params
    cdef public Load load
    cdef public Knobs knobs
    cdef public State state
    cdef public Metrics metrics
    cdef public object new_scratch
    cdef public list idle

    @cython.locals(b=Py_ssize_t, x=Scratch)
    cpdef void step(self, Py_ssize_t lo, Py_ssize_t hi)
    cdef Scratch _take_scratch(self)

@cython.locals(t=Py_ssize_t, gain=double)
cdef void step_row(Params p, Load load, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b) noexcept nogil
@cython.locals(k=Py_ssize_t, asked=double, loading=double, more=double, start_s=double)
cdef void scale(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil
@cython.locals(k=Py_ssize_t, left=double, loading=double, n=double)
cdef double come_up(Params p, State s, Py_ssize_t b, Py_ssize_t t, double start_s) noexcept nogil
@cython.locals(c=Py_ssize_t, k=Py_ssize_t, cancelled=double, in_flight=double, outdated=double, ready=double,
    staying=double)
cdef void remove_replicas(Params p, State s, Py_ssize_t b, Py_ssize_t t, double n) noexcept nogil
@cython.locals(n=double)
cdef double still_draining(State s, Py_ssize_t b) noexcept nogil
@cython.locals(c=Py_ssize_t, in_flight=double, serving=double)
cdef double drain(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil
@cython.locals(disagg=Py_ssize_t, tier=Py_ssize_t, fleet_s=double, part=double, ready=double)
cdef void roll_out(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil
@cython.locals(done=double)
cdef void start_rollout(State s, Py_ssize_t b, Py_ssize_t tier, Py_ssize_t disagg) noexcept nogil
@cython.locals(c=Py_ssize_t, w=Py_ssize_t, arrived=double, requests=double, tokens=double)
cdef void receive_arrivals(Params p, Load load, State s, Py_ssize_t b, Py_ssize_t t) noexcept nogil
@cython.locals(draft_gb=double, new=double, pool_gb=double, pool_tokens=double, used_gb=double, weights_gb=double)
cdef void allocate_memory(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b) noexcept nogil
@cython.locals(i=Py_ssize_t, y=double)
cdef double prefix_hit_share(Params p, double cached_tokens) noexcept nogil
@cython.locals(c=Py_ssize_t, k=Py_ssize_t, excess=double, prompt_tokens=double, ready=double, requests=double,
    share=double, tokens=double)
cdef void preempt(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil
@cython.locals(c=Py_ssize_t, k=Py_ssize_t, stay=double)
cdef void interrupt(Params p, State s, Scratch x, Py_ssize_t b, double share) noexcept nogil
@cython.locals(at=Py_ssize_t, u=double)
cdef void measure_cohort(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, Py_ssize_t k, Py_ssize_t end,
    double progress) noexcept nogil
@cython.locals(density=double, prompts=double, requests=double)
cdef void take_out(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, Py_ssize_t k, double share) noexcept nogil
@cython.locals(k=Py_ssize_t, density=double, n=double, position=double, progress=double, share=double)
cdef void put_back(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, Py_ssize_t t) noexcept nogil
@cython.locals(c=Py_ssize_t, w=Py_ssize_t, arrived_ms=double, backlog=double, batch=double, context=double,
    crowding=double, decoding=double, fused=double, in_flight=double, iteration_ms=double, kv_tokens=double, share=double)
cdef void limit_prefill(Params p, Load load, Knobs knobs, State s, Scratch x, Py_ssize_t b,
    Py_ssize_t t) noexcept nogil
@cython.locals(c=Py_ssize_t, came=double, fixed_ms=double, full=double, n=double, requests=double, tokens=double,
    weight=double, work_ms=double)
cdef double share_of_iteration(Params p, State s, Scratch x, Py_ssize_t b, double share,
    double decode_ms) noexcept nogil
@cython.locals(c=Py_ssize_t, j=Py_ssize_t, w=Py_ssize_t, left=double, mean_output=double, n=double, part=double,
    slots=double, taken=double, tokens=double, work_ms=double)
cdef void measure_queue_heads(Params p, Load load, Knobs knobs, State s, Scratch x, Py_ssize_t b,
    Py_ssize_t t) noexcept nogil
@cython.locals(j=Py_ssize_t)
cdef Py_ssize_t oldest_waiting(State s, Py_ssize_t b, Py_ssize_t c, Py_ssize_t t) noexcept nogil
@cython.locals(w=Py_ssize_t, arrived_ms=double, hit=double, new=double)
cdef double add_listed_work(Params p, Load load, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, Py_ssize_t j,
    double part, double work_ms) noexcept nogil
@cython.locals(at=double, excess=double, fall=double, gain=double, last_excess=double, step=double, sweeps=int)
cdef double solve(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b, Py_ssize_t t) noexcept nogil
@cython.locals(in_flight=double, kv_tokens=double)
cdef double next_gain(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b, Py_ssize_t t,
    double gain) noexcept nogil
@cython.locals(c=Py_ssize_t, first=Py_ssize_t, i=int, k=Py_ssize_t, cells=double, cells_per_token=double, end=double)
cdef void locate_edges(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, double gain) noexcept nogil
@cython.locals(c=Py_ssize_t)
cdef void find_survivors(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, double gain) noexcept nogil
@cython.locals(at=Py_ssize_t, k=Py_ssize_t, density=double, older=double, older_pos=double, positions=double,
    requests=double, u=double, younger=double, younger_pos=double)
cdef void find_class_survivors(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c) noexcept nogil
@cython.locals(at=Py_ssize_t, blocked=bint, c=Py_ssize_t, i=Py_ssize_t, budget_ms=double, cells=double,
    draining_share=double, each_kv=double, elsewhere=double, elsewhere_tokens=double,
    each_ms=double, in_flight=double, keep=double, kv_pool=double, kv_tokens=double, mean_tokens=double, n=double,
    prefill_ms=double, room=double, running=double, slack_tokens=double, slots=double, stay=double, stay_pos=double,
    tokens=double, u=double)
cdef (double, double) admit(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b, double gain) noexcept nogil
@cython.locals(slots=double)
cdef double open_slots(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b) noexcept nogil
@cython.locals(more=double)
cdef double room_in_cache(State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double room, double fit) noexcept nogil
@cython.locals(prompt_ms=double)
cdef double admission_ms(Params p, Scratch x, Py_ssize_t c) noexcept nogil
@cython.locals(batch=double, context=double, iteration_ms=double, resident=double, stolen_share=double, tpot=double)
cdef double tokens_gained(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b, double in_flight,
    double kv_tokens) noexcept nogil
@cython.locals(c=Py_ssize_t, requests=double, tokens=double, weight=double)
cdef double mean_block_slack(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil
@cython.locals(decode_tokens=double)
cdef double prompt_tokens_per_iteration(Params p, Knobs knobs, Py_ssize_t b, double resident) noexcept nogil
@cython.locals(c=Py_ssize_t, tokens=double, weight=double, work_ms=double)
cdef double prefill_ms_per_token(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil
@cython.locals(c=Py_ssize_t, spec=Py_ssize_t, rate=double, requests=double, weight=double)
cdef double tokens_per_verify(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b) noexcept nogil
@cython.locals(iteration_ms=double, new=double, old_ms=double)
cdef double decode_iteration_ms(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b, double requests,
    double context) noexcept nogil
@cython.locals(i=Py_ssize_t, j=Py_ssize_t, u=double, v=double)
cdef double decode_ms(Params p, State s, Py_ssize_t b, Py_ssize_t tier, Py_ssize_t spec, double requests,
    double context) noexcept nogil
@cython.locals(i=Py_ssize_t, full=double, lone=double, u=double)
cdef double prefill_ratio(Params p, State s, Py_ssize_t b, Py_ssize_t c, Py_ssize_t tier, double requests,
    double prefill_share) noexcept nogil
@cython.locals(c=Py_ssize_t, admitted=double, completed=double, n=double, prefill_share=double, progress=double,
    running=double, written=double)
cdef void commit(Params p, State s, Scratch x, Metrics m, Py_ssize_t b, Py_ssize_t t, double gain) noexcept nogil
@cython.locals(c=Py_ssize_t, in_flight=double, survivors=double)
cdef void keep_draining(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil
@cython.locals(k=Py_ssize_t, before=double, density=double, total=double, written=double)
cdef double write_tokens(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c,
    double progress) noexcept nogil
@cython.locals(at=Py_ssize_t, bend=double, part=double, u=double)
cdef double written_up_to(Params p, Scratch x, Py_ssize_t c, Py_ssize_t k, double y) noexcept nogil
@cython.locals(k=Py_ssize_t, ended=double, mean_output=double)
cdef void retire_cohorts(Params p, State s, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c, double progress) noexcept nogil
@cython.locals(c=Py_ssize_t, again=double, cached=double, churned=double, kv_tokens=double, mean_output=double,
    pool=double)
cdef void measure_cache(Params p, State s, Scratch x, Metrics m, Py_ssize_t b, double written) noexcept nogil
@cython.locals(c=Py_ssize_t, judged=double, missed=double, overdue=double, prefilling=double)
cdef void measure_ttft(Params p, Load load, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b,
    Py_ssize_t t) noexcept nogil
@cython.locals(c=Py_ssize_t, ahead=double, backlog=double, chunks=double, seen=double, service=double, up_to=double)
cdef void estimate_ttft(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b) noexcept nogil
@cython.locals(c=Py_ssize_t, chunks=double, class_residual_ms=double, load=double, long_utilisation=double,
    replicas=double, residual_chunk_ms=double, residual_ms=double, service_ms=double, share=double, utilisation=double)
cdef void find_prefill_queue(Params p, State s, Scratch x, Py_ssize_t b, double backlog) noexcept nogil
@cython.locals(c=Py_ssize_t, admitted=double, deviation=double, excess=double, margin=double, most=double,
    running=double, variance=double, z=double)
cdef void find_slot_wait(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b,
    double backlog) noexcept nogil
@cython.locals(beyond=double, residual=double, short=double)
cdef double queueing_ms(Scratch x, double chunks, double ahead, double up_to) noexcept nogil
@cython.locals(disagg=double, fixed=double, iterations=double, mean=double, load=double, next_ms=double,
    residual=double, residual_variance=double, service=double, service_cv2=double, short=double, sigma2=double, slot_wait=double, variance=double)
cdef void estimate_class_ttft(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double chunks,
    double queueing, double backlog) noexcept nogil
@cython.locals(tier=Py_ssize_t)
cdef double fixed_prefill_ms(Params p, State s, Py_ssize_t b, Py_ssize_t c) noexcept nogil
@cython.locals(colocated=double, decode_share=double, half=double, load=double, mean=double, others=double,
    square=double, variance=double)
cdef (double, double) wait_for_own_iteration(Params p, Scratch x, Py_ssize_t c, double service,
    double backlog) noexcept nogil
@cython.locals(alone=double, busy=double, disagg=double, full=double, fused=double)
cdef double service_ms(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double iterations) noexcept nogil
@cython.locals(j=Py_ssize_t, w=Py_ssize_t, admitted=double, arrived=double, first=double, first_came=double,
    have=double, last=double, last_came=double, left=double, missed=double, n=double, room=double, taken=double)
cdef double take_from_queue(Params p, Load load, State s, Scratch x, Py_ssize_t b, Py_ssize_t t,
    Py_ssize_t c) noexcept nogil
@cython.locals(k=Py_ssize_t)
cdef void keep_piece(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double n, double shortest,
    double longest) noexcept nogil
@cython.locals(r=Py_ssize_t)
cdef void record_admissions(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double n, double shortest,
    double longest) noexcept nogil
@cython.locals(left=double, median=double, sigma=double, slo=double)
cdef double slo_miss_share(Params p, Scratch x, Py_ssize_t c, double shortest, double longest) noexcept nogil
@cython.locals(j=Py_ssize_t, in_time=double, slo=double, steps_left=double)
cdef double overdue_in_queue(Params p, State s, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c) noexcept nogil
@cython.locals(end=Py_ssize_t, k=Py_ssize_t, n=Py_ssize_t, after=double, below=double, goal=double, half=double,
    high=double, low=double, rise=double, shortest=double, total=double, under=double, wait=double, y=double)
cdef double ttft_quantile(Scratch x, double q, Py_ssize_t tail) noexcept nogil
@cython.locals(k=Py_ssize_t, after=double, below=double, longest=double, shortest=double, wait=double)
cdef double weight_below(Scratch x, double y, Py_ssize_t tail) noexcept nogil
@cython.locals(c=Py_ssize_t, j=Py_ssize_t, after_p50=double, after_p99=double, age=double)
cdef void report_head_of_line(Params p, State s, Scratch x, Metrics m, Py_ssize_t b, Py_ssize_t t) noexcept nogil
@cython.locals(c=Py_ssize_t, j=Py_ssize_t, drop=double, n=double, over=double)
cdef void reject_overflow(Params p, State s, Metrics m, Py_ssize_t b, Py_ssize_t t) noexcept nogil
@cython.locals(c=Py_ssize_t, total=double)
cdef double queued_requests(Params p, State s, Py_ssize_t b) noexcept nogil
@cython.locals(spec=Py_ssize_t, w=Py_ssize_t, batch=double, cost=double, gpus=double, judged=double, missed=double,
    share=double)
cdef void report(Params p, Load load, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b, Py_ssize_t t,
    double gain) noexcept nogil
cdef double normal_tail(double z) noexcept nogil
cdef double lognormal_tail(double median_ms, double sigma, double limit_ms) noexcept nogil
