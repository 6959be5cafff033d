"""The nginx configuration of docker-compose.yml, before two real servers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from tests.programs import program
from tests.servers import ROOT, free_port, running_server, wait_for_health

N_CLIENTS = 8


@contextmanager
def nginx(directory: Path, site: str, port: int) -> Iterator[str]:
    """A running nginx with this ``conf.d`` file; gives its address."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {directory}/{kind};" for kind in kinds)
    whole = f"pid {directory}/pid; daemon off; events {{}} http {{ access_log off; {temporary}\n{site}\n}}"
    (directory / "nginx.conf").write_text(whole)
    process = subprocess.Popen([program("nginx"), "-e", "stderr", "-c", directory / "nginx.conf"])
    try:
        wait_for_health(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_a_client_behind_the_proxy_keeps_its_batch_session(tmp_path: Path) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    site = compose["configs"]["proxy"]["content"].replace("$$", "$")
    folders = [tmp_path / name for name in ("one", "two", "proxy")]
    for folder in folders:
        folder.mkdir()
    port = free_port()
    with (
        running_server(folders[0], trusted_proxies="*") as one,
        running_server(folders[1], trusted_proxies="*") as two,
    ):
        both = f"server 127.0.0.1:{one.port}; server 127.0.0.1:{two.port};"
        site = site.replace("server replica:7860;", both).replace("listen 7860;", f"listen 127.0.0.1:{port};")
        with nginx(folders[2], site, port) as url:
            for client in range(N_CLIENTS):
                # A new connection for each request, as a program without a pool makes them.
                headers = {"X-Client-Id": f"learner-{client}", "Connection": "close"}
                started = httpx.post(f"{url}/reset/batch", json={"task_id": 1, "n": 1}, headers=headers)
                for _ in range(4):
                    body = {"session_id": started.json()["session_id"], "actions": [[[0.5, 2, 64, 0, 0]]]}
                    answer = httpx.post(f"{url}/step/batch", json=body, headers=headers)
                    assert answer.status_code == 200, answer.text
            resets = [re.findall(r'path="/reset/batch".* (\d+)', s.client.get("/metrics").text) for s in (one, two)]
            assert all(resets), "clients are spread over both"
