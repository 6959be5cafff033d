"""One second of a serving fleet, row by row: the only implementation of the serving dynamics.

Plain Python that the build compiles to C (types in ``serving_kernel.pxd``). A row is one fleet; rows never touch each
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

if not cython.compiled:  # compiled, the same names are the C library's (see serving_kernel.pxd)
    from math import erfc, exp, log, log2

SWEEPS = 3
BISECTIONS = 18


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
        if t == 0:
            self._solve(b, t, 0.5 * self.dt_ms / 10.0)
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
        self.oom[b] = 1.0 if used > self.memory_gb else 0.0
        self.gpu_memory_gb[b] = min(used, self.memory_gb)
        on_prefill_gpus = share * self.disagg_to[b] + (1.0 - share) * self.disagg_from[b]
        self.prefill_apart[b] = on_prefill_gpus
        self.prefill_limit[b] = self.colocated_limit + (self.disagg_limit - self.colocated_limit) * on_prefill_gpus

    def _head_of_line(self, b: int, t: int, w: int) -> None:
        """Mean prompt (tokens) and prefill work (ms) of the requests that could be admitted this step."""
        limit = self.up[b] * self.batch_size[b] + 1.0
        share = self.share_to[b]
        for c in range(self.n_classes):
            left = min(limit, self.queue[b, c])
            tokens = 0.0
            work = 0.0
            taken = 0.0
            j = self.wait_head[b, c]
            while j < t and self.waiting[b, c, j] <= 0.0:
                j += 1
            self.wait_head[b, c] = j
            while j <= t and left > 1e-12:
                x = min(self.waiting[b, c, j], left)
                if x > 0.0:
                    part = x / self.arrivals[w, j, c]
                    tokens += part * self.prompt_tokens[w, j, c]
                    work += part * (
                        share * self.prefill_work_ms[w, j, c, self.tier_to[b]]
                        + (1.0 - share) * self.prefill_work_ms[w, j, c, self.tier_from[b]]
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

    # ------------------------------------------------------------ fixed point of one step

    def _survivors(self, b: int, t: int, gain: float) -> None:
        """Requests in flight before this step that still run after ``gain`` more tokens, and their positions."""
        n = self.n_classes
        x = self.progress[b, t] + gain
        for c in range(n):
            self.survive[b, c] = 0.0
            self.survive_pos[b, c] = 0.0
        if t == 0:
            return
        s = self.age_head[b]
        p = (x - self.progress[b, s]) * self.grid_inv
        i = cython.cast(cython.Py_ssize_t, p)
        if i >= self.grid_cells:
            i = self.grid_cells
            u = 0.0
        else:
            u = p - i
        while s < t:
            p = (x - self.progress[b, s + 1]) * self.grid_inv
            j = cython.cast(cython.Py_ssize_t, p)
            if j >= self.grid_cells:
                j = self.grid_cells
                v = 0.0
            else:
                v = p - j
            for c in range(n):
                d = self.density[b, s, c]
                if d > 0.0:
                    self.survive[b, c] += d * (
                        self.survival_int[i, c]
                        + u * (self.survival_int[i + 1, c] - self.survival_int[i, c])
                        - self.survival_int[j, c]
                        - v * (self.survival_int[j + 1, c] - self.survival_int[j, c])
                    )
                    self.survive_pos[b, c] += d * (
                        self.position_int[i, c]
                        + u * (self.position_int[i + 1, c] - self.position_int[i, c])
                        - self.position_int[j, c]
                        - v * (self.position_int[j + 1, c] - self.position_int[j, c])
                    )
            i = j
            u = v
            s += 1

    def _solve(self, b: int, t: int, gain: float) -> None:
        """Admissions and in-flight requests if every running request gains ``gain`` tokens, and the gain that follows.

        Writes ``admit``, ``room`` (what could have been admitted), ``after`` (in flight at the end), the state of the
        replicas and ``next_gain``.
        """
        up = max(self.up[b], 1e-9)
        self._survivors(b, t, gain)
        p = gain * self.grid_inv
        i = min(cython.cast(cython.Py_ssize_t, p), self.grid_cells)
        u = p - i if i < self.grid_cells else 0.0
        held = 0.0
        running = 0.0
        kv_tokens = 0.0
        for c in range(self.n_classes):
            running += self.survive[b, c]
            keep = self.survive[b, c] / self.in_flight[b, c] if self.in_flight[b, c] > 1e-12 else 0.0
            kv_tokens += self.prompt_in_flight[b, c] * keep + self.survive_pos[b, c]
        slots = up * self.batch_size[b]
        if self.closed_clients > 0.0:
            slots = min(slots, self.closed_clients)
        pool = up * self.kv_pool_tokens[b]
        budget_ms = self.prefill_limit[b] * up * self.dt_ms
        recompute_ms = self.recompute_ms[b]
        budget_ms = max(0.0, budget_ms - recompute_ms)
        thrash = 1.0 + self.recompute_factor * self.overcommit[b]
        work_ms = 0.0
        before = 0.0
        mean_tokens = 0.0
        for c in range(self.n_classes):
            stay = (self.survival_int[i, c] + u * (self.survival_int[i + 1, c] - self.survival_int[i, c])) / gain
            stay_pos = (self.position_int[i, c] + u * (self.position_int[i + 1, c] - self.position_int[i, c])) / gain
            each_ms = self.head_work_ms[b, c] * self.work_ratio[b, c] * thrash
            room = max(0.0, slots - running) / stay
            room = min(room, budget_ms / max(each_ms, 1e-9))
            # An engine admits a request when its prompt fits into the free part of the pool.
            each_kv = self.head_prompt[b, c] * stay + stay_pos
            room = min(room, max(0.0, self.kv_fill * pool - kv_tokens) / max(each_kv, 1e-9))
            if running + self.queue[b, c] <= 1.0:
                room = max(room, 1.0)  # an empty replica always takes one request, however long
            admit = min(self.queue[b, c], room)
            self.room[b, c] = max(room, admit)
            self.admit[b, c] = admit
            running += admit * stay
            kv_tokens += admit * each_kv
            budget_ms -= admit * each_ms
            if budget_ms < 0.0:
                budget_ms = 0.0
            work_ms += admit * each_ms
            self.after[b, c] = self.survive[b, c] + admit * stay
            self.after_pos[b, c] = self.survive_pos[b, c] + admit * stay_pos
            keep = self.survive[b, c] / self.in_flight[b, c] if self.in_flight[b, c] > 1e-12 else 0.0
            prompts = self.prompt_in_flight[b, c]
            self.after_prompt[b, c] = prompts * keep + admit * stay * self.head_prompt[b, c]
            before += self.in_flight[b, c]
            held += 0.5 * (self.in_flight[b, c] + self.after[b, c])
            mean_tokens += 0.5 * (
                prompts + self.after_prompt[b, c] + self.position_in_flight[b, c] + self.after_pos[b, c]
            )
        self._advance(b, up, held, mean_tokens, work_ms + recompute_ms)

    def _advance(self, b: int, up: float, held: float, tokens: float, work_ms: float) -> None:
        """Tokens each request gains in a step with ``held`` requests holding ``tokens`` KV tokens on ``up`` replicas."""
        n = held / up
        context = tokens / max(held, 1e-9)
        if context < 1.0:
            context = 1.0
        fit = self.kv_pool_tokens[b] / (context + self.block_slack)
        resident = min(n, fit)
        over = (n - resident) / n if n > resident else 0.0
        resident = max(resident, 1e-9)
        spec = self.spec[b]
        share = self.share_to[b]
        ln = log2(max(resident, 1.0))
        lc = log2(max(context, self.context_floor))
        iteration = self._decode_ms(self.tier_to[b], spec, ln, lc)
        if share < 1.0:
            iteration = share * iteration + (1.0 - share) * self._decode_ms(self.tier_from[b], spec, ln, lc)
        load = min(work_ms / (up * self.dt_ms), self.prefill_limit[b])
        stolen = load * (1.0 - self.prefill_apart[b])
        per_verify = self._tokens_per_verify(b)
        tpot = iteration / per_verify / (1.0 - stolen)
        if n > resident:
            tpot *= n / resident
        if self.oom[b] > 0.0:
            tpot *= 2.0
        self.overcommit[b] = over
        for c in range(self.n_classes):
            self.work_ratio[b, c] = self._work_ratio(c, self.tier_to[b], ln, load)
        self.prefill_load[b] = load
        self.iteration_ms[b] = iteration
        self.resident[b] = resident
        self.kv_context[b] = context
        self.tpot_ms[b] = tpot
        gain = self.dt_ms / tpot
        if self.up[b] < 1e-6:
            gain = 1e-9
        self.next_gain[b] = max(gain, 1e-9)

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

    def _decode_ms(self, tier: int, spec: int, log2_n: float, log2_context: float) -> float:
        """Time of one decode iteration: bilinear on the logarithms of the table's grid."""
        i = 0
        while i < self.n_batch_points - 2 and log2_n >= self.log2_batch[i + 1]:
            i += 1
        j = 0
        while j < self.n_context_points - 2 and log2_context >= self.log2_context[j + 1]:
            j += 1
        u = (log2_n - self.log2_batch[i]) / (self.log2_batch[i + 1] - self.log2_batch[i])
        v = (log2_context - self.log2_context[j]) / (self.log2_context[j + 1] - self.log2_context[j])
        return exp(
            (1.0 - u)
            * ((1.0 - v) * self.log_decode_ms[tier, spec, i, j] + v * self.log_decode_ms[tier, spec, i, j + 1])
            + u
            * ((1.0 - v) * self.log_decode_ms[tier, spec, i + 1, j] + v * self.log_decode_ms[tier, spec, i + 1, j + 1])
        )

    def _work_ratio(self, c: int, tier: int, log2_n: float, load: float) -> float:
        """Prefill work of a request relative to the listed one, fused into ``2**log2_n`` running requests.

        A lone prompt rides on decode iterations that stream the weights anyway; the fuller the prefill, the closer its
        cost comes to that of iterations full of prompts.
        """
        i = 0
        while i < self.n_batch_points - 2 and log2_n >= self.log2_batch[i + 1]:
            i += 1
        u = (log2_n - self.log2_batch[i]) / (self.log2_batch[i + 1] - self.log2_batch[i])
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
        kv = 0.0
        lost = 0.0
        for c in range(self.n_classes):
            self.density[b, t, c] = self.admit[b, c] / gain
            done += self.in_flight[b, c] + self.admit[b, c] - self.after[b, c]
            held += 0.5 * (self.in_flight[b, c] + self.after[b, c])
            self.in_flight[b, c] = self.after[b, c]
            self.prompt_in_flight[b, c] = self.after_prompt[b, c]
            self.position_in_flight[b, c] = self.after_pos[b, c]
            self.queue[b, c] -= self.admit[b, c]
            if self.queue[b, c] < 1e-9:
                self.queue[b, c] = 0.0
            total += self.admit[b, c]
            kv += self.after_prompt[b, c] + self.after_pos[b, c]
            # Requests on replicas that restart next are computed anew: their prompt and what they had written.
            scale = 1.0
            if self.after[b, c] > 1e-9:
                scale = (self.after_prompt[b, c] + self.after_pos[b, c]) / (self.after[b, c] * self.head_prompt[b, c])
            lost += self.after[b, c] * self.head_work_ms[b, c] * scale
        self.recompute_ms[b] = self.restarted[b] * lost
        s = self.age_head[b]
        while s < t and x - self.progress[b, s + 1] > self.longest_output:
            s += 1
        self.age_head[b] = s
        self.admitted[b] = total
        self.completed[b] = done
        self.running_requests[b] = held
        self.tokens_per_sec[b] = held * gain / self.dt_s
        pool = max(self.up[b], 1e-9) * self.kv_pool_tokens[b]
        self.kv_occupancy[b] = min(1.0, kv / max(pool, 1.0))
        self.eviction_events[b] = self.overcommit[b] * held * self.eviction_rate

    def _measure_latency(self, b: int, t: int, w: int) -> None:
        """TTFT of what was admitted: waits from the arrival and admission curves plus prefill and iteration times."""
        up = max(self.up[b], 1e-9)
        busy = min(1.0, self.running_requests[b] / up)
        load = self.prefill_load[b]
        apart = self.prefill_apart[b]
        iteration = self.iteration_ms[b]
        tier = self.tier_to[b]
        late = 0.0
        judged = 0.0
        self.n_segments[b] = 0
        for c in range(self.n_classes):
            prompt = self.head_prompt[b, c]
            alone = self.head_work_ms[b, c] * self.alone_ratio[c, tier]
            fused = self.head_work_ms[b, c] * self.work_ratio[b, c]
            chunks = max(1.0, prompt / self.chunk_tokens)
            queueing = 0.5 * load / (1.0 - min(load, 0.95)) * fused * (1.0 + self.work_cv2[c])
            here = max(alone, busy * iteration * chunks + fused) + 0.5 * busy * iteration / (1.0 - min(load, 0.9))
            there = alone + prompt * self.handoff_ms_per_token
            base = self.tau_ms + queueing + (1.0 - apart) * here + apart * there
            spread = self.jitter * self.jitter + self.work_cv2[c] * (fused / base) * (fused / base)
            self.base_ms[b, c] = base
            self.base_p99_ms[b, c] = base * exp(2.326 * spread**0.5)
            late += self._segments(b, t, w, c, base, spread**0.5)
            judged += self.admit[b, c]
            stale = self._stale(b, t, c)
            late += stale
            judged += stale
        self.late_requests[b] = late
        self.judged_requests[b] = judged
        if self.n_segments[b] == 0:
            # Nobody was admitted: report what the head of the line has waited, or what a new request would get.
            self._idle_latency(b, t)
        else:
            self.ttft_p50_ms[b] = self._quantile(b, 0.50, 0)
            self.ttft_p99_ms[b] = max(self._quantile(b, 0.99, 1), self.ttft_p50_ms[b])

    def _segments(self, b: int, t: int, w: int, c: int, base: float, spread: float) -> float:
        """Walk the FIFO queue over what was admitted; keep the waits as uniform pieces; return how many were late."""
        admit = self.admit[b, c]
        if admit <= 1e-9:
            return 0.0
        room = self.room[b, c]
        if admit < self.queue[b, c] + admit - 1e-9:
            room = admit  # something was left behind: admissions were spread over the whole step
        room = max(room, admit)
        left = admit
        taken = 0.0
        late = 0.0
        closed_wait = 0.0
        if self.closed_clients > 0.0:
            closed_wait = max(0.0, self.closed_clients - up_slots(self.up[b], self.batch_size[b])) / admit * self.dt_ms
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
                    lo = closed_wait
                    hi = closed_wait
                late += x * self._share_late(min(lo, hi), max(lo, hi), base, spread, self.slo_ms[c])
                self._keep_segment(b, c, x, min(lo, hi), max(lo, hi), spread)
                self.waiting[b, c, j] = have - x
                taken += x
                left -= x
            if left > 1e-12 or self.waiting[b, c, j] <= 1e-12:
                j += 1
        self.wait_head[b, c] = min(j, t + 1)
        return late

    def _keep_segment(self, b: int, c: int, weight: float, lo: float, hi: float, spread: float) -> None:
        k = self.n_segments[b]
        if self.record_rows > 0:
            r = self.n_recorded[b]
            if r < self.record_rows:
                self.record[b, r, 0] = c
                self.record[b, r, 1] = weight
                self.record[b, r, 2] = lo
                self.record[b, r, 3] = hi
                self.record[b, r, 4] = self.base_ms[b, c]
                self.record[b, r, 5] = spread
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

    def _share_late(self, lo: float, hi: float, base: float, spread: float, slo: float) -> float:
        """Share of requests beyond the objective whose wait is uniform in lo..hi (below 0 = none); Simpson's rule."""
        if slo > 1e12:
            return 0.0
        if lo < 0.0:
            lo = 0.0
        if hi <= lo:
            return beyond(lo + base, spread, slo)
        return (
            beyond(lo + base, spread, slo)
            + 4.0 * beyond(0.5 * (lo + hi) + base, spread, slo)
            + beyond(hi + base, spread, slo)
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
        """Weighted quantile of wait + base over the step's pieces, by bisection to a millionth of the range."""
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
        goal = q * total
        for _ in range(BISECTIONS):
            mid = 0.5 * (low + high)
            below = 0.0
            for k in range(n):
                base = self.segments[b, k, 3 + tail]
                wait = mid - base
                if wait >= 0.0:
                    lo = self.segments[b, k, 1]
                    hi = self.segments[b, k, 2]
                    if wait >= hi:
                        below += self.segments[b, k, 0]
                    elif wait > lo:
                        below += self.segments[b, k, 0] * (wait - lo) / (hi - lo)
            if below >= goal:
                high = mid
            else:
                low = mid
        return high

    def _idle_latency(self, b: int, t: int) -> None:
        age = 0.0
        base = self.tau_ms
        high = self.tau_ms
        for c in range(self.n_classes - 1, -1, -1):
            if c == 0 or self.queue[b, c] > 0.0:
                base = self.base_ms[b, c]
                high = self.base_p99_ms[b, c]
            j = self.wait_head[b, c]
            while j <= t and self.waiting[b, c, j] <= 0.0:
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
        while over > 1e-9 and c >= 0:
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
        self.tpot_ms[b] = self.dt_ms / gain * self.noise[w, t, 1]
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


def beyond(mean_ms: float, spread: float, slo_ms: float) -> float:
    """P(TTFT > slo) for a log-normal TTFT with this median and log standard deviation."""
    return 0.5 * erfc(log(slo_ms / mean_ms) / (spread * 1.4142135623730951))


def up_slots(up: float, batch_size: float) -> float:
    """Slots of a fleet."""
    return up * batch_size
