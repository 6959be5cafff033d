# Written by `python -m scripts.kernel_types` from arrays.py and the functions beside it: change those.
cimport cython
from libc.math cimport erfc, exp, log, sqrt

cdef double EPS_REQUESTS
cdef double EPS_FLOW
cdef double EPS
cdef double SQRT_HALF
cdef double SQRT_2
cdef double LN_2
cdef double EPS_WEIGHT
cdef double MIN_PREFILL_SHARE
cdef double MAX_CHURN_PROMPTS
cdef double CHURNED_OUTPUT_TOKENS
cdef double MIN_DRAINING
cdef double EPS_SHARE
cdef double MIN_REPLICAS_UP
cdef double MAX_PREFILLING_SHARE
cdef double GAIN_RESIDUAL
cdef int MAX_SWEEPS
cdef double MIN_FALL
cdef double FIRST_GUESS_TOKENS_PER_MS
cdef double MIN_GAIN_TOKENS
cdef double MIN_BACKLOG
cdef double MAX_UTILISATION
cdef double SLOT_DEVIATION
cdef double STEP_GROWTH
cdef double MIN_WAIT_PROBABILITY
cdef double MIN_NO_SLOT_PROBABILITY
cdef double MAX_SLOT_WAIT_STEPS
cdef double MIN_KV_OCCUPANCY
cdef double NORMAL_PEAK
cdef double NORMAL_P99
cdef double NO_SLO_MS
cdef double STEP_SMOOTHING
cdef double SAME_WAIT

cdef double normal_tail(double z) noexcept nogil

cdef double lognormal_tail(double median_ms, double sigma, double limit_ms) noexcept nogil

cdef class Views:
    pass

@cython.final
cdef class Params(Views):
    cdef public int n_classes
    cdef public int grid_cells
    cdef public int n_iteration_points
    cdef public int n_batch_points
    cdef public int n_context_points
    cdef public int reuse_points
    cdef public int acceptance_stages
    cdef public int max_pieces
    cdef public int record_rows
    cdef public int class_window_steps
    cdef public int prompt_window_steps
    cdef public int scales
    cdef public double dt_s
    cdef public double dt_ms
    cdef public double queue_limit
    cdef public double closed_clients
    cdef public double price
    cdef public double ema_weight
    cdef public double[::1] slo_ms
    cdef public double[::1] reload_s
    cdef public double[::1] start_s
    cdef public double memory_gb
    cdef public double memory_limit_gb
    cdef public double activation_gb
    cdef public double workspace_gb
    cdef public double sequence_gb
    cdef public double draft_gb
    cdef public double[::1] weights_gb
    cdef public double kv_bytes_per_token
    cdef public double[::1] block_slack_tokens
    cdef public double[::1] block_growth
    cdef public bint occupancy_in_blocks
    cdef public bint prefill_first
    cdef public double token_budget
    cdef public double disagg_limit
    cdef public double churn_factor
    cdef public double load_weight
    cdef public double handoff_ms_per_token
    cdef public double jitter
    cdef public double ttft_offset_ms
    cdef public double output_delay
    cdef public double oom_slowdown
    cdef public double oom_penalty
    cdef public double max_tpot_steps
    cdef public double min_billed_ktokens_per_s
    cdef public double[:, :, :, ::1] decode_ms
    cdef public double[::1] iteration_points
    cdef public double[::1] context_points
    cdef public double[::1] spec_tokens
    cdef public double[::1] spec_length
    cdef public double[::1] accept_scale
    cdef public long long[::1] acceptance_from
    cdef public double[:, ::1] acceptance
    cdef public double[::1] mean_prompt_tokens
    cdef public double[:, ::1] mean_work_ms
    cdef public double[::1] work_cv2
    cdef public double[::1] batch_points
    cdef public double[:, ::1] alone_ratio
    cdef public double[:, ::1] dedicated_ratio
    cdef public double[:, :, ::1] fused_ratio
    cdef public double[:, :, ::1] saturated_ratio
    cdef public double cells_per_token
    cdef public double[:, ::1] length_integrals
    cdef public double[::1] longest_output
    cdef public double[::1] output_gini
    cdef public double reuse_log2_first
    cdef public double[::1] reuse_hit

@cython.final
cdef class Load(Views):
    cdef public long long[::1] index
    cdef public double[:, :, ::1] arrivals
    cdef public double[:, :, ::1] prompt_tokens
    cdef public double[:, :, :, ::1] prefill_work_ms
    cdef public double[:, :, :, ::1] saved_work_ms
    cdef public double[:, :, ::1] noise

@cython.final
cdef class Knobs(Views):
    cdef public double[::1] kv_budget
    cdef public double[::1] batch_size
    cdef public long long[::1] spec
    cdef public long long[::1] disagg
    cdef public long long[::1] tier
    cdef public double[::1] replicas

@cython.final
cdef class State(Views):
    cdef public long long[::1] time
    cdef public double[::1] replicas_ready
    cdef public double[:, ::1] loading
    cdef public long long[::1] first_loading
    cdef public double[::1] replicas_draining
    cdef public double[::1] draining_requests
    cdef public long long[::1] tier_new
    cdef public long long[::1] tier_old
    cdef public long long[::1] disagg_new
    cdef public long long[::1] disagg_old
    cdef public double[::1] rollout_share
    cdef public double[:, ::1] queue
    cdef public double[:, :, ::1] waiting
    cdef public long long[:, ::1] first_waiting
    cdef public double[:, ::1] in_flight
    cdef public double[:, ::1] prompts_in_flight
    cdef public double[:, ::1] positions_in_flight
    cdef public double[:, ::1] preempted
    cdef public double[:, ::1] preempted_prompts
    cdef public double[:, ::1] preempted_positions
    cdef public double[::1] gain_tokens
    cdef public double[:, ::1] progress
    cdef public double[:, :, ::1] density
    cdef public long long[:, ::1] first_running
    cdef public double[:, ::1] written_tokens
    cdef public double[::1] prefill_share
    cdef public double[:, ::1] prefill_load
    cdef public double[::1] prefilling
    cdef public double[::1] cached_tokens
    cdef public long long[::1] iteration_cell
    cdef public long long[::1] context_cell
    cdef public double[::1] prompt_window_requests
    cdef public double[::1] prompt_window_tokens
    cdef public double[:, ::1] class_window
    cdef public double[::1] rate_ema
    cdef public double[::1] cost_so_far
    cdef public double[:, ::1] missed_so_far
    cdef public double[::1] replicas_up
    cdef public double[::1] resident
    cdef public double[::1] context_tokens
    cdef public long long[::1] n_recorded
    cdef public double[:, :, ::1] record

@cython.final
cdef class Metrics(Views):
    cdef public double[::1] ttft_p50_ms
    cdef public double[::1] ttft_p99_ms
    cdef public double[::1] tpot_ms
    cdef public double[::1] tokens_per_sec
    cdef public double[::1] gpu_memory_gb
    cdef public double[::1] cost_per_1k
    cdef public double[::1] spec_accept_rate
    cdef public double[::1] eviction_events
    cdef public double[::1] slo_violations
    cdef public double[::1] oom
    cdef public double[::1] violation_share
    cdef public double[::1] queue_requests
    cdef public double[::1] running_requests
    cdef public double[::1] kv_occupancy
    cdef public double[::1] admitted
    cdef public double[::1] completed
    cdef public double[::1] rejected

@cython.final
cdef class Fleet(Views):
    cdef public double up
    cdef public double new_share
    cdef public double restarted_share
    cdef public double disagg_share
    cdef public double staying_share
    cdef public double paid_replicas

@cython.final
cdef class Memory(Views):
    cdef public double kv_pool_tokens

@cython.final
cdef class Heads(Views):
    cdef public double[::1] prompt_tokens
    cdef public double[::1] work_ms

@cython.final
cdef class Prefill(Views):
    cdef public double full_ms
    cdef public double cap
    cdef public double limit
    cdef public double prompts_ms
    cdef public double prompts_work_share
    cdef public double[::1] ratio
    cdef public double[::1] prompt_ms
    cdef public double[::1] churn_prompts

@cython.final
cdef class Cohorts(Views):
    cdef public int[::1] edge_at
    cdef public double[::1] edge_part
    cdef public double[:, ::1] survivors

@cython.final
cdef class Room(Views):
    cdef public double running
    cdef public double kv_tokens
    cdef public double budget_ms
    cdef public double prefill_ms
    cdef public bint blocked

@cython.final
cdef class Batch(Views):
    cdef public double[::1] admitted
    cdef public double[::1] admissible
    cdef public double[::1] resumed
    cdef public double[::1] kv_bound
    cdef public double[::1] end_requests
    cdef public double[::1] end_prompts
    cdef public double[::1] end_positions

@cython.final
cdef class Pace(Views):
    cdef public double resident
    cdef public double context_tokens
    cdef public double iteration_ms
    cdef public double prefill_share

@cython.final
cdef class Prompts(Views):
    cdef public double p_busy
    cdef public double decode_share_ms
    cdef public double cycle_ms
    cdef public double packed_ms
    cdef public double load
    cdef public double utilisation
    cdef public double residual_ms
    cdef public double residual_chunk_ms
    cdef public double pooling
    cdef public double growth_ms
    cdef public double p_no_slot
    cdef public double slot_wait_ms

@cython.final
cdef class FirstToken(Views):
    cdef public double[::1] fixed_ms
    cdef public double[::1] median_ms
    cdef public double[::1] sigma
    cdef public double[::1] p50_ms
    cdef public double[::1] p99_ms

@cython.final
cdef class Pieces(Views):
    cdef public int n
    cdef public double[::1] requests
    cdef public double[:, ::1] wait_ms
    cdef public double[:, ::1] after_ms

@cython.final
cdef class Scratch:
    cdef public Fleet fleet
    cdef public Memory memory
    cdef public Heads heads
    cdef public Prefill prefill
    cdef public Cohorts cohorts
    cdef public Room room
    cdef public Batch batch
    cdef public Pace pace
    cdef public Prompts prompts
    cdef public FirstToken first_token
    cdef public Pieces pieces

@cython.locals(i=Py_ssize_t, iteration_ms=double, j=Py_ssize_t, new=double, old_ms=double)
cdef double decode_iteration_ms(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b, double requests,
    double context) noexcept nogil

@cython.locals(i=Py_ssize_t)
cdef Py_ssize_t cell(double[::1] points, Py_ssize_t n_points, double value, Py_ssize_t start) noexcept nogil

@cython.locals(u=double, v=double)
cdef double decode_ms(Params p, Py_ssize_t tier, Py_ssize_t spec, Py_ssize_t i, Py_ssize_t j, double requests,
    double context) noexcept nogil

@cython.locals(full=double, lone=double, u=double)
cdef double prefill_ratio(Params p, Py_ssize_t c, Py_ssize_t tier, Py_ssize_t i, double requests,
    double prefill_share) noexcept nogil

cdef void keep_cells(Params p, State s, Py_ssize_t b, double requests, double context) noexcept nogil

@cython.locals(decode_tokens=double)
cdef double prompt_tokens_per_iteration(Params p, Knobs knobs, Py_ssize_t b, double resident) noexcept nogil

@cython.locals(c=Py_ssize_t, tokens=double, weight=double, work_ms=double)
cdef double prefill_ms_per_token(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil

@cython.locals(tier=Py_ssize_t)
cdef double fixed_prefill_ms(Params p, State s, Py_ssize_t b, Py_ssize_t c) noexcept nogil

@cython.locals(c=Py_ssize_t, rate=double, requests=double, spec=Py_ssize_t, stage=Py_ssize_t, weight=double)
cdef double tokens_per_verify(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b) noexcept nogil

@cython.locals(stage=Py_ssize_t)
cdef Py_ssize_t acceptance_stage(Params p, Py_ssize_t t) noexcept nogil

@cython.locals(_=Py_ssize_t, accepted=double, chance=double)
cdef double accepted_drafts(double acceptance, double drafts) noexcept nogil

@cython.locals(c=Py_ssize_t, total=double)
cdef double requests_in_flight(Params p, State s, Py_ssize_t b) noexcept nogil

@cython.locals(c=Py_ssize_t, cells=double, cells_per_token=double, end=double, first=Py_ssize_t, i=int, k=Py_ssize_t)
cdef void locate_edges(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, double gain) noexcept nogil

@cython.locals(c=Py_ssize_t)
cdef void find_survivors(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, double gain) noexcept nogil

@cython.locals(at=Py_ssize_t, density=double, k=Py_ssize_t, older=double, older_pos=double, positions=double,
    requests=double, u=double, younger=double, younger_pos=double)
cdef void find_class_survivors(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c) noexcept nogil

@cython.locals(cells=double, i=Py_ssize_t, stay=double, u=double)
cdef (double, double) staying_of_admissions(Params p, Py_ssize_t c, double gain) noexcept nogil

@cython.locals(at=Py_ssize_t, positions=double, requests=double, u=double, written=double)
cdef (double, double, double) measure_cohort(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, Py_ssize_t k,
    Py_ssize_t end, double progress) noexcept nogil

@cython.locals(at=Py_ssize_t, bend=double, part=double, u=double)
cdef double written_up_to(Params p, Scratch x, Py_ssize_t c, Py_ssize_t k, double y) noexcept nogil

@cython.locals(before=double, c=Py_ssize_t, progress=double, written=double)
cdef double advance_cohorts(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, double gain) noexcept nogil

@cython.locals(before=double, density=double, k=Py_ssize_t, progress=double, total=double)
cdef double tokens_so_far(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c) noexcept nogil

@cython.locals(c=Py_ssize_t, ended=double, k=Py_ssize_t, mean_output=double, progress=double)
cdef void retire_cohorts(Params p, State s, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(draft_gb=double, pool_gb=double, used_gb=double, weights_gb=double)
cdef void allocate_memory(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b) noexcept nogil

@cython.locals(cached_tokens=double, i=Py_ssize_t, y=double)
cdef double prefix_hit_share(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil

@cython.locals(c=Py_ssize_t, excess=double, k=Py_ssize_t, preempted=double, ready=double, requests=double,
    tokens=double)
cdef double preempt(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(c=Py_ssize_t, k=Py_ssize_t, preempted=double, stay=double)
cdef double interrupt(Params p, State s, Py_ssize_t b, double share) noexcept nogil

@cython.locals(density=double, each_positions=double, each_requests=double, each_written=double, prompt_tokens=double,
    prompts=double, requests=double, running=double, share=double, tokens=double)
cdef (double, double) take_out(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, Py_ssize_t k, Py_ssize_t t,
    double excess) noexcept nogil

@cython.locals(c=Py_ssize_t)
cdef void put_back(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(density=double, k=Py_ssize_t, n=double, position=double, positions=double, progress=double,
    requests=double, share=double, written=double)
cdef void put_back_class(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, Py_ssize_t t) noexcept nogil

@cython.locals(c=Py_ssize_t, kv_tokens=double)
cdef double kv_occupancy(Params p, Scratch x) noexcept nogil

@cython.locals(again=double, c=Py_ssize_t, churned=double, mean_output=double)
cdef double churned_requests(Params p, Scratch x) noexcept nogil

@cython.locals(c=Py_ssize_t, cached=double)
cdef void cache_prefixes(Params p, State s, Scratch x, Py_ssize_t b, double written) noexcept nogil

@cython.locals(arrived=double, c=Py_ssize_t, requests=double, tokens=double, w=Py_ssize_t)
cdef void receive_arrivals(Params p, Load load, State s, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(j=Py_ssize_t)
cdef Py_ssize_t oldest_waiting(State s, Py_ssize_t b, Py_ssize_t c, Py_ssize_t t) noexcept nogil

@cython.locals(c=Py_ssize_t, total=double)
cdef double queued_requests(Params p, State s, Py_ssize_t b) noexcept nogil

@cython.locals(c=Py_ssize_t, hit=double, j=Py_ssize_t, left=double, n=double, part=double, slots=double, taken=double,
    tokens=double, w=Py_ssize_t, work_ms=double)
cdef void measure_heads(Params p, Load load, Knobs knobs, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(arrived_ms=double, new=double, w=Py_ssize_t)
cdef double with_listed_work(Load load, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, Py_ssize_t j, double part,
    double hit, double work_ms) noexcept nogil

@cython.locals(c=Py_ssize_t)
cdef void leave_queues(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil

@cython.locals(c=Py_ssize_t, drop=double, j=Py_ssize_t, n=double, over=double)
cdef void reject_overflow(Params p, State s, Metrics m, Py_ssize_t b, Py_ssize_t t) noexcept nogil

cdef void report(Params p, Load load, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b, Py_ssize_t t,
    double missed, double judged) noexcept nogil

@cython.locals(admitted=double, c=Py_ssize_t, completed=double, n=double, running=double)
cdef void report_flows(Params p, State s, Scratch x, Metrics m, Py_ssize_t b) noexcept nogil

@cython.locals(spec=Py_ssize_t)
cdef void report_pace(Params p, Load load, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b,
    Py_ssize_t t) noexcept nogil

@cython.locals(batch=double, share=double)
cdef void report_violations(Params p, Knobs knobs, Metrics m, Py_ssize_t b, double missed, double judged) noexcept nogil

@cython.locals(cost=double, gpus=double)
cdef void report_cost(Params p, State s, Scratch x, Metrics m, Py_ssize_t b) noexcept nogil

@cython.locals(asked=double, more=double, start_s=double)
cdef void scale(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(k=Py_ssize_t, left=double, n=double)
cdef void put_into_service(Params p, State s, Py_ssize_t b, Py_ssize_t t, double start_s) noexcept nogil

@cython.locals(k=Py_ssize_t, loading=double)
cdef double loading_replicas(State s, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(joining=double, k=Py_ssize_t, start_s=double)
cdef double joining_replicas(Params p, Knobs knobs, State s, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(cancelled=double, k=Py_ssize_t, outdated=double, ready=double, staying=double)
cdef void remove_replicas(Params p, State s, Py_ssize_t b, Py_ssize_t t, double n) noexcept nogil

@cython.locals(n=double)
cdef double still_draining(State s, Py_ssize_t b) noexcept nogil

cdef double staying_share(Params p, State s, Py_ssize_t b) noexcept nogil

@cython.locals(c=Py_ssize_t, survivors=double)
cdef void keep_draining(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil

@cython.locals(fleet_s=double, joining=double, new=double, part=double, ready=double, up=double)
cdef void roll_out(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(done=double)
cdef void start_rollout(State s, Py_ssize_t b, Py_ssize_t tier, Py_ssize_t disagg) noexcept nogil

@cython.locals(c=Py_ssize_t, kv_pool=double, slots=double)
cdef void admit(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b, double gain) noexcept nogil

@cython.locals(slots=double)
cdef double open_slots(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b) noexcept nogil

@cython.locals(held=double, positions=double, requests=double)
cdef void hold_survivors(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c) noexcept nogil

@cython.locals(keep=double)
cdef double surviving_prompts(State s, Scratch x, Py_ssize_t b, Py_ssize_t c) noexcept nogil

@cython.locals(each_kv=double, each_ms=double, n=double, tokens=double)
cdef void resume(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double slots, double kv_pool) noexcept nogil

cdef double preempted_context(State s, Py_ssize_t b, Py_ssize_t c) noexcept nogil

@cython.locals(each_kv=double, each_ms=double, fit=double, n=double, room=double, stay=double, stay_pos=double)
cdef void admit_class(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double gain, double slots,
    double kv_pool) noexcept nogil

@cython.locals(more=double)
cdef double kv_bound(State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double room, double fit) noexcept nogil

cdef double admission_ms(Params p, Scratch x, Py_ssize_t c) noexcept nogil

@cython.locals(c=Py_ssize_t, draining=double, elsewhere=double, elsewhere_tokens=double, in_flight=double,
    prompts=double, tokens=double)
cdef (double, double) mean_batch(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil

@cython.locals(at=double, excess=double, fall=double, gain=double, last_excess=double, step=double, sweeps=Py_ssize_t)
cdef double solve(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(batch=double, context=double, in_flight=double, resident=double, tokens=double, tpot=double)
cdef double next_gain(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b, Py_ssize_t t,
    double gain) noexcept nogil

@cython.locals(stolen_share=double)
cdef double tpot_ms(Params p, Knobs knobs, State s, Scratch x, Py_ssize_t b) noexcept nogil

@cython.locals(c=Py_ssize_t, requests=double, tokens=double, weight=double)
cdef double mean_block_slack(Params p, State s, Scratch x, Py_ssize_t b) noexcept nogil

@cython.locals(c=Py_ssize_t, prefill_share=double)
cdef void keep_pace(Params p, State s, Scratch x, Py_ssize_t b, double gain) noexcept nogil

@cython.locals(batch=double, c=Py_ssize_t, crowding=double, decode_ms=double, decoding=double, dedicated=double,
    fused=double, i=Py_ssize_t, in_flight=double, iteration_ms=double, kv_tokens=double, mean_output=double)
cdef void limit_prefill(Params p, Load load, Knobs knobs, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(arrived_ms=double, backlog=double, c=Py_ssize_t, w=Py_ssize_t)
cdef double expected_share(Params p, Load load, State s, Scratch x, Py_ssize_t b, Py_ssize_t t) noexcept nogil

@cython.locals(c=Py_ssize_t, came=double, fixed_ms=double, n=double, prompts_ms=double, requests=double, tokens=double,
    weight=double, work_ms=double)
cdef (double, double, double) own_iteration(Params p, State s, Scratch x, Py_ssize_t b, double share,
    double decode_ms) noexcept nogil

@cython.locals(ahead=double, backlog=double, c=Py_ssize_t, chunks=double, service=double, up_to=double, wait_ms=double)
cdef void estimate_first_tokens(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b) noexcept nogil

@cython.locals(seen=double)
cdef void measure_engine(Params p, Scratch x, Metrics m, Py_ssize_t b) noexcept nogil

@cython.locals(c=Py_ssize_t, chunks=double, class_residual_ms=double, load=double, long_utilisation=double,
    prompt_ms=double, residual_chunk_ms=double, residual_ms=double, share=double, utilisation=double)
cdef void measure_prefill_queue(Params p, State s, Scratch x, Py_ssize_t b, double backlog) noexcept nogil

@cython.locals(replicas=double)
cdef double pooling(double up, double utilisation) noexcept nogil

@cython.locals(admitted=double, c=Py_ssize_t, deviation=double, excess=double, limit=double, margin=double,
    running=double, variance=double, z=double)
cdef void measure_slots(Params p, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b,
    double backlog) noexcept nogil

@cython.locals(beyond=double, residual=double, short=double)
cdef double wait_for_prompts(Scratch x, double chunks, double ahead, double up_to) noexcept nogil

@cython.locals(fixed=double, iterations=double, mean=double, residual=double, residual_variance=double, service=double,
    service_cv2=double, short=double, sigma2=double, slot_wait=double, variance=double)
cdef void estimate_first_token(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double chunks, double queueing,
    double backlog) noexcept nogil

cdef double wait_variance(double mean, double probability) noexcept nogil

@cython.locals(fixed=double, load=double, next_ms=double)
cdef double fixed_part_ms(Params p, Scratch x, Py_ssize_t c, double iterations) noexcept nogil

@cython.locals(colocated=double, residual=double)
cdef (double, double) wait_for_iteration(Scratch x, double short) noexcept nogil

@cython.locals(colocated=double, decode_share=double, half=double, load=double, others=double, prompts_ms=double,
    square=double, variance=double)
cdef (double, double) wait_for_own_iteration(Params p, Scratch x, Py_ssize_t c, double service,
    double backlog) noexcept nogil

@cython.locals(alone=double, busy=double, disagg=double, full=double, fused=double)
cdef double service_ms(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double iterations) noexcept nogil

@cython.locals(c=Py_ssize_t, judged=double, late=double, missed=double, overdue=double, p50_ms=double, p99_ms=double,
    prefilling=double, w=Py_ssize_t)
cdef (double, double) measure_ttft(Params p, Load load, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b,
    Py_ssize_t t) noexcept nogil

@cython.locals(admitted=double, first=double, have=double, j=Py_ssize_t, last=double, left=double, missed=double,
    n=double, taken=double)
cdef double take_from_queue(Params p, Load load, State s, Scratch x, Py_ssize_t b, Py_ssize_t t,
    Py_ssize_t c) noexcept nogil

@cython.locals(admitted=double, arrived=double, first=double, first_came=double, have=double, last=double,
    last_came=double, room=double)
cdef (double, double) waits_ms(Params p, Load load, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c,
    Py_ssize_t j, double n, double taken) noexcept nogil

@cython.locals(k=Py_ssize_t)
cdef void keep_piece(Params p, Scratch x, Py_ssize_t c, double n, double shortest, double longest) noexcept nogil

@cython.locals(r=Py_ssize_t)
cdef void record_admissions(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t c, double n, double shortest,
    double longest) noexcept nogil

@cython.locals(left=double, median=double, sigma=double, slo=double)
cdef double slo_miss_share(Params p, Scratch x, Py_ssize_t c, double shortest, double longest) noexcept nogil

@cython.locals(in_time=double, j=Py_ssize_t, slo=double, steps_left=double)
cdef double overdue_in_queue(Params p, State s, Py_ssize_t b, Py_ssize_t t, Py_ssize_t c) noexcept nogil

@cython.locals(after=double, below=double, end=Py_ssize_t, goal=double, half=double, high=double, k=Py_ssize_t,
    low=double, n=Py_ssize_t, rise=double, shortest=double, total=double, under=double, wait=double, y=double)
cdef double ttft_quantile(Scratch x, double q, Py_ssize_t tail) noexcept nogil

@cython.locals(after=double, below=double, k=Py_ssize_t, longest=double, shortest=double, wait=double)
cdef double weight_below(Scratch x, double y, Py_ssize_t tail) noexcept nogil

@cython.locals(after_ms=double, age=double, c=Py_ssize_t, j=Py_ssize_t)
cdef double head_of_line_ms(Params p, State s, Scratch x, Py_ssize_t b, Py_ssize_t t, Py_ssize_t tail) noexcept nogil

@cython.final
cdef class ServingKernel:
    cdef public Params params
    cdef public Load load
    cdef public Knobs knobs
    cdef public State state
    cdef public Metrics metrics
    cdef public object sizes
    cdef public list idle
    @cython.locals(b=Py_ssize_t, x=Scratch)
    cpdef void step(self, Py_ssize_t lo, Py_ssize_t hi)

@cython.locals(gain=double, judged=double, missed=double, preempted=double, t=Py_ssize_t, written=double)
cdef void step_row(Params p, Load load, Knobs knobs, State s, Scratch x, Metrics m, Py_ssize_t b) noexcept nogil
