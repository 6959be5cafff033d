"""PPO from first step to saved policy, with Stable-Baselines3 on the native vector environment.

Read it from top to bottom: settings, training, what is written on the way, export to plain arrays. Its command line is
``inferencegym train``. Fifty thousand steps take well under a minute on two cores.

What makes it work here, each found by leaving it out:

- Exploration noise is held for a while (gSDE, a new noise matrix every ``sde_sample_freq`` steps). Independent noise on
  every step flips precision and prefill placement all the time; each flip restarts replicas, so the fleet never serves
  normally and returns say nothing about the knobs.
- Rewards are scaled to returns of order one: gradients are clipped by their joint norm, and the value function's would
  otherwise leave nothing for the policy's.
- Observations are normalised by fixed scales (logarithms for what spans decades), so the policy carries no running
  statistics and exports as plain arrays.
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
from rich.progress import Progress
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, CheckpointCallback
from stable_baselines3.common.utils import LinearSchedule

from agents.ppo_policy import PolicyFile
from agents.sb3 import SB3VecEnv
from env.autoreset import episode_seed
from env.vector_env import AutoresetVectorEnv
from inferencegym.errors import InvalidConfigError

OBSERVATION: Final = "normalised"
ACTION: Final = "box"


@dataclass(frozen=True, slots=True)
class PpoSettings:
    """Everything that is tuned; steps are seconds of one fleet."""

    n_envs: int = 16
    n_steps: int = 100
    batch_size: int = 200
    n_epochs: int = 10
    gamma: float = 0.95
    gae_lambda: float = 0.95
    learning_rate: float = 1e-3
    final_learning_rate: float = 5e-5
    clip_range: float = 0.2
    ent_coef: float = 0.0
    log_std_init: float = -1.5
    sde_sample_freq: int = 50
    reward_scale: float = 0.1
    hidden: tuple[int, ...] = (64, 64)
    torch_threads: int = 1


@dataclass(frozen=True, slots=True)
class Trained:
    """Where a training run left its files, and what it earned: episodes as (step, return)."""

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
    model, episodes = _resumed(venv, out) if resume else (_fresh(venv, settings, seed, out), [])
    (out / "settings.json").write_text(json.dumps({"steps": steps, "seed": seed, **asdict(settings)}, indent=1) + "\n")

    recorder = EpisodeRecorder(out / "episodes.csv", episodes, steps, progress, label or "PPO")
    every = max(1, checkpoint_every // envs.num_envs)
    checkpoints = CheckpointCallback(save_freq=every, save_path=str(out / "checkpoints"), name_prefix="ppo")
    remaining = steps - model.num_timesteps
    if remaining > 0:
        model.learn(
            remaining,
            callback=CallbackList([recorder, checkpoints]),
            reset_num_timesteps=model.num_timesteps == 0,
            tb_log_name="PPO",
        )
    model.save(out / "model.zip")
    policy = export(model, {"steps": int(model.num_timesteps), "seed": seed, "settings": asdict(settings)})
    policy.save(out / "policy.npz")
    plot_curve(recorder.episodes, out / "curve.png", label or "PPO")
    return Trained(model, policy, recorder.episodes, out)


def _fresh(venv: ScaledRewards, settings: PpoSettings, seed: int, out: Path) -> PPO:
    (out / "episodes.csv").write_text("step,return\n")
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
        use_sde=True,
        sde_sample_freq=settings.sde_sample_freq,
        policy_kwargs={"net_arch": list(settings.hidden), "log_std_init": settings.log_std_init},
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
    # What was played after the checkpoint is played again.
    kept = [(step, value) for step, value in kept if step <= model.num_timesteps]
    (out / "episodes.csv").write_text("step,return\n" + "".join(f"{s},{r!r}\n" for s, r in kept))
    # Its first episodes must not repeat those that the first part was trained on.
    venv.seed_rows([episode_seed(int(model.num_timesteps), row + 1) for row in range(venv.num_envs)])
    return model, kept


class ScaledRewards(SB3VecEnv):
    """Rewards times a constant; reported returns stay as they are."""

    def __init__(self, envs: AutoresetVectorEnv, scale: float) -> None:
        super().__init__(envs)
        self._scale = np.float32(scale)

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        observation, reward, done, infos = super().step_wait()
        return observation, reward * self._scale, done, infos


class EpisodeRecorder(BaseCallback):
    """Writes every finished episode to a CSV file and moves the progress bar."""

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


def rise(episodes: Sequence[tuple[int, float]], window: int = 5_000) -> dict[str, float]:
    """Returns of the first ``window`` steps against the last: means and the one-sided Mann-Whitney p-value."""
    from scipy.stats import mannwhitneyu

    end = episodes[-1][0]
    first = [value for step, value in episodes if step <= window]
    last = [value for step, value in episodes if step > end - window]
    if min(len(first), len(last)) < 2:
        raise InvalidConfigError(f"a test of the rise needs two episodes in each {window} steps; train longer")
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
