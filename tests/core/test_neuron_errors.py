"""Every status code and every log pattern has its class."""

import pytest

from pipeline.core.errors import ConfigError, NumericError, TransientError, TrnpipeError
from pipeline.core.neuron_errors import ROWS, classify, decisive, device_error

RETRY, FIX = TransientError, ConfigError
pytestmark = pytest.mark.unit

STATUS = {row.pattern: (row.name, row.error) for row in ROWS if isinstance(row.pattern, int)}
HW = "[ 912.1] NEURON_HW_ERR={} instance-id=i-05 hostname=ip-10-0-0-1 nd-id=0 nc-id=0 serial-num=19f action=TERMINATE"
RELOAD = "Please reload the neuron driver or reboot your EC2 instance to prevent future impact."
LINES: list[tuple[str, str, type[TrnpipeError]]] = [
    (HW.format("SRAM_UNCORRECTABLE_ERROR"), "hardware error", RETRY),
    (HW.format("A_KIND_OF_NEXT_YEAR"), "hardware error", RETRY),
    (
        "(FATAL-RT-UNDEFINED-STATE) [ND 0][NC 0] Uncorrectable memory error is detected, metadata: 0x16.",
        "hardware error",
        RETRY,
    ),
    (f"Uncorrectable HBM memory error is detected. {RELOAD}", "hardware error", RETRY),
    ("[MLA 0][NC 1] DMA RX engine 13 is in an abort state", "hardware error", RETRY),
    (HW.format("HANG_ON_COLLECTIVES"), "hang", RETRY),
    (
        "(FATAL-RT-UNDEFINED-STATE) missing collectives status on Neuron Device 0 NC 0, model 0 - suspected hang in"
        " collectives operation 0 out of 100",
        "hang",
        RETRY,
    ),
    (
        "(FATAL-RT-UNDEFINED-STATE) execution timeout (30000 ms) on Neuron Device 0 NC 0, model a.neff, waiting for"
        " execution completion notification",
        "hang",
        RETRY,
    ),
    ("inference timeout (600000 ms)", "hang", RETRY),
    ("NeuronCore(s) not available - Requested:32 Available:0", "cores not available", RETRY),
    ("One or more engines are running. Please restart device", "cores not available", RETRY),
    ("Timestamp program stop timeout (1000 ms)", "cores not available", RETRY),
    ("Failed to initialize devices, error:5", "cores not available", RETRY),
    ("Could not open the nd12", "cores not available", RETRY),
    (
        "Another process must be compiling /c/MODULE_5/model.hlo.pb, been waiting for: 1 minutes",
        "compiler cache lock",
        RETRY,
    ),
    ("RX, connection closed by remote peer", "peer died", RETRY),
    ("Call to recv failed : Broken pipe", "peer died", RETRY),
    ("Unable to run multi-instance workload.  Ofi plugin is not installed", "no EFA for many nodes", FIX),
    ("NCCL init error: Error opening libnccom.so, cannot use collective operations!", "no libnccom", FIX),
    ("OSError: [Errno 24] Too many open files", "too many open files", FIX),
    ("NEFF version mismatch", "version skew", FIX),
    ("incompatible model", "version skew", FIX),
    ("Unsupported hardware operator code 201", "version skew", FIX),
    ("Out of memory: Killed process 4711 (neuronx-cc)", "host out of memory", FIX),
    ("neuronx-cc failed with status -9", "host out of memory", FIX),
    ("neuronx-cc terminated with exit status 70", "host out of memory", FIX),
    ("Received 15 death signal, shutting down workers", "killed with SIGTERM", RETRY),
]


@pytest.mark.parametrize("code", STATUS)
@pytest.mark.parametrize(
    "message",
    [
        "2026-May-02 06:02:18.0992 13660:14125 ERROR  TDRV:exec  execution ended with {name}",
        "return code {name} ({code})",
        'adaptor.cc:446: nrt_execute: status={code}, error message="..."',
        "nrt_init failed with error code {code}",
        "NMGR:dlr_infer   Inference completed with err: {code}",
    ],
)
def test_status_codes(code: int, message: str) -> None:
    name, error = STATUS[code]
    matches = classify("a line before\n" + message.format(name=name, code=code) + "\na line after")
    assert [(match.row.name, match.row.error) for match in matches] == [(name, error)]
    assert matches[0].line == message.format(name=name, code=code)


@pytest.mark.parametrize(("line", "name", "error"), LINES)
def test_log_lines(line: str, name: str, error: type[TrnpipeError]) -> None:
    matches = classify(f"step 12 loss 0.31\n{line}\nTraceback")
    assert [(match.row.name, match.row.error, match.line) for match in matches] == [(name, error, line)]


def test_every_row_of_the_log_table_is_shown_by_a_line() -> None:
    assert {row.name for row in ROWS if isinstance(row.pattern, str)} == {name for _, name, _ in LINES}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step 5 loss 0.4 NEURON_RT_EXEC_TIMEOUT=600",
        "stage execution failed with exit code 1",
        "status=4",
        "the trial run failed with exit code 70",
        "neuronx-cc --optlevel=1 took 70 s",
        "Compiler status PASS",
        "http status 101",
    ],
)
def test_harmless_text(text: str) -> None:
    assert classify(text) == ()
    assert device_error(text) is None


def test_rows_make_the_class_to_raise() -> None:
    assert isinstance(device_error("NRT_TIMEOUT"), TransientError)
    assert isinstance(device_error("NRT_RESOURCE"), ConfigError)
    assert isinstance(device_error("NRT_EXEC_COMPLETED_WITH_NUM_ERR"), NumericError)
    assert device_error("Connect to 10.0.0.2:62182 failed - retrying") is None
    error = device_error("before\nnrt_execute: status=1006, x\nafter")
    assert error and error.seen == "NRT_EXEC_OOB: nrt_execute: status=1006, x" and "token ids" in error.next_command


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # Broken hardware is the cause, whatever the software says of it.
        ("NRT_INVALID\nUncorrectable memory error is detected\nNRT_EXEC_COMPLETED_WITH_ERR", "hardware error"),
        # What only follows does not decide.
        ("NRT_TIMEOUT\nNRT_CLOSED\nNRT_UNINITIALIZED", "NRT_TIMEOUT"),
        ("RX, connection closed by remote peer\nNRT_RESOURCE", "NRT_RESOURCE"),
        ("NeuronCore(s) not available - Requested:2 Available:0\nNRT_LOAD_NOT_ENOUGH_NC", "cores not available"),
        ("Too many open files\nNRT_TIMEOUT", "too many open files"),
    ],
)
def test_the_decisive_one_of_many(text: str, name: str) -> None:
    match = decisive(classify(text))
    assert match and match.row.name == name


def test_a_long_log_is_read_in_time_and_lines_are_cut() -> None:
    noise = ("neuronx-cc nrt nrt nrt Uncorrectable (efa) " * 2000 + "\n") * 10
    (match,) = classify(noise + "x" * 10_000 + " NRT_TIMEOUT " + "y" * 10_000)
    assert match.row.name == "NRT_TIMEOUT"
    assert match.line.startswith("NRT_TIMEOUT") and len(match.line) <= 300
