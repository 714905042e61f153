"""All settings in one place: the file, then the environment, then flags; checked before anything starts.

`batchwright.toml` (or the file that BATCHWRIGHT_CONFIG names) has one table per part:

    operations = ["shop.jobs"]

    [database]
    url = "postgresql://batchwright@db/batchwright"

    [worker]
    concurrency = 50
    queue_limits = { gpu = 1 }

In the environment a setting is BATCHWRIGHT_<PART>_<NAME>: BATCHWRIGHT_DATABASE_URL, BATCHWRIGHT_WORKER_CONCURRENCY.
A setting whose name ends in a unit of time also takes a duration: lease_seconds = "1m", succeeded_days = "36h".
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import orjson
import pydantic

from batchwright.access.settings import ApiSettings
from batchwright.db.database import DatabaseSettings
from batchwright.durations import DURATION_FORM, replace_durations, unit_seconds_of
from batchwright.engine.queue import EngineSettings
from batchwright.engine.retention import RetentionSettings
from batchwright.engine.worker.worker import WorkerSettings
from batchwright.errors import ConfigurationError
from batchwright.inference.settings import (
    TO_ANY_SERVER,
    GatewaySettings,
    InferenceSettings,
    check_url,
    refuse_both,
)
from batchwright.plugins import load, part_kinds
from batchwright.storage.settings import StorageSettings

T = TypeVar("T")
PREFIX = "BATCHWRIGHT_"
CONFIG = "BATCHWRIGHT_CONFIG"
# Variables that Kubernetes sets in every pod for a service named batchwright or batchwright-something.
_KUBERNETES = re.compile(r"_SERVICE_HOST=|_SERVICE_PORT(_\w+)?=|_PORT_\d+_(TCP|UDP)(_\w+)?=|_PORT=(tcp|udp)://")
_TABLE = re.compile(r"\b(dict|Mapping)\[|\bHeaders\b")
"""Found in the text of a type if the setting is a table."""
_OTHERS = {CONFIG, "BATCHWRIGHT_CHILD", "BATCHWRIGHT_PERTURB", "BATCHWRIGHT_PERTURB_SEED", "BATCHWRIGHT_REQUIRE_ALL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Logging: level and format."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Minimum level of messages that are written."""
    form: Literal["auto", "text", "json"] = "auto"
    """`auto` writes text on a terminal and JSON elsewhere; `text` and `json` choose one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The tables of the engine; `load_settings` adds those of the parts."""

    operations: tuple[str, ...] = ()
    """Modules, files or folders with operations; operations of installed packages are found automatically."""
    database: DatabaseSettings = field(default_factory=DatabaseSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    storage: StorageSettings = field(default_factory=StorageSettings)
    log: LogSettings = field(default_factory=LogSettings)
    inference: InferenceSettings = field(default_factory=InferenceSettings)
    global_inference_gateway: GatewaySettings = field(default_factory=GatewaySettings)
    model_gateways: dict[str, GatewaySettings] = field(default_factory=dict)
    """One gateway per model, instead of one for all models; they share no settings."""

    @property
    def has_gateways(self) -> bool:
        """Whether there is a model server to send batches to."""
        return self.global_inference_gateway.is_set or bool(self.model_gateways)

    @property
    def passthrough_headers(self) -> frozenset[str]:
        """Names of the headers that at least one gateway wants from the request that created a batch."""
        gateways = (self.global_inference_gateway, *self.model_gateways.values())
        return frozenset(name for gateway in gateways for name in gateway.passthrough_headers)

    def __post_init__(self) -> None:
        refuse_both(self.global_inference_gateway, self.model_gateways)

    def table(self, name: str, kind: type[T]) -> T:
        """A table that a part has added."""
        found = getattr(self, name)
        assert isinstance(found, kind), f"the table {name} is not a {kind.__name__}"
        return found


@functools.cache
def settings_class() -> type[Settings]:
    """`Settings` with the tables of all parts: a dataclass each, or a dictionary of such."""
    taken = {setting.name for setting in dataclasses.fields(Settings)}
    tables: list[tuple[str, Any, Any]] = []
    for part in part_kinds():
        for name, place in part.tables.items():
            if name in taken:
                raise ConfigurationError(
                    f"the part {part.name!r} adds the table {name!r}, which exists already; rename it"
                )
            taken.add(name)
            kind = load(place)
            make = kind if is_dataclass(kind) else dict
            tables.append((name, kind, field(default_factory=cast("Any", make))))
    return dataclasses.make_dataclass("Settings", tables, bases=(Settings,), frozen=True, slots=True, kw_only=True)


def is_table(part: dataclasses.Field[Any]) -> bool:
    """Whether a field of Settings is a table with settings of its own, not a single setting."""
    return part.default_factory is not dataclasses.MISSING and is_dataclass(part.default_factory())


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """Defaults < file < environment < flags; defaults and flags are nested like the file, and None means not given."""
    environment = os.environ if environment is None else environment
    merged: dict[str, Any] = {}
    for layer in (defaults or {}, _from_file(environment, file), _from_environment(environment), flags or {}):
        _merge(merged, layer)
    _refuse_unknown(merged)
    try:
        return _adapter().validate_python(replace_durations(merged))
    except pydantic.ValidationError as error:
        raise ConfigurationError(_explain(error.errors(include_url=False)[0], environment)) from error


def _explain(error: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Name the setting, and the environment variable if it came from there."""
    path, given = [str(part) for part in error["loc"]], error["input"]
    names = [PREFIX + "_".join(path[:length]).upper() for length in (2, 1)]
    variable = next((name for name in names if name in environment), None)
    hint = f"; {DURATION_FORM}" if isinstance(given, str) and unit_seconds_of(path[-1]) is not None else ""
    origin = "" if variable is None else f" (the environment variable {variable})"
    return f"the setting {'.'.join(path)}{origin} is {given!r}: {error['msg']}{hint}"


def use_model_server(settings: Settings, url: str) -> Settings:
    """Use this server for all models, instead of those in the settings. A key is sent only to its own server."""
    check_url(url, "--url")
    before, gateway = settings.global_inference_gateway, GatewaySettings(url=url)
    if before.is_set and before.endpoint == gateway.endpoint:
        gateway = dataclasses.replace(before, url=url)
    elif before.is_set:
        gateway = dataclasses.replace(gateway, **{name: getattr(before, name) for name in TO_ANY_SERVER})
    return dataclasses.replace(settings, global_inference_gateway=gateway, model_gateways={})


def settings_document(settings: Settings) -> dict[str, Any]:
    """The settings as JSON, for child processes."""
    document: dict[str, Any] = _adapter().dump_python(settings, mode="json")
    return document


def settings_of(document: Mapping[str, Any]) -> Settings:
    return _adapter().validate_python(document)


@functools.cache
def _adapter() -> pydantic.TypeAdapter[Settings]:
    """Created once: this takes longer than everything else here."""
    return pydantic.TypeAdapter(settings_class())


def _from_file(environment: Mapping[str, str], file: Path | None) -> dict[str, Any]:
    named = file or (Path(environment[CONFIG]) if environment.get(CONFIG) else None)
    path = named or Path("batchwright.toml")
    if not path.is_file():
        if named is not None:
            raise ConfigurationError(f"there is no configuration file {path}")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """BATCHWRIGHT_WORKER_CONCURRENCY=50 is worker.concurrency; lists and tables are JSON, or words with commas."""
    found: dict[str, Any] = {}
    known, kinds = _known(), _kinds()
    for name, text in environment.items():
        if not name.startswith(PREFIX) or name in _OTHERS or name.startswith(PREFIX + "TEST_"):
            continue
        if _KUBERNETES.search(f"{name}={text}"):
            continue
        path = known.get(name.removeprefix(PREFIX).lower())
        if path is None:
            close = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), known, n=1)
            hint = f"; did you mean {PREFIX}{close[0].upper()}?" if close else ""
            raise ConfigurationError(f"the environment variable {name} is not a setting{hint}")
        table = found
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = _value(name, text, kinds[path])
    return found


def _value(name: str, text: str, kind: str) -> Any:
    """Errors do not quote the text, because it may contain secret headers."""
    if text.startswith(("[", "{")):
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise ConfigurationError(f"the environment variable {name} is not JSON: {error}") from error
    if _TABLE.search(kind):
        raise ConfigurationError(f"the environment variable {name} is not JSON; write {name}='{{\"name\": …}}'")
    return text.split(",") if "tuple" in kind else text


def _kinds() -> dict[tuple[str, ...], str]:
    """The path of every setting, with the text of its type."""
    kinds: dict[tuple[str, ...], str] = {}
    for part in dataclasses.fields(settings_class()):
        if not is_table(part) or part.default_factory is dataclasses.MISSING:
            kinds[(part.name,)] = str(part.type)
        else:
            settings = dataclasses.fields(type(part.default_factory()))
            kinds |= {(part.name, setting.name): str(setting.type) for setting in settings}
    return kinds


def _known() -> dict[str, tuple[str, ...]]:
    """Every setting by its flat name: worker_concurrency -> (worker, concurrency)."""
    return {"_".join(path): path for path in _kinds()}


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for name, value in layer.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict) and name not in _replaced_whole():
            _merge(into[name], value)
        elif isinstance(value, Mapping):
            into[name] = {inner: given for inner, given in value.items() if given is not None}
        elif value is not None:
            into[name] = value


@functools.cache
def _replaced_whole() -> set[str]:
    """Tables whose entries belong together: a later layer replaces such a table and does not merge it."""
    of_parts = {name for part in part_kinds() for name, place in part.tables.items() if not is_dataclass(load(place))}
    return {"model_gateways", "queue_limits"} | of_parts


def _refuse_unknown(merged: Mapping[str, Any]) -> None:
    known = set(_known().values())
    tables = {path[0] for path in known if len(path) == 2}
    for name, value in merged.items():
        paths = [(name, inner) for inner in value] if name in tables and isinstance(value, Mapping) else [(name,)]
        for path in paths:
            if path not in known:
                dotted = [".".join(one) for one in known]
                close = difflib.get_close_matches(".".join(path), dotted, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigurationError(f"there is no setting {'.'.join(path)}{hint}")
    _refuse_unknown_of_gateways(merged.get("model_gateways"))
    operations = merged.get("operations")
    if isinstance(operations, str):
        raise ConfigurationError(f'operations must be a list; write operations = ["{operations}"]')


def _refuse_unknown_of_gateways(gateways: Any) -> None:
    """The names inside model_gateways are models, so their settings are one table deeper."""
    for model, settings in gateways.items() if isinstance(gateways, Mapping) else ():
        refuse_unknown_inside(f'model_gateways."{model}"', settings, GatewaySettings)


def refuse_unknown_inside(where: str, settings: Any, kind: Any) -> None:
    """Refuse unknown names in one entry of a table; `_refuse_unknown` does not look that deep."""
    known = [setting.name for setting in dataclasses.fields(kind)]
    for name in settings if isinstance(settings, Mapping) else ():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigurationError(f"there is no setting {where}.{name}{hint}")
