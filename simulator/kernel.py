"""One second of a serving fleet, row by row: the only implementation of the serving dynamics.

Plain Python that the build compiles to C (types in ``kernel.pxd``). A row is one fleet; rows never touch each
other, so a row of a batch equals the same episode alone, whatever the batch size or the number of threads.

In flight is an exact fluid. ``progress[s]`` is the number of tokens a request would have gained from the start of the
episode to the start of step ``s`` (all running requests advance together), ``density[c, s]`` the requests of class
``c`` admitted per token of progress during step ``s``. With S the survival function of the class's output length and
F its integral, the requests of that cohort that still run at progress ``x`` are
``density * (F(x - progress[s]) - F(x - progress[s + 1]))``: any length distribution is exact, nothing diffuses, and
admitted == completed + in flight holds to rounding. The queue is kept per class and arrival second (FIFO), so waits are
differences of cumulative curves. See ENVIRONMENT.md, "Serving dynamics".
"""

from __future__ import annotations

from typing import Any

import cython

if not cython.compiled:  # compiled, the same names are the C library's (see kernel.pxd)
    from math import erfc, exp, log, sqrt

SWEEPS = 3
SLOT_DEVIATION = 0.7
"""Standard deviation of requests in flight that matters to waiting for a slot, per that without a bound on slots."""
TRANSIENT = 0.45
"""Mean over a step of a reflected random walk that starts the step at 0, per standard deviation gained in it."""
CHURNED_OUTPUT = 100.0
"""Output tokens that a request preempted for lack of KV cache has written by then."""
DUST = 1e-9
"""Requests that are none: what rounding leaves of a second's arrivals, or of room for them. Nobody waits for it."""


class ServingKernel:
    """Steps rows ``lo..hi`` of a fleet batch in place.

    All arrays are C-contiguous float64 or int64 and owned by :class:`simulator.serving.ServingFleet`, which documents
    each of them; this class only holds views.
    """

    def __init__(self, constants: Any, arrays: Any) -> None:
        for name, value in constants.items():
            setattr(self, name, value)
        for name, value in arrays.items():
            setattr(self, name, value)

    def step(self, lo: int, hi: int) -> None:
        """Advance rows ``lo`` (included) to ``hi`` (excluded) by one step."""
        with cython.nogil:
            for b in range(lo, hi):
                self._step_row(b)

    # ------------------------------------------------------------ one row, one step

    def _step_row(self, b: int) -> None:
        t = self.time[b]
        w = self.load_index[b]
        self._roll_out(b, t)
        self._receive(b, t, w)
        self._configure(b)
        self._head_of_line(b, t, w)
        gain = self.last_gain[b]
        if t == 0:  # nothing runs yet: any guess will do
            self._solve(b, t, 0.05 * self.dt_ms)
            gain = self.next_gain[b]
        for _ in range(SWEEPS):
            self._solve(b, t, gain)
            gain = self.next_gain[b]
        # The last solution is consistent with the gain it was given, so that gain is what happens.
        self._solve(b, t, gain)
        self._commit(b, t, w, gain)
        self._measure_latency(b, t, w)
        self._shed(b, t)
        self._report(b, t, w, gain)
        self.last_gain[b] = gain
        self.time[b] = t + 1

    def _roll_out(self, b: int, t: int) -> None:
        """Restart replicas one at a time when precision or prefill placement changes."""
        tier = self.tier[b]
        disagg = self.disagg[b]
        self.restarted[b] = 0.0
        self.up[b] = self.n_replicas
        if t == 0:
            self.tier_to[b] = tier
            self.tier_from[b] = tier
            self.disagg_to[b] = disagg
            self.disagg_from[b] = disagg
            self.converted[b] = 1.0
        elif tier != self.tier_to[b] or disagg != self.disagg_to[b]:
            done = self.converted[b]
            if done < 1.0 and tier == self.tier_from[b] and disagg == self.disagg_from[b]:
                # Back to where it came from: the replicas not yet restarted are already there.
                self.tier_from[b] = self.tier_to[b]
                self.disagg_from[b] = self.disagg_to[b]
                self.converted[b] = 1.0 - done
            else:
                if done >= 0.5:
                    self.tier_from[b] = self.tier_to[b]
                    self.disagg_from[b] = self.disagg_to[b]
                self.converted[b] = 0.0
            self.tier_to[b] = tier
            self.disagg_to[b] = disagg
        if self.converted[b] < 1.0:
            fleet_s = self.n_replicas * self.reload_s[tier]
            part = min(1.0 - self.converted[b], self.dt_s / fleet_s)
            self.restarted[b] = part
            # One replica is down for the time that this part of the rollout takes.
            self.up[b] = self.n_replicas - part * fleet_s / self.dt_s
            self.share_to[b] = self.converted[b] + 0.5 * part
            self.converted[b] += part
            if self.converted[b] > 1.0 - 1e-12:
                self.converted[b] = 1.0
        else:
            self.share_to[b] = 1.0

    def _receive(self, b: int, t: int, w: int) -> None:
        """Arrivals join their class queues; rolling statistics of the offered load."""
        total = 0.0
        tokens = 0.0
        for c in range(self.n_classes):
            a = self.arrivals[w, t, c]
            self.waiting[b, c, t] = a
            self.queue[b, c] += a
            self.queue_before[b, c] = self.queue[b, c] - a
            self.class_window[b, c] += a
            if t >= self.class_window_steps:
                self.class_window[b, c] -= self.arrivals[w, t - self.class_window_steps, c]
            total += a
            tokens += self.prompt_tokens[w, t, c]
            if t >= self.prompt_window_steps:
                tokens -= self.prompt_tokens[w, t - self.prompt_window_steps, c]
                self.prompt_window_requests[b] -= self.arrivals[w, t - self.prompt_window_steps, c]
        self.prompt_window_requests[b] += total
        self.prompt_window_tokens[b] += tokens
        self.rate_ema[b] += self.ema_weight * (total / self.dt_s - self.rate_ema[b])

    def _configure(self, b: int) -> None:
        """What the knobs mean this step: memory, KV pool, speculation, prefill limit."""
        share = self.share_to[b]
        draft_gb = self.draft_gb if self.spec[b] > 0 else 0.0
        weights = self.weights_gb[self.tier_to[b]]
        if share < 1.0:
            weights = max(weights, self.weights_gb[self.tier_from[b]])
        pool_gb = self.kv_budget[b] * (self.memory_gb - weights - self.activation_gb - self.workspace_gb - draft_gb)
        self.kv_pool_tokens[b] = pool_gb * 1e9 / self.kv_bytes_per_token
        used = weights + self.activation_gb + self.sequence_gb * self.batch_size[b] + draft_gb + pool_gb
        self.oom[b] = 1.0 if used > self.memory_limit_gb else 0.0
        self.gpu_memory_gb[b] = min(used, self.memory_limit_gb)
        self.prefill_apart[b] = share * self.disagg_to[b] + (1.0 - share) * self.disagg_from[b]
        if self.reuse_points > 0:
            pool = max(self.up[b], 1e-9) * self.kv_pool_tokens[b]
            self.prefix_hit[b] = self._prefix_hit(min(self.cached_tokens[b], pool))

    def _head_of_line(self, b: int, t: int, w: int) -> None:
        """Mean prompt (tokens) and prefill work (ms) of the requests that could be admitted this step."""
        limit = self.up[b] * self.batch_size[b] + 1.0
        share = self.share_to[b]
        hit = self.prefix_hit[b] if self.reuse_points > 0 else 0.0
        for c in range(self.n_classes):
            left = min(limit, self.queue[b, c])
            tokens = 0.0
            work = 0.0
            taken = 0.0
            j = self.wait_head[b, c]
            while j < t and self.waiting[b, c, j] <= DUST:
                j += 1
            self.wait_head[b, c] = j
            while j <= t and left > 1e-12:
                x = min(self.waiting[b, c, j], left)
                if x > 0.0:
                    part = x / self.arrivals[w, j, c]
                    tokens += part * self.prompt_tokens[w, j, c]
                    each = self.prefill_work_ms[w, j, c, self.tier_to[b]]
                    if share < 1.0:
                        each = share * each + (1.0 - share) * self.prefill_work_ms[w, j, c, self.tier_from[b]]
                    work += part * each
                    if hit > 0.0:
                        work -= (hit * part) * (
                            share * self.saved_work_ms[w, j, c, self.tier_to[b]]
                            + (1.0 - share) * self.saved_work_ms[w, j, c, self.tier_from[b]]
                        )
                    taken += x
                    left -= x
                j += 1
            if taken > 0.0:
                self.head_prompt[b, c] = tokens / taken
                self.head_work_ms[b, c] = work / taken
            else:
                self.head_prompt[b, c] = self.mean_prompt[c]
                self.head_work_ms[b, c] = self.mean_work_ms[c, self.tier_to[b]]
            # What greedy admission into a full pool recomputes, in prompts of this class.
            self.churned_prompts[b, c] = min(self.length_int[c, 4 * self.grid_cells] / self.head_prompt[b, c], 8.0)

    def _prefix_hit(self, cached: float) -> float:
        """Share of repeated prefix tokens that a cache of the ``cached`` tokens used last still holds."""
        x = log(max(cached, 1.0)) / 0.6931471805599453 - self.reuse_log2_first
        if x <= 0.0:
            return self.reuse_hit[0] * exp(0.6931471805599453 * x)
        i = cython.cast(cython.Py_ssize_t, x)
        if i >= self.reuse_points - 1:
            return self.reuse_hit[self.reuse_points - 1]
        return self.reuse_hit[i] + (x - i) * (self.reuse_hit[i + 1] - self.reuse_hit[i])

    # ------------------------------------------------------------ fixed point of one step

    def _locate_edges(self, b: int, t: int, gain: float) -> None:
        """Where in ``length_int`` the edges of all cohorts lie after ``gain`` more tokens, and how far into that cell.

        Progress never falls, so edges beyond the grid come first: without them the loop has no branch and is compiled
        to instructions that locate several edges at once.
        """
        first = self.age_head[b, 0]
        for c in range(1, self.n_classes):
            first = min(first, self.age_head[b, c])
        x = self.progress[b, t] + gain
        per_token = self.grid_inv
        while first <= t and (x - self.progress[b, first]) * per_token >= self.grid_cells:
            self.edge_at[b, first] = 4 * self.grid_cells
            self.edge_part[b, first] = 0.0
            first += 1
        for s in range(first, t + 1):
            p = (x - self.progress[b, s]) * per_token
            i = cython.cast(cython.int, p)
            self.edge_at[b, s] = 4 * i
            self.edge_part[b, s] = p - i

    def _survivors(self, b: int, t: int, gain: float) -> None:
        """Requests in flight before this step that still run after ``gain`` more tokens, and their positions.

        Classes share the edges of all cohorts and neighbouring cohorts share one, so each is located once and looked up
        once per class. Requests and positions lie side by side in ``length_int`` and ``survive``, so that a compiler
        computes both at once: this loop is where most of a step's time goes.
        """
        self._locate_edges(b, t, gain)
        for c in range(self.n_classes):
            count = 0.0
            position = 0.0
            s = self.age_head[b, c]
            at = self.edge_at[b, s]
            u = self.edge_part[b, s]
            older = self.length_int[c, at] + u * self.length_int[c, at + 2]
            older_pos = self.length_int[c, at + 1] + u * self.length_int[c, at + 3]
            while s < t:
                at = self.edge_at[b, s + 1]
                u = self.edge_part[b, s + 1]
                younger = self.length_int[c, at] + u * self.length_int[c, at + 2]
                younger_pos = self.length_int[c, at + 1] + u * self.length_int[c, at + 3]
                d = self.density[b, c, s]
                count += d * (older - younger)
                position += d * (older_pos - younger_pos)
                older = younger
                older_pos = younger_pos
                s += 1
            self.survive[b, c, 0] = count
            self.survive[b, c, 1] = position

    def _solve(self, b: int, t: int, gain: float) -> None:
        """Admissions and in-flight requests if every running request gains ``gain`` tokens, and the gain that follows.

        Writes ``admit``, ``room`` (what could have been admitted), ``after`` (in flight at the end), the state of the
        replicas and ``next_gain``.
        """
        up = max(self.up[b], 1e-9)
        self._survivors(b, t, gain)
        p = gain * self.grid_inv
        i = cython.cast(cython.Py_ssize_t, p) if p < self.grid_cells else self.grid_cells
        u = p - i
        at = 4 * i
        held = 0.0
        running = 0.0
        kv_tokens = 0.0
        for c in range(self.n_classes):
            running += self.survive[b, c, 0]
            keep = self.survive[b, c, 0] / self.in_flight[b, c] if self.in_flight[b, c] > 1e-12 else 0.0
            self.after_prompt[b, c] = self.prompt_in_flight[b, c] * keep
            kv_tokens += self.after_prompt[b, c] + self.survive[b, c, 1]
        # Requests whose prompt is under way hold slots and do not decode yet.
        slots = up * self.batch_size[b]
        slots -= min(self.prefilling[b], 0.5 * slots)
        if self.closed_clients > 0.0:
            slots = min(slots, self.closed_clients)
        pool = up * self.kv_pool_tokens[b]
        apart = self.prefill_apart[b]
        limit = self.prefill_cap[b] + (self.disagg_limit - self.prefill_cap[b]) * apart
        budget_ms = limit * up * self.dt_ms
        recompute_ms = self.recompute_ms[b]
        budget_ms = max(0.0, budget_ms - recompute_ms)
        thrash = 1.0 + self.recompute_factor * self.overcommit[b]
        churn = self.churn_factor * self.kv_pressure[b]
        self.kv_bound[b] = 0.0
        work_ms = 0.0
        mean_tokens = 0.0
        for c in range(self.n_classes):
            stay = (self.length_int[c, at] + u * self.length_int[c, at + 2]) / gain
            stay_pos = (self.length_int[c, at + 1] + u * self.length_int[c, at + 3]) / gain
            each_ms = self.head_work_ms[b, c] * (
                (1.0 - apart) * self.work_ratio[b, c] + apart * self.apart_ratio[c, self.tier_to[b]]
            )
            self.each_ms[b, c] = each_ms
            each_ms *= thrash + churn * self.churned_prompts[b, c]
            room = max(0.0, slots - running) / stay
            room = min(room, budget_ms / max(each_ms, 1e-9))
            # An engine admits a request when its prompt fits into the free part of the pool.
            each_kv = self.head_prompt[b, c] * stay + stay_pos
            fit = max(0.0, self.kv_fill * pool - kv_tokens) / max(each_kv, 1e-9)
            if fit < room:
                room = fit
                if fit < self.queue[b, c]:
                    self.kv_bound[b] = 1.0
            if running + self.queue[b, c] <= 1.0 and self.up[b] > 1e-6:
                room = max(room, 1.0)  # an empty replica always takes one request, however long
            admit = min(self.queue[b, c], room)
            if admit <= DUST:  # what rounding leaves of a budget, or of a fleet that is down, lets nobody in
                admit = 0.0
            self.room[b, c] = max(room, admit)
            self.admit[b, c] = admit
            running += admit * stay
            kv_tokens += admit * each_kv
            budget_ms -= admit * each_ms
            if budget_ms < 0.0:
                budget_ms = 0.0
            work_ms += admit * each_ms
            self.after[b, c] = self.survive[b, c, 0] + admit * stay
            self.after_pos[b, c] = self.survive[b, c, 1] + admit * stay_pos
            self.after_prompt[b, c] += admit * stay * self.head_prompt[b, c]
            held += 0.5 * (self.in_flight[b, c] + self.after[b, c])
            mean_tokens += 0.5 * (
                self.prompt_in_flight[b, c]
                + self.after_prompt[b, c]
                + self.position_in_flight[b, c]
                + self.after_pos[b, c]
            )
        self._advance(b, up, held, mean_tokens, work_ms + recompute_ms)

    def _advance(self, b: int, up: float, held: float, tokens: float, work_ms: float) -> None:
        """Tokens a request gains in a step with ``held`` requests holding ``tokens`` KV tokens on ``up`` replicas."""
        # While every replica restarts there are none to share the requests: the table's largest batch is the bound.
        n = min(held / up, self.batch_points[self.n_batch_points - 1])
        context = tokens / max(held, 1e-9)
        if context < 1.0:
            context = 1.0
        fit = self.kv_pool_tokens[b] / (context + self.block_slack)
        resident = min(n, fit)
        over = (n - resident) / n if n > resident else 0.0
        resident = max(resident, 1e-9)
        spec = self.spec[b]
        share = self.share_to[b]
        at_least_one = max(resident, 1.0)
        iteration = self._decode_ms(b, self.tier_to[b], spec, at_least_one, context)
        if share < 1.0:
            iteration = share * iteration + (1.0 - share) * self._decode_ms(
                b, self.tier_from[b], spec, at_least_one, context
            )
        # An iteration full of prompt tokens leaves the decodes their share of it, no less.
        rows = resident * (1.0 + self.spec_length[spec])
        chunk = self.chunk_tokens - rows if rows < 0.75 * self.chunk_tokens else 0.25 * self.chunk_tokens
        full = chunk * self._token_ms(b)
        self.prefill_cap[b] = full / (full + iteration)
        load = min(
            work_ms / (up * self.dt_ms),
            self.prefill_cap[b] + (self.disagg_limit - self.prefill_cap[b]) * self.prefill_apart[b],
        )
        stolen = load * (1.0 - self.prefill_apart[b])
        per_verify = self._tokens_per_verify(b)
        tpot = iteration / per_verify / (1.0 - stolen)
        if n > resident:
            tpot *= n / resident
        if self.oom[b] > 0.0:
            tpot *= 2.0
        self.overcommit[b] = over
        for c in range(self.n_classes):
            self.work_ratio[b, c] = self._work_ratio(b, c, self.tier_to[b], at_least_one, load)
        self.prefill_load[b] = load
        self.iteration_ms[b] = iteration
        self.resident[b] = resident
        self.kv_context[b] = context
        self.tpot_ms[b] = tpot
        gain = self.dt_ms / tpot
        if self.up[b] < 1e-6:
            gain = 1e-9
        self.next_gain[b] = max(gain, 1e-9)

    def _token_ms(self, b: int) -> float:
        """Prefill time per prompt token of what was admitted, or would be, in iterations full of it."""
        work = 0.0
        tokens = 0.0
        for c in range(self.n_classes):
            count = self.admit[b, c] + 1e-6
            work += count * self.head_work_ms[b, c]
            tokens += count * self.head_prompt[b, c]
        return work / tokens

    def _tokens_per_verify(self, b: int) -> float:
        spec = self.spec[b]
        if spec == 0:
            return 1.0
        rate = 0.0
        total = 0.0
        for c in range(self.n_classes):
            count = self.in_flight[b, c] + self.admit[b, c] + 1e-9
            rate += count * self.accept_scale[c]
            total += count
        return 1.0 + (self.spec_tokens[spec] - 1.0) * rate / total

    def _decode_ms(self, b: int, tier: int, spec: int, n: float, context: float) -> float:
        """Time of one decode iteration: bilinear in requests and context, as GEMM rows and KV reads are.

        Searches begin where the last one of this row ended, which is mostly where they end.
        """
        i = self.iteration_cell[b]
        while i > 0 and n < self.iteration_points[i]:
            i -= 1
        while i < self.n_iteration_points - 2 and n >= self.iteration_points[i + 1]:
            i += 1
        self.iteration_cell[b] = i
        j = self.context_cell[b]
        while j > 0 and context < self.context_points[j]:
            j -= 1
        while j < self.n_context_points - 2 and context >= self.context_points[j + 1]:
            j += 1
        self.context_cell[b] = j
        u = (n - self.iteration_points[i]) / (self.iteration_points[i + 1] - self.iteration_points[i])
        v = (context - self.context_points[j]) / (self.context_points[j + 1] - self.context_points[j])
        v = max(v, 0.0)
        return (1.0 - u) * (
            (1.0 - v) * self.decode_ms[tier, spec, i, j] + v * self.decode_ms[tier, spec, i, j + 1]
        ) + u * ((1.0 - v) * self.decode_ms[tier, spec, i + 1, j] + v * self.decode_ms[tier, spec, i + 1, j + 1])

    def _work_ratio(self, b: int, c: int, tier: int, n: float, load: float) -> float:
        """Prefill work of a request relative to the listed one, fused into ``n`` running requests.

        A lone prompt rides on decode iterations that stream the weights anyway; the fuller the prefill, the closer its
        cost comes to that of iterations full of prompts.
        """
        i = self.batch_cell[b]
        while i > 0 and n < self.batch_points[i]:
            i -= 1
        while i < self.n_batch_points - 2 and n >= self.batch_points[i + 1]:
            i += 1
        self.batch_cell[b] = i
        u = (n - self.batch_points[i]) / (self.batch_points[i + 1] - self.batch_points[i])
        lone = (1.0 - u) * self.marginal_ratio[c, tier, i] + u * self.marginal_ratio[c, tier, i + 1]
        full = (1.0 - u) * self.saturated_ratio[c, tier, i] + u * self.saturated_ratio[c, tier, i + 1]
        return lone + (full - lone) * load

    # ------------------------------------------------------------ bookkeeping

    def _commit(self, b: int, t: int, w: int, gain: float) -> None:
        """Make the solution the state; the cohort that was admitted enters the fluid."""
        x = self.progress[b, t] + gain
        self.progress[b, t + 1] = x
        total = 0.0
        done = 0.0
        held = 0.0
        wrote = 0.0
        kv = 0.0
        lost = 0.0
        lost_tokens = 0.0
        for c in range(self.n_classes):
            self.density[b, c, t] = self.admit[b, c] / gain
            load = min(1.0, self.admit[b, c] * self.each_ms[b, c] / (max(self.up[b], 1e-9) * self.dt_ms))
            self.class_load[b, c] += self.load_weight * (load - self.class_load[b, c])
            done += self.in_flight[b, c] + self.admit[b, c] - self.after[b, c]
            held += 0.5 * (self.in_flight[b, c] + self.after[b, c])
            self.in_flight[b, c] = self.after[b, c]
            self.prompt_in_flight[b, c] = self.after_prompt[b, c]
            self.position_in_flight[b, c] = self.after_pos[b, c]
            self.queue[b, c] -= self.admit[b, c]
            if self.queue[b, c] < DUST:
                self.queue[b, c] = 0.0
            total += self.admit[b, c]
            output = self.length_int[c, 4 * self.grid_cells]
            lost_tokens += self.admit[b, c] * min(output / (self.head_prompt[b, c] + CHURNED_OUTPUT), 8.0)
            kv += self.after_prompt[b, c] + self.after_pos[b, c]
            # Requests on replicas that restart next are computed anew: their prompt and what they had written.
            scale = 1.0
            if self.after[b, c] > 1e-9:
                scale = (self.after_prompt[b, c] + self.after_pos[b, c]) / (self.after[b, c] * self.head_prompt[b, c])
            lost += self.after[b, c] * self.head_work_ms[b, c] * scale
            wrote += self._wrote(b, t, c, x)
            s = self.age_head[b, c]
            while s < t and x - self.progress[b, s + 1] > self.longest_output[c]:
                # All of this cohort have ended: each wrote a mean output.
                ended = self.density[b, c, s] * (self.progress[b, s + 1] - self.progress[b, s])
                self.written_tokens[b, c] -= ended * output
                s += 1
            self.age_head[b, c] = s
        self.recompute_ms[b] = self.restarted[b] * lost
        self.admitted[b] = total
        self.completed[b] = done
        self.running_requests[b] = held
        self.tokens_per_sec[b] = wrote / self.dt_s
        pool = max(self.up[b], 1e-9) * self.kv_pool_tokens[b]
        self.kv_occupancy[b] = min(1.0, kv / max(pool, 1.0))
        if self.reuse_points > 0:
            # Freed blocks keep their content until others need them; a replica that restarts forgets it.
            written = self.cached_tokens[b] * (1.0 - self.restarted[b]) + wrote
            for c in range(self.n_classes):
                written += self.admit[b, c] * self.head_prompt[b, c]
            self.cached_tokens[b] = min(written, pool)
        # A preempted request comes back with its prompt and some of its output.
        churned = self.churn_factor * self.kv_pressure[b] * lost_tokens
        self.eviction_events[b] = self.overcommit[b] * held * self.eviction_rate + churned
        self.kv_pressure[b] += 0.5 * (self.kv_bound[b] - self.kv_pressure[b])

    def _wrote(self, b: int, t: int, c: int, x: float) -> float:
        """Tokens that a class's requests wrote in this step, at progress ``x`` at its end: never more than they have.

        A request that could have gained y tokens has written the integral of S up to y, on average, because it may have
        ended before. Over the positions of a cohort, that sums to y times this integral less the one of y*S. (Requests
        in flight at both ends of a step would tell wrongly: many may come and go within it.)
        """
        half_cell = 0.5 / self.grid_inv
        total = 0.0
        before = 0.0
        for s in range(self.age_head[b, c], t + 1):
            at = self.edge_at[b, s]
            u = self.edge_part[b, s]
            part = self.length_int[c, at + 2]
            # Within a cell S is even, so the integral of y*S, a line in the table, is a parabola.
            bend = half_cell * u * (1.0 - u) * part
            d = self.density[b, c, s]
            # Up to this edge one cohort counts, beyond it the one before.
            total += (d - before) * ((x - self.progress[b, s]) * (self.length_int[c, at] + u * part) + bend)
            before = d
        total -= self.after_pos[b, c]  # the integrals of y*S, summed in the same way
        wrote = total - self.written_tokens[b, c]
        self.written_tokens[b, c] = total
        return max(wrote, 0.0)

    def _measure_latency(self, b: int, t: int, w: int) -> None:
        """TTFT of what was admitted: waits from the arrival and admission curves, then what happens after admission.

        After admission a request waits for the iteration under way and for prompts before it, then for its own. That
        part is ``shift`` (certain) plus a log-normal with the mean and variance of the rest.
        """
        late = 0.0
        judged = 0.0
        prefilling = 0.0
        self.n_segments[b] = 0
        self._after_admission(b)
        for c in range(self.n_classes):
            late += self._segments(b, t, w, c)
            judged += self.admit[b, c]
            prefilling += self.admit[b, c] * (self.base_ms[b, c] - self.tau_ms) / self.dt_ms
            stale = self._stale(b, t, c)
            late += stale
            judged += stale
        self.prefilling[b] += 0.5 * (prefilling - self.prefilling[b])
        self.late_requests[b] = late
        self.judged_requests[b] = judged
        if self.n_segments[b] == 0:
            # Nobody was admitted: report what the head of the line has waited, or what a new request would get.
            self._idle_latency(b, t)
        else:
            self.ttft_p50_ms[b] = self._quantile(b, 0.50, 0)
            self.ttft_p99_ms[b] = max(self._quantile(b, 0.99, 1), self.ttft_p50_ms[b])

    def _after_admission(self, b: int) -> None:
        """Distribution of the time from admission to the first token, per class."""
        up = max(self.up[b], 1e-9)
        seen = self.running_requests[b] / up
        if self.closed_clients > 0.0:
            seen *= 1.0 - 1.0 / self.closed_clients  # a client does not meet its own request
        busy = 1.0 - exp(-seen)
        apart = self.prefill_apart[b]
        here = 1.0 - apart
        iteration = self.iteration_ms[b]
        tier = self.tier_to[b]
        replicas = max(up, 1.0)
        cap = self.prefill_cap[b]
        packed = iteration * cap / (1.0 - cap)
        work = 0.0
        brief_work = 0.0
        load = 0.0
        crowd = 0.0
        lengthy = 0.0
        backlog = 0.0
        running = 0.0
        variance = 1e-9
        admitted = 1e-9
        most_admitted = 0.0
        for c in range(self.n_classes):
            fill = self.head_prompt[b, c] / self.chunk_tokens
            each = self.each_ms[b, c]
            # A prompt that fills iterations also waits for the decodes in each of them.
            whole = each + here * busy * iteration * fill
            share = self.class_load[b, c] * whole / each
            work += 0.5 * share * whole * (1.0 + self.work_cv2[c])
            if whole > packed:
                brief_work += 0.5 * share * packed
            else:
                brief_work += 0.5 * share * whole * (1.0 + self.work_cv2[c])
            load += self.class_load[b, c]
            crowd += share
            lengthy += share * min(1.0, fill)
            backlog += self.queue[b, c]
            running += self.in_flight[b, c]
            variance += self.in_flight[b, c] * self.output_gini[c]
            admitted += self.admit[b, c]
            most_admitted = max(most_admitted, self.admit[b, c])
        crowd = min(crowd, 0.95)
        # Slots or cache that are full by chance: output lengths vary, so requests in flight vary around their mean.
        most = up * self.batch_size[b]
        if self.kv_occupancy[b] > 1e-3:  # an idle fleet has room for more than a thousand times nothing
            most = min(most, running / self.kv_occupancy[b])
        deviation = SLOT_DEVIATION * sqrt(max(variance, 1e-9))
        margin = (most - running - backlog) / deviation
        full = 0.5 * erfc(margin * 0.7071067811865476) if self.closed_clients <= 0.0 else 0.0
        slot_wait = 0.0
        if full > 1e-3:
            away = abs(margin)
            excess = 0.3989422804014327 * exp(-0.5 * away * away) - away * 0.5 * erfc(away * 0.7071067811865476)
            # Little's law over what leaves; in a step without departures the fluid queue says enough.
            slot_wait = min(deviation * max(excess, 0.0) / admitted, 2.0) * self.dt_ms
        cycle = iteration / (1.0 - min(load, cap))
        # With a backlog of prompts every iteration is full of them, that of a short prompt too.
        packed = packed * min(1.0, lengthy) if backlog > 1e-6 else 0.0
        # Beyond a step the fluid queue holds the backlog: here it is what can build up within one.
        transient = TRANSIENT * sqrt(2.0 * work * self.dt_ms) + 1e-9
        # A long prompt waits only if every replica is busy with prompts (Sakasegawa's exponent for a shared queue).
        pooled = exp((sqrt(2.0 * (replicas + 1.0)) - 2.0) * log(max(crowd, 1e-9))) / replicas
        before = 0.0
        for c in range(self.n_classes):
            prompt = self.head_prompt[b, c]
            fill = prompt / self.chunk_tokens
            each = self.each_ms[b, c]
            chunks = max(1.0, fill)
            brief = max(0.0, 1.0 - fill)
            alone = self.head_work_ms[b, c] * self.alone_ratio[c, tier]
            upto = min(before + self.class_load[b, c] * (1.0 + here * busy * iteration * fill / each), 0.95)
            if self.admit[b, c] <= 0.0 and most_admitted > 0.0:
                before = upto
                continue  # nobody asks: only a step in which nothing is admitted tells what the others would get
            # A prompt under way is finished first. Beyond that, replicas share what waits.
            ahead = brief * brief_work + (1.0 - brief) * pooled * work
            queueing = ahead * (1.0 / ((1.0 - before) * (1.0 - upto)) - 1.0)
            queueing = ahead + queueing * transient / (transient + queueing)
            before = upto
            decodes = here * busy * iteration * chunks
            shift = self.tau_ms + decodes + apart * prompt * self.handoff_ms_per_token
            own = here * ((1.0 - busy) * alone + busy * max(each, alone - iteration * chunks)) + apart * alone
            residual = here * busy * cycle * (0.5 + load * brief) + packed * brief
            mean = own + residual + queueing + slot_wait
            variance = (
                own * own * self.work_cv2[c]
                + residual * residual / 3.0
                + queueing * queueing * (2.0 / max(crowd, 0.05) - 1.0) * (0.5 + 0.5 * brief)
                + slot_wait * slot_wait * (2.0 / max(full, 0.05) - 1.0)
                + self.jitter * self.jitter * (shift + mean) * (shift + mean)
            )
            spread2 = log(1.0 + variance / (mean * mean))
            self.shift_ms[b, c] = shift
            self.spread[b, c] = sqrt(spread2)
            self.rest_ms[b, c] = mean * exp(-0.5 * spread2)
            self.base_ms[b, c] = shift + self.rest_ms[b, c]
            self.base_p99_ms[b, c] = shift + self.rest_ms[b, c] * exp(2.326 * self.spread[b, c])

    def _segments(self, b: int, t: int, w: int, c: int) -> float:
        """Walk the FIFO queue over what was admitted; keep the waits as uniform pieces; return how many were late."""
        admit = self.admit[b, c]
        if admit <= 0.0:
            return 0.0
        room = self.room[b, c]
        if self.queue[b, c] > 0.0:
            room = admit  # something was left behind: admissions were spread over the whole step
        room = max(room, admit)
        left = admit
        taken = 0.0
        late = 0.0
        j = self.wait_head[b, c]
        while j <= t and left > 1e-12:
            have = self.waiting[b, c, j]
            x = min(have, left)
            if x > 0.0:
                whole = self.arrivals[w, j, c]
                # Of a cohort that arrived evenly over its second, the last `have` are still here.
                first = (j + 1 - have / whole) * self.dt_ms
                last = (j + 1 - (have - x) / whole) * self.dt_ms
                lo = (t + taken / room) * self.dt_ms - first
                hi = (t + (taken + x) / room) * self.dt_ms - last
                if self.closed_clients > 0.0:
                    # Counted from the start of the run: when each request was sent, simulator.whatif knows.
                    lo += first
                    hi += last
                    if t == 0:  # the first clients find the fleet idle and wait for each other's prompts alone
                        hi = min(hi, admit * self.each_ms[b, c] / max(self.up[b], 1e-9))
                late += x * self._share_late(b, c, min(lo, hi), max(lo, hi))
                self._keep_segment(b, c, x, min(lo, hi), max(lo, hi))
                self.waiting[b, c, j] = have - x
                taken += x
                left -= x
            if left > 1e-12 or self.waiting[b, c, j] <= DUST:
                j += 1
        self.wait_head[b, c] = min(j, t + 1)
        return late

    def _keep_segment(self, b: int, c: int, weight: float, lo: float, hi: float) -> None:
        k = self.n_segments[b]
        if self.record_rows > 0:
            r = self.n_recorded[b]
            if r < self.record_rows:
                self.record[b, r, 0] = c
                self.record[b, r, 1] = weight
                self.record[b, r, 2] = lo
                self.record[b, r, 3] = hi
                self.record[b, r, 4] = self.shift_ms[b, c]
                self.record[b, r, 5] = self.rest_ms[b, c]
                self.record[b, r, 6] = self.spread[b, c]
                self.n_recorded[b] = r + 1
        if k >= self.max_segments:
            # Many small cohorts at once: fold the rest into the last piece.
            k = self.max_segments - 1
            self.segments[b, k, 0] += weight
            self.segments[b, k, 1] = min(self.segments[b, k, 1], lo)
            self.segments[b, k, 2] = max(self.segments[b, k, 2], hi)
            return
        self.segments[b, k, 0] = weight
        self.segments[b, k, 1] = lo
        self.segments[b, k, 2] = hi
        self.segments[b, k, 3] = self.base_ms[b, c]
        self.segments[b, k, 4] = self.base_p99_ms[b, c]
        self.n_segments[b] = k + 1

    def _share_late(self, b: int, c: int, lo: float, hi: float) -> float:
        """Share of requests beyond the objective whose wait is uniform in lo..hi (below 0 = none); Simpson's rule."""
        slo = self.slo_ms[c]
        if slo > 1e12:
            return 0.0
        left = slo - self.shift_ms[b, c]
        rest = self.rest_ms[b, c]
        spread = self.spread[b, c]
        if lo < 0.0:
            lo = 0.0
        if hi <= lo:
            return beyond(rest, spread, left - lo)
        return (
            beyond(rest, spread, left - lo)
            + 4.0 * beyond(rest, spread, left - 0.5 * (lo + hi))
            + beyond(rest, spread, left - hi)
        ) / 6.0

    def _stale(self, b: int, t: int, c: int) -> float:
        """Requests that still wait at the end of the step although their objective has already passed."""
        slo = self.slo_ms[c]
        if self.queue[b, c] <= 0.0 or slo > 1e12:
            return 0.0
        fresh = 0.0
        span = slo / self.dt_ms
        j = t
        while j >= 0 and span > 0.0:
            fresh += self.waiting[b, c, j] * min(1.0, span)
            span -= 1.0
            j -= 1
        return max(0.0, self.queue[b, c] - fresh)

    def _quantile(self, b: int, q: float, tail: int) -> float:
        """Weighted quantile of wait + base over the step's pieces.

        The weight below x is a line between the ends of pieces. Each end that is tried moves one side of the stretch
        that holds the quantile, and most others are then outside.
        """
        n = self.n_segments[b]
        total = 0.0
        low = 1e300
        high = 0.0
        for k in range(n):
            base = self.segments[b, k, 3 + tail]
            total += self.segments[b, k, 0]
            low = min(low, base + max(self.segments[b, k, 1], 0.0))
            high = max(high, base + max(self.segments[b, k, 2], 0.0))
        if high - low < 1e-6 * high:
            return high
        if n == 1:
            lo = self.segments[b, 0, 1]
            wait = lo + q * (self.segments[b, 0, 2] - lo)
            return self.segments[b, 0, 3 + tail] + max(wait, 0.0)
        goal = q * total
        under = self._weight_below(b, low, tail)
        if under >= goal:
            return low
        for k in range(n):
            base = self.segments[b, k, 3 + tail]
            for end in range(1, 3):
                x = base + max(self.segments[b, k, end], 0.0)
                if low < x and x < high:
                    below = self._weight_below(b, x, tail)
                    if below >= goal:
                        high = x
                    else:
                        low = x
                        under = below
        # A piece without width adds its weight at once, maybe at the upper end: the line is measured half-way.
        half = 0.5 * (high - low)
        rise = self._weight_below(b, low + half, tail) - under
        return min(high, low + half * ((goal - under) / rise)) if rise > 0.0 else high

    def _weight_below(self, b: int, x: float, tail: int) -> float:
        """Requests of the step's pieces whose wait + base is ``x`` at most."""
        below = 0.0
        for k in range(self.n_segments[b]):
            base = self.segments[b, k, 3 + tail]
            hi = self.segments[b, k, 2]
            if x >= base + max(hi, 0.0):  # the sum that `_quantile` makes, so that an end of a piece is met exactly
                below += self.segments[b, k, 0]
            elif x >= base:
                lo = self.segments[b, k, 1]
                wait = x - base
                if lo < wait and lo < hi:
                    below += self.segments[b, k, 0] * (wait - lo) / (hi - lo)
        return below

    def _idle_latency(self, b: int, t: int) -> None:
        age = 0.0
        base = self.tau_ms
        high = self.tau_ms
        for c in range(self.n_classes - 1, -1, -1):
            if c == 0 or self.queue[b, c] > 0.0:
                base = self.base_ms[b, c]
                high = self.base_p99_ms[b, c]
            j = self.wait_head[b, c]
            while j <= t and self.waiting[b, c, j] <= DUST:
                j += 1
            if self.queue[b, c] > 0.0 and j <= t:
                age = max(age, (t + 1 - j) * self.dt_ms)
        self.ttft_p50_ms[b] = age + base
        self.ttft_p99_ms[b] = age + high

    def _shed(self, b: int, t: int) -> None:
        """Refuse what the queue cannot hold: lowest class first, newest first."""
        total = 0.0
        for c in range(self.n_classes):
            total += self.queue[b, c]
        over = total - self.queue_limit
        self.rejected[b] = max(over, 0.0)
        c = self.n_classes - 1
        while over > DUST and c >= 0:
            drop = min(over, self.queue[b, c])
            self.queue[b, c] -= drop
            over -= drop
            j = t
            while drop > 1e-12 and j >= 0:
                x = min(self.waiting[b, c, j], drop)
                self.waiting[b, c, j] -= x
                drop -= x
                j -= 1
            c -= 1

    def _report(self, b: int, t: int, w: int, gain: float) -> None:
        """Reported metrics: noise, violations, cost."""
        self.ttft_p50_ms[b] *= self.noise[w, t, 0]
        self.ttft_p99_ms[b] *= self.noise[w, t, 0]
        # A fleet that is down for the whole step produces nothing: its TPOT is capped, not infinite.
        self.tpot_ms[b] = min(self.dt_ms / gain, 10.0 * self.dt_ms) * self.noise[w, t, 1]
        late = self.late_requests[b] + self.rejected[b]
        judged = self.judged_requests[b] + self.rejected[b]
        share = min(1.0, late / judged) if judged > 1e-9 else 0.0
        if self.oom[b] > 0.0:
            late = max(5.0 * late, self.batch_size[b])
            share = min(1.0, max(5.0 * share, self.batch_size[b] / max(judged, self.batch_size[b])))
        self.slo_violations[b] = late
        self.violation_share[b] = share
        queue = 0.0
        for c in range(self.n_classes):
            queue += self.queue[b, c]
        self.queue_requests[b] = queue
        gpus = self.n_replicas * (1.0 + self.prefill_apart[b])
        # A fleet that produces next to nothing is charged as if it made 50 tokens a second: cost stays finite.
        cost = self.price * gpus / max(self.tokens_per_sec[b] / 1000.0, 0.05)
        self.cost_per_1k[b] = cost
        self.cost_so_far[b] += cost
        spec = self.spec[b]
        if spec > 0:
            self.spec_accept_rate[b] = (self._tokens_per_verify(b) - 1.0) / self.spec_length[spec]
        else:
            self.spec_accept_rate[b] = 0.0


def beyond(median_ms: float, spread: float, limit_ms: float) -> float:
    """P(x > limit) for a log-normal x with this median and log standard deviation."""
    if limit_ms <= 0.0:
        return 1.0
    return 0.5 * erfc(log(limit_ms / median_ms) / (spread * 1.4142135623730951))
