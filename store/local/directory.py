"""The location of a store directory. Short, because every partition and every task carries it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmq_spark.store.backend import Capability, CommitTerms, SendBackTerms, SinkTerms
from rmq_spark.store.local.paths import StorePaths

if TYPE_CHECKING:
    from rmq_spark.store.local.backend import LocalBackend
    from rmq_spark.store.local.sink import LocalSendBackSink, LocalSink


@dataclass(frozen=True, slots=True)
class StoreDirectory(StorePaths):
    """A store directory, such as a broker's storePathRootDir. See `StorePaths` for the fields."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All capabilities but three.

        A directory belongs to one broker, whose name is not stored, and has no server. Rows are never stored before the
        commit.
        """
        return frozenset(Capability) - {Capability.AT_LEAST_ONCE, Capability.BROKERS, Capability.NAME_SERVERS}

    def open(self) -> "LocalBackend":
        """Return a backend, which opens the store at its first call."""
        from rmq_spark.store.local.backend import LocalBackend

        return LocalBackend(self, self)

    # The sinks are the writing part of the engine, so they are imported late.

    def sink(self, terms: SinkTerms, commit: CommitTerms) -> "LocalSink":
        """Return a sink for new messages."""
        from rmq_spark.store.local.sink import LocalSink

        return LocalSink(self, terms, commit)

    def send_back_sink(self, terms: SendBackTerms, commit: CommitTerms) -> "LocalSendBackSink":
        """Return a sink for messages that a group failed to consume."""
        from rmq_spark.store.local.sink import LocalSendBackSink

        return LocalSendBackSink(self, terms, commit)
