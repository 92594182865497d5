"""History of an appender, kept beside the store, to judge readers of the store.

One line per event, tab-separated, appended in one write:

    w  topic  queue  offset  physical  digest     before the record's first byte
    a  topic  queue  offset  physical  digest     after the last byte of its entry
    t  physical                                   recovery moved the log's end back to here: later
                                                  messages without an `a` are truncated
    x  physical                                   the log now begins here: older segments are deleted

A message may be seen after its `w`, must be seen after its `a`, and must not be seen after a `t` that truncates it,
unless a later `a` restores it (a recovery that finds complete bytes dispatches them).
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rmq_spark.store.model import QueueKey


def digest_row(body: bytes, tags: str | None, keys: str | None, physical_offset: int, store_ms: int) -> str:
    """Return a short digest of a message's content, physical offset and store time."""
    text = f"{tags!r} {keys!r} {physical_offset} {store_ms}".encode()
    return hashlib.sha256(body + b"\0" + text).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the history: its queue, queue offset, physical offset and `digest_row`."""

    queue: QueueKey
    offset: int
    physical_offset: int
    digest: str


class AppenderLog:
    """Writes the history; one writer at a time, each event in one system call."""

    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def written(self, message: Message) -> None:
        """Note a message whose first byte is about to be written."""
        self._write(_line("w", message))

    def acknowledged(self, message: Message) -> None:
        """Note a message whose entry is complete."""
        self._write(_line("a", message))

    def truncated(self, end: int) -> None:
        """Note that the log's end moved back to a physical offset."""
        self._write(f"t\t{end}\n")

    def expired(self, begin: int) -> None:
        """Note that the log begins at a physical offset."""
        self._write(f"x\t{begin}\n")

    def _write(self, line: str) -> None:
        os.write(self._descriptor, line.encode())


def _line(kind: str, message: Message) -> str:
    queue = message.queue
    return f"{kind}\t{queue.topic}\t{queue.queue_id}\t{message.offset}\t{message.physical_offset}\t{message.digest}\n"


@dataclass(slots=True)
class History:
    """Messages that a reader may see and must see, at the moment when the history was read.

    `possible` has every message written and not truncated, by queue and offset; `acknowledged` those of them that a
    reader must see unless they are below `log_begin` (a physical offset).
    """

    possible: dict[tuple[QueueKey, int], set[Message]] = field(default_factory=dict)
    acknowledged: dict[tuple[QueueKey, int], Message] = field(default_factory=dict)
    log_begin: int = 0

    def ends(self) -> dict[QueueKey, int]:
        """Return for every queue the offset after its last acknowledged message."""
        ends: dict[QueueKey, int] = {}
        for queue, offset in self.acknowledged:
            ends[queue] = max(ends.get(queue, 0), offset + 1)
        return ends

    def fault(self, queue: QueueKey, offset: int, digest: str) -> str | None:
        """Return the fault of a row that a reader returned, None if it is right."""
        messages = self.possible.get((queue, offset), set())
        if any(message.digest == digest for message in messages):
            return None
        return f"{queue} offset {offset}: read {digest}, written were {[m.digest for m in messages] or 'none'}"


def read_history(path: str | Path) -> History:
    """Read a history; a last line that is not whole is left out."""
    history = History()
    for fields in _lines(Path(path)):
        if fields[0] in ("w", "a"):
            _, topic, queue_id, offset, place, digest = fields
            message = Message(QueueKey(topic, int(queue_id)), int(offset), int(place), digest)
            at = message.queue, message.offset
            history.possible.setdefault(at, set()).add(message)
            if fields[0] == "a":
                history.acknowledged[at] = message
        elif fields[0] == "t":
            _take_back(history, int(fields[1]))
        else:
            history.log_begin = int(fields[1])
    return history


def _take_back(history: History, end: int) -> None:
    for at, messages in history.possible.items():
        gone = {message for message in messages if message.physical_offset >= end}
        messages -= gone - {history.acknowledged.get(at)}


def _lines(path: Path) -> Iterator[list[str]]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield line[:-1].split("\t")
