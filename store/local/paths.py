"""The paths of a store directory. Its own module, because the location, the backend and the sinks need them."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class StorePaths:
    """Where the files of a store are. The paths are absolute, because executors may have another working directory.

    `commit_log_path` is the folder of the commit log, or several folders separated by commas; None if it is in the
    store's folder. `read_mode` is one of `model.READ_MODES`.
    """

    path: str
    commit_log_path: str | None = None
    read_mode: str = "auto"

    def describe(self) -> str:
        """Return the text for errors and logs."""
        return f'the store at "{self.path}"'

    def sharing_advice(self) -> str:
        """Return the sentence for a process that does not see the same store as the driver."""
        return (
            "On a cluster the path must be storage that the driver and all executors share, mounted at the same path."
        )

    def without_secrets(self) -> Self:
        """Return the same paths, because they contain no secret."""
        return self

    def with_secrets_of(self, source: Self) -> Self:
        """Return the same paths, because they need no secret."""
        return self

    def mark(self) -> dict[str, str]:
        """Return the paths, by the names of the options."""
        log = {} if self.commit_log_path is None else {"commitLogPath": self.commit_log_path}
        return {"path": self.path, **log}
