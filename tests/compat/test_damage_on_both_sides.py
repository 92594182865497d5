"""The same damaged store under RocketMQ's store classes and under our writer: where does each append next?

Our writer ends at the same offset, or keeps more, or refuses and reports the damage. DIFFERENCES lists every
difference, and docs/DECISIONS.md the reason for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from compat_kit import our_stores
from compat_kit.damages import DAMAGES, Store
from compat_kit.rocketmq import Line, Request, Verifier
from compat_kit.their_lives import copy_of

import rmq_spark
from rmq_spark.store.errors import RmqError
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes

pytestmark = pytest.mark.compat

SIZES = FileSizes(65536, 4000, 460, IndexShape(100, 400))
CONF = our_stores.index_conf(SIZES)
TOPIC = "orders"
REFUSED, KEPT = "we refuse", "we end later, we have more"
OVERWRITTEN, NOT_BELIEVED = "we end earlier", "we end earlier, we have less"
# Damage -> state of the store -> difference; "4.9" and "5.3" where the versions differ. All other cases are alike.
DIFFERENCES: dict[str, dict[str, str]] = {
    "last_record_cut": {"closed": REFUSED, "4.9 crashed": REFUSED},
    "last_record_gone": {"4.9 closed": REFUSED},
    "last_size_flipped": {"4.9 closed": REFUSED},
    "last_body_flipped": {"closed": KEPT, "4.9 crashed": KEPT},
    "middle_body_flipped": {"closed": KEPT, "4.9 crashed": KEPT},
    "oldest_body_flipped": {"4.9 closed": KEPT, "4.9 crashed": KEPT},
    "middle_record_gone": {"closed": REFUSED},
    "middle_size_flipped": {"closed": REFUSED},
    "middle_magic_flipped": {"closed": REFUSED},
    "middle_segment_missing": {"closed": REFUSED, "crashed": REFUSED},
    "last_segment_missing": {"closed": REFUSED},
    "foreign_record_behind_the_end": {"closed": OVERWRITTEN, "crashed": OVERWRITTEN},
    "stale_record_behind_the_end": {
        "5.3 closed": OVERWRITTEN,
        "4.9 closed": NOT_BELIEVED,
        "crashed": NOT_BELIEVED,
    },
    "stale_record_and_unit_behind_the_end": {"closed": NOT_BELIEVED, "crashed": NOT_BELIEVED},
    "half_written_unit": {"closed": REFUSED},
    "last_unit_gone": {"closed": REFUSED},
    "queue_missing": {"closed": REFUSED},
    "all_queues_missing": {"closed": REFUSED},
    "checkpoint_from_the_future": {"closed": REFUSED},
}
Places = set[tuple[int, int, int]]  # queue id, queue offset and physical offset of every message


@dataclass(frozen=True, slots=True)
class Outcome:
    """The physical offset of the next record, and the messages of the store; or why the store was refused."""

    end: int
    places: Places
    why: str = ""


def ours(store: Path) -> Outcome:
    """Append one message with our writer, and return the outcome."""
    before = files_of(store)
    try:
        with our_stores.open_small(store, sizes=SIZES) as writer:
            added = writer.send(TOPIC, b"one more", queue_id=0).commit_log_offset
    except RmqError as error:
        assert files_of(store) == before, "a refusal changes nothing"
        return Outcome(-1, set(), f"{type(error).__name__}: {error}")
    places = set()
    try:
        with rmq_spark.open_reader(str(store)) as reader:
            reader.refresh()
            for queue in reader.queues(TOPIC):
                held = reader.bounds(queue)
                for batch in reader.read(queue, held.min_offset, held.max_offset, ("queueOffset", "commitLogOffset")):
                    places.update((queue.queue_id, *row.values()) for row in batch.to_pylist())
    except RmqError as error:  # a lost queue: the others are written and read
        return Outcome(-1, set(), f"{type(error).__name__}: {error}")
    return Outcome(added, {place for place in places if place[2] != added})


def files_of(store: Path) -> dict[str, bytes]:
    """Return the contents of the files of a store that hold messages."""
    folders = [store / name for name in ("commitlog", "consumequeue", "index") if (store / name).is_dir()]
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(store)): path.read_bytes() for path in paths}


def theirs(report: Line) -> Outcome:
    """Open the store with the store classes, and return the outcome."""
    if report["event"] == "failed":
        return Outcome(-1, set(), report["why"])
    found = report["messages"]
    places = {(line["queueId"], line["queueOffset"], line["commitLogOffset"]) for line in found}
    return Outcome(report["recovered"]["maxPhyOffset"], places)


def difference(one: Outcome, other: Outcome) -> str:
    """Return how ours differs from theirs in a few words, "" if it does not."""
    if one.why or other.why:
        return "" if one.why and other.why else "we refuse" if one.why else "they refuse"
    words = []
    if one.end != other.end:
        words.append("we end later" if one.end > other.end else "we end earlier")
    if one.places - other.places:
        words.append("we have more")
    if other.places - one.places:
        words.append("we have less")
    return ", ".join(words)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Callable[[Verifier], Path]:
    """A function that returns a store of three segments that this version closed in order."""
    made: dict[str, Path] = {}

    def make(verifier: Verifier) -> Path:
        version = verifier.java.version
        if version not in made:
            made[version] = copy_of(golden / "livekill533", tmp_path_factory.mktemp("whole") / version)
            verifier.verify([Request(made[version], CONF)])
        return made[version]

    return make


def test_we_end_where_they_end_or_are_safer(
    whole: Callable[[Verifier], Path], verifier: Verifier, tmp_path: Path
) -> None:
    cases: dict[tuple[str, str], tuple[Path, Path]] = {}
    for state in ("closed", "crashed"):
        for damage in DAMAGES:
            name = damage.__name__
            store = copy_of(whole(verifier), tmp_path / state / name)
            if state == "crashed":
                (store / "abort").touch()
            damage(Store.of(store))
            cases[(name, state)] = store, copy_of(store, tmp_path / "theirs" / state / name)
    reports = verifier.try_verify(Request(other, CONF) for _, other in cases.values())
    found, expected = {}, {}
    for (name, state), report in zip(cases, reports, strict=True):
        one, other = ours(cases[(name, state)][0]), theirs(report)
        found[(name, state)] = difference(one, other)
        known = DIFFERENCES.get(name, {})
        expected[(name, state)] = known.get(f"{verifier.java.version[:3]} {state}", known.get(state, ""))
        assert not other.why, f"{name}, {state}: they refuse: {other.why}"
        assert one.why or one.places >= {place for place in other.places if place[2] < one.end}, "all before our end"
    assert found == expected
    print(f"{verifier.java.version}: {len(cases)} damaged stores, {sum(map(bool, found.values()))} differences")


def test_only_what_stands_behind_the_end_makes_us_end_earlier() -> None:
    ends_earlier = {name for name, known in DIFFERENCES.items() if {OVERWRITTEN, NOT_BELIEVED} & set(known.values())}
    assert all(name.endswith("_behind_the_end") for name in ends_earlier)
