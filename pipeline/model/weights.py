"""Load untrusted weights without executing any code that they contain, and build the initial model of a run."""

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
_COUNTERS = ("position_ids", "num_batches_tracked")  # integer buffers, as opposed to weights
# Maximum ratio of tensor sizes to file size. Tied weights are stored once but counted twice, but a much higher ratio
# may be an attempt to exhaust memory.
_SHARED = 4
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # 8-bit types would require scales
_WRAPPERS = ("module.", "_orig_mod.", "model.", "auto_model.", "0.auto_model.", "0.model.")


def find_weights(storage: Storage, folder: str = "") -> str:
    """Return the name of the weights file in a Hugging Face folder.

    Raises ConfigError if the folder contains an adapter, and CheckpointError if the weights are missing or sharded.
    """

    def exists(name: str) -> bool:
        return storage.stat(join_key(folder, name)) is not None

    uri = storage.uri(folder) if folder else storage.root
    if exists(ADAPTER):
        raise ConfigError(
            f"{uri} contains an adapter ({ADAPTER})",
            expected="the weights of a full encoder",
            next_command="merge it into the base model first: model.merge_and_unload().save_pretrained(DIR)",
        )
    if name := next(filter(exists, WEIGHT_FILES), ""):
        return name
    if index := next((f"{name}.index.json" for name in WEIGHT_FILES if exists(f"{name}.index.json")), ""):
        raise CheckpointError(
            f"the weights in {uri} are split into several files ({index})",
            expected=" or ".join(WEIGHT_FILES),
            next_command="save the model again in one file: model.save_pretrained(DIR, max_shard_size='30GB')",
        )
    raise CheckpointError(
        f"{uri} has no weights",
        expected=" or ".join(WEIGHT_FILES),
        next_command="copy the whole folder again",
    )


def without_wrappers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove any prefixes that DDP, torch.compile, Lightning or sentence-transformers add to all names."""
    unwrapped = dict(weights)
    while unwrapped and (prefix := next((w for w in _WRAPPERS if all(name.startswith(w) for name in unwrapped)), "")):
        unwrapped = {name.removeprefix(prefix): tensor for name, tensor in unwrapped.items()}
    return unwrapped


def load_tensors(path: Path, source: str) -> dict[str, Tensor]:
    """Load weights as contiguous fp32 tensors on the CPU, skipping integer buffers.

    `source`: description of the file for error messages. Raises CheckpointError if the file is damaged, contains code,
    or contains a tensor that cannot be a weight.
    """
    return {name: _as_weight(name, tensor, source) for name, tensor in _read_tensors(path, source).items()}


def _read_tensors(path: Path, source: str) -> dict[str, Tensor]:
    """Load tensors without converting them, skipping integer buffers. Raises CheckpointError if they can't be read."""
    with path.open("rb") as file:
        check_downloaded(file.read(HEAD_BYTES), source, CheckpointError)
    if path.suffix == ".safetensors":
        try:
            tensors: Mapping[str, Tensor] = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source} is damaged or not a safetensors file: {error}",
                expected="a safetensors file",
                next_command="copy or export the file again",
            ) from error
    else:
        tensors = _read_torch_file(path, source)
    if not tensors:
        raise CheckpointError(f"{source} contains no tensors", expected="the weights of a model")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_COUNTERS)}


def _read_torch_file(path: Path, source: str) -> Mapping[str, Tensor]:
    def refusal(problem: str) -> CheckpointError:
        return CheckpointError(
            f"{source} {problem}",
            expected="a state dict saved with torch.save that only contains names and tensors",
            next_command="torch.save(model.state_dict(), FILE) on the training machine, or convert it to safetensors",
        )

    if zipfile.is_zipfile(path):
        # torch.save never compresses entries. A compressed entry could be small on disk, but exhaust the memory.
        try:
            with zipfile.ZipFile(path) as archive:
                packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        except (zipfile.BadZipFile, OSError) as error:
            raise refusal(f"cannot be read: {error}") from error
        if packed:
            raise refusal(f"has a compressed entry, {packed[0]}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or malicious pickle can make the unpickler raise any exception
        match = _GLOBAL.search(str(error))
        problem = f"would run {match.group(1)} on loading" if match else f"cannot be read: {type(error).__name__}"
        raise refusal(f"{problem} (no code was run)") from error
    if not isinstance(content, Mapping):
        raise refusal(f"contains a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter):
            raise refusal(f"contains {name!r}, which is a {type(value).__name__}")
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in content.values())
    if size_bytes > _SHARED * path.stat().st_size:
        raise refusal(f"expands to {format_bytes(size_bytes)}, because its tensors share the same storage")
    return cast(Mapping[str, Tensor], content)


def _as_weight(name: str, tensor: Tensor, source: str) -> Tensor:
    """Convert a tensor to fp32. Raises CheckpointError if it cannot be a weight."""
    problem = ""
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_cpu:
        problem = f"{tensor.layout} on {tensor.device.type}{', quantized' if tensor.is_quantized else ''}"
    elif tensor.dtype not in _DTYPES:
        problem = str(tensor.dtype)
    elif tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        problem = f"shape {list(tensor.shape)} over {tensor.untyped_storage().nbytes()} bytes"
    elif not bool(torch.isfinite(tensor.to(torch.float32)).all()):
        problem = "NaN or infinite values"
    if problem:
        raise CheckpointError(
            f"{source}: {name}: {problem}",
            expected="a dense tensor of finite values in fp32, fp16 or bf16",
            next_command="save the original model in fp32: model.float().save_pretrained(DIR)",
        )
    return tensor.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)


# The initial model of a run from scratch, which is randomly initialized except for an optional pretrained encoder.


def digest_of_initial(folder: str, scratch: Path) -> tuple[str, str]:
    """Return the URI and SHA-256 of the weights in `folder` (model.init_from).

    This must be called after `initial_model`, which downloads the weights to `scratch`.
    """
    storage = open_storage(folder)
    name = find_weights(storage)
    with (storage.local_path(name) or scratch / f"init-{name}").open("rb") as file:
        return storage.uri(name), hashlib.file_digest(file, "sha256").hexdigest()


def initial_model(
    config: ModelConfig, spec: InputSpec, seed: int, scratch: Path, *, same_vocabulary: bool = False
) -> RelevanceModel:
    """Build a model on the CPU, loading the encoder weights from the folder `config.init_from` if it is set.

    The result is the same on every rank.
    `same_vocabulary`: whether the encoder uses the same tokenizer as the data in `spec`. Raises CheckpointError if the
    weights don't match the settings, and ConfigError if the architecture is not supported or doesn't match either.
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
    if config.factory is None and storage.stat(CONFIG) is not None:  # otherwise, use the architecture in the settings
        encoder_json = read_config(storage.read_bytes(CONFIG), storage.uri(CONFIG))
        encoder_json.check(config, source=storage.uri(CONFIG))
        model_type = encoder_json.model_type
    source = storage.uri(name)
    # Files for a factory may also contain masks and other buffers, so only check the tensors that the module uses.
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
    """Build a model with the given encoder weights and initialize all other weights randomly.

    Raises CheckpointError if the weights don't match the settings. Unless a factory is used, this is checked before
    allocating any memory.
    """
    if config.factory is not None:
        model = build_model(config, spec, seed)
        tensors = module_weights(weights, model.state_dict(), factory=config.factory, source=source)
        encoder = {name: _as_weight(name, tensor, source) for name, tensor in tensors.items()}
    else:
        named = as_bert(without_wrappers(weights), model_type, spec.pad_id, source=source)
        encoder = encoder_from_hf(named, template_of(config, spec), source=source, same_vocabulary=same_vocabulary)
        model = build_model(config, spec, seed)
    model.load_state_dict(model.state_dict() | encoder)
    return model


def template_of(config: ModelConfig, spec: InputSpec) -> dict[str, Tensor]:
    """Return the state dict of a model on the meta device. Raises CheckpointError if a tensor would be too large."""
    try:
        with torch.device("meta"):
            return RelevanceModel(config, spec).state_dict()
    except RuntimeError as error:  # the size in bytes overflows
        raise CheckpointError(
            f"a model with hidden size {config.encoder.hidden_size} and {spec.vocab_size} tokens: {error}",
            expected="the sizes of the weights in the same folder",
            next_command="export the model again",
        ) from error
