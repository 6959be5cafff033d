"""PPO from first step to saved policy, with Stable-Baselines3 on the native vector environment.

Read it from top to bottom: settings, training, what is written on the way, export to plain arrays. Six hundred thousand
steps take a minute or two on two cores.

    python -m agents.ppo_demo        trains on task 3, then compares the policy with other agents
    inferencegym train --help        trains as you say: another task, number of steps, a server, --from-scratch

What makes it work here:

- Steps pay their share of the grade (``reward="grade"``). The formula of the reward pays for something else.
- A step holds its knobs for some seconds, many at first and fewer later. Noise that moves five knobs every second keeps
  a fleet from ever serving normally, so that every small change looks as bad as every other; settings held for twenty
  seconds can be told apart, and what they taught is then refined.
- The policy sees the knobs in force and how long they have been (``observation="full"``): it chooses again, not anew.
- Knobs are levels to choose from, not numbers with noise on them: a categorical policy can be almost certain of the
  precision and still try every batch size.
- Of all policies on the way the one that scores highest on validation traffic is kept, so more steps do not end lower.
- Rewards are scaled to returns of order one: gradients are clipped by their joint norm, and the value function's would
  otherwise leave nothing for the policy's.

Without ``from_scratch`` training starts from a sensible policy: some of the steps (``start_share`` at most) try
constant settings of the knobs and watch the rule-based heuristic, and the network is fitted to what is graded higher.
That policy is scored; then it is made less certain, since PPO learns nothing about levels that are never tried.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList

from agents.episodes import run_episodes
from agents.evaluate import bracketed_score, compare
from agents.integrations.sb3 import SB3VecEnv
from agents.policies.autoscalers import ReplicaPlan
from agents.policies.ppo import PolicyFile, PpoAgent
from agents.policies.switching_policy import ActionsAgent
from agents.protocol import Agent
from agents.registry import make_agent
from agents.seeds import HELD_OUT_SEEDS, VALIDATION_SEEDS
from env.batch import ServingBatch
from env.vector import VectorInferenceEnv
from inferencegym.errors import InvalidConfigError
from inferencegym.seeds import episode_seed
from inferencegym.spaces.actions import action_mask, snap
from inferencegym.spaces.formats import LEVELS, ActionCodec, ObservationCodec, action_codec, knob_levels
from inferencegym.tasks import EpisodeConfig, TaskId, TaskSpec, get_task
from inferencegym.vector_env import AutoresetVectorEnv

PLANNED_LOGIT: Final = 12.0
"""Logit above the others of a level that is not to be left: three decisions in ten thousand do."""
MANY_REPLICAS_LOGIT: Final = 2.0
"""Logit of the most replicas above that of one, at the start."""
OBSERVATION: Final = "full"
ACTION: Final = "discrete"


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of a training run: seconds that a step holds its knobs, share of the scheduled steps, entropy bonus."""

    hold: int
    share: float
    ent_coef: float


@dataclass(frozen=True, slots=True)
class PpoSettings:
    """Hyperparameters; a step is one decision in one fleet."""

    n_envs: int = 64
    stages: tuple[Stage, ...] = (Stage(20, 0.2, 0.03), Stage(8, 0.4, 0.02), Stage(4, 0.4, 0.003))
    schedule_steps: int = 600_000
    """Steps over which stages follow each other and the learning rate falls; a longer run goes on as it ended there."""
    from_scratch: bool = False
    """Start from a random network, else from what pretraining finds."""
    rollout_steps: int = 6400
    n_minibatches: int = 8
    n_epochs: int = 5
    gamma_per_second: float = 0.998
    gae_lambda: float = 0.95
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4
    clip_range: float = 0.2
    reward: str = "grade"
    reward_scale: float = 0.1
    compressed_below: float = np.inf
    """Learn from -c * (1 + log(-r / c)) where a reward r is below -c: on tasks that scale each request of a long queue
    lowers the grade again in every second, without a bound."""
    action: str = ACTION
    """Format of the actions: levels of all knobs, or from scratch ``"replicas"`` alone, with the knobs of each task's
    own capacity plan."""
    planned: bool = False
    """Keep all knobs but ``replicas`` as the capacity plan sets them, as the other autoscalers do: exploration tries
    numbers of replicas, and does not restart them for another precision."""
    hidden: tuple[int, ...] = (128, 128)
    teacher: str = "heuristic"
    """Agent that pretraining may imitate; empty for none."""
    start_share: float = 0.3
    """Largest share of all steps that pretraining may take; where it would take more, it is left out."""
    smoothing: float = 0.05
    """Probability that pretraining leaves to all levels of a knob together (label smoothing)."""
    kept_share: float = 0.3
    """Share of a pretrained network's weights that PPO starts from; the rest is random, so that it can learn on."""
    passes: int = 3_000
    """Gradient steps of pretraining."""
    torch_threads: int = 1

    @property
    def n_steps(self) -> int:
        """Steps of each environment from one update to the next."""
        return max(1, self.rollout_steps // self.n_envs)


def settings_for(task: TaskSpec, **chosen: Any) -> PpoSettings:
    """The settings for a task, but for those chosen.

    On a task that scales, decisions come sooner, since a replica takes seconds to start, and their effects end sooner.
    All knobs but the replicas are those of the capacity plan, rewards are compressed, and rare overloads need more
    episodes: the schedule is four times as long.
    """
    if task.fleet.max_replicas is None:
        return PpoSettings(**chosen)
    usual: dict[str, Any] = {
        "n_envs": 128,
        "stages": (Stage(8, 0.15, 0.03), Stage(4, 0.65, 0.015), Stage(2, 0.2, 0.005)),
        "schedule_steps": 2_400_000,
        "rollout_steps": 12_800,
        "gamma_per_second": 0.98,
        "final_learning_rate": 5e-5,
        "compressed_below": 1.0,
        "planned": True,
        "teacher": "planner",
    }
    return PpoSettings(**{**usual, **chosen})


@dataclass(frozen=True, slots=True)
class Scored:
    """Mean scores of the policy after so many steps, on validation and on held-out seeds."""

    step: int
    validation: float
    held_out: float


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training run: its files, its episodes as (step, return), and the scores on the way."""

    model: PPO
    policy: PolicyFile
    episodes: list[tuple[int, float]]
    scores: list[Scored]
    out: Path


MakeEnvs = Callable[[int], AutoresetVectorEnv]
"""Makes the environments of a stage, given the seconds that a step holds."""


def local_envs(task_id: TaskId, settings: PpoSettings, hold: int) -> AutoresetVectorEnv:
    """Environments in this process, as :func:`train` wants them."""
    return VectorInferenceEnv(
        settings.n_envs,
        task_id,
        reward=settings.reward,
        hold=hold,
        observation=OBSERVATION,
        action=settings.action,
        autoreset_mode="SameStep",
    )


def train(
    make_envs: MakeEnvs,
    out: str | Path,
    *,
    steps: int = 600_000,
    seed: int = 0,
    settings: PpoSettings | None = None,
    resume: bool = False,
    progress: bool = True,
    label: str = "",
    score_every: int = 20_000,
    score_on: Sequence[TaskSpec] = (),
) -> Trained:
    """Train PPO for ``steps`` steps in all and leave ``out`` with everything about the run.

    Files: ``policy.npz`` (the best on validation seeds, as plain arrays, for ``ppo:FILE``), ``model.zip``
    (Stable-Baselines3, the last), ``checkpoints/``, ``episodes.csv`` (step, return), ``scores.csv`` (step, mean score
    on validation and on held-out seeds), ``curve.png``, ``settings.json`` and TensorBoard events. ``resume`` continues
    from the newest checkpoint up to ``steps``. Environments must offer the formats ``OBSERVATION`` and
    ``settings.action`` in SAME_STEP mode. Scores are taken, and checkpoints left, every ``score_every`` steps and after
    every stage; they are means over the tasks of ``score_on``, unless told the environments' own.
    """
    settings = settings or PpoSettings()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(settings.torch_threads)
    (out / "settings.json").write_text(json.dumps({"steps": steps, "seed": seed, **asdict(settings)}, indent=1) + "\n")
    files = RunFiles(out, resume)
    provenance = {"seed": seed, "settings": asdict(settings)}
    scheduled = min(steps, settings.schedule_steps)
    shares = np.cumsum([stage.share for stage in settings.stages])
    ends = [*np.rint(shares[:-1] / shares[-1] * scheduled).astype(int).tolist(), steps]
    model = files.newest_model()
    done, best = (0 if model is None else model.num_timesteps), files.best_policy()
    if model is None and not settings.from_scratch:
        last = settings.stages[-1]
        with opened(make_envs(last.hold), settings) as venv:
            model = _learner(venv, settings, last, seed, (steps, scheduled), out)
            done = model.num_timesteps = pretrain(model, venv, settings, steps, seed)
            start = Scorer(score_on or venv.get_attr("task")[:1], last, files, score_every, provenance, best)
            start.init_callback(model)
            start.score()
            best = start.best
            soften(model, _learner(venv, settings, last, seed + 1, (steps, scheduled), out), settings.kept_share)
    for stage, end in zip(settings.stages, ends, strict=True):
        if model is not None and done >= end:
            continue
        with opened(make_envs(stage.hold), settings) as venv:
            # Training seeds are 63-bit hashes: no seed that a person would choose, or that is held out, is among them.
            # Those of a later part differ from those before.
            venv.seed_rows([episode_seed(episode_seed(seed, done + 1), row + 1) for row in range(venv.num_envs)])
            following = _learner(venv, settings, stage, seed, (end, scheduled), out)
            if model is not None:
                following.policy.load_state_dict(model.policy.state_dict())
            model, model.num_timesteps = following, done
            recorder = EpisodeRecorder(files, steps, progress, label or "PPO")
            scorer = Scorer(score_on or venv.get_attr("task")[:1], stage, files, score_every, provenance, best)
            callbacks = CallbackList([recorder, scorer])
            model.learn(end - done, callback=callbacks, reset_num_timesteps=False, tb_log_name="PPO")
            scorer.score()
            done, best = model.num_timesteps, scorer.best
    assert model is not None
    assert best is not None
    model.save(out / "model.zip")
    plot_curve(files.scores, out / "curve.png", label or "PPO")
    return Trained(model, best, files.episodes, files.scores, out)


@contextmanager
def opened(envs: AutoresetVectorEnv, settings: PpoSettings) -> Iterator[ScaledRewards]:
    """The environments with the rewards that are learned from, closed at the end."""
    venv = ScaledRewards(envs, settings.reward_scale, settings.compressed_below)
    try:
        yield venv
    finally:
        venv.close()


def _learner(
    venv: ScaledRewards, settings: PpoSettings, stage: Stage, seed: int, ends: tuple[int, int], out: Path
) -> PPO:
    end, scheduled = ends
    first, last = settings.learning_rate, settings.final_learning_rate
    n_steps = settings.n_steps
    model = PPO(
        "MlpPolicy",
        venv,
        n_steps=n_steps,
        batch_size=max(2, n_steps * venv.num_envs // settings.n_minibatches),
        n_epochs=settings.n_epochs,
        gamma=settings.gamma_per_second**stage.hold,
        gae_lambda=settings.gae_lambda,
        # Stable-Baselines3 counts what is left to the end of a stage; the rate falls over the whole schedule.
        learning_rate=lambda left: first + (last - first) * min(1.0, (1.0 - left) * end / scheduled),
        clip_range=settings.clip_range,
        ent_coef=stage.ent_coef,
        policy_kwargs={"net_arch": list(settings.hidden)},
        tensorboard_log=str(out / "tensorboard"),
        stats_window_size=settings.n_envs,
        seed=seed,
        device="cpu",
    )
    if settings.planned:
        task = venv.get_attr("task")[0]
        if settings.action == ACTION:
            keep_planned(model, task)
        prefer_many_replicas(model, task)
    return model


def prefer_many_replicas(model: PPO, task: TaskSpec) -> None:
    """Start with many replicas: where most requests wait, every number looks as bad, and fewer cost less."""
    most = task.fleet.max_replicas
    assert most is not None
    policy: Any = model.policy
    with torch.no_grad():
        policy.action_net.bias[-most:] += MANY_REPLICAS_LOGIT * torch.linspace(0.0, 1.0, most)


def keep_planned(model: PPO, task: TaskSpec) -> None:
    """Make a policy of all knobs all but certain of the capacity plan's, so that it chooses nothing but replicas."""
    codec = codec_of(task)
    planned = np.append(ReplicaPlan.of(task).plan.row(), task.fleet.n_replicas)
    fitting = LEVELS["kv_budget"] <= planned[0]  # a larger pool would be out of memory
    planned[0] = LEVELS["kv_budget"][fitting].max()
    levels = codec.encode(planned[None])[0, :-1]
    sizes = [len(each) for each in knob_levels(task.fleet.max_replicas)]
    first = np.cumsum([0, *sizes[:-2]])
    policy: Any = model.policy
    with torch.no_grad():
        policy.action_net.bias[torch.as_tensor(first + levels)] += PLANNED_LOGIT


class RunFiles:
    """Files of a run that change while it goes on: episodes, scores, checkpoints, the best policy."""

    def __init__(self, out: Path, resume: bool) -> None:
        self.out = out
        self.episodes: list[tuple[int, float]] = []
        self.scores: list[Scored] = []
        self._resumed = self._newest_checkpoint() if resume else None
        if self._resumed is not None:
            done = int(self._resumed.stem.split("_")[1])
            # What came after the checkpoint is played again.
            self.episodes = [(int(s), float(r)) for s, r in _rows(out / "episodes.csv") if int(s) <= done]
            self.scores = [
                Scored(int(s), float(v), float(h)) for s, v, h in _rows(out / "scores.csv") if int(s) <= done
            ]
        else:
            (out / "checkpoints").mkdir(exist_ok=True)
            for old in (out / "checkpoints").glob("ppo_*_steps.zip"):
                old.unlink()  # else a later --resume would continue from another run
        _write_rows(out / "episodes.csv", ("step", "return"), self.episodes)
        rows = [(each.step, each.validation, each.held_out) for each in self.scores]
        _write_rows(out / "scores.csv", ("step", "validation", "held_out"), rows)

    def newest_model(self) -> PPO | None:
        """The model of the newest checkpoint, where the run is resumed."""
        return None if self._resumed is None else PPO.load(self._resumed, device="cpu")

    def best_policy(self) -> PolicyFile | None:
        """The best policy so far, where the run is resumed."""
        return None if self._resumed is None else PolicyFile.load(self.out / "policy.npz")

    def add_episodes(self, step: int, returns: Sequence[float]) -> None:
        """Record the returns of episodes that ended at a step."""
        self.episodes += [(step, value) for value in returns]
        _append_rows(self.out / "episodes.csv", [(step, value) for value in returns])

    def add_score(self, scored: Scored) -> None:
        """Record scores of the policy."""
        self.scores.append(scored)
        _append_rows(self.out / "scores.csv", [(scored.step, scored.validation, scored.held_out)])

    def _newest_checkpoint(self) -> Path:
        folder = self.out / "checkpoints"
        found = sorted(folder.glob("ppo_*_steps.zip"), key=lambda p: int(p.stem.split("_")[1]))
        if not found:
            raise InvalidConfigError(f"--resume: {folder} holds no checkpoint; leave --resume out to start anew")
        return found[-1]


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as lines:
        return list(csv.reader(lines))[1:]


def _write_rows(path: Path, heads: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
    with path.open("w", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows([heads, *rows])


def _append_rows(path: Path, rows: Sequence[Sequence[float]]) -> None:
    with path.open("a", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows(rows)


# ---------------------------------------------------------------- pretraining


def pretrain(model: PPO, venv: ScaledRewards, settings: PpoSettings, steps: int, seed: int) -> int:
    """Fit the model to the best constant setting or to the teacher, whichever is graded higher; returns the steps used.

    Nothing is done where it would take more than ``start_share`` of all steps.
    """
    task: TaskSpec = venv.get_attr("task")[0]
    config: EpisodeConfig = venv.get_attr("config")[0]
    search = ConstantSearch(task, config, settings.n_envs, seed)
    rows = max(2, settings.n_envs // 2)
    demonstration_steps = rows * config.n_steps * (1 + bool(settings.teacher))
    if search.steps + demonstration_steps > settings.start_share * steps:
        return 0
    # Both are graded on the same loads, which the search has not met: a lucky draw must not decide.
    seeds = [episode_seed(seed, row + 1) for row in range(rows)]
    candidates: list[Agent] = [ActionsAgent(search.best(), rows)]
    if settings.teacher:
        candidates.append(OnLevels(make_agent(settings.teacher, task), task))
    grades = [float(run_episodes(task, agent, seeds, config=config).scores().mean()) for agent in candidates]
    shown = demonstrate(task, config, seeds, candidates[int(np.argmax(grades))])
    imitate(model, replace(shown, rewards=venv.learned(shown.rewards)), settings)
    return search.steps + demonstration_steps


def codec_of(task: TaskSpec) -> ActionCodec:
    """The codec of learners' actions on a task."""
    return action_codec(ACTION, task.fleet.max_replicas)


class ConstantSearch:
    """Search for the best constant setting of the knobs, by successive halving.

    Many settings are tried for half an episode (a Latin hypercube over all levels), the best ``n`` of them for a whole
    one, and then ``n`` variations of the best three.
    """

    def __init__(self, task: TaskSpec, config: EpisodeConfig, n: int, seed: int) -> None:
        self._task, self._config, self._n, self._seed = task, config, n, seed
        self._short = max(1, config.n_steps // 2)
        self._codec = codec_of(task)
        self._sizes = np.array([len(levels) for levels in knob_levels(task.fleet.max_replicas)])
        self._rng = np.random.default_rng(seed)
        self.steps = 3 * n * self._short + 2 * n * config.n_steps

    def best(self) -> NDArray[np.float64]:
        """The knobs (1, 5), or (1, 6) of a task that scales."""
        many = self._latin_hypercube(3 * self._n)
        few = many[np.argsort(self._returns(many, self._short))[-self._n :]]
        earned = self._returns(few, self._config.n_steps)
        varied = self._varied(few[np.argsort(earned)[-3:]])
        tried = np.concatenate([few, varied])
        returns = np.concatenate([earned, self._returns(varied, self._config.n_steps)])
        return self._codec.decode(tried[returns.argmax()][None])

    def _latin_hypercube(self, n: int) -> NDArray[np.int64]:
        strata = self._rng.permuted(np.tile(np.arange(n), (len(self._sizes), 1)), axis=1).T
        levels: NDArray[np.int64] = ((strata + self._rng.random(strata.shape)) / n * self._sizes).astype(np.int64)
        return levels

    def _varied(self, parents: NDArray[np.int64]) -> NDArray[np.int64]:
        levels = parents[self._rng.integers(len(parents), size=self._n)]
        moved = levels + np.rint(self._rng.normal(size=levels.shape) * self._sizes / 4).astype(np.int64)
        chosen = np.where(self._rng.random(levels.shape) < 0.5, moved, levels)
        within: NDArray[np.int64] = np.clip(chosen, 0, self._sizes - 1)
        return within

    def _returns(self, levels: NDArray[np.int64], n_steps: int) -> NDArray[np.float64]:
        """Return of each setting in the first steps of one and the same episode."""
        batch = ServingBatch(self._task, len(levels), self._config, n_loads=1)
        batch.reset([episode_seed(self._seed, 1_000)])
        knobs = self._codec.decode(levels)
        returns = np.zeros(len(levels))
        for _ in range(n_steps):
            batch.step(knobs)
            returns += batch.reward
        return returns


@dataclass(frozen=True, slots=True, eq=False)
class Demonstrations:
    """What an agent did in T steps of B episodes: observations (T, B, n), levels (T, B, knobs), rewards (T, B)."""

    observations: NDArray[np.float32]
    levels: NDArray[np.int64]
    rewards: NDArray[np.float64]


def demonstrate(task: TaskSpec, config: EpisodeConfig, seeds: Sequence[int], agent: Agent) -> Demonstrations:
    """Whole episodes of an agent as demonstrations, one per seed."""
    batch = ServingBatch(task, len(seeds), config)
    seen, actions = ObservationCodec(task, config, batch.calibration, OBSERVATION), codec_of(task)
    observations, levels, rewards = [], [], []
    batch.reset(seeds)
    agent.reset(len(seeds))
    for _ in range(config.n_steps):
        observation = batch.full_observation()
        knobs = batch.snap(agent.act(observation))
        observations.append(seen.encode(observation))
        levels.append(actions.encode(knobs))
        batch.step(knobs)
        rewards.append(batch.reward.copy())
    return Demonstrations(np.array(observations), np.array(levels), np.array(rewards))


@dataclass(frozen=True, slots=True, eq=False)
class OnLevels:
    """Agent that wraps another and moves its knobs to the nearest levels that the policy can choose."""

    agent: Agent
    task: TaskSpec

    def reset(self, n_rows: int) -> None:
        """Start new episodes."""
        self.agent.reset(n_rows)

    def act(self, observation: NDArray[np.float64]) -> NDArray[np.float64]:
        codec = codec_of(self.task)
        knobs = snap(self.agent.act(observation), action_mask(self.task.active_actions), self.task.fleet)
        return codec.decode(codec.encode(knobs))


def imitate(model: PPO, demonstrations: Demonstrations, settings: PpoSettings) -> None:
    """Fit the policy to the levels of demonstrations, and the value function to their returns."""
    policy: Any = model.policy
    togo = np.zeros_like(demonstrations.rewards)
    after = np.zeros(demonstrations.rewards.shape[1])
    for t in reversed(range(len(togo))):
        after = demonstrations.rewards[t] + model.gamma * after
        togo[t] = after
    x = torch.as_tensor(demonstrations.observations.reshape(-1, demonstrations.observations.shape[-1]))
    y = torch.as_tensor(demonstrations.levels.reshape(-1, demonstrations.levels.shape[-1]))
    z = torch.as_tensor(togo.reshape(-1, 1).astype(np.float32))
    space: Any = model.action_space
    sizes = space.nvec.tolist()
    weights = [p for name, p in policy.named_parameters() if "log_std" not in name]
    optimiser = torch.optim.Adam(weights, lr=3e-3)
    for _ in range(settings.passes):
        rows = torch.randint(len(x), (512,))
        hidden, critic = policy.mlp_extractor(x[rows])
        loss = torch.nn.functional.mse_loss(policy.value_net(critic), z[rows])
        for i, logits in enumerate(torch.split(policy.action_net(hidden), sizes, dim=1)):
            loss = loss + torch.nn.functional.cross_entropy(logits, y[rows, i], label_smoothing=settings.smoothing)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def soften(model: PPO, fresh: PPO, share: float) -> None:
    """Shrink the policy's weights and add a random network's: what was learned stays as a leaning, not as a certainty.

    "Shrink and perturb" (Ash and Adams 2020, https://arxiv.org/abs/1910.08475): networks that were fitted to one thing
    learn the next badly.
    """
    with torch.no_grad():
        for kept, drawn in zip(model.policy.parameters(), fresh.policy.parameters(), strict=True):
            kept.mul_(share).add_(drawn, alpha=1.0 - share)


class ScaledRewards(SB3VecEnv):
    """Vector environment whose rewards are compressed if asked for, then scaled; reported returns stay as they are."""

    def __init__(self, envs: AutoresetVectorEnv, scale: float, compressed_below: float = np.inf) -> None:
        super().__init__(envs)
        self._scale, self._compressed_below = scale, compressed_below

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        observation, reward, done, infos = super().step_wait()
        return observation, self.learned(reward).astype(np.float32), done, infos

    def learned(self, reward: NDArray[Any]) -> NDArray[Any]:
        """Rollout settings for a reward."""
        below = self._compressed_below
        if np.isfinite(below):
            reward = np.where(reward < -below, -below * (1.0 + np.log(np.maximum(-reward / below, 1.0))), reward)
        scaled: NDArray[Any] = reward * np.float32(self._scale)
        return scaled


class EpisodeRecorder(BaseCallback):
    """Callback that records every finished episode and moves the progress bar."""

    def __init__(self, files: RunFiles, steps: int, progress: bool, label: str) -> None:
        super().__init__()
        self._files = files
        self._bar = Progress(disable=not progress)
        self._steps = steps
        self._label = label

    def _on_training_start(self) -> None:
        self._bar.start()
        self._task = self._bar.add_task(self._label, total=self._steps, completed=self.num_timesteps)

    def _on_step(self) -> bool:
        ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        if ended:
            self._files.add_episodes(self.num_timesteps, ended)
            self._bar.update(self._task, description=f"{self._label}  return {np.mean(ended):.1f}")
        self._bar.update(self._task, completed=self.num_timesteps)
        return True

    def _on_training_end(self) -> None:
        self._bar.stop()


class Scorer(BaseCallback):
    """Callback that scores the policy on traffic that training does not meet, and keeps the best one in ``policy.npz``.

    The validation seeds choose; what the held-out seeds say is only recorded.
    """

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        stage: Stage,
        files: RunFiles,
        every: int,
        provenance: dict[str, Any],
        best: PolicyFile | None,
    ) -> None:
        super().__init__()
        self.best = best
        self._tasks, self._stage, self._files, self._every, self._provenance = tasks, stage, files, every, provenance
        self._next = 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self._next:
            self._next = self.num_timesteps + self._every
            self.score()

    def score(self) -> None:
        """Score the policy as it is, and leave a checkpoint."""
        steps = int(self.model.num_timesteps)
        self.model.save(self._files.out / "checkpoints" / f"ppo_{steps}_steps.zip")
        assert isinstance(self.model, PPO)
        trained = {"steps": steps, **self._provenance}
        policy = export(self.model, trained, self._stage.hold, self._provenance["settings"]["action"])
        validation, held_out = (
            float(np.mean([run_episodes(task, PpoAgent(policy, task), seeds).scores() for task in self._tasks]))
            for seeds in (VALIDATION_SEEDS, HELD_OUT_SEEDS)
        )
        self._files.add_score(Scored(steps, validation, held_out))
        if self.best is None or validation > self.best.trained["validation_score"]:
            self.best = replace(policy, trained={**policy.trained, "validation_score": validation})
            self.best.save(self._files.out / "policy.npz")


# ---------------------------------------------------------------- what comes out


def export(model: PPO, trained: dict[str, Any], hold: int, action: str = ACTION) -> PolicyFile:
    """The policy's central action as plain arrays."""
    linear = [
        m for m in (*model.policy.mlp_extractor.policy_net, model.policy.action_net) if isinstance(m, torch.nn.Linear)
    ]
    layers = [
        (m.weight.detach().numpy().T.astype(np.float64), m.bias.detach().numpy().astype(np.float64)) for m in linear
    ]
    return PolicyFile(layers, OBSERVATION, action, hold, trained)


RISE_WINDOW: Final = 5_000
"""Steps at either end of training whose returns are compared."""


def rise(episodes: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Returns of the first ``RISE_WINDOW`` steps of PPO against the last: means, one-sided Mann-Whitney p-value.

    Steps that went into pretraining are in neither.
    """
    from scipy.stats import mannwhitneyu

    begin, end = (episodes[0][0], episodes[-1][0]) if episodes else (0, 0)
    first = [value for step, value in episodes if step < begin + RISE_WINDOW]
    last = [value for step, value in episodes if step > end - RISE_WINDOW]
    if min(len(first), len(last)) < 2 or end - begin < RISE_WINDOW:
        raise InvalidConfigError(f"a test of the rise needs two stretches of {RISE_WINDOW} steps; train longer")
    p = float(mannwhitneyu(last, first, alternative="greater").pvalue)
    return {"first_mean": float(np.mean(first)), "last_mean": float(np.mean(last)), "p_value": p}


def plot_curve(scores: Sequence[Scored], path: Path, title: str) -> None:
    """The learning curve as a picture: scores on seeds that training does not meet."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [each.step for each in scores]
    axes.plot(steps, [each.validation for each in scores], label="validation seeds")
    axes.plot(steps, [each.held_out for each in scores], label="held-out seeds")
    axes.set(xlabel="steps", ylabel="mean score", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


# ---------------------------------------------------------------- all of it


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a policy, and compare it with other agents on traffic that training has not met."""
    parser = argparse.ArgumentParser(prog="python -m agents.ppo_demo", description=main.__doc__)
    parser.add_argument("--task", default="3", help="task id (default 3)")
    parser.add_argument("--steps", type=int, default=600_000, help="steps in all (default 600000)")
    parser.add_argument("--out", type=Path, default=Path("runs/ppo_demo"), help="folder (default runs/ppo_demo)")
    options = parser.parse_args(arguments)
    task = get_task(options.task)
    settings = settings_for(task, from_scratch=True)
    make_envs = partial(local_envs, task.task_id, settings)
    trained = train(make_envs, options.out, steps=options.steps, settings=settings, label=f"task {task.task_id}")
    own = f"ppo:{trained.out / 'policy.npz'}"
    result = compare(task, [own, "naive", "vllm_defaults", "heuristic"], HELD_OUT_SEEDS)
    print(f"task {task.task_id}, {len(HELD_OUT_SEEDS)} held-out seeds, mean score [95% interval]")
    for entry in sorted(result["agents"], key=lambda each: -float(each["score"]["mean"])):
        print(f"{bracketed_score(entry['score'])}  {entry['agent']}")


if __name__ == "__main__":
    main()
