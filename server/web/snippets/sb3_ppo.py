import gymnasium
import inferencegym.gym  # registers the environments
from agents.sb3 import SB3VecEnv
from gymnasium.vector import AutoresetMode
from stable_baselines3 import PPO

envs = gymnasium.make_vec(
    "InferenceGym/StaticUniform-v1", num_envs=16, observation="normalised", action="box",
    autoreset_mode=AutoresetMode.SAME_STEP,
)
model = PPO("MlpPolicy", SB3VecEnv(envs), n_steps=100, batch_size=200, gamma=0.95, use_sde=True, device="cpu", verbose=1)
model.learn(8_000)  # fifty thousand and more for a policy worth keeping
model.save("ppo-task-1")
