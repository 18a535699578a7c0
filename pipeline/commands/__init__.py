"""The table of `trnpipe` commands, which are the stages of a cycle and various tools.

Each tool is implemented in a module of this package, which is only imported when the tool runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.command_line import COMPLETION, Usage
from pipeline.core.errors import ConfigError


@dataclass(frozen=True)
class Tool:
    """A command that is not a stage, or an action of a command.

    It is implemented by a function `run(settings, stop, say, call)` in `pipeline/commands/<module>.py`, which prints
    lines with `say` and returns the exit code. A tool with the same name as a stage adds actions to that stage.
    """

    text: str
    arguments: tuple[str, ...] = ()
    """Positional arguments as shown in the usage. Those in brackets are optional."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Flags without a value that are not settings, such as --json, and their help."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Flags with a value that are not settings, and their help, which starts with a placeholder for the value."""
    actions: Mapping[str, "Tool"] = field(default_factory=dict)
    """Subcommands. The user has to specify one of them, unless the tool itself takes arguments."""
    module: str = ""
    """Name of the module (default: the name of the tool)."""
    function: str = "run"
    command: str = ""
    """Placeholder in the usage for the command after `--`, if the tool runs one."""


@dataclass(frozen=True)
class ToolCall:
    """The parsed command line of a tool, except for its settings."""

    action: str = ""
    arguments: tuple[str, ...] = ()
    switches: frozenset[str] = frozenset()
    options: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """All arguments after `--`."""

    def number(self, option: str, default: int, most: int) -> int:
        """Return the value of an option. Raises ConfigError if it is not an integer from 1 to `most`."""
        text = self.options.get(option, str(default))
        if not text.isdecimal() or not 0 < int(text) <= most:
            raise ConfigError(
                f"{option} {text!r}", expected=f"a number from 1 to {most}", next_command=f"{option} {default}"
            )
        return int(text)


# Each stage is implemented by `run(settings, ctx) -> StageResult` in `pipeline/stages/<name>.py`.
STAGES: dict[str, str] = {
    "health": "Check the cores and collectives of this machine. Exit code 75 means that a different machine may help.",
    "prepare": "Tokenise new input data and write it as token shards.",
    "mine": "Mine hard negatives for the training queries, using the parent model or BM25 (for train.mined_per_query).",
    "teach": "Compute the vectors or scores of a larger model for the training rows (train.teacher).",
    "compile": "Compile all graphs of this cycle ahead of time, and list them in the graph manifest.",
    "train": "Train on the prepared shards. Training resumes from the last checkpoint of an earlier attempt.",
    "evaluate": "Compare the model with production, and promote or refuse it. The exit code of a refusal is 80.",
    "embed": "Embed the whole catalogue. Unchanged vectors of an earlier cycle are reused.",
}
PARALLEL = frozenset({"mine", "teach", "compile", "train", "evaluate", "embed"})
"""Stages that run in multiple ranks if --launch.processes is set."""
_JSON = {"--json": "print JSON"}
_REASON = {"--reason": "TEXT  reason to record"}
TOOLS: dict[str, Tool] = {
    "init": Tool(
        "Guess the columns of a file of judgements and write trnpipe.toml. Flags override the guesses.",
        arguments=("FILE",),
    ),
    "judge": Tool(
        "Convert a log of impressions and clicks to judgements. Clicks are corrected for the effect of the position.",
        arguments=("LOG",),
        options={
            "--out": "FILE  Parquet file or URI to write to, such as judgements/dt=2026-11-20/clicks.parquet",
            "--products": "FILE  catalogue with the titles, if the log has no titles (columns: embed.catalogue)",
            "--position": "COLUMN  column with the position from 1 (default: position)",
            "--clicked": "COLUMN  column with 0 or 1 (default: clicked)",
            "--max-width": "PERCENT  leave a pair unjudged if the 90%% interval of its gain is wider (default: 75)",
        },
    ),
    "registry": Tool(
        "Show and change the models in production.",
        actions={
            "list": Tool("List all models with their checkpoints in production.", switches=_JSON),
            "show": Tool(
                "Show the lineage and history of the production checkpoint, or of a given checkpoint.",
                arguments=("[CHECKPOINT]",),
                switches=_JSON,
            ),
            "promote": Tool(
                "Promote a checkpoint if it passed the gate against production. Otherwise, the exit code is 80.",
                arguments=("CHECKPOINT",),
                options={"--force": "REASON  promote it even if it did not pass the gate, and record the reason"},
            ),
            "rollback": Tool(
                "Verify and restore the previous production checkpoint, or a given one. The served vectors are rolled"
                " back with it, unless --without-vectors is set.",
                arguments=("[TO]",),
                switches={"--without-vectors": "keep serving the current model and vectors"},
                options=_REASON,
            ),
        },
    ),
    "serving": Tool(
        "Show and roll back the served vectors and their model.",
        actions={
            "show": Tool("Show the served pair of model and vectors, and earlier pairs.", switches=_JSON),
            "rollback": Tool(
                "Serve the previous vectors of the same model, or those of a given cycle. Production does not change.",
                arguments=("[CYCLE]",),
                options=_REASON,
            ),
        },
        module="registry",
        function="run_serving",
    ),
    "search": Tool(
        "Search the catalogue by vector similarity. Also shows the rank of each product by words (BM25) and by both.",
        arguments=("QUERY",),
        options={
            "--top": "N  number of products to show (default: 10)",
            "--by": "NAME  sort by vectors (default), words or hybrid",
            "--beside": "CYCLE  also show the results of a different cycle, or of `production` or `previous`",
        },
        switches=_JSON,
        module="ask",
        function="run_search",
    ),
    "encode": Tool(
        "Print the vectors of texts as JSON lines. Each line of FILE or of standard input is a text.",
        arguments=("[FILE]",),
        options={
            "--kind": "NAME  query (default) or product, which may have different prefixes",
            "--out": "FILE.npy  write a matrix to this file instead",
            "--checkpoint": "NAME  checkpoints/<cycle>/step-<n>, or a URI (default: the served model)",
        },
        module="ask",
        function="run_encode",
    ),
    "score": Tool(
        "Grade pairs of a query and a product in a CSV, JSON lines or Parquet file. Grades are printed as JSON lines.",
        arguments=("[FILE]",),
        options={"--checkpoint": "NAME  checkpoints/<cycle>/step-<n>, or a URI (default: the served model)"},
        module="ask",
        function="run_score",
    ),
    "import": Tool(
        "Convert a Hugging Face or sentence-transformers folder, or a weights file, to a checkpoint.",
        arguments=("PATH",),
        module="exchange",
        function="run_import",
    ),
    "export": Tool(
        "Export a checkpoint or vectors for use with other tools. The default is the promoted checkpoint.",
        arguments=("[CHECKPOINT]",),
        options={
            "--out": "DIR  folder or URI to write to, which must be new, empty, or an earlier export",
            "--format": "NAME  sentence-transformers (default, for transformers too), onnx, safetensors or torchscript",
            "--max-tokens": "N  maximum text length of the exported model (default: as in training)",
            "--bucket": "16x32  query and product tokens for torchscript (default: the longest bucket of the data)",
            "--batch-size": "N  pairs per call for torchscript (default: 1)",
        },
        switches={"--sign": "sign the folder with --registry.sign-key, for imports with --registry.verify-key"},
        actions={
            "vectors": Tool(
                "Export the served vectors, or those of a given cycle, with their ids as a memory-mappable matrix.",
                arguments=("[CYCLE]",),
                options={"--out": "DIR  local folder to write to"},
            )
        },
        module="exchange",
        function="run_export",
    ),
    "doctor": Tool(
        "Estimate memory and time on a Trainium core. --hlo also lints all graphs for problems with neuronx-cc.",
        switches={"--hlo": "also lint all graphs"},
    ),
    "cache": Tool(
        "Manage the compiled graphs of this machine.",
        actions={
            "status": Tool(
                "List all cache entries with age and size, and warn about graphs that need to be compiled again."
            ),
            "repair": Tool("Remove stale locks, cached failures and incomplete entries."),
            "sync": Tool("Upload and download complete entries to and from --compile.sync-url."),
        },
    ),
    "parity": Tool(
        "Score and train a checkpoint on two devices and compare the results. A and B are devices such as cpu or"
        " cuda:bf16, or recorded results. The exit code is 80 if they differ too much.",
        arguments=("A", "[B]"),
        options={"--to": "FOLDER or URI  record the results of A there, to compare them later (without B)"},
    ),
    "launch": Tool(
        "Run a script written for torchrun in --launch.processes ranks, locally or on each node of a multi-node job.",
        command="[python] SCRIPT.py|-m MODULE [ARGUMENT ...]",
    ),
    "embed": Tool(
        STAGES["embed"],
        actions={
            "verify": Tool(
                "Verify that the vectors are complete and match the catalogue, and recompute a sample. The exit code is"
                " 65 if a check fails.",
                switches=_JSON,
            )
        },
    ),
}
CONFIG = Tool("Print every setting with its value and source.", switches=_JSON)
_SELDOM = ("launch", "doctor", "cache", "parity")
COMMANDS: dict[str, str] = (
    {name: tool.text for name, tool in TOOLS.items() if name not in {*STAGES, *_SELDOM}}
    | STAGES
    | {name: TOOLS[name].text for name in _SELDOM}
    | {"config": CONFIG.text, "completion": COMPLETION}
)

# In addition to its flags, `trnpipe <command> --help` shows these examples and settings.

_SERVED = "that of the served model"

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
    "teach": Usage(
        ("--cycle first --train.teacher checkpoints/large/step-500", "--cycle first --train.teacher FOLDER"),
        common="train.teacher train.loss.teacher_weight embed.precision launch.processes",
        reads="teach data model train mine embed launch compile",
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
        "launch.processes",
        reads="train model checkpoint data log launch compile",
    ),
    "evaluate": Usage(
        ("--cycle first", "--cycle first --evaluate.candidate checkpoints/first/step-500 --no-evaluate.promote"),
        common="gate.drops gate.floors gate.min_queries gate.first_without_comparison evaluate.split "
        "evaluate.candidate evaluate.promote evaluate.retrieval.catalogue launch.processes",
        reads="evaluate gate registry data model train.precision train.parallel embed report launch compile",
    ),
    "embed": Usage(
        ("--cycle first", "--cycle first --embed.catalogue.path products.parquet", "verify --cycle first"),
        common="embed.catalogue.path embed.catalogue.id embed.catalogue.title embed.output.dtype "
        "embed.output.dimensions embed.precision embed.checkpoint launch.processes",
        reads="embed registry data launch compile",
    ),
    "init": Usage(
        ("judgements.csv", "s3://bucket/judgements/", "judgements.csv --data.columns.label grade"),
        common="data.columns.query data.columns.title data.columns.label data.labels data.numeric data.categorical",
        reads="data gate.min_queries",
        scope="",
    ),
    "judge": Usage(
        ("impressions/ --out judgements.parquet", "ubi_events.jsonl --products products.csv --out judgements.parquet"),
        common="data.columns.query data.columns.title data.columns.product_id data.labels data.max_bad_fraction"
        " embed.catalogue.id embed.catalogue.title",
        reads="data.columns data.format data.labels data.max_bad_fraction embed.catalogue",
        scope="",
    ),
    "search": Usage(
        (
            '"red running shoes"',
            '"red running shoes" --beside previous',
            '"red running shoes" --cycle first --by hybrid',
        ),
        reads="embed registry",
        cycle=_SERVED,
    ),
    "encode": Usage(
        ("queries.txt > vectors.jsonl", "titles.txt --kind product --out titles.npy"),
        reads="embed registry",
        cycle=_SERVED,
    ),
    "score": Usage(
        ("pairs.csv > scores.jsonl", "--checkpoint checkpoints/first/step-500 < pairs.jsonl"),
        common="data.columns.query data.columns.title data.max_bad_fraction",
        reads="data train.precision registry",
        cycle=_SERVED,
    ),
    "doctor": Usage(
        ("--config configs/small.toml", "--config configs/small.toml --hlo"),
        common="model.preset train.micro_batch_size train.precision launch.processes",
        reads="estimate model train data embed compile launch",
        scope="",
    ),
    "cache": Usage(
        ("status", "sync --compile.sync-url s3://bucket/cache"), common="compile.sync_url", reads="compile", scope=""
    ),
    "registry": Usage(
        (
            "show",
            'promote checkpoints/first/step-500 --force "agreed with the team"',
            'rollback --reason "worse clicks"',
        ),
        common="model_name",
        reads="model_name registry",
        scope="workspace",
    ),
    "serving": Usage(
        ("show", 'rollback --reason "wrong catalogue"'),
        common="model_name",
        reads="model_name registry",
        scope="workspace",
    ),
    "parity": Usage(
        ("cpu xla --cycle first", "neuron:bf16 --to s3://bucket/side --cycle first"),
        common="parity.steps parity.checkpoint",
        reads="parity evaluate data train model launch compile",
    ),
    "import": Usage(("all-MiniLM-L6-v2/",), common="model.preset model.architecture", reads="model data registry"),
    "export": Usage(("--out exported/", "vectors --out vectors/"), reads="data.buckets registry", scope="workspace"),
    "launch": Usage(
        ("--launch.processes 2 -- train.py --lr 1e-3",), common="launch.processes", reads="launch", scope=""
    ),
    "config": Usage(("--config configs/small.toml", "| grep -v default"), scope=""),
}
