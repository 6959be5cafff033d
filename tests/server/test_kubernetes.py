"""The manifests in docs/deploy/kubernetes: by Kubernetes' schemas, by their references, and with running servers."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from server.settings import Settings
from tests.checkout import ROOT
from tests.redis_server import RedisServer
from tests.servers import RunningServer, running_server

FOLDER = ROOT / "docs/deploy/kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
DOCUMENT = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
OLDEST = "1.30"
SECRET = {"clients": "of-users, of-trainers", "prometheus": "of-prometheus", "redis": "of-redis"}


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def only(name: str, kind: str) -> dict[str, Any]:
    (found,) = (one for one in objects(name) if one["kind"] == kind)
    return found


def pod(name: str, kind: str) -> dict[str, Any]:
    template: dict[str, Any] = only(name, kind)["spec"]["template"]
    return template


SERVER, REDIS = pod("server.yaml", "Deployment"), pod("redis.yaml", "StatefulSet")


@pytest.mark.parametrize("name", [name for name in FILES if name != "monitoring.yaml"])
@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    assert f"Kubernetes {OLDEST} or later" in DOCUMENT
    for one in objects(name):
        kubernetes_validate.validate(one, version, strict=True)


def test_kustomize_applies_every_file_with_the_image_of_the_registry() -> None:
    (kustomization,) = objects("kustomization.yaml")
    assert sorted(kustomization["resources"]) == FILES
    (image,) = kustomization["images"]
    assert image["name"] == SERVER["spec"]["containers"][0]["image"]


def test_selectors_ports_and_secrets_name_what_there_is() -> None:
    labels = [SERVER["metadata"]["labels"], REDIS["metadata"]["labels"]]
    ports = {port["name"] for one in (SERVER, REDIS) for port in one["spec"]["containers"][0]["ports"]}
    service, of_redis = only("server.yaml", "Service"), only("redis.yaml", "Service")
    assert [one["spec"]["selector"] for one in (service, of_redis)] == labels
    assert {one["spec"]["ports"][0]["targetPort"] for one in (service, of_redis)} == ports
    assert [one["spec"]["podSelector"]["matchLabels"] for one in objects("network.yaml")] == labels
    assert only("server.yaml", "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels[0]
    backend = only("ingress.yaml", "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": service["metadata"]["name"], "port": {"name": service["spec"]["ports"][0]["name"]}}
    monitor = only("monitoring.yaml", "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert monitor["endpoints"][0]["port"] == backend["port"]["name"]
    created = re.search(r"kubectl create secret generic gym (.*?)\nkubectl", DOCUMENT, re.DOTALL)
    assert created is not None
    assert set(re.findall(r"--from-literal=(\w+)=", created[1])) == set(SECRET)
    named = re.findall(r"secretKeyRef: \{name: gym, key: (\w+)\}", "".join((FOLDER / f).read_text() for f in FILES))
    assert set(named) == set(SECRET)
    assert monitor["endpoints"][0]["authorization"]["credentials"] == {"name": "gym", "key": "prometheus"}


def test_a_pod_gets_the_time_that_the_server_takes_to_end() -> None:
    grace = Settings.model_fields["shutdown_grace_s"].default
    wait = SERVER["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert SERVER["spec"]["terminationGracePeriodSeconds"] > wait + grace


def test_the_ingress_does_what_the_tested_nginx_does() -> None:
    site = (ROOT / "docs/deploy/nginx.conf").read_text(encoding="utf-8") + DOCUMENT
    directives = {
        "lb-method": rf"hash {re.escape('$remote_addr$http_x_client_id')} consistent",
        "client-max-body-size": "client_max_body_size 16m",
        "proxy-connect-timeout": "proxy_connect_timeout 2s",
        "proxy-read-timeout": "proxy_read_timeout 320s",
    }
    notes = only("ingress.yaml", "Ingress")["metadata"]["annotations"]
    for name, directive in directives.items():
        (found,) = re.findall(rf"({directive});", site)
        assert found.endswith(notes[f"nginx.org/{name}"])
    community = {key.partition("/")[2]: value for key, value in notes.items() if key.startswith("nginx.ingress.")}
    assert community == {
        "upstream-hash-by": "$remote_addr$http_x_client_id",
        "proxy-body-size": "16m",
        "proxy-connect-timeout": "2",
        "proxy-read-timeout": "320",
    }


def test_two_replicas_share_episodes_and_are_not_ready_without_redis(tmp_path: Path) -> None:
    """The pods' own environment, with the secret's values and a Redis that asks for the password."""
    container = SERVER["spec"]["containers"][0]
    redis = RedisServer(tmp_path)
    redis.start()
    with ExitStack() as opened:
        opened.callback(redis.kill)
        with redis.client() as client:
            client.config_set("requirepass", SECRET["redis"])
        given: dict[str, str] = {}
        for variable in container["env"]:
            value = variable.get("value") or SECRET[variable["valueFrom"]["secretKeyRef"]["key"]]
            given[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], value)
        store = given.pop("INFERENCEGYM_STORE_URL").replace("gym-redis:6379", f"127.0.0.1:{redis.port}")
        settings = {
            name.removeprefix("INFERENCEGYM_").lower(): value
            for name, value in given.items()
            if name.startswith("INFERENCEGYM_")
        }
        replicas: list[RunningServer] = []
        for name in ("one", "two"):
            folder = tmp_path / name
            folder.mkdir()
            replicas.append(opened.enter_context(running_server(folder, health=200, store_url=store, **settings)))
        one, two = (server.client for server in replicas)
        assert one.get("/tasks").status_code == 401
        for client_of, key in ((one, "of-users"), (two, "of-trainers")):
            client_of.headers["X-API-Key"] = key
        session = one.post("/reset", json={"task_id": 1}).json()["session_id"]
        steps = [
            client_of.post("/step", json={"session_id": session, "action": {"batch_size": 64}}).json()
            for client_of in (one, two, one)
        ]
        assert [step["info"]["timestep"] for step in steps] == [1, 2, 3]
        scrape = {"Authorization": f"Bearer {SECRET['prometheus']}", "Host": "10.244.1.7:7860", "X-API-Key": ""}
        scraped = two.get("/metrics", headers=scrape)
        assert scraped.status_code == 200
        rules = str(only("monitoring.yaml", "PrometheusRule")["spec"]["groups"])
        known = set(re.findall(r"(?m)^# TYPE (\w+)", scraped.text))
        used = {name.removesuffix("_bucket") for name in re.findall(r"inferencegym_\w+", rules)}
        assert used - known <= {"inferencegym_worker_exits_total"}
        redis.kill()
        probes = [container[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")]
        assert [one.get(path).status_code for path in probes] == [503, 200]


def test_the_document_says_how_many_lines_each_setup_takes() -> None:
    parts = re.split(r"(?m)^## ", DOCUMENT)[1:]
    lines = {part.splitlines()[0].lower().replace(" ", "-"): len(part.strip().splitlines()) for part in parts}
    rows = re.findall(r"(?m)^\| .*?\|.*?\| (.*#.*) \| (\d+) \|$", DOCUMENT)
    assert len(rows) == 5
    for read, told in rows:
        assert abs(sum(lines[name] for name in re.findall(r"\(#(.*?)\)", read)) - int(told)) <= 5, read
