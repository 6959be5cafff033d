"""An agent's episodes as a data set in Minari's format, and a policy cloned from it.

    python -m agents.integrations.minari --task 3 --agent best_adaptive

records episodes on training seeds (Minari keeps data sets in ``~/.minari``, or ``MINARI_DATASETS_PATH``), fits a small
network to what the agent did, and compares its score on held-out seeds with those of the agent and of the heuristic.
Needs the extra ``rl``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from agents.evaluate import Decide, bracketed_score, compare, gym_scores, interval
from agents.protocol import knobs_of
from agents.registry import make_agent
from agents.seeds import HELD_OUT_SEEDS, TRAINING_SEEDS
from env.families import serving_task
from inferencegym.errors import InferenceGymError, InvalidConfigError
from inferencegym.spaces.formats import action_codec_of
from inferencegym.tasks import TaskId, get_calibration
from inferencegym.vector_env import registered_id


def record(dataset_id: str, task_id: TaskId, agent: str, seeds: Sequence[int], **settings: Any) -> Any:
    """Play an agent, one episode per seed, and store the steps: a ``minari.MinariDataset``.

    The environment is the task's ``-v2`` id with ``settings`` over its own. An action is the nearest in its format to
    the agent's knobs, and is what is played, so ``dataset.recover_environment()`` plays the same numbers again from an
    episode's seed and actions. Raises InvalidConfigError where Minari has a data set of this id: none is replaced.
    """
    import minari
    from minari.data_collector.episode_buffer import EpisodeBuffer
    from minari.storage import get_dataset_path

    # Not minari.list_local_datasets(), which raises TypeError at any folder whose name is not an id with a version.
    if get_dataset_path(dataset_id).exists():
        raise InvalidConfigError(
            f"there is a data set {dataset_id}: choose another id, or delete it with `minari delete {dataset_id}`",
            "dataset_id",
        )
    task = serving_task(task_id)
    env: Any = gymnasium.make("inferencegym.gym:" + registered_id(task.gym_id, version=2), **settings)
    codec = action_codec_of(env.spec.kwargs["action"], task, get_calibration(task.task_id))
    player, episodes = make_agent(agent, task), []
    for seed in seeds:
        player.reset(1)
        episode = EpisodeBuffer(seed=seed, observations=[env.reset(seed=seed)[0]], actions=[])
        while not any(episode.terminations[-1:]):
            action = codec.encode(knobs_of(player, env.unwrapped.agent_observation))[0]
            seen, reward, terminated, truncated, _ = env.step(action)
            episode.observations.append(seen)
            episode.actions.append(action)
            episode.rewards.append(reward)
            episode.terminations.append(terminated)
            episode.truncations.append(truncated)
        episodes.append(episode)
    about = f"{agent} on task {task.task_id} of InferenceGym"
    with warnings.catch_warnings():
        # Author, address and link to the code are for whoever publishes the data: dataset.storage.update_metadata.
        warnings.simplefilter("ignore", UserWarning)
        return minari.create_dataset_from_buffers(
            dataset_id, episodes, env, algorithm_name=agent, description=about, data_format="arrow"
        )


def clone(dataset: Any, passes: int = 300, seed: int = 0) -> Decide:
    """Behaviour cloning: a network (64, 64) that takes the likeliest action of the data at an observation.

    Its actions are one choice or several (``Discrete``, ``MultiDiscrete``), each with a cross entropy of its own.
    """
    import torch
    from torch import nn

    torch.manual_seed(seed)
    episodes = list(dataset.iterate_episodes())
    seen = torch.as_tensor(np.concatenate([each.observations[:-1] for each in episodes]))
    taken = torch.as_tensor(np.concatenate([each.actions for each in episodes]))
    space = dataset.action_space
    sizes = [int(space.n)] if isinstance(space, gymnasium.spaces.Discrete) else space.nvec.tolist()
    taken = taken.reshape(len(taken), len(sizes))
    net: Any = nn.Sequential(
        nn.Linear(seen.shape[1], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, sum(sizes))
    )
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(passes):
        order: Any = torch.randperm(len(seen))
        for rows in order.split(256):
            parts = net(seen[rows]).split(sizes, dim=1)
            loss: Any = sum(nn.functional.cross_entropy(part, taken[rows, i]) for i, part in enumerate(parts))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def decide(observation: NDArray[np.float32]) -> NDArray[Any]:
        with torch.no_grad():
            parts = net(torch.as_tensor(observation)).split(sizes, dim=1)
        chosen = np.stack([part.argmax(dim=1).numpy() for part in parts], axis=1)
        return chosen if isinstance(space, gymnasium.spaces.MultiDiscrete) else chosen[:, 0]

    return decide


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--task", default="3", help="task id (default: 3)")
    parser.add_argument("--agent", default="best_adaptive", help="agent to record (default: best_adaptive)")
    parser.add_argument("--id", help="id of the data set (default: made of task and agent)")
    parser.add_argument("--hold", type=int, default=5, help="seconds of a step (default: 5)")
    args = parser.parse_args()
    try:
        task = serving_task(args.task)
        dataset_id = args.id or f"inferencegym/{task.gym_id.lower()}/{args.agent.replace('_', '-')}-v0"
        dataset = record(dataset_id, task.task_id, args.agent, TRAINING_SEEDS, hold=args.hold)
    except InferenceGymError as error:
        parser.error(str(error))
    lines = [f"{dataset_id}: {dataset.total_episodes} episodes, {dataset.total_steps} steps"]
    cloned = gym_scores(dataset.env_spec.id, clone(dataset), hold=args.hold)
    scores = {"cloned": interval(cloned).to_dict()}
    names = list(dict.fromkeys([args.agent, "heuristic"]))
    scores |= {e["agent"]: e["score"] for e in compare(task, names, HELD_OUT_SEEDS)["agents"]}
    lines += [f"{name}: {bracketed_score(score)}" for name, score in scores.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
