"""Estimate how much memory and time a training step takes on one core, without running it.

The activation memory follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022), section 4.1, without sharding, and with dropout only if it is enabled. The FLOPs follow Chowdhery et al., "PaLM"
(2022), appendix B. See train/step.py for the steps that need two forward passes.

Note that the estimate does not include the memory that the compiler allocates for scratch space, code and collectives,
because it is only known after compilation. Make sure to leave some room for it, see `Estimate.fits`.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.core.errors import ConfigError
from pipeline.core.machines import MACHINES, Machine

Precision = Literal["fp32", "autocast", "bf16"]


@dataclass(frozen=True)
class EncoderSizes:
    """The sizes of a BERT-style encoder.

    The formulas in this module use V for the vocabulary size, P for the number of positions, L for the number of
    layers, D for the width, H for the number of heads, and I for the intermediate width.
    """

    vocab: int
    positions: int
    layers: int
    width: int
    heads: int
    intermediate: int

    @property
    def matrix_parameters(self) -> int:
        """Number of weights in the matrices of all layers, which is L (4 D^2 + 2 D I). Every token uses all of them."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.intermediate)

    @property
    def parameters(self) -> int:
        """Total number of parameters, including the embeddings of words, positions and two token types."""
        embeddings = (self.vocab + self.positions + 2) * self.width
        norms = 2 * self.width * (1 + 2 * self.layers)
        biases = self.layers * (5 * self.width + self.intermediate)
        return embeddings + self.matrix_parameters + norms + biases


@dataclass(frozen=True)
class MeasuredTexts:
    """The number of texts in one micro-step and the measured cost of encoding each of them separately."""

    texts: int
    kept_bytes: int
    """Size of the fp32 activations that are kept for the backward pass of one text."""
    widest_bytes: int
    """Size of the largest of these activations."""
    flops: int
    """FLOPs of the forward pass for one text."""


@dataclass(frozen=True)
class ContrastiveBatch:
    """The size of the contrastive loss. Every core computes it over all queries and products of the global batch."""

    queries: int
    products: int
    two_passes: bool
    """Whether an additional forward pass computes all embeddings, so that the loss can be computed before backward."""

    def flops(self, width: int) -> float:
        """Return the FLOPs for computing all similarities, including the backward pass."""
        return 6.0 * self.queries * self.products * width

    @property
    def similarity_bytes(self) -> int:
        """Size of four fp32 matrices [queries, products], which are the similarities, mask, scores and gradient."""
        return 4 * 4 * self.queries * self.products


@dataclass(frozen=True)
class Workload:
    """The work that one core does in one optimizer step."""

    rows: int
    """Number of input rows per micro-step."""
    row_tokens: int
    samples: int
    """Number of samples per micro-step."""
    accumulation: int = 1
    precision: Precision = "fp32"
    dropout: bool = False
    contrastive: ContrastiveBatch | None = None
    """None if the contrastive loss is disabled."""
    recompute: bool = False
    """Whether to keep only the inputs of each layer and recompute all other activations in the backward pass."""
    shards: int = 1
    """Number of cores that the optimizer state is sharded over (parallel/strategies/zero1.py)."""
    match_bytes: int = 0
    """Size of the activations of model/relevance.TokenMatch that are kept for the backward pass."""
    measured: MeasuredTexts | None = None
    """Replaces `rows` if the layers of the encoder are unknown (model/factory.py)."""

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
        """Return the workload for training on groups, where each row holds a query and `slots` products.

        Args:
            samples: number of products per micro-step, not counting mined negatives.
            mined: number of mined negatives per query.
            token_match: whether the model computes token matches. These keep the fp32 cosines between all tokens of a
                row, masked once for the query and once for each product.
        """
        groups = samples // slots
        samples += groups * mined
        match_bytes = 4 * (samples + groups) * row_tokens**2 if token_match else 0
        return Workload(
            groups, row_tokens, samples, accumulation, precision, dropout, contrastive, recompute, shards, match_bytes
        )


@dataclass(frozen=True)
class Footprint:
    """The memory that a training step needs on one core."""

    master_bytes: int
    """The fp32 weights that the optimizer updates."""
    compute_bytes: int
    """A copy of the weights in bf16 (for bf16 and autocast), and the full weights if the fp32 weights are sharded."""
    optimizer_bytes: int
    gradient_bytes: int
    """The fp32 gradients. Accumulation also keeps the sum, and bf16 also keeps the gradients before the cast."""
    activation_bytes: int
    """The activations that are kept for the backward pass."""
    workspace_bytes: int
    """The gradients with respect to the input and the output of the widest operation in a layer."""
    contrastive_bytes: int
    """The memory that the contrastive loss needs on top of the activations."""

    @property
    def parameter_bytes(self) -> int:
        return self.master_bytes + self.compute_bytes

    @property
    def peak_bytes(self) -> int:
        """Upper bound for the memory at the start of the backward pass. This assumes that no buffers are reused."""
        state = self.parameter_bytes + self.optimizer_bytes + self.gradient_bytes
        return state + self.activation_bytes + self.workspace_bytes + self.contrastive_bytes


@dataclass(frozen=True)
class Estimate:
    """The estimate for one row length on one instance type, as printed by `trnpipe doctor`."""

    instance: Machine
    footprint: Footprint
    flops: float
    """FLOPs per optimizer step on one core."""
    mfu: float
    step_s: float

    @property
    def memory_share(self) -> float:
        return self.footprint.peak_bytes / self.instance.core_memory_bytes

    def fits(self, reserve: float = 0.2) -> bool:
        """Return whether a fraction `reserve` of the memory remains free for the compiler and the collectives."""
        return self.memory_share <= 1.0 - reserve


def footprint(parameters: int, encoder: EncoderSizes, workload: Workload) -> Footprint:
    """Estimate the memory needed on one core. `parameters` is the size of the whole model, including its heads."""
    low = workload.precision != "fp32"
    copies = 2 if workload.accumulation > 1 else 1
    gradients = 4 * copies * parameters + (2 * parameters if workload.precision == "bf16" else 0)
    activations = _activation_bytes(encoder, workload) + workload.match_bytes
    product, other = _bytes_of(workload.precision)
    # Autocast keeps some of the activations in fp32, but we don't know how many, so assume that it keeps all of them.
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
        if workload.contrastive.two_passes:  # the loss runs before the activations of a micro-step are allocated
            embeddings = workload.contrastive.queries + workload.contrastive.products
            gradient_bytes = 4 * encoder.width * embeddings  # fp32 gradients that are kept for the second pass
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
    """Return the FLOPs of one optimizer step on one core, where the backward pass costs as much as two forward passes.

    Each token costs 6 FLOPs per matrix weight, plus 12 L D T for attention over T tokens (PaLM, appendix B, where this
    is 6 N + 12 L H Q T). Embedding tables don't count, because they are looked up instead of multiplied. Recomputation
    adds one forward pass, and so does a contrastive loss with two passes.

    `sample_parameters` is the number of weights in the heads. These are applied once per sample and are not part of the
    additional forward passes.
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
    """Estimate the memory and the time of a training step on one core.

    Args:
        parameters: number of parameters of the whole model.
        encoder: sizes of the encoder.
        workload: the work of one core in one step.
        instance: the instance type. Raises ConfigError if it is unknown.
        mfu: expected model FLOPs utilization, as a fraction of the peak throughput.
        sample_parameters: see `step_flops`.
    """
    if instance not in MACHINES:
        raise ConfigError(
            f"unknown instance type {instance}",
            expected=f"one of {', '.join(MACHINES)}",
            next_command=f"--estimate.instance {next(iter(MACHINES))}",
        )
    machine = MACHINES[instance]
    flops = step_flops(encoder, workload, sample_parameters)
    peak_tflops = machine.core_tflops_fp32 if workload.precision == "fp32" else machine.core_tflops_bf16
    seconds = flops / (peak_tflops * 1e12 * mfu)
    return Estimate(machine, footprint(parameters, encoder, workload), flops, mfu, seconds)


def _bytes_of(precision: Precision) -> tuple[int, int]:
    """Return the bytes per element for the inputs of matrix products and GELU, and for those of layer norm and softmax.

    The two differ with autocast, which runs layer norm and softmax in fp32 (measured with torch-xla 2.9 on XLA:CPU).
    """
    return {"fp32": (4, 4), "bf16": (2, 2), "autocast": (2, 4)}[precision]


def _activation_bytes(encoder: EncoderSizes, workload: Workload) -> int:
    """Return the size of the activations that are kept for the backward pass.

    Each layer keeps, per token, 6 D + I inputs of matrix products, I inputs of GELU, 2 D inputs of layer norm, and H T
    inputs of softmax. Dropout adds its masks. With dropout, 2-byte elements and I = 4 D, this adds up to 34 D + 5 H T
    bytes, as in equation 1 of Korthikanti et al. The score matrix is included, because XLA does not fuse attention.
    """
    product, other = _bytes_of(workload.precision)
    width, scores = encoder.width, encoder.heads * workload.row_tokens
    per_token = product * (6 * width + 2 * encoder.intermediate) + other * (2 * width + scores)
    if workload.dropout:
        per_token += 2 * width + scores + product * scores
    embedding = (other + (1 if workload.dropout else 0)) * width
    layers = encoder.layers * other * width + per_token if workload.recompute else encoder.layers * per_token
    return workload.rows * workload.row_tokens * (layers + embedding)
