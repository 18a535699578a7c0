"""What a post-mortem shows, and what it never does."""

import json
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jobs.node.post_mortem import PostMortem, as_bytes, shown_environment
from pipeline.core.secrets import secret_values

NOW = datetime(2026, 11, 20, tzinfo=UTC)


def bundle(**changes: Any) -> PostMortem:
    fields: dict[str, Any] = {
        "job": "train",
        "job_id": "abc",
        "attempt": 1,
        "node": 0,
        "num_nodes": 1,
        "host": "host",
        "command": ("trnpipe", "train"),
        "exit_code": 75,
        "own_exit_code": 75,
        "returncode": -9,
        "reason": "",
        "killed": False,
        "out_of_memory_kills": None,
        "started": NOW,
        "ended": NOW,
        "versions": {},
        "environment": {},
        "settings": None,
        "nodes": (),
        "processes": (),
        "stacks": {},
        "log": (),
        "events": (),
    }
    return PostMortem.model_validate(fields | changes)


def test_the_environment_that_is_shown() -> None:
    env = {
        "TRNPIPE_WORKSPACE": "/w",
        "AWS_BATCH_JOB_ID": "abc",
        "NEURON_CC_FLAGS": "-O1",
        "PJRT_DEVICE": "CPU",
        "XLA_FLAGS": "",
        "AWS_ACCESS_KEY_ID": "AKIA",
        "AWS_SESSION_TOKEN": "s",
        "TRNPIPE_REGISTRY__PASSWORD": "p",
        "PATH": "/bin",
    }
    assert list(shown_environment(env)) == [
        "AWS_BATCH_JOB_ID",
        "NEURON_CC_FLAGS",
        "PJRT_DEVICE",
        "TRNPIPE_WORKSPACE",
        "XLA_FLAGS",
    ]


def test_secrets_are_taken_out_wherever_they_turn_up() -> None:
    secrets = secret_values(
        {"AWS_SECRET_ACCESS_KEY": 'wJalr"XUtn\\FEMI', "HF_TOKEN": "short", "HOME": "/home/somebody"}
    )
    one = bundle(
        log=('key wJalr"XUtn\\FEMI used', "from https://me:hunter2@example.org/x and s3://bucket/key"),
        settings={"data": {"password": "hunter3", "max_tokens": 64}},
        command=("curl", "ftp://user@host"),
    )
    text = as_bytes(one, secrets).decode()
    for secret in ("wJalr", "FEMI", "hunter2", "hunter3", "user@"):
        assert secret not in text
    found = json.loads(text)
    assert found["log"][1] == "from https://***@example.org/x and s3://bucket/key"
    assert found["settings"]["data"]["max_tokens"] == 64


texts = st.text(max_size=40).map(lambda text: text * 400)


@given(
    events=st.lists(texts, max_size=60),
    log=st.lists(texts, max_size=60),
    stacks=st.dictionaries(st.integers(1, 9999), texts, max_size=40),
    tree=st.dictionaries(st.text(max_size=5), texts, max_size=20),
    reason=texts,
)
def test_it_stays_within_its_bound_and_is_json(
    events: list[str], log: list[str], stacks: dict[int, str], tree: dict[str, str], reason: str
) -> None:
    one = bundle(events=events, log=log, stacks=stacks, settings=tree, reason=reason)
    data = as_bytes(one, (), max_bytes=20_000)
    assert len(data) <= 20_000
    assert json.loads(data)["exit_code"] == 75
