"""The lives of a broker that writes all kinds of records, and its store: live, killed, clean, trimmed."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import rmq_spark
from compat_kit import kinds
from compat_kit.lookups import broker_differences
from compat_kit.our_stores import broker_conf
from compat_kit.rocketmq import Broker, Client, Java
from compat_kit.rows import Rows, follow, their_rows
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.model import QueueKey

SIZES = FileSizes(5 << 20, 2000, 460, IndexShape(1000, 4000))  # a message of 4 MiB fits into a segment
CONF: dict[str, object] = broker_conf(SIZES) | {
    "timerWheelEnable": True,
    "messageDelayLevel": kinds.LEVELS,
    "transactionCheckInterval": 2000,
    "transactionTimeOut": 1000,
    "fileReservedTime": 1,
    "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
}
EXTENDED: dict[str, object] = {  # 4.9 ignores unknown options
    "enabledAppendPropCRC": True,
    "enableConsumeQueueExt": True,
    "enableCalcFilterBitMap": True,
    "mappedFileSizeConsumeQueueExt": 1 << 16,
}
TOLD = {name: CONF[name] for name in ("maxHashSlotNum", "maxIndexNum", "messageDelayLevel")}  # not stored in any file
_OLDEST_ADDRESS = -(1 << 31) - 1  # a tags code up to it is the address of an extension
_UNIT = np.dtype([("place", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])


@dataclass
class Live:
    """Messages that our reader and the real client read from a store while the broker ran.

    `ours` came from one reader that followed the broker from its start; `earlier` was pulled before its last refresh,
    `later` after it. `problems`: errors of the follower, and look-ups that the broker answers differently.
    """

    ours: Rows
    earlier: Rows
    later: Rows
    extended: set[int]
    looks: int
    problems: list[str]


class Lives:
    """A broker's lives in a folder. Each state is built on first use, after the earlier ones."""

    def __init__(self, java: Java, folder: Path) -> None:
        self.java, self.folder, self.store = java, folder, folder / "store"
        self._failure: BaseException | None = None

    @cached_property
    def first(self) -> Live:
        """A life on ::1, with extended units (and property CRCs in 5.x), killed while it takes messages."""
        broker = Broker(self.java, self.store, "::1", **CONF, **EXTENDED)
        with self._born(broker) as client, Follower(self.store) as follower:
            kinds.create_topics(client, self.java.version)
            live = self._write_and_look(client, follower, 1)
            client("keep-producing", topic=kinds.topic_of("plain"), pauseMs=0)
            time.sleep(0.5)
            broker.kill()
        return live

    @cached_property
    def killed(self) -> Path:
        """The store as kill -9 of the first life left it."""
        assert self.first.ours
        return copy_of(self.store, self.folder / "killed")

    @cached_property
    def second(self) -> Live:
        """A life on 127.0.0.1 that recovers, continues, and ends with a clean shutdown."""
        assert self.killed
        broker = Broker(self.java, self.store, **CONF)
        with self._born(broker) as client, Follower(self.store) as follower:
            live = self._write_and_look(client, follower, 3)
            client.program.end()
            broker.stop()
        return live

    @cached_property
    def clean(self) -> Path:
        """The store as the second life closed it."""
        assert self.second.ours
        return self.store

    @cached_property
    def trimmed(self) -> tuple[Path, Rows]:
        """The store after a third life that deleted the oldest segments and was killed, and the rows that it served."""
        store = copy_of(self.clean, self.folder / "trimmed")
        os.utime(min((store / "commitlog").iterdir()), (1, 1))
        broker = Broker(self.java, store, **CONF)
        with self._born(broker) as client:
            assert broker.expire() == SIZES.segment_bytes
            pulled = pull_all(client, list(self.second.later))
            broker.kill()
        return store, pulled

    @contextmanager
    def _born(self, broker: Broker) -> Iterator[Client]:
        if self._failure is not None:
            raise RuntimeError(f"a life that failed is not lived again: {self._failure!r}")
        broker.start()
        client = Client(broker)
        try:
            yield client
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            client.program.kill()
            broker.kill()

    def _write_and_look(self, client: Client, follower: "Follower", seed: int) -> Live:
        version = self.java.version
        kinds.write_round(client, version, seed)
        kinds.write_returned(client)
        kinds.write_round(client, version, seed + 1)
        client("keep-producing", topic=kinds.topic_of("plain"), pauseMs=2)
        time.sleep(4)  # delayed, undecided and undelivered messages arrive
        queues = list(follower.stop())
        earlier = pull_all(client, queues)
        ours = follower.refresh()
        later = pull_all(client, queues)
        client("stop-producing")
        pulled = {queue: rows for queue, rows in ours.items() if queue in later}
        problems = follower.problems + broker_differences(self.store, client, pulled, self.java)
        return Live(ours, earlier, later, extended_places(self.store), follower.looks, problems)


class Follower:
    """A reader of ours that follows a store from its first file on, in a thread, and keeps all that it saw."""

    def __init__(self, store: Path) -> None:
        self.rows: Rows = {}
        self.problems: list[str] = []
        self.looks = 0
        self._reader = rmq_spark.open_reader(str(store))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._reader.close()

    def stop(self) -> Rows:
        """Stop following in the background; return the rows read."""
        self._stopped.set()
        self._thread.join()
        return self.rows

    def refresh(self) -> Rows:
        """Refresh once more after the stop; return all rows read."""
        follow(self._reader, self.rows)
        return self.rows

    def _run(self) -> None:
        while not self._stopped.wait(0.1):
            try:
                follow(self._reader, self.rows)
            except Exception as error:  # of any kind: a test shows it
                self.problems.append(repr(error))
                return
            self.looks += 1


def pull_all(client: Client, queues: list[QueueKey]) -> Rows:
    """Return the messages that a pull consumer gets from these queues' topics.

    Some internal topics of RocketMQ are not at the name server: only the store classes read them.
    """
    topics = sorted({queue.topic for queue in queues if queue.topic != "BenchmarkTest"})  # empty, with 1024 queues
    lines = client("pull", topic=topics, group="compat_pull")
    unknown = {line["topic"] for line in lines if "noRoute" in line}
    assert not {topic for topic in unknown if topic.startswith(("%", kinds.PREFIX))}, unknown
    found: Rows = {queue: [] for queue in queues if queue.topic not in unknown}
    return found | their_rows(line for line in lines if line["event"] == "message")


def extended_places(store: Path) -> set[int]:
    """Return the physical offsets of the messages whose entries are extended."""
    found: set[int] = set()
    for path in (store / "consumequeue").rglob("*"):
        if path.is_file():
            units = np.frombuffer(path.read_bytes(), _UNIT)
            found.update(units["place"][(units["tags_code"] <= _OLDEST_ADDRESS)].tolist())
    return found


def copy_of(store: Path, target: Path) -> Path:
    """Copy a store, holes and modification times too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.which("cp"):
        subprocess.run(["cp", "-a", "--sparse=always", str(store), str(target)], check=True)
    else:
        shutil.copytree(store, target, copy_function=shutil.copy2)
    return target
