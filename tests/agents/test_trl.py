"""TRL's own GRPOTrainer on a real server; run where TRL is installed beside this package (`pip install trl==1.16`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import RunningServer


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_tiny_random_model_trains_on_rewards_of_the_server(server: RunningServer, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from agents.integrations.trl_grpo import train

    logged = train(server.url, model=None, steps=2, out=str(tmp_path), episode_length=60)
    steps = [entry for entry in logged if "reward" in entry]
    assert len(steps) == 2
    assert any(entry["tools/call_frequency"] > 0 for entry in steps)
    assert any(entry["reward_std"] > 0 and entry["grad_norm"] > 0 for entry in steps)
