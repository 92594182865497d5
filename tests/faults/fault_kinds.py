"""The kinds of faults: what happens to a system call, and to which calls it can happen."""

import errno
from dataclasses import dataclass

from shim import Calls, Effect


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault. `error` is the errno of calls that fail, 0 for other effects."""

    name: str
    effect: Effect
    calls: Calls
    error: int = 0

    @property
    def kills(self) -> bool:
        """Say whether the process dies of it."""
        return self.effect in (Effect.KILL_BEFORE, Effect.KILL_AFTER)


FAULT_KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("eio", Effect.FAIL, Calls.ALL, errno.EIO),
        FaultKind("enospc", Effect.FAIL, Calls.CHANGES, errno.ENOSPC),
        FaultKind("emfile", Effect.FAIL, Calls.OPEN | Calls.FOLDER, errno.EMFILE),
        FaultKind("eacces", Effect.FAIL, Calls.OPEN | Calls.FOLDER | Calls.NAME, errno.EACCES),
        FaultKind("enomem", Effect.FAIL, Calls.OPEN | Calls.FOLDER | Calls.MAP, errno.ENOMEM),
        FaultKind("short", Effect.CUT_SHORT, Calls.WRITE),
        FaultKind("kill-before", Effect.KILL_BEFORE, Calls.CHANGES | Calls.LOCK),
        FaultKind("kill-after", Effect.KILL_AFTER, Calls.CHANGES | Calls.LOCK),
    )
}
