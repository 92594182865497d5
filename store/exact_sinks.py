"""The functions by which programs operate the exactly-once sink of a live cluster: its topics, and its open intents.

The modules of the engine are imported when a function needs them, so that importing this module is cheap.
"""

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rmq_spark.store.argument_checks import check_setting
from rmq_spark.store.errors import OptionError
from rmq_spark.store.names import LEDGER_TOPIC, STAGE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from rmq_spark.store.cluster.exactly_once.commit_session import SkippedRows
    from rmq_spark.store.cluster.exactly_once.open_intents import ListedIntent
    from rmq_spark.store.cluster.exactly_once.preparation import PreparedSink
    from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
    from rmq_spark.store.model import CommitKey


def prepare_sink(
    name_server: str,
    ledger_broker: str,
    *,
    replace_ledger: bool = False,
    stage_topic: str = STAGE_TOPIC,
    ledger_topic: str = LEDGER_TOPIC,
    **cluster_options: "str | int | None",
) -> "PreparedSink":
    """Create what writes with exactly-once delivery need in a cluster, and return what was found or made.

    The stage topic is created on every master, and the ledger topic on `ledger_broker` only. Each of them is left as it
    is where it exists. The ledger stays there for ever: a cluster must never have two. The result also has the consumer
    group in whose name the sink pulls, which is created on every master that allows it.

    If the stage exists and no ledger does, the ledger's broker is down, or its disk is lost. A second ledger would let
    batches be stored twice. So it is created only with `replace_ledger`, after the disk of the first one was lost.

    The other arguments are those of `open_reader` for a cluster. Raises OptionError for an invalid argument, an unknown
    broker, or a ledger on another broker; BackendUnavailableError if a name server or a broker does not answer, because
    it may have a ledger, or if the ledger is missing; and the errors of brokers that refuse.
    """
    from rmq_spark.store.cluster.exactly_once import preparation
    from rmq_spark.store.places import locate_cluster

    address = locate_cluster(name_server, cluster_options)
    return preparation.prepare_sink(address, ledger_broker, stage_topic, ledger_topic, replaces_ledger=replace_ledger)


def open_intents(
    name_server: str,
    *,
    count_rows: bool = False,
    stage_topic: str = STAGE_TOPIC,
    ledger_topic: str = LEDGER_TOPIC,
    **cluster_options: "str | int | None",
) -> "list[ListedIntent]":
    """Return the batches that writes with exactly-once delivery have begun and not ended, the oldest first.

    A batch that is being written at this moment is in the list too. With `count_rows` the target queues are read from
    the beginning of each batch on, to count which of its rows are stored; that may take long. Nothing is changed.

    A batch whose rows of the ledger have expired is found if its query has a later row. The other arguments are those
    of `open_reader` for a cluster. Raises OptionError for an invalid argument, NotFoundError if the cluster is not
    prepared, BackendUnavailableError if the broker of the ledger does not answer, and NoPermissionError if the account
    may not read it.
    """
    from rmq_spark.store.cluster.exactly_once.open_intents import list_open_intents

    with _opened(name_server, cluster_options, stage_topic=stage_topic, ledger_topic=ledger_topic) as place:
        return list_open_intents(place, counts=count_rows)


def finish_intent(
    name_server: str,
    query_id: str,
    *,
    stage_topic: str = STAGE_TOPIC,
    ledger_topic: str = LEDGER_TOPIC,
    settle_time_ms: int = 5_000,
    fence_timeout_ms: int = 150_000,
    **cluster_options: "str | int | None",
) -> "CommitKey":
    """Store the missing rows of the open intent of a query or of a plain batch write. Return its batch.

    `query_id` is the `query` of `open_intents`. The next commit of a query does the same; a plain batch write has none.
    It waits until no session that has begun the batch is connected, for at most `fence_timeout_ms`, and then twice
    `settle_time_ms`. So it may be called while such a session lives, and by several programs at the same time.

    The other arguments are those of `open_reader` for a cluster. It waits `broker_down_timeout_ms` for a server that is
    away. Raises OptionError for an invalid argument, NotFoundError if nothing is open or prepared, IntentStuckError if
    the batch cannot be finished, BackendUnavailableError if a server stays away or a session stays connected, and the
    errors of brokers that refuse.
    """
    from rmq_spark.store.cluster.exactly_once.intent_ending import IntentEnding

    terms = _checked_terms(query_id, stage_topic, ledger_topic, settle_time_ms, fence_timeout_ms)
    with _opened(name_server, cluster_options, **terms) as place:
        return IntentEnding(place, query_id).finish()


def skip_intent(
    name_server: str,
    query_id: str,
    missing: "int | str | None" = None,
    *,
    batch_id: "int | None" = None,
    stage_topic: str = STAGE_TOPIC,
    ledger_topic: str = LEDGER_TOPIC,
    settle_time_ms: int = 5_000,
    fence_timeout_ms: int = 150_000,
    **cluster_options: "str | int | None",
) -> "SkippedRows":
    """End the open intent of a query or of a plain batch write without the rows that cannot be stored any more.

    It publishes all rows that can be published, and records the others as missing. `missing` confirms their number. If
    it is another one, IntentStuckError is raised, which has the number, and the intent stays open; what could be
    published stays. "unknown" confirms the loss of a batch whose rows of the ledger have expired, of which nothing is
    known. If no row is missing, no confirmation is needed. Rows that are missing are never written later. With
    `batch_id`, as `open_intents` and IntentStuckError have it, only this batch is ended: the query may have begun
    another one meanwhile. Then NotFoundError is raised.

    All else is as with `finish_intent`.
    """
    from rmq_spark.store.cluster.exactly_once.intent_ending import UNKNOWN, IntentEnding

    if missing is not None and missing != UNKNOWN:
        check_setting("missing", missing, 0)
    terms = _checked_terms(query_id, stage_topic, ledger_topic, settle_time_ms, fence_timeout_ms)
    with _opened(name_server, cluster_options, **terms) as place:
        return IntentEnding(place, query_id, batch_id).skip(missing)  # type: ignore[arg-type]  # checked above


def _checked_terms(
    query_id: str, stage_topic: str, ledger_topic: str, settle_ms: int, fence_timeout_ms: int
) -> "dict[str, Any]":
    if not isinstance(query_id, str) or not query_id:
        raise OptionError(f"query_id={query_id!r}; expected the id of a query or of a write, as open_intents has it.")
    check_setting("settle_time_ms", settle_ms, 0)
    check_setting("fence_timeout_ms", fence_timeout_ms, 0)
    return {
        "stage_topic": stage_topic,
        "ledger_topic": ledger_topic,
        "settle_ms": settle_ms,
        "fence_timeout_ms": fence_timeout_ms,
    }


@contextmanager
def _opened(name_server: str, cluster_options: "Mapping[str, Any]", **terms: "Any") -> "Iterator[SinkPlace]":
    """Open the cluster that a program names, for one call.

    Raises OptionError for an invalid argument, and NotFoundError if the cluster is not prepared.
    """
    from rmq_spark.store.backend import CommitTerms
    from rmq_spark.store.cluster.exactly_once.preparation import check_prepared
    from rmq_spark.store.cluster.exactly_once.sink_place import open_place
    from rmq_spark.store.names import check_topic_name
    from rmq_spark.store.places import locate_cluster

    check_topic_name(terms["stage_topic"])
    check_topic_name(terms["ledger_topic"])
    address = locate_cluster(name_server, cluster_options)
    check_prepared(address, terms["stage_topic"], terms["ledger_topic"])
    with open_place(address, CommitTerms(**terms)) as place:
        yield place
