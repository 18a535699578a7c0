"""The trials of a search in Optuna's journal: what to try next, what each reached, which are ended early.

The journal is one file that is only appended to, by every worker of a search. All here follows from what it holds:
what a trial is given, and whether it goes on, is the same when it is asked again after a kill.
"""

import fcntl
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from pydantic import JsonValue, TypeAdapter, ValidationError

from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.settings import Leaf, Settings, leaves, nearest
from pipeline.tune.config import Choices, Floats, Hyperband, Integers, Range, Value, parse_range

# The searched settings, held against the tree of settings: what may be searched, and a trial's values as settings.

_SECTIONS = ("train", "model")
_SET_BY_THE_SEARCH = frozenset(
    f"train.{name}"
    for name in (
        "start", "epochs", "max_steps", "evaluate_every", "evaluate_rows", "metric", "patience", "deadline",
        "on_deadline", "collective_timeout_s",
    )
)  # fmt: skip
"""The same for every trial, or trials could not be compared."""
_EXAMPLE = '--tune.space.train.optimizer.learning_rate "log 1e-5 1e-3"'


@dataclass(frozen=True)
class Space:
    """Settings to search by dotted name, in the order of names, over the settings they are searched in."""

    base: Settings
    ranges: Mapping[str, Range]

    def apply(self, values: Mapping[str, Value]) -> Settings:
        """The settings with these values over them.

        Raises ValidationError for one out of bounds, or for values that the settings do not allow together.
        """
        tree: dict[str, Any] = self.base.model_dump()
        for name, value in values.items():
            *sections, last = name.split(".")
            table = tree
            for section in sections:
                table = table[section]
            table[last] = leaves(Settings)[name].decode(value) if isinstance(value, str) else value
        return Settings.model_validate(tree)

    def typed(self, values: Mapping[str, Value]) -> dict[str, JsonValue]:
        """The values as the settings hold them, whether or not the settings allow them together."""
        found: dict[str, JsonValue] = {}
        for name, value in values.items():
            leaf = leaves(Settings)[name]
            kind = TypeAdapter(cast(type[Any], leaf.field.annotation))
            decoded = leaf.decode(value) if isinstance(value, str) else value
            found[name] = kind.dump_python(kind.validate_python(decoded), mode="json")
        return found

    def start(self) -> dict[str, Value]:
        """What the settings have already, of those that lie in their range: what the first trial has."""
        tree, found = self.base.model_dump(mode="json"), dict[str, Value]()
        for name, allowed in self.ranges.items():
            now: Any = reduce(getitem, name.split("."), tree)
            if isinstance(allowed, Choices):
                same = [text for text in allowed.texts if self.typed({name: text})[name] == now]
                if same:
                    found[name] = same[0]
            elif isinstance(now, int | float) and allowed.low <= now <= allowed.high:
                found[name] = now
        return found


def open_space(settings: Settings) -> Space:
    """The space that `tune.space` names. Raises ConfigError for one that is empty, or naming what is wrong in it."""
    texts = settings.tune.space
    if not texts:
        raise ConfigError("tune.space is empty", expected="settings to search", next_command=f"trnpipe tune {_EXAMPLE}")
    space = Space(settings, {name: parse_range(texts[name]) for name in sorted(texts)})
    for name, allowed in space.ranges.items():
        leaf = _searchable(name)
        kinds, right = leaf.takes.split("|"), ""
        if isinstance(allowed, Floats) and "float" not in kinds:
            right = "int LOW HIGH, or one of A B ..." if "int" in kinds else "one of A B ..."
        elif isinstance(allowed, Integers) and not {"int", "float"} & set(kinds):
            right = "one of A B ..."
        elif isinstance(allowed, Choices) and "null" in allowed.texts:
            right = "values that a TOML file can hold, which null is not"
        if right:
            raise ConfigError(f"tune.space {name} = {texts[name]!r}: the setting is {leaf.takes}", expected=right)
        # All values are valid when both ends are, or every choice.
        for value in allowed.texts if isinstance(allowed, Choices) else (allowed.low, allowed.high):
            try:
                space.apply({name: value})
            except ValidationError as error:
                raise ConfigError(
                    f"tune.space {name} = {texts[name]!r}: {value}: {reason_of(error)}",
                    expected=f"{leaf.takes} - {leaf.field.description}",
                    next_command=f"correct it under [tune.space], or --tune.space.{name}",
                ) from None
    return space


def best_toml(values: Mapping[str, JsonValue], comments: Sequence[str]) -> str:
    """A settings file for `--config` with these values by dotted name."""
    sections: dict[str, list[str]] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        # JSON is TOML for numbers, booleans, texts and lists of them.
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    tables = ["\n".join([f"[{section}]", *lines]) for section, lines in sections.items()]
    return "\n\n".join(["\n".join(f"# {line}" for line in comments), *tables]) + "\n"


def _searchable(name: str) -> Leaf:
    """The setting of that name. Raises ConfigError when there is none, or a search cannot vary it."""
    leaf = leaves(Settings).get(name)
    known = [key for key in leaves(Settings) if key.startswith(tuple(f"{one}." for one in _SECTIONS))]
    if leaf is None:
        near = nearest(name, known)
        raise ConfigError(
            f"tune.space names {name}, which is no setting",
            expected=f"a setting of {' or '.join(_SECTIONS)}" + (f"; the nearest: {', '.join(near)}" if near else ""),
            next_command="trnpipe tune --help",
        )
    if name not in known:
        raise ConfigError(
            f"tune.space names {name}",
            expected=f"a setting of {' or '.join(_SECTIONS)}: a trial trains on the data as it is prepared",
            next_command="prepare the other data in another cycle, and search there",
        )
    if name in _SET_BY_THE_SEARCH:
        raise ConfigError(
            f"tune.space names {name}, which is the same for every trial",
            expected=f"none of {', '.join(sorted(_SET_BY_THE_SEARCH))}",
            next_command="take it out; tune.steps, tune.min_steps and tune.metric say how trials are trained",
        )
    return leaf


def reason_of(error: ValidationError) -> str:
    """What is wrong, in a line: the first of its errors."""
    reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    return reason[:1].lower() + reason[1:]


State = Literal["running", "complete", "pruned", "failed"]
_STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_FAILED = "failed"
"""User attribute with the reason. To Optuna such a trial is one pruned: the worst, so that none like it comes next."""
_SECONDS, _STARTS = "seconds", "starts"


@dataclass(frozen=True)
class TrialRecord:
    number: int
    state: State
    values: Mapping[str, Value]
    metric_by_step: Mapping[int, float]
    seconds: float
    starts: tuple[int, ...]
    """The step from which each attempt began that was not told to stop."""
    reason: str
    """Of a failed one."""


class Journal:
    def __init__(
        self, path: Path, name: str, ranges: Mapping[str, Range], start: Mapping[str, Value], band: Hyperband, seed: int
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        lock = _KernelLock(str(path))
        # A line without an end is what a killed writer left: the next one would be joined to it, and neither be read.
        lock.acquire()
        try:
            with path.open("ab+") as file:
                file.seek(0)
                data = file.read()
                if not data.endswith(b"\n"):
                    file.truncate(data.rfind(b"\n") + 1)
        finally:
            lock.release()
        self._distributions: dict[str, BaseDistribution] = {}
        for setting, allowed in ranges.items():
            if isinstance(allowed, Choices):
                self._distributions[setting] = CategoricalDistribution(allowed.texts)
            elif isinstance(allowed, Floats):
                self._distributions[setting] = FloatDistribution(allowed.low, allowed.high, log=allowed.log)
            else:
                self._distributions[setting] = IntDistribution(allowed.low, allowed.high)
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        sampler, pruner = _SeededSampler(seed, start), _Pruner(band)
        try:
            self._study = optuna.load_study(study_name=name, storage=storage, sampler=sampler, pruner=pruner)
        except KeyError:
            self._study = optuna.create_study(
                study_name=name,
                storage=storage,
                sampler=sampler,
                pruner=pruner,
                direction="maximize",
                load_if_exists=True,  # another worker may have been faster
            )

    def records(self) -> list[TrialRecord]:
        return [_record(trial) for trial in self._study.get_trials(deepcopy=False)]

    def begin(self) -> "OpenTrial":
        return self._open(self._study.ask())

    def resume(self, number: int) -> "OpenTrial":
        return self._open(Trial(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id))

    def _open(self, trial: Trial) -> "OpenTrial":
        for name, distribution in self._distributions.items():
            trial._suggest(name, distribution)  # what Study.ask does with fixed distributions
        return OpenTrial(self._study, trial)


class OpenTrial:
    def __init__(self, study: Study, trial: Trial) -> None:
        self._study, self._trial = study, trial
        self.number = trial.number

    @property
    def record(self) -> TrialRecord:
        return _record(self._study.get_trials(deepcopy=False)[self.number])

    def report(self, step: int, value: float) -> None:
        """What it reached at a rung; a second time is fine."""
        if step not in self.record.metric_by_step:
            self._trial.report(value, step)

    def is_pruned(self) -> bool:
        """Whether it ends at the last rung it has reported."""
        return self._trial.should_prune()

    def note(self, *, seconds: float | None = None, starts: Sequence[int] | None = None) -> None:
        """Seconds worked so far, and the steps from which it was begun."""
        if seconds is not None:
            self._trial.set_user_attr(_SECONDS, round(seconds, 3))
        if starts is not None:
            self._trial.set_user_attr(_STARTS, list(starts))

    def complete(self, value: float) -> None:
        self._study.tell(self.number, value)

    def prune(self) -> None:
        self._study.tell(self.number, state=TrialState.PRUNED)

    def fail(self, reason: str) -> None:
        self._trial.set_user_attr(_FAILED, reason)
        self._study.tell(self.number, state=TrialState.PRUNED)


class _SeededSampler(BaseSampler):
    """TPE whose draws follow from seed, trial, setting and finished trials, not from what this process drew before.

    The first trial has `start`, so that the table says what searching has brought.
    """

    def __init__(self, seed: int, start: Mapping[str, Value]) -> None:
        self._seed, self._start = seed, start

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if trial.number == 0 and param_name in self._start:
            return self._start[param_name]
        return self._of(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def _of(self, trial: FrozenTrial, setting: str = "") -> TPESampler:
        """`multivariate`: settings together, not each alone; `constant_liar`: away from what others are trying."""
        seed = int(fingerprint([self._seed, trial.number, setting])[:8], 16)
        with warnings.catch_warnings():  # before version 5 both were marked as experimental
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return TPESampler(seed=seed, multivariate=True, constant_liar=True)


class _Pruner(BasePruner):
    """Hyperband by the reported values of a trial's bracket."""

    def __init__(self, band: Hyperband) -> None:
        self._band = band

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        step = trial.last_step
        if step is None:
            return False
        bracket = self._band.bracket_of(study.study_name, trial.number)
        others = [
            one.intermediate_values[step]
            for one in study.get_trials(deepcopy=False)
            if one.number != trial.number
            and step in one.intermediate_values
            and self._band.bracket_of(study.study_name, one.number) == bracket
        ]
        return self._band.is_pruned(bracket, step, trial.intermediate_values[step], others)


class _KernelLock(JournalFileOpenLock):
    """Optuna's own locks outlive a killed process for 30 s; the kernel gives this one back at death."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._path, self._descriptor = f"{path}.lock", -1

    def acquire(self) -> bool:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        os.close(self._descriptor)


def _record(trial: FrozenTrial) -> TrialRecord:
    attributes = trial.user_attrs
    return TrialRecord(
        number=trial.number,
        state="failed" if _FAILED in attributes and trial.state.is_finished() else _STATES[trial.state],
        values=dict(trial.params),
        metric_by_step=dict(sorted(trial.intermediate_values.items())),
        seconds=float(attributes.get(_SECONDS, 0.0)),
        starts=tuple(attributes.get(_STARTS, ())),
        reason=str(attributes.get(_FAILED, "")),
    )
