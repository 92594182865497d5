"""What changes a disk, one value for each system call, in the order in which they took effect.

Paths are relative to the recorded folder, "." for itself. A file goes by a number, which it keeps when it is renamed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MakeFolder:
    """A folder got its name."""

    path: str


@dataclass(frozen=True, slots=True)
class Create:
    """A file of `size_bytes` got its name: zeros, but for `data`, which was on the disk for good before."""

    path: str
    file: int
    size_bytes: int
    position: int = 0
    data: bytes = b""

    def __repr__(self) -> str:
        return f"Create(path={self.path!r}, size_bytes={self.size_bytes}, filled={len(self.data)})"


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes of a file changed; it grew where they reach past its end."""

    path: str
    file: int
    position: int
    data: bytes

    def __repr__(self) -> str:
        return f"Write(path={self.path!r}, position={self.position}, size={len(self.data)})"


@dataclass(frozen=True, slots=True)
class Sync:
    """Everything written to the file before is on the disk for good."""

    path: str
    file: int


@dataclass(frozen=True, slots=True)
class FailedSync:
    """A sync of the file failed. The kernel calls what was written before clean: no later sync writes it."""

    path: str
    file: int


@dataclass(frozen=True, slots=True)
class SyncFolder:
    """Every name made or taken away in the folder before is so for good."""

    path: str


@dataclass(frozen=True, slots=True)
class Rename:
    """A file got another name in its folder; what had that name is gone."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Remove:
    """A file's name is gone."""

    path: str


@dataclass(frozen=True, slots=True)
class RemoveFolder:
    """An empty folder's name is gone."""

    path: str


Effect = MakeFolder | Create | Write | Sync | FailedSync | SyncFolder | Rename | Remove | RemoveFolder
EFFECTS_ON_NAMES = (MakeFolder, Create, Rename, Remove, RemoveFolder)
