"""Images: the states that a crash can leave on a disk, by a model of page cache, syncs and sectors.

The model loses more than ext4 and XFS do:

- If a process dies, no effect is lost. A write in progress may have reached any multiple of 512 bytes.
- If the power is cut, all synced data is kept. A sector (512 bytes) that was written after the last sync may have any
  version that it ever had. This is independent of other sectors, files and names.
- If a sync of a file fails, processes still read the written data. But on the disk, the sectors that were written
  before the failed sync may have any version that they ever had. A later sync does not write them. They become durable
  only if the same bytes are written again and then synced.
- If names were created or removed in a folder after its last sync, the first few of these changes survive, in their
  order. This is independent of other folders, and of the bytes of files. A folder that loses its name loses all its
  content.
- A file that is created with a size has this size as soon as it has its name. A file that grew by writes ends after the
  last write that survived.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from rmq_spark.store.testing.disk_effects import (
    Create,
    Effect,
    FailedSync,
    MakeFolder,
    Remove,
    RemoveFolder,
    Rename,
    Sync,
    SyncFolder,
    Write,
)

SECTOR_BYTES = 512

Contents = Mapping[
    str, bytes | None
]  # path -> the bytes of a file, None for a folder; a folder comes before its content


@dataclass(frozen=True, slots=True)
class Image:
    """The state of a folder after a crash. `name` describes the crash."""

    name: str
    contents: Contents

    def write_to(self, path: str | Path) -> None:
        """Write the files to `path`, an empty or missing folder. Zeros at the ends of files become holes."""
        os.makedirs(path, exist_ok=True)
        assert not os.listdir(path), f"{path} is not empty"
        for name, data in self.contents.items():
            target = os.path.join(path, name)
            if data is None:
                os.mkdir(target)
                continue
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.ftruncate(
                    descriptor, len(data)
                )  # set the size before the write, because it takes twice as long after the write
                os.write(descriptor, data.rstrip(b"\0"))
            finally:
                os.close(descriptor)

    def __str__(self) -> str:
        return self.name


def read_contents(root: str | Path) -> Contents:
    """Return the content of a folder: a dict from relative path to the bytes of a file, or None for a folder."""
    found: dict[str, bytes | None] = {}
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in folders:
            found[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in sorted(names):
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = Path(path).read_bytes()
    return found


def number_files(contents: Contents) -> dict[str, int]:
    """Return a dict from the path of each file in `contents` to its number. Folders have no number."""
    return {path: number for number, path in enumerate(path for path, data in contents.items() if data is not None)}


@dataclass(slots=True)
class _File:
    # Both are complete contents. They are never changed in place, because images share them and bytes cache their hash.
    synced: bytes
    now: bytes
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    # Used after a failed sync: the writes that it lost, the synced content before the first of these writes, and the
    # writes that later syncs made durable.
    lost: list[tuple[int, bytes]] = field(default_factory=list)
    before_lost: bytes = b""
    after_lost: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, position: int, data: bytes) -> None:
        self.now = _with_piece(self.now, position, data)
        self.pending.append((position, data))

    def sync(self) -> None:
        if self.lost:
            for position, data in self.pending:
                self.synced = _with_piece(self.synced, position, data)
            self.after_lost += self.pending
        else:
            self.synced = self.now
        self.pending.clear()

    def fail_sync(self) -> None:
        if not self.lost:
            self.before_lost = self.synced
        self.lost += self.pending
        self.pending.clear()

    def torn(self, random: Random) -> bytes:
        """Return a random version in which only some sectors of the pending and lost writes are durable."""
        synced = self.synced
        if self.lost:
            result = bytearray(_torn(self.before_lost, self.lost, random))
            for position, data in self.after_lost:
                _put(result, position, data)
            synced = bytes(result)
        return _torn(synced, self.pending, random)


def _torn(synced: bytes, writes: Sequence[tuple[int, bytes]], random: Random) -> bytes:
    versions: dict[int, int] = {}  # sector -> how many of the writes, from the first, its version includes
    for number, (position, data) in enumerate(writes):
        kept = random.choice((0.0, 0.5, 1.0))
        for sector in _sectors(position, len(data)):
            if random.random() < kept:
                versions[sector] = number + 1
    result = bytearray(synced)
    for number, (position, data) in enumerate(writes):
        for sector in _sectors(position, len(data)):
            if number < versions.get(sector, 0):
                begin = max(position, sector * SECTOR_BYTES)
                _put(result, begin, data[begin - position : (sector + 1) * SECTOR_BYTES - position])
    return bytes(result)


@dataclass(slots=True)
class _Folder:
    synced: dict[str, "_Node"] = field(default_factory=dict)
    now: dict[str, "_Node"] = field(default_factory=dict)
    pending: list[dict[str, "_Node | None"]] = field(default_factory=list)

    def change(self, names: dict[str, "_Node | None"]) -> None:
        _rename(self.now, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.synced = dict(self.now)
        self.pending.clear()

    def after(self, count: int) -> dict[str, "_Node"]:
        """Return the names that the folder has if only the first `count` pending changes are durable."""
        names = dict(self.synced)
        for change in self.pending[:count]:
            _rename(names, change)
        return names


_Node = _File | _Folder


@dataclass(frozen=True, slots=True)
class _Choice:
    """Two functions that choose what a crash leaves: the names in a folder, and the bytes of a file."""

    names: Callable[[_Folder], dict[str, _Node]]
    data: Callable[[_File], bytes]


class DiskState:
    """The files and folders in one folder, in memory: their current and their synced versions."""

    def __init__(self, contents: Contents) -> None:
        self._root = _Folder()
        self._files: dict[int, _File] = {}
        numbers = number_files(contents)
        for path, data in contents.items():
            node: _Node
            if data is None:
                node = _Folder()
            else:
                node = self._files[numbers[path]] = _File(data, data)
            folder, name = self._locate(path)
            folder.synced[name] = folder.now[name] = node

    def apply(self, effect: Effect) -> None:
        """Apply the next effect to the state."""
        match effect:
            case MakeFolder(path):
                self._change(path, _Folder())
            case Create(path, number, size_bytes, position, data):
                content = _with_piece(bytes(size_bytes), position, data)
                self._files[number] = _File(content, content)
                self._change(path, self._files[number])
            case Write(_, number, position, data):
                self._files[number].write(position, data)
            case Sync(_, number):
                self._files[number].sync()
            case FailedSync(_, number):
                self._files[number].fail_sync()
            case SyncFolder(path):
                self._folder(path).sync()
            case Rename(source, target):
                folder, name = self._locate(source)
                assert folder is self._locate(target)[0], f"{source} is renamed to another folder, {target}"
                folder.change({name: None, os.path.basename(target): folder.now[name]})
            case Remove(path) | RemoveFolder(path):
                self._change(path, None)

    def killed(self) -> Contents:
        """Return the content after the process was killed. It has all effects."""
        return self._contents(_Choice(lambda folder: folder.now, lambda file: file.now))

    def killed_while(self, effect: Write, reached: int) -> Contents:
        """Return the content after the process was killed within the write `effect`.

        The write changed the bytes up to the position `reached` in the file, and no later ones.
        """
        torn, piece = self._files[effect.file], effect.data[: reached - effect.position]
        part = _with_piece(torn.now, effect.position, piece)
        return self._contents(_Choice(lambda folder: folder.now, lambda file: part if file is torn else file.now))

    def cut(self, *, names: bool, data: bool) -> Contents:
        """Return the content after a power cut.

        If `names` is True, all unsynced names are kept, else none. If `data` is True, all unsynced bytes are kept, else
        none.
        """
        return self._contents(
            _Choice(
                lambda folder: folder.now if names else folder.synced,
                lambda file: file.now if data else file.synced,
            )
        )

    def cut_anyhow(self, random: Random) -> Contents:
        """Return the content after a power cut of which a random part of the unsynced names and bytes survives."""

        def names(folder: _Folder) -> dict[str, _Node]:
            count = len(folder.pending)
            return folder.after(random.choice((0, count, random.randint(0, count))))

        def data(file: _File) -> bytes:
            which = random.randrange(4) if file.pending or file.lost else 0
            return file.torn(random) if which > 1 else (file.now if which else file.synced)

        return self._contents(_Choice(names, data))

    def _contents(self, choice: _Choice) -> Contents:
        return dict(_walk(self._root, "", choice))

    def _change(self, path: str, node: "_Node | None") -> None:
        folder, name = self._locate(path)
        folder.change({name: node})

    def _locate(self, path: str) -> tuple[_Folder, str]:
        parent, name = os.path.split(path)
        return self._folder(parent), name

    def _folder(self, path: str) -> _Folder:
        node: _Node = self._root
        for name in path.split("/") if path not in ("", ".") else ():
            assert isinstance(node, _Folder), path
            node = node.now[name]
        assert isinstance(node, _Folder), path
        return node


def _walk(folder: _Folder, prefix: str, choice: _Choice) -> Iterator[tuple[str, bytes | None]]:
    for name, node in choice.names(folder).items():
        if isinstance(node, _Folder):
            yield prefix + name, None
            yield from _walk(node, f"{prefix}{name}/", choice)
        else:
            yield prefix + name, choice.data(node)


def _rename(names: dict[str, _Node], change: Mapping[str, "_Node | None"]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _with_piece(data: bytes, position: int, piece: bytes) -> bytes:
    changed = bytearray(data)
    _put(changed, position, piece)
    return bytes(changed)


def _put(data: bytearray, position: int, piece: bytes) -> None:
    if len(data) < position:
        data.extend(bytes(position - len(data)))
    data[position : position + len(piece)] = piece


def _sectors(position: int, size: int) -> range:
    return range(position // SECTOR_BYTES, -(-(position + size) // SECTOR_BYTES))
