"""Claims: how plans change them, and their file."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.group.claims import (
    NO_CLAIMS,
    NOBODY,
    Claim,
    Claims,
    encode_claims,
    plan_claims,
    read_claims,
    read_claims_head,
    write_claims,
)
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.crash_disk import CrashDisk

Q = [QueueKey("T", number) for number in range(12)]
CLAIMS = Claims(
    7, "a", {Q[0]: Claim("a", 1), Q[1]: Claim("b", 3), Q[2]: Claim(NOBODY, 2), QueueKey("ü", 0): Claim("a", 9)}
)


def test_plan_claims_claims_free_queues_with_the_next_epoch() -> None:
    held = {Q[0]: Claim(NOBODY, 4), Q[1]: Claim("dead", 2), Q[2]: Claim("b", 1)}
    plan = plan_claims(held, "a", {"a", "b"}, Q[:4])
    assert plan.gained == (Q[0], Q[1], Q[3])
    assert plan.waiting == (Q[2],)
    assert plan.lost == ()
    assert plan.claims == {Q[0]: Claim("a", 5), Q[1]: Claim("a", 3), Q[2]: Claim("b", 1), Q[3]: Claim("a", 1)}
    assert held[Q[0]] == Claim(NOBODY, 4), "what was given stays as it is"


def test_plan_claims_keeps_the_epoch_of_a_released_queue() -> None:
    plan = plan_claims({Q[0]: Claim("a", 4), Q[1]: Claim("a", 2)}, "a", {"a"}, [Q[1]])
    assert plan.lost == (Q[0],)
    assert plan.gained == ()
    assert plan.claims == {Q[0]: Claim(NOBODY, 4), Q[1]: Claim("a", 2)}


class Group(RuleBasedStateMachine):
    """Members join, die, come back as others, and ask in any order; the number of queues changes."""

    def __init__(self) -> None:
        super().__init__()
        self.claims: dict[QueueKey, Claim] = {}
        self.live: set[str] = set()
        self.count, self.born = 8, 0
        self.believed: dict[str, dict[QueueKey, int]] = {}  # what each member thinks is its own
        self.epochs: dict[QueueKey, int] = {}

    @rule()
    def join(self) -> None:
        if len(self.live) < 5:
            self.live.add(f"m{self.born}")
            self.believed[f"m{self.born}"] = {}
            self.born += 1

    @precondition(lambda self: self.live)
    @rule(chance=st.randoms(use_true_random=False))
    def die(self, chance: Random) -> None:
        dead = chance.choice(sorted(self.live))
        self.live.remove(dead)
        del self.believed[dead]

    @rule(count=st.integers(1, 12))
    def change_the_number_of_queues(self, count: int) -> None:
        self.count = count

    @precondition(lambda self: self.live)
    @rule(chance=st.randoms(use_true_random=False))
    def ask(self, chance: Random) -> None:
        self.rebalance(chance.choice(sorted(self.live)))

    def rebalance(self, me: str) -> None:
        wanted = self.share(me)
        plan = plan_claims(self.claims, me, self.live, wanted)
        owned = self.believed[me]
        assert not set(plan.gained) & set(owned)
        assert set(plan.lost) == set(owned) - wanted
        for queue in plan.gained:
            assert all(queue not in others for others in self.believed.values()), "two living owners"
            owned[queue] = plan.claims[queue].epoch
        for queue in plan.lost:
            del owned[queue]
        assert set(owned) | set(plan.waiting) == wanted
        self.claims = plan.claims

    def share(self, me: str) -> set[QueueKey]:
        place, members = sorted(self.live).index(me), len(self.live)
        return set(Q[: self.count][place::members])

    @invariant()
    def each_queue_has_one_living_owner_who_knows_it(self) -> None:
        for queue, claim in self.claims.items():
            knowing = [me for me, owned in self.believed.items() if owned.get(queue) == claim.epoch]
            assert knowing == ([claim.owner] if claim.owner in self.live else [])

    @invariant()
    def epochs_only_grow(self) -> None:
        for queue, epoch in self.epochs.items():
            assert self.claims[queue].epoch >= epoch
        self.epochs = {queue: claim.epoch for queue, claim in self.claims.items()}

    @precondition(lambda self: self.live)
    @rule()
    def nothing_starves(self) -> None:
        """After all have asked once to let go and once to take, every queue is where it belongs."""
        for _ in range(2):
            for me in sorted(self.live):
                self.rebalance(me)
        for me in self.live:
            assert set(self.believed[me]) == self.share(me)


TestGroup = Group.TestCase
TestGroup.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_read_claims_returns_the_written_claims(tmp_path: Path) -> None:
    path = str(tmp_path / "claims.json")
    assert read_claims(path) == NO_CLAIMS
    assert read_claims_head(path) == b""
    write_claims(path, Disk(), CLAIMS)
    assert read_claims(path) == CLAIMS


def test_read_claims_head_changes_with_every_write(tmp_path: Path) -> None:
    path, heads = str(tmp_path / "claims.json"), set()
    for change in range(1, 4):
        for by in ("h" * 250 + "@1#a", "h" * 250 + "@1#b"):
            many = {QueueKey("T", number): Claim(by, 1) for number in range(1000)}
            write_claims(path, Disk(), Claims(change, by, many))
            heads.add(read_claims_head(path))
    assert len(heads) == 6


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"change": 7', b'"change": 0'),
        (b'"by": "a"', b'"by": ""'),
        (b'"v": 1', b'"v": 1, "owners": 3, "x'),
        (b"9", b"0"),
        (b"9", b"true"),
        (b'"owners": [\n  "",', b'"owners": ['),
        (b"}", b""),
        (b'"T"', b'"T":'),
    ],
)
def test_read_claims_names_a_damaged_file_and_the_next_step(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "claims.json"
    data = encode_claims(CLAIMS)
    assert old in data
    path.write_bytes(data.replace(old, new))
    with pytest.raises(DamageError) as caught:
        read_claims(str(path))
    assert str(path) in str(caught.value)
    assert "Stop the group's queries, remove the file and start them again" in str(caught.value)


def test_write_claims_leaves_old_or_new_claims_after_any_crash(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    disk = CrashDisk(root)
    path = str(root / "claims.json")
    acknowledged = {0: NO_CLAIMS}  # effects so far -> what is promised
    versions = [NO_CLAIMS]
    for change in range(1, 4):
        claims = replace(CLAIMS, change=change, queues={queue: Claim("a", change) for queue in Q[: change * 4]})
        versions.append(claims)
        write_claims(path, disk, claims)
        acknowledged[disk.effect_count] = claims
    seen, number = set(), 0
    for point in range(disk.effect_count + 1):
        promised = acknowledged[max(known for known in acknowledged if known <= point)]
        for image in disk.images(point, seed=7):
            folder, number = tmp_path / f"image-{number}", number + 1
            image.write_to(folder)
            found = read_claims(str(folder / "claims.json"))
            assert found in versions, image
            assert found.change >= promised.change, image
            # A temporary file that a crash left does not block the next write.
            write_claims(str(folder / "claims.json"), Disk(), versions[-1])
            seen.add(found.change)
    assert seen == {0, 1, 2, 3}
