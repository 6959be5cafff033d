import httpx

server = httpx.Client(base_url="http://localhost:7860")


def post(path, body):
    return server.post(path, json=body).raise_for_status().json()


episode = post("reset", {"task_id": 3, "seed": 42})
seen, done = episode["observation"], False
while not done:
    flood = seen["queue_depth"] > 16 or seen["arrival_rate"] > 60
    knobs = {"batch_size": 384, "spec_length": 0} if flood else {"batch_size": 192, "spec_length": 2}
    action = {"kv_budget": 0.6, "quant_tier": "INT8", **knobs}
    answer = post("step", {"session_id": episode["session_id"], "action": action})
    seen, done = answer["observation"], answer["done"]

grade = post("grader", {"session_id": episode["session_id"]})
print(f"score {grade['score']:.3f}: {grade['feedback']}")
