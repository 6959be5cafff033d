"""``inferencegym train``: train a PPO policy in process, or against a running server."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from inferencegym.errors import InvalidConfigError, refusal
from inferencegym.files import make_folder
from inferencegym.installation import install_hint
from inferencegym.task_files import RewardKind

if TYPE_CHECKING:
    from inferencegym.vector_env import AutoresetVectorEnv


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--task", default="3", help="task id (default 3)")
    parser.add_argument(
        "--steps", type=int, default=600_000, help="steps in all, rounded up to whole rollouts (default 600000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the learner and of its episodes (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="directory for policy, checkpoints, curve and events")
    parser.add_argument("--envs", type=int, help="episodes played in parallel (default 64; 128 where the task scales)")
    parser.add_argument("--from-scratch", action="store_true", help="start from a random network, without a teacher")
    parser.add_argument(
        "--reward",
        choices=get_args(RewardKind),
        default="grade",
        help="reward of a step (default: grade, its contribution to the score)",
    )
    parser.add_argument("--url", help="train against this server instead of in process")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument("--force", action="store_true", help="overwrite the run in --out if there is one")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Train a policy and print the result."""
    if args.envs is not None and args.envs < 1:
        raise refusal("--envs", args.envs, "at least 1")
    try:
        from agents.ppo_demo import OBSERVATION, local_envs, rise, settings_for, train
    except ModuleNotFoundError as error:
        raise InvalidConfigError(f"{install_hint(error) or error} (in a clone: make rl)") from error
    from env.families import serving_task

    task = serving_task(args.task)
    if (args.out / "episodes.csv").exists() and not (args.resume or args.force):
        raise InvalidConfigError(
            f"{args.out} holds a run already: continue it with --resume, overwrite it with --force, or choose another "
            "--out"
        )
    chosen = {} if args.envs is None else {"n_envs": args.envs}
    settings = settings_for(task, from_scratch=args.from_scratch, reward=args.reward, **chosen)
    least = settings.n_steps * settings.n_envs
    if args.steps < least:
        raise refusal("--steps", args.steps, f"at least {least}, after which PPO first updates its policy")
    make_folder(args.out)

    def make_envs(hold: int) -> AutoresetVectorEnv:
        if not args.url:
            return local_envs(task.task_id, settings, hold)
        from inferencegym.client.gym import HTTPVectorEnv

        return HTTPVectorEnv(
            args.url,
            settings.n_envs,
            task.task_id,
            reward=args.reward,
            hold=hold,
            observation=OBSERVATION,
            action=settings.action,
            autoreset_mode="SameStep",
        )

    started = time.perf_counter()
    trained = train(
        make_envs,
        args.out,
        steps=args.steps,
        seed=args.seed,
        settings=settings,
        resume=args.resume,
        progress=not args.quiet,
        label=f"task {task.task_id}, seed {args.seed}",
    )
    wall_s = time.perf_counter() - started
    print(f"{trained.model.num_timesteps} steps in {wall_s:.1f} s; files in {trained.out}")
    if trained.episodes and trained.episodes[-1][0] >= 10_000:
        test = rise(trained.episodes)
        print(
            f"return: first 5k steps {test['first_mean']:.2f}, last 5k {test['last_mean']:.2f} "
            f"(one-sided Mann-Whitney p = {test['p_value']:.1e})"
        )
    print(f"score it: inferencegym evaluate --task {task.task_id} --agent ppo:{trained.out / 'policy.npz'}")
    return 0
