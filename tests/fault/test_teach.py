"""Teaching that is killed goes on where it was, and ends with the same vectors or scores."""

from collections.abc import Callable
from functools import partial

import pytest

from pipeline.io.commit import read_manifest
from tests.fault.harness import TINY, Place

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


def taught(place: Place) -> dict[str, str]:
    """Digests of what is committed."""
    manifests = {prefix: read_manifest(place.storage, prefix) for prefix in place.result("teach")["outputs"].values()}
    return {prefix: manifest.digest for prefix, manifest in manifests.items() if manifest is not None}


def done(place: Place) -> int:
    """Committed parts."""
    return len([*place.path.glob("tokens/*/taught/*/*-done/*.json")])


DAYS = (*TINY, "--data.synthetic.num-days=10")
"""Ten parts: the vectors of each day."""


def test_killed_and_run_again(place: Callable[..., Place]) -> None:
    whole, killed = place("cpu", DAYS), place("cpu", DAYS)
    whole.run("train", "--train.max-steps=2", "--train.evaluate-every=0")
    flags = [f"--train.teacher={whole.storage.uri(whole.result()['outputs']['checkpoint'])}"]
    whole.run("teach", *flags)
    for parts in (2, 5):
        run = killed.start("teach", *flags)
        assert run.until(partial(enough, killed, parts)), f"it had ended before: {run.err}"
        run.kill()
    there = done(killed)
    last = killed.run("teach", *flags)
    assert 5 <= there < 10 and "10 are new" in last.out
    assert taught(killed) == taught(whole) and len(taught(whole)) == 10
    assert not done(killed) and "0 are new" in killed.run("teach", *flags).out


def enough(place: Place, parts: int) -> bool:
    return done(place) >= parts
