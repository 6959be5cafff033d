"""Learners of other people's libraries, without tuning, on the Gymnasium ids that end in ``-v2``.

    python -m benchmarks.learning.plain_learners                   PPO, task 3, a training seed, a million steps
    python -m benchmarks.learning.plain_learners --task 2 --seeds 5     those of five training seeds that are not stored
    ... --learner trpo                                             another of LEARNERS
    ... --learner cleanrl --cleanrl ppo.py --action settings --envs 4   CleanRL's file, see CLEANRL

Trains ``PPO("MlpPolicy", env)`` or another learner in one thread, on one environment or ``--envs`` (rows of a native
batch, which steps faster than what ``gymnasium.make`` gives). With n of them PPO updates once in n times as many steps.
Each run is scored on the held-out seeds (the policy's most likely actions) forty times as it trains, which chooses
nothing: its score is that of the last policy. CleanRL's program makes its own environments (four by default), and is
scored when it has ended. Results so far go to ``benchmarks/results/plain_learners.json`` and ``.md`` each time. A run
that is stored with as many steps is not trained again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import runpy
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback

import inferencegym.gym  # noqa: F401 - registers the environments
from agents.evaluate import Decide, bracketed, compare, gym_scores, interval, paired
from agents.integrations.rllib import rllib_config
from agents.integrations.sb3 import SB3VecEnv
from agents.protocol import FloatArray
from agents.seeds import HELD_OUT_SEEDS
from benchmarks.policies.tasks import timetables
from benchmarks.report import spread, store, stored, table
from inferencegym.errors import InvalidConfigError
from inferencegym.tasks import get_task
from inferencegym.vector_env import registered_id

NAME: Final = "plain_learners"
"""Name of the results."""
N_SCORES: Final = 40
RIVALS: Final = ("heuristic", "best_static", "best_adaptive")
SCALERS: Final = ("hpa", "planner")
"""Further rivals on tasks that scale."""


class Learner(NamedTuple):
    """A learner's name in the tables, and its class and policy (none: it has a function of its own)."""

    label: str
    made_by: str = ""
    policy: str = "MlpPolicy"


LEARNERS: Final = {
    "ppo": Learner("PPO, Stable-Baselines3", "stable_baselines3.PPO"),
    "dqn": Learner("DQN, Stable-Baselines3", "stable_baselines3.DQN"),
    "trpo": Learner("TRPO, SB3-Contrib", "sb3_contrib.TRPO"),
    "recurrent": Learner("recurrent PPO, SB3-Contrib", "sb3_contrib.RecurrentPPO", "MlpLstmPolicy"),
    "sbx": Learner("PPO, SBX", "sbx.PPO"),
    "cleanrl": Learner("PPO, CleanRL"),
    "rllib": Learner("PPO, RLlib"),
    "skrl": Learner("PPO, skrl"),
}
"""SB3-Contrib, SBX and skrl are installed apart (docs/ppo.md). DQN and CleanRL take ``Discrete`` actions only."""
SKRL_NETWORK: Final = {
    "network": [{"name": "net", "input": "OBSERVATIONS", "layers": [64, 64], "activations": "tanh"}],
    "output": "ACTIONS",
}
"""skrl has no network of its own; this is that of Stable-Baselines3's ``MlpPolicy``."""
CLEANRL: Final = "cleanrl/ppo.py of https://github.com/vwxyzjn/cleanrl, commit e421c2e50b81febf639fced51a69e2602593d50d"
"""CleanRL's program. It needs ``tyro``, ``torch`` and ``tensorboard``."""
CLEANRL_SHA256: Final = "d8dfbb7ac0b21e747b77d6e6673e566db4d6cdacc83bcebcd19cf87ad0e459ae"


Keep = Callable[[dict[str, Any]], None]
"""What stores a run so far."""


class Curve:
    """Scores a policy on the held-out seeds as it trains, and gives the run so far to ``keep``."""

    def __init__(self, env_id: str, steps: int, keep: Keep, **settings: Any) -> None:
        self._env_id, self._every, self._keep, self._settings = env_id, steps // N_SCORES, keep, settings
        self._points: list[tuple[int, float]] = []
        self._started = time.perf_counter()

    def is_due(self, steps: int) -> bool:
        """Whether a score is due after so many steps."""
        return steps >= self._every * (len(self._points) + 1)

    def score(self, decide: Decide, steps: int) -> None:
        """Score the policy after so many steps."""
        scores = gym_scores(self._env_id, decide, **self._settings)
        self._points.append((steps, float(scores.mean())))
        print(f"{self._env_id}: {scores.mean():.3f} after {steps:,} steps", flush=True)
        self._keep(run_of(steps, time.perf_counter() - self._started, scores, self._points))


class Scores(BaseCallback):
    """Scores the policy of Stable-Baselines3 as it trains."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self._curve = curve

    def _on_step(self) -> bool:
        if self._curve.is_due(self.num_timesteps):
            self._score()
        return True

    def _on_training_end(self) -> None:
        self._score()

    def _score(self) -> None:
        memory: Any = None  # of a recurrent policy
        first = np.ones(len(HELD_OUT_SEEDS), dtype=bool)

        def decide(seen: NDArray[np.float32]) -> NDArray[Any]:
            nonlocal memory
            actions, memory = self.model.predict(seen, memory, first, deterministic=True)
            first[:] = False
            return np.asarray(actions)

        self._curve.score(decide, self.num_timesteps)


def run_of(steps: int, wall_s: float, scores: FloatArray, curve: list[tuple[int, float]]) -> dict[str, Any]:
    """A run so far; ``scores`` are those of the held-out seeds, ``curve`` has their mean by steps."""
    return {
        "steps": steps,
        "wall_s": wall_s,
        "scores": scores.tolist(),
        "score": interval(scores).to_dict(),
        "curve": curve,
    }


def train(learner: Learner, env_id: str, n_envs: int, seed: int, steps: int, keep: Keep, **settings: Any) -> None:
    """Train once; ``keep`` gets the run :data:`N_SCORES` times and at the end."""
    envs: Any = gymnasium.make_vec(env_id, num_envs=n_envs, autoreset_mode=AutoresetMode.SAME_STEP, **settings)
    module, _, name = learner.made_by.rpartition(".")
    device = {} if module == "sbx" else {"device": "cpu"}
    model = getattr(importlib.import_module(module), name)(learner.policy, SB3VecEnv(envs), seed=seed, **device)
    model.learn(steps, callback=Scores(Curve(env_id, steps, keep, **settings)))


def train_rllib(env_id: str, n_envs: int, seed: int, steps: int, keep: Keep, **settings: Any) -> None:
    """Train RLlib's PPO once, in this process; ``keep`` gets the run about :data:`N_SCORES` times and at the end."""
    curve = Curve(env_id, steps, keep, **settings)
    task_id = gymnasium.spec(env_id).kwargs["task_id"]
    algorithm = rllib_config(task_id, n_envs=n_envs, seed=seed, **settings).build_algo()
    policy = algorithm.get_module()

    def decide(seen: NDArray[np.float32]) -> NDArray[Any]:
        with torch.no_grad():
            logits = policy.forward_inference({"obs": torch.as_tensor(seen)})["action_dist_inputs"]
            likeliest = policy.get_inference_action_dist_cls().from_logits(logits).to_deterministic()
            return np.asarray(likeliest.sample())

    done = 0
    while done < steps:
        done = int(algorithm.train()["num_env_steps_sampled_lifetime"])
        if done >= steps or curve.is_due(done):
            curve.score(decide, done)
    algorithm.stop()


class WatchedEnvs(gymnasium.vector.VectorWrapper):
    """Environments that call ``watch`` with the number of steps played, those of all environments counted."""

    def __init__(self, envs: Any, watch: Callable[[int], None]) -> None:
        super().__init__(envs)
        self._watch, self._steps = watch, 0

    def step(self, actions: Any) -> Any:
        """Step, then call ``watch``."""
        played = super().step(actions)
        self._steps += self.num_envs
        self._watch(self._steps)
        return played


def train_skrl(env_id: str, n_envs: int, seed: int, steps: int, keep: Keep, **settings: Any) -> None:
    """Train skrl's PPO once, by its runner and with its defaults; ``keep`` gets the run :data:`N_SCORES` times."""
    from skrl.agents.torch.ppo import PPO_CFG
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.utils.runner.torch import Runner

    curve = Curve(env_id, steps, keep, **settings)
    envs: Any = gymnasium.make_vec(env_id, num_envs=n_envs, autoreset_mode=AutoresetMode.SAME_STEP, **settings)
    space = envs.single_action_space
    several = isinstance(space, gymnasium.spaces.MultiDiscrete)
    ends = np.cumsum(space.nvec)[:-1].tolist() if several else []

    def decide(seen: NDArray[np.float32]) -> NDArray[Any]:
        with torch.no_grad():
            logits, _ = runner.agent.policy.compute({"observations": torch.as_tensor(seen)}, role="policy")
        parts = [part.argmax(dim=1).numpy() for part in logits.tensor_split(ends, dim=1)]
        return np.stack(parts, axis=1) if several else np.asarray(parts[0])

    def watch(done: int) -> None:
        if curve.is_due(done) or done >= steps:
            curve.score(decide, done)

    network = {"class": "MultiCategoricalMixin" if several else "CategoricalMixin", **SKRL_NETWORK}
    with TemporaryDirectory() as folder:
        runner = Runner(
            wrap_env(WatchedEnvs(envs, watch), verbose=False),
            {
                "seed": seed,
                "models": {
                    "separate": True,
                    "policy": network,
                    "value": {"class": "DeterministicMixin", **SKRL_NETWORK, "output": "ONE"},
                },
                "memory": {"class": "RandomMemory", "memory_size": -1},
                "agent": {
                    "class": "PPO",
                    "rollouts": PPO_CFG().rollouts,
                    "experiment": {"directory": folder, "write_interval": 0},
                },
                "trainer": {"class": "SequentialTrainer", "timesteps": steps // n_envs, "headless": True},
            },
        )
        runner.run()


def run_cleanrl(
    program: Path, more: Sequence[str], env_id: str, n_envs: int, seed: int, steps: int, keep: Keep, **settings: Any
) -> None:
    """Run CleanRL's program as it is, with ``more`` options; ``keep`` gets the run at the end.

    It takes nothing but an id, so the id with ``settings`` is registered under another name. The program neither scores
    nor stores its policy, which is left in its variable ``agent``. Its events of TensorBoard go to a temporary folder.
    """
    started = time.perf_counter()
    played = env_id
    if settings:
        spec, played = gymnasium.spec(env_id), "Settings-v0"
        gymnasium.register(played, spec.entry_point, kwargs={**spec.kwargs, **settings})
    options = {"--env-id": played, "--num-envs": n_envs, "--seed": seed, "--total-timesteps": steps}
    argv = [os.fspath(program), *(str(word) for option in options.items() for word in option), "--no-cuda", *more]
    program = program.resolve()
    with TemporaryDirectory() as folder, contextlib.chdir(folder), arguments(argv):
        left = runpy.run_path(os.fspath(program), run_name="__main__")
    wall_s = time.perf_counter() - started
    scores = gym_scores(env_id, likeliest(left["agent"].actor), **settings)
    print(f"{env_id}: {scores.mean():.3f} after {left['global_step']:,} steps", flush=True)
    curve = [(left["global_step"], float(scores.mean()))]
    keep(run_of(left["global_step"], wall_s, scores, curve))


@contextlib.contextmanager
def arguments(argv: list[str]) -> Iterator[None]:
    """The command line of another program."""
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


def likeliest(actor: Callable[[torch.Tensor], torch.Tensor]) -> Decide:
    """A policy that takes the likeliest action of a network of logits (B, n)."""

    def decide(seen: NDArray[np.float32]) -> NDArray[Any]:
        with torch.no_grad():
            return actor(torch.as_tensor(seen)).argmax(dim=-1).numpy()

    return decide


def checked(program: Path | None) -> Path:
    """CleanRL's program; raises :class:`InvalidConfigError` for another file."""
    if program is None or hashlib.sha256(program.read_bytes()).hexdigest() != CLEANRL_SHA256:
        raise InvalidConfigError(f"--cleanrl must be {CLEANRL} (sha256 {CLEANRL_SHA256})", "cleanrl")
    return program


@cache
def rivals(task_id: str) -> dict[str, list[float]]:
    """Scores of the rivals on the held-out seeds."""
    task = get_task(task_id)
    names = [*RIVALS, *(SCALERS if task.fleet.max_replicas is not None else ())]
    return {e["agent"]: e["scores"] for e in compare(task, names, HELD_OUT_SEEDS)["agents"]}


def keep_run(task_id: str, of: dict[str, Any], found: dict[str, Any]) -> None:
    """Write results and tables with a run so far, which replaces the stored one of the same :func:`key`."""
    run = {**of, **found}
    results = stored(NAME)
    runs = [*(each for each in results.get(task_id, {"runs": []})["runs"] if key(each) != key(run)), run]
    results = dict(sorted({**results, task_id: {"rivals": rivals(task_id), "runs": sorted(runs, key=key)}}.items()))
    store(NAME, results, report(results))


def learner_of(run: dict[str, Any]) -> tuple[str, str, int]:
    """Learner, settings that are not its own defaults or the id's, and number of environments."""
    return run["learner"], run["settings"], run["n_envs"]


def key(run: dict[str, Any]) -> tuple[str, str, int, int]:
    """Learner and training seed, which identify a run of a task."""
    return *learner_of(run), run["seed"]


def report(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    names = (*RIVALS, *SCALERS)
    lines = [
        "`python -m benchmarks.learning.plain_learners`: scores on 30 held-out seeds with 95% intervals. Differences",
        "are those of the mean of the runs, paired by held-out seed. The best timetable observes nothing.",
        "",
    ]
    learners = []
    blind = timetables()
    for task_id, result in results.items():
        for of, group in groupby(result["runs"], key=learner_of):
            runs = list(group)
            scores = np.array([run["scores"] for run in runs])  # (training seeds, held-out seeds)
            means, mean_of_runs = scores.mean(axis=1), scores.mean(axis=0)
            over = [
                spread(paired(mean_of_runs, np.array(result["rivals"][name])).to_dict(), "+")
                if name in result["rivals"]
                else "-"
                for name in names
            ]
            steps, lowest_to_highest = min(run["steps"] for run in runs), f"{means.min():.3f} to {means.max():.3f}"
            figures = (f"{steps:,}", f"{means.mean():.3f}", lowest_to_highest, f"{blind[task_id]['mean']:.3f}")
            learners.append((task_id, label(of), of[2], len(runs), *figures, *over))
    heads = ("task", "learner", "environments", "runs", "steps", "mean", "lowest to highest run", "best timetable")
    lines += [*table((*heads, *(f"over {name}" for name in names)), learners), "", "<!-- details -->"]
    rows = []
    for task_id, result in results.items():
        for run in result["runs"]:
            at, highest = max(run["curve"], key=lambda point: float(point[1]))
            on_the_way = f"{highest:.3f} after {at:,}" if len(run["curve"]) > 1 else "-"
            score = bracketed(run["score"]).split(" ", 1)
            settings = (task_id, label(learner_of(run)), run["n_envs"], run["seed"], f"{run['steps']:,}")
            rows.append((*settings, *score, on_the_way, f"{run['wall_s']:.0f}"))
    heads = ("task", "learner", "environments", "training seed", "steps", "score", "95% interval")
    return "\n".join([*lines, "", *table((*heads, "highest on the way", "seconds"), rows)]) + "\n"


def label(of: tuple[str, str, int]) -> str:
    """A learner's name in the tables."""
    name, settings, _ = of
    return LEARNERS[name].label + (f", `{settings}`" if settings else "")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--learner", choices=LEARNERS, default="ppo", help="who learns (default: ppo)")
    parser.add_argument("--cleanrl", type=Path, metavar="PATH", help="where CleanRL's ppo.py is")
    parser.add_argument("--task", action="append", help="task id, repeatable (default: 3)")
    parser.add_argument("--action", default="", help="format of the actions (default: that of the id)")
    parser.add_argument("--options", default="", help="further options of CleanRL's program, in one word")
    parser.add_argument("--envs", type=int, default=1, help="environments of a run (default 1)")
    parser.add_argument("--seeds", type=int, default=1, help="training seeds per task, from 0 (default 1)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of a run (default 1000000)")
    args = parser.parse_args()
    if args.learner == "cleanrl":
        by: Callable[..., None] = partial(run_cleanrl, checked(args.cleanrl), shlex.split(args.options))
    else:
        if args.options:
            parser.error("--options are CleanRL's")
        others = {"rllib": train_rllib, "skrl": train_skrl}
        by = others.get(args.learner) or partial(train, LEARNERS[args.learner])
    learn = partial(by, **({"action": args.action} if args.action else {}))
    torch.set_num_threads(1)
    # Checks of every distribution's arguments: a large part of the time, and without influence on the numbers.
    torch.distributions.Distribution.set_default_validate_args(False)
    settings = " ".join(filter(None, [f"action={args.action}" if args.action else "", args.options]))
    for task_id in args.task or ["3"]:
        env_id = registered_id(get_task(task_id).gym_id, version=2)
        done = {key(run): run["steps"] for run in stored(NAME).get(task_id, {"runs": []})["runs"]}
        for seed in range(args.seeds):
            run = {"learner": args.learner, "settings": settings, "n_envs": args.envs, "seed": seed}
            # CleanRL stops before an update that would exceed the steps.
            if done.get(key(run), 0) < args.steps * (0.95 if args.learner == "cleanrl" else 1.0):
                learn(env_id, args.envs, seed, args.steps, partial(keep_run, task_id, run))
    print(report(stored(NAME)))


if __name__ == "__main__":
    main()
