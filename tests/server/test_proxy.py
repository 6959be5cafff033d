"""The nginx configuration of docker-compose.yml, before two real servers."""

from __future__ import annotations

import getpass
import grp
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import yaml

from tests.programs import program
from tests.servers import ROOT, RunningServer, free_port, running_server, until

N_CLIENTS = 8


def listens(port: int) -> bool:
    """Whether a program listens on this port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def nginx(directory: Path, site: str, port: int) -> Iterator[str]:
    """A running nginx with this ``conf.d`` file; gives its address."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {directory}/{kind};" for kind in kinds)
    # Started by root, its workers would be another user, who may not write here.
    user = f"user {getpass.getuser()} {grp.getgrgid(os.getgid()).gr_name};" if os.getuid() == 0 else ""
    whole = f"{user} pid {directory}/pid; daemon off; events {{}} http {{ access_log off; {temporary}\n{site}\n}}"
    (directory / "nginx.conf").write_text(whole)
    process = subprocess.Popen([program("nginx"), "-e", "stderr", "-c", directory / "nginx.conf"])
    try:
        until(lambda: listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def compose_proxy(directory: Path, realip: str = "") -> Iterator[tuple[str, list[RunningServer]]]:
    """Two replicas behind docker-compose.yml's proxy; gives its address and the replicas."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    site = compose["configs"]["proxy"]["content"].replace("$$", "$")
    folders = [directory / name for name in ("one", "two", "proxy")]
    for folder in folders:
        folder.mkdir()
    port = free_port()
    with (
        running_server(folders[0], trusted_proxies="*") as one,
        running_server(folders[1], trusted_proxies="*") as two,
    ):
        both = f"server 127.0.0.1:{one.port}; server 127.0.0.1:{two.port};"
        # Debian's nginx is too old for names that are looked up again.
        for ours, here in {
            "resolver 127.0.0.11 valid=5s;": "",
            "server replica:7860 resolve;": both,
            "listen 7860;": f"listen 127.0.0.1:{port}; {realip}",
        }.items():
            assert site.count(ours) == 1
            site = site.replace(ours, here)
        with nginx(folders[2], site, port) as url:
            yield url, [one, two]


@contextmanager
def documents_nginx(directory: Path, ports: Sequence[int]) -> Iterator[tuple[str, int]]:
    """nginx with docs/deploy/nginx.conf and the document's several machines; gives its address and its plain port."""
    deploy = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    site = (ROOT / "docs/deploy/nginx.conf").read_text(encoding="utf-8")
    (upstream,) = re.findall(r"```nginx\n(upstream inferencegym \{\n.*?)```", deploy, re.DOTALL)
    port, plain = free_port(), free_port()
    for pattern, here in {
        r"upstream inferencegym \{.*?\}": upstream,
        r" *listen \[::\].*?;\n": "",
        r" *ssl_certificate.*?;\n": "",
        r"listen 80;": f"listen 127.0.0.1:{plain};",
        r"listen 443 ssl;": f"listen 127.0.0.1:{port};",
        r"(server 10\.0\.0\.1\d:7860;\s*)+": " ".join(f"server 127.0.0.1:{one};" for one in ports),
    }.items():
        site, found = re.subn(pattern, here, site, flags=re.DOTALL)
        assert found, pattern
    directory.mkdir()
    with nginx(directory, site, port) as url:
        yield url, plain


def test_the_documents_nginx_keeps_a_client_on_one_of_several_machines_under_its_host_name(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    given = {"trusted_proxies": "127.0.0.1", "allowed_hosts": "gym.example,localhost,127.0.0.1"}
    with (
        running_server(folders[0], **given) as one,
        running_server(folders[1], **given) as two,
        documents_nginx(tmp_path / "proxy", [one.port, two.port]) as (url, plain),
    ):
        for client in range(N_CLIENTS):
            headers = {"Host": "gym.example", "X-Client-Id": f"learner-{client}", "Connection": "close"}
            session = httpx.post(f"{url}/reset/batch", json={"task_id": 1, "n": 1}, headers=headers).json()
            for _ in range(4):
                body = {"session_id": session["session_id"], "actions": [[[0.5, 2, 64, 0, 0]]]}
                assert httpx.post(f"{url}/step/batch", json=body, headers=headers).status_code == 200
        moved = httpx.get(f"http://127.0.0.1:{plain}/web", headers={"Host": "gym.example"})
        assert moved.headers["location"] == "https://gym.example/web"
        assert httpx.get(f"{url}/metrics", headers={"Host": "localhost"}).status_code == 200
        assert httpx.get(f"{url}/metrics", headers={"Host": "other.example"}).status_code == 403


def test_a_body_that_is_too_long_gets_413_through_the_documents_nginx(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, trusted_proxies="127.0.0.1") as server,
        documents_nginx(tmp_path / "proxy", [server.port]) as (url, _),
    ):
        sizes = [1_100_000, 4_000_000, 13_000_000] * 8
        statuses = [httpx.post(f"{url}/step", content=bytes(size), timeout=30).status_code for size in sizes]
    assert statuses == [413] * len(sizes)


def test_a_machine_that_is_switched_off_delays_a_request_by_two_seconds_and_is_left_out(tmp_path: Path) -> None:
    # A listener whose queue is full drops further connections, as a network does with those to a host that is off.
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        off = listener.getsockname()
        for _ in range(4):
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(off)
        server = opened.enter_context(running_server(tmp_path, trusted_proxies="127.0.0.1"))
        url, _ = opened.enter_context(documents_nginx(tmp_path / "proxy", [server.port, off[1]]))
        took_s = []
        for client in range(N_CLIENTS):
            started = time.monotonic()
            answer = httpx.post(f"{url}/reset", headers={"X-Client-Id": f"learner-{client}"}, timeout=30)
            took_s.append(time.monotonic() - started)
            assert answer.status_code == 200
    slow = [one for one in took_s if one > 1.0]
    assert slow, "no client was sent to the machine that is off"
    # Each process of nginx notices by itself; this configuration has one.
    assert len(slow) == 1
    assert slow[0] < 10


def test_a_client_behind_the_proxy_keeps_its_batch_session(tmp_path: Path) -> None:
    with compose_proxy(tmp_path) as (url, replicas):
        for client in range(N_CLIENTS):
            # A new connection for each request, as a program without a pool makes them.
            headers = {"X-Client-Id": f"learner-{client}", "Connection": "close"}
            started = httpx.post(f"{url}/reset/batch", json={"task_id": 1, "n": 1}, headers=headers)
            for _ in range(4):
                body = {"session_id": started.json()["session_id"], "actions": [[[0.5, 2, 64, 0, 0]]]}
                answer = httpx.post(f"{url}/step/batch", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
        resets = [re.findall(r'path="/reset/batch".* (\d+)', s.client.get("/metrics").text) for s in replicas]
        assert all(resets), "clients are spread over both"


def test_the_page_plays_through_the_proxy_and_a_terminator_of_tls_before_it(tmp_path: Path) -> None:
    deploy = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    (realip,) = re.findall(r"```nginx\n(set_real_ip_from .*?)```", deploy, re.DOTALL)
    realip, n_networks = re.subn(r"set_real_ip_from \S+;", "set_real_ip_from 127.0.0.1;", realip)
    assert n_networks == 1
    with compose_proxy(tmp_path, realip) as (url, replicas):
        host = url.removeprefix("http://").replace("127.0.0.1", "gym.example.com")

        def reset(origin: str) -> httpx.Response:
            headers = {"Host": host, "Origin": origin, "X-Forwarded-For": "203.0.113.9"}
            return httpx.post(f"{url}/reset", json={"task_id": 1}, headers=headers)

        assert reset(f"http://{host}").status_code == 200
        assert reset(f"https://{host}").status_code == 200
        assert reset("http://gym.example.com").json()["detail"]["code"] == "foreign_origin"
        assert any('"client":"203.0.113.9"' in replica.log.read_text() for replica in replicas)
