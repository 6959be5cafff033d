import gymnasium
import numpy as np

import inferencegym.gym  # registers the environments

envs = gymnasium.make_vec("InferenceGym/AdversarialMultiTenant-v2", num_envs=64)
observation, info = envs.reset(seed=42)
returns = np.zeros(64)
for _ in range(40):  # steps of five seconds
    actions = np.stack([envs.single_action_space.sample() for _ in range(64)])
    observation, reward, terminated, truncated, info = envs.step(actions)
    returns += reward
print(f"random play: mean return {returns.mean():.1f} over {envs.num_envs} episodes")
