"""Estimate memory and time of a training step on one core, from sizes only.

Activations: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.1,
without sharding, and with dropout only if enabled. FLOPs: Chowdhery et al., "PaLM" (2022), appendix B. Two passes: see
train/step.py. Memory of the compiler (scratch, code, collectives) is only known after compilation and is not included,
so leave a reserve.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.core.errors import ConfigError
from pipeline.core.machines import MACHINES, Machine

Precision = Literal["fp32", "autocast", "bf16"]


@dataclass(frozen=True)
class EncoderSizes:
    """A BERT-style encoder: V vocabulary, P positions, L layers, D width, H heads, I intermediate width."""

    vocab: int
    positions: int
    layers: int
    width: int
    heads: int
    intermediate: int

    @property
    def matrix_parameters(self) -> int:
        """Weights of the matrices of all layers, which multiply every token: L (4 D^2 + 2 D I)."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.intermediate)

    @property
    def parameters(self) -> int:
        """Number of parameters: embeddings of words, positions and two types, matrices, biases and layer norms."""
        embeddings = (self.vocab + self.positions + 2) * self.width
        norms = 2 * self.width * (1 + 2 * self.layers)
        biases = self.layers * (5 * self.width + self.intermediate)
        return embeddings + self.matrix_parameters + norms + biases


@dataclass(frozen=True)
class MeasuredTexts:
    """The texts of one micro-step, each in a separate row, and the measured costs of encoding one of them."""

    texts: int
    kept_bytes: int
    """Activations of one text in fp32 that the backward pass needs."""
    widest_bytes: int
    """The largest of these tensors."""
    flops: int
    """FLOPs of the forward pass of one text."""


@dataclass(frozen=True)
class ContrastiveBatch:
    """The contrastive loss, which every core computes over all queries and products of the global batch."""

    queries: int
    products: int
    two_passes: bool
    """The loss is computed before the backward passes, from the embeddings of a separate forward pass."""

    def flops(self, width: int) -> float:
        """Return the FLOPs of the similarities of embeddings of `width`, forward and backward."""
        return 6.0 * self.queries * self.products * width

    @property
    def similarity_bytes(self) -> int:
        """Four fp32 matrices [queries, products]: similarities, mask, scores and gradient."""
        return 4 * 4 * self.queries * self.products


@dataclass(frozen=True)
class Workload:
    """The work of one core in one optimizer step."""

    rows: int
    """Rows of the encoder's input in one micro-step."""
    row_tokens: int
    samples: int
    """Samples of one micro-step."""
    accumulation: int = 1
    precision: Precision = "fp32"
    dropout: bool = False
    contrastive: ContrastiveBatch | None = None
    """None if the loss is disabled."""
    recompute: bool = False
    """Only the inputs of layers are kept for the backward pass, which recomputes the other activations."""
    shards: int = 1
    """Number of cores that shard one optimizer state (parallel/strategies/zero1.py)."""
    match_bytes: int = 0
    """Activations of model/relevance.TokenMatch for the backward pass."""
    measured: MeasuredTexts | None = None
    """Replaces `rows` for an encoder with unknown layers (model/factory.py)."""

    @staticmethod
    def for_groups(
        samples: int,
        row_tokens: int,
        *,
        slots: int = 1,
        mined: int = 0,
        accumulation: int = 1,
        precision: Precision = "fp32",
        dropout: bool = False,
        contrastive: ContrastiveBatch | None = None,
        recompute: bool = False,
        shards: int = 1,
        token_match: bool = False,
    ) -> "Workload":
        """Return the workload of `samples` products in rows of `row_tokens` tokens: a query and `slots` products.

        `mined`: number of mined negatives of each query. `token_match`: include fp32 cosines of all tokens of a row,
        masked for the query and for each product.
        """
        groups = samples // slots
        samples += groups * mined
        match_bytes = 4 * (samples + groups) * row_tokens**2 if token_match else 0
        return Workload(
            groups, row_tokens, samples, accumulation, precision, dropout, contrastive, recompute, shards, match_bytes
        )


@dataclass(frozen=True)
class Footprint:
    """Memory on one core."""

    master_bytes: int
    """fp32 weights that the optimizer updates."""
    compute_bytes: int
    """Copy of the weights in compute precision (bf16 and autocast), and full weights if the masters are sharded."""
    optimizer_bytes: int
    gradient_bytes: int
    """Gradients: with accumulation the sum and the newest, in bf16 also the gradient before the cast to fp32."""
    activation_bytes: int
    """Activations kept for the backward pass."""
    workspace_bytes: int
    """Incoming and outgoing gradients of the widest activations of one layer."""
    contrastive_bytes: int
    """Memory of the contrastive loss in addition to the activations."""

    @property
    def parameter_bytes(self) -> int:
        return self.master_bytes + self.compute_bytes

    @property
    def peak_bytes(self) -> int:
        """Upper estimate: all memory at the start of the backward pass, without reuse of buffers."""
        state = self.parameter_bytes + self.optimizer_bytes + self.gradient_bytes
        return state + self.activation_bytes + self.workspace_bytes + self.contrastive_bytes


@dataclass(frozen=True)
class Estimate:
    """The estimate that `trnpipe doctor` prints for one row length on one instance type."""

    instance: Machine
    footprint: Footprint
    flops: float
    """FLOPs of one optimizer step on one core."""
    mfu: float
    step_s: float

    @property
    def memory_share(self) -> float:
        return self.footprint.peak_bytes / self.instance.core_memory_bytes

    def fits(self, reserve: float = 0.2) -> bool:
        """Return whether the fraction `reserve` of the core's memory is left for the compiler and the collectives."""
        return self.memory_share <= 1.0 - reserve


def footprint(parameters: int, encoder: EncoderSizes, workload: Workload) -> Footprint:
    """Estimate the memory on one core. `parameters`: number of the whole model, including heads."""
    low = workload.precision != "fp32"
    copies = 2 if workload.accumulation > 1 else 1
    gradients = 4 * copies * parameters + (2 * parameters if workload.precision == "bf16" else 0)
    activations = _activation_bytes(encoder, workload) + workload.match_bytes
    product, other = _bytes_of(workload.precision)
    # Autocast keeps some of the measured activations in fp32. Their part is unknown.
    scale = product / 4 if workload.precision == "bf16" else 1.0
    wide = max(product * encoder.intermediate, product * 3 * encoder.width)
    tokens = workload.rows * workload.row_tokens
    workspace = 2 * tokens * max(wide, other * encoder.heads * workload.row_tokens)
    if workload.measured is not None:
        activations += int(scale * workload.measured.texts * workload.measured.kept_bytes)
        workspace += int(scale * 2 * workload.measured.texts * workload.measured.widest_bytes)
    contrastive_bytes = 0
    if workload.contrastive is not None:
        contrastive_bytes = workload.contrastive.similarity_bytes
        if workload.contrastive.two_passes:  # the loss is computed before the activations of a micro-step exist
            embeddings = workload.contrastive.queries + workload.contrastive.products
            gradient_bytes = 4 * encoder.width * embeddings  # fp32, kept for the second pass
            contrastive_bytes = gradient_bytes + max(0, contrastive_bytes - activations - workspace)
    compute = 2 * parameters if low else 0
    if workload.shards > 1 and workload.precision != "bf16":
        compute += 4 * parameters
    return Footprint(
        master_bytes=4 * parameters // workload.shards,
        compute_bytes=compute,
        optimizer_bytes=8 * parameters // workload.shards,
        gradient_bytes=gradients,
        activation_bytes=activations,
        workspace_bytes=workspace,
        contrastive_bytes=contrastive_bytes,
    )


def step_flops(encoder: EncoderSizes, workload: Workload, sample_parameters: int = 0) -> float:
    """Return the FLOPs of one optimizer step on one core. A backward pass counts as two forward passes.

    A token costs 6 FLOPs per matrix weight and 12 L D T for attention over T tokens (PaLM, appendix B: 6 N + 12 L H Q
    T). Embeddings are looked up, not multiplied. Recomputation and the first of two passes add a forward pass each.
    `sample_parameters`: matrix weights applied once per sample (the heads), not in the first pass.
    """
    contrastive = workload.contrastive
    per_token = 6 * encoder.matrix_parameters + 12 * encoder.layers * encoder.width * workload.row_tokens
    encoding = float(workload.rows * workload.row_tokens * per_token)
    if workload.measured is not None:
        encoding += 3.0 * workload.measured.texts * workload.measured.flops
    extra_passes = (contrastive is not None and contrastive.two_passes) + workload.recompute
    step = workload.accumulation * (encoding * (1.0 + extra_passes / 3.0) + 6.0 * sample_parameters * workload.samples)
    return step + (contrastive.flops(encoder.width) if contrastive is not None else 0.0)


def estimate(
    parameters: int,
    encoder: EncoderSizes,
    workload: Workload,
    *,
    instance: str,
    mfu: float,
    sample_parameters: int = 0,
) -> Estimate:
    """Estimate memory and time of a step on one core of `instance`. Raises ConfigError for an unknown instance."""
    if instance not in MACHINES:
        raise ConfigError(f"unknown instance type {instance}", expected=f"one of {', '.join(MACHINES)}")
    machine = MACHINES[instance]
    flops = step_flops(encoder, workload, sample_parameters)
    peak_tflops = machine.core_tflops_fp32 if workload.precision == "fp32" else machine.core_tflops_bf16
    seconds = flops / (peak_tflops * 1e12 * mfu)
    return Estimate(machine, footprint(parameters, encoder, workload), flops, mfu, seconds)


def _bytes_of(precision: Precision) -> tuple[int, int]:
    """Return the bytes per element of (inputs of matrix products and GELU, inputs of layer norms and softmax).

    Autocast runs layer norm and softmax in fp32 (measured with torch-xla 2.9 on XLA:CPU).
    """
    return {"fp32": (4, 4), "bf16": (2, 2), "autocast": (2, 4)}[precision]


def _activation_bytes(encoder: EncoderSizes, workload: Workload) -> int:
    """Return the activation bytes: per layer and token 6 D + I matrix inputs, I GELU, 2 D layer norm, H T softmax.

    Dropout adds its masks. In 2-byte elements with dropout and I = 4 D the sum is 34 D + 5 H T (Korthikanti et al.,
    equation 1). The score matrix is materialised, because XLA has no fused attention here.
    """
    product, other = _bytes_of(workload.precision)
    width, scores = encoder.width, encoder.heads * workload.row_tokens
    per_token = product * (6 * width + 2 * encoder.intermediate) + other * (2 * width + scores)
    if workload.dropout:
        per_token += 2 * width + scores + product * scores
    embedding = (other + (1 if workload.dropout else 0)) * width
    layers = encoder.layers * other * width + per_token if workload.recompute else encoder.layers * per_token
    return workload.rows * workload.row_tokens * (layers + embedding)
