"""The tree of all settings, and functions to read their values from files, the environment and flags."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic.main import IncEx
from pydantic_settings import (
    BaseSettings,
    JsonConfigSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from typing_extensions import TypeVar  # typing.TypeVar supports defaults since Python 3.13

from pipeline.backends import Name
from pipeline.compile.config import CompileConfig, EstimateConfig
from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record, coerce_texts, without_retired
from pipeline.data.config import DataConfig
from pipeline.embed.config import EmbedConfig
from pipeline.evaluate.config import EvaluateConfig, GateConfig, ParityConfig
from pipeline.health.config import HealthConfig
from pipeline.io.requests import RetryPolicy
from pipeline.mine.config import MineConfig
from pipeline.model.config import ModelConfig
from pipeline.parallel.config import PLAN_VARIABLE
from pipeline.registry.config import RegistryConfig
from pipeline.teach.config import TeachConfig
from pipeline.train.config import CheckpointConfig, TrainConfig

ENV_PREFIX = "TRNPIPE_"
PROJECT_FILE = "trnpipe.toml"
"""The settings file of a project. Unless --config is used, it is read from the current folder or a parent folder."""
DEFAULT = "default"


class LaunchConfig(Record):
    """The processes to start on this machine. This is ignored if the environment variables of torchrun are set."""

    processes: int = Field(
        1, ge=1, le=1024, description="Number of training processes to start on this machine, one per device"
    )


class LogConfig(Record):
    """The output of a training run."""

    every_steps: int = Field(10, ge=1, description="Logging interval in steps")
    tensorboard: bool = Field(False, description="Write TensorBoard files (requires the package tensorboard)")


class ReportConfig(Record):
    """Examples from the data on the report page of a cycle."""

    examples: int = Field(
        20,
        ge=0,
        le=100,
        description="Number of example rows of each kind (worst, changed, quarantined) on the report page; 0 for none",
    )


class Settings(BaseSettings):
    """All settings of a cycle.

    Note that the constructor doesn't read any files or environment variables. Use `resolve` instead to do so.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=False)
    program: ClassVar[str] = "trnpipe"
    other_programs: ClassVar[frozenset[str]] = frozenset({"jobs"})
    """Sections that belong to other programs. These may be in the same files and are ignored."""
    retired: ClassVar[Mapping[str, Any]] = {"tune": ...}
    """Sections and settings that have been removed, see `Record.retired`."""

    workspace: str = Field(
        "workspace", min_length=1, description="Folder or URI (file://, s3://) for all data that cycles read and write"
    )
    cycle: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$",
        max_length=100,
        description="Name of this cycle (default: today's date in UTC)",
    )
    model_name: str = Field(
        "relevance", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the model in the registry"
    )
    backend: Name = Field(
        "auto",
        description="Device; auto selects the first available of cuda, neuron, xla (only tiny models on XLA:CPU), cpu",
    )
    scratch: str | None = Field(
        None, description="Local folder for temporary files (default: inside a local workspace, or the user's cache)"
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    mine: MineConfig = MineConfig()
    teach: TeachConfig = TeachConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    embed: EmbedConfig = EmbedConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    gate: GateConfig = GateConfig()
    registry: RegistryConfig = RegistryConfig()
    parity: ParityConfig = ParityConfig()
    compile: CompileConfig = CompileConfig()
    estimate: EstimateConfig = EstimateConfig()
    health: HealthConfig = HealthConfig()
    launch: LaunchConfig = LaunchConfig()
    storage: RetryPolicy = RetryPolicy()
    log: LogConfig = LogConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, value: Any) -> Any:
        return without_retired(cls.retired, value)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only use the arguments of the constructor.

        By default, pydantic also reads the environment, which would affect settings that are loaded from a workspace.
        """
        return (init_settings,)


# These settings affect where, when and how fast a cycle runs, but not its results.
_NOT_HASHED: dict[str, IncEx | bool] = {
    "workspace": True,
    "cycle": True,
    "scratch": True,
    "launch": True,
    "registry": True,
    "compile": True,
    "estimate": True,
    "health": True,
    "parity": True,
    "storage": True,
    "log": True,
    "report": True,
    "data": {"num_workers": True, "worker": True, "workers": True},
    "train": {"deadline": True, "collective_timeout_s": True, "parallel": True},
    "evaluate": {"candidate": True, "golden": True, "promote": True, "force_reason": True},
    "gate": {"golden": True},
    "mine": {"workers": True, "queries_per_part": True},
    "teach": True,
    "embed": {"worker": True, "workers": True},
}


def settings_hash(settings: Settings) -> str:
    """Hash all settings that affect the results of a cycle to 32 hex digits.

    The hash is reproducible across machines and processes.
    """
    return fingerprint(settings.model_dump(mode="json", exclude=_NOT_HASHED))


# Read the values from all sources. The text of a variable or flag is only split into a list or mapping here. All other
# conversions and checks are done by pydantic.

S = TypeVar("S", bound=Settings, default=Settings)


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """Validated settings, along with the source of each value by dotted name."""

    settings: S
    sources: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class SettingField:
    """A setting and its names in TOML files, on the command line and in the environment."""

    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def default(self) -> str:
        """The default value, formatted as on the command line."""
        return format_value(self.field.get_default(call_default_factory=True))

    @property
    def options(self) -> tuple[Any, ...]:
        """The types that the setting accepts. This includes NoneType if the setting is optional."""
        kind = self.field.annotation
        return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)

    @property
    def choices(self) -> list[str]:
        """The accepted values, if they can be listed."""
        return [str(value) for kind in self.options if get_origin(kind) is Literal for value in get_args(kind)]

    @property
    def origins(self) -> set[Any]:
        """The collection types that the setting accepts, which are tuple and dict."""
        return {get_origin(option) for option in self.options} & {tuple, dict}

    @property
    def takes(self) -> str:
        """A short description of the accepted values, such as `int`, `fp32|bf16` or `str,...`."""
        return "|".join(_type_text(option) for option in self.options if option is not type(None))

    def parse(self, text: str) -> Any:
        """Parse the text of a flag or environment variable.

        This handles `null`, lists (JSON or `a,b`) and mappings (JSON or `k=v,k=v`). Any other text is returned
        unchanged, so that pydantic can convert and validate it.
        """
        if text == "null" and type(None) in self.options:
            return None
        if not self.origins:
            return text
        if text[:1] in ("[", "{"):
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                return text
            return [value] if tuple in self.origins and isinstance(value, dict) else value
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if tuple in self.origins:
            return parts
        return dict(part.split("=", 1) for part in parts) if all("=" in part for part in parts) else text


@cache
def retired(model: type[BaseModel], section: str = "") -> dict[str, Any]:
    """Return all removed settings and sections by dotted name, with the only value that is still accepted for each."""
    names = {section + name: neutral for name, neutral in getattr(model, "retired", {}).items()}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names |= retired(field.annotation, f"{section}{name}.")
    return names


def _is_retired(model: type[BaseModel], name: str) -> bool:
    """Return whether a setting or its section has been removed. Validation ensures that its value is still accepted."""
    parts = name.split(".")
    return any(".".join(parts[:depth]) in retired(model) for depth in range(1, len(parts) + 1))


@cache
def leaves(model: type[BaseModel], section: str = "") -> dict[str, SettingField]:
    """Return all settings by dotted name in the order of declaration. Settings in sections are last."""
    own, nested = dict[str, SettingField](), dict[str, SettingField]()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            nested |= leaves(kind, f"{section}{name}.")
        else:
            own[section + name] = SettingField(section + name, field)
    return own | nested


def resolve(
    files: Sequence[Path],
    env: Mapping[str, str],
    flags: Sequence[tuple[str, str | None]] = (),
    model: type[S] = Settings,  # type: ignore[assignment]
    *,
    overrides: Mapping[str, Any] | None = None,
    other_flags: Iterable[str] = (),
) -> Resolved[S]:
    """Read settings from all sources, merge them, and validate the result.

    The order of precedence is overrides, flags, environment, files, defaults. Note that lists and mappings are replaced
    as a whole instead of being merged.

    Args:
        files: TOML files, or JSON files with the same structure. Later files take precedence.
        env: environment variables. Only names that start with `TRNPIPE_` are used.
        flags: each flag and its value, or None if it has no value. Later flags take precedence.
        model: class of the settings.
        overrides: nested mapping of values that are set in Python.
        other_flags: other flags of the command, which are suggested if a flag is unknown.

    Raises ConfigError if a setting is unknown, or if a value has the wrong type or is out of bounds. The message
    contains the source of the value.
    """
    values = dict[str, SourcedValue]()
    layers = [*(_file_layer(model, path) for path in files), _env_layer(model, env), _flag_layer(model, flags)]
    for layer in (*layers, _tree_layer(model, overrides or {}, "a value set in Python")):
        for name, (value, source) in layer.items():
            if name in leaves(model):
                values[name] = SourcedValue(coerce_texts(leaves(model)[name].field.annotation, value), source)
            elif _is_retired(model, name):
                values[name] = SourcedValue(value, source)
            else:
                raise _unknown_setting(model, name, layer[name], other_flags)
    try:
        settings = model.model_validate(_nested(values))
    except ValidationError as error:
        raise _validation_error(model, error, values) from None
    except ConfigError as error:  # raised by a validator of a section, which doesn't know the source of the value
        seen = f"{error.seen} ({_invalid_value(model, values)})"
        raise ConfigError(seen, expected=error.expected, next_command=error.next_command) from None
    return Resolved(settings, {name: values[name].source if name in values else DEFAULT for name in leaves(model)})


_PATHS = (
    "workspace",
    "scratch",
    "data.path",
    "data.tokenizer.path",
    "model.init_from",
    "embed.catalogue.path",
    "evaluate.retrieval.catalogue",
    "evaluate.golden",
    "compile.cache_url",
    "registry.sign_key",
    "registry.verify_key",
)
"""Settings that are paths. In a project file, these are relative to the folder of that file."""


def project_files(folder: Path) -> list[Path]:
    """Return the project file for a folder, preceded by the files that it includes with `config`.

    The project file is in the folder itself or in one of its parents. Returns an empty list if there is none. Raises
    ConfigError if the file isn't valid TOML.
    """
    path = next((path for parent in (folder, *folder.parents) if (path := parent / PROJECT_FILE).is_file()), None)
    if path is None:
        return []
    try:
        included = tomllib.loads(path.read_text(encoding="utf-8")).get("config", [])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", next_command=f"edit {path}") from None
    names = included if isinstance(included, list) else [included]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"config = {included!r} ({path})", expected="a file or a list of files", next_command=f"edit {path}"
        )
    return [*(path.parent / name for name in names), path]


def _project_settings(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings in a project file and resolve all paths that are relative to its folder.

    `config` is removed, because it isn't a setting.
    """
    settings = {name: value for name, value in tree.items() if name != "config"}
    for name in _PATHS:
        *sections, last = name.split(".")
        table: Any = reduce(_table_in, sections, settings)
        value = table.get(last)
        if isinstance(value, list):
            table[last] = [_in_folder(item, folder) for item in value]
        elif value is not None:
            table[last] = _in_folder(value, folder)
    return settings


def _table_in(table: dict[str, Any], section: str) -> dict[str, Any]:
    """Return a section, or an empty dict if it doesn't exist or isn't a table, in which case `resolve` rejects it."""
    inner = table.get(section)
    return inner if isinstance(inner, dict) else {}


def _in_folder(value: Any, folder: Path) -> Any:
    is_relative = isinstance(value, str) and value and "://" not in value and value[0] != "~"
    return str(folder / value) if is_relative else value


class SourcedValue(NamedTuple):
    """A value and a description of its source."""

    value: Any
    source: str


Layer = dict[str, SourcedValue]


def _file_layer(model: type[Settings], path: Path) -> Layer:
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        path.open("rb").close()  # pydantic ignores files that don't exist, so check this first
        source = JsonConfigSettingsSource(model, path) if kind == "JSON" else TomlConfigSettingsSource(model, path)
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror}", expected=f"a readable {kind} file", next_command="correct --config"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is not valid {kind}: {error}",
            expected="a TOML file, or JSON if its name ends in .json",
            next_command=f"edit {path}",
        ) from None
    except TypeError:
        raise ConfigError(
            f"{path} does not contain an object", expected="sections and keys", next_command=f"edit {path}"
        ) from None
    tree = {name: value for name, value in source().items() if name not in model.other_programs}
    return _tree_layer(model, _project_settings(tree, path.parent) if path.name == PROJECT_FILE else tree, str(path))


def _tree_layer(model: type[Settings], tree: Mapping[str, Any], source: str) -> Layer:
    return {name: SourcedValue(value, source) for name, value in flatten(tree, leaves(model))}


def _env_layer(model: type[Settings], env: Mapping[str, str]) -> Layer:
    """Parse environment variables such as `TRNPIPE_TRAIN__MAX_STEPS`, where `__` separates the levels.

    Variables such as `TRNPIPE_DATA__FILTER__column` set a single key of a mapping.
    """
    texts = list[tuple[str, str | None, str]]()
    for key in sorted(env):
        name = key.removeprefix(ENV_PREFIX).replace("__", ".")
        is_setting = key.startswith(ENV_PREFIX) and key != PLAN_VARIABLE
        if is_setting and name.partition(".")[0].lower() not in model.other_programs:
            name = _normalised(name) if _is_retired(model, _normalised(name)) else name
            texts.append((name, env[key], f"env {key}"))
    return _text_layer(model, texts)


def _flag_layer(model: type[Settings], flags: Sequence[tuple[str, str | None]]) -> Layer:
    """Parse flags such as `--train.max-steps 100`.

    A boolean can also be set with `--a.b` or `--no-a.b`. Flags such as `--data.filter.column x` set a single key of a
    mapping.
    """
    texts = list[tuple[str, str | None, str]]()
    for flag, text in flags:
        name = flag.removeprefix("--")
        switch = leaves(model).get(_normalised(name.removeprefix("no-")))
        if text is None and switch is not None and switch.field.annotation is bool:
            name, text = switch.name, str(not name.startswith("no-")).lower()
        texts.append((name, text, f"flag {flag}"))
    return _text_layer(model, texts)


def _text_layer(model: type[Settings], texts: Iterable[tuple[str, str | None, str]]) -> Layer:
    """Parse texts from flags or environment variables, given as (name, text, source).

    Names may use dashes or upper case. If several texts set single keys of the same mapping, they are merged.
    """
    layer: Layer = {}
    for name, text, source in texts:
        section, _, key = name.rpartition(".")
        leaf, mapping = leaves(model).get(_normalised(name)), leaves(model).get(_normalised(section))
        if leaf is not None:
            if text is None:
                raise ConfigError(
                    f"{leaf.flag} has no value",
                    expected=f"{leaf.takes} - {leaf.field.description}",
                    next_command=f"{leaf.flag} {leaf.default or 'VALUE'}",
                )
            layer[leaf.name] = SourcedValue(leaf.parse(text), source)
        elif mapping is not None and dict in mapping.origins:
            earlier = layer[mapping.name].value if mapping.name in layer else {}
            if isinstance(earlier, dict):  # otherwise validation rejects it
                layer[mapping.name] = SourcedValue({**earlier, key: text}, source)
        else:
            layer[name] = SourcedValue(text, source)  # `resolve` raises an error for unknown names
    return layer


def flatten(tree: Mapping[str, Any], fields: Mapping[str, SettingField], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of all settings in a tree, including unknown settings."""
    for key, value in tree.items():
        name = parent + key
        if name not in fields and isinstance(value, Mapping) and value:
            yield from flatten(value, fields, f"{name}.")
        elif value != {} or name in fields:  # an empty table is allowed, even for an unknown section
            yield name, value


def _nested(layer: Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, sourced in layer.items():
        *sections, last = name.split(".")
        reduce(lambda table, section: table.setdefault(section, {}), sections, tree)[last] = sourced.value
    return tree


def _unknown_setting(model: type[Settings], name: str, value: SourcedValue, other_flags: Iterable[str]) -> ConfigError:
    fields, section = leaves(model).values(), f"{_normalised(name)}."
    keys = [field.name.removeprefix(section).partition(".")[0] for field in fields if field.name.startswith(section)]
    if keys:
        return ConfigError(
            f"{name} = {value.value!r} ({value.source}) is a section",
            expected=f"a table [{name}] with the keys {', '.join(dict.fromkeys(keys))}",
            next_command=f"--{name}.{keys[0]} VALUE".replace("_", "-"),
        )
    as_flags = value.source.startswith("flag ")
    if name.partition(".")[0] in model.other_programs:
        return ConfigError(
            f"{name} ({value.source}) is not a setting of {model.program}",
            expected=f"settings of the sections of {model.program}",
            next_command="use it with trnjobs, or leave it out",
        )
    flags = {field.flag: field.flag if as_flags else f"{field.name} ({field.flag})" for field in fields}
    flags |= {flag: flag for flag in other_flags} if as_flags else {}
    similar = ", ".join(flags[flag] for flag in nearest(f"--{name}", flags))
    return ConfigError(
        f"unknown setting {name} ({value.source})",
        expected=f"a known setting, such as {similar}" if similar else "a known setting",
        next_command="use one of those" if similar else f"{model.program} config, which lists all settings",
    )


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Return up to three candidates that are most similar to a name.

    Candidates with the same last component are listed first, followed by those with the most similar spelling.
    """
    normalised = {_normalised(candidate): candidate for candidate in candidates}
    target = _normalised(name).replace("__no_", "__", 1)
    last = target.rpartition(".")[2].lstrip("_")
    same_last = [candidate for candidate in normalised if candidate.rpartition(".")[2].lstrip("_") == last]
    close = [
        *difflib.get_close_matches(target, same_last, 3, cutoff=0.0),
        *difflib.get_close_matches(target, normalised, 3, cutoff=0.5),
    ]
    return [normalised[candidate] for candidate in dict.fromkeys(close)][:3]


def _validation_error(model: type[Settings], error: ValidationError, layer: Layer) -> ConfigError:
    """Return an error with one line per invalid value, which contains its name, value and source and the reason."""
    lines, expected, fields = [], "", leaves(model)
    for problem in error.errors(include_url=False):
        parts = [str(part) for part in problem["loc"]]
        names = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
        name = next((name for name in names if name in fields), ".".join(parts))
        inside = "".join(f"[{part}]" for part in parts[name.count(".") + 1 :])
        # Validators that check several values report their section, so list the sources of all values in it.
        members = [f"{key} from {sourced.source}" for key, sourced in layer.items() if key.startswith(f"{name}.")]
        source = layer[name].source if name in layer else ", ".join(members) or DEFAULT
        reason = problem["msg"][:1].lower() + problem["msg"][1:]
        if "A-Za-z0-9_.-" in str(problem.get("ctx")):  # the pattern of names
            reason = "only letters, digits and _.- are allowed, the first must be a letter or a digit"
        lines.append(f"{name}{inside} = {problem['input']!r} ({source}): {reason}")
        expected = f"{fields[name].takes} - {fields[name].field.description}" if name in fields else ""
    return ConfigError(
        "\n  ".join(lines),
        expected=expected if len(lines) == 1 else "",
        next_command=f"correct it there; {model.program} config shows all values with their sources",
    )


def _invalid_value(model: type[Settings], layer: Layer) -> str:
    """Return the name and the source of the value that causes a validation error.

    To determine it, remove one value at a time until the remaining values are valid.
    """
    for name in layer:
        try:
            model.model_validate(_nested({key: sourced for key, sourced in layer.items() if key != name}))
        except (ValidationError, ConfigError):
            continue
        return f"{name} from {layer[name].source}"
    return "settings"


def _normalised(name: str) -> str:
    return name.replace("-", "_").lower()


def _type_text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(args[0])
    if origin is Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        if not (isinstance(args[0], type) and issubclass(args[0], Record)):
            return f"{_type_text(args[0])},..."
        return f"{args[0].short[0]}[={args[0].short[1]}],...|JSON list" if args[0].short else "JSON list"
    if origin is dict:
        return "key=value,..."
    return "true|false" if annotation is bool else str(getattr(annotation, "__name__", annotation))


def table_text(resolved: Resolved[S]) -> str:
    """Format a table with the name, value and source of all settings."""
    values = {name: format_value(reduce(getattr, name.split("."), resolved.settings)) for name in resolved.sources}
    names, widest = max(map(len, values)), min(48, max(map(len, values.values())))
    rows = [f"{name:<{names}}  {values[name]:<{widest}}  {source}" for name, source in resolved.sources.items()]
    return "\n".join([*rows, "", f"settings hash {settings_hash(resolved.settings)}"])


def as_json(resolved: Resolved[S]) -> str:
    """Format the settings as JSON. This includes the settings hash and the sources of all non-default values."""
    record = {
        "settings": resolved.settings.model_dump(mode="json"),
        "sources": {name: source for name, source in resolved.sources.items() if source != DEFAULT},
        "settings_hash": settings_hash(resolved.settings),
    }
    return json.dumps(record, indent=2)


def format_value(value: object) -> str:
    """Format a value as on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        is_table = value and isinstance(value[0], BaseModel)
        return json.dumps([record.model_dump() for record in value]) if is_table else ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return str(value)


def reference(model: type[Settings]) -> str:
    """Generate the documentation page that lists all settings by section, with their type, default and description."""
    lines = ["# Settings", "", _INTRODUCTION]
    section = None
    for name, leaf in leaves(model).items():
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            heading = f"## {section}" if section else "## General"
            lines += ["", heading, "", "| setting | takes | default | |", "|---|---|---|---|"]
        cells = [
            f"`{name.rpartition('.')[2]}`",
            f"`{leaf.takes}`",
            f"`{leaf.default}`" if leaf.default else "",
            leaf.field.description,
        ]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


_INTRODUCTION = """\
You can set every setting in a TOML file (either `--config`, or `trnpipe.toml` in the current folder or a parent
folder), in the environment, or on the command line. For example, `max_steps` under `[train]` in a file is the same as
`TRNPIPE_TRAIN__MAX_STEPS` in the environment and `--train.max-steps` on the command line. The command line takes
precedence over the environment, and the environment takes precedence over files. `trnjobs config` prints all values
with their sources, and `trnpipe config` those of all sections but `jobs`. The column "takes" shows the syntax of flags.
In a file, `str,...` is a list such as `labels = ["bad", "good"]`, and `key=value,...` is a table such as
`filter = {market = "us"}`. This page is generated by `make docs`."""
