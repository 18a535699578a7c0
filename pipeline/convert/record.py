"""What an exported folder says of itself: trnpipe.json, by which it is imported as it was, and README.md for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field

from pipeline.checkpoint.store import Parent, PublishedWeights
from pipeline.core.record import Record
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.registry.checkpoints import Ancestor
from pipeline.registry.records import one_line

KIND = "export"
FILE, CARD = "trnpipe.json", "README.md"
SCHEMA_VERSION = 1
Family = Literal["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "modernbert"]
Format = Literal["sentence-transformers", "transformers", "safetensors", "torch", "torchscript"]


class TensorSpec(Record):
    """An input or output of a program. Shapes are static."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ProgramFile(Record):
    """One compiled program."""

    file: str
    text: str = Field(description="What it computes")
    inputs: tuple[TensorSpec, ...]
    output: TensorSpec


class ExportRecord(Record):
    """The checkpoint behind an exported folder, and the files that hold it."""

    schema_version: int = SCHEMA_VERSION
    format: Format
    checkpoint: Parent = Field(description="What was exported; the parent of what is imported from here")
    model: ModelConfig
    inputs: InputSpec
    max_tokens: int = Field(ge=3, description="Texts are cut to this, [CLS] and [SEP] included")
    tokenizer_fingerprint: str
    watermark: str
    partitions: dict[str, str]
    also_seen: dict[str, str] = Field({}, description="As in the state of a checkpoint")
    trained_head: bool = True
    published: PublishedWeights | None = Field(None, description="As in the state of a checkpoint")
    settings_hash: str
    code_version: str
    weights: tuple[str, ...] = Field(description="Files that together hold every tensor; none: programs only")
    programs: tuple[ProgramFile, ...] = ()
    family: Family = Field("bert", description="Whose names the encoder has (model/hf.py)")


_SENTENCE = 'SentenceTransformer("PATH").encode(["red running shoes"])  # from sentence_transformers'
_STATES = 'AutoModel.from_pretrained("PATH")(**AutoTokenizer.from_pretrained("PATH")("shoes", return_tensors="pt"))'
_USE: Mapping[Format, str] = {
    "sentence-transformers": f"vectors = {_SENTENCE}",
    "transformers": f"states = {_STATES}.last_hidden_state  # from transformers",
    "safetensors": 'weights = safetensors.torch.load_file("PATH/model.safetensors")',
    "torch": 'weights = torch.load("PATH/model.pt", weights_only=True)',
    "torchscript": 'program = torch.jit.load("PATH/{file}")',
}


def card(record: ExportRecord, model_name: str, ancestors: Sequence[Ancestor]) -> str:
    """README.md, with the front matter that Hugging Face tools read. `ancestors`: the model first, its root last."""
    library = record.format if record.format not in ("torch", "torchscript") else "pytorch"
    spec, source = record.inputs, record.checkpoint
    gains = ", ".join(f"{_text(label)}: {gain:.6g}" for label, gain in zip(spec.labels, spec.label_gains, strict=True))
    features = (
        f"{', '.join(map(_text, spec.numeric)) or 'no numbers'} and {len(spec.categorical_ids)} hashed categories"
    )
    use = _USE[record.format].format(file=record.programs[0].file if record.programs else "")
    lines = [
        f'---\nlibrary_name: "{library}"\npipeline_tag: "sentence-similarity"\n---\n',
        f"# {_text(model_name)}\n",
        f"{_encoder(record)}; "
        f"{record.model.pooling} pooling over real tokens, vectors of length one. A head grades how well a product "
        f"fits a query; a score is the softmax of its logits times the gains ({gains}). It also reads {features}.\n",
        f"```python\n{use}\n```\n",
        f"Texts are `[CLS] ... [SEP]` of `tokenizer.json`, cut to {record.max_tokens} tokens; padding {spec.pad_id}.",
        "`trnpipe import` of this folder gives the whole model back, bit for bit.\n" if record.weights else "",
        *_programs(record),
        "| metric | value |\n|---|---|",
        *(f"| {_text(name)} | {value:.6g} |" for one in ancestors[:1] for name, value in sorted(one.figures.items())),
        "\n| checkpoint | cycle | step | data to | settings | code | digest |\n|---|---|---|---|---|---|---|",
    ]
    for one in ancestors:
        cells = (one.checkpoint, one.cycle, one.step, one.watermark, one.settings_hash, one.code_version, one.digest)
        lines.append(f"| {' | '.join(_text(str(cell)) or '-' for cell in cells)} |")
    lines += [f"\nIt began from {_text(record.published.text)}."] if record.published else []
    lines += [f"\nThe lineage ends here: {_text(one.note)}." for one in ancestors if one.note]
    lines.append(f"\nMade from `{one_line(source.uri)}`, step {source.step} of cycle {_text(source.cycle)}, manifest")
    lines.append(f"sha256 `{source.digest}`, code `{one_line(record.code_version)}`.")
    return "\n".join(lines) + "\n"


def _encoder(record: ExportRecord) -> str:
    model, size = record.model, record.model.encoder
    if model.factory is not None:
        return f"Text encoder of {_text(model.factory)} for queries and product texts, of width {size.hidden_size}"
    return f"{record.family} text encoder for queries and product texts, {size.num_layers} layers of {size.hidden_size}"


def _programs(record: ExportRecord) -> Iterator[str]:
    """Static shapes; every file holds all weights, and was checked after loading against the model."""
    if record.programs:
        yield "| file | computes | inputs | output |\n|---|---|---|---|"
    for program in record.programs:
        inputs = ", ".join(f"{one.name} {one.dtype} {list(one.shape)}" for one in program.inputs)
        output = f"{program.output.name} {program.output.dtype} {list(program.output.shape)}"
        yield f"| {program.file} | {program.text} | {inputs} | {output} |"
    if record.programs:
        yield ""


def _text(value: str) -> str:
    """Text from data in a table: one line, and nothing that Markdown would read as markup."""
    return "".join(f"\\{char}" if char in "\\|`*<>[]#" else char for char in one_line(value))
