"""Weights under the Hugging Face names of their architecture, so that `transformers` and every backend read one file.

Encoder tensors carry its prefix (`bert.`, `mpnet.`, `model.`); interactions and head keep their own names, and a module
of a factory has its names behind `encoder.module.`.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.core.errors import CheckpointError
from pipeline.io.storage import KeyNotFound, Storage, open_storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.factory import PREFIX as FACTORY_PREFIX
from pipeline.model.factory import module_weights
from pipeline.model.families import FAMILIES, as_bert
from pipeline.model.hf_config import CONFIG, MPNET_PAD, read_config
from pipeline.model.relevance import RelevanceModel, build_model
from pipeline.model.weight_files import check_tensor, find_weights, read_tensors, without_wrappers

_WORDS = "encoder.word_embeddings.weight"
_POSITIONS = "encoder.position_embeddings.weight"
HEAD_PARTS = ("interactions.", "head.")
"""How the names of everything else begin."""
_OF_TRAINING = ("temperature.",)
"""How names begin that only a training run has a use for."""
_OLD_NORM = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}  # as in bert-base-uncased
_EMBEDDINGS = {
    "word_embeddings.weight": "embeddings.word_embeddings.weight",
    "position_embeddings.weight": "embeddings.position_embeddings.weight",
    "embedding_norm.weight": "embeddings.LayerNorm.weight",
    "embedding_norm.bias": "embeddings.LayerNorm.bias",
}
_FEED_FORWARD = {
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


@dataclass(frozen=True)
class _Names:
    """Hugging Face names of an architecture."""

    prefix: str
    layers: str
    """What stands before the number of a layer."""
    single: Mapping[str, str]
    """Tensors that are in no layer."""
    parts: Mapping[str, str]
    """Modules of a layer."""
    qkv: tuple[str, ...]
    """Of query, key and value; one where they are one matrix there too."""
    ignored: tuple[str, ...]
    """How names begin of what is no part of the encoder: pooler, heads of tasks."""
    offset: int = 0
    """Rows of the table of positions before that of the first token."""

    @property
    def begins(self) -> tuple[str, ...]:
        """How names of the encoder begin where they have no prefix."""
        return (*sorted({name.partition(".")[0] + "." for name in self.single.values()}), self.layers)


_NAMES: Mapping[str, _Names] = {
    "bert": _Names(
        FAMILIES["bert"].prefix,
        "encoder.layer.",
        _EMBEDDINGS | {"type_embeddings.weight": "embeddings.token_type_embeddings.weight"},
        _FEED_FORWARD | {"attention_output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm"},
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        ("pooler.", "cls.", "classifier.", "qa_outputs.", "embeddings.position_ids"),
    ),
    "mpnet": _Names(
        FAMILIES["mpnet"].prefix,
        "encoder.layer.",
        _EMBEDDINGS | {"relative_bias.weight": "encoder.relative_attention_bias.weight"},
        _FEED_FORWARD | {"attention_output": "attention.attn.o", "attention_norm": "attention.LayerNorm"},
        ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        ("pooler.", "lm_head.", "classifier.", "qa_outputs.", "embeddings.position_ids"),
        offset=MPNET_PAD + 1,
    ),
    "modernbert": _Names(
        FAMILIES["modernbert"].prefix,
        "layers.",
        {
            "word_embeddings.weight": "embeddings.tok_embeddings.weight",
            "embedding_norm.weight": "embeddings.norm.weight",
            "final_norm.weight": "final_norm.weight",
        },
        {
            "attention_norm": "attn_norm",
            "attention_output": "attn.Wo",
            "feed_forward_norm": "mlp_norm",
            "gated": "mlp.Wi",
            "output": "mlp.Wo",
        },
        ("attn.Wqkv",),
        ("head.", "decoder.", "classifier."),
    ),
}


def _names_of(state: Iterable[str]) -> _Names:
    """Of the architecture whose encoder has tensors of these names of ours."""
    found = set(state)
    if "encoder.final_norm.weight" in found:
        return _NAMES["modernbert"]
    return _NAMES["mpnet" if "encoder.relative_bias.weight" in found else "bert"]


def to_hf(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict to Hugging Face names; the joint query-key-value matrix is cut where they are three."""
    names = _names_of(state)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == _POSITIONS and names.offset:
            tensor = torch.cat([tensor.new_zeros(names.offset, tensor.shape[1]), tensor])
        theirs = _hf_names(name, names)
        result |= zip(theirs, tensor.chunk(len(theirs), dim=0), strict=True)
    return result


def _hf_names(name: str, names: _Names) -> tuple[str, ...]:
    """Those that hold a tensor of ours, one after the other."""
    if not name.startswith("encoder.") or name.startswith(FACTORY_PREFIX):
        return (name,)
    own = name.removeprefix("encoder.")
    if own in names.single:
        return (names.prefix + names.single[own],)
    _, layer, part, kind = own.split(".")
    modules = names.qkv if part == "qkv" else (names.parts[part],)
    return tuple(f"{names.prefix}{names.layers}{layer}.{module}.{kind}" for module in modules)


def from_hf(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Hugging Face names back to ours, complete and in the shapes of `template`.

    Raises CheckpointError naming the first tensor that is missing or of another shape: another architecture.
    """
    result: dict[str, Tensor] = {}
    # Scale and shift of features as models had them before they were kept: none.
    fills = {"interactions.features.scale": torch.ones, "interactions.features.shift": torch.zeros}
    weights = {name: fill(template[name].shape) for name, fill in fills.items() if name in template} | dict(weights)
    for name, tensor in _expected(template).items():
        found = weights.get(name)
        if found is None or found.shape != tensor.shape:
            seen = "no such tensor" if found is None else f"shape {list(found.shape)}"
            raise CheckpointError(
                f"{source}: {name}: {seen}",
                expected=f"shape {list(tensor.shape)}, from the model settings",
                next_command="use the model settings of the checkpoint (its state.json), or --train.start scratch",
            )
    names = _names_of(template)
    for name in template:
        parts = [weights[theirs] for theirs in _hf_names(name, names)]
        found = torch.cat(parts, dim=0) if len(parts) > 1 else parts[0]
        result[name] = found[names.offset :] if name == _POSITIONS else found
    return result


def encoder_from_hf(
    weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str, same_vocabulary: bool = False
) -> dict[str, Tensor]:
    """The encoder's part of a foreign checkpoint (with or without a prefix), in our names.

    Position rows beyond ours are left out; pooler and task heads are ignored; anything else unknown is an error.
    `same_vocabulary`: further rows of words, with which tables are often filled up to a round number, are left out.
    """
    names = _names_of(template)

    def modern(name: str) -> str:
        for old, new in _OLD_NORM.items():  # layer norms of checkpoints converted from TensorFlow
            name = name.replace(old, new)
        return names.prefix + name.removeprefix(names.prefix)

    prefixed = _renamed(weights, modern, source)
    encoder = {name: tensor for name, tensor in template.items() if name.startswith("encoder.")}
    known = _expected(encoder)
    ignored = (*names.ignored, *_OF_TRAINING)
    unknown = sorted(n for n in prefixed.keys() - known.keys() if not n.removeprefix(names.prefix).startswith(ignored))
    if unknown:
        raise CheckpointError(
            f"{source}: {unknown[0]} has no place in this model",
            expected="an encoder of the architecture and of as many layers as the model settings",
            next_command="--model.architecture, --model.preset or --model.num-layers as in its config.json",
        )
    (words,) = _hf_names(_WORDS, names)
    if words in prefixed and (rows := prefixed[words].shape[0]) != (tokens := known[words].shape[0]):
        if rows < tokens or not same_vocabulary:
            raise CheckpointError(
                f"{source}: {words}: shape {list(prefixed[words].shape)}, and the tokenizer has {tokens} tokens",
                expected="the tokenizer that belongs to the weights",
                next_command="trnpipe prepare --data.tokenizer.path with the tokenizer.json of the model",
            )
        prefixed[words] = prefixed[words][:tokens]
    positions = next(iter(_hf_names(_POSITIONS, names)), "") if _POSITIONS in encoder else ""
    if positions in prefixed:
        prefixed[positions] = prefixed[positions][: known[positions].shape[0]]
    return from_hf(prefixed, encoder, source=source)


def model_from_hf(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """A whole model in our names: every tensor of `template` and no other. The encoder may lack its prefix.

    A temperature that was learnt is left out.

    Raises CheckpointError naming the first tensor that is too many, missing or of another shape.
    """
    names = _names_of(template)

    def named_whole(name: str) -> str:
        if is_foreign:
            return name if name.startswith((*HEAD_PARTS, *_OF_TRAINING, FACTORY_PREFIX)) else FACTORY_PREFIX + name
        return names.prefix + name if name.startswith(names.begins) else name

    is_foreign = any(name.startswith(FACTORY_PREFIX) for name in template)
    named = _renamed(weights, named_whole, source)
    unknown = sorted(n for n in named.keys() - _expected(template).keys() if not n.startswith(_OF_TRAINING))
    if unknown:
        raise CheckpointError(
            f"{source}: {unknown[0]} has no place in this model",
            expected="the tensors of a relevance model of these settings",
            next_command="give the model settings it was trained with (--model...)",
        )
    return from_hf(named, template, source=source)


def _expected(template: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes that `template` has under Hugging Face names, without content."""
    # Not empty_like: of a tensor that is on `meta` already it imports sympy, half a second.
    empty = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in template.items()}
    return to_hf(empty)


def _renamed(weights: Mapping[str, Tensor], rename: Callable[[str], str], source: str) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        new = rename(name)
        if new in result:
            raise CheckpointError(
                f"{source}: {new} is there twice, once as {name}",
                expected="every tensor once",
                next_command="save the model again with one naming",
            )
        result[new] = tensor
    return result


# The model a run from scratch starts with: random, or with the encoder of a Hugging Face folder.


def _weights_file(storage: Storage, scratch: Path) -> tuple[str, Path]:
    """Return the name of a folder's weights, and the local file that they are read from."""
    name = find_weights(storage)
    return name, storage.local_path(name) or scratch / f"init-{name}"


def digest_of_initial(folder: str, scratch: Path) -> tuple[str, str]:
    """URI and SHA-256 of the weights of `model.init_from`, which `initial_model` has read."""
    storage = open_storage(folder)
    name, local = _weights_file(storage, scratch)
    with local.open("rb") as file:
        return storage.uri(name), hashlib.file_digest(file, "sha256").hexdigest()


def initial_model(
    config: ModelConfig, spec: InputSpec, seed: int, scratch: Path, *, same_vocabulary: bool = False
) -> RelevanceModel:
    """A model on CPU, the same on every rank. `config.init_from` names a folder with model.safetensors.

    `same_vocabulary`: its tokenizer is that of `spec`.

    Raises CheckpointError for weights that do not fit, ConfigError for an architecture that is not computed here, or is
    not that of the settings.
    """
    model = build_model(config, spec, seed)
    if config.init_from is None:
        return model
    storage: Storage = open_storage(config.init_from)
    name, local = _weights_file(storage, scratch)
    if storage.local_path(name) is None:
        storage.download(name, local)
    source = storage.uri(name)
    weights = read_tensors(local, source)
    state = model.state_dict()
    if config.factory is not None:
        taken = module_weights(weights, state, factory=config.factory, source=source)
        return _loaded(model, taken, source)
    model_type: str = config.architecture
    try:
        described = read_config(storage.read_bytes(CONFIG), storage.uri(CONFIG))
        described.check(config, source=storage.uri(CONFIG))
        model_type = described.model_type
    except KeyNotFound:
        pass  # weights alone are of the architecture of the settings
    weights = as_bert(without_wrappers(weights), model_type, spec.pad_id, source=source)
    return _loaded(model, encoder_from_hf(weights, state, source=source, same_vocabulary=same_vocabulary), source)


def _loaded(model: RelevanceModel, taken: dict[str, Tensor], source: str) -> RelevanceModel:
    """The model with these tensors in place of its own. Raises CheckpointError for one that cannot be a weight."""
    for name, tensor in taken.items():
        check_tensor(name, tensor, source)
    model.load_state_dict(model.state_dict() | taken)
    return model
