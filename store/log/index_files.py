"""The files of the key index in their folder, for a writer: their names, headers and shapes, and how they are made.

Names are the local time of making and ascend with age. Every file is full, or was given up, but the newest.
Source: IndexService#load, #getAndCreateLastIndexFile (4.9, 5.3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.index_file import (
    INDEX_HEADER,
    IndexHeader,
    IndexShape,
    decode_header,
    encode_header,
    learn_shape,
)
from rmq_spark.store.format.index_keys import seeded_header
from rmq_spark.store.log.changes import Changes


@dataclass(slots=True)
class KnownFile:
    """An index file as it is on disk. `shape` is None where nobody knows it: no key is put into such a file."""

    name: str
    path: str
    size: int  # bytes
    header: IndexHeader
    shape: IndexShape | None = None

    @property
    def room(self) -> int:
        """Return how many keys fit."""
        return self.shape.unit_count - max(self.header.next_unit, 1) if self.shape else 0


class IndexFiles:
    """The index files of the store at `root`, each looked at when it is first asked for, until `look`.

    `shape` is for files of a store that has none to learn it from. `now_ms` is the clock that names files.
    """

    def __init__(self, root: str, disk: Disk, shape: IndexShape, now_ms: Callable[[], int], changes: Changes) -> None:
        assert shape.slot_count > 0, shape
        assert shape.unit_count > 1, shape
        self.folder = files.join(root, filenames.INDEX)
        self._root, self._disk, self._changes = root, disk, changes
        self._shape, self._now_ms = shape, now_ms
        self._shapes: dict[str, IndexShape] = {}  # by name; a file never changes its shape
        self._known: dict[str, KnownFile] = {}
        self._names: list[str] | None = None
        self._highest_name = ""

    def look(self) -> None:
        """Forget what was known of the disk."""
        self._names = None

    @property
    def names(self) -> list[str]:
        """Return the names, oldest first; what is not named as a broker names it is passed over."""
        if self._names is None:
            entries = [entry for entry in files.list_folder(self.folder) if filenames.is_index_name(entry[0])]
            self._highest_name = entries[-1][0] if entries else ""
            self._names, self._known = [name for name, is_folder in entries if not is_folder], {}
        return self._names

    def path(self, name: str) -> str:
        """Return where the file of that name lies."""
        return files.join(self.folder, name)

    def file(self, name: str) -> KnownFile:
        """Return a file; its shape is filled in by `learn`."""
        file = self._known.get(name)
        if file is None:
            with files.OpenFile(self.path(name)) as opened:
                header = decode_header(opened.read(0, INDEX_HEADER.itemsize))
                file = KnownFile(name, opened.path, opened.size(), header, self._shapes.get(name))
            self._known[name] = file
        return file

    def last(self) -> KnownFile | None:
        """Return the newest file, its shape filled in; None without a file."""
        if not self.names:
            return None
        file = self.file(self.names[-1])
        self.learn(file)
        return file

    def learn(self, file: KnownFile) -> None:
        """Find out a file's shape. An empty file proves none: then what the newest of its length proves."""
        if file.shape is None and file.header.is_empty:
            for other in map(self.file, reversed(self.names)):
                if file.shape is None and other.size == file.size and not other.header.is_empty:
                    self.learn(other)
                    file.shape = other.shape
        if file.shape is None:
            with files.OpenFile(file.path) as opened:
                file.shape = learn_shape(opened.read, file.size, self._shape)
        if file.shape is not None:
            self._shapes[file.name] = file.shape

    def make(self, last: KnownFile | None) -> KnownFile:
        """Make the file that follows `last`, of its shape. It says in its header where that one ended.

        A crash in between leaves an empty file, which the next writer's keys go into or its repair deletes.
        """
        shape = (last.shape if last else None) or self._shape
        header = seeded_header(last.header) if last else IndexHeader()
        name = self._new_name()
        if last is None:  # the folder may be there, made by a writer that died: its name is synced with ours
            self._disk.make_folder(self.folder)
            self._changes.note_new_folder(self.folder, self._root)
        path = self.path(name)
        self._disk.create(path, shape.file_bytes)
        self._changes.note_new_file(path)
        self.names.append(name)
        file = self._known[name] = KnownFile(name, path, shape.file_bytes, header, shape)
        self._highest_name, self._shapes[name] = name, shape
        if header != IndexHeader():
            with self._disk.open(path) as opened:
                opened.write(0, encode_header(header))
        return file

    def forget(self, name: str) -> None:
        """Leave a file out that was deleted."""
        del self.names[self.names.index(name)]

    def _new_name(self) -> str:
        """Return a name above all that are there: the local time, or one more where the clock was set back."""
        seconds, ms = divmod(self._now_ms(), 1000)
        name = f"{datetime.fromtimestamp(seconds):%Y%m%d%H%M%S}{ms:03d}"
        if name > self._highest_name:
            return name
        name = f"{int(self._highest_name) + 1:0{filenames.INDEX_NAME_DIGITS}d}"
        if not filenames.is_index_name(name):
            raise StorePathError(
                f"{self.path(self._highest_name)} leaves no name for a newer file of the key index, whose names are "
                "times and ascend. Move that file away: no broker wrote it."
            )
        return name
