"""Real processes in one group. Each notes in a file which queues it gains and releases, in order.

A member notes a release before its next rebalance, and a gain after the rebalance that gave it. So at any moment the
queues of two members, according to the notes, are a subset of the queues that they owned.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.model import QueueKey

LIMIT_SECONDS = 180  # ends a hang

MEMBER = """
import json, os, sys, time
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.rebalance.allocation import allocate, find_strategy
from rmq_spark.store.group.assignment import Assignment
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.membership import Clocks, Membership, MemberTerms
from rmq_spark.store.model import QueueKey
from rmq_spark.store.model import QueueKey

root, name, strategy = sys.argv[1:]
chosen = find_strategy(strategy)
notes = open(f"{root}/{name}.notes", "a", buffering=1)

def commit(offsets):
    # As the group's offsets are: one file per queue is enough to see who wrote last.
    for queue, offset in offsets.items():
        with open(f"{root}/{queue.queue_id}.new", "w") as file:
            file.write(str(offset))
        os.replace(f"{root}/{queue.queue_id}.new", f"{root}/{queue.queue_id}.offset")
    return True

def share(group, queues, ids):
    return {me.id: allocate(chosen, group, me.id, queues, ids)}

def position(queue):
    try:
        with open(f"{root}/{queue.queue_id}.offset") as file:
            return int(file.read())
    except FileNotFoundError:
        return 0

terms = MemberTerms("app", name, "shared", strategy, "T")
me = Membership(GroupPaths(root, "g"), Disk(), terms, Clocks(wall_clock_ms, time.monotonic, time.sleep), name)
me.join()
own, at = Assignment(me, share, commit), {}
while True:
    with open(f"{root}/count") as file:
        queues = [QueueKey("T", number) for number in range(int(file.read()))]
    for queue in at:
        at[queue] += 1  # a batch is done
    moved = own.rebalance(queues, at)
    for queue in moved.lost:
        del at[queue]
    for queue in moved.gained:
        at[queue] = position(queue)
    assert not moved.taken, moved
    if moved.gained or moved.lost:
        epochs = {queue.queue_id: own.epochs[queue] for queue in moved.owned}
        notes.write(json.dumps({"owned": epochs, "gained": {q.queue_id: at[q] for q in moved.gained}}) + "\\n")
    lost = own.publish(at)
    assert not lost, lost
    with open(f"{root}/{name}.stop", "a+") as file:
        file.seek(0)
        if file.read():
            break
    time.sleep(0.005)
own.leave(at)
"""


class Group:
    """The processes of one group in the store at `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, GroupPaths(str(root), "g")
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.epochs: dict[QueueKey, int] = {}
        self.set_count(8)

    def set_count(self, count: int) -> None:
        (self.root / "count.new").write_text(str(count))
        os.replace(self.root / "count.new", self.root / "count")

    def start(self, name: str, strategy: str = "avg") -> None:
        self.running[name] = subprocess.Popen([sys.executable, "-c", MEMBER, str(self.root), name, strategy])

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self, name: str) -> None:
        (self.root / f"{name}.stop").write_text("x")
        assert self.running.pop(name).wait(LIMIT_SECONDS) == 0

    def refresh(self) -> dict[str, list[int]]:
        """Return each owner's queues by its name, after checking that no epoch ran back."""
        owners: dict[str, list[int]] = {}
        for queue, claim in read_claims(self.paths.claims).queues.items():
            assert claim.epoch >= self.epochs.get(queue, 0)
            self.epochs[queue] = claim.epoch
            owners.setdefault(claim.owner.rpartition("#")[2], []).append(queue.queue_id)
        assert all(process.poll() is None for process in self.running.values()), "a member failed"
        return owners

    def wait(self, counts: list[int]) -> float:
        """Wait until the living members own all queues, with these counts; return the seconds that it took."""
        begin = time.monotonic()
        while True:
            owners = self.refresh()
            if sorted(len(queues) for queues in owners.values()) == counts and set(owners) == set(self.running):
                return time.monotonic() - begin
            assert time.monotonic() - begin < LIMIT_SECONDS, owners
            time.sleep(0.002)

    def check_notes(self) -> None:
        """Assert that each epoch had one owner, and that each owner began at or after its predecessor's begin."""
        owner_of: dict[tuple[str, int], str] = {}
        begins: dict[str, dict[int, int]] = {}
        for path in self.root.glob("*.notes"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    note = json.loads(line)
                    for queue_id, begin in note["gained"].items():
                        begins.setdefault(queue_id, {})[note["owned"][queue_id]] = begin
                    for queue_id, epoch in note["owned"].items():
                        name = owner_of.setdefault((queue_id, epoch), path.stem)
                        assert name == path.stem, f"queue {queue_id}, epoch {epoch}: {name} and {path.stem}"
        for queue_id, of_epoch in begins.items():
            in_order = [begin for _, begin in sorted(of_epoch.items())]
            assert in_order == sorted(in_order), f"queue {queue_id} resumed below an earlier offset: {of_epoch}"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    for name in list(group.running):
        group.kill(name)


def test_three_members_over_eight_queues_one_killed_one_stopped_one_late_and_four_queues_more(group: Group) -> None:
    for name in "abc":
        group.start(name)
    group.wait([2, 3, 3])
    group.kill("b")
    group.wait([4, 4])
    group.start("d")
    group.wait([2, 3, 3])
    group.set_count(12)
    group.wait([4, 4, 4])
    group.stop("a")
    group.wait([6, 6])
    group.kill("c")
    group.wait([12])
    assert len(os.listdir(group.paths.members)) == 2, "the dead are buried"
    group.check_notes()


def be_random(group: Group, steps: int, seed: int) -> None:
    """Start, kill and stop members and change the number of queues, at random moments."""
    print(f"seed {seed}")
    chance, born, stopped = random.Random(seed), 0, 0
    strategy = chance.choice(["avg", "circle", "consistentHash"])
    acts: list[Callable[[], None]] = [
        lambda: group.kill(chance.choice(sorted(group.running))),
        lambda: group.stop(chance.choice(sorted(group.running))),
        lambda: group.set_count(chance.choice([8, 10, 12])),
    ]
    for _ in range(steps):
        if len(group.running) < 2 or (len(group.running) < 4 and chance.random() < 0.5):
            group.start(f"m{born:03d}", strategy)
            born += 1
        else:
            chance.choice(acts)()
            stopped += 1
        for _ in range(chance.randrange(40)):
            group.refresh()
            time.sleep(0.005)
    group.set_count(12)
    begin = time.monotonic()
    while not set(group.refresh()) <= set(group.running) or sum(map(len, group.refresh().values())) != 12:
        assert time.monotonic() - begin < LIMIT_SECONDS, group.refresh()
        time.sleep(0.01)
    group.check_notes()


def test_members_come_and_go_at_random(group: Group) -> None:
    be_random(group, 15, int.from_bytes(os.urandom(4), "big"))


@pytest.mark.torture
@pytest.mark.parametrize("run", range(4))
def test_members_come_and_go_at_random_for_long(group: Group, run: int) -> None:
    be_random(group, 200, int.from_bytes(os.urandom(4), "big"))
