"""The settings tree, and the sources of its values: defaults < files < environment < flags."""

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
from pipeline.train.config import CheckpointConfig, TrainConfig

ENV_PREFIX = "TRNPIPE_"
PROJECT_FILE = "trnpipe.toml"
"""Settings file of a project, read without --config from the current folder or the nearest parent that has one."""
DEFAULT = "default"


class LaunchConfig(Record):
    """Processes of one run on this machine. Variables of torchrun take precedence."""

    processes: int = Field(1, ge=1, le=1024, description="Training processes to start on this machine, one per device")


class LogConfig(Record):
    """Output of a training run."""

    every_steps: int = Field(10, ge=1, description="Steps between two log lines")
    tensorboard: bool = Field(False, description="Also write TensorBoard files (needs the package tensorboard)")


class ReportConfig(Record):
    """Data examples on the report page of a cycle."""

    examples: int = Field(
        20,
        ge=0,
        le=100,
        description="Example rows of each kind (worst, changed, quarantined) on the report page; 0: no texts",
    )


class Settings(BaseSettings):
    """All settings of a cycle. The constructor reads no files or environment. Use `resolve` for that."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=False,
        cli_kebab_case=True,
    )
    program: ClassVar[str] = "trnpipe"
    other_programs: ClassVar[frozenset[str]] = frozenset({"jobs"})
    """Sections of other programs in the same files and environment, which are ignored."""
    retired: ClassVar[Mapping[str, Any]] = {"tune": ...}
    """Sections and settings of earlier versions, as in `Record`."""

    workspace: str = Field(
        "workspace", min_length=1, description="Folder or URI (file://, s3://) of all data that cycles read and write"
    )
    cycle: str = Field(
        "", pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$", description="Name of this cycle (default: today's date in UTC)"
    )
    model_name: str = Field(
        "relevance", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the model in the registry"
    )
    backend: Name = Field(
        "auto",
        description="Device; auto: the first available of cuda, neuron, xla (tiny models only if on the host), cpu",
    )
    scratch: str | None = Field(
        None, description="Local folder for temporary files (default: in a local workspace, else in the user's cache)"
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    mine: MineConfig = MineConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    embed: EmbedConfig = EmbedConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    gate: GateConfig = GateConfig()
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
        """Use only the arguments, so that settings read from a workspace are not mixed with this environment."""
        return (init_settings,)


# Settings that determine where, when and how fast a cycle runs, but not its results.
_NOT_HASHED: dict[str, IncEx | bool] = {
    "workspace": True,
    "cycle": True,
    "scratch": True,
    "launch": True,
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
    "embed": {"worker": True, "workers": True},
}


def settings_hash(settings: Settings) -> str:
    """Return 32 hex digits of the settings that affect results. Equal on every machine and in every process."""
    return fingerprint(settings.model_dump(mode="json", exclude=_NOT_HASHED))


# Sources of values. The text of a variable or flag is split into a list or mapping here. pydantic checks all types.

S = TypeVar("S", bound=Settings, default=Settings)


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """Validated settings, and the source of each value by dotted name."""

    settings: S
    sources: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class SettingField:
    """A setting, with its names in TOML, on the command line and in the environment."""

    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.replace(".", "__").upper()

    @property
    def default(self) -> str:
        """The default as typed on the command line."""
        return format_value(self.field.get_default(call_default_factory=True))

    @property
    def options(self) -> tuple[Any, ...]:
        """The accepted types, with NoneType if optional."""
        kind = self.field.annotation
        return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)

    @property
    def choices(self) -> list[str]:
        """The accepted values, if they can be listed."""
        return [str(value) for kind in self.options if get_origin(kind) is Literal for value in get_args(kind)]

    @property
    def origins(self) -> set[Any]:
        """The collection types (tuple, dict) among the accepted types."""
        return {get_origin(option) for option in self.options} & {tuple, dict}

    @property
    def takes(self) -> str:
        """Short description of the accepted values, such as `int`, `fp32|bf16` or `str,...`."""
        return "|".join(_type_text(option) for option in self.options if option is not type(None))

    def parse(self, text: str) -> Any:
        """Parse `null`, a list (JSON or `a,b`) or a mapping (JSON or `k=v,k=v`). Other text is left to validation."""
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
    """Return the retired settings and sections of a model by dotted name, with the value that is still accepted."""
    names = {section + name: neutral for name, neutral in getattr(model, "retired", {}).items()}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names |= retired(field.annotation, f"{section}{name}.")
    return names


def _is_retired(model: type[BaseModel], name: str) -> bool:
    """Return whether a name, or a section that contains it, is retired. Validation checks the value."""
    parts = name.split(".")
    return any(".".join(parts[:depth]) in retired(model) for depth in range(1, len(parts) + 1))


@cache
def leaves(model: type[BaseModel], section: str = "") -> dict[str, SettingField]:
    """Return all settings of a model by dotted name, in order of declaration, those of sections last."""
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
    """Merge defaults, files, environment and flags, and validate the result. Later sources replace whole values.

    Args:
        files: TOML files, or JSON files of the same structure. Later files win.
        env: environment. Only names starting with `TRNPIPE_` are read.
        flags: (flag as typed without its value, value or None) in order. Later flags win.
        model: class of the settings.
        overrides: tree of values set in Python. They win over all others.
        other_flags: flags of the command that are not settings, for the message about an unknown one.

    Raises ConfigError for an unknown key, or a value of a wrong type or out of bounds, with its source.
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
    except ConfigError as error:  # raised by the check of a component, which does not know the source of the value
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
)
"""Settings that are paths. In a project file they are relative to its folder."""


def project_files(folder: Path) -> list[Path]:
    """Return the project file at or above a folder, after those in its `config`. Raises ConfigError for bad TOML."""
    path = next((path for parent in (folder, *folder.parents) if (path := parent / PROJECT_FILE).is_file()), None)
    if path is None:
        return []
    try:
        included = tomllib.loads(path.read_text(encoding="utf-8")).get("config", [])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", next_command=f"edit {path}") from None
    return [*(path.parent / name for name in ([included] if isinstance(included, str) else included)), path]


def _project_settings(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of a project file without `config`, with paths relative to its folder resolved."""
    settings = {name: value for name, value in tree.items() if name != "config"}
    for name in _PATHS:
        *sections, last = name.split(".")
        table: Any = reduce(lambda table, section: table.get(section, {}), sections, settings)
        if isinstance(value := table.get(last), str) and value and "://" not in value and value[0] != "~":
            table[last] = str(folder / value)
    return settings


class SourcedValue(NamedTuple):
    """A value and its source."""

    value: Any
    source: str


Layer = dict[str, SourcedValue]


def _file_layer(model: type[Settings], path: Path) -> Layer:
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        path.open("rb").close()  # the library ignores a file that does not exist
        source = JsonConfigSettingsSource(model, path) if kind == "JSON" else TomlConfigSettingsSource(model, path)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", expected=f"a readable {kind} file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not {kind}: {error}", next_command=f"edit {path}") from None
    except TypeError:
        raise ConfigError(f"{path} has no table", expected="sections and keys", next_command=f"edit {path}") from None
    tree = {name: value for name, value in source().items() if name not in model.other_programs}
    return _tree_layer(model, _project_settings(tree, path.parent) if path.name == PROJECT_FILE else tree, str(path))


def _tree_layer(model: type[Settings], tree: Mapping[str, Any], source: str) -> Layer:
    return {name: SourcedValue(value, source) for name, value in _flat(tree, leaves(model))}


def _env_layer(model: type[Settings], env: Mapping[str, str]) -> Layer:
    """Parse variables. `__` separates levels, and `TRNPIPE_DATA__FILTER__column=x` sets one key of a mapping."""
    texts = list[tuple[str, str | None, str]]()
    for key in sorted(env):
        name = key.removeprefix(ENV_PREFIX).replace("__", ".")
        is_setting = key.startswith(ENV_PREFIX) and key != PLAN_VARIABLE
        if is_setting and name.partition(".")[0].lower() not in model.other_programs:
            name = _normalised(name) if _is_retired(model, _normalised(name)) else name
            texts.append((name, env[key], f"env {key}"))
    return _text_layer(model, texts)


def _flag_layer(model: type[Settings], flags: Sequence[tuple[str, str | None]]) -> Layer:
    """Parse `--a.b-c value`, booleans also as `--a.b` and `--no-a.b`, and `--data.filter.column x` for one key."""
    texts = list[tuple[str, str | None, str]]()
    for flag, text in flags:
        name = flag.removeprefix("--")
        switch = leaves(model).get(_normalised(name.removeprefix("no-")))
        if text is None and switch is not None and switch.field.annotation is bool:
            name, text = switch.name, str(not name.startswith("no-")).lower()
        texts.append((name, text, f"flag {flag}"))
    return _text_layer(model, texts)


def _text_layer(model: type[Settings], texts: Iterable[tuple[str, str | None, str]]) -> Layer:
    """Parse (name in any spelling, text, source). Single keys of a mapping are merged."""
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
            layer[name] = SourcedValue(text, source)  # rejected by `resolve`
    return layer


def _flat(tree: Mapping[str, Any], fields: Mapping[str, SettingField], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of all settings in a tree, including unknown ones."""
    for key, value in tree.items():
        name = parent + key
        if name not in fields and isinstance(value, Mapping) and value:
            yield from _flat(value, fields, f"{name}.")
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
            expected=f"a table [{name}] with {', '.join(dict.fromkeys(keys))}",
            next_command=f"--{name}.{keys[0]} VALUE".replace("_", "-"),
        )
    as_flags = value.source.startswith("flag ")
    flags = {field.flag: field.flag if as_flags else f"{field.name} ({field.flag})" for field in fields}
    flags |= {flag: flag for flag in other_flags} if as_flags else {}
    similar = ", ".join(flags[flag] for flag in nearest(f"--{name}", flags))
    return ConfigError(
        f"unknown setting {name} ({value.source})",
        expected=f"a known setting, such as {similar}" if similar else "a known setting",
        next_command="use one of those" if similar else f"{model.program} config, which lists every setting",
    )


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the most similar candidates: those with the same last component, then the closest spellings."""
    normalised = {_normalised(candidate): candidate for candidate in candidates}
    target = _normalised(name).replace("__no_", "__", 1)
    last = target.rpartition(".")[2].lstrip("_")
    same_last = [candidate for candidate in normalised if candidate.rpartition(".")[2].lstrip("_") == last]
    close = [
        *difflib.get_close_matches(target, same_last, count, cutoff=0.0),
        *difflib.get_close_matches(target, normalised, count, cutoff=0.5),
    ]
    return [normalised[candidate] for candidate in dict.fromkeys(close)][:count]


def _validation_error(model: type[Settings], error: ValidationError, layer: Layer) -> ConfigError:
    """Return an error with one line for each invalid value: name, value, source and reason."""
    lines, expected, fields = [], "", leaves(model)
    for problem in error.errors(include_url=False):
        parts = [str(part) for part in problem["loc"]]
        names = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
        name = next((name for name in names if name in fields), ".".join(parts))
        inside = "".join(f"[{part}]" for part in parts[name.count(".") + 1 :])
        # A check of several values is reported for their section.
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
        next_command=f"correct it there; {model.program} config shows every value with its source",
    )


def _invalid_value(model: type[Settings], layer: Layer) -> str:
    """Return the name and source of the value without which the other values are valid."""
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
    """Return one line per setting: name, value, source."""
    values = {name: format_value(reduce(getattr, name.split("."), resolved.settings)) for name in resolved.sources}
    names, widest = max(map(len, values)), min(48, max(map(len, values.values())))
    rows = [f"{name:<{names}}  {values[name]:<{widest}}  {source}" for name, source in resolved.sources.items()]
    return "\n".join([*rows, "", f"settings hash {settings_hash(resolved.settings)}"])


def as_json(resolved: Resolved[S]) -> str:
    """Return JSON of the settings, the source of each value that is not a default, and the hash."""
    record = {
        "settings": resolved.settings.model_dump(mode="json"),
        "sources": {name: source for name, source in resolved.sources.items() if source != DEFAULT},
        "settings_hash": settings_hash(resolved.settings),
    }
    return json.dumps(record, indent=2)


def format_value(value: object) -> str:
    """Return a value as typed on the command line."""
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
    """Return the documentation page with every setting, its type, default and description, by section."""
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
Every setting can be set in a TOML file (`--config`, or `trnpipe.toml` in the current folder or above), in the
environment, or on the command line: `max_steps` under `[train]` is `TRNPIPE_TRAIN__MAX_STEPS` and `--train.max-steps`.
Later sources win. `trnpipe config` prints all values with their sources. This page is generated by `make docs`."""
