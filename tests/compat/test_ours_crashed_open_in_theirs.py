"""RocketMQ's store classes open stores of our crashed writers: no acknowledged message is lost or duplicated.

Afterwards we open their store and append, and they open it again: nothing is left to recover.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import pytest
from compat_kit import our_stores
from compat_kit.rocketmq import Line, Request, Verifier
from compat_kit.rows import Rows, differences, our_rows, their_rows
from support.encoded_samples import encode_samples

from rmq_spark.store.errors import RmqError
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.disk_effects import Write
from rmq_spark.store.testing.sample_message import SampleMessage

pytestmark = pytest.mark.compat

# A section fills at most two files of a queue: RocketMQ looks for the end of a queue in its last three. Index files are
# large, for RocketMQ names them by the millisecond, and loses keys where two are made in one.
SIZES = FileSizes(4096, 500, 10 * 46, IndexShape(50, 1000))
QUEUES = {"T": 2, "Ux": 3}
IMAGES = 60  # of crashes, for each version
KILLS = 8
Promised = dict[tuple[str, int, int], int]  # topic, queue id, queue offset -> number of the message there


@dataclass
class Crashed:
    """A store that a crash left, and which messages it must have."""

    name: str
    store: Path
    sizes: FileSizes
    promised: Promised
    is_power_cut: bool = False
    notes: list[str] = field(default_factory=list)


def numbered(rows: Rows) -> tuple[dict[tuple[str, int, int], int], list[str]]:
    """Return the number of every message by its position, and errors of positions and numbers."""
    found, wrong = {}, []
    for queue, messages in rows.items():
        offsets = [row["queueOffset"] for row in messages]
        if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            wrong.append(f"{queue}: offsets {offsets}")
        for row in messages:
            found[(queue.topic, queue.queue_id, row["queueOffset"])] = int(row["keys"].split(" ")[0][1:])
    twice = sorted(number for number in set(found.values()) if list(found.values()).count(number) > 1)
    if twice:
        wrong.append(f"messages {twice} are stored twice")
    return found, wrong


def missing(promised: Promised, rows: Rows) -> list[str]:
    """Return errors: promised messages that are not at their positions, and others."""
    if not any(rows.values()):
        return [f"none of {len(promised)} messages exists"] if promised else []
    found, wrong = numbered({queue: messages for queue, messages in rows.items() if messages})
    lost = {place: number for place, number in promised.items() if found.get(place) != number}
    return wrong + ([f"lost {len(lost)} of {len(promised)}: {dict(list(lost.items())[:4])}"] if lost else [])


def check(crashed: list[Crashed], verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have RocketMQ recover the stores, us append to them, and RocketMQ open them again."""
    for report, one in zip(verifier.verify(requests(crashed)), crashed, strict=True):
        theirs = their_rows(report["messages"])
        one.notes += [f"undecodable: {queue}" for queue in report["queues"] if queue["undecodable"]]
        one.notes += missing(one.promised, theirs)
        one.notes += [f"read by us: {line}" for line in differences(read(one), theirs)[:3]]
    for one in crashed:
        with monkeypatch.context() as patch:
            if one.is_power_cut:
                patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "after the power cut")
            append_some(one)
        one.notes += [f"after us: {line}" for line in missing(one.promised, read(one))]
    for report, one in zip(verifier.verify(requests(crashed)), crashed, strict=True):
        one.notes += still_to_recover(report)
        one.notes += [f"at last: {line}" for line in missing(one.promised, their_rows(report["messages"]))]
    problems = {one.name: one.notes for one in crashed if one.notes}
    assert not problems, f"{len(problems)} of {len(crashed)}:\n" + "\n".join(
        f"{name}: {line}" for name, notes in problems.items() for line in notes
    )


def requests(crashed: list[Crashed]) -> Iterator[Request]:
    return (Request(one.store, our_stores.index_conf(one.sizes)) for one in crashed)


def read(one: Crashed) -> Rows:
    """Return the rows of our reader; none, and a note, for damage."""
    try:
        return our_rows(one.store)
    except RmqError as error:
        one.notes.append(f"our reader: {error!r}")
        return {}


def append_some(one: Crashed) -> None:
    """Append to every queue, close, and add the positions of the messages to the promised ones."""
    number = 1_000_000
    try:
        with our_stores.open_small(one.store, sizes=one.sizes) as writer:
            for topic, queues in QUEUES.items():
                writer.create_topic(topic, queues)
                for queue in range(queues):
                    sent = writer.send(topic, f"{number}", keys=f"k{number}", queue_id=queue)
                    one.promised[(topic, queue, sent.queue_offset)] = number
                    number += 1
    except RmqError as error:
        one.notes.append(f"our writer: {error!r}")


def still_to_recover(report: Line) -> list[str]:
    found = report["recovered"]
    if found["abortFile"] or found["truncated"] or found["filesBefore"] != found["filesAfter"]:
        return [f"we closed it, and it needed recovery: {found}"]
    return []


# ---- a process that is killed ------------------------------------------------------------------------------------

APPENDER = """
import json, sys
from pathlib import Path
from random import Random
from rmq_spark.store.transaction.sink import RecordBuilderSettings
from rmq_spark.store.client.producer import Producer

from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.format.index_file import IndexShape
import pyarrow as pa

path, first, queues = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
sizes, random = FileSizes(4096, 500, 460, IndexShape(50, 1000)), Random(first)
store = Producer(path, WriterSettings(sizes=sizes), RecordBuilderSettings(sizes=sizes), "async")
for topic, count in queues.items():
    store.create_topic(topic, count)
while True:
    rows = []
    for number in range(first, first + random.choice((1, 3, 17, 40))):
        topic = random.choice(list(queues))
        rows.append(dict(topic=topic, body=b"b" * random.randrange(200), keys=f"k{number}"))
    first += len(rows)
    sent = store.send_many(pa.Table.from_pylist(rows)).to_pylist()
    places = [(row["topic"], row["queueId"], row["queueOffset"]) for row in sent]
    print(json.dumps([(*place, int(row["keys"][1:])) for place, row in zip(places, rows)]), flush=True)
    if random.random() < 0.1:
        store.settle()
"""


def append_until_killed(store: Path, first: int, random: Random) -> Promised:
    """Run a process that appends, kill it, and return the messages that it had acknowledged."""
    process = subprocess.Popen(
        [sys.executable, "-c", APPENDER, str(store), str(first), json.dumps(QUEUES)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(random.randint(3, 25))]
    time.sleep(random.random() * 0.02)
    process.send_signal(signal.SIGKILL)
    lines += process.communicate()[0].splitlines()
    promised = {}
    for line in lines:
        if line.rstrip().endswith("]]"):  # the last one may have been cut
            promised |= {(topic, queue, offset): number for topic, queue, offset, number in json.loads(line)}
    return promised


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Promised]]:
    """One store whose writers are killed repeatedly: its state after each kill, and the acknowledged messages."""
    folder, random = tmp_path_factory.mktemp("killed"), Random(9)
    store, promised = folder / "store", {}
    found: list[tuple[Path, Promised]] = []
    for number in range(KILLS):
        promised |= append_until_killed(store, number * 100_000, random)
        image = folder / f"kill{number}"
        subprocess.run(["cp", "-a", str(store), str(image)], check=True)
        found.append((image, dict(promised)))
    return found


def test_a_killed_writer_loses_nothing(
    killed: list[tuple[Path, Promised]],
    verifier: Verifier,
    copied: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sum((image / "abort").exists() for image, _ in killed) > KILLS // 2
    stores = [Crashed(image.name, copied(image), SIZES, dict(promised)) for image, promised in killed]
    check(stores, verifier, monkeypatch)
    print(f"{verifier.java.version}: {len(killed)} kills, {len(killed[-1][1])} messages in the last")


# ---- any moment, and power cuts ----------------------------------------------------------------------------------


@dataclass
class Life:
    """A writer's life on a CrashDisk: how many messages were appended and acknowledged at which effect."""

    disk: CrashDisk
    promises: list[tuple[int, Promised, Promised]] = field(default_factory=lambda: [(0, {}, {})])

    def at(self, point: int, *, is_power_cut: bool) -> Promised:
        """Return the messages that were promised before effect `point`."""
        _, appended, settled = [promise for promise in self.promises if promise[0] <= point][-1]
        return dict(settled if is_power_cut else appended)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A store of several segments, queue files and index files, settled now and then."""
    root = tmp_path_factory.mktemp("life")
    found, random, number = Life(CrashDisk(root)), Random(11), 0
    # Steps of a second and a half: checkpoints lag some messages, and recovery begins after the first segment.
    ticks = count(1_700_000_000_000, 1500)
    store = StoreWriter(
        str(root / "s"), found.disk, WriterSettings(sizes=SIZES), lambda: next(ticks), lambda seconds: None
    )
    appended: Promised = {}
    settled: Promised = {}
    for size in (5, 12, 1, 30, 7, 25, 2, 40, 11, 9):
        messages = []
        for one in range(number, number + size):
            topic = random.choice(list(QUEUES))
            body = b"%d " % one + b"b" * random.randrange(150)
            messages.append(SampleMessage(topic, random.randrange(QUEUES[topic]), body, tags="t", keys=f"k{one} all"))
        number += size
        with store.section() as section:
            for topic, queues in QUEUES.items():
                section.ensure_topic(topic, queues)
            offsets = section.append(encode_samples(messages)).queue_offsets.tolist()
            for message, offset in zip(messages, offsets, strict=True):
                assert message.keys
                appended[(message.topic, message.queue_id, offset)] = int(message.keys.split(" ")[0][1:])
            if random.random() < 0.4:
                section.settle()
                settled = dict(appended)
        found.promises.append((found.disk.effect_count, dict(appended), dict(settled)))
    store.close()
    found.promises.append((found.disk.effect_count, dict(appended), dict(appended)))
    return found


def between_queues(life: Life) -> list[int]:
    """Return the points at which one queue has its units and another one, of the same section, has none yet."""
    writes = [isinstance(one, Write) and "consumequeue" in one.path for one in life.disk.effects]
    return [at + 1 for at in range(len(writes) - 1) if writes[at] and any(writes[at + 1 : at + 6])]


def images(life: Life, folder: Path, random: Random) -> list[Crashed]:
    """Return stores as crashes left them, most of them between two queues' units."""
    middle, others = between_queues(life), range(1, life.disk.effect_count)
    points = [random.choice(middle) for _ in range(IMAGES // 4)] + random.sample(others, IMAGES // 6)
    found: list[Crashed] = []
    for point in sorted(set(points)):
        all_of_point = list(life.disk.images(point, 7, subset_count=3))
        for at, image in enumerate(random.sample(all_of_point, min(3, len(all_of_point)))):
            is_power_cut = "power cut" in str(image)
            place = folder / f"{point}-{at}"
            place.mkdir(parents=True)
            image.write_to(place)
            if (place / "s" / "commitlog").is_dir():  # otherwise the store does not exist yet
                promised = life.at(point, is_power_cut=is_power_cut)
                found.append(Crashed(str(image), place / "s", SIZES, promised, is_power_cut))
    return found


def has_empty_last_file(store: Path) -> bool:
    """Return whether the last file of some queue has its name but no entries."""
    queues = (queue for topic in (store / "consumequeue").iterdir() for queue in topic.iterdir())
    return any(not any(sorted(queue.iterdir())[-1].read_bytes()[:20]) for queue in queues if any(queue.iterdir()))


def test_a_crash_between_two_queues_loses_nothing(
    life: Life, tmp_path: Path, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = images(life, tmp_path, Random(verifier.java.version))
    assert len(stores) > IMAGES // 2
    with_abort = sum((one.store / "abort").exists() for one in stores)
    cuts = sum(one.is_power_cut for one in stores)
    # In both versions ConsumeQueue#truncateDirtyLogicFiles counts a unit in a last file that is all zeros.
    holed = [one for one in stores if has_empty_last_file(one.store)]
    check([one for one in stores if one not in holed], verifier, monkeypatch)
    print(f"{verifier.java.version}: {len(stores)} images, {cuts} of power cuts, {with_abort} with abort", end="")
    print(f", {len(holed)} left out")
    assert all(one.is_power_cut for one in holed)
    assert len(holed) < len(stores) // 4
