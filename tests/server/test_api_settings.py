"""Settings are read from the environment, checked at start, and described for the documents."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from inferencegym.errors import InvalidConfigError
from server.app import main
from server.settings import READ_ELSEWHERE, Settings, describe_settings, load_settings
from tests.checkout import PACKAGES, ROOT


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("INFERENCEGYM_") or name in ("PORT", "WORKERS", "WEB_CONCURRENCY", "MAX_CONCURRENT_ENVS"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("INFERENCEGYM_PORT", "0", "an integer from 1 to 65,535"),
        ("PORT", "http", "an integer from 1 to 65,535"),
        ("INFERENCEGYM_WORKERS", "65", "an integer from 1 to 64"),
        ("INFERENCEGYM_DURABILITY", "some", "one of full, process, none"),
        ("INFERENCEGYM_ENV", "chess", "one of serving, traffic"),
        ("INFERENCEGYM_STORE_TIMEOUT_S", "0", "a number from 0.05 to 60"),
        ("INFERENCEGYM_STORE_URL", "mysql://x", "sqlite:///"),
        ("INFERENCEGYM_STORE_URL", "sqlite", "must begin with sqlite:///"),
        ("INFERENCEGYM_STORE_URL", "memory", "must begin with sqlite:///"),
        ("INFERENCEGYM_STORE_URL", "sqlite:/var/x.db", "must begin with sqlite:///"),
        ("INFERENCEGYM_STORE_URL", "sqlite://", "absolute path"),
        ("INFERENCEGYM_STORE_URL", "sqlite://sessions.db", "absolute path"),
        ("INFERENCEGYM_API_KEY", "short", "keys of 8 characters or more"),
        ("INFERENCEGYM_API_KEY", "correct horse, short", "keys of 8 characters or more"),
        ("INFERENCEGYM_API_KEY", "", "keys of 8 characters or more"),
        ("INFERENCEGYM_API_KEY_FILE", "/nowhere/key", "cannot be read: [Errno 2] No such file or directory"),
        ("INFERENCEGYM_TRUSTED_PROXIES", "10.0.0.0/8, nonsense", "addresses or networks, or *"),
        ("INFERENCEGYM_CORS", "yes", "one of read, all, off"),
        ("INFERENCEGYM_LIVE_SESSIONS", "1e3", "an integer from 1 to 100,000"),
    ],
)
def test_a_wrong_value_is_refused_with_variable_and_allowed_range(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfigError) as refused:
        load_settings()
    assert refused.value.field == "INFERENCEGYM_" + name.removeprefix("INFERENCEGYM_")
    assert allowed in str(refused.value)


@pytest.mark.parametrize(("name", "meant"), [("WORKER", "WORKERS"), ("APIKEY", "API_KEY")])
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(f"INFERENCEGYM_{name}", "2")
    with pytest.raises(InvalidConfigError, match=rf"not a setting: did you mean INFERENCEGYM_{meant}\?") as refused:
        load_settings()
    assert refused.value.field == f"INFERENCEGYM_{name}"


def test_links_to_kubernetes_services_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("PORT", "tcp://10.1.1.1:7860"),
        ("SERVICE_HOST", "10.1.1.1"),
        ("SERVICE_PORT", "7860"),
        ("SERVICE_PORT_HTTP", "7860"),
        ("PORT_7860_TCP", "tcp://10.1.1.1:7860"),
        ("PORT_7860_TCP_ADDR", "10.1.1.1"),
        ("REDIS_PORT", "tcp://10.1.1.2:6379"),
        ("REDIS_SERVICE_HOST", "10.1.1.2"),
        ("REDIS_PORT_6379_TCP_PROTO", "tcp"),
    ):
        monkeypatch.setenv(f"INFERENCEGYM_{name}", value)
    assert load_settings() == Settings()
    monkeypatch.setenv("INFERENCEGYM_PORT", "7861")  # as the pod's own env does, which wins over a link
    assert load_settings().port == 7861
    monkeypatch.setenv("INFERENCEGYM_ALSO_PORTS", "8000")
    with pytest.raises(InvalidConfigError, match=r"did you mean INFERENCEGYM_ALSO_PORT\?"):
        load_settings()


def test_a_folder_is_the_one_that_is_named_and_an_empty_name_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, folder in ((str(tmp_path), tmp_path), ("", None)):
        monkeypatch.setenv("INFERENCEGYM_DATA_DIR", value)
        assert load_settings().data_dir == folder


def test_a_refused_api_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCEGYM_API_KEY", "s3cret")
    with pytest.raises(InvalidConfigError) as refused:
        load_settings()
    assert "s3cret" not in str(refused.value)
    assert "s3cret!!" not in repr(Settings(api_key="s3cret!!"))


def test_keys_come_from_the_variable_and_from_a_file_and_an_empty_file_opens_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    monkeypatch.setenv("INFERENCEGYM_API_KEY_FILE", str(file))
    file.write_text("\n")
    with pytest.raises(InvalidConfigError, match=r"INFERENCEGYM_API_KEY_FILE: .*it has no key"):
        load_settings()
    file.write_text("# of the trainers\nfrom a file\nfrom it too\n")
    assert [key.get_secret_value() for key in load_settings().api_key or ()] == ["from a file", "from it too"]
    monkeypatch.setenv("INFERENCEGYM_API_KEY", "correct horse, battery staple")
    keys = [key.get_secret_value() for key in load_settings().api_key or ()]
    assert keys == ["correct horse", "battery staple", "from a file", "from it too"]


def test_every_variable_that_the_code_reads_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = (*PACKAGES, "benchmarks", "notebooks", "scripts")
    places = [ROOT / "Dockerfile", ROOT / "Makefile", ROOT / "docker-compose.yml"]
    places += [
        place for room in rooms for place in (ROOT / room).rglob("*") if place.suffix in (".py", ".ipynb", ".sh")
    ]
    found = {
        name for place in places for name in re.findall(r"INFERENCEGYM_[A-Z_]+", place.read_text(encoding="utf-8"))
    }
    assert {"INFERENCEGYM_TABLE", "INFERENCEGYM_LLM_URL", "INFERENCEGYM_URL", "INFERENCEGYM_PORT"} <= found
    elsewhere = found - {row["variable"] for row in describe_settings()}
    assert elsewhere == READ_ELSEWHERE
    for name in elsewhere:
        monkeypatch.setenv(name, "set in the shell")
    load_settings()


def test_a_store_in_memory_is_refused_to_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCEGYM_STORE_URL", "memory://")
    assert load_settings().workers == 1
    monkeypatch.setenv("WORKERS", "2")
    with pytest.raises(InvalidConfigError) as refused:
        load_settings()
    assert refused.value.field == "INFERENCEGYM_STORE_URL"


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
def test_a_directory_that_cannot_be_used_stops_the_start_and_names_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFERENCEGYM_DATA_DIR", str(tmp_path / place))
    with pytest.raises(SystemExit):
        main()
    assert re.search(rf"INFERENCEGYM_DATA_DIR: '\S*{place}'", capsys.readouterr().err)


def test_a_directory_that_is_missing_is_made_and_an_empty_one_counts_as_unset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFERENCEGYM_DATA_DIR", str(tmp_path / "a" / "b"))
    assert load_settings().sqlite_path() == tmp_path / "a" / "b" / "sessions.db"
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.setenv("INFERENCEGYM_DATA_DIR", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert load_settings().sqlite_path() == tmp_path / "inferencegym" / "sessions.db"


def test_values_come_from_the_environment_with_the_usual_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "9000")
    monkeypatch.setenv("WORKERS", "3")
    monkeypatch.setenv("MAX_CONCURRENT_ENVS", "128")
    monkeypatch.setenv("INFERENCEGYM_TRUSTED_PROXIES", "10.0.0.0/8, 127.0.0.1")
    settings = load_settings()
    assert (settings.port, settings.workers, settings.max_concurrent_envs) == (9000, 3, 128)
    assert [str(network) for network in settings.trusted_proxies] == ["10.0.0.0/8", "127.0.0.1/32"]
    monkeypatch.setenv("INFERENCEGYM_PORT", "9001")
    assert load_settings().port == 9001, "the product's own name goes before the common one"


def test_every_setting_is_described_with_its_allowed_values() -> None:
    rows = describe_settings()
    assert [row["variable"] for row in rows] == ["INFERENCEGYM_" + name.upper() for name in Settings.model_fields]
    for row in rows:
        assert row["description"].endswith((".", ")")), row
        assert row["allowed"], row


def test_the_default_store_lies_in_the_users_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = Settings().sqlite_path()
    assert found == tmp_path / "state" / "inferencegym" / "sessions.db"
    assert found.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(InvalidConfigError, match="INFERENCEGYM_DATA_DIR: '/proc/nowhere/inferencegym'"):
        Settings().sqlite_path()
    assert Settings(data_dir=tmp_path / "mine").sqlite_path() == tmp_path / "mine" / "sessions.db"
    assert Settings(store_url="sqlite:///var/x.db").sqlite_path() == Path("/var/x.db")


def test_log_lines_of_libraries_are_json_too() -> None:
    import orjson

    from server.net.logs import JsonFormatter

    record = logging.LogRecord("uvicorn.error", logging.WARNING, "file", 1, "port %d", (7860,), None)
    line = orjson.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("warning", "uvicorn.error", "port 7860")


@pytest.mark.parametrize(("most", "one_client"), [(1, 1), (2, 2), (4, 3), (64, 48), (128, 96)])
def test_one_client_may_have_three_quarters_of_the_websocket_sessions_unless_it_is_set(
    most: int, one_client: int
) -> None:
    assert load_settings(max_concurrent_envs=most).envs_per_client() == one_client
    assert load_settings(max_concurrent_envs=most, concurrent_envs_per_client=7).envs_per_client() == 7


def test_two_short_keys_are_one_sentence_and_a_far_name_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCEGYM_API_KEY", "short,shorter")
    with pytest.raises(InvalidConfigError, match=r"^[^;]*$"):
        load_settings()
    monkeypatch.setenv("INFERENCEGYM_LOG_LEVEL", "debug")
    with pytest.raises(InvalidConfigError, match="INFERENCEGYM_LOG_LEVEL is not a setting: allowed are"):
        load_settings()


def test_a_database_of_another_user_is_named_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sessions.db").touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "sessions.db")  # root may write all
    with pytest.raises(InvalidConfigError, match=r"sessions\.db belongs to user \d+, not to \d+"):
        Settings(data_dir=tmp_path).sqlite_path()
