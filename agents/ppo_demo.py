"""PPO from first step to saved policy, with Stable-Baselines3 on the native vector environment.

Read it from top to bottom: settings, training, what is written on the way, export to plain arrays. Its command line is
``inferencegym train``. Fifty thousand steps take well under a minute on two cores.

What makes it work here, each found by leaving it out:

- Training starts from a sensible policy. Some of the steps (``start_share`` at most) try constant settings of the knobs
  and watch the rule-based heuristic; the network is fitted to what is graded higher. From a random start most of 50,000
  steps pass in overload, where every small change is as bad as every other.
- Knobs are levels to choose from, not numbers with noise on them. Precision and prefill placement restart replicas when
  they change, so noise that flips them every second keeps a fleet from ever serving normally; a categorical policy is
  almost certain of them from the start and still tries the others now and then (``smoothing``).
- Rewards are scaled to returns of order one: gradients are clipped by their joint norm, and the value function's would
  otherwise leave nothing for the policy's.
- Observations are normalised by fixed scales (logarithms for what spans decades), with the announced flood schedule
  beside them; the policy carries no running statistics and exports as plain arrays.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, CheckpointCallback
from stable_baselines3.common.utils import LinearSchedule

from agents.episodes import run_episodes
from agents.integrations.sb3 import SB3VecEnv
from agents.policies.ppo import PolicyFile
from agents.policies.switching_policy import ActionsAgent
from agents.protocol import Agent
from agents.registry import make_agent
from env.batch import ServingBatch
from inferencegym.errors import InvalidConfigError
from inferencegym.seeds import episode_seed
from inferencegym.spaces.actions import action_mask, snap
from inferencegym.spaces.formats import LEVELS, ObservationCodec, action_codec
from inferencegym.tasks import EpisodeConfig, TaskSpec
from inferencegym.vector_env import AutoresetVectorEnv

OBSERVATION: Final = "scheduled"
ACTION: Final = "discrete"


@dataclass(frozen=True, slots=True)
class PpoSettings:
    """Hyperparameters; a step is one second of one fleet."""

    n_envs: int = 16
    n_steps: int = 200
    batch_size: int = 400
    n_epochs: int = 5
    gamma: float = 0.98
    gae_lambda: float = 0.9
    learning_rate: float = 5e-4
    final_learning_rate: float = 2.5e-5
    clip_range: float = 0.2
    ent_coef: float = 0.0
    reward_scale: float = 0.1
    hidden: tuple[int, ...] = (64, 64)
    teacher: str = "heuristic"
    """Agent that pretraining may imitate; empty for none."""
    start_share: float = 0.3
    """Largest share of all steps that pretraining may take; else there is none."""
    smoothing: float = 0.05
    """Probability that pretraining leaves to all levels of a knob together (label smoothing)."""
    passes: int = 3_000
    """Gradient steps of pretraining."""
    torch_threads: int = 1


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training run: its files, and its episodes as (step, return)."""

    model: PPO
    policy: PolicyFile
    episodes: list[tuple[int, float]]
    out: Path


def train(
    envs: AutoresetVectorEnv,
    out: str | Path,
    *,
    steps: int = 50_000,
    seed: int = 0,
    settings: PpoSettings | None = None,
    resume: bool = False,
    progress: bool = True,
    label: str = "",
    checkpoint_every: int = 25_000,
) -> Trained:
    """Train PPO for ``steps`` steps in all and leave ``out`` with everything about the run.

    Files: ``policy.npz`` (plain arrays, for ``ppo:FILE``), ``model.zip`` (Stable-Baselines3), ``checkpoints/``,
    ``episodes.csv`` (step, return), ``curve.png``, ``settings.json`` and TensorBoard events. ``resume`` continues from
    the newest checkpoint up to ``steps``. ``envs`` must offer ``OBSERVATION`` and ``ACTION`` formats in SAME_STEP mode.
    """
    settings = settings or PpoSettings()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(settings.torch_threads)
    venv = ScaledRewards(envs, settings.reward_scale)
    # Training seeds are 63-bit hashes: no seed that a person would choose, or that is held out, is among them.
    venv.seed_rows([episode_seed(seed, row + 1) for row in range(envs.num_envs)])
    if resume:
        model, episodes = _resumed(venv, out)
    else:
        model, episodes = _fresh(venv, settings, seed, out), []
        model.num_timesteps = pretrain(model, venv, settings, steps, seed)
    (out / "settings.json").write_text(json.dumps({"steps": steps, "seed": seed, **asdict(settings)}, indent=1) + "\n")

    recorder = EpisodeRecorder(out / "episodes.csv", episodes, steps, progress, label or "PPO")
    every = max(1, checkpoint_every // envs.num_envs)
    checkpoints = CheckpointCallback(save_freq=every, save_path=str(out / "checkpoints"), name_prefix="ppo")
    remaining = steps - model.num_timesteps
    if remaining > 0:
        model.learn(
            remaining,
            callback=CallbackList([recorder, checkpoints]),
            reset_num_timesteps=False,
            tb_log_name="PPO",
        )
    model.save(out / "model.zip")
    policy = export(model, {"steps": int(model.num_timesteps), "seed": seed, "settings": asdict(settings)})
    policy.save(out / "policy.npz")
    plot_curve(recorder.episodes, out / "curve.png", label or "PPO")
    return Trained(model, policy, recorder.episodes, out)


def _fresh(venv: ScaledRewards, settings: PpoSettings, seed: int, out: Path) -> PPO:
    _write_episodes(out, [])
    for old in (out / "checkpoints").glob("ppo_*_steps.zip"):
        old.unlink()  # else a later --resume would continue from another run
    return PPO(
        "MlpPolicy",
        venv,
        n_steps=settings.n_steps,
        batch_size=settings.batch_size,
        n_epochs=settings.n_epochs,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        learning_rate=LinearSchedule(settings.learning_rate, settings.final_learning_rate, 1.0),
        clip_range=settings.clip_range,
        ent_coef=settings.ent_coef,
        policy_kwargs={"net_arch": list(settings.hidden)},
        tensorboard_log=str(out / "tensorboard"),
        stats_window_size=settings.n_envs,
        seed=seed,
        device="cpu",
    )


def _resumed(venv: ScaledRewards, out: Path) -> tuple[PPO, list[tuple[int, float]]]:
    found = sorted((out / "checkpoints").glob("ppo_*_steps.zip"), key=lambda p: int(p.stem.split("_")[1]))
    if not found:
        raise InvalidConfigError(
            f"--resume: {out / 'checkpoints'} holds no checkpoint; leave --resume out to start anew"
        )
    model = PPO.load(found[-1], env=venv, device="cpu")
    with (out / "episodes.csv").open(newline="") as lines:
        kept = [(int(row["step"]), float(row["return"])) for row in csv.DictReader(lines)]
    # Episodes after the checkpoint are run again.
    kept = [(step, value) for step, value in kept if step <= model.num_timesteps]
    _write_episodes(out, kept)
    # Its first episodes must not repeat those that the first part was trained on.
    venv.seed_rows([episode_seed(int(model.num_timesteps), row + 1) for row in range(venv.num_envs)])
    return model, kept


# ---------------------------------------------------------------- pretraining


def pretrain(model: PPO, venv: ScaledRewards, settings: PpoSettings, steps: int, seed: int) -> int:
    """Fit the model to the best constant setting or to the teacher, whichever is graded higher; returns the steps used.

    Nothing is done where it would take more than ``start_share`` of all steps.
    """
    task: TaskSpec = venv.get_attr("task")[0]
    config: EpisodeConfig = venv.get_attr("config")[0]
    search = ConstantSearch(task, config, venv.num_envs, seed)
    rows = max(2, venv.num_envs // 2)
    demonstration_steps = rows * config.episode_length * (1 + bool(settings.teacher))
    if search.steps + demonstration_steps > settings.start_share * steps:
        return 0
    # Both are graded on the same loads, which the search has not met: a lucky draw must not decide.
    seeds = [episode_seed(seed, row + 1) for row in range(rows)]
    candidates: list[Agent] = [ActionsAgent(search.best(), rows)]
    if settings.teacher:
        candidates.append(OnLevels(make_agent(settings.teacher, task), task))
    grades = [float(run_episodes(task, agent, seeds, config=config).scores().mean()) for agent in candidates]
    imitate(model, demonstrate(task, config, seeds, candidates[int(np.argmax(grades))]), settings, venv.scale)
    return search.steps + demonstration_steps


class ConstantSearch:
    """Search for the best constant setting of the knobs, by successive halving.

    Many settings are tried for half an episode (a Latin hypercube over all levels), the best ``n`` of them for a whole
    one, and then ``n`` variations of the best three.
    """

    def __init__(self, task: TaskSpec, config: EpisodeConfig, n: int, seed: int) -> None:
        self._task, self._config, self._n, self._seed = task, config, n, seed
        self._short = max(1, config.episode_length // 2)
        self._sizes = np.array([len(levels) for levels in LEVELS.values()])
        self._rng = np.random.default_rng(seed)
        self.steps = 3 * n * self._short + 2 * n * config.episode_length

    def best(self) -> NDArray[np.float64]:
        """The knobs (1, 5)."""
        many = self._latin_hypercube(3 * self._n)
        few = many[np.argsort(self._returns(many, self._short))[-self._n :]]
        earned = self._returns(few, self._config.episode_length)
        varied = self._varied(few[np.argsort(earned)[-3:]])
        tried = np.concatenate([few, varied])
        returns = np.concatenate([earned, self._returns(varied, self._config.episode_length)])
        return action_codec(ACTION).decode(tried[returns.argmax()][None])

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
        knobs = action_codec(ACTION).decode(levels)
        returns = np.zeros(len(levels))
        for _ in range(n_steps):
            batch.step(knobs)
            returns += batch.reward
        return returns


@dataclass(frozen=True, slots=True, eq=False)
class Demonstrations:
    """Demonstrations of an agent, T steps of B episodes: observations (T, B, n), levels (T, B, 5), rewards (T, B)."""

    observations: NDArray[np.float32]
    levels: NDArray[np.int64]
    rewards: NDArray[np.float64]


def demonstrate(task: TaskSpec, config: EpisodeConfig, seeds: Sequence[int], agent: Agent) -> Demonstrations:
    """Whole episodes of an agent as demonstrations, one per seed."""
    batch = ServingBatch(task, len(seeds), config)
    seen, actions = ObservationCodec(task, config, batch.calibration, OBSERVATION), action_codec(ACTION)
    observations, levels, rewards = [], [], []
    observation = batch.reset(seeds)
    agent.reset(len(seeds))
    for _ in range(config.episode_length):
        knobs = snap(agent.act(observation), batch.mask)
        observations.append(seen.encode(observation))
        levels.append(actions.encode(knobs))
        observation = batch.step(knobs)
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
        codec = action_codec(ACTION)
        knobs = snap(self.agent.act(observation), action_mask(self.task.active_actions))
        return codec.decode(codec.encode(knobs))


def imitate(model: PPO, demonstrations: Demonstrations, settings: PpoSettings, reward_scale: float) -> None:
    """Fit the policy to the levels of demonstrations, and the value function to their returns."""
    policy: Any = model.policy
    togo = np.zeros_like(demonstrations.rewards)
    after = np.zeros(demonstrations.rewards.shape[1])
    for t in reversed(range(len(togo))):
        after = demonstrations.rewards[t] * reward_scale + settings.gamma * after
        togo[t] = after
    x = torch.as_tensor(demonstrations.observations.reshape(-1, demonstrations.observations.shape[-1]))
    y = torch.as_tensor(demonstrations.levels.reshape(-1, demonstrations.levels.shape[-1]))
    z = torch.as_tensor(togo.reshape(-1, 1).astype(np.float32))
    sizes = [len(levels) for levels in LEVELS.values()]
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


def _write_episodes(out: Path, episodes: Sequence[tuple[int, float]]) -> None:
    (out / "episodes.csv").write_text("step,return\n" + "".join(f"{s},{r!r}\n" for s, r in episodes))


class ScaledRewards(SB3VecEnv):
    """Vector environment with rewards times a constant; reported returns stay as they are."""

    def __init__(self, envs: AutoresetVectorEnv, scale: float) -> None:
        super().__init__(envs)
        self.scale = scale

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        observation, reward, done, infos = super().step_wait()
        return observation, reward * np.float32(self.scale), done, infos


class EpisodeRecorder(BaseCallback):
    """Callback that writes every finished episode to a CSV file and moves the progress bar."""

    def __init__(self, path: Path, episodes: list[tuple[int, float]], steps: int, progress: bool, label: str) -> None:
        super().__init__()
        self.episodes = episodes
        self._path = path
        self._bar = Progress(disable=not progress)
        self._steps = steps
        self._label = label

    def _on_training_start(self) -> None:
        self._file = self._path.open("a")
        self._bar.start()
        self._task = self._bar.add_task(self._label, total=self._steps, completed=self.num_timesteps)

    def _on_step(self) -> bool:
        ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        for value in ended:
            self.episodes.append((self.num_timesteps, value))
            self._file.write(f"{self.num_timesteps},{value!r}\n")
        if ended:
            self._bar.update(self._task, description=f"{self._label}  return {np.mean(ended):.1f}")
        self._bar.update(self._task, completed=self.num_timesteps)
        return True

    def _on_rollout_end(self) -> None:
        self._file.flush()

    def _on_training_end(self) -> None:
        self._bar.stop()
        self._file.close()


# ---------------------------------------------------------------- what comes out


def export(model: PPO, trained: dict[str, Any]) -> PolicyFile:
    """The policy's mean action as plain arrays."""
    linear = [
        m for m in (*model.policy.mlp_extractor.policy_net, model.policy.action_net) if isinstance(m, torch.nn.Linear)
    ]
    layers = [
        (m.weight.detach().numpy().T.astype(np.float64), m.bias.detach().numpy().astype(np.float64)) for m in linear
    ]
    return PolicyFile(layers, OBSERVATION, ACTION, trained)


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


def plot_curve(episodes: Sequence[tuple[int, float]], path: Path, title: str) -> None:
    """The learning curve as a picture: every episode, and a running mean."""
    if not episodes:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps, returns = np.array(episodes).T
    window = max(1, min(20, len(returns) // 5))
    kernel = np.ones(window) / window
    axes.plot(steps, returns, ".", alpha=0.3, markersize=4, label="episode")
    axes.plot(
        steps[window - 1 :], np.convolve(returns, kernel, "valid"), linewidth=2, label=f"mean of {window} episodes"
    )
    axes.set(xlabel="environment steps", ylabel="return of an episode", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
