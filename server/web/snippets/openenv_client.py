from inferencegym.client import InferenceGymAction, InferenceGymEnv

with InferenceGymEnv(base_url="http://localhost:7860").sync() as env:
    result = env.reset(task_id=3, seed=42)
    total = 0.0
    while not result.done:
        result = env.step(InferenceGymAction(batch_size=192, kv_budget=0.6, quant_tier="INT8"))
        total += result.reward
print(f"return {total:.1f}, cost {result.observation.cost_so_far:.2f}")
