"""Training a language model to run the fleet, with TRL's GRPO: one script for a tiny random model and a real one.

    python -m agents.integrations.trl_grpo --url http://localhost:7860                          # tiny, random, on a CPU
    python -m agents.integrations.trl_grpo --url http://localhost:7860 --model Qwen/Qwen3-0.6B  # a GPU's worth of work
    python -m agents.integrations.trl_grpo --url http://localhost:7860 --model smollm2 --choices --learning-rate 1e-5

The model plays with tools. With ``--choices`` it answers one question with one letter instead, which sets the batch
size of a whole episode: the smallest task that shows whether the reward climbs. ``smollm2`` is
:mod:`agents.integrations.smollm2`, small enough for a CPU.

It needs the extra ``trl`` (TRL 1.16 is tested). Without ``--model`` it downloads nothing: it makes a
model of random weights and a tokenizer of single bytes in which some whole tool calls are one token each, so that even
a random model plays. That shows the whole loop: rollouts on the server, tool calls, rewards, steps of the optimiser.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from agents.integrations.smollm2 import write_model
from agents.integrations.text_episode import FleetEpisode
from agents.integrations.trl import fleet_tools_at
from inferencegym.client.http import DEFAULT_URL

CALLS = [
    *({"name": "set_knobs", "arguments": {"batch_size": size, "kv_budget": 0.9}} for size in (16, 64, 128)),
    *({"name": "set_knobs", "arguments": {"quant_tier": tier}} for tier in (0, 1)),
    *({"name": "run", "arguments": {"seconds": seconds}} for seconds in (5, 20, 60)),
]
"""Tool calls that the tiny model can make."""
TOOL_CALLS: Final = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS]
SMOLLM2: Final = "smollm2"
PROMPT = "Run the fleet for a whole episode: set knobs, let time pass, look, and adapt."
CHOICES: Final = {"A": 8, "B": 32, "C": 64, "D": 128, "E": 512}
"""Batch sizes that a model chooses from."""
QUESTION: Final = (
    "A busy server of a language model waits for your setting: how many requests should it run at once? "
    + ", ".join(f"{letter}: {size}" for letter, size in CHOICES.items())
    + ". Answer with one letter."
)


def chosen(answer: str) -> str | None:
    """The letter of :data:`CHOICES` that an answer begins with; None without one."""
    letter = re.match(rf"\s*([{''.join(CHOICES)}])\b", answer)
    return None if letter is None else letter[1]


def choice_scores(url: str, episode_length: int) -> Callable[..., list[float]]:
    """Reward function for :data:`QUESTION`: the score of an episode that is played with the chosen batch size.

    An answer without a choice is played with the knobs that the episode starts with. The shares of the choices are
    logged.
    """

    def reward(
        completions: Sequence[Sequence[dict[str, str]]],
        task_id: Sequence[int],
        seed: Sequence[int],
        log_metric: Callable[[str, float], None] = lambda name, value: None,
        **_: Any,
    ) -> list[float]:
        letters = [chosen(completion[-1]["content"]) for completion in completions]
        for letter in (*CHOICES, None):
            log_metric(f"chosen/{letter}", letters.count(letter) / len(letters))
        scores = []
        for letter, task, number in zip(letters, task_id, seed, strict=True):
            with closing(FleetEpisode(url, task, number, {"episode_length": episode_length, "hold": 20})) as episode:
                episode.set({} if letter is None else {"batch_size": CHOICES[letter]})
                scores.append(episode.pay())
        return scores

    return reward


def tiny_model(words: Sequence[str]) -> tuple[Any, Any, list[int]]:
    """A tiny Qwen3 of random weights, a tokenizer with Qwen3's chat template, and the tokens that it may not say.

    It says ``words``, each of which is one token.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl.chat_template_utils import qwen3_chat_template

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # Not special: a parser of tool calls has to see them.
    tools = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    bpe.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    bpe.add_tokens([AddedToken(word, special=False) for word in (*tools, *words)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=marks[0], eos_token=marks[2])
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
    said = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(words)}
    return Qwen3ForCausalLM(config), tokenizer, [token for token in range(len(tokenizer)) if token not in said]


def smollm2(folder: Path, with_tools: bool) -> tuple[Any, Any, None]:
    """SmolLM2, and its tokenizer; with Qwen3's chat template if it has to play with tools, which its own leaves out."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen3_chat_template

    write_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if with_tools:
        tokenizer.chat_template = qwen3_chat_template
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), tokenizer, None


def train(
    url: str,
    model: str | None,
    steps: int,
    out: str,
    task_id: int | None = None,
    episode_length: int = 60,
    *,
    choices: bool = False,
    learning_rate: float = 1e-6,
) -> list[Any]:
    """Train for some steps of the optimiser; returns what the trainer logged.

    With ``choices`` the model answers :data:`QUESTION`; ``task_id`` is 1 then, and else 3, unless it is given.
    """
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    weights, tokenizer, unsaid = model, None, None
    if model is None:
        weights, tokenizer, unsaid = tiny_model(list(CHOICES) if choices else TOOL_CALLS)
    elif model == SMOLLM2:
        weights, tokenizer, unsaid = smollm2(Path(out) / SMOLLM2, with_tools=not choices)
    rows = [
        {
            "prompt": [{"role": "user", "content": QUESTION if choices else PROMPT}],
            "task_id": task_id or (1 if choices else 3),
            "seed": seed,
            "episode_length": episode_length,
        }
        for seed in range(1, 101)
    ]
    on_cpu = model is None or not torch.cuda.is_available()
    generated = 8 if choices else 4
    settings = GRPOConfig(
        output_dir=out,
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=generated,
        num_generations=generated,
        max_completion_length=1 if choices else 4_096,
        max_tool_calling_iterations=20 if model is not None else 2,
        generation_kwargs={"suppress_tokens": unsaid, "max_new_tokens": 1 if choices else 8} if unsaid else None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=model is not None,
        use_cpu=on_cpu,
    )
    trainer = GRPOTrainer(
        model=weights,
        processing_class=tokenizer,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=choice_scores(url, episode_length) if choices else None,
        environment_factory=None if choices else fleet_tools_at(url),
    )
    trainer.train()
    return list(trainer.state.log_history)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on the fleet")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default %(default)s)")
    parser.add_argument("--model", help=f"a model with tool calls, or {SMOLLM2}; without it, a tiny random one")
    parser.add_argument("--choices", action="store_true", help="one question with five answers, instead of tools")
    parser.add_argument("--steps", type=int, default=3, help="steps of the optimiser (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-6, help="constant (default %(default)s)")
    parser.add_argument("--out", default="runs/grpo", help="where the trainer writes (default %(default)s)")
    args = parser.parse_args()
    log = train(args.url, args.model, args.steps, args.out, choices=args.choices, learning_rate=args.learning_rate)
    for entry in log:
        print({name: entry[name] for name in ("step", "reward", "loss") if name in entry})  # noqa: T201


if __name__ == "__main__":
    main()
