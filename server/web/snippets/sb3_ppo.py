import gymnasium
from gymnasium.vector import AutoresetMode
from stable_baselines3 import PPO

import inferencegym.gym  # registers the environments
from agents.integrations.sb3 import SB3VecEnv

envs = gymnasium.make_vec(
    "InferenceGym/StaticUniform-v2",
    num_envs=16,
    autoreset_mode=AutoresetMode.SAME_STEP,
)
model = PPO("MlpPolicy", SB3VecEnv(envs), n_steps=100, batch_size=200, device="cpu")
model.learn(3_200)  # fifty thousand or more for a useful policy
model.save("ppo-task-1")
print(f"trained for {model.num_timesteps} steps")
