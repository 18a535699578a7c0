"""The evaluate stage: what is promoted, what is refused, and what is left when it is asked again."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError
from pipeline.data import synthetic
from pipeline.data.config import SyntheticConfig
from pipeline.data.sources import Source
from pipeline.evaluate import originals
from pipeline.evaluate import trained as trained_on
from pipeline.evaluate.holdout import Holdout
from pipeline.evaluate.models import ModelScorer
from pipeline.evaluate.report import GoldenReport, load_digest, load_report
from pipeline.evaluate.run import Evaluation
from pipeline.evaluate.score import load_scores
from pipeline.evaluate.trained import Leak, mark_trained
from pipeline.inference.model import load_model
from pipeline.registry.model import roll_back_model
from pipeline.registry.promote import promote
from pipeline.registry.records import Author, Decision, read_history
from pipeline.stages import evaluate
from tests.stages.evaluate_case import FLAGS, Case, noisy, not_a_number

pytestmark = pytest.mark.stage


@pytest.fixture(scope="module")
def trained() -> Iterator[Path]:
    """A workspace in which cycle c1 is prepared and trained."""
    from pipeline.cli import main

    folder = Path(mkdtemp(prefix="trnpipe-evaluate-"))
    for stage in ("prepare", "train"):
        assert main([stage, *FLAGS, f"--workspace={folder}/workspace", "--cycle=c1"]) == 0
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def case(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Case:
    shutil.copytree(trained / "workspace", tmp_path / "workspace")
    capsys.readouterr()
    return Case(tmp_path, capsys)


@pytest.fixture(scope="module")
def in_production(trained: Path) -> Path:
    """The same workspace; the trained checkpoint is in production."""
    from pipeline.cli import main

    shutil.copytree(trained / "workspace", trained / "promoted")
    assert main(["evaluate", *FLAGS, f"--workspace={trained}/promoted", "--cycle=c1"]) == 0
    return trained / "promoted"


@pytest.fixture
def promoted(in_production: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Case:
    """The trained checkpoint is in production, as in_production left it."""
    shutil.copytree(in_production, tmp_path / "workspace")
    capsys.readouterr()
    return Case(tmp_path, capsys)


@pytest.mark.fault
def test_the_promoted_model_is_signed(case: Case) -> None:
    """Without its key nothing is evaluated, and production stays as it is."""
    pytest.importorskip("cryptography")
    from tests.kit.keys import key_pair

    key_pair(case.folder, "a")
    lost, keys = f"--registry.sign-key={case.folder}/b.pem", f"--registry.sign-key={case.folder}/a.pem"
    verify = f"--registry.verify-key={case.folder}/a.pub"
    told = case.run(lost, code=78)
    assert "b.pem does not exist" in told and case.pointer is None
    told = case.run(verify, code=78)
    assert "registry.verify_key is set but registry.sign_key is not" in told and case.pointer is None
    assert load_report(case.storage, "c1") is None and case.storage.stat(f"{case.trained()}/model.sig") is None
    case.run(keys, verify)
    assert case.history == [("promoted", case.trained())]
    assert case.storage.stat(f"{case.trained()}/model.sig") is not None


def test_the_first_model_is_promoted_and_asked_again_it_is_done(case: Case) -> None:
    told = case.run()
    report, result, pointer = case.report(), case.result(), case.pointer
    assert pointer is not None and result is not None
    assert pointer.checkpoint == case.trained() and case.history == [("promoted", case.trained())]
    assert result.outputs["checkpoint"] == case.trained() and result.figures["promoted"] is True
    train = json.loads(case.storage.read_bytes("cycles/c1/train/result.json"))["figures"]
    assert report.candidate.metrics.values["accuracy"] == pytest.approx(train["test_accuracy"])
    assert report.candidate.metrics.values["ndcg@10"] == pytest.approx(train["test_ndcg"])
    assert report.candidate.retrieval is not None
    assert result.figures["retrieval_mrr"] == report.candidate.retrieval.values["retrieval_mrr"]
    assert {part.column for part in report.candidate.slices} == {"brand", "query_tokens"}
    assert report.holdout.rows == train["test_rows"] and report.holdout.leak_checked
    assert "metric " in told and "ndcg@10" in told and "promote: " in told and "generation 1" in told
    scores = load_scores(case.storage, report.candidate.scores, case.folder / "cache")
    assert scores.info.rows == len(scores.arrays["sample_id"]) == report.holdout.rows
    assert set(scores.slices) == {"brand", "partition", "query_tokens"}
    assert not case.storage.list_dirs("cycles/c1/evaluate/parts/")

    before = {stat.key: stat.etag for stat in case.storage.list("") if not stat.key.endswith("events.jsonl")}
    assert "already done, promoted" in case.run()
    assert before == {stat.key: stat.etag for stat in case.storage.list("") if not stat.key.endswith("events.jsonl")}


def test_a_worse_model_is_refused_and_again_without_new_work(promoted: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    worse = promoted.made("worse", noisy(1.0))
    flag = f"--evaluate.candidate={worse}"
    told = promoted.run(flag, cycle="c1", code=80)
    assert "refuse: " in told and "is not promoted" in told and "--evaluate.force-reason" in told
    assert promoted.pointer is not None and promoted.pointer.checkpoint == promoted.trained()
    assert promoted.history == [("promoted", promoted.trained()), ("refused", worse)]
    report = promoted.report()
    assert report.incumbent is not None and report.incumbent.checkpoint.endswith(promoted.trained())
    assert report.incumbent.metrics.values["ndcg@10"] > report.candidate.metrics.values["ndcg@10"]
    digest = load_digest(promoted.storage, "c1")
    assert digest is not None and digest.moved_by == "retrieval_ndcg@10"
    (changed,) = (one for one in digest.queries if one.metric == digest.moved_by)
    lost = [one for one in digest.moved if one.lost]
    assert lost and (len(lost), len(digest.moved) - len(lost)) == (min(10, changed.worse), min(10, changed.better))
    config = SyntheticConfig(num_queries=60, num_days=2)
    made = [batch for day in synthetic.partitions(config) for batch in synthetic.generate(config, day)]
    titles = {title for batch in made for title in batch["title"].to_pylist()}
    shown = {product.text for one in digest.moved for product in (*one.found_before, *one.found_now)}
    assert shown & titles and not any(text == text.lower() for text in shown), "as the input has them"
    assert any(one.product in titles for one in digest.examples)
    assert all(one.query and len(one.found_now) == len(one.found_before) == 5 for one in lost)
    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "run", lambda self: pytest.fail("evaluated again"))
        again = promoted.run(flag, code=80)
    assert "refuse: " in again and len(promoted.history) == 2

    forced = promoted.run(flag, "--evaluate.force-reason=a rehearsal")
    assert "promoted by force, generation 2" in forced
    assert promoted.history[-1] == ("forced", worse)
    assert "forced: a rehearsal" in promoted.entries[-1].reasons
    assert "already done, promoted, see" in promoted.run(flag, "--evaluate.force-reason=a rehearsal")
    author = Author(by="an operator", code_version="v")
    roll_back_model(promoted.storage, "relevance", "", reason="a rehearsal", author=author)
    again = f"promote it again with trnpipe registry promote {worse} --force REASON"
    assert f"later rolled back ({again})" in promoted.run(flag, "--evaluate.force-reason=a rehearsal")


def test_without_its_input_the_texts_of_the_page_are_decoded(promoted: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> Source:
        raise DataError("the input is gone", expected="a file", next_command="none")

    monkeypatch.setattr(originals, "open_source", gone)
    told = promoted.run(f"--evaluate.candidate={promoted.made('worse', noisy(1.0))}", code=80)
    assert "the report page shows decoded instead of original texts: the input is gone" in told
    digest = load_digest(promoted.storage, "c1")
    assert digest is not None and digest.examples
    assert all(one.product and one.product == one.product.lower() for one in digest.examples)


def test_scores_that_are_no_numbers_are_refused(promoted: Case) -> None:
    bad = promoted.made("bad", not_a_number)
    told = promoted.run(f"--evaluate.candidate={bad}", code=80)
    assert "rows have NaN or infinite scores of the candidate" in told
    assert promoted.history[-1] == ("refused", bad)
    assert promoted.report().candidate.metrics.values == {}


def test_scores_of_a_head_that_was_not_trained_are_no_figures(case: Case) -> None:
    """A model for retrieval alone: what needs scores refuses it and says why; judged by retrieval it is promoted."""
    candidate = f"--evaluate.candidate={case.made('c0', trained_head=False)}"
    floor = "--gate.floors=ndcg@10=0.1"
    told = case.run(candidate, floor, code=80)
    report = case.report()
    assert "the relevance head is untrained" in told and "cannot be computed" in told
    assert not report.candidate.metrics.values and "accuracy" in report.candidate.metrics.missing
    assert report.candidate.retrieval is not None and report.candidate.retrieval.values
    told = case.run(candidate, "--gate.floors=retrieval_ndcg@10=0.01", "--gate.drops=retrieval_ndcg@10=0.05")
    assert "promoted" in told and case.pointer is not None


def test_vectors_are_judged_as_they_are_embedded_and_narrower_ones_are_shown(case: Case) -> None:
    told = case.run("--no-evaluate.promote", "--evaluate.retrieval.dimensions=4,8")
    whole = case.report().candidate
    assert whole.retrieval is not None and list(whole.ndcg_by_width) == [4, 8]
    assert "search with candidate vectors truncated to 8 dimensions: nDCG 0." in told
    narrow = whole.ndcg_by_width[4]
    assert 0 < narrow < whole.retrieval.values["retrieval_ndcg@10"]
    case.run("--no-evaluate.promote", "--embed.output.dimensions=4")
    cut = case.report().candidate
    assert cut.retrieval is not None and not cut.ndcg_by_width
    assert cut.retrieval.values["retrieval_ndcg@10"] == narrow
    told = case.run("--no-evaluate.promote", "--evaluate.retrieval.dimensions=33", code=78)
    assert "evaluate.retrieval.dimensions is 33, but the model's vectors have 32" in told


def test_embeddings_that_are_no_numbers_are_told(case: Case) -> None:
    def change(weights: dict[str, Any]) -> None:
        next(tensor for name, tensor in weights.items() if "word_embeddings" in name)[:] = float("nan")

    told = case.run(f"--evaluate.candidate={case.made('bad', change)}", code=80)
    assert "vectors contain NaN or infinity" in told


def test_what_is_in_production_already_is_nothing_new(promoted: Case) -> None:
    told = promoted.run(f"--evaluate.candidate={promoted.trained()}", cycle="c2", code=65)
    assert "no prepared data" in told
    promoted.run(stage="prepare", cycle="c2")
    told = promoted.run(f"--evaluate.candidate={promoted.trained()}", cycle="c2")
    assert "nothing to do, the candidate is already in production" in told
    result = promoted.result("c2")
    assert result is not None and result.figures["nothing_new"] is True
    assert len(promoted.history) == 1


def test_what_is_in_production_is_judged_against_another(promoted: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name or with none, it is a question of its own; killed after a promotion by it, it is told."""
    worse = promoted.made("worse", noisy(1.0))
    told = promoted.run(f"--evaluate.incumbent={worse}")
    report = promoted.report()
    assert "evaluate.incumbent is not the production model" in told
    assert report.incumbent is not None and report.incumbent.checkpoint.endswith(worse)
    assert "evaluate.incumbent is not the production model" in promoted.run("--evaluate.incumbent=none")
    assert promoted.report().incumbent is None and len(promoted.history) == 1

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    promoted.run(stage="prepare", cycle="c2")
    flags = (f"--evaluate.candidate={worse}", "--evaluate.incumbent=none", "--evaluate.force-reason=a rehearsal")
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "store_result", killed)
        promoted.run(*flags, cycle="c2", code=143)
    assert promoted.result("c2") is None and promoted.history[-1] == ("forced", worse)
    assert "promoted by force, generation 2" in promoted.run(*flags, cycle="c2")
    result = promoted.result("c2")
    assert result is not None and result.figures["promoted"] is True and len(promoted.history) == 2


def test_production_that_moves_meanwhile_is_judged_against_next_time(
    promoted: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate, other = promoted.made("same"), promoted.made("other", noisy(0.01))
    first, run = promoted.pointer, Evaluation.run

    def slow(self: Evaluation) -> Any:
        report = run(self)
        decision = Decision(passed=False, forced="somebody else")
        promote(promoted.storage, "relevance", other, expected=first, decision=decision, author=Author(by="else"))
        return report

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "run", slow)
        assert "production" in promoted.run(f"--evaluate.candidate={candidate}", code=75)
    assert promoted.pointer is not None and promoted.pointer.checkpoint == other
    scored = promoted.report().candidate.scores
    promoted.run(f"--evaluate.candidate={candidate}")
    assert promoted.pointer.checkpoint == candidate
    report = promoted.report()
    assert report.incumbent is not None and report.incumbent.checkpoint.endswith(other)
    assert report.candidate.scores == scored, "the candidate is not scored again"


def test_ranks_that_see_another_production_start_anew(promoted: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = promoted.made("same")
    monkeypatch.setattr(
        "pipeline.parallel.process_group.ProcessGroup.gather", lambda self, value: [value, ("other", "other")]
    )
    assert "the production model changed while the ranks" in promoted.run(f"--evaluate.candidate={candidate}", code=75)


def test_a_catalogue_that_has_changed_is_another_question(case: Case) -> None:
    """Under the same path; also where an earlier version stored its result without a mark of the catalogue."""
    path = case.folder / "offers.csv"
    flags = ("--no-evaluate.promote", f"--evaluate.retrieval.catalogue={path}", "--gate.min-queries=2")
    path.write_text("product_id,title,query\n1,red shoe,shoe\n2,blue hat,hat\n")
    case.run(*flags)
    assert "already done" in case.run(*flags) and case.report().holdout.retrieval_items == 2
    path.write_text("product_id,title,query\n1,red shoe,shoe\n2,blue hat,hat\n3,black hat,hat\n")
    assert "already done" not in case.run(*flags)
    assert case.report().holdout.retrieval_items == 3

    result = json.loads(case.storage.read_bytes("cycles/c1/evaluate/result.json"))
    del result["inputs"]["catalogue"]
    case.storage.write_bytes("cycles/c1/evaluate/result.json", json.dumps(result).encode())
    assert "already done" not in case.run(*flags)
    assert "already done" in case.run(*flags)
    assert "already done" not in case.run(*flags, "--embed.precision=bf16"), "items are embedded in it"


def test_golden_queries_are_judged_by_what_search_finds(promoted: Case) -> None:
    """By id, and by title; ranks are those of all products by the vectors that `encode` makes."""
    batch = next(synthetic.generate(SyntheticConfig(num_queries=60, num_days=2), "dt=2026-01-01")).to_pydict()
    query, title, product = (batch[name][0] for name in ("query", "title", "product_id"))
    golden = promoted.folder / "golden.toml"
    golden.write_text(
        f"[[golden]]\nquery = {json.dumps(query)}\nmust = [{json.dumps(title.upper())}, 'nothing']\ntop = 100\n"
        f"[[golden]]\nquery = {json.dumps(query)}\nmust_not = ['{product}', '{batch['product_id'][11]}']\ntop = 1\n"
    )
    worse = promoted.made("worse", noisy(1.0))
    flags = (f"--evaluate.golden={golden}", f"--evaluate.candidate={worse}", "--gate.golden=fail")
    told = promoted.run(*flags, code=80)
    found = promoted.report().golden
    assert found is not None and found.unknown == ("nothing",)
    assert "1 product(s) of golden queries are not among the" in told and "golden queries: " in told
    texts = dict.fromkeys(
        (row["title"], row["text"])
        for day in synthetic.partitions(SyntheticConfig(num_queries=60, num_days=2))
        for part in synthetic.generate(SyntheticConfig(num_queries=60, num_days=2), day)
        for row in part.to_pylist()
    )
    wanted = [list(texts).index((batch["title"][row], batch["text"][row])) for row in (0, 0, 11)]
    for side, checkpoint in (("candidate", worse), ("incumbent", promoted.trained())):
        model = load_model(promoted.storage.uri(checkpoint))
        products = model.encode([f"{title} {text}" for title, text in texts], kind="product")
        cosines = model.similarity(model.encode(query), products)[0]
        ranks = [1 + int((cosines > cosines[item] + 1e-6).sum()) for item in wanted]
        assert [getattr(one, side) for one in found.outcomes] == [rank if rank <= 100 else 0 for rank in ranks]
    check = next(check for check in promoted.report().verdict.checks if check.kind == "golden")
    lost = [one for one in found.missed if one.holds(one.incumbent or 0)]
    assert check.outcome == ("fail" if lost else "warn" if found.missed else "pass")
    promoted.run(*flags, "--gate.golden=off", code=80)
    assert not any(check.kind == "golden" for check in promoted.report().verdict.checks)
    promoted.run(*flags, "--no-evaluate.retrieval.enabled", code=80)
    assert promoted.report().golden == GoldenReport(missing="evaluate.retrieval.enabled is false")


def test_golden_queries_in_a_catalogue_of_its_own(case: Case) -> None:
    path, golden = case.folder / "offers.csv", case.folder / "golden.toml"
    path.write_text("product_id,title,query\n1,red shoe,shoe\n2,blue hat,hat\n3,black hat,hat\n2,blue cap,cap\n")
    golden.write_text("[[golden]]\nquery = 'hat'\nmust = ['2', 'black hat', 'blue cap', 'green hat']\ntop = 3\n")
    flags = (f"--evaluate.retrieval.catalogue={path}", f"--evaluate.golden={golden}", "--gate.min-queries=2")
    case.run(*flags, "--no-evaluate.promote")
    found = case.report().golden
    assert found is not None and found.unknown == ("green hat",) and not found.missed
    ranks = {one.product: one.candidate for one in found.outcomes}
    assert ranks["2"] == ranks["blue cap"] and {ranks["2"], ranks["black hat"]} < {1, 2, 3}
    assert "already done" in case.run(*flags, "--no-evaluate.promote")
    golden.write_text("[[golden]]\nquery = 'hat'\nmust = ['1']\n")
    assert "already done" not in case.run(*flags, "--no-evaluate.promote"), "another question"


def test_judged_first_and_promoted_later(case: Case) -> None:
    told = case.run("--no-evaluate.promote")
    assert "passed but not promoted, because evaluate.promote is false" in told and case.pointer is None
    assert "already done, passed but not promoted" in case.run("--no-evaluate.promote")
    assert "generation 1" in case.run()
    assert case.history == [("promoted", case.trained())]


def test_promoted_under_one_name_it_is_not_under_another(promoted: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "--model-name=other"
    assert "already done, passed but not promoted" in promoted.run(other, "--no-evaluate.promote")
    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "run", lambda self: pytest.fail("evaluated again"))
        told = promoted.run(other)
    assert "promoted, generation 1" in told and "already done" not in told
    assert [(entry.action, entry.checkpoint) for entry in read_history(promoted.storage, "other")] == [
        ("promoted", promoted.trained())
    ]
    assert "already done, promoted" in promoted.run(other) and "already done, promoted" in promoted.run()
    assert len(promoted.history) == 1


@pytest.mark.parametrize("step", ["promote", "store_result"])
def test_killed_after_the_verdict_or_the_promotion_it_goes_on_from_there(
    case: Case, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, step, killed)
        case.run(code=143)
    assert (case.pointer is None) is (step == "promote") and case.result() is None
    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "run", lambda self: pytest.fail("evaluated again"))
        assert "promoted, generation 1" in case.run()
    result = case.result()
    assert result is not None and result.figures["promoted"] is True and result.figures["generation"] == 1
    assert len(case.history) == 1 and "already done, promoted" in case.run()


def test_a_broken_incumbent_is_named_with_the_way_out(promoted: Case) -> None:
    candidate = promoted.made("same")
    promoted.storage.write_bytes(f"{promoted.trained()}/model.safetensors", b"")
    told = promoted.run(f"--evaluate.candidate={candidate}", code=74)
    assert "cannot open the production model" in told and "registry rollback" in told


def test_a_candidate_from_elsewhere_is_judged_and_not_promoted(case: Case, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "workspace" / case.trained(), tmp_path / "elsewhere" / "step-7")
    flag = f"--evaluate.candidate={tmp_path}/elsewhere/step-7"
    assert "is outside the workspace" in case.run(flag, code=78)
    assert "passed but not promoted" in case.run(flag, "--no-evaluate.promote")
    assert case.pointer is None
    inside = f"--evaluate.candidate=file://{tmp_path}/workspace/{case.trained()}"
    assert "generation 1" in case.run(inside)


def test_new_and_old_partitions_are_slices_and_may_be_the_holdout(case: Case) -> None:
    days = [f"dt=2026-01-0{day}" for day in (1, 2)]
    old = case.made("old", noisy(0.3), watermark=days[0].removeprefix("dt="), partitions={days[0]: "x"})
    flags = (f"--evaluate.incumbent={old}", "--no-evaluate.promote", "--gate.drops=ndcg@10=0.5")
    told = case.run(*flags)
    report = case.report()
    assert report.holdout.new_partitions == (days[1],) and report.holdout.unchecked_partitions == (days[0],)
    assert {(part.column, part.value) for part in report.candidate.slices} >= {("age", "new"), ("age", "old")}
    assert "could not be checked for test queries" in told
    case.run(*flags, "--evaluate.partitions=new")
    fewer = case.report().holdout
    assert fewer.partitions == (days[1],) and fewer.rows < report.holdout.rows


def test_what_was_replayed_is_looked_at_for_the_holdout(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late days and days that changed, of which a checkpoint says so apart from its partitions."""
    looked_at = []

    def counting(*args: Any) -> None:
        looked_at.append(args[-1])
        mark_trained(*args)

    monkeypatch.setattr(trained_on, "mark_trained", counting)
    marks = case.storage.list_dirs("tokens/tiny/")
    candidate = case.made("late", partitions={}, also_seen={"gone": "dt=2025-12-31", marks[0]: "dt=2026-01-01"})
    told = case.run(f"--evaluate.candidate={candidate}", "--no-evaluate.promote")
    assert case.report().holdout.unchecked_partitions == ("dt=2025-12-31",)
    assert "1 training partition(s) could not be checked for test queries" in told and looked_at[0] > 0


def test_a_holdout_that_was_trained_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_on, "find_leak", lambda *args: Leak(30, 4, 2))
    assert "6 of 30 test queries (20%) were trained on (4 by id, 2 by text)" in case.run(code=65)
    assert not case.storage.stat("cycles/c1/evaluate/report.json")
    assert "better than they would be on new queries" in case.run("--evaluate.leak=warn")
    assert (case.report().holdout.leaked_by_id, case.report().holdout.leaked_by_text) == (4, 2)
    assert any("were trained on" in warning for warning in case.report().warnings)


@pytest.mark.parametrize(
    ("change", "flags", "code", "message"),
    [
        ({"tokenizer_fingerprint": "other"}, (), 78, "the data has a different tokenizer"),
        ({}, ("--evaluate.candidate=checkpoints/none/step-1",), 74, "is not a committed checkpoint"),
        ({}, ("--evaluate.retrieval.catalogue=/none.parquet",), 65, "does not exist"),
        ({}, ("--evaluate.max-rows=1",), 65, "evaluate.max_rows is 1, but the first query selected from split test"),
        ({}, ("--gate.drops=nonsense=0.1",), 78, "unknown metric 'nonsense'"),
    ],
)
def test_what_cannot_be_evaluated_is_named(
    case: Case, change: dict[str, Any], flags: tuple[str, ...], code: int, message: str
) -> None:
    made = (f"--evaluate.candidate={case.made('made', **change)}",) if change else ()
    assert message in case.run(*made, *flags, code=code)


def test_two_classes_get_a_threshold_on_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.Table.from_batches(synthetic.generate(SyntheticConfig(num_queries=90), "dt=2026-01-01"))
    is_match = pc.equal(table["label"], "exact")
    table = table.set_column(table.schema.get_field_index("label"), "label", pc.if_else(is_match, "match", "other"))
    table = table.drop_columns(["gain"]).append_column("gain", pc.cast(is_match, pa.float64()))
    pq.write_table(table, tmp_path / "pairs.parquet")
    flags = (*FLAGS, f"--data.path={tmp_path}/pairs.parquet", "--train.max-steps=20", "--gate.floors=f1=0.01")
    case = Case(tmp_path, capsys, flags)
    for stage in ("prepare", "train"):
        case.run(stage=stage)
    case.run()
    report = case.report()
    names = {"precision", "recall", "f1", "roc_auc", "average_precision"}
    assert names <= report.candidate.metrics.values.keys()
    assert report.candidate.threshold is not None and 0 < report.candidate.threshold < 1
    keys = case.storage.list_dirs("cycles/c1/evaluate/scores/")
    assert [key.partition("-")[0] for key in keys] == ["test", "valid"]
    assert any(check.metric == "f1" and check.outcome == "pass" for check in report.verdict.checks)

    case.made("other", noisy(0.1))
    case.run("--evaluate.candidate=checkpoints/other/step-20", "--evaluate.split=valid", "--gate.drops=f1=0.5")
    assert case.report().holdout.split == "valid"
    assert len(case.storage.list_dirs("cycles/c1/evaluate/scores/")) == 3, "a split is scored once for each model"

    def unreadable(self: ModelScorer, role: str, checkpoint: Any, holdout: Holdout, *args: Any) -> Any:
        if holdout.split == "valid":
            raise DataError("a token shard cannot be read")
        return original(self, role, checkpoint, holdout, *args)

    case.made("third", noisy(0.2))
    original = ModelScorer.run
    with monkeypatch.context() as patch:  # it may be so on one rank alone, while the others wait for it
        patch.setattr(ModelScorer, "run", unreadable)
        assert "cannot be read" in case.run("--evaluate.candidate=checkpoints/third/step-20", code=65)
