"""The one tree of settings, and where its values come from: defaults < files < environment < flags."""

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
from typing_extensions import TypeVar  # with a default: from 3.13 on it is in typing

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
"""Settings of a project: read where no --config is given, from the current folder or the nearest one above it."""
DEFAULT = "default"


class LaunchConfig(Record):
    """Processes of one run on this machine; torchrun's own variables win when they are set."""

    processes: int = Field(1, ge=1, le=1024, description="Training processes to start here, one per device")


class LogConfig(Record):
    """What a run says while it works."""

    every_steps: int = Field(10, ge=1, description="Steps between two lines of figures")
    tensorboard: bool = Field(False, description="Also write TensorBoard files (needs the package tensorboard)")


class ReportConfig(Record):
    """What the page of a cycle shows of the data itself."""

    examples: int = Field(
        20,
        ge=0,
        le=100,
        description="Rows of each kind that are shown with their texts (worst, changed, in quarantine); 0: no texts",
    )


class Settings(BaseSettings):
    """Everything a cycle can be told. Made in code it has its arguments alone; `resolve` reads the other sources."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=False,
        cli_kebab_case=True,
    )
    program: ClassVar[str] = "trnpipe"
    other_programs: ClassVar[frozenset[str]] = frozenset({"jobs"})
    """Sections of other programs in the same files and environment: passed over unread."""
    retired: ClassVar[Mapping[str, Any]] = {"tune": ...}
    """Sections and settings of earlier versions, as in `Record`."""

    workspace: str = Field(
        "workspace", min_length=1, description="Folder or URI (file://, s3://) of all a cycle reads and writes"
    )
    cycle: str = Field(
        "", pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$", description="Name of this retraining; empty: today's date (UTC)"
    )
    model_name: str = Field(
        "relevance", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the model in the registry"
    )
    backend: Name = Field(
        "auto",
        description="Device; auto: cuda, else neuron, else xla (no accelerator: for a tiny model only), else cpu",
    )
    scratch: str | None = Field(
        None, description="Local folder for temporary files (default: in a local workspace, else the system's)"
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
        """No source but the arguments, so that stored settings read back are not mixed with this environment."""
        return (init_settings,)


# Where, when and how fast a cycle runs; the same work has the same hash without them.
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
    """32 hex digits naming the settings that decide what is produced; equal on every machine and in every process."""
    return fingerprint(settings.model_dump(mode="json", exclude=_NOT_HASHED))


# Where values come from. The text of a variable or flag becomes a list or a mapping here; its type is checked with all
# others by pydantic.

S = TypeVar("S", bound=Settings, default=Settings)


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """The validated tree, and the source of each leaf by dotted name."""

    settings: S
    sources: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class SettingField:
    """One value of the tree, with its names in TOML, on the command line and in the environment."""

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
        """Its default as one would type it."""
        return format_value(self.field.get_default(call_default_factory=True))

    @property
    def options(self) -> tuple[Any, ...]:
        """The types it may have; with NoneType where it is optional."""
        kind = self.field.annotation
        return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)

    @property
    def origins(self) -> set[Any]:
        """tuple or dict where it is one."""
        return {get_origin(option) for option in self.options} & {tuple, dict}

    @property
    def takes(self) -> str:
        """Short text of the accepted values, such as `int`, `fp32|bf16` or `str,...`."""
        return "|".join(_type_text(option) for option in self.options if option is not type(None))

    def parse(self, text: str) -> Any:
        """Return the value of a text: `null`, a list as JSON or `a,b`, a mapping as JSON or `k=v,k=v`.

        What is neither stays text, which validation converts or refuses.
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
    """Return the retired settings and sections below a model by dotted name, with the value that may be dropped."""
    found = {section + name: neutral for name, neutral in getattr(model, "retired", {}).items()}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= retired(field.annotation, f"{section}{name}.")
    return found


def _is_retired(model: type[BaseModel], name: str) -> bool:
    """Return whether a name, or a section above it, is of an earlier version. Validation looks at its value."""
    words = name.split(".")
    return any(".".join(words[:depth]) in retired(model) for depth in range(1, len(words) + 1))


@cache
def leaves(model: type[BaseModel], section: str = "") -> dict[str, SettingField]:
    """All leaves below a model by dotted name: its own in the order of declaration, then those of its sections."""
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
    """Bring defaults, files, environment and flags together and validate once; the last one wins whole values.

    Args:
        files: TOML files, or JSON files of the same shape; later ones win.
        env: environment; only names starting with `TRNPIPE_` are looked at.
        flags: (flag as typed without its value, value or None) in order, later ones win.
        model: which settings there are.
        overrides: tree of values set in Python. They win over all others.
        other_flags: flags that the command has beside settings, for the message about an unknown one.

    Raises:
        ConfigError: an unknown key, or a value of a wrong type or out of bounds, with its source.
    """
    found = dict[str, SourcedValue]()
    layers = [*(_of_file(model, path) for path in files), _of_env(model, env), _of_flags(model, flags)]
    for layer in (*layers, _of_tree(model, overrides or {}, "a value given in Python")):
        for name, (value, source) in layer.items():
            if name in leaves(model):
                found[name] = SourcedValue(coerce_texts(leaves(model)[name].field.annotation, value), source)
            elif _is_retired(model, name):
                found[name] = SourcedValue(value, source)
            else:
                raise _unknown(model, name, layer[name], other_flags)
    try:
        settings = model.model_validate(_nested(found))
    except ValidationError as error:
        raise _explain(model, error, found) from None
    except ConfigError as error:  # a component's own check; it cannot know where the value came from
        seen = f"{error.seen} ({_blame(model, found)})"
        raise ConfigError(seen, expected=error.expected, next_command=error.next_command) from None
    return Resolved(settings, {name: found[name].source if name in found else DEFAULT for name in leaves(model)})


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
"""Settings that name a file or folder: in a project file relative to its folder."""


def project_files(folder: Path) -> list[Path]:
    """Return the project file of a folder, the nearest one at or above it, after the files that its `config` names.

    Raises ConfigError if it is not TOML.
    """
    found = next((path for one in (folder, *folder.parents) if (path := one / PROJECT_FILE).is_file()), None)
    if found is None:
        return []
    try:
        named = tomllib.loads(found.read_text(encoding="utf-8")).get("config", [])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{found} is not TOML: {error}", next_command=f"edit {found}") from None
    return [*(found.parent / one for one in ([named] if isinstance(named, str) else named)), found]


def _of_project(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of a project file without its `config`, relative paths against its folder."""
    found = {name: value for name, value in tree.items() if name != "config"}
    for name in _PATHS:
        *sections, last = name.split(".")
        table: Any = reduce(lambda table, section: table.get(section, {}), sections, found)
        if isinstance(value := table.get(last), str) and value and "://" not in value and value[0] != "~":
            table[last] = str(folder / value)
    return found


class SourcedValue(NamedTuple):
    """A value somebody set, and where."""

    value: Any
    source: str


Layer = dict[str, SourcedValue]


def _of_file(model: type[Settings], path: Path) -> Layer:
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        path.open("rb").close()  # the library passes over a file that does not exist
        source = JsonConfigSettingsSource(model, path) if kind == "JSON" else TomlConfigSettingsSource(model, path)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", expected=f"a readable {kind} file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not {kind}: {error}", next_command=f"edit {path}") from None
    except TypeError:
        raise ConfigError(f"{path} holds no table", expected="sections and keys", next_command=f"edit {path}") from None
    tree = {name: value for name, value in source().items() if name not in model.other_programs}
    return _of_tree(model, _of_project(tree, path.parent) if path.name == PROJECT_FILE else tree, str(path))


def _of_tree(model: type[Settings], tree: Mapping[str, Any], source: str) -> Layer:
    return {name: SourcedValue(value, source) for name, value in _flat(tree, leaves(model))}


def _of_env(model: type[Settings], env: Mapping[str, str]) -> Layer:
    """`__` separates levels; `TRNPIPE_DATA__FILTER__column=x` is one key of a mapping."""
    words = list[tuple[str, str | None, str]]()
    for key in sorted(env):
        name = key.removeprefix(ENV_PREFIX).replace("__", ".")
        is_ours = key.startswith(ENV_PREFIX) and key != PLAN_VARIABLE
        if is_ours and name.partition(".")[0].lower() not in model.other_programs:
            name = _spelled(name) if _is_retired(model, _spelled(name)) else name
            words.append((name, env[key], f"env {key}"))
    return _of_texts(model, words)


def _of_flags(model: type[Settings], flags: Sequence[tuple[str, str | None]]) -> Layer:
    """`--a.b-c value`; a boolean also as a bare `--a.b` or `--no-a.b`; `--data.filter.column x` is one key."""
    words = list[tuple[str, str | None, str]]()
    for flag, text in flags:
        name = flag.removeprefix("--")
        switch = leaves(model).get(_spelled(name.removeprefix("no-")))
        if text is None and switch is not None and switch.field.annotation is bool:
            name, text = switch.name, str(not name.startswith("no-")).lower()
        words.append((name, text, f"flag {flag}"))
    return _of_texts(model, words)


def _of_texts(model: type[Settings], texts: Iterable[tuple[str, str | None, str]]) -> Layer:
    """Return the values of (name in any spelling, text, source); single keys of a mapping are merged."""
    found: Layer = {}
    for name, text, source in texts:
        section, _, key = name.rpartition(".")
        leaf, mapping = leaves(model).get(_spelled(name)), leaves(model).get(_spelled(section))
        if leaf is not None:
            if text is None:
                raise ConfigError(
                    f"{leaf.flag} has no value",
                    expected=f"{leaf.takes} - {leaf.field.description}",
                    next_command=f"{leaf.flag} {leaf.default or 'VALUE'}",
                )
            found[leaf.name] = SourcedValue(leaf.parse(text), source)
        elif mapping is not None and dict in mapping.origins:
            earlier = found[mapping.name].value if mapping.name in found else {}
            if isinstance(earlier, dict):  # else it stays, to be refused
                found[mapping.name] = SourcedValue({**earlier, key: text}, source)
        else:
            found[name] = SourcedValue(text, source)  # to be refused
    return found


def _flat(tree: Mapping[str, Any], known: Mapping[str, SettingField], parent: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree by dotted name, and what is unknown in it."""
    for key, value in tree.items():
        name = parent + key
        if name not in known and isinstance(value, Mapping) and value:
            yield from _flat(value, known, f"{name}.")
        elif value != {} or name in known:  # an empty table says nothing, also that of a section that is gone
            yield name, value


def _nested(given: Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, one in given.items():
        *sections, last = name.split(".")
        reduce(lambda table, section: table.setdefault(section, {}), sections, tree)[last] = one.value
    return tree


def _unknown(model: type[Settings], name: str, given: SourcedValue, other_flags: Iterable[str]) -> ConfigError:
    known, section = leaves(model).values(), f"{_spelled(name)}."
    below = [one.name.removeprefix(section).partition(".")[0] for one in known if one.name.startswith(section)]
    if below:
        return ConfigError(
            f"{name} = {given.value!r} ({given.source}) is a section",
            expected=f"a table [{name}] with {', '.join(dict.fromkeys(below))}",
            next_command=f"--{name}.{below[0]} VALUE".replace("_", "-"),
        )
    as_flags = given.source.startswith("flag ")
    flags = {one.flag: one.flag if as_flags else f"{one.name} ({one.flag})" for one in known}
    flags |= {flag: flag for flag in other_flags} if as_flags else {}
    near = ", ".join(flags[flag] for flag in nearest(f"--{name}", flags))
    return ConfigError(
        f"unknown setting {name} ({given.source})",
        expected=f"a known setting; the nearest: {near}" if near else "a known setting",
        next_command="use one of those" if near else f"{model.program} config, which lists every setting",
    )


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names a user most likely meant: those with the same last word, then the closest spellings."""
    spelled = {_spelled(one): one for one in known}
    wanted = _spelled(name).replace("__no_", "__", 1)
    same_word = [one for one in spelled if one.rpartition(".")[2].lstrip("_") == wanted.rpartition(".")[2].lstrip("_")]
    close = [
        *difflib.get_close_matches(wanted, same_word, count, cutoff=0.0),
        *difflib.get_close_matches(wanted, spelled, count, cutoff=0.5),
    ]
    return [spelled[one] for one in dict.fromkeys(close)][:count]


def _explain(model: type[Settings], error: ValidationError, given: Layer) -> ConfigError:
    """All that validation refused, one line each: name, value seen, source, what is wrong."""
    lines, expected, known = [], "", leaves(model)
    for problem in error.errors(include_url=False):
        words = [str(part) for part in problem["loc"]]
        names = (".".join(words[:depth]) for depth in range(len(words), 0, -1))
        name = next((name for name in names if name in known), ".".join(words))
        inside = "".join(f"[{word}]" for word in words[name.count(".") + 1 :])
        # a check over several values is one of a section
        below = [f"{key} from {one.source}" for key, one in given.items() if key.startswith(f"{name}.")]
        source = given[name].source if name in given else ", ".join(below) or DEFAULT
        reason = problem["msg"][:1].lower() + problem["msg"][1:]
        lines.append(f"{name}{inside} = {problem['input']!r} ({source}): {reason}")
        expected = f"{known[name].takes} - {known[name].field.description}" if name in known else ""
    return ConfigError(
        "\n  ".join(lines),
        expected=expected if len(lines) == 1 else "",
        next_command=f"correct it there; {model.program} config shows every value with its source",
    )


def _blame(model: type[Settings], given: Layer) -> str:
    """The one given value without which the rest is valid, with its source."""
    for name in given:
        try:
            model.model_validate(_nested({key: one for key, one in given.items() if key != name}))
        except (ValidationError, ConfigError):
            continue
        return f"{name} from {given[name].source}"
    return "settings"


def _spelled(name: str) -> str:
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
    """One line per value: name, value, source."""
    values = {name: format_value(reduce(getattr, name.split("."), resolved.settings)) for name in resolved.sources}
    names, widest = max(map(len, values)), min(48, max(map(len, values.values())))
    rows = [f"{name:<{names}}  {values[name]:<{widest}}  {source}" for name, source in resolved.sources.items()]
    return "\n".join([*rows, "", f"settings hash {settings_hash(resolved.settings)}"])


def as_json(resolved: Resolved[S]) -> str:
    """The resolved tree, the source of each value that is not a default, and the hash."""
    record = {
        "settings": resolved.settings.model_dump(mode="json"),
        "sources": {name: source for name, source in resolved.sources.items() if source != DEFAULT},
        "settings_hash": settings_hash(resolved.settings),
    }
    return json.dumps(record, indent=2)


def format_value(value: object) -> str:
    """A value as one would type it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        tables = value and isinstance(value[0], BaseModel)
        return json.dumps([one.model_dump() for one in value]) if tables else ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return str(value)


def reference(model: type[Settings]) -> str:
    """Return the page of documentation with every setting, its type, default and meaning, by section."""
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
Every setting can stand in a TOML file (`--config`, or `trnpipe.toml` in the current folder or above), in the
environment, or on the command line: `max_steps` under `[train]` is `TRNPIPE_TRAIN__MAX_STEPS` and `--train.max-steps`.
The last of these wins. `trnpipe config` prints what is set, and where. This page is written by `make docs`."""
