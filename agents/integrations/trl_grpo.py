"""Training a language model to run the fleet, with TRL's GRPO: one script for a tiny random model and a real one.

    python -m agents.integrations.trl_grpo --url http://localhost:7860                          # tiny, random, on a CPU
    python -m agents.integrations.trl_grpo --url http://localhost:7860 --model Qwen/Qwen3-0.6B  # a GPU's worth of work

It needs the extra ``trl`` (TRL 1.16 is tested). Without ``--model`` it downloads nothing: it makes a
model of random weights and a tokenizer of single bytes in which some whole tool calls are one token each, so that even
a random model plays. That shows the whole loop: rollouts on the server, tool calls, rewards, steps of the optimiser.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from agents.integrations.trl import fleet_tools_at
from inferencegym.client.http import DEFAULT_URL

CALLS = [
    *({"name": "set_knobs", "arguments": {"batch_size": size, "kv_budget": 0.9}} for size in (16, 64, 128)),
    *({"name": "set_knobs", "arguments": {"quant_tier": tier}} for tier in (0, 1)),
    *({"name": "run", "arguments": {"seconds": seconds}} for seconds in (5, 20, 60)),
]
"""Tool calls that the tiny model can make."""
PROMPT = "Run the fleet for a whole episode: set knobs, let time pass, look, and adapt."


def tiny_model() -> tuple[Any, Any, list[int]]:
    """A tiny Qwen3 of random weights, a tokenizer with Qwen3's chat template, and the tokens that it may not say."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl.chat_template_utils import qwen3_chat_template

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # Not special: a parser of tool calls has to see them.
    tools = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    words.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    words.add_tokens([AddedToken(mark, special=False) for mark in tools])
    before = words.get_vocab_size()
    calls = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS]
    words.add_tokens([AddedToken(call, special=False) for call in calls])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=marks[0], eos_token=marks[2])
    tokenizer.chat_template = qwen3_chat_template
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=32_768,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    said = {tokenizer.eos_token_id, *range(before, len(tokenizer))}
    return Qwen3ForCausalLM(config), tokenizer, [token for token in range(len(tokenizer)) if token not in said]


def train(url: str, model: str | None, steps: int, out: str, task_id: int = 3, episode_length: int = 60) -> list[Any]:
    """Train for some steps of the optimiser; returns what the trainer logged."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    weights, tokenizer, unsaid = (model, None, None) if model is not None else tiny_model()
    rows = [
        {
            "prompt": [{"role": "user", "content": PROMPT}],
            "task_id": task_id,
            "seed": seed,
            "episode_length": episode_length,
        }
        for seed in range(1, 101)
    ]
    settings = GRPOConfig(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4_096,
        max_tool_calling_iterations=20 if model is not None else 2,
        generation_kwargs={"suppress_tokens": unsaid, "max_new_tokens": 8} if model is None else None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=model is not None,
        use_cpu=model is None,
    )
    trainer = GRPOTrainer(
        model=weights,
        processing_class=tokenizer,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        environment_factory=fleet_tools_at(url),
    )
    trainer.train()
    return list(trainer.state.log_history)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on the fleet")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default %(default)s)")
    parser.add_argument("--model", help="a model with tool calls; without it, a tiny random one")
    parser.add_argument("--steps", type=int, default=3, help="steps of the optimiser (default %(default)s)")
    parser.add_argument("--out", default="runs/grpo", help="where the trainer writes (default %(default)s)")
    args = parser.parse_args()
    for entry in train(args.url, args.model, args.steps, args.out):
        print({name: entry[name] for name in ("step", "reward", "loss") if name in entry})  # noqa: T201


if __name__ == "__main__":
    main()
