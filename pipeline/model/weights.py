"""Weights of unknown origin, and the model that a run from scratch starts with.

The file of a folder that holds them and its named tensors; no code in it is ever run.
"""

import hashlib
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.format import format_bytes
from pipeline.io.storage import HEAD_BYTES, Storage, check_downloaded, join_key, open_storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.factory import module_weights
from pipeline.model.hf import CONFIG, as_bert, encoder_from_hf, read_config
from pipeline.model.relevance import RelevanceModel, build_model

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
ADAPTER = "adapter_config.json"
_COUNTERS = ("position_ids", "num_batches_tracked")  # whole numbers that models keep beside their weights
_SHARED = 4  # tied weights are stored once and counted twice; far more is a small file made to fill the memory
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of 8 bits only with scales of their own
_WRAPPERS = ("module.", "_orig_mod.", "model.", "auto_model.", "0.auto_model.", "0.model.")


def find_weights(storage: Storage, folder: str = "") -> str:
    """Return the name of the file of weights in a Hugging Face folder.

    Raises ConfigError for an adapter, which transformers adds to the weights; CheckpointError for no or several files.
    """

    def has(name: str) -> bool:
        return storage.stat(join_key(folder, name)) is not None

    where = storage.uri(folder) if folder else storage.root
    if has(ADAPTER):
        raise ConfigError(
            f"{where} has an adapter ({ADAPTER})",
            expected="the weights of a whole encoder",
            next_command="merge it where it was made: model.merge_and_unload().save_pretrained(DIR)",
        )
    if found := next(filter(has, WEIGHT_FILES), ""):
        return found
    index = next((f"{name}.index.json" for name in WEIGHT_FILES if has(f"{name}.index.json")), "")
    raise CheckpointError(
        f"{where} has its weights in several files ({index})"
        if index
        else f"{where} has no weights: neither {' nor '.join(WEIGHT_FILES)}",
        expected=" or ".join(WEIGHT_FILES),
        next_command="save it again in one file: model.save_pretrained(DIR, max_shard_size='30GB')"
        if index
        else "copy the whole folder",
    )


def without_wrappers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove what DDP, torch.compile, Lightning or sentence-transformers put before every name."""
    found = dict(weights)
    while wrapper := next((one for one in _WRAPPERS if found and all(name.startswith(one) for name in found)), ""):
        found = {name.removeprefix(wrapper): tensor for name, tensor in found.items()}
    return found


def load_tensors(path: Path, source: str) -> dict[str, Tensor]:
    """Return tensors by name, fp32, contiguous and in memory of their own on the CPU; counters are left out.

    Raises CheckpointError naming the tensor or the code in the file (`source`) that is refused.
    """
    return {name: _as_weight(name, tensor, source) for name, tensor in _read_tensors(path, source).items()}


def _read_tensors(path: Path, source: str) -> dict[str, Tensor]:
    """Return tensors by name as they are stored, without counters. Raises CheckpointError if they cannot be read."""
    with path.open("rb") as file:
        check_downloaded(file.read(HEAD_BYTES), source, CheckpointError)
    if path.suffix == ".safetensors":
        try:
            found: Mapping[str, Tensor] = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source} is damaged or no safetensors file: {error}",
                expected="a safetensors file",
                next_command="copy it again, or export it again",
            ) from error
    else:
        found = _from_torch(path, source)
    if not found:
        raise CheckpointError(f"{source} holds no tensor", expected="the weights of a model")
    return {name: tensor for name, tensor in found.items() if not name.endswith(_COUNTERS)}


def _from_torch(path: Path, source: str) -> Mapping[str, Tensor]:
    def refused(seen: str) -> CheckpointError:
        return CheckpointError(
            f"{source} {seen}",
            expected="a state dict saved with torch.save: names and tensors, nothing else",
            next_command="torch.save(model.state_dict(), FILE) where it was made, or convert it to safetensors there",
        )

    if zipfile.is_zipfile(path):
        # torch.save stores its entries as they are: a packed one may be small on disk and fill the memory.
        try:
            with zipfile.ZipFile(path) as archive:
                packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        except (zipfile.BadZipFile, OSError) as error:
            raise refused(f"cannot be read: {error}") from error
        if packed:
            raise refused(f"has entry {packed[0]}, which is compressed")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a damaged or hostile stream leads it to
        named = _GLOBAL.search(str(error))
        seen = f"would run {named.group(1)} when it is loaded" if named else f"cannot be read: {type(error).__name__}"
        raise refused(f"{seen}; nothing of it was run") from error
    if not isinstance(content, Mapping):
        raise refused(f"holds a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter):
            raise refused(f"holds {name!r}, which is a {type(value).__name__}")
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in content.values())
    if size_bytes > _SHARED * path.stat().st_size:
        raise refused(f"unfolds to {format_bytes(size_bytes)} of tensors that share their content")
    return cast(Mapping[str, Tensor], content)


def _as_weight(name: str, tensor: Tensor, source: str) -> Tensor:
    """Return a tensor in fp32. Raises CheckpointError for what cannot be a weight."""
    seen = ""
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_cpu:
        seen = f"{tensor.layout} on {tensor.device.type}{', quantised' if tensor.is_quantized else ''}"
    elif tensor.dtype not in _DTYPES:
        seen = str(tensor.dtype)
    elif tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        seen = f"shape {list(tensor.shape)} over {tensor.untyped_storage().nbytes()} bytes"
    elif not bool(torch.isfinite(tensor.to(torch.float32)).all()):
        seen = "NaN or infinite values"
    if seen:
        raise CheckpointError(
            f"{source}: {name}: {seen}",
            expected="finite numbers in fp32, fp16 or bf16, all of them stored",
            next_command="save it in fp32 where it was made: model.float().save_pretrained(DIR)",
        )
    return tensor.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)


# The model a run from scratch starts with: random, or with the encoder of a Hugging Face folder.


def digest_of_initial(folder: str, scratch: Path) -> tuple[str, str]:
    """Return URI and SHA-256 of the weights of `model.init_from`, which `initial_model` has read."""
    storage = open_storage(folder)
    name = find_weights(storage)
    with (storage.local_path(name) or scratch / f"init-{name}").open("rb") as file:
        return storage.uri(name), hashlib.file_digest(file, "sha256").hexdigest()


def initial_model(
    config: ModelConfig, spec: InputSpec, seed: int, scratch: Path, *, same_vocabulary: bool = False
) -> RelevanceModel:
    """Make a model on CPU, the same on every rank. `config.init_from` names a folder with model.safetensors.

    `same_vocabulary`: its tokenizer is that of `spec`.

    Raises CheckpointError for weights that do not fit, ConfigError for an architecture that is not computed here, or is
    not that of the settings.
    """
    if config.init_from is None:
        return build_model(config, spec, seed)
    storage = open_storage(config.init_from)
    name = find_weights(storage)
    local = storage.local_path(name)
    if local is None:
        local = scratch / f"init-{name}"
        storage.download(name, local)
    model_type: str = config.architecture
    if config.factory is None and storage.stat(CONFIG) is not None:  # without it, weights are of that architecture
        described = read_config(storage.read_bytes(CONFIG), storage.uri(CONFIG))
        described.check(config, source=storage.uri(CONFIG))
        model_type = described.model_type
    source = storage.uri(name)
    # A file for a factory may hold masks and other buffers beside the weights that are taken.
    weights = load_tensors(local, source) if config.factory is None else _read_tensors(local, source)
    return with_encoder(weights, source, config, spec, seed, model_type=model_type, same_vocabulary=same_vocabulary)


def with_encoder(
    weights: Mapping[str, Tensor],
    source: str,
    config: ModelConfig,
    spec: InputSpec,
    seed: int,
    *,
    model_type: str,
    same_vocabulary: bool = False,
) -> RelevanceModel:
    """Make a model with the encoder in a file of a family, or of the module of a factory; the rest is from `seed`.

    Raises CheckpointError for weights that do not fit; they are held against the settings before memory is taken.
    """
    if config.factory is not None:
        model = build_model(config, spec, seed)
        found = module_weights(weights, model.state_dict(), factory=config.factory, source=source)
        encoder = {name: _as_weight(name, tensor, source) for name, tensor in found.items()}
    else:
        named = as_bert(without_wrappers(weights), model_type, spec.pad_id, source=source)
        encoder = encoder_from_hf(named, template_of(config, spec), source=source, same_vocabulary=same_vocabulary)
        model = build_model(config, spec, seed)
    model.load_state_dict(model.state_dict() | encoder)
    return model


def template_of(config: ModelConfig, spec: InputSpec) -> dict[str, Tensor]:
    """Return names and shapes of a model without content. Raises CheckpointError for sizes that no tensor can have."""
    try:
        with torch.device("meta"):
            return RelevanceModel(config, spec).state_dict()
    except RuntimeError as error:  # more bytes than can be counted
        raise CheckpointError(
            f"a model of width {config.encoder.hidden_size} and {spec.vocab_size} words: {error}",
            expected="the sizes of the weights beside it",
            next_command="export the model again",
        ) from error
