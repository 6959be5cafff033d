"""What language models write is read by one rule: the last complete JSON object outside of their thinking."""

from __future__ import annotations

from typing import Any

import pytest

from agents.answers import last_object, read_knobs
from inferencegym.errors import InvalidActionError
from inferencegym.models import NAIVE_ACTION

ANSWER = {"batch_size": 8}
THOUGHT = 'The queue grows, so {"batch_size": 512}? No: '


@pytest.mark.parametrize(
    "text",
    [
        '{"batch_size": 8}',
        'First {"a": 1}, no: {"batch_size": 8}.',
        '{"action": {"batch_size": 8}}',
        "{'batch_size': 8,}",
        '```json\n{"batch_size":\n 8}\n```\nThat should empty the queue.',
        # Qwen3 and DeepSeek-R1: a block, or only its end where the chat template wrote its beginning
        f'<think>\n{THOUGHT}\n</think>\n\n{{"batch_size": 8}}',
        f'{THOUGHT}\n</think>\n\n{{"batch_size": 8}}<|im_end|>',
        f'{{"batch_size": 8}}\n<think>{THOUGHT} more of it, cut off',
        # Qwen3 and Hermes: a tool call as text
        '<tool_call>\n{"name": "set_knobs", "arguments": {"batch_size": 8}}\n</tool_call>',
        # gpt-oss: the last of its channels, with marks and without
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>"
        '{"batch_size": 8}<|return|>',
        f'analysis{THOUGHT}assistantfinal{{"batch_size": 8}}',
        # Llama 3: a tool call after its mark
        '<|python_tag|>{"name": "set_knobs", "parameters": {"batch_size": 8}}<|eot_id|>',
        '{"type": "function", "name": "set_knobs", "parameters": "{\\"batch_size\\": 8}"}',
        # Claude: tags of its own, then prose around a fence
        f'<thinking>{THOUGHT}</thinking>Lower it.\n\n```json\n{{"batch_size": 8}}\n```\n\nTell me {{if}} it helps.',
        # Mistral
        f'[THINK]{THOUGHT}[/THINK]{{"batch_size": 8}}',
    ],
)
def test_the_last_object_outside_of_thoughts_is_the_answer(text: str) -> None:
    assert last_object(text) == ANSWER


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no idea",
        "}{ no [1, 2] {broken",
        f"<think>{THOUGHT} and cut off",
        f"<|channel|>analysis<|message|>{THOUGHT}",
        f"analysis{THOUGHT}",
    ],
)
def test_a_text_without_an_object_and_a_thought_without_an_answer_give_none(text: str) -> None:
    assert last_object(text) is None


def test_braces_in_texts_and_broken_objects_before_the_answer_do_no_harm() -> None:
    assert last_object('{"reason": "the {queue} grows }", "batch_size": 8}')["batch_size"] == 8  # type: ignore[index]
    assert last_object('{ broken {"a": } then {"batch_size": 8}') == ANSWER


def test_what_an_answer_leaves_out_stays_and_other_keys_are_left_aside() -> None:
    before = {**NAIVE_ACTION.to_dict(), "batch_size": 64}
    chosen = read_knobs({"quant_tier": "int8", "prefill_disagg": "true", "kv_budget": "0.5", "why": "..."}, before)
    assert chosen == {**before, "quant_tier": 1, "prefill_disagg": True, "kv_budget": 0.5}
    assert read_knobs({}, before) == before


@pytest.mark.parametrize("answer", [{"a": 1}, {"batch_size": "many"}, {"batch_size": 9999}, {"kv_budget": None}])
def test_an_answer_that_is_no_action_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(InvalidActionError):
        read_knobs(answer, NAIVE_ACTION.to_dict())
