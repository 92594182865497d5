"""The shim in this process: which system call fails, and which one did. It was loaded by LD_PRELOAD (shim.c)."""

import ctypes
import enum
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "shim.c"
FOLDER_VARIABLE = "FAULT_FOLDER"


class Calls(enum.IntFlag):
    """Kinds of system calls, as shim.c numbers them."""

    OPEN = 1
    WRITE = 2
    READ = 4
    SYNC = 8
    NAME = 16  # rename, link, unlink, rmdir, mkdir
    STAT = 32
    LOCK = 64
    MAP = 128
    FOLDER = 256
    TRUNCATE = 512
    CREATE = 1024  # an open that may create the file

    CHANGES = WRITE | SYNC | NAME | TRUNCATE | CREATE
    ALL = CHANGES | OPEN | READ | STAT | LOCK | MAP | FOLDER


class Effect(enum.IntEnum):
    """Effect on the chosen call, numbered as in shim.c."""

    FAIL = 0
    CUT_SHORT = 1
    KILL_BEFORE = 2
    KILL_AFTER = 3


@dataclass(frozen=True)
class Hit:
    """The call that was chosen: its name and path. `count` is 0 if no such call came."""

    count: int
    call: str
    path: str

    def __str__(self) -> str:
        return f"{self.call}({self.path})" if self.count else "no call"


class Shim:
    """Arms the shim that this process was started with. For one thread."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "fault_arm"):
            raise RuntimeError("the shim is not loaded: start the process with LD_PRELOAD")
        self._library.fault_call.restype = self._library.fault_path.restype = ctypes.c_char_p
        self._library.fault_seen.restype = ctypes.c_long

    def arm(self, number: int, calls: Calls, effect: Effect, error: int = 0) -> None:
        """Choose the `number`-th of these calls, from 0."""
        self._library.fault_arm(ctypes.c_long(number), error, int(effect), int(calls))

    def trace(self) -> None:
        """Let all calls pass, and note each."""
        self._library.fault_trace()

    def traced(self) -> list[tuple[int, int]]:
        """Return the kinds (`Calls`) of each call since `trace`, and a hash of its path."""
        calls = map(ctypes.c_long, range(self._library.fault_seen()))
        return [(self._library.fault_kinds(call), self._library.fault_path_hash(call)) for call in calls]

    def disarm(self) -> Hit:
        """Let all calls pass; return the one that was chosen."""
        names = (self._library.fault_call(), self._library.fault_path())
        hit = Hit(self._library.fault_hits(), *(name.decode(errors="replace") for name in names))
        self.arm(-1, Calls(0), Effect.FAIL)
        return hit
