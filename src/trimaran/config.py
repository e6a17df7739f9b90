"""All settings: one frozen section per component, and ``resolve()``, which merges their sources.

Owns: names, defaults, ranges and help texts (flags and docs/flags.md are generated from here), and
the reading of the environment: no other module looks at it. What is found out at run time is not
written back here; it travels in EngineCoreReadyResponse.

Precedence: flag > environment (TRIMARAN_<FIELD>) > --config file > default.
"""

import difflib
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from trimaran.errors import ConfigError

ENV_PREFIX = "TRIMARAN_"
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Secret(msgspec.Struct, frozen=True):
    """A value that prints as ***; ``reveal()`` is the only way to it."""

    value: str

    def reveal(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__


PositiveInt = Annotated[int, Meta(ge=1, le=1 << 40)]


def _help(text: str, *, group: str = "common", size: bool = False, **limits: Any) -> Meta:
    return Meta(description=text, extra={"group": group, "size": size}, **limits)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it is read."""

    model: Annotated[
        str,
        _help(
            "a folder (config.json + safetensors), a .gguf file, 'demo', or a hub id"
            " ORG/NAME[@revision]"
        ),
    ] = "demo"
    served_model_name: Annotated[
        tuple[str, ...], _help("names the API answers to (default: the model as given)")
    ] = ()
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        _help("type of weights and activations; auto takes the file's, bfloat16 for GGUF"),
    ] = "auto"
    max_model_len: Annotated[
        PositiveInt | None,
        _help("longest prompt + output in tokens (default: the model's, fitted to memory)"),
    ] = None
    revision: Annotated[str | None, _help("hub revision (branch, tag or commit)")] = None
    download_dir: Annotated[
        str | None, _help("hub cache folder (default: the Hugging Face cache)")
    ] = None
    offline: Annotated[bool, _help("never contact the hub; use what the cache has")] = False
    seed: Annotated[
        int, _help("seed of requests that bring none (default: random for each)", ge=-1)
    ] = -1
    chat_template: Annotated[
        str | None, _help("a Jinja file, or the template itself, instead of the model's own")
    ] = None
    batch_invariant: Annotated[
        bool,
        _help(
            "refuse to start unless output is bit-identical whatever else is in the batch (the"
            " compiled CPU kernels give that at no cost; docs/decisions/002-cpu-kernels.md)"
        ),
    ] = False


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: Annotated[Literal[8, 16, 32, 64], _help("tokens per KV block")] = 16
    kv_cache_memory_bytes: Annotated[
        PositiveInt | None,
        _help(
            "bytes for the KV cache, e.g. 2G (default: what max_num_seqs needs at most, never"
            " above --kv-cache-memory-fraction of free memory)",
            size=True,
        ),
    ] = None
    kv_cache_memory_fraction: Annotated[
        float, _help("most of the free memory that the KV cache may take by itself", gt=0, le=0.95)
    ] = 0.5
    enable_prefix_caching: Annotated[
        bool, _help("reuse the KV blocks of prompts that share a beginning")
    ] = True


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What runs in a step."""

    max_num_seqs: Annotated[int, _help("most sequences in a batch", ge=1, le=4096)] = 256
    max_num_batched_tokens: Annotated[
        int, _help("token budget of one step: decodes first, then prompt chunks", ge=1, le=1 << 20)
    ] = 512
    long_prefill_token_threshold: Annotated[
        int,
        _help(
            "most tokens of one prompt in a step while other requests wait (0: half the budget)",
            ge=0,
        ),
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], _help("order of waiting requests")
    ] = "fcfs"


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with what the model runs."""

    distributed_executor_backend: Annotated[
        Literal["uni", "mock"],
        _help("uni: in the engine process; mock: deterministic fake tokens, no model (tests)"),
    ] = "uni"
    threads: Annotated[
        PositiveInt | None, _help("compute threads (default: the allowed cores)")
    ] = None
    kernels: Annotated[
        Literal["auto", "native", "torch"],
        _help("CPU kernels: the compiled ones, or plain torch (the reference)"),
    ] = "auto"
    mock_step_s: Annotated[
        float, _help("mock backend: seconds a step takes", group="testing", ge=0, le=3600)
    ] = 0.0


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side."""

    host: Annotated[str, _help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _help("port to listen on; 0 lets the kernel choose", ge=0, le=65535)] = (
        8000
    )
    api_key: Annotated[
        tuple[Secret, ...], _help("key(s) every route but /health and /ready then needs")
    ] = ()
    api_key_file: Annotated[str | None, _help("file with one key per line")] = None
    admin_api_key: Annotated[
        Secret | None, _help("key for the admin routes (default: an API key will do)")
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...], _help("CORS origins (default: none); '*' for all")
    ] = ()
    max_request_bytes: Annotated[
        int, _help("largest request body", size=True, ge=1024, le=1 << 32)
    ] = 32 << 20
    max_queued_requests: Annotated[
        int, _help("requests in flight beyond which new ones get 429", ge=1, le=1 << 20)
    ] = 4096
    max_total_choice_tokens: Annotated[
        int, _help("most n x max_tokens of one request", ge=1, le=1 << 40)
    ] = 1 << 20
    response_role: Annotated[str, _help("role of chat answers")] = "assistant"
    trust_request_chat_template: Annotated[
        bool, _help("accept a chat_template in requests (sandboxed)")
    ] = False


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Start and end of processes."""

    engine_ready_timeout_s: Annotated[
        float, _help("seconds for all engines to become ready", gt=0, le=86400)
    ] = 600.0
    engine_hang_timeout_s: Annotated[
        float,
        _help(
            "seconds without progress, though there is work, after which an engine is killed as"
            " hung (a layer that takes longer than usual gets ten times the longest one so far)",
            gt=0,
            le=86400,
        ),
    ] = 10.0
    shutdown_grace_s: Annotated[
        float,
        _help(
            "seconds to end: running requests get half of them and then an error, children that"
            " have not ended by then are killed",
            gt=0,
            le=600,
        ),
    ] = 4.0


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Logs and recordings."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _help("least severe level shown")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], _help("log lines as text or JSON")] = "text"
    log_requests: Annotated[
        bool,
        _help(
            "log a line for each HTTP request that ends (level info): id, route, status, tokens,"
            " and when each thing happened; never a prompt or a text"
        ),
    ] = False
    profile_dir: Annotated[
        str | None, _help("folder for what /start_profile records (default: it is refused)")
    ] = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine process is given."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    launch: LaunchConfig = LaunchConfig()
    observability: ObservabilityConfig = ObservabilityConfig()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of `trimaran serve`."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    server: ServerConfig = ServerConfig()
    launch: LaunchConfig = LaunchConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            cache=self.cache,
            scheduler=self.scheduler,
            executor=self.executor,
            launch=self.launch,
            observability=self.observability,
        )


# ------------------------------------------------------------------------------ fields, described


@dataclass(frozen=True)
class Field:
    """One setting as flags, documentation and ``resolve`` see it."""

    section: str  # attribute of Config
    name: str  # snake_case; also the key in a config file
    type: Any  # the annotated type
    default: Any
    help: str
    group: str
    is_size: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def plain_type(self) -> Any:
        """The type without Annotated and without None."""
        kind = _without_annotation(self.type)
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(arg for arg in get_args(kind) if arg is not type(None))
        return _without_annotation(kind)

    @property
    def choices(self) -> tuple[Any, ...]:
        kind = self.plain_type
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def is_list(self) -> bool:
        return get_origin(self.plain_type) is tuple

    @property
    def is_flag(self) -> bool:
        return self.plain_type is bool

    @property
    def is_secret(self) -> bool:
        kind = self.plain_type
        return kind is Secret or (self.is_list and get_args(kind)[0] is Secret)


def _without_annotation(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def fields(config_type: type[msgspec.Struct] = Config) -> Iterator[Field]:
    """Every setting of every section, in order of declaration."""
    for section in msgspec.structs.fields(config_type):
        for field in msgspec.structs.fields(section.type):
            meta = next(m for m in get_args(field.type)[1:] if isinstance(m, Meta))
            extra = meta.extra or {}
            yield Field(
                section=section.name,
                name=field.name,
                type=field.type,
                default=field.default,
                help=meta.description or "",
                group=extra.get("group", "common"),
                is_size=bool(extra.get("size")),
            )


# --------------------------------------------------------------------------------------- resolving


def resolve(
    flags: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> Config:
    """Merge flags, environment and a YAML file into a Config.

    ``flags`` maps field names to what the user gave (strings are parsed); absent means not given.
    Raises ConfigError naming the flag, variable or file key and what it accepts.
    """
    environment = os.environ if environment is None else environment
    from_file = _read_file(Path(file)) if file is not None else {}
    from_flags = dict(flags or {})
    sections: dict[str, dict[str, Any]] = {}
    for field in fields():
        for value, source in (
            (from_flags.pop(field.name, None), f"flag {field.flag}"),
            (environment.get(field.env), f"environment variable {field.env}"),
            (from_file.pop(field.name, None), f"key {field.name!r} of {file}"),
        ):
            if value is not None:
                sections.setdefault(field.section, {})[field.name] = _convert(field, value, source)
                break
    _refuse_unknown("setting", list(from_flags), [field.name for field in fields()])
    _refuse_unknown(f"key of {file}", list(from_file), [field.name for field in fields()])
    ours = [name for name in environment if name.startswith(ENV_PREFIX)]
    known = [field.env for field in fields()]
    _refuse_unknown("environment variable", [n for n in ours if n not in known], known)
    return Config(
        **{
            section.name: section.type(**sections.get(section.name, {}))
            for section in msgspec.structs.fields(Config)
        }
    )


def _refuse_unknown(what: str, unknown: list[str], known: list[str]) -> None:
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else "; docs/flags.md has them all"
        raise ConfigError(f"unknown {what}: {', '.join(sorted(unknown))}{hint}")


def _read_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: must hold 'name: value' lines")
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def _convert(field: Field, value: Any, source: str) -> Any:
    try:
        if field.is_size and isinstance(value, str):
            value = parse_size(value)
        if field.is_list:
            if isinstance(value, str):
                value = [part for part in value.split(",") if part]
            if field.is_secret:
                value = [{"value": str(item)} for item in value]
        elif field.is_secret:
            value = {"value": str(value)}
        elif field.plain_type is str and not field.choices:
            value = str(value)
        elif field.choices and isinstance(value, str) and isinstance(field.choices[0], int):
            value = int(value)
        return msgspec.convert(value, field.type, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        shown = "***" if field.is_secret else repr(value)[:60]
        accepted = (
            f"; it takes one of {', '.join(map(str, field.choices))}" if field.choices else ""
        )
        raise ConfigError(f"{source}: {shown} is not accepted: {error}{accepted}") from error


def parse_size(text: str) -> int:
    """Bytes from ``"512M"``, ``"2G"``, ``"1.5GiB"`` or a plain number.

    Raises ValueError: not a size.
    """
    stripped = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = stripped[-1:] if stripped[-1:] in _SIZE_UNITS else ""
    number = stripped.removesuffix(unit) if unit else stripped
    return int(float(number) * _SIZE_UNITS[unit])
