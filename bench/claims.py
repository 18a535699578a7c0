"""The claims in docs/results.md and README.md, each backed by a committed result, and how they were measured."""

from types import MappingProxyType
from typing import NamedTuple


class Claim(NamedTuple):
    """A row of the table: its text, the bench and figure that it shows, and the name of its method in METHODS."""

    text: str
    bench: str
    figure: str
    method: str


_WDC = "F1 of match minus that of boosting, WDC"
_BEST_PEER = Claim(
    "nDCG@10 minus that of sentence-transformers, PriceRunner, 97,536 pairs",
    "quality_pricerunner_97536",
    "ahead_of_best_peer",
    "search",
)
_EMBED = Claim("Embedding speed relative to sentence-transformers, fp32, CPU", "embed", "ratio", "speed")
_DAILY = "quality_incremental_pricerunner_32000_fp32"
_DAYS = "daily-cycles"
_CHAOS = Claim("Jobs completed by retries only, 44 injected faults", "chaos", "jobs_finished", "reliability")

CLAIMS = (
    _BEST_PEER,
    Claim(
        "nDCG@10 minus that of BM25, lower end of the 95 % interval",
        "quality_pricerunner_97536",
        "bm25_low",
        "search",
    ),
    Claim("Accuracy of pairs, PriceRunner, 97,536 pairs", "quality_pricerunner_97536", "ours_accuracy", "search"),
    Claim(f"{_WDC} cameras", "quality_cameras_32000", "ahead_of_boosting", "pairs"),
    Claim(f"{_WDC} computers", "quality_computers_32000", "ahead_of_boosting", "pairs"),
    Claim(f"{_WDC} shoes", "quality_shoes_32000", "ahead_of_boosting", "pairs"),
    Claim(f"{_WDC} watches", "quality_watches_32000", "ahead_of_boosting", "pairs"),
    *(
        Claim(f"{_WDC} {name}, pairs with a new offer", f"quality_{name}_items_32000", "ahead_of_boosting", "pairs")
        for name in ("cameras", "computers", "shoes", "watches")
    ),
    Claim("nDCG@10 lost by five daily cycles compared with a single training run", _DAILY, "behind", _DAYS),
    Claim("nDCG@10 lost by twenty daily cycles compared with a single training run", _DAILY, "behind_20_days", _DAYS),
    Claim(
        "False promotions of a model that is worse by exactly the allowed drop",
        "gate_rates",
        "false_acceptance",
        "gate",
    ),
    _CHAOS,
    Claim("Accuracy difference between XLA and CPU over 300 steps", "parity", "fp32_metric", "equality"),
    Claim("Largest loss difference over all parallel plans", "plans", "difference", "equality"),
    Claim("Training speed relative to sentence-transformers, fp32, CPU", "peer_speed", "fp32_cpu_ratio", "speed"),
    Claim("Training speed relative to Hugging Face Trainer, XLA:CPU", "trainer_ratio", "ratio", "speed"),
    _EMBED,
    Claim("Embedding speed relative to sentence-transformers, bf16, CPU", "embed_bf16", "ratio_bf16", "speed"),
    Claim("MFU when training BERT-large, bf16", "gpu", "mfu_128", "speed"),
    Claim("Training speed relative to DDP with autocast, BERT-large", "gpu", "ddp_ratio_128", "speed"),
    Claim("One exact search among 1 million products", "search", "answer", "speed"),
    Claim("Memory used to mine hard negatives among 1 million items", "mining", "memory", "speed"),
    Claim("Time from process start to the first step after a resume, CPU", "resume", "cpu_total", "speed"),
)
README_CLAIMS = (_BEST_PEER, _EMBED, _CHAOS)

METHODS = MappingProxyType(
    {
        "search": """\
trnpipe and sentence-transformers both fine-tune MiniLM-L6 (published weights, `configs/small.toml`) on
PriceRunner's pairs. sentence-transformers uses MultipleNegativesRankingLoss at its best learning rate (one seed).
On a GPU, cached batches were as good, and mined negatives worse. Both search the same catalogue for the same 1,328
test queries. Learning rates are chosen on the validation split, and the test split is read once per seed. The
recall@100 of trnpipe is lower than that of sentence-transformers ([where a simpler tool is as
good](quality.md#where-a-simpler-tool-is-as-good)). `python -m bench.quality`.""",
        "pairs": """\
The same model scores pairs of WDC's product sets after 32,000 training pairs. Boosting is scikit-learn's
HistGradientBoostingClassifier on lexical features. Thresholds are chosen on the validation split. A fine-tuned
bi-encoder scores 0.05 to 0.07 lower than trnpipe on cameras, computers and shoes (one seed each, and three
of trnpipe). `python -m bench.quality`.""",
        "daily-cycles": """\
PriceRunner is divided into five or twenty days. A cycle per day, each of which starts from the previous model and
has half of its samples from earlier days, is compared with a single training run on all days with the same number
of steps (fp32, three seeds). The largest loss is that of seed 1, 0.011 and 0.021. `python -m bench.quality
incremental`.""",
        "gate": """\
1,000 simulated test splits of 500 queries are judged in the same way as in `trnpipe evaluate`, for a candidate
whose true drop is exactly the allowed one. The figure is the worst of three kinds of drop, and the bound is 5 %
plus two standard errors. A candidate that is as good as production is refused in 48.5 % of the splits with 500
queries, and in 9.1 % of those with 1,500. `python -m bench.gate_rates`.""",
        "reliability": """\
40 cycles of 8 jobs run on one machine under random faults: `kill -9` of processes, nodes and `trnjobs submit`, hung
ranks, full disks, failing S3 requests, and damaged checkpoints. A job counts as completed if retries are sufficient.
The bench also verifies that nothing ran twice, that no vector is missing, and that the right model was promoted.
`python -m bench.chaos`. Faults of AWS Batch, SageMaker and the driver are simulated (`python -m tests.simulation`).""",
        "equality": """\
`trnpipe parity` trains 300 steps from the same checkpoint on XLA:CPU and on CPU, and evaluates every 50 steps. For
plans, every combination of data, sharded, tensor and hybrid parallelism on 2 and 4 gloo ranks is compared with a
single process. `python -m bench.parity`, `python -m bench.plans`.""",
        "speed": """\
Both programs alternate between blocks of steps or titles, using the same data, weights and loss. The figure is the
median of the ratios, excluding warm-up and compilation. Search and mining use synthetic unit vectors, and mining is
compared with sorting all scores. `python -m bench --help` lists the scripts.

The speed of training relative to sentence-transformers depends mostly on the machine. On two cores of an AMD EPYC,
where sentence-transformers trains 65 pairs per second, it is only 1.15 in fp32, 1.37 with autocast and about 1 on
XLA:CPU. On an Intel Xeon, where sentence-transformers trains 35 pairs per second, it was 2.4, 1.7 and 1.8.

The int8 models of sentence-transformers find only 91 % (OpenVINO) and 88 % (ONNX Runtime) of the ten nearest titles
that fp32 finds. On a CPU without int8 or bf16 instructions, trnpipe in fp32 is 1.7 times as fast as OpenVINO int8, and
as fast as ONNX Runtime int8. On a CPU with both, trnpipe in bf16 is 1.8 and 2.7 times as fast, and finds 99 %.
Therefore, `embed.precision` does not offer int8.""",
    }
)
