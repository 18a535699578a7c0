"""The commands of `trnpipe`: the stages of a cycle, and tools, each in a module of this package.

A module is imported when its tool runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.command_line import COMPLETION, Usage
from pipeline.core.errors import ConfigError


@dataclass(frozen=True)
class Tool:
    """A command that is no stage: `pipeline/commands/<module>.py` with `run(settings, stop, say, call) -> exit code`.

    `say` prints a line. A tool with the name of a stage adds actions to it.
    """

    text: str
    arguments: tuple[str, ...] = ()
    """Names as shown in the usage. Those in brackets are optional."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Flags without a value that are not settings, such as --json, with a line of help."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Flags with a value that are not settings, with the name of the value and a line of help."""
    actions: Mapping[str, "Tool"] = field(default_factory=dict)
    """Subcommands. One is required, unless the tool has arguments without one."""
    module: str = ""
    """Name of the module, if it is not that of the tool."""
    function: str = "run"
    command: str = ""
    """The command after `--` in the usage of a tool that runs one."""


@dataclass(frozen=True)
class ToolCall:
    """The command line of a tool without the settings."""

    action: str = ""
    arguments: tuple[str, ...] = ()
    switches: frozenset[str] = frozenset()
    options: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """The arguments after `--`."""

    def number(self, option: str, default: int, most: int) -> int:
        """Return an option as an integer from 1 to `most`. Raises ConfigError."""
        text = self.options.get(option, str(default))
        if not text.isdecimal() or not 0 < int(text) <= most:
            raise ConfigError(
                f"{option} {text!r}", expected=f"a number from 1 to {most}", next_command=f"{option} {default}"
            )
        return int(text)


# A stage is `pipeline/stages/<name>.py` with `run(settings, ctx) -> StageResult`, imported when it runs.
STAGES: dict[str, str] = {
    "health": "check this machine, its cores and collectives; exit 75 sends the job to another machine",
    "prepare": "read new input, tokenise it once, commit token shards",
    "mine": "mine hard negatives for the training queries; by the parent's vectors or BM25, for train.mined_per_query",
    "compile": "compile every graph of this cycle ahead of time; writes the graph manifest",
    "train": "train on the prepared shards, save checkpoints; continues from the last checkpoint of an earlier attempt",
    "evaluate": "compare the model with production, promote or refuse it; a refusal exits with 80",
    "embed": "embed the whole catalogue; unchanged vectors of an earlier cycle are reused",
}
PARALLEL = frozenset({"mine", "compile", "train", "evaluate", "embed"})
"""Stages that --launch.processes runs in several ranks."""
_JSON = {"--json": "print JSON"}
_REASON = {"--reason": "TEXT  why; recorded"}
TOOLS: dict[str, Tool] = {
    "init": Tool(
        "guess the columns of a file of judgements, write trnpipe.toml; flags of settings win over guesses",
        arguments=("FILE",),
    ),
    "registry": Tool(
        "production models: list, show, promote, rollback",
        actions={
            "list": Tool("every model and its checkpoint in production", switches=_JSON),
            "show": Tool(
                "production, or one checkpoint: its lineage back to the root, and the history",
                arguments=("[CHECKPOINT]",),
                switches=_JSON,
            ),
            "promote": Tool(
                "promote a checkpoint that passed the gate against production; else exit 80",
                arguments=("CHECKPOINT",),
                options={"--force": "REASON  overrule the gate; the reason is recorded"},
            ),
            "rollback": Tool(
                "restore the previous production checkpoint, or a named one, after verifying it; the served"
                " model and vectors follow, unless --without-vectors",
                arguments=("[TO]",),
                switches={"--without-vectors": "keep the served model and vectors"},
                options=_REASON,
            ),
        },
    ),
    "serving": Tool(
        "the served model with its vectors: show, rollback",
        actions={
            "show": Tool("the pair that is served, and earlier pairs", switches=_JSON),
            "rollback": Tool(
                "serve the same model's previous vectors, or those of a cycle; production stays",
                arguments=("[CYCLE]",),
                options=_REASON,
            ),
        },
        module="registry",
        function="run_serving",
    ),
    "search": Tool(
        "search the catalogue with a model; ranks by vectors, with each product's rank by words (BM25) and by both",
        arguments=("QUERY",),
        options={
            "--top": "N  products shown (default: 10)",
            "--by": "NAME  order: vectors (default), words, hybrid",
            "--beside": "CYCLE  a second model in the next column: a cycle, production, or previous",
        },
        switches=_JSON,
        module="ask",
        function="run_search",
    ),
    "encode": Tool(
        "print the vectors of texts as JSON lines; texts are lines of FILE or of standard input",
        arguments=("[FILE]",),
        options={
            "--kind": "NAME  query (default) or product: the model may put other words before each",
            "--out": "FILE.npy  write one matrix instead",
            "--checkpoint": "NAME  checkpoints/<cycle>/step-<n>, or a URI (default: the model that is served)",
        },
        module="ask",
        function="run_encode",
    ),
    "score": Tool(
        "grade pairs of query and product; rows of a CSV, JSON lines or Parquet file, printed as JSON lines",
        arguments=("[FILE]",),
        options={"--checkpoint": "NAME  checkpoints/<cycle>/step-<n>, or a URI (default: the model that is served)"},
        module="ask",
        function="run_score",
    ),
    "import": Tool(
        "make a checkpoint from a Hugging Face folder or weights file; also from a sentence-transformers folder",
        arguments=("PATH",),
        module="exchange",
        function="run_import",
    ),
    "export": Tool(
        "write a checkpoint or vectors as a folder for other tools; default: the promoted checkpoint",
        arguments=("[CHECKPOINT]",),
        options={
            "--out": "DIR  folder or URI to write; new, empty, or an earlier export",
            "--format": "NAME  sentence-transformers (default; transformers opens it too), safetensors, torchscript",
            "--max-tokens": "N  maximum text length of the exported model (default: that of training)",
            "--bucket": "16x32  torchscript: tokens of a query and of a product (default: the data's longest)",
            "--batch-size": "N  torchscript: pairs of one call (default: 1)",
        },
        actions={
            "vectors": Tool(
                "export the served vectors, or those of a cycle, as one memory-mappable matrix with its ids",
                arguments=("[CYCLE]",),
                options={"--out": "DIR  local folder to write"},
            )
        },
        module="exchange",
        function="run_export",
    ),
    "doctor": Tool(
        "estimate memory and time on a Trainium core; --hlo: also lint every graph for what neuronx-cc refuses",
        switches={"--hlo": "lint every graph, too"},
    ),
    "cache": Tool(
        "compiled graphs of this machine: status, repair, sync",
        actions={
            "status": Tool("list the cache entries with age and size, and warn of graphs that will be compiled again"),
            "repair": Tool("remove stale locks, remembered failures, half entries"),
            "sync": Tool("exchange finished entries with --compile.sync-url, both ways"),
        },
    ),
    "parity": Tool(
        "score and train one checkpoint on two devices; A and B are cpu, cuda:bf16 or a record, exit 80 if B is too far"
        " from A",
        arguments=("A", "[B]"),
        options={"--to": "FOLDER or URI  with A alone: where to record it, to be compared elsewhere"},
    ),
    "launch": Tool(
        "run a script for torchrun in --launch.processes ranks; here, or on each node of a multi-node job",
        command="[python] SCRIPT.py|-m MODULE [ARGUMENT ...]",
    ),
    "embed": Tool(
        STAGES["embed"],
        actions={
            "verify": Tool(
                "read every byte of the vectors: ids, numbers, catalogue, a recomputed sample; exit 65 if wrong",
                switches=_JSON,
            )
        },
    ),
}
CONFIG = Tool("print every setting with its value and source", switches=_JSON)
_SELDOM = ("launch", "doctor", "cache", "parity")
COMMANDS: dict[str, str] = (
    {name: tool.text for name, tool in TOOLS.items() if name not in {*STAGES, *_SELDOM}}
    | STAGES
    | {name: TOOLS[name].text for name in _SELDOM}
    | {"config": CONFIG.text, "completion": COMPLETION}
)

# What `trnpipe <command> --help` shows beside the flags of the command.

_SERVED = "that of the model that is served"

USAGE: dict[str, Usage] = {
    "prepare": Usage(
        ("--data.path judgements.csv", "--data.path s3://bucket/judgements/ --data.columns.title name"),
        common="data.path data.columns.query data.columns.title data.columns.label data.labels data.numeric "
        "data.categorical data.test_fraction data.max_bad_fraction data.tokenizer.path",
        reads="data train.start train.loss evaluate.split gate.min_queries report",
    ),
    "health": Usage(("", "--launch.processes 2"), common="launch.processes health.min_free_gib", reads="health"),
    "mine": Usage(
        ("--cycle first", "--cycle first --mine.source bm25"),
        common="mine.source mine.depth mine.negatives_per_query launch.processes",
        reads="mine data model train.precision train.parallel train.start embed launch compile",
    ),
    "compile": Usage(
        ("--config configs/small.toml", "--config configs/small.toml --compile.sync-url s3://bucket/cache"),
        common="compile.sync_url model.preset data.buckets train.micro_batch_size train.precision",
        reads="compile model train data mine embed evaluate launch",
    ),
    "train": Usage(
        (
            "--cycle first",
            "--config configs/small.toml --model.init-from FOLDER --data.tokenizer.path FOLDER/tokenizer.json",
        ),
        common="train.epochs train.max_steps train.global_batch_size train.micro_batch_size train.precision "
        "train.optimizer.learning_rate train.start train.evaluate_every model.preset model.init_from "
        "checkpoint.every_steps launch.processes",
        reads="train model checkpoint data log launch compile",
    ),
    "evaluate": Usage(
        ("--cycle first", "--cycle first --evaluate.candidate checkpoints/first/step-500 --no-evaluate.promote"),
        common="gate.drops gate.floors gate.min_queries gate.first_without_comparison evaluate.split "
        "evaluate.candidate evaluate.promote evaluate.retrieval.catalogue launch.processes",
        reads="evaluate gate data model train.precision train.parallel embed report launch compile",
    ),
    "embed": Usage(
        ("--cycle first", "--cycle first --embed.catalogue.path products.parquet", "verify --cycle first"),
        common="embed.catalogue.path embed.catalogue.id embed.catalogue.title embed.output.dtype "
        "embed.output.dimensions embed.precision embed.checkpoint launch.processes",
        reads="embed data launch compile",
    ),
    "init": Usage(
        ("judgements.csv", "s3://bucket/judgements/", "judgements.csv --data.columns.label grade"),
        common="data.columns.query data.columns.title data.columns.label data.labels data.numeric data.categorical",
        reads="data gate.min_queries",
        places="",
    ),
    "search": Usage(
        (
            '"red running shoes"',
            '"red running shoes" --beside previous',
            '"red running shoes" --cycle first --by hybrid',
        ),
        reads="embed",
        cycle=_SERVED,
    ),
    "encode": Usage(
        ("queries.txt > vectors.jsonl", "titles.txt --kind product --out titles.npy"), reads="embed", cycle=_SERVED
    ),
    "score": Usage(
        ("pairs.csv > scores.jsonl", "--checkpoint checkpoints/first/step-500 < pairs.jsonl"),
        common="data.columns.query data.columns.title data.max_bad_fraction",
        reads="data train.precision",
        cycle=_SERVED,
    ),
    "doctor": Usage(
        ("--config configs/small.toml", "--config configs/small.toml --hlo"),
        common="model.preset train.micro_batch_size train.precision launch.processes",
        reads="estimate model train data embed compile launch",
        places="",
    ),
    "cache": Usage(
        ("status", "sync --compile.sync-url s3://bucket/cache"), common="compile.sync_url", reads="compile", places=""
    ),
    "registry": Usage(
        (
            "show",
            'promote checkpoints/first/step-500 --force "agreed with the team"',
            'rollback --reason "worse clicks"',
        ),
        common="model_name",
        reads="model_name",
        places="workspace",
    ),
    "serving": Usage(
        ("show", 'rollback --reason "wrong catalogue"'), common="model_name", reads="model_name", places="workspace"
    ),
    "parity": Usage(
        ("cpu xla --cycle first", "neuron:bf16 --to s3://bucket/side --cycle first"),
        common="parity.steps parity.checkpoint",
        reads="parity evaluate data train model launch compile",
    ),
    "import": Usage(("all-MiniLM-L6-v2/",), common="model.preset model.architecture", reads="model data"),
    "export": Usage(("--out exported/", "vectors --out vectors/"), reads="data.buckets", places="workspace"),
    "launch": Usage(
        ("--launch.processes 2 -- train.py --lr 1e-3",), common="launch.processes", reads="launch", places=""
    ),
    "config": Usage(("--config configs/small.toml", "| grep -v default"), places=""),
}
