"""What a run came to, from its log, its exit codes and the cache."""

from pathlib import Path

import pytest

from pipeline.compile.neuron_compile import Attempt, CompileVerdict, judge
from pipeline.compile.neuron_tool import parse_log

A, B = "neuronxcc-2.24.1.0+ab/MODULE_1+11111111", "neuronxcc-2.24.1.0+ab/MODULE_2+11111111"
SHOWN = f"Extracting graphs (/c/{A}/model.hlo_module.pb)\nExtracting graphs (/c/{B}/model.hlo_module.pb)\n"
REFUSED = f'{{"compilation_summary": {{"false": 1}}, "compilation_report": {{"/c/{B}/x.pb": {{"status": false}}}}}}\n'
EMPTY = '{"compilation_summary": {}, "compilation_report": {}}\n'
CACHED = f"Got a cached failed neff at /c/{B}/model.neff. Will skip\n"
KILLED = "Failed compilation with ['neuronx-cc']: neuronx-cc failed with -9\n"


@pytest.mark.parametrize(
    ("text", "exit_code", "trial_code", "done", "verdict"),
    [
        (SHOWN + EMPTY, 0, 0, {A, B}, CompileVerdict.DONE),
        (SHOWN, 1, 0, {A, B}, CompileVerdict.DONE),  # the cache has the last say
        (SHOWN + REFUSED, 1, 0, {A, B}, CompileVerdict.DONE),  # another machine compiled it
        (f"Using a cached neff at /c/{A}/model.neff\nNo todo hlos found in cache", 0, 0, {A}, CompileVerdict.DONE),
        (SHOWN + REFUSED, 1, 0, {A}, CompileVerdict.FAILED),
        (SHOWN + REFUSED, 0, 0, {A}, CompileVerdict.FAILED),  # 256 of them
        (SHOWN + REFUSED + KILLED, 1, 0, {A}, CompileVerdict.MEMORY),
        (SHOWN, -9, 0, {A}, CompileVerdict.MEMORY),
        (SHOWN, -9, None, set(), CompileVerdict.MEMORY),
        (SHOWN + EMPTY, 0, 0, {A}, CompileVerdict.LOCKED),
        (SHOWN + "No todo hlos found in cache\n", 0, 0, {A}, CompileVerdict.LOCKED),
        (CACHED, 0, 0, set(), CompileVerdict.POISONED),
        (CACHED + "There was an error in the training script.", 1, 1, set(), CompileVerdict.POISONED),
        ("There was an error in the training script.", 1, 65, set(), CompileVerdict.TRIAL_FAILED),
        ("There was an error in the training script.", 1, None, set(), CompileVerdict.TRIAL_FAILED),
        (SHOWN, 1, 65, {A, B}, CompileVerdict.TRIAL_FAILED),
        (SHOWN, 0, 0, {A}, CompileVerdict.CRASHED),  # no report
        (SHOWN + EMPTY + "sub-process 0 got exception: pool", 0, 0, {A}, CompileVerdict.CRASHED),
        (SHOWN, -15, None, {A}, CompileVerdict.CRASHED),
        (SHOWN, -15, None, {A, B}, CompileVerdict.CRASHED),  # who knows what else it would have shown
        ("", 2, None, set(), CompileVerdict.CRASHED),
        ("No todo hlos found in cache", 0, 0, set(), CompileVerdict.NOTHING_SEEN),
    ],
)
def test_verdicts(text: str, exit_code: int, trial_code: int | None, done: set[str], verdict: CompileVerdict) -> None:
    assert judge(Attempt(exit_code, trial_code, parse_log(text), frozenset(done), Path())) is verdict


def test_what_we_ended_ourselves_broke_off() -> None:
    """Its trial run may still tell of an error, depending on who gets the signal first."""
    log = parse_log("There was an error in the training script.")
    assert judge(Attempt(1, 143, log, frozenset(), Path(), ended_early=True)) is CompileVerdict.CRASHED
