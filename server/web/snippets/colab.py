import json
import urllib.request

import matplotlib.pyplot as plt

URL = "http://localhost:7860"  # of a server that Colab can reach


def post(path, body):
    request = urllib.request.Request(f"{URL}/{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


figure, (queue, ttft) = plt.subplots(1, 2, figsize=(11, 3.5))
for agent in ("naive", "heuristic", "best_static"):
    episode = post("play", {"task_id": 3, "seed": 42, "agent": agent})
    queue.plot(episode["observation"]["queue_depth"], label=f"{agent}: {episode['score']:.3f}")
    ttft.semilogy(episode["metrics"]["ttft_p50_ms"])
queue.set(title="Requests waiting", xlabel="second")
ttft.set(title="Median time to first token (ms)", xlabel="second")
queue.legend()
plt.show()
