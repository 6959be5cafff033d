"""Settings of the server, read from ``INFERENCEGYM_*`` environment variables and checked at start."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo

from env.families import FAMILIES, SERVING
from inferencegym.errors import DataFormatError, InvalidConfigError, did_you_mean
from inferencegym.files import make_folder
from inferencegym.messages import Allowed

PREFIX: Final = "INFERENCEGYM_"
READ_ELSEWHERE: Final = frozenset(
    PREFIX + name
    for name in (
        *("TABLE", "TASKS", "TRAFFIC_TASKS"),
        *("LLM_URL", "LLM_KEY", "LLM_MODEL"),
        *("URL", "CLIENT_ID", "DEMO_REPOSITORY", "DEMO_STEPS", "DEMO_TASK"),
        *("CONTROL_FILE", "ALLOW_UNTESTED", "METRICS_DIR"),
    )
)
"""Variables of this prefix that are no settings: of the simulator, clients, the language-model agent, the notebook, an
engine's scheduler class, and the directory that a server with several workers makes for their metrics.
"""

OTHER_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "port": ("PORT",),
    "workers": ("WORKERS", "WEB_CONCURRENCY"),
    "max_concurrent_envs": ("MAX_CONCURRENT_ENVS",),
}
"""Usual variables for a setting, read where its own is not set; the first that is set counts."""

SERVICE_LINK: Final = re.compile(
    PREFIX + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)=.*|"
    rf"{PREFIX}(\w+_)?PORT=(tcp|udp|sctp)://.*"
)
"""Variables, as NAME=VALUE, that Kubernetes sets in pods for a service named ``inferencegym...``; they are ignored."""

HOST: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
"""Pattern of a host name as in the Host header, without port; a leading ``*.`` allows all names below it."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Key = Annotated[SecretStr, Field(min_length=8)]


class Settings(BaseModel):
    """Settings of one server; :func:`load_settings` reads them from the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: Annotated[str, Allowed("one of " + ", ".join(FAMILIES))] = Field(
        SERVING, description="Environment served at the root path; the other ones stay under their own prefixes."
    )
    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int = Field(7860, ge=1, le=65535, description="Port to listen on.")
    also_port: int = Field(0, ge=0, le=65535, description="A second port for the same server (0 = none).")
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Server processes; sessions are shared through the store.",
    )
    health_status: Literal["healthy", "ok"] = Field(
        "healthy", description='Word in the "status" of /health, for probes that compare it.'
    )

    store_url: str = Field(
        "",
        description="Where episodes are kept: sqlite:///absolute/path.db, redis://host:6379/0, rediss://..., or "
        "memory:// (lost with the process, and for one worker only). Empty: a SQLite file in the data directory.",
    )
    data_dir: Annotated[Path | None, Allowed("a directory")] = Field(
        None,
        description="Directory of the SQLite file. Unset: inferencegym under $XDG_STATE_HOME or ~/.local/state.",
    )
    durability: Literal["full", "process", "none"] = Field(
        "process",
        description="What an acknowledged step survives with SQLite. full: power loss (one fsync per step). process: "
        "kill -9 of the server; a power loss may lose the last moments, but does not damage the file. "
        "none: as process, but a power loss may damage the file.",
    )
    store_timeout_s: float = Field(
        5.0, ge=0.05, le=60, description="Longest wait for the store before a request is answered with 503."
    )
    session_ttl_s: int = Field(
        86_400, ge=1, le=31_536_000, description="A session is deleted this many seconds after its last step."
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
        description="Seconds played by all environments in memory per process: limits memory when episodes are long.",
    )
    max_concurrent_envs: int = Field(
        256,
        ge=1,
        le=10_000,
        description="WebSocket sessions at once, per process and environment.",
    )
    concurrent_envs_per_client: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="WebSocket sessions of one client at once, per process and environment. Unset: three quarters of "
        "INFERENCEGYM_MAX_CONCURRENT_ENVS.",
    )

    api_key: Annotated[tuple[Key, ...] | None, Allowed("comma-separated keys of 8 characters or more")] = Field(
        None,
        min_length=1,
        description="If set, every path but /health and /metadata requires one of these keys: "
        "`Authorization: Bearer KEY` or `X-API-Key: KEY`; a browser asks for it as the password, with any user name.",
    )
    api_key_file: Annotated[Path | None, Allowed("a file of such keys")] = Field(
        None,
        description="File with more of these keys, one a line, such as a secret that Docker or Kubernetes mounts; read "
        "once. Lines that begin with # are left out.",
    )
    trusted_proxies: Annotated[tuple[Network, ...], Allowed("addresses or networks, or *")] = Field(
        (),
        description="Comma-separated addresses or networks whose X-Forwarded-For is trusted; * trusts every peer.",
    )
    allowed_hosts: Annotated[tuple[str, ...], Allowed("host names without ports, or *.example.com")] = Field(
        (),
        description="Comma-separated names that the Host header may have on every path but /health and /metadata; "
        "*.example.com stands for all names below example.com. Others are refused with 403. Empty: any name.",
    )
    cors: Literal["read", "all", "off"] = Field(
        "read",
        description="What pages of other origins may do. read: GET. all: GET, POST and WebSockets. off: nothing. "
        "Other requests are refused with 403.",
    )
    frame_ancestors: str = Field(
        "'self' https://huggingface.co https://*.hf.space",
        description="Sites that may show the web page in a frame (value of the CSP directive frame-ancestors).",
    )

    max_buffered_bytes: int = Field(
        268_435_456,
        ge=67_108_864,
        le=1_099_511_627_776,
        description="Bytes of bodies and answers that a process holds at once; requests beyond it get 503. One client "
        "may hold a quarter, at least 64 MiB, and then gets 429. Bodies and answers up to 64 KiB are not counted.",
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
        description="Sum of episodes x length over all batch sessions of a process, of which one client may have "
        "three quarters; each takes 200 bytes of memory.",
    )
    transfer_timeout_s: float = Field(
        60.0, ge=0.1, le=3600, description="Longest time that a client may take to send a body, or to read an answer."
    )
    resets_per_minute: int = Field(
        12_000,
        ge=0,
        le=10_000_000,
        description="Resets over HTTP and WebSockets per client and process (0 = no limit).",
    )
    cpu_seconds_per_minute: int = Field(
        30,
        ge=0,
        le=100_000,
        description="Processor time of long work (/grader, /play, /reset/batch, playing long episodes again) per "
        "client and process (0 = no limit).",
    )

    access_log: Literal["all", "errors", "off"] = Field(
        "all", description="Requests written to standard error, one JSON object a line."
    )
    shutdown_grace_s: int = Field(
        10, ge=0, le=600, description="Seconds that requests in flight get to finish after SIGTERM."
    )

    @field_validator("env")
    @classmethod
    def _known_family(cls, value: str) -> str:
        # Packages add families after this module is imported.
        if value not in FAMILIES:
            raise ValueError("must be one of " + ", ".join(FAMILIES))
        return value

    @field_validator("trusted_proxies", mode="before")
    @classmethod
    def _parse_networks(cls, value: Any) -> Any:
        parts = ["0.0.0.0/0", "::/0"] if "*" in value else value
        return [ipaddress.ip_network(part, strict=False) for part in parts]

    @field_validator("trusted_proxies", "allowed_hosts", "api_key", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        # Defined after the parser of networks: pydantic runs such validators from the last to the first.
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("allowed_hosts")
    @classmethod
    def _known_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not HOST.fullmatch(host.lower()):
                raise ValueError(f"{host!r} is not a host name")
        return tuple(map(str.lower, hosts))

    @field_validator("data_dir", mode="before")
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
        """File of the SQLite store: from ``store_url``, else in the data directory, which is made if needed."""
        if self.store_url:
            return Path(self.store_url.removeprefix("sqlite://"))
        state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
        directory = self.data_dir or state / "inferencegym"
        with contextlib.suppress(OSError):
            # For no other user: whoever knows a session's id may play it.
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            file = make_folder(directory) / "sessions.db"
            if file.exists() and not os.access(file, os.R_OK | os.W_OK):
                raise DataFormatError(f"{file} belongs to user {file.stat().st_uid}, not to {os.getuid()}")
            return file
        except DataFormatError as error:
            raise InvalidConfigError(
                f"{PREFIX}DATA_DIR: {str(directory)!r} is not allowed: it must be a directory that can be written, or "
                f"made, with its sessions.db ({error})"
            ) from error

    def envs_per_client(self) -> int:
        """``concurrent_envs_per_client``; three quarters of all, rounded up, where it is not set."""
        return self.concurrent_envs_per_client or math.ceil(0.75 * self.max_concurrent_envs)


def load_settings(**overrides: Any) -> Settings:
    """Read the environment. Raises :class:`InvalidConfigError` naming the variable, its value and what is allowed."""
    links = service_links()
    environ = {variable: value for variable, value in os.environ.items() if variable not in links}
    _refuse_unknown(environ)
    given = {
        name: environ[variable]
        for name in Settings.model_fields
        for variable in (*reversed(OTHER_VARIABLES.get(name, ())), _variable(name))
        if variable in environ
    }
    given |= overrides
    if file := given.get("api_key_file"):
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
            if not (keys := [line for line in lines if line.strip() and line[0] != "#"]):
                raise OSError("it has no key")
            given["api_key"] = ",".join([given.get("api_key", ""), *keys])
        except (OSError, UnicodeDecodeError) as error:
            variable = _variable("api_key_file")
            raise InvalidConfigError(f"{variable}: {file!r} cannot be read: {error}", variable) from error
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        said = "; ".join(dict.fromkeys(map(_explain, problems)))
        raise InvalidConfigError(said, _variable(str(problems[0]["loc"][0]))) from error
    if settings.workers > 1 and settings.store_url.startswith("memory:"):
        raise InvalidConfigError(
            f"{PREFIX}STORE_URL: {settings.store_url!r} is not allowed with {settings.workers} workers, of which each "
            f"would know its own sessions only: set {PREFIX}WORKERS=1, or name a SQLite file or a Redis server",
            f"{PREFIX}STORE_URL",
        )
    return settings


def service_links() -> list[str]:
    """Names of the environment's variables that match :data:`SERVICE_LINK`."""
    return [variable for variable, value in os.environ.items() if SERVICE_LINK.fullmatch(f"{variable}={value}")]


def describe_settings() -> list[dict[str, str]]:
    """One row per setting for the documents: variable, allowed values, default and meaning."""
    return [
        {
            "variable": _variable(name),
            "allowed": _allowed(field),
            "default": "" if field.default in (None, "", ()) else str(field.default),
            "description": (field.description or "") + _other_names(name),
        }
        for name, field in Settings.model_fields.items()
    ]


def _other_names(name: str) -> str:
    others = OTHER_VARIABLES.get(name, ())
    return f" Also read from {' or '.join(others)}." if others else ""


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    # A misspelt variable would have no effect; for an API key, the server would be open.
    known = {_variable(name) for name in Settings.model_fields} | READ_ELSEWHERE
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            # All names begin alike, so a guess needs more in common than elsewhere.
            allowed = did_you_mean(variable, known, f"allowed are {', '.join(sorted(known))}", cutoff=0.85)
            raise InvalidConfigError(f"{variable} is not a setting: {allowed}", variable)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _explain(problem: Mapping[str, Any]) -> str:
    name = problem["loc"][0]
    is_key = name == "api_key"
    shown, why = ("its value", "") if is_key else (repr(problem["input"]), f" ({problem['msg']})")
    return f"{_variable(name)}: {shown} is not allowed: it must be {_allowed(Settings.model_fields[name])}{why}"


def _allowed(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(get_args(field.annotation))
    notes: dict[type, Any] = {type(note): note for note in field.metadata}
    if Ge in notes:
        kind = "a number" if field.annotation is float else "an integer"
        return f"{kind} from {notes[Ge].ge:,} to {notes[Le].le:,}"
    return str(notes.get(Allowed, "text"))
