"""Effects: values that describe the changes of a disk. There is one value for each system call.

Paths are relative to the recorded folder, which has the path ".". `file` is the number of a file. A file keeps its
number if it is renamed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MakeFolder:
    """A folder was created."""

    path: str


@dataclass(frozen=True, slots=True)
class Create:
    """A file of `size_bytes` was created. It contains zeros, except for `data` at `position`.

    Its content was durable before the file got its name.
    """

    path: str
    file: int
    size_bytes: int
    position: int = 0
    data: bytes = b""

    def __repr__(self) -> str:
        return f"Create(path={self.path!r}, size_bytes={self.size_bytes}, filled={len(self.data)})"


@dataclass(frozen=True, slots=True)
class Write:
    """`data` was written at `position` of a file. If it reaches beyond the end of the file, the file grew."""

    path: str
    file: int
    position: int
    data: bytes

    def __repr__(self) -> str:
        return f"Write(path={self.path!r}, position={self.position}, size={len(self.data)})"


@dataclass(frozen=True, slots=True)
class Sync:
    """A file was synced, so all earlier writes to it are durable."""

    path: str
    file: int


@dataclass(frozen=True, slots=True)
class FailedSync:
    """A sync of a file failed. The kernel treats the earlier writes as written, so no later sync writes them."""

    path: str
    file: int


@dataclass(frozen=True, slots=True)
class SyncFolder:
    """A folder was synced, so all earlier creations, removals and renames in it are durable."""

    path: str


@dataclass(frozen=True, slots=True)
class Rename:
    """A file was renamed within its folder. If a file with the new name existed, it was replaced."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Remove:
    """A file was removed."""

    path: str


@dataclass(frozen=True, slots=True)
class RemoveFolder:
    """An empty folder was removed."""

    path: str


Effect = MakeFolder | Create | Write | Sync | FailedSync | SyncFolder | Rename | Remove | RemoveFolder
EFFECTS_ON_NAMES = (MakeFolder, Create, Rename, Remove, RemoveFolder)
