"""README.md of an exported folder: what the model reads and gives, what it learnt from, how good it was found."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.checkpoint.state import TrainState
from pipeline.convert.record import ExportRecord, Format
from pipeline.registry.checkpoints import Ancestor
from pipeline.registry.records import one_line

FILE = "README.md"
SHOWN_PARTITIONS = 50
LEXICAL = "lex_"
_LIBRARIES: Mapping[Format, str] = {
    "sentence-transformers": "sentence-transformers",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "torch": "pytorch",
    "torchscript": "pytorch",
    "torch-export": "pytorch",
}


@dataclass(frozen=True)
class CardFacts:
    """What a card tells beside the record of the export."""

    model_name: str
    state: TrainState
    ancestors: Sequence[Ancestor]
    """The model first, its root last."""
    lowercase: bool


def card(record: ExportRecord, facts: CardFacts) -> str:
    """The whole text, with the front matter that Hugging Face tools read."""
    sections = (
        ("", _head(record, facts)),
        ("Use", _use(record)),
        ("Input", _input(record, facts)),
        ("Programs", _programs(record)),
        ("Data", _data(facts)),
        ("Metrics", _metrics(facts)),
        ("Lineage", _lineage(facts)),
        ("Made by", _made_by(record)),
    )
    parts = []
    for title, found in sections:
        lines = list(found)
        if lines:
            parts.append("\n".join([f"## {title}", "", *lines] if title else lines))
    return _front_matter(record, facts) + "\n\n".join(parts) + "\n"


def _front_matter(record: ExportRecord, facts: CardFacts) -> str:
    library = _LIBRARIES[record.format]
    tags = ["trnpipe", "sentence-similarity", "product-search"]
    fields = {"library_name": library, "pipeline_tag": "sentence-similarity", "tags": tags}
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---", "", ""])


def _head(record: ExportRecord, facts: CardFacts) -> Iterator[str]:
    size = record.model.encoder
    yield f"# {_text(facts.model_name)}"
    yield ""
    yield (
        f"A text encoder for search queries and product texts (BERT, {size.num_layers} layers of {size.hidden_size}, "
        f"{record.model.pooling} pooling, vectors of length one), and a head that grades how well a product fits a "
        f"query: {', '.join(_text(label) for label in record.inputs.labels)}, from worst to best."
    )


def _use(record: ExportRecord) -> Iterator[str]:
    yield "```python"
    yield from _SNIPPETS[record.format]
    for program in record.programs[:1]:
        yield _LOADS[record.format].format(file=program.file)
        yield f"{program.output.name} = program({', '.join(one.name for one in program.inputs)})"
    yield "```"
    if record.weights:
        yield ""
    if record.format == "transformers":
        states = "the mean of the last hidden states over real tokens"
        states = states if record.model.pooling == "mean" else "the last hidden state of the first token"
        yield f"A vector is {states}, scaled to length one."
    if record.format in ("sentence-transformers", "transformers"):
        yield "`pooler_output` of `transformers` was not trained. The head is in `relevance_head.safetensors`."
    if record.weights:
        yield "`trnpipe import` of this folder gives the whole model back, bit for bit."


_SNIPPETS: Mapping[Format, tuple[str, ...]] = {
    "sentence-transformers": (
        "from sentence_transformers import SentenceTransformer",
        "",
        'model = SentenceTransformer("PATH")',
        'vectors = model.encode(["red running shoes"])',
    ),
    "transformers": (
        "from transformers import AutoModel, AutoTokenizer",
        "",
        'tokenizer, model = AutoTokenizer.from_pretrained("PATH"), AutoModel.from_pretrained("PATH")',
        'batch = tokenizer(["red running shoes"], padding=True, truncation=True, return_tensors="pt")',
        "states = model(**batch).last_hidden_state",
    ),
    "safetensors": (
        "from safetensors.torch import load_file",
        "",
        'weights = load_file("PATH/model.safetensors")',
    ),
    "torch": ("import torch", "", 'weights = torch.load("PATH/model.pt", weights_only=True)'),
    "torchscript": ("import torch", ""),
    "torch-export": ("import torch", ""),
}
_LOADS: Mapping[Format, str] = {
    "torchscript": 'program = torch.jit.load("PATH/{file}")',
    "torch-export": 'program = torch.export.load("PATH/{file}").module()',
}


def _input(record: ExportRecord, facts: CardFacts) -> Iterator[str]:
    spec = record.inputs
    yield "- A query as it is typed; a product as its title, then a space and its longer text, where there is one."
    case = "lower-cases" if facts.lowercase else "keeps upper and lower case"
    yield f"- The tokenizer ({spec.vocab_size} tokens, `tokenizer.json`) {case}. A text becomes `[CLS] ... [SEP]`,"
    yield f"  cut to {record.max_tokens} tokens, the last one `[SEP]`. Padding is token {spec.pad_id}."
    if spec.numeric:
        names = ", ".join(_text(name) for name in spec.numeric)
        yield f"- The head also reads {len(spec.numeric)} numbers of a pair: {names}."
        if any(name.startswith(LEXICAL) for name in spec.numeric):
            yield f"  Those called `{LEXICAL}...` are counted from both texts by `pipeline/data/lexical.py` of trnpipe."
    if spec.categorical_ids:
        sizes = ", ".join(map(str, spec.categorical_ids))
        yield f"- It also reads {len(spec.categorical_ids)} hashed categories, of {sizes} ids."
    gains = ", ".join(f"{_text(label)}: {gain:.6g}" for label, gain in zip(spec.labels, spec.label_gains, strict=True))
    yield f"- Logits are over the classes in the order above. A score is the softmax times their gains: {gains}."


def _programs(record: ExportRecord) -> Iterator[str]:
    if not record.programs:
        return
    yield "Static shapes; every file holds all weights. Checked after loading against the model, to 1e-5."
    yield ""
    yield "| file | computes | inputs | output |"
    yield "|---|---|---|---|"
    for program in record.programs:
        inputs = ", ".join(f"{one.name} {one.dtype} {list(one.shape)}" for one in program.inputs)
        output = f"{program.output.name} {program.output.dtype} {list(program.output.shape)}"
        yield f"| {program.file} | {program.text} | {inputs} | {output} |"


def _data(facts: CardFacts) -> Iterator[str]:
    state = facts.state
    if not state.partitions:
        head = " Its head is at its initial weights: only the encoder is of use." if state.parent is None else ""
        yield f"Not trained by trnpipe: see the lineage.{head}"
        return
    names = sorted(state.partitions)
    shown = ", ".join(_text(name) or "(flat)" for name in names[-SHOWN_PARTITIONS:])
    more = f" (the newest {SHOWN_PARTITIONS} of {len(names)})" if len(names) > SHOWN_PARTITIONS else ""
    yield f"Newest day: {_text(state.watermark) or 'data without days'}. Partitions{more}: {shown}."


def _metrics(facts: CardFacts) -> Iterator[str]:
    figures = facts.ancestors[0].figures if facts.ancestors else {}
    if not figures:
        yield "None on record."
        return
    yield "| metric | value |"
    yield "|---|---|"
    for name, value in sorted(figures.items()):
        yield f"| {_text(name)} | {value:.6g} |"


def _lineage(facts: CardFacts) -> Iterator[str]:
    yield "| checkpoint | cycle | step | data to | settings | code | digest |"
    yield "|---|---|---|---|---|---|---|"
    for one in facts.ancestors:
        cells = (one.checkpoint, one.cycle, one.step, one.watermark, one.settings_hash, one.code_version, one.digest)
        yield f"| {' | '.join(_text(str(cell)) or '-' for cell in cells)} |"
    for note in (one.note for one in facts.ancestors if one.note):
        yield ""
        yield f"The lineage ends here: {_text(note)}."


def _made_by(record: ExportRecord) -> Iterator[str]:
    source = record.checkpoint
    yield f"- checkpoint `{one_line(source.uri)}`: step {source.step} of cycle {_text(source.cycle)}"
    yield f"- its manifest: sha256 `{source.digest}`"
    yield f"- settings `{record.settings_hash}`, code `{one_line(record.code_version)}`"
    yield f"- tokenizer `{record.tokenizer_fingerprint}`"


def _text(value: str) -> str:
    """Text from data in a table: one line, and nothing that Markdown would read as markup."""
    return "".join(f"\\{char}" if char in "\\|`*<>[]#" else char for char in one_line(value))
