"""Draft tokens of a test engine, accepted with the probability that each request names; never for real traffic.

A random model repeats itself, so n-gram drafts are accepted nearly always. With ``--worker-extension-cls
synthetic_acceptance.SyntheticAcceptance`` (this folder on vLLM's ``PYTHONPATH``) every sequence gets as many drafts as
the scheduler allows, and each is accepted with the request's own probability, ``"vllm_xargs": {"acceptance": 0.8}``,
until the first that is rejected. What is written are the model's greedy tokens. vLLM's own ``rejection_sample_method:
synthetic`` has one rate per position for all requests, and its kernels for CPUs ignore even that.

The engine loads this file by itself, so it imports vLLM and the standard library only.
"""

import random

from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.ngram_proposer import NgramProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

DEFAULT = 0.0
"""Acceptance of a request that names none."""
ANY_TOKEN = 7
"""Token id of all drafts; which one is proposed does not matter."""

RANDOM = random.Random(0)
OF_BATCH = []
"""Acceptance of the requests that are sampled now, in the order of the batch."""


class SyntheticAcceptance:
    """Mixed into vLLM's worker; importing it replaces the functions below."""


def propose(self, num_speculative_tokens, sampled_token_ids, *args, **kwargs):
    return [[ANY_TOKEN] * num_speculative_tokens if sampled else [] for sampled in sampled_token_ids]


def rejection_sample(
    draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits, bonus, *args, **kw
):
    best = target_logits.argmax(dim=-1).tolist()
    written, first = [], 0
    of_batch = OF_BATCH or [DEFAULT] * len(num_draft_tokens)  # empty when vLLM warms up
    for drafts, acceptance, last in zip(num_draft_tokens, of_batch, bonus.flatten().tolist(), strict=True):
        accepted = 0
        while accepted < drafts and RANDOM.random() < acceptance:
            accepted += 1
        # The token after the accepted ones: the model's own at the draft that was rejected, or after all of them.
        tokens = [*best[first : first + drafts], last][: accepted + 1]
        written.append(tokens + [rejection_sampler.PLACEHOLDER_TOKEN_ID] * (max_spec_len + 1 - len(tokens)))
        first += drafts
    return draft_token_ids.new_tensor(written)  # 32-bit integers, as the tokens that vLLM's own function returns


def acceptance_of(request):
    arguments = (request.sampling_params and request.sampling_params.extra_args) or {}
    return float(arguments.get("acceptance", DEFAULT))


def sample(self, *args, **kwargs):
    OF_BATCH[:] = [acceptance_of(self.requests[each]) for each in self.input_batch.req_ids]
    return own_sample(self, *args, **kwargs)


own_sample = GPUModelRunner._sample  # noqa: SLF001 - vLLM has no other place where the requests of a batch are known
GPUModelRunner._sample = sample  # noqa: SLF001
NgramProposer.propose = propose
rejection_sampler.rejection_sample = rejection_sample
