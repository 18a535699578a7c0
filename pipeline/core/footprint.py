"""Will it fit, and how long will a step take: an estimate for one core, from sizes alone.

Figures of the machines: core/machines. Activations: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), section 4.1, here without sharding and with dropout only when it is
on. FLOPs: Chowdhery et al., "PaLM" (2022), appendix B. Two passes: see train/step.py. What the compiler needs for
itself (scratch, code, collectives) is not known before it has run and is not in here: leave a reserve.
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
        """Weights of the layers' matrices, which every token is multiplied with: L (4 D^2 + 2 D I)."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.intermediate)

    @property
    def parameters(self) -> int:
        """All of the encoder: embeddings of words, positions and two types, matrices, biases, layer norms."""
        embeddings = (self.vocab + self.positions + 2) * self.width
        norms = 2 * self.width * (1 + 2 * self.layers)
        biases = self.layers * (5 * self.width + self.intermediate)
        return embeddings + self.matrix_parameters + norms + biases


@dataclass(frozen=True)
class MeasuredTexts:
    """Texts of one micro-step, each in a row of its own, and what one of them was measured to cost an encoder."""

    texts: int
    kept_bytes: int
    """Of one text in fp32, from the forward for the backward pass."""
    widest_bytes: int
    """The largest tensor of those."""
    flops: int
    """Of its forward pass."""


@dataclass(frozen=True)
class ContrastiveBatch:
    """The contrastive loss, which each core computes over all queries and products of the global batch."""

    queries: int
    products: int
    two_passes: bool
    """It comes before the backward passes, from embeddings of a forward pass of their own."""

    def flops(self, width: int) -> float:
        """Count those of the similarities of embeddings of `width`, forward and backward."""
        return 6.0 * self.queries * self.products * width

    @property
    def similarity_bytes(self) -> int:
        """Four fp32 matrices [queries, products]: similarities, what is left out, scores, and the gradient."""
        return 4 * 4 * self.queries * self.products


@dataclass(frozen=True)
class Workload:
    """What one core does in one optimizer step."""

    rows: int
    """Of the encoder's call in one micro-step."""
    row_tokens: int
    samples: int
    """Of one micro-step."""
    accumulation: int = 1
    precision: Precision = "fp32"
    dropout: bool = False
    contrastive: ContrastiveBatch | None = None
    """None: off."""
    recompute: bool = False
    """Only what goes into a layer is kept for the backward pass, which computes one layer after the other again."""
    shards: int = 1
    """Cores that share one state of the optimizer (parallel/strategies/zero1.py)."""
    match_bytes: int = 0
    """Kept by model/relevance.TokenMatch for the backward pass."""
    measured: MeasuredTexts | None = None
    """In place of `rows`, of an encoder whose layers are not known (model/factory.py)."""

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
        """Make that of `samples` products, each `slots` of them with their query in a row of `row_tokens` tokens.

        `mined`: further products of each query, mined negatives. `token_match`: fp32 cosines of all tokens of a row,
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
    """Bytes on one core."""

    master_bytes: int
    """fp32 weights that the optimizer updates."""
    compute_bytes: int
    """The copy in compute precision (bf16 and autocast), none in fp32; whole weights beside masters in slices."""
    optimizer_bytes: int
    gradient_bytes: int
    """With accumulation the sum and the newest; in bf16 also the gradient before it becomes fp32."""
    activation_bytes: int
    """Kept from the forward for the backward pass."""
    workspace_bytes: int
    """Gradients of the widest activations of one layer, twice: what comes in and what goes out."""
    contrastive_bytes: int
    """Of the contrastive loss, beside the activations."""

    @property
    def parameter_bytes(self) -> int:
        return self.master_bytes + self.compute_bytes

    @property
    def peak_bytes(self) -> int:
        """Everything at the start of the backward pass, as if nothing shared memory: an upper estimate."""
        state = self.parameter_bytes + self.optimizer_bytes + self.gradient_bytes
        return state + self.activation_bytes + self.workspace_bytes + self.contrastive_bytes


@dataclass(frozen=True)
class Estimate:
    """What `trnpipe doctor` prints for one length of rows on one kind of instance."""

    instance: Machine
    footprint: Footprint
    flops: float
    """Of one optimizer step on one core."""
    mfu: float
    step_s: float

    @property
    def memory_share(self) -> float:
        return self.footprint.peak_bytes / self.instance.core_memory_bytes

    def fits(self, reserve: float = 0.2) -> bool:
        """Return whether `reserve` of the core's memory stays free for the compiler's scratch and the collectives."""
        return self.memory_share <= 1.0 - reserve


def footprint(parameters: int, encoder: EncoderSizes, workload: Workload) -> Footprint:
    """Estimate the memory of one core. `parameters`: of the whole model, heads included."""
    low = workload.precision != "fp32"
    copies = 2 if workload.accumulation > 1 else 1
    gradients = 4 * copies * parameters + (2 * parameters if workload.precision == "bf16" else 0)
    activations = _activation_bytes(encoder, workload) + workload.match_bytes
    product, other = _bytes_of(workload.precision)
    # Autocast keeps some of it in fp32, and which is not known.
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
        if workload.contrastive.two_passes:  # the loss comes before the bytes of a micro-step are there
            embeddings = workload.contrastive.queries + workload.contrastive.products
            waiting = 4 * encoder.width * embeddings  # their gradients, fp32, for the second pass
            contrastive_bytes = waiting + max(0, contrastive_bytes - activations - workspace)
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
    """Count FLOPs of one optimizer step on one core, backward as twice the forward pass, which two passes have twice.

    A token costs 6 FLOPs a matrix weight and 12 L D T for attention over T tokens (PaLM, appendix B: 6 N + 12 L H Q T);
    embeddings are looked up, not multiplied. `sample_parameters`: matrix weights applied once a sample (the heads); the
    graph of a first pass for embeddings has none of them. Recomputation is one more forward pass.
    """
    contrastive = workload.contrastive
    per_token = 6 * encoder.matrix_parameters + 12 * encoder.layers * encoder.width * workload.row_tokens
    encoding = float(workload.rows * workload.row_tokens * per_token)
    if workload.measured is not None:
        encoding += 3.0 * workload.measured.texts * workload.measured.flops
    again = (contrastive is not None and contrastive.two_passes) + workload.recompute
    step = workload.accumulation * (encoding * (1.0 + again / 3.0) + 6.0 * sample_parameters * workload.samples)
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
    """Estimate memory and time on one core of `instance`. Raises ConfigError for an instance that is not known."""
    if instance not in MACHINES:
        raise ConfigError(f"instance type {instance}", expected=f"one of {', '.join(MACHINES)}")
    machine = MACHINES[instance]
    flops = step_flops(encoder, workload, sample_parameters)
    peak_tflops = machine.core_tflops_fp32 if workload.precision == "fp32" else machine.core_tflops_bf16
    seconds = flops / (peak_tflops * 1e12 * mfu)
    return Estimate(machine, footprint(parameters, encoder, workload), flops, mfu, seconds)


def _bytes_of(precision: Precision) -> tuple[int, int]:
    """Return bytes of an element: inputs of matrix products and GELU; inputs of layer norms, and softmax.

    autocast runs layer norm and softmax in fp32 (measured with torch-xla 2.9 on XLA:CPU).
    """
    return {"fp32": (4, 4), "bf16": (2, 2), "autocast": (2, 4)}[precision]


def _activation_bytes(encoder: EncoderSizes, workload: Workload) -> int:
    """Sum by layer and token: matrix inputs 6 D + I, GELU input I, layer norms 2 D, softmax H T; masks with dropout.

    In 2-byte elements with dropout and I = 4 D this is 34 D + 5 H T (Korthikanti et al., equation 1). The score matrix
    is written out: XLA has no fused attention here.
    """
    product, other = _bytes_of(workload.precision)
    width, scores = encoder.width, encoder.heads * workload.row_tokens
    per_token = product * (6 * width + 2 * encoder.intermediate) + other * (2 * width + scores)
    if workload.dropout:
        per_token += 2 * width + scores + product * scores
    embedding = (other + (1 if workload.dropout else 0)) * width
    layers = encoder.layers * other * width + per_token if workload.recompute else encoder.layers * per_token
    return workload.rows * workload.row_tokens * (layers + embedding)
