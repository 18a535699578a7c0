"""Random histories of promotions, embeds, rollbacks, kills and damage, held against a small model of what must be.

What must hold in every state:

- serving.json names a checkpoint and vectors made with it that have passed verify;
- a rollback moves production and serving.json, or neither; killed between them, the same command ends it;
- rolling back again goes further back, and never to what was rolled back from, unless it is named;
- vectors roll back alone only to others of the model that is served;
- vectors that were rolled back from are not served again by their verify, nor are older ones of the same model;
- the pointer is the last change of the history, and each version of serving.json stays as it was written.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.core.errors import CheckpointError, TrnpipeError
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.model import (
    DeployedPair,
    Vectors,
    pair_key,
    past_pairs,
    read_pair,
    roll_back_model,
    roll_back_vectors,
    serve_verified_pair,
)
from pipeline.registry.promote import promote
from pipeline.registry.records import production_changes, read_history
from tests.registry.cases import (
    AUTHOR,
    MODEL,
    Dying,
    Killed,
    consistent,
    digest_of,
    make_checkpoint,
    passed,
    production,
)

NAMES = ("b", "a", "cycle-9", "cycle-10", "z", "cycle-2", "m", "cycle-100", "2026-02-01", "2026-01-31", "k", "c")
"""Of cycles in the order of their time, which is not that of their names."""
BY_NUMBER = ("2026-01-31", "2026-02-01", "a", "b", "c", "cycle-2", "cycle-9", "cycle-10", "cycle-100", "k", "m", "z")
"""How they are ordered where their vectors have one generation."""


@dataclass(frozen=True)
class Change:
    """Of production: what it is then, how it came there, and which change (from 1) a plain rollback leads to."""

    checkpoint: str
    rolled_back: bool
    before: int | None


@dataclass(frozen=True)
class Served:
    vectors: str
    rolled_back: bool
    replaced: str | None


@dataclass(frozen=True)
class State:
    """`follows`: the change of production that the last rollback of serving.json wanted to replace."""

    production: tuple[Change, ...] = ()
    served: tuple[Served, ...] = ()
    follows: int | None = None

    @property
    def withdrawn(self) -> set[str | None]:
        gone = set[str | None]()
        for one in self.served:
            gone |= {one.replaced} if one.rolled_back else set()
            gone -= {one.vectors}
        return gone

    def promoted(self, checkpoint: str) -> "State":
        return replace(self, production=(*self.production, Change(checkpoint, False, len(self.production) or None)))

    def restored(self, change: int) -> "State":
        then = self.production[change - 1]
        return replace(self, production=(*self.production, Change(then.checkpoint, True, then.before)))

    def with_pair(self, vectors: str, rolled_back: bool, follows: int | None = None) -> "State":
        now = self.served[-1].vectors if self.served else None
        more = () if vectors == now else (Served(vectors, rolled_back, now),)
        return replace(self, served=self.served + more, follows=follows)


def seen(workspace: Storage) -> State:
    """What the files say. Of a pair that was written twice in a row the first counts."""
    changes = production_changes(read_history(workspace, MODEL))
    pairs, served = past_pairs(workspace, MODEL), list[Served]()
    assert [pair.generation for pair in pairs] == list(range(1, len(pairs) + 1))
    for pair in pairs:
        if not served or served[-1].vectors != pair.vectors.digest:
            served.append(Served(pair.vectors.digest, pair.action == "rolled_back", pair.replaced))
    before = [change.previous.generation if change.previous else None for change in changes]
    return State(
        tuple(
            Change(change.checkpoint, change.action == "rolled_back", place)
            for change, place in zip(changes, before, strict=True)
        ),
        tuple(served),
        pairs[-1].production_follows if pairs else None,
    )


def order(one: DeployedPair) -> tuple[int, int]:
    return one.vectors.generation, BY_NUMBER.index(one.vectors.cycle)


Command = Callable[[Storage], object]
KILLS = st.none() | st.tuples(st.integers(1, 6), st.booleans(), st.booleans())
"""At which write, after it or before, and whether the command is given again."""
ANY = st.integers(0, 99)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.workspace = open_storage(f"file://{self.folder.name}/workspace")
        self.checkpoints, self.damaged = list[str](), set[str]()
        self.pairs, self.lost = dict[str, DeployedPair](), set[str]()
        self.state, self.written = State(), dict[str, bytes]()

    def teardown(self) -> None:
        self.folder.cleanup()

    @property
    def now(self) -> str | None:
        return self.state.production[-1].checkpoint if self.state.production else None

    def of(self, vectors: str) -> DeployedPair:
        return self.pairs[vectors]

    def act(self, command: Command, after: State | None, kill: tuple[int, bool, bool] | None) -> None:
        """Run a command, which leads to a state, or is refused (None) and changes nothing."""
        before = self.state
        if kill is not None:
            number, late, again = kill
            with suppress(Killed, TrnpipeError):
                command(cast(Storage, Dying(self.workspace, number, late, look=self.look)))
            found = seen(self.workspace)
            if not again or found == after:  # done, but for its answer: a plain rollback would go one further
                half = () if after is None else (after, replace(before, served=after.served, follows=after.follows))
                assert found in (before, *half)
                self.state = found
                return
        try:
            command(self.workspace)
        except TrnpipeError:
            assert after is None
        else:
            assert after is not None
        self.state = seen(self.workspace)
        assert self.state == (before if after is None else after)

    @precondition(lambda self: len(self.checkpoints) < len(NAMES))
    @rule(kill=KILLS)
    def train(self, kill: tuple[int, bool, bool] | None) -> None:
        self.checkpoints.append(make_checkpoint(self.workspace, Path(self.folder.name), NAMES[len(self.checkpoints)]))
        self.promote(len(self.checkpoints) - 1, False, kill)

    @precondition(lambda self: self.checkpoints)
    @rule(number=ANY, forced=st.booleans(), kill=KILLS)
    def promote(self, number: int, forced: bool, kill: tuple[int, bool, bool] | None) -> None:
        place = self.checkpoints[number % len(self.checkpoints)]
        gone = set[str]()
        for before, change in zip(self.state.production, self.state.production[1:], strict=False):
            gone |= {before.checkpoint} if change.rolled_back else set()
            gone -= {change.checkpoint}
        after: State | None = self.state if place == self.now else self.state.promoted(place)
        if place != self.now and (place in self.damaged or (place in gone and not forced)):
            after = None

        def command(workspace: Storage) -> None:
            decision = passed(self.workspace, place, forced="better" if forced else "")
            promote(workspace, MODEL, place, expected=production(workspace), decision=decision, author=AUTHOR)

        self.act(command, after, kill)

    @precondition(lambda self: self.checkpoints and len(self.pairs) < len(NAMES))
    @rule(number=ANY, of_production=st.booleans(), tie=st.booleans(), kill=KILLS)
    def embed(self, number: int, of_production: bool, tie: bool, kill: tuple[int, bool, bool] | None) -> None:
        place = self.now if of_production and self.now else self.checkpoints[number % len(self.checkpoints)]
        cycle, last = NAMES[len(self.pairs)], max([0, *(one.vectors.generation for one in self.pairs.values())])
        folder = Path(self.folder.name) / "vectors"
        folder.mkdir()
        (folder / "part-0.parquet").write_bytes(f"vectors of {cycle}".encode())
        digest = commit_dir(self.workspace, folder, f"embeddings/{cycle}", kind="embeddings", fields={}).digest
        vectors = Vectors(cycle=cycle, digest=digest, generation=last + (not tie), rows=1, dim=8)
        self.pairs[digest] = DeployedPair(
            model=MODEL, checkpoint=place, digest=digest_of(self.workspace, place), vectors=vectors, author=AUTHOR
        )
        self.verify(len(self.pairs) - 1, kill)

    @precondition(lambda self: self.pairs)
    @rule(number=ANY, kill=KILLS)
    def verify(self, number: int, kill: tuple[int, bool, bool] | None) -> None:
        pair = list(self.pairs.values())[number % len(self.pairs)]
        state, vectors = self.state, pair.vectors.digest
        served = self.of(state.served[-1].vectors) if state.served else None

        after: State | None = state
        if (
            pair.checkpoint == self.now
            and pair != served
            and state.follows != len(state.production)
            and not (served and served.checkpoint == pair.checkpoint and order(served) > order(pair))
            and vectors not in state.withdrawn
        ):
            after = None if vectors in self.lost else state.with_pair(vectors, False)
        self.act(lambda workspace: serve_verified_pair(workspace, pair), after, kill)

    @rule(number=ANY, named=st.booleans(), without=st.integers(0, 5), kill=KILLS)
    def roll_back_model(self, number: int, named: bool, without: int, kill: tuple[int, bool, bool] | None) -> None:
        state = self.state
        to = self.checkpoints[number % len(self.checkpoints)] if named and self.checkpoints else ""
        places = [place for place, change in enumerate(state.production, 1) if change.checkpoint == to]
        change = (places[-1] if places else None) if to else state.production[-1].before if state.production else None
        after: State | None = None
        if to and to == self.now:
            after = state
        elif change is not None and (place := state.production[change - 1].checkpoint) not in self.damaged:
            after = state.restored(change)
            if without and state.served:
                usable = [one.vectors for one in state.served if self.of(one.vectors).checkpoint == place]
                usable = [one for one in usable if one not in self.lost]
                usable = [one for one in usable if one not in state.withdrawn] or usable
                after = after.with_pair(usable[-1], True, len(state.production)) if usable else None

        def command(workspace: Storage) -> object:
            return roll_back_model(workspace, MODEL, to, reason="bad", author=AUTHOR, without_vectors=not without)

        self.act(command, after, kill)

    @rule(number=ANY, named=st.booleans(), kill=KILLS)
    def roll_back_vectors(self, number: int, named: bool, kill: tuple[int, bool, bool] | None) -> None:
        state = self.state
        cycle = NAMES[number % len(self.pairs)] if named and self.pairs else ""
        served = self.of(state.served[-1].vectors) if state.served else None
        after: State | None = None
        if served is not None and cycle == served.vectors.cycle:
            after = state
        elif served is not None:
            known = [self.of(one.vectors) for one in state.served]
            known = [one for one in known if one.checkpoint == served.checkpoint and one != served]
            if cycle:
                known = [one for one in known if one.vectors.cycle == cycle]
            else:
                known = [one for one in known if order(one) < order(served)]
                known = [one for one in known if one.vectors.digest not in state.withdrawn]
            there = [one for one in known if one.vectors.digest not in self.lost]
            after = state.with_pair(there[-1].vectors.digest, True, state.follows) if there else None
        self.act(lambda workspace: roll_back_vectors(workspace, MODEL, cycle, reason="bad", author=AUTHOR), after, kill)

    @precondition(lambda self: self.pairs)
    @rule(number=ANY)
    def lose_vectors(self, number: int) -> None:
        pair = list(self.pairs.values())[number % len(self.pairs)]
        if not self.state.served or pair.vectors.digest != self.state.served[-1].vectors:
            self.workspace.delete([f"{pair.vectors.prefix}/part-0.parquet"])
            self.lost.add(pair.vectors.digest)

    @precondition(lambda self: self.checkpoints)
    @rule(number=ANY)
    def damage_checkpoint(self, number: int) -> None:
        place = self.checkpoints[number % len(self.checkpoints)]
        if place != self.now and place not in self.damaged:
            self.flip(f"{place}/model.safetensors", number)
            self.damaged.add(place)

    def flip(self, key: str, bit: int) -> bytes:
        data = self.workspace.read_bytes(key)
        changed = bytearray(data)
        changed[bit // 8 % len(data)] ^= 1 << bit % 8
        self.workspace.write_bytes(key, bytes(changed))
        return data

    @precondition(lambda self: self.state.served)
    @rule(bit=st.integers(0, 10**5), number=ANY, past=st.booleans())
    def flip_a_bit_of_a_record(self, bit: int, number: int, past: bool) -> None:
        """Whatever reads it says so, or the bit meant nothing: no one goes on with a record that changed."""
        keys = sorted(self.written) if past and self.written else [pair_key(MODEL)]
        key = keys[number % len(keys)]
        data = self.flip(key, bit)
        with suppress(CheckpointError):
            assert seen(self.workspace) == self.state
        self.workspace.write_bytes(key, data)

    @precondition(lambda self: self.state.served)
    @rule(number=ANY)
    def lose_serving_json(self, number: int) -> None:
        """It is the newest file of the history, unless its writer was killed between the two."""
        now = read_pair(self.workspace, MODEL)
        assert now is not None
        newest = f"registry/{MODEL}/pairs/{now[0].generation:08d}.json"
        if self.workspace.stat(newest):
            self.workspace.delete([pair_key(MODEL)])
            self.workspace.write_bytes(pair_key(MODEL), self.workspace.read_bytes(newest))
            assert seen(self.workspace) == self.state

    def look(self) -> None:
        """What a reader finds at any time."""
        if found := read_pair(self.workspace, MODEL):
            pair = found[0]
            assert self.of(pair.vectors.digest).digests == pair.digests
            manifest = read_manifest(self.workspace, pair.vectors.prefix)
            assert manifest is not None and manifest.digest == pair.vectors.digest
            assert pair.vectors.digest not in self.lost
        for stat in self.workspace.list(f"registry/{MODEL}/pairs"):
            data = self.workspace.read_bytes(stat.key)
            assert self.written.setdefault(stat.key, data) == data, "written once"

    @invariant()
    def consistent(self) -> None:
        self.look()
        consistent(self.workspace)


THOROUGH = settings.get_current_profile_name() == "thorough"
TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=25 if THOROUGH else 20, derandomize=not THOROUGH)
