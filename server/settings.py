"""Settings of the server, read from ``INFERENCEGYM_*`` environment variables and checked at start."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from annotated_types import Ge, Le
from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from env.families import FAMILIES, SERVING
from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.files import make_folder
from inferencegym.messages import Allowed

PREFIX: Final = "INFERENCEGYM_"
READ_ELSEWHERE: Final = frozenset(
    PREFIX + name
    for name in (
        *("TABLE", "TASKS", "TRAFFIC_TASKS"),
        *("LLM_URL", "LLM_KEY", "LLM_MODEL"),
        *("URL", "DEMO_REPOSITORY", "DEMO_STEPS", "DEMO_TASK"),
    )
)
"""Variables of this prefix that other packages read: the simulator, the language-model agent, the notebook."""

HOST: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
"""Pattern of a host name as in the Host header, without port; a leading ``*.`` allows all names below it."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Durability = Literal["full", "process", "none"]


class Settings(BaseSettings):
    """Settings of one server. Build them with :func:`load_settings` to get errors that name the variable."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True)

    env: Annotated[str, Allowed("one of " + ", ".join(FAMILIES))] = Field(
        SERVING, description="Environment served at the root path; the other one stays under its own prefix."
    )
    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int = Field(
        7860, ge=1, le=65535, description="Port to listen on.", validation_alias=AliasChoices(PREFIX + "PORT", "PORT")
    )
    also_port: int = Field(0, ge=0, le=65535, description="A second port for the same server (0 = none).")
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Server processes; sessions are shared through the store.",
        validation_alias=AliasChoices(PREFIX + "WORKERS", "WORKERS", "WEB_CONCURRENCY"),
    )
    health_status: Literal["healthy", "ok"] = Field(
        "healthy", description='Word in the "status" of /health, for probes that compare it.'
    )

    store_url: str = Field(
        "",
        description="Where episodes are kept: sqlite:///absolute/path.db, redis://host:6379/0, rediss://..., or "
        "memory:// (lost with the process, and for one worker only). Empty: a SQLite file in the data directory.",
    )
    data_dir: Path | None = Field(
        None,
        description="Directory of the SQLite file. Unset: inferencegym under $XDG_STATE_HOME or ~/.local/state if that "
        "can be written, else under the temporary directory (the start-up log says which).",
    )
    durability: Durability = Field(
        "process",
        description="What an acknowledged step survives with SQLite. full: power loss (one fsync per step). process: "
        "kill -9 of the server; after a power loss the last moments before it may be missing, the file stays sound. "
        "none: as process, but a power loss may damage the file.",
    )
    store_timeout_s: float = Field(
        5.0, ge=0.05, le=60, description="Longest wait for the store before a request is answered with 503."
    )
    session_ttl_s: int = Field(
        86_400, ge=1, le=31_536_000, description="Seconds after its last step that a session is forgotten."
    )
    max_sessions: int = Field(
        20_000,
        ge=1,
        le=10_000_000,
        description="Sessions kept in the store; at the limit the oldest finished episodes make room, then unfinished "
        "ones that were not played for ten minutes, first those of the clients with the most; else 503.",
    )
    max_sessions_per_client: int = Field(
        5_000,
        ge=1,
        le=10_000_000,
        description="Unfinished sessions of one client in the store; at the limit new ones replace those that "
        "it did not play for ten minutes, the longest idle first; without such sessions it gets 429.",
    )
    live_sessions: int = Field(
        1_200,
        ge=1,
        le=100_000,
        description="Environments held in memory per process; others are rebuilt from the store when they are used.",
    )
    live_steps: int = Field(
        200_000,
        ge=100,
        le=1_000_000_000,
        description="Seconds of all environments held in memory per process: bounds memory where episodes are long.",
    )
    max_concurrent_envs: int = Field(
        256,
        ge=1,
        le=10_000,
        description="WebSocket sessions at once, per process and environment.",
        validation_alias=AliasChoices(PREFIX + "MAX_CONCURRENT_ENVS", "MAX_CONCURRENT_ENVS"),
    )
    concurrent_envs_per_client: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="WebSocket sessions of one client at once, per process and environment. Unset: three quarters of "
        "INFERENCEGYM_MAX_CONCURRENT_ENVS.",
    )

    api_key: SecretStr | None = Field(
        None,
        description="If set, every path but /health requires it: `Authorization: Bearer KEY` or `X-API-Key: KEY`; a "
        "browser asks for it as the password, with any user name.",
    )
    trusted_proxies: Annotated[tuple[Network, ...], NoDecode] = Field(
        (),
        description="Comma-separated addresses or networks whose X-Forwarded-For is believed; * believes every peer.",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, Allowed("host names without ports, or *.example.com")] = Field(
        (),
        description="Comma-separated names that the Host header may have on every path but /health; *.example.com "
        "stands for all names below example.com. Others are refused with 403. Empty: any name.",
    )
    cors: Literal["read", "all", "off"] = Field(
        "read",
        description="What pages of other origins may do: read (GET), all (GET, POST and WebSockets) or nothing. "
        "More than that is refused with 403.",
    )
    frame_ancestors: str = Field(
        "'self' https://huggingface.co https://*.hf.space",
        description="Sites that may show the web page in a frame (value of the CSP directive frame-ancestors).",
    )

    max_body_bytes: int = Field(1_048_576, ge=1_024, le=1_073_741_824, description="Largest request body, in bytes.")
    max_log_bytes: int = Field(
        12_582_912, ge=1_024, le=1_073_741_824, description="Largest request body of /grader, in bytes."
    )
    max_trace_bytes: int = Field(
        4_194_304, ge=1_024, le=1_073_741_824, description="Largest request body of /shadow and /plan, in bytes."
    )
    max_batch_bytes: int = Field(
        16_777_216, ge=1_024, le=1_073_741_824, description="Largest request body of /step/batch, in bytes."
    )
    max_buffered_bytes: int = Field(
        268_435_456,
        ge=67_108_864,
        le=1_099_511_627_776,
        description="Bytes of bodies being received and answers being sent that a process holds at once; beyond them "
        "requests get 503. Those up to 64 KiB are not counted.",
    )
    max_buffered_bytes_per_client: int = Field(
        67_108_864,
        ge=67_108_864,
        le=1_099_511_627_776,
        description="The same for the requests of one client; beyond them it gets 429.",
    )
    batch_sessions: int = Field(
        16,
        ge=0,
        le=10_000,
        description="Batch sessions (/reset/batch) per process, of which one client may have three quarters; 0 refuses "
        "them.",
    )
    batch_row_steps: int = Field(
        1_000_000,
        ge=5_000,
        le=1_000_000_000,
        description="Episodes times their length over all batch sessions of a process, of which one client may have "
        "three quarters; each takes 200 bytes of memory.",
    )
    body_timeout_s: float = Field(30.0, ge=0.1, le=3600, description="Longest wait for a request's body.")
    answer_timeout_s: float = Field(
        60.0, ge=0.1, le=3600, description="Longest time that a client may take to read an answer."
    )
    resets_per_minute: int = Field(
        12_000,
        ge=0,
        le=10_000_000,
        description="Resets over HTTP and WebSockets per client and process (0 = no limit).",
    )
    batch_resets_per_minute: int = Field(
        600, ge=0, le=10_000_000, description="/reset/batch per client and process (0 = no limit)."
    )
    grades_per_minute: int = Field(
        6_000, ge=0, le=10_000_000, description="/grader per client and process (0 = no limit)."
    )
    baselines_per_minute: int = Field(
        600, ge=0, le=10_000_000, description="/baseline per client and process (0 = no limit)."
    )
    plays_per_minute: int = Field(
        600,
        ge=0,
        le=10_000_000,
        description="/play per client and process (0 = no limit); every 200 steps are one.",
    )
    shadows_per_minute: int = Field(
        30, ge=0, le=10_000_000, description="/shadow, and as many /plan, per client and process (0 = no limit)."
    )
    cpu_seconds_per_minute: int = Field(
        30,
        ge=0,
        le=100_000,
        description="Processor time of long work (grading logs above 32 KiB, playing long episodes again, "
        "/reset/batch) per client and process (0 = no limit).",
    )
    max_waiting_steps: int = Field(
        32, ge=1, le=10_000, description="Requests that may wait for one session at once; more are answered with 429."
    )

    access_log: Literal["all", "errors", "off"] = Field(
        "all", description="Requests written to standard error, one JSON object a line."
    )
    metrics_dir: Path | None = Field(
        None,
        description="Directory through which several workers add up their metrics. Unset: a temporary one is made when "
        "there is more than one worker.",
    )
    shutdown_grace_s: int = Field(
        10, ge=0, le=600, description="Seconds that requests in flight get to finish after SIGTERM."
    )

    @field_validator("env")
    @classmethod
    def _known_family(cls, value: str) -> str:
        if value not in FAMILIES:
            raise ValueError("must be one of " + ", ".join(FAMILIES))
        return value

    @field_validator("trusted_proxies", mode="before")
    @classmethod
    def _split_networks(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if "*" in parts:
            parts = ["0.0.0.0/0", "::/0"]
        return tuple(ipaddress.ip_network(part, strict=False) for part in parts)

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split_hosts(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        hosts = tuple(part.strip().lower() for part in value.split(",") if part.strip())
        for host in hosts:
            if not HOST.fullmatch(host):
                raise ValueError(f"{host!r} is not a host name")
        return hosts

    @field_validator("api_key")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < 8:
            raise ValueError("an API key has at least 8 characters")
        return value

    @field_validator("data_dir", "metrics_dir", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        # A path would make it the current directory.
        return None if value == "" else value

    @field_validator("store_url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if value and not value.startswith(("sqlite://", "redis://", "rediss://", "memory://")):
            raise ValueError("must begin with sqlite:///, redis://, rediss:// or memory://")
        if value.startswith("sqlite:") and not Path(value.removeprefix("sqlite://")).is_absolute():
            raise ValueError("a SQLite file is named by its absolute path: sqlite:///directory/file.db")
        return value

    def sqlite_path(self) -> Path:
        """File of the SQLite store: from ``store_url``, else in the first data directory that can be written."""
        if self.store_url:
            return Path(self.store_url.removeprefix("sqlite://"))
        return self._writable_dir() / "sessions.db"

    def envs_per_client(self) -> int:
        """``concurrent_envs_per_client``; three quarters of all, rounded up, where it is not set."""
        return self.concurrent_envs_per_client or math.ceil(0.75 * self.max_concurrent_envs)

    def shared_metrics_dir(self) -> Path | None:
        """``metrics_dir``, created if missing: workers that cannot write there would each report only their own."""
        return None if self.metrics_dir is None else _made("metrics_dir", self.metrics_dir)

    def _writable_dir(self) -> Path:
        if self.data_dir is not None:
            return _made("data_dir", self.data_dir)
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        shared = Path(tempfile.gettempdir())
        for directory in (Path(state).expanduser() / "inferencegym", shared / f"inferencegym-{os.getuid()}"):
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError:
                continue
            # A directory of this name in the shared temporary directory may belong to another user: do not use it.
            if os.access(directory, os.W_OK | os.X_OK) and directory.stat().st_uid == os.getuid():
                return directory
        raise InvalidConfigError(
            f"no directory for the session store can be written: set {PREFIX}DATA_DIR, or {PREFIX}STORE_URL=memory://"
        )


def load_settings(**overrides: Any) -> Settings:
    """Read the environment. Raises :class:`InvalidConfigError` naming the variable, its value and what is allowed."""
    _refuse_unknown(os.environ)
    try:
        settings = Settings(**overrides)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise InvalidConfigError("; ".join(map(_explain, problems)), _variable(_name(problems[0]))) from error
    if settings.workers > 1 and settings.store_url.startswith("memory:"):
        raise InvalidConfigError(
            f"{PREFIX}STORE_URL: {settings.store_url!r} is not allowed with {settings.workers} workers, of which each "
            f"would know its own sessions only: set {PREFIX}WORKERS=1, or name a SQLite file or a Redis server",
            f"{PREFIX}STORE_URL",
        )
    _check_room(settings)
    return settings


def describe_settings() -> list[dict[str, str]]:
    """One row per setting for the documents: variable, allowed values, default and meaning."""
    return [
        {
            "variable": _variable(name),
            "allowed": _allowed(field),
            "default": "" if field.default in (None, "", ()) else str(field.default),
            "description": f"{field.description or ''}{_other_names(field)}",
        }
        for name, field in Settings.model_fields.items()
    ]


def _check_room(settings: Settings) -> None:
    """Raise InvalidConfigError if the buffer limits are smaller than the largest body, or than one client's share."""
    per_client = settings.max_buffered_bytes_per_client
    bodies = ("max_body_bytes", "max_log_bytes", "max_trace_bytes", "max_batch_bytes")
    limits = [(name, "max_buffered_bytes_per_client", per_client) for name in bodies]
    limits.append(("max_buffered_bytes_per_client", "max_buffered_bytes", settings.max_buffered_bytes))
    for name, bound, most in limits:
        value: int = getattr(settings, name)
        if value > most:
            raise InvalidConfigError(
                f"{_variable(name)}: {value} is not allowed: it must be at most {_variable(bound)}, which is {most}",
                _variable(name),
            )


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    # A misspelt variable would have no effect; for an API key, the server would be open.
    known = {_variable(name) for name in Settings.model_fields} | READ_ELSEWHERE
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            raise InvalidConfigError(f"{variable} is not a setting: allowed are {', '.join(sorted(known))}", variable)


def _made(name: str, directory: Path) -> Path:
    """Make the directory of a setting if needed. Raises InvalidConfigError if it cannot be made or written."""
    try:
        return make_folder(directory)
    except DataFormatError as error:
        raise InvalidConfigError(
            f"{_variable(name)}: {str(directory)!r} is not allowed: it must be a directory that can be written, or "
            f"made; leave it empty for the default ({error})"
        ) from error


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _other_names(field: FieldInfo) -> str:
    if not isinstance(field.validation_alias, AliasChoices):
        return ""
    return " Also read from " + " or ".join(str(name) for name in field.validation_alias.choices[1:]) + "."


def _name(problem: Mapping[str, Any]) -> str:
    """Name of the setting at fault, however its variable was spelled."""
    name = _place(problem).removeprefix(PREFIX).lower()
    return {"web_concurrency": "workers"}.get(name, name)


def _place(problem: Mapping[str, Any]) -> str:
    return str(problem["loc"][0]) if problem["loc"] else "settings"


def _explain(problem: Mapping[str, Any]) -> str:
    place, name = _place(problem), _name(problem)
    field = Settings.model_fields.get(name)
    if field is None:
        return f"{place} is not a setting: allowed are {', '.join(Settings.model_fields)}"
    shown = "its value" if name == "api_key" else repr(problem.get("input"))
    return f"{_variable(name)}: {shown} is not allowed: it must be {_allowed(field)} ({problem['msg']})"


def _allowed(field: FieldInfo) -> str:
    for note in field.metadata:
        if isinstance(note, Allowed):
            return str(note)
    choices = get_args(field.annotation) if "Literal" in str(field.annotation) else ()
    if choices:
        return "one of " + ", ".join(str(choice) for choice in choices)
    low = next((m.ge for m in field.metadata if isinstance(m, Ge)), None)
    high = next((m.le for m in field.metadata if isinstance(m, Le)), None)
    if low is not None:
        kind = "an integer" if field.annotation in (int, int | None) else "a number"
        return f"{kind} from {low:,} to {high:,}"
    named: dict[Any, str] = {SecretStr | None: "8 characters or more", Path | None: "a directory", str: "text"}
    return named.get(field.annotation, "addresses or networks, or *")
