"""Seeded damage to a copy of a store: bytes flipped, zeroed, cut, swapped; files deleted, duplicated, foreign.

A `MutableStore` is a tree of hard links to a pristine copy. A mutation replaces the link by a new file, so the pristine
files do not change and a case costs only the file that it changes. Half of the mutations of bytes change fields
(headers of records, entries, header fields), the others change random positions.
"""

import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT, QUEUE_UNIT
from rmq_spark.store.format.record import Blank, Record, decode_record

_FOREIGN_NAMES = (
    "core",
    ".DS_Store",
    "00000000000000000000.bak",
    "1",
    "9" * 20,
    "0" * 21,
    "ü",
    "MANIFEST-000001",
    "tmp",
)
_NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    65535,
    2**31 - 1,
    -(2**31),
    2**31,
    2**62,
    2**63 - 1,
    -(2**63),
    20,
    91,
    1 << 30,
)


class MutableStore:
    """A store that can be damaged and restored. One thread at a time.

    `pristine` must not change meanwhile. `others` are stores whose files are mixed in. `weights` are the weights of
    folders, and of files at the top, in the choice of a file; 1 by default.
    """

    def __init__(
        self, pristine: Path, work: Path, others: Sequence[Path] = (), weights: Mapping[str, int] | None = None
    ) -> None:
        self.path = work
        self._weights = _WEIGHTS if weights is None else weights
        self._pristine, self._others = pristine, others
        self._touched: list[Path] = []
        self._links = [path.relative_to(pristine) for path in sorted(pristine.rglob("*")) if path.is_file()]
        for relative in self._links:
            self._link(relative)
        self._places = {relative: _places(pristine / relative) for relative in self._links}

    def mutate(self, random: Random) -> list[str]:
        """Damage the store in one way, rarely in two or three; return a description."""
        count = random.choices((1, 2, 3), (85, 10, 5))[0]
        return [self._one(random) for _ in range(count)]

    def restore(self) -> None:
        """Restore the store."""
        for path in self._touched:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._touched.clear()
        for relative in self._links:
            if not (self.path / relative).exists():
                self._link(relative)

    def changed(self) -> set[str]:
        """Return the paths, relative to the store, that were touched since it was whole."""
        return {str(path.relative_to(self.path)) for path in self._touched}

    def _link(self, relative: Path) -> None:
        target = self.path / relative
        if target.parent.is_file():
            target.parent.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(self._pristine / relative, target)

    def _one(self, random: Random) -> str:
        if random.random() < 0.82:
            return self._change_bytes(random)
        return random.choice(_FILE_OPERATIONS)(self, random)

    def _file(self, random: Random) -> Path:
        """Choose an existing file, mostly of the log or the queues, from which rows are read."""
        groups: dict[str, list[Path]] = {}
        for relative in self._links:
            if (self.path / relative).is_file():
                groups.setdefault(_group(relative), []).append(relative)
        names = sorted(groups)
        name = random.choices(names, [self._weights.get(name, 1) for name in names])[0]
        return random.choice(groups[name])

    def _change_bytes(self, random: Random) -> str:
        relative = self._file(random)
        data = bytearray((self.path / relative).read_bytes())
        if not data:
            data += random.randbytes(random.randint(1, 64))
            what = f"{len(data)} bytes in the empty file"
        else:
            what = random.choice(_BYTE_OPERATIONS)(random, data, self._places[relative])
        self._put(relative, bytes(data))
        return f"{relative}: {what}"

    def _put(self, relative: Path, data: bytes) -> None:
        path = self.path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a hard link: writing into it would change the pristine file
        self._touched.append(path)
        path.write_bytes(data)

    def delete_file(self, random: Random) -> str:
        """Delete one file."""
        relative = self._file(random)
        self._touched.append(self.path / relative)
        (self.path / relative).unlink()
        return f"{relative}: deleted"

    def delete_folder(self, random: Random) -> str:
        """Delete a file's folder with all that is in it."""
        relative = self._file(random).parent
        if relative == Path():
            return self.delete_file(random)
        self._touched += [self.path / link for link in self._links if relative in link.parents]
        shutil.rmtree(self.path / relative)
        return f"{relative}/: deleted"

    def swap_files(self, random: Random) -> str:
        """Exchange two files."""
        one, other = self._file(random), self._file(random)
        first, second = (self.path / one).read_bytes(), (self.path / other).read_bytes()
        self._put(one, second)
        self._put(other, first)
        return f"{one} and {other}: swapped"

    def copy_over(self, random: Random) -> str:
        """Put a copy of one file in another's place."""
        one, other = self._file(random), self._file(random)
        self._put(other, (self.path / one).read_bytes())
        return f"{other}: replaced by a copy of {one}"

    def double_file(self, random: Random) -> str:
        """Put a copy of a file beside it, under a neighbour's or a foreign name."""
        relative = self._file(random)
        data = (self.path / relative).read_bytes()
        begin = filenames.parse_segment_name(relative.name)
        name = random.choice(_FOREIGN_NAMES)
        if begin is not None and random.random() < 0.8:
            step = random.choice((len(data), -len(data), 1, 20, 2 * len(data)))
            name = filenames.segment_name(min(max(begin + step, 0), filenames.MAX_OFFSET))
        self._put(relative.with_name(name), data)
        return f"{relative.with_name(name)}: a copy of {relative.name}"

    def rename_file(self, random: Random) -> str:
        """Give a file another name of its kind."""
        relative = self._file(random)
        data = (self.path / relative).read_bytes()
        begin = filenames.parse_segment_name(relative.name)
        name = random.choice(_FOREIGN_NAMES)
        if begin is not None:
            name = filenames.segment_name(begin + random.choice((1, 20, 46, len(data), 10 * len(data))))
        self._touched.append(self.path / relative)
        (self.path / relative).unlink()
        self._put(relative.with_name(name), data)
        return f"{relative}: renamed to {name}"

    def add_file(self, random: Random) -> str:
        """Put a foreign file, or an empty one, into some folder."""
        folder = self._file(random).parent
        name = random.choice((*_FOREIGN_NAMES, filenames.ABORT, filenames.LOCK))
        data = random.choice((b"", random.randbytes(random.randint(1, 300))))
        self._put(folder / name, data)
        return f"{folder / name}: {len(data)} foreign bytes"

    def add_folder(self, random: Random) -> str:
        """Put an empty folder somewhere, sometimes in a file's place."""
        relative = self._file(random)
        if random.random() < 0.5:
            self._touched.append(self.path / relative)
            (self.path / relative).unlink()
        else:
            relative = relative.with_name(random.choice((*_FOREIGN_NAMES, "5", "0")))
        if (self.path / relative).exists():
            return f"{relative}: nothing, it exists"
        self._touched.append(self.path / relative)
        (self.path / relative).mkdir()
        return f"{relative}: an empty folder"

    def take_from_another(self, random: Random) -> str:
        """Replace a file by one of the same path, or any, of another store."""
        if not self._others:
            return self.swap_files(random)
        other = random.choice(list(self._others))
        relative = self._file(random)
        source = other / relative
        if not source.is_file():
            source = random.choice([path for path in sorted(other.rglob("*")) if path.is_file()])
        self._put(relative, source.read_bytes())
        return f"{relative}: replaced by {source.relative_to(other)} of {other.name}"

    def dangle(self, random: Random) -> str:
        """Replace a file by a symbolic link that leads nowhere, or to itself.

        A link to itself is an error of the kernel for whoever looks it up. A reader looks up `lock` by its path, so
        there the link leads nowhere.
        """
        relative = self._file(random)
        path = self.path / relative
        path.unlink()
        self._touched.append(path)
        target = random.choice(("nowhere", relative.name))
        path.symlink_to("nowhere" if relative.name == "lock" else target)
        return f"{relative}: a dangling link"


_FILE_OPERATIONS: list[Callable[[MutableStore, Random], str]] = [
    MutableStore.delete_file,
    MutableStore.delete_file,
    MutableStore.delete_folder,
    MutableStore.swap_files,
    MutableStore.copy_over,
    MutableStore.double_file,
    MutableStore.rename_file,
    MutableStore.add_file,
    MutableStore.add_folder,
    MutableStore.take_from_another,
    MutableStore.dangle,
]

_WEIGHTS = {
    "commitlog": 20,
    "consumequeue": 20,
    "batchconsumequeue": 20,
    "consumequeue_ext": 3,
    "index": 3,
    "config": 3,
}


def _group(relative: Path) -> str:
    return relative.parts[0] if len(relative.parts) > 1 else relative.name


def _places(path: Path) -> list[int]:
    """Return positions in a file where something begins: records and their fields, units."""
    tree, data = _tree(path), path.read_bytes()
    if tree == filenames.COMMIT_LOG:
        return _record_places(data)
    sizes = {filenames.CONSUME_QUEUE: QUEUE_UNIT.itemsize, filenames.BATCH_CONSUME_QUEUE: BATCH_UNIT.itemsize}
    size = sizes.get(tree)
    if size is None:
        return list(range(0, min(len(data), 400), 4))
    layout = QUEUE_UNIT if tree == filenames.CONSUME_QUEUE else BATCH_UNIT
    steps = [field[1] for field in (layout.fields or {}).values()]
    written = len(data.rstrip(b"\0")) // size + 2  # and two units after the last
    return [unit * size + step for unit in range(min(written, len(data) // size)) for step in steps]


def _tree(path: Path) -> str:
    trees = (filenames.COMMIT_LOG, filenames.CONSUME_QUEUE, filenames.BATCH_CONSUME_QUEUE)
    return next((part for part in path.parts[::-1] if part in trees), "")


def _record_places(data: bytes) -> list[int]:
    places: list[int] = []
    at = 0
    view = memoryview(data)
    while at < len(data):
        found = decode_record(view[at:])
        if isinstance(found, Blank):
            return [*places, at, at + 4]
        if not isinstance(found, Record):
            break
        tail = at + found.total_size - len(found.properties) - 2 - len(found.topic) - 1
        places += [at + step for step in (0, 4, 8, 12, 16, 20, 28, 36, 40, 48, 56, 64, 72, 76, 84, 88)]
        places += [
            tail - 1,
            tail,
            tail + 1,
            at + found.total_size - len(found.properties) - 2,
            at + found.total_size - 1,
        ]
        at += found.total_size
    return [*places, at, at + 4, at + 8]


def _place(random: Random, data: bytearray, places: list[int]) -> int:
    if places and random.random() < 0.6:
        return min(random.choice(places), len(data) - 1)
    return random.randrange(len(data))


def _flip(random: Random, data: bytearray, places: list[int]) -> str:
    at, bit = _place(random, data, places) + random.randrange(8), random.randrange(8)
    at = min(at, len(data) - 1)
    data[at] ^= 1 << bit
    return f"bit {bit} of byte {at} flipped"


def _set_byte(random: Random, data: bytearray, places: list[int]) -> str:
    at, value = _place(random, data, places), random.randrange(256)
    data[at] = value
    return f"byte {at} set to {value}"


def _set_number(random: Random, data: bytearray, places: list[int]) -> str:
    at, width = _place(random, data, places), random.choice((2, 4, 8))
    at = min(at, max(len(data) - width, 0))
    width = min(width, len(data))
    old = int.from_bytes(data[at : at + width], "big", signed=True)
    number = random.choice((*_NUMBERS, old + 1, old - 1, old + 20, old * 2, old ^ 1))
    data[at : at + width] = struct.pack(">Q", number % 2**64)[8 - width :]
    return f"{width} bytes at {at} set to {number}"


def _zero(random: Random, data: bytearray, places: list[int]) -> str:
    at, count = _place(random, data, places), random.choice((1, 4, 8, 20, 46, 512, 4096, len(data)))
    count = min(count, len(data) - at)
    data[at : at + count] = bytes(count)
    return f"{count} bytes at {at} zeroed"


def _noise(random: Random, data: bytearray, places: list[int]) -> str:
    at, count = _place(random, data, places), random.choice((2, 8, 20, 100, 512))
    count = min(count, len(data) - at)
    data[at : at + count] = random.randbytes(count)
    return f"{count} bytes at {at} of noise"


def _cut(random: Random, data: bytearray, places: list[int]) -> str:
    at = random.choice((0, 1, _place(random, data, places), random.randrange(len(data))))
    del data[at:]
    return f"cut to {len(data)} bytes"


def _lengthen(random: Random, data: bytearray, places: list[int]) -> str:
    count = random.choice((1, 20, min(len(data), 1 << 24)))
    data += random.choice((bytes, random.randbytes))(count)
    return f"{count} bytes more"


def _swap_ranges(random: Random, data: bytearray, places: list[int]) -> str:
    one, other = sorted((_place(random, data, places), _place(random, data, places)))
    count = min(random.choice((4, 8, 20, 46, 100)), other - one, len(data) - other)
    data[one : one + count], data[other : other + count] = data[other : other + count], data[one : one + count]
    return f"{count} bytes at {one} and {other} swapped"


def _copy_range(random: Random, data: bytearray, places: list[int]) -> str:
    source, target = _place(random, data, places), _place(random, data, places)
    count = min(random.choice((4, 8, 20, 46, 200, 1000)), len(data) - max(source, target))
    data[target : target + count] = data[source : source + count]
    return f"{count} bytes at {source} copied to {target}"


def _remove_range(random: Random, data: bytearray, places: list[int]) -> str:
    at, count = _place(random, data, places), random.choice((1, 4, 20, 46))
    count = min(count, len(data) - at)
    del data[at : at + count]
    data += bytes(count)
    return f"{count} bytes at {at} taken out, the rest moved up"


_BYTE_OPERATIONS: list[Callable[[Random, bytearray, list[int]], str]] = [
    _flip,
    _flip,
    _flip,
    _set_byte,
    _set_number,
    _set_number,
    _set_number,
    _zero,
    _zero,
    _noise,
    _cut,
    _lengthen,
    _swap_ranges,
    _copy_range,
    _remove_range,
]
