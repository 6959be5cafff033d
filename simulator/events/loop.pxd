# Written by `python -m scripts.kernel_types` from arrays.py and the functions beside it: change those.
cimport cython
from libc.math cimport erfc, exp, log, sqrt

cdef int ROUTED
cdef int ASSIGNED
cdef int PREEMPTED
cdef int PREFILLING
cdef int TRANSIT
cdef int FLIGHT
cdef int LINES_OF_REPLICA
cdef int ARRIVAL
cdef int HANDED_OVER
cdef int ITERATION_END
cdef int PREFILL_END
cdef int WAKE
cdef int RESTARTED
cdef int LOADED
cdef int SESSION_ARRIVAL
cdef int TOOL_END
cdef int TURN_REFUSED
cdef int READ
cdef int KIND_BITS
cdef int SHARED
cdef int ROUND_ROBIN
cdef int RANDOM
cdef int PREFIX_AFFINITY
cdef int OVERLOAD_REQUESTS
cdef double OVERLOAD_RATIO
cdef double READ_TOLERANCE_MS
cdef double JOIN_TOLERANCE_MS
cdef int IN_ENGINE
cdef int TOOL
cdef int READY
cdef int OVER
cdef int ASKED
cdef int CURVES
cdef int PAIRS
cdef int LISTED
cdef int RANDOM_A
cdef int RANDOM_B
cdef double LEAST_GAP_MS
cdef int GAPS_PER_E

@cython.final
cdef class Run:
    cdef public double[::1] due_ms
    cdef public long long[::1] prompt
    cdef public long long[::1] goal
    cdef public long long[::1] priority
    cdef public long long[::1] reused
    cdef public long long[::1] follows
    cdef public double[::1] acceptance
    cdef public long long[::1] length
    cdef public double[::1] arrival_ms
    cdef public double[::1] read_at_ms
    cdef public double[::1] queued_ms
    cdef public double[::1] start_ms
    cdef public double[::1] first_ms
    cdef public double[::1] finish_ms
    cdef public double[::1] output_ms
    cdef public double[::1] output_delay_ms
    cdef public double[::1] lot
    cdef public long long[::1] rejected
    cdef public long long[::1] preemptions
    cdef public long long[::1] need
    cdef public long long[::1] done
    cdef public long long[::1] held_blocks
    cdef public long long[::1] replica
    cdef public long long[::1] prefiller
    cdef public long long[::1] before
    cdef public long long[::1] after
    cdef public long long[::1] unsent_after
    cdef public long long[::1] session
    cdef public double[::1] tool_ms
    cdef public double[::1] wanted_ms
    cdef public long long[::1] turn
    cdef public long long[::1] turns_end
    cdef public long long[::1] gated
    cdef public long long[::1] arrived
    cdef public long long[::1] started
    cdef public long long[::1] flying
    cdef public long long[::1] phase
    cdef public long long[::1] context
    cdef public long long[::1] free_blocks
    cdef public long long[::1] is_freed
    cdef public long long[::1] freed_before
    cdef public long long[::1] freed_after
    cdef public long long[::1] line_first
    cdef public long long[::1] line_last
    cdef public long long[::1] line_count
    cdef public long long[::1] model
    cdef public long long[::1] disaggregated
    cdef public long long[::1] pool_blocks
    cdef public long long[::1] down
    cdef public long long[::1] draining
    cdef public long long[::1] leaving
    cdef public long long[::1] gone
    cdef public double[::1] loading_since_ms
    cdef public long long[::1] starts
    cdef public double[::1] decoded_ms
    cdef public long long[::1] n_decoded
    cdef public long long[::1] n
    cdef public long long[:, ::1] seq_request
    cdef public long long[:, ::1] seq_tokens
    cdef public long long[:, ::1] seq_goal
    cdef public long long[::1] token_sum
    cdef public long long[::1] steps_to_finish
    cdef public long long[::1] reserved_blocks
    cdef public long long[::1] transit_blocks
    cdef public long long[::1] transit_tokens
    cdef public long long[::1] unsent_first
    cdef public long long[::1] idle
    cdef public long long[::1] prefill_idle
    cdef public long long[::1] decoding
    cdef public double[::1] begun_ms
    cdef public double[::1] iteration_ms
    cdef public long long[::1] drafts
    cdef public double[:, :, ::1] chance
    cdef public long long[::1] n_chunks
    cdef public long long[:, ::1] chunk_request
    cdef public long long[:, ::1] chunk_tokens
    cdef public long long[::1] chunk_sum
    cdef public double[::1] event_ms
    cdef public long long[::1] event_order
    cdef public long long[::1] event_request
    cdef public long long[::1] event_replica
    cdef public long long[::1] event_starts
    cdef public long long n_events
    cdef public long long sequence
    cdef public long long n_classes
    cdef public long long router
    cdef public long long chunked
    cdef public long long reserve
    cdef public long long async_scheduling
    cdef public double request_ms
    cdef public double token_ms
    cdef public long long fleet_model
    cdef public long long fleet_disaggregated
    cdef public long long prefill_replicas
    cdef public long long fleet_pool_blocks
    cdef public long long batch_size
    cdef public long long draft_tokens
    cdef public double[:, ::1] fleet_chance
    cdef public long long block_tokens
    cdef public long long block_shift
    cdef public long long spare_tokens
    cdef public long long context_tokens
    cdef public long long queue_limit
    cdef public long long vllm_refill
    cdef public long long drain
    cdef public double restart_ms
    cdef public double load_ms
    cdef public double slowdown
    cdef public double kv_bytes_per_token
    cdef public double link_bytes_per_ms
    cdef public double client_ms
    cdef public double prefix_hit
    cdef public long long n_sessions
    cdef public long long max_sessions
    cdef public double objective_ms
    cdef public long long shared_tokens
    cdef public double now_ms
    cdef public long long n_replicas
    cdef public long long n_up
    cdef public long long n_there
    cdef public long long n_prefill_gpus
    cdef public long long waiting
    cdef public long long n_reading
    cdef public long long read_first
    cdef public long long read_last
    cdef public double read_work_ms
    cdef public double read_until_ms
    cdef public long long next_replica
    cdef public long long next_request
    cdef public long long last_request
    cdef public long long random_a
    cdef public long long random_b
    cdef public long long in_flight
    cdef public long long n_paused
    cdef public long long n_arrived
    cdef public long long n_begun
    cdef public long long next_session
    cdef public long long first_freed
    cdef public long long last_freed
    cdef public long long listed_blocks
    cdef public long long context_sum
    cdef public long long context_max
    cdef public long long iterations
    cdef public double busy_ms
    cdef public long long peak_tokens
    cdef public long long n_started
    cdef public long long n_finished
    cdef public long long n_turns
    cdef public long long batch_tokens
    cdef public long long n_judged
    cdef public long long n_within
    cdef public long long n_overdue
    cdef public long long free_flying
    cdef public long long n_over
    cdef public long long n_refused_sessions
    cdef public long long queried_tokens
    cdef public long long hit_tokens
    cdef public long long n_rejected
    cdef public long long n_preempted
    cdef public long long written_tokens
    cdef public long long drafted_tokens
    cdef public long long accepted_tokens
    cdef public long long decoded_tokens
    cdef public long long prefilled_tokens
    cdef public long long[::1] gaps
    cdef public double decode_ms
    cdef public double prefill_gpu_ms
    cdef public double replica_ms
    cdef public double[:, ::1] linear_ms
    cdef public double[:, ::1] head_ms
    cdef public double[:, :, ::1] attention_ms
    cdef public double asked_ms
    cdef public long long[::1] n_contexts
    cdef public long long[::1] draft_layers
    cdef public double[::1] draft_overhead_ms
    cdef public long long[::1] prefill_kind
    cdef public double[::1] prefill_scale
    cdef public double[::1] prefill_floor_ms
    cdef public double[:, ::1] prefill_alone_ms
    cdef public double[:, ::1] prefill_batched_ms
    cdef public double[:, :, :, ::1] listed_ms
    cdef public long long[::1] listed_tokens
    cdef public long long[::1] listed_prefixes
    cdef public long long[::1] listed_batches
    cdef public double[::1] step_overhead_ms
    cdef public double[::1] sequence_overhead_ms
    cdef public long long[::1] token_budget
    cdef public double[::1] output_delay
    cdef public object owner

cdef Py_ssize_t line_of(Run s, Py_ssize_t r, Py_ssize_t kind) noexcept nogil

@cython.locals(follower=Py_ssize_t)
cdef void insert_after(Run s, Py_ssize_t line, Py_ssize_t place, Py_ssize_t request) noexcept nogil

cdef void append(Run s, Py_ssize_t line, Py_ssize_t request) noexcept nogil

@cython.locals(after=Py_ssize_t, before=Py_ssize_t)
cdef void remove(Run s, Py_ssize_t line, Py_ssize_t request) noexcept nogil

@cython.locals(place=Py_ssize_t)
cdef void insert_by_class(Run s, Py_ssize_t line, Py_ssize_t request) noexcept nogil

@cython.locals(place=Py_ssize_t)
cdef void insert_before_class(Run s, Py_ssize_t line, Py_ssize_t request) noexcept nogil

@cython.locals(place=Py_ssize_t)
cdef void insert_by_arrival(Run s, Py_ssize_t line, Py_ssize_t request) noexcept nogil

cdef bint is_behind(Run s, Py_ssize_t one, Py_ssize_t other) noexcept nogil

cdef Py_ssize_t blocks(Run s, Py_ssize_t tokens) noexcept nogil

cdef Py_ssize_t full_blocks(Run s, Py_ssize_t request) noexcept nogil

cdef Py_ssize_t prompt_blocks(Run s, Py_ssize_t request) noexcept nogil

@cython.locals(held=Py_ssize_t, request=Py_ssize_t)
cdef Py_ssize_t prefill_blocks(Run s, Py_ssize_t r) noexcept nogil

cdef Py_ssize_t first_of(Run s, Py_ssize_t i) noexcept nogil

cdef Py_ssize_t end_of_prefillers(Run s, Py_ssize_t r) noexcept nogil

cdef Py_ssize_t end_of_fed(Run s, Py_ssize_t p) noexcept nogil

@cython.locals(n=Py_ssize_t, p=Py_ssize_t)
cdef bint has_idle_prefiller(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(held=Py_ssize_t, i=Py_ssize_t, more=Py_ssize_t)
cdef Py_ssize_t decode_blocks(Run s, Py_ssize_t r, Py_ssize_t growth) noexcept nogil

cdef Py_ssize_t most_decode_blocks(Run s, Py_ssize_t r, Py_ssize_t growth) noexcept nogil

cdef Py_ssize_t ahead_tokens(Run s) noexcept nogil

cdef bint is_over_full(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(need=Py_ssize_t)
cdef bint fits(Run s, Py_ssize_t r, Py_ssize_t request, Py_ssize_t promised_blocks) noexcept nogil

@cython.locals(request=Py_ssize_t, tokens=Py_ssize_t)
cdef Py_ssize_t cached_tokens(Run s, Py_ssize_t r) noexcept nogil

cdef Py_ssize_t reusable_tokens(Run s, Py_ssize_t request) noexcept nogil

cdef void note_peak(Run s, Py_ssize_t r) noexcept nogil

cdef Py_ssize_t in_flight(Run s, Py_ssize_t r) noexcept nogil

cdef Py_ssize_t load_of(Run s, Py_ssize_t r) noexcept nogil

cdef void schedule(Run s, double delay_ms, Py_ssize_t kind, Py_ssize_t request, Py_ssize_t r) noexcept nogil

cdef void push(Run s, double at_ms, Py_ssize_t kind, Py_ssize_t request, Py_ssize_t r) noexcept nogil

cdef void push_arrival(Run s, Py_ssize_t request) noexcept nogil

@cython.locals(i=Py_ssize_t, parent=Py_ssize_t)
cdef void insert(Run s, double at_ms, Py_ssize_t order, Py_ssize_t request, Py_ssize_t r) noexcept nogil

@cython.locals(child=Py_ssize_t, i=Py_ssize_t, last=Py_ssize_t)
cdef void drop_first(Run s) noexcept nogil

cdef bint is_earlier(Run s, double at_ms, Py_ssize_t order, Py_ssize_t i) noexcept nogil

cdef void move(Run s, Py_ssize_t source, Py_ssize_t target) noexcept nogil

@cython.locals(queue=Py_ssize_t, r=Py_ssize_t, request=Py_ssize_t)
cdef void route(Run s) noexcept nogil

@cython.locals(least=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t chosen_replica(Run s, Py_ssize_t request) noexcept nogil

@cython.locals(_=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t next_in_turn(Run s) noexcept nogil

@cython.locals(left=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t drawn_replica(Run s, Py_ssize_t request) noexcept nogil

@cython.locals(n=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t n_in_service(Run s) noexcept nogil

@cython.locals(best=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t least_outstanding(Run s) noexcept nogil

cdef Py_ssize_t outstanding(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(lead=Py_ssize_t)
cdef bint is_overloaded(Run s, Py_ssize_t r, Py_ssize_t least) noexcept nogil

cdef bint takes_requests(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(other=Py_ssize_t, tokens=Py_ssize_t)
cdef Py_ssize_t repeated_tokens(Run s, Py_ssize_t r, Py_ssize_t request) noexcept nogil

cdef Py_ssize_t uncached_tokens(Run s, Py_ssize_t r, Py_ssize_t request) noexcept nogil

@cython.locals(hit=Py_ssize_t)
cdef Py_ssize_t found_tokens(Run s, Py_ssize_t r, Py_ssize_t request) noexcept nogil

cdef void arrive(Run s, Py_ssize_t request) noexcept nogil

@cython.locals(request=Py_ssize_t)
cdef void end_reading(Run s) noexcept nogil

@cython.locals(work_ms=double)
cdef void schedule_read(Run s) noexcept nogil

cdef void pass_reading(Run s) noexcept nogil

@cython.locals(all_ms=double)
cdef void send_outputs(Run s, Py_ssize_t n) noexcept nogil

cdef double unsent_ms(Run s) noexcept nogil

cdef Py_ssize_t n_servers(Run s) noexcept nogil

@cython.locals(too_long=bint)
cdef void enqueue(Run s, Py_ssize_t request) noexcept nogil

@cython.locals(most=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t largest_pool_blocks(Run s) noexcept nogil

@cython.locals(n=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t not_started(Run s) noexcept nogil

@cython.locals(own=Py_ssize_t, queue=Py_ssize_t, r=Py_ssize_t, request=Py_ssize_t)
cdef void dispatch(Run s) noexcept nogil

@cython.locals(request=Py_ssize_t)
cdef void assign(Run s, Py_ssize_t queue, Py_ssize_t r) noexcept nogil

@cython.locals(best=Py_ssize_t, least=Py_ssize_t, load=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t least_loaded_with_room(Run s, Py_ssize_t request) noexcept nogil

@cython.locals(other=Py_ssize_t, preempted=Py_ssize_t, promised_blocks=Py_ssize_t, promised_tokens=Py_ssize_t,
    slots=Py_ssize_t)
cdef bint has_room(Run s, Py_ssize_t r, Py_ssize_t request) noexcept nogil

cdef bint precedes(Run s, Py_ssize_t request, Py_ssize_t preempted) noexcept nogil

@cython.locals(other=Py_ssize_t, p=Py_ssize_t, request=Py_ssize_t, tokens=Py_ssize_t)
cdef Py_ssize_t prefill_tokens(Run s, Py_ssize_t r) noexcept nogil

cdef void rouse(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(assigned=bint, chosen=Py_ssize_t, holder=Py_ssize_t, i=Py_ssize_t, last=Py_ssize_t, line=Py_ssize_t,
    queue=Py_ssize_t, r=Py_ssize_t)
cdef void refuse_youngest(Run s) noexcept nogil

cdef void refuse(Run s, Py_ssize_t request) noexcept nogil

cdef void send_next(Run s) noexcept nogil

@cython.locals(line=Py_ssize_t, own=Py_ssize_t, request=Py_ssize_t)
cdef void give_back(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(request=Py_ssize_t)
cdef void requeue(Run s, Py_ssize_t line) noexcept nogil

@cython.locals(r=Py_ssize_t)
cdef Py_ssize_t add_replica(Run s) noexcept nogil

cdef void set_down(Run s, Py_ssize_t r, Py_ssize_t down) noexcept nogil

cdef void configure(Run s, Py_ssize_t r) noexcept nogil

cdef bint is_current(Run s, Py_ssize_t r) noexcept nogil

cdef bint is_loading(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(r=Py_ssize_t, there=Py_ssize_t)
cdef void scale(Run s, Py_ssize_t replicas) noexcept nogil

@cython.locals(best=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t first_to_go(Run s) noexcept nogil

cdef bint goes_before(Run s, Py_ssize_t one, Py_ssize_t other) noexcept nogil

cdef void remove_replica(Run s, Py_ssize_t r) noexcept nogil

cdef void leave(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(due_ms=double)
cdef void schedule_join(Run s, Py_ssize_t r) noexcept nogil

cdef void join_if_loaded(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(outdated=Py_ssize_t, r=Py_ssize_t)
cdef void roll_out(Run s) noexcept nogil

cdef bint is_in_service(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(flight=Py_ssize_t, i=Py_ssize_t, other=Py_ssize_t, request=Py_ssize_t)
cdef void restart(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(request=Py_ssize_t)
cdef void take_off(Run s, Py_ssize_t line, Py_ssize_t flight) noexcept nogil

@cython.locals(best=Py_ssize_t, r=Py_ssize_t)
cdef Py_ssize_t least_loaded_up(Run s) noexcept nogil

cdef void put_back(Run s, Py_ssize_t r, Py_ssize_t request) noexcept nogil

cdef void come_up(Run s, Py_ssize_t r) noexcept nogil

cdef void clear(Run s, Py_ssize_t r) noexcept nogil

cdef void arrive_session(Run s, Py_ssize_t g) noexcept nogil

@cython.locals(g=Py_ssize_t)
cdef void apply_cap(Run s) noexcept nogil

@cython.locals(best=Py_ssize_t, g=Py_ssize_t)
cdef Py_ssize_t youngest_between_turns(Run s) noexcept nogil

@cython.locals(g=Py_ssize_t)
cdef void admit_sessions(Run s) noexcept nogil

@cython.locals(best=Py_ssize_t, g=Py_ssize_t, paused=bint)
cdef Py_ssize_t oldest_paused(Run s) noexcept nogil

cdef void start_session(Run s, Py_ssize_t g) noexcept nogil

cdef void fly(Run s, Py_ssize_t g) noexcept nogil

cdef void send_turn(Run s, Py_ssize_t g) noexcept nogil

cdef void end_tool(Run s, Py_ssize_t g) noexcept nogil

@cython.locals(g=Py_ssize_t)
cdef void end_turn(Run s, Py_ssize_t request) noexcept nogil

cdef void end_session(Run s, Py_ssize_t g) noexcept nogil

cdef void refuse_session(Run s, Py_ssize_t g) noexcept nogil

@cython.locals(g=Py_ssize_t)
cdef void note_sessions(Run s) noexcept nogil

@cython.locals(request=Py_ssize_t, unanswered=bint)
cdef bint is_late(Run s, Py_ssize_t g) noexcept nogil

cdef void free_context(Run s, Py_ssize_t g, Py_ssize_t tokens) noexcept nogil

cdef void reuse_context(Run s, Py_ssize_t request) noexcept nogil

@cython.locals(after=Py_ssize_t, before=Py_ssize_t)
cdef void forget_context(Run s, Py_ssize_t g) noexcept nogil

@cython.locals(free=Py_ssize_t, g=Py_ssize_t, growth=Py_ssize_t, prompts=Py_ssize_t, taken=Py_ssize_t)
cdef void take_free_blocks(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(attention=double, i=Py_ssize_t, m=Py_ssize_t, n_first=Py_ssize_t, prompt_tokens=Py_ssize_t,
    request=Py_ssize_t, rows=Py_ssize_t, time=double)
cdef double iteration_ms(Run s, Py_ssize_t r, Py_ssize_t n_decode, double context, Py_ssize_t n_chunks) noexcept nogil

@cython.locals(cell=Py_ssize_t, last=Py_ssize_t)
cdef double linear_ms(Run s, Py_ssize_t m, Py_ssize_t rows) noexcept nogil

@cython.locals(cell=Py_ssize_t, last=Py_ssize_t)
cdef double head_ms(Run s, Py_ssize_t m, Py_ssize_t rows) noexcept nogil

@cython.locals(j=Py_ssize_t, low=double, start=Py_ssize_t)
cdef double attention_ms(Run s, Py_ssize_t m, Py_ssize_t n_decode, double context) noexcept nogil

@cython.locals(layer=double)
cdef double draft_ms(Run s, Py_ssize_t m, Py_ssize_t n_decode, double attention) noexcept nogil

cdef double prefill_attention_ms(Run s, Py_ssize_t m, Py_ssize_t r, Py_ssize_t n_chunks) noexcept nogil

@cython.locals(alone=double, batched=double, end=Py_ssize_t, i=Py_ssize_t, longest=double, prefix=Py_ssize_t,
    together=double)
cdef double by_curves_ms(Run s, Py_ssize_t m, Py_ssize_t r, Py_ssize_t n_chunks) noexcept nogil

@cython.locals(last=Py_ssize_t)
cdef double alone_ms(Run s, Py_ssize_t m, Py_ssize_t tokens) noexcept nogil

@cython.locals(last=Py_ssize_t)
cdef double batched_ms(Run s, Py_ssize_t m, Py_ssize_t tokens) noexcept nogil

cdef double square(double x) noexcept nogil

@cython.locals(i=Py_ssize_t, pairs=double, tokens=Py_ssize_t)
cdef double by_pairs_ms(Run s, Py_ssize_t m, Py_ssize_t r, Py_ssize_t n_chunks) noexcept nogil

@cython.locals(alike=Py_ssize_t, first=bint, i=Py_ssize_t, j=Py_ssize_t, prefix=Py_ssize_t, time=double)
cdef double by_list_ms(Run s, Py_ssize_t m, Py_ssize_t r, Py_ssize_t n_chunks) noexcept nogil

@cython.locals(same=bint)
cdef bint are_alike(Run s, Py_ssize_t r, Py_ssize_t i, Py_ssize_t j) noexcept nogil

@cython.locals(i=Py_ssize_t, j=Py_ssize_t, k=Py_ssize_t, low=double, of_batch=double, of_prefix=double,
    of_tokens=double)
cdef double listed_ms(Run s, Py_ssize_t m, Py_ssize_t tokens, Py_ssize_t prefix, Py_ssize_t alike) noexcept nogil

@cython.locals(low=double)
cdef double at_prefix_ms(Run s, Py_ssize_t m, Py_ssize_t i, Py_ssize_t j, Py_ssize_t k, double of_tokens,
    double of_prefix) noexcept nogil

@cython.locals(low=double)
cdef double at_tokens_ms(Run s, Py_ssize_t m, Py_ssize_t i, Py_ssize_t j, Py_ssize_t k, double of_tokens) noexcept nogil

@cython.locals(c=Py_ssize_t, j=Py_ssize_t, n=Py_ssize_t, n_chunks=Py_ssize_t, preempted=bint)
cdef void begin_iteration(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(request=Py_ssize_t)
cdef void send_first_tokens(Run s, Py_ssize_t r) noexcept nogil

cdef void end_iteration(Run s, Py_ssize_t r) noexcept nogil

cdef void wake(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(some=bint, victim=Py_ssize_t)
cdef bint make_room(Run s, Py_ssize_t r) noexcept nogil

cdef Py_ssize_t computed_tokens(Run s, Py_ssize_t victim) noexcept nogil

@cython.locals(i=Py_ssize_t, last=Py_ssize_t, line=Py_ssize_t, victim=Py_ssize_t)
cdef Py_ssize_t preempt(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(best=Py_ssize_t, request=Py_ssize_t)
cdef Py_ssize_t last_of_lowest_class(Run s, Py_ssize_t line) noexcept nogil

@cython.locals(best=Py_ssize_t, i=Py_ssize_t)
cdef Py_ssize_t last_sequence_of_lowest_class(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(budget=Py_ssize_t, decode_rows=Py_ssize_t, fed=Py_ssize_t, is_ahead=bint, latest_ms=double,
    line=Py_ssize_t, most=Py_ssize_t, n=Py_ssize_t, request=Py_ssize_t, tokens=Py_ssize_t, total=Py_ssize_t)
cdef void take_chunks(Run s, Py_ssize_t r, bint starting) noexcept nogil

@cython.locals(best=Py_ssize_t, fed=Py_ssize_t, line=Py_ssize_t)
cdef Py_ssize_t first_head_line(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(line=Py_ssize_t)
cdef Py_ssize_t head_line(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(assigned=Py_ssize_t, preempted=Py_ssize_t)
cdef Py_ssize_t next_line(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(request=Py_ssize_t)
cdef Py_ssize_t start_prefill(Run s, Py_ssize_t r, Py_ssize_t line) noexcept nogil

@cython.locals(i=Py_ssize_t)
cdef void book_chunks(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(i=Py_ssize_t, request=Py_ssize_t)
cdef void complete(Run s, Py_ssize_t r) noexcept nogil

cdef void write_first_token(Run s, Py_ssize_t r, Py_ssize_t request, Py_ssize_t tokens) noexcept nogil

@cython.locals(i=Py_ssize_t, left=Py_ssize_t)
cdef void join(Run s, Py_ssize_t r, Py_ssize_t request, Py_ssize_t tokens) noexcept nogil

@cython.locals(i=Py_ssize_t, n=Py_ssize_t)
cdef void advance(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(i=Py_ssize_t)
cdef void count_gaps(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(i=Py_ssize_t)
cdef void count_gap(Run s, double gap_ms, Py_ssize_t n) noexcept nogil

@cython.locals(accepted=Py_ssize_t, i=Py_ssize_t, tokens=Py_ssize_t)
cdef void accept_drafts(Run s, Py_ssize_t r) noexcept nogil

cdef double chance_of(Run s, Py_ssize_t r, Py_ssize_t request, Py_ssize_t position) noexcept nogil

@cython.locals(z=Py_ssize_t)
cdef double draw(Run s) noexcept nogil

@cython.locals(i=Py_ssize_t, kept=Py_ssize_t, least=Py_ssize_t, left=Py_ssize_t, request=Py_ssize_t,
    token_sum=Py_ssize_t, tokens=Py_ssize_t)
cdef void drop_finished(Run s, Py_ssize_t r, bint written) noexcept nogil

cdef void finish(Run s, Py_ssize_t r, Py_ssize_t request) noexcept nogil

@cython.locals(p=Py_ssize_t)
cdef void begin_idle_prefills(Run s, Py_ssize_t r) noexcept nogil

cdef void begin_prefill(Run s, Py_ssize_t r) noexcept nogil

@cython.locals(i=Py_ssize_t, link_ms=double, r=Py_ssize_t, request=Py_ssize_t)
cdef void end_prefill(Run s, Py_ssize_t p) noexcept nogil

@cython.locals(tokens=Py_ssize_t)
cdef void hand_over(Run s, Py_ssize_t r, Py_ssize_t request) noexcept nogil

@cython.final
cdef class Loop:
    cdef public Run run
    @cython.locals(_=Py_ssize_t)
    cpdef void begin(self, Py_ssize_t replicas)
    cpdef void submit(self, Py_ssize_t first, Py_ssize_t n)
    cpdef void advance(self, double end_ms)
    cpdef void pass_time(self, double until_ms)
    @cython.locals(r=Py_ssize_t)
    cpdef void reconfigure(self, Py_ssize_t replicas)
    @cython.locals(g=Py_ssize_t)
    cpdef void begin_sessions(self)
    @cython.locals(s=Run)
    cpdef void play(self, Py_ssize_t max_sessions, double end_ms)
    cpdef Py_ssize_t cached_tokens(self, Py_ssize_t r)
    @cython.locals(n=Py_ssize_t, r=Py_ssize_t)
    cpdef Py_ssize_t running(self)
    @cython.locals(busy=Py_ssize_t, n=Py_ssize_t, r=Py_ssize_t, s=Run, tokens=Py_ssize_t)
    cpdef (double, double) decoding(self)
    cpdef Py_ssize_t held_blocks(self, Py_ssize_t r)

@cython.locals(kind=Py_ssize_t, r=Py_ssize_t, request=Py_ssize_t, starts=Py_ssize_t)
cdef void process_next(Run s) noexcept nogil

@cython.locals(prefill_gpus=Py_ssize_t)
cdef void count_gpus(Run s, double until_ms) noexcept nogil
