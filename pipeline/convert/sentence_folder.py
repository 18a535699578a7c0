"""What a sentence-transformers folder adds to a Hugging Face one: its modules, the pooling, the longest text."""

from dataclasses import dataclass
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, RootModel

from pipeline.convert.source import Source
from pipeline.core.errors import ConfigError
from pipeline.io.storage import folder_key

MODULES, SENTENCE, MODEL = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLINGS = ("cls", "mean")
# As saved by sentence-transformers before 5.4; its order.
LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
Pooling = Literal["mean", "cls"]


@dataclass(frozen=True)
class SentenceSettings:
    """How a text becomes a vector there."""

    folder: str
    """Where the Hugging Face files lie in the folder, with a slash at its end; mostly ''."""
    pooling: Pooling
    max_tokens: int | None
    lowercase: bool
    notes: tuple[str, ...]


class _Module(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    type: str
    path: str


class _Modules(RootModel[tuple[_Module, ...]]):
    """modules.json as sentence-transformers writes it"""


class _Pooling(BaseModel):
    """The config.json of a sentence-transformers pooling"""

    model_config = ConfigDict(frozen=True, extra="allow")

    pooling_mode: str | tuple[str, ...] | None = None


class _Processor(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    model_max_length: int | None = Field(None, ge=3)


class _Sentence(BaseModel):
    """sentence_bert_config.json as sentence-transformers writes it"""

    model_config = ConfigDict(frozen=True, extra="ignore")

    max_seq_length: int | None = Field(None, ge=3)
    do_lower_case: bool = False
    processor_kwargs: _Processor = Field(default_factory=_Processor)


class _Model(BaseModel):
    """config_sentence_transformers.json as sentence-transformers writes it"""

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompts: dict[str, str] = Field(default_factory=dict)
    default_prompt_name: str | None = None


def read_sentence_settings(source: Source) -> SentenceSettings | None:
    """None for a folder without modules.json. Raises ConfigError naming what trnpipe has no counterpart for."""
    if not source.has(MODULES):
        return None
    modules = source.json(MODULES, _Modules).root
    kinds = [module.type.rpartition(".")[2] for module in modules]
    ours = all(module.type.startswith("sentence_transformers.") for module in modules)
    if not ours or kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{source.where(MODULES)}: modules {', '.join(module.type for module in modules) or 'none'}",
            expected="Transformer, Pooling and perhaps Normalize, of sentence-transformers",
            next_command="import a model of these modules",
        )
    folder, pooling = (f"{found}/" if (found := folder_key(module.path)) else "" for module in modules[:2])
    sentence = source.json(folder + SENTENCE, _Sentence) if source.has(folder + SENTENCE) else _Sentence()
    notes = _prompt_notes(source.json(MODEL, _Model)) if source.has(MODEL) else []
    if "Normalize" not in kinds:
        notes.append("sentence-transformers leaves these vectors at their length; here they have length one")
    return SentenceSettings(
        folder,
        _pooling(source, f"{pooling}config.json"),
        sentence.max_seq_length or sentence.processor_kwargs.model_max_length,
        sentence.do_lower_case,
        tuple(notes),
    )


def _pooling(source: Source, name: str) -> Pooling:
    found = source.json(name, _Pooling)
    extra = found.model_extra or {}
    modes = found.pooling_mode or tuple(mode for key, mode in LEGACY.items() if extra.get(key)) or "mean"
    mode = modes[0] if isinstance(modes, tuple) and len(modes) == 1 else modes
    if mode not in POOLINGS:
        raise ConfigError(
            f"{source.where(name)}: pooling {mode if isinstance(mode, str) else ' + '.join(mode)}",
            expected="one of " + ", ".join(POOLINGS),
            next_command="import a model with that pooling",
        )
    return cast(Pooling, mode)


def _prompt_notes(model: _Model) -> list[str]:
    """A text put before every text is no part of the encoder: whoever prepares the data must put it there."""
    used = {name: text for name, text in model.prompts.items() if text}
    if not used:
        return []
    default = f", {model.default_prompt_name} by default" if model.default_prompt_name else ""
    named = ", ".join(f"{name} {text!r}" for name, text in sorted(used.items()))
    return [f"sentence-transformers puts a prompt before texts ({named}{default}); trnpipe does not"]
