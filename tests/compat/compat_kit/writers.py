"""A process of ours that appends on and on until it is killed or refused, and where every acknowledged message is."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from compat_kit.rows import our_rows

TOPIC, QUEUES = "shared", 3

_WRITER = """
import json, sys
from rmq_spark.store.errors import RmqError
from compat_kit import our_stores
import pyarrow as pa

path, topic, queues, name, settle_every = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
store, first, calls = our_stores.open_small(path), 0, 0
while True:
    numbers = range(first, first + (1, 3, 17)[calls % 3])
    first, calls = numbers.stop, calls + 1
    rows = [dict(body=f"{name}-{n}".ljust(1500).encode(), keys=f"{name}-{n}", queueId=n % queues) for n in numbers]
    table = pa.table({"body": [row["body"] for row in rows], "keys": [row["keys"] for row in rows],
                      "queueId": pa.array([row["queueId"] for row in rows], pa.int32())})
    try:
        sent = store.send_many(table, topic=topic).to_pylist()
        if calls % settle_every == 0:
            store.settle()
    except RmqError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        break
    places = [[row["queueId"], row["queueOffset"], f"{name}-{n}"] for row, n in zip(sent, numbers)]
    print(json.dumps(places), flush=True)
"""


@dataclass
class Notes:
    """Texts of messages by queue id and queue offset. Bodies are padded with blanks."""

    places: dict[tuple[int, int], str] = field(default_factory=dict)

    def add(self, queue_id: int, offset: int, text: str) -> None:
        """Note an acknowledged message. Raises AssertionError if another one was acknowledged there."""
        assert (queue_id, offset) not in self.places, f"{text} is where {self.places[(queue_id, offset)]} is"
        self.places[(queue_id, offset)] = text

    def ends(self) -> list[int]:
        """Return the offset after the last message noted, of every queue."""
        return [max((offset + 1 for queue, offset in self.places if queue == one), default=0) for one in range(QUEUES)]

    def problems(self, store: Path) -> list[str]:
        """Return the acknowledged messages that our reader misses or finds twice, and gaps."""
        rows = {queue.queue_id: held for queue, held in our_rows(store).items() if queue.topic == TOPIC}
        lines, bodies = [], []
        for queue_id, held in rows.items():
            if [row["queueOffset"] for row in held] != list(range(len(held))):
                lines.append(f"queue {queue_id} has gaps")
            bodies += [row["body"] for row in held]
        if len(set(bodies)) != len(bodies):
            lines.append(f"{len(bodies) - len(set(bodies))} messages are stored twice")
        for (queue_id, offset), text in self.places.items():
            held = rows.get(queue_id, [])
            if offset >= len(held) or held[offset]["body"] not in (_digest(text), _digest(text.ljust(1500))):
                lines.append(f"{text} is not at {offset} of queue {queue_id}")
        return lines


def _digest(text: str) -> tuple[int, str]:
    return len(text), hashlib.sha1(text.encode()).hexdigest()


class Writer:
    """The process, as a context: it is killed at the end if it still runs. `said` is the error that refused it."""

    def __init__(self, store: Path, name: str, notes: Notes, settle_every: int = 7) -> None:
        arguments = [str(store), TOPIC, str(QUEUES), name, str(settle_every)]
        place = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(place)])},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self.count = 0
        self._notes, self._moved = notes, threading.Condition()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def wait_for(self, count: int) -> None:
        """Wait until `count` calls were acknowledged, or the writer ended."""
        with self._moved:
            self._moved.wait_for(lambda: self.count >= count or not self._reading.is_alive(), 60)

    def end(self) -> str:
        """Wait until it was refused; return with which words."""
        self._reading.join(120)
        self._process.wait(120)
        return self.said

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._reading.join()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # otherwise it was killed while writing it
                    self._take(json.loads(line))
        with self._moved:
            self._moved.notify_all()

    def _take(self, found: dict[str, str] | list[tuple[int, int, str]]) -> None:
        with self._moved:
            if isinstance(found, dict):
                self.said = found["refused"]
                return
            for queue_id, offset, text in found:
                self._notes.add(queue_id, offset, text)
            self.count += 1
            self._moved.notify_all()
