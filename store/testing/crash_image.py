"""What a disk may hold after a crash: the model of a page cache, of syncs and of sectors.

The model, which is harsher than ext4 and XFS are:

- A process that dies takes nothing with it. A write that was under way may have reached any multiple of 512 bytes.
- A power cut keeps what was synced. Of each sector (512 bytes) that was written since, it keeps any version that the
  sector ever had, whatever it keeps of other sectors, files and names.
- After a sync of a file that failed, the sectors that were written before it keep, for ever, any version that they ever
  had: no later sync writes them, only a later write of the same bytes that is synced. Processes read what was written.
- Names made and taken away in a folder since it was synced come in order: the first few of them stay. Folders are
  independent of each other and of the bytes behind the names. A folder without its name takes all in it along.
- A file made at a size has that size as soon as it has its name. One that grew by writes ends behind the last of them
  that stayed.
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

Contents = Mapping[str, bytes | None]  # path -> a file's bytes, None for a folder; each folder before what is in it


@dataclass(frozen=True, slots=True)
class Image:
    """One state of a folder after a crash. `name` says after which."""

    name: str
    contents: Contents

    def write_to(self, path: str | Path) -> None:
        """Make it real in a folder that is empty or not there yet. Zeros at the ends of files take no room."""
        os.makedirs(path, exist_ok=True)
        assert not os.listdir(path), f"{path} is not empty"
        for name, data in self.contents.items():
            target = os.path.join(path, name)
            if data is None:
                os.mkdir(target)
                continue
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.ftruncate(descriptor, len(data))  # first: a file that is cut or grown after a write costs twice
                os.write(descriptor, data.rstrip(b"\0"))
            finally:
                os.close(descriptor)

    def __str__(self) -> str:
        return self.name


def read_contents(root: str | Path) -> Contents:
    """Return everything in a folder by its relative path."""
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
    """Return the number of each file that was there before the first effect."""
    return {path: number for number, path in enumerate(path for path, data in contents.items() if data is not None)}


@dataclass(slots=True)
class _File:
    # All are whole and never changed in place: images share them, and bytes remember their hash.
    synced: bytes
    now: bytes
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    # After a failed sync: the writes that it lost, what was synced before the first of them, and synced writes since.
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
        """Return a version in which some sectors of some pending writes are on the disk."""
        synced = self.synced
        if self.lost:
            result = bytearray(_torn(self.before_lost, self.lost, random))
            for position, data in self.after_lost:
                _put(result, position, data)
            synced = bytes(result)
        return _torn(synced, self.pending, random)


def _torn(synced: bytes, writes: Sequence[tuple[int, bytes]], random: Random) -> bytes:
    versions: dict[int, int] = {}  # sector -> how many of the writes it has seen
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
        """Return the names when the first `count` pending changes are on the disk."""
        names = dict(self.synced)
        for change in self.pending[:count]:
            _rename(names, change)
        return names


_Node = _File | _Folder


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a crash leaves of one folder's names and of one file's bytes."""

    names: Callable[[_Folder], dict[str, _Node]]
    data: Callable[[_File], bytes]


class DiskState:
    """A folder's files in memory, with what of them is on the disk for good. Built from what was there before."""

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
            folder, name = self._place(path)
            folder.synced[name] = folder.now[name] = node

    def apply(self, effect: Effect) -> None:
        """Have the effect happen."""
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
                folder, name = self._place(source)
                assert folder is self._place(target)[0], f"{source} goes to another folder, {target}"
                folder.change({name: None, os.path.basename(target): folder.now[name]})
            case Remove(path) | RemoveFolder(path):
                self._change(path, None)

    def killed(self) -> Contents:
        """Return what is there when the process dies: everything that happened."""
        return self._contents(_Choice(lambda folder: folder.now, lambda file: file.now))

    def killed_while(self, effect: Write, reached: int) -> Contents:
        """Return the same with the bytes of a write that lie before position `reached`."""
        torn, piece = self._files[effect.file], effect.data[: reached - effect.position]
        part = _with_piece(torn.now, effect.position, piece)
        return self._contents(_Choice(lambda folder: folder.now, lambda file: part if file is torn else file.now))

    def cut(self, *, names: bool, data: bool) -> Contents:
        """Return what a power cut leaves that keeps all unsynced names or none, and all unsynced bytes or none."""
        return self._contents(
            _Choice(
                lambda folder: folder.now if names else folder.synced,
                lambda file: file.now if data else file.synced,
            )
        )

    def cut_anyhow(self, random: Random) -> Contents:
        """Return what a power cut may leave: of every folder and file something between nothing and all."""

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
        folder, name = self._place(path)
        folder.change({name: node})

    def _place(self, path: str) -> tuple[_Folder, str]:
        above, name = os.path.split(path)
        return self._folder(above), name

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
