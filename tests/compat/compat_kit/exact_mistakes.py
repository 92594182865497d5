"""Mistakes of programs that write exactly once to a live cluster: `exact_mistakes.py FUNCTION NAME_SERVERS TARGET`.

Its standard input is a pickle of the function's arguments by name. It writes a pickle of what the function returns.

Spark is not needed: the writer is made as for Spark, rows are staged as in a task, and the sink commits them. Each
mistake has a target topic of its own, and a stage and a ledger of its own if it spoils those. So one cluster is enough.
"""

import pickle
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

import rmq_spark
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.datasource.spark.task_writer import SinkTask, stage_rows
from rmq_spark.store.backend import DecodeLimits
from rmq_spark.store.cluster.client import ClusterClient, borrowed_client, monotonic_ms
from rmq_spark.store.cluster.exactly_once.publishing import Publishing
from rmq_spark.store.cluster.requests import CreateTopicRequest, DeleteRouteRequest, DeleteTopicRequest, RouteRequest
from rmq_spark.store.cluster.responses import RouteResponse
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import NotFoundError
from rmq_spark.store.format.config_json import TopicConfig
from rmq_spark.store.model import CommitKey, QueueBounds, QueueRange
from rmq_spark.store.places import locate

Answer = tuple[str, list[bytes]]  # the error, and the bodies that are in the target topic then
_QUEUES = 2  # of a target topic on each broker
_LIMIT_S = 60  # for name servers to list a change
_LIMIT = 4 << 20
_OPTIONS = {"requestTimeout": "5s", "settleTime": "10ms", "createTopic": "false"}
_IMPATIENT = {"brokerDownTimeout": "1s"}
_COLUMNS = {
    "body": pa.binary(),
    "properties": pa.map_(pa.string(), pa.string()),
    "delayLevel": pa.int32(),
    "deliverTimestamp": pa.timestamp("us", "UTC"),
}


def try_mistakes(address: str) -> dict[str, Answer]:
    """Make all mistakes at a cluster of the brokers broker-a and broker-b, and return the answers by name."""
    made = _Mistakes(address)
    with borrowed_client(made.location()) as client:
        made.administrator = _Administrator(client)
        made.prepare_nothing()
        made.set_options()
        made.give_rows()
        made.spoil_ledgers()
        made.repeat_batches()
        made.end_nothing()
        made.change_target_before_commit()
        made.lose_stage_before_commit()
        made.shrink_target()
        made.delete_target()
        made.lose_stage()
        made.replace_ledger()
        made.write_at_once()
    return made.answers


def try_accounts(
    address: str, broker: str, topic: str, administrator: dict[str, str], accounts: dict[str, dict[str, str]]
) -> dict[str, Answer]:
    """Prepare a cluster as an administrator, then write a batch of one row to a topic with each account."""
    made = _Mistakes(address, administrator)
    keys = {"access_key": administrator["accessKey"], "secret_key": administrator["secretKey"]}
    rmq_spark.prepare_sink(address, broker, **keys)
    for name, options in accounts.items():
        made.note(name, topic, partial(made.write, topic, [b"from " + name.encode()], query=name, **options))
    return made.answers


class _KilledError(BaseException):
    """The process of a commit dies."""


class _Administrator:
    """Changes topics, and returns when all name servers list them so."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self.masters = WriteRoutes(client, monotonic_ms, NewTopics(is_allowed=False)).find_masters("any")

    def set_topic(
        self, topic: str, queues: int = _QUEUES, brokers: Collection[str] | None = None, perm: int = 6
    ) -> None:
        """Create a topic, or replace its settings."""
        wanted = {}
        for broker in brokers or self.masters:
            self._client.call(self.masters[broker], CreateTopicRequest(TopicConfig(topic, queues, queues, perm)))
            wanted[broker] = queues, perm
        self._await(topic, wanted)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic on all brokers that have it, as mqadmin does."""
        for master in self.masters.values():
            self._client.call(master, DeleteTopicRequest(topic))
        self._await(topic, {})

    def listed(self, topic: str) -> list[dict[str, tuple[int, int]]]:
        """Return what each name server says of a topic: its write queues and its perm, by broker."""
        calls = [(server, RouteRequest(topic)) for server in self._client.name_servers()]
        routes = self._client.call_all(calls)
        assert all(isinstance(one, RouteResponse | NotFoundError) for one in routes), routes
        return [
            {one.broker: (one.write_queue_count, one.perm) for one in route.queues}
            if isinstance(route, RouteResponse)
            else {}
            for route in routes
        ]

    def _await(self, topic: str, wanted: Mapping[str, tuple[int, int]]) -> None:
        until = time.monotonic() + _LIMIT_S
        while True:
            if not wanted:
                for server in self._client.name_servers():
                    with suppress(NotFoundError):
                        self._client.call(server, DeleteRouteRequest(topic))
            found = self.listed(topic)
            if all((wanted.items() <= one.items()) if wanted else not one for one in found):
                return
            if time.monotonic() > until:
                raise RuntimeError(f"{topic} is not listed as {wanted}: {found}")
            time.sleep(0.05)


class _Mistakes:
    """Makes mistakes, and notes the answers. `keys` are options of whoever reads and changes topics."""

    administrator: _Administrator

    def __init__(self, address: str, keys: Mapping[str, str] | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        self._address, self._keys = address, dict(keys or {})

    # Helpers.

    def location(self, **options: str) -> Any:
        """Return the location of the cluster."""
        return locate({"nameServer": self._address, **self._keys, **options})

    def note(self, name: str, topic: str, attempt: Callable[[], object], **options: str) -> None:
        """Try something, and note the error and the rows of a topic. `options` are those of the reader."""
        try:
            attempt()
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join([str(error), *getattr(error, '__notes__', ())])}"
        self.answers[name] = text, self.bodies(topic, **options)

    def bodies(self, topic: str, **options: str) -> list[bytes]:
        """Return the bodies of the messages of a topic, in any order. Without the topic there are none."""
        with closing(self.location(**options).open()) as backend:
            backend.refresh()
            try:
                queues = backend.queues([topic]).get(topic, [])
            except NotFoundError:
                return []
            found = []
            for queue, bounds in backend.bounds(queues).items():
                if not isinstance(bounds, QueueBounds):  # a name server may still have the route of a deleted topic
                    assert "does not know the topic" in bounds.reason, (queue, bounds)
                    continue
                part = QueueRange(queue, bounds.min_offset, bounds.max_offset)
                for read in backend.read(part, ["body"], DecodeLimits(check_crc=True), None):
                    found += read.batch.column("body").to_pylist()
            return sorted(found)

    def write(
        self,
        topic: str | None,
        bodies: list[bytes],
        batch: int = 0,
        between: Callable[[], object] = lambda: None,
        query: str | None = None,
        columns: Mapping[str, list[Any]] | None = None,
        **options: str,
    ) -> None:
        """Write a batch of a stream. `between` is called between its task and its commit."""
        given = {"nameServer": self._address, **_OPTIONS, **({"topic": topic} if topic else {}), **options}
        rows = {"body": bodies, **(columns or {})}
        table = pa.table({name: pa.array(values, _COLUMNS.get(name)) for name, values in rows.items()})
        writer: Any = RmqDataSource(given).streamWriter(from_arrow_schema(table.schema), False)
        if writer._away is not None:
            raise writer._away
        key = CommitKey(query or f"query of {topic}", batch)
        task = SinkTask(0, 0, uuid.uuid4().int & 0xFFFFFFFF)
        receipt = stage_rows(table.to_batches(), writer._options, writer._token, key, task)
        between()
        writer._options.sink().commit(key, [receipt])

    def write_named(self, topic: str, bodies: list[bytes], version: int, app: str = "nightly", **options: str) -> None:
        """Write by a df.write with txnAppId and txnVersion."""
        given = {"nameServer": self._address, **_OPTIONS, "topic": topic, "txnAppId": app, **options}
        table = pa.table({"body": pa.array(bodies, pa.binary())})
        source = RmqDataSource({**given, "txnVersion": str(version)})
        writer: Any = source.writer(from_arrow_schema(table.schema), False)
        task = SinkTask(0, 0, uuid.uuid4().int & 0xFFFFFFFF)
        receipt = stage_rows(table.to_batches(), writer._options, writer._token, writer._key, task)
        writer._options.sink().commit(writer._key, [receipt])

    def begin(self, topic: str, bodies: list[bytes], batch: int, **options: str) -> None:
        """Begin a batch, and die before a row of it is published."""
        with mock.patch.object(Publishing, "run", side_effect=_KilledError), suppress(_KilledError):
            self.write(topic, bodies, batch, **options)
            raise AssertionError("the commit did not die")

    def skip(self, query: str, missing: int | None = None, **arguments: Any) -> object:
        """Call what `rmq intents skip` calls."""
        given = {"settle_time_ms": 10, "request_timeout_ms": 5000, **arguments}
        return rmq_spark.skip_intent(self._address, query, missing, **given)

    def finish(self, query: str, **arguments: Any) -> object:
        """Call what `rmq intents finish` calls."""
        given = {"settle_time_ms": 10, "request_timeout_ms": 5000, **arguments}
        return rmq_spark.finish_intent(self._address, query, **given)

    def prepare_own(self, name: str) -> dict[str, str]:
        """Create a stage and a ledger with names of their own, and return the options for them."""
        own = {"stageTopic": f"stage-{name}", "ledgerTopic": f"ledger-{name}"}
        self.administrator.set_topic(own["stageTopic"])
        self.administrator.set_topic(own["ledgerTopic"], 3, ["broker-a"])
        return own

    # Mistakes.

    def prepare_nothing(self) -> None:
        """Write to a cluster that was not prepared, or was prepared for others."""
        topic = "unprepared"
        self.administrator.set_topic(topic)
        creates = {"createTopic": "true"}
        self.note("nothing prepared", topic, partial(self.write, topic, [b"x"], **creates))
        self.note("nothing prepared, new topic", "new-topic", partial(self.write, "new-topic", [b"x"], **creates))
        rmq_spark.prepare_sink(self._address, "broker-a")
        away = {"stageTopic": "no-stage", "ledgerTopic": "no-ledger"}
        self.note("wrong stage and ledger", topic, partial(self.write, topic, [b"x"], **away, **creates))
        no_ledger = {"ledgerTopic": "no-ledger", **_IMPATIENT, **creates}
        self.note("no ledger", topic, partial(self.write, topic, [b"x"], **no_ledger))
        topics: dict[str, Any] = {"columns": {"topic": [topic]}, "stageTopic": "no-stage"}
        self.note("no stage, topics in rows", topic, partial(self.write, None, [b"x"], query="of rows", **topics))
        space = {"namespace": "elsewhere"}
        self.note("wrong namespace", topic, partial(self.write, topic, [b"x"], **space, **creates), **space)
        self.note(
            "ledger asked for on another broker", topic, partial(rmq_spark.prepare_sink, self._address, "broker-b")
        )
        self.note("ledger asked for on no broker", topic, partial(rmq_spark.prepare_sink, self._address, "broker-z"))
        for name in ("no-stage", "no-ledger", "new-topic", f"elsewhere%{topic}", "elsewhere%RMQ_SPARK_STAGE"):
            self.answers[f"created {name}"] = str([*map(bool, self.administrator.listed(name))]), []

    def set_options(self) -> None:
        """Give options that cannot be."""
        topic = "options"
        self.administrator.set_topic(topic)
        cases = {
            "delivery misspelt": {"delivery": "exactly-once"},
            "compression": {"compression": "zlib"},
            "stage is ledger": {"stageTopic": "same", "ledgerTopic": "same"},
            "stage is a system topic": {"stageTopic": "SCHEDULE_TOPIC_XXXX"},
            "txnAppId of a stream": {"txnAppId": "nightly", "txnVersion": "1"},
        }
        for name, options in cases.items():
            self.note(name, topic, partial(self.write, topic, [b"x"], **options))
        self.administrator.set_topic("closed", perm=4)
        targets = {
            "target is the stage": "RMQ_SPARK_STAGE",
            "target is the ledger": "RMQ_SPARK_LEDGER",
            "target is a retry topic": "%RETRY%billing",
            "target is a system topic": "SCHEDULE_TOPIC_XXXX",
            "target does not exist": "absent",
            "target without write permission": "closed",
        }
        for name, target in targets.items():
            self.note(name, topic, partial(self.write, target, [b"x"]))
        of_others = {"stageTopic": "stage-of-mine"}
        self.note("target is the stage of others", topic, partial(self.write, "RMQ_SPARK_STAGE", [b"x"], **of_others))
        self.note("txnAppId without version", topic, partial(self._write_without_version, topic))

    def _write_without_version(self, topic: str) -> None:
        given = {"nameServer": self._address, "topic": topic, "txnAppId": "nightly"}
        RmqDataSource(given).writer(from_arrow_schema(pa.schema({"body": pa.binary()})), False)

    def give_rows(self) -> None:
        """Give rows that cannot be stored exactly once, each after a row that can."""
        topic = "rows"
        self.administrator.set_topic(topic)
        later = datetime(2100, 1, 1, tzinfo=UTC)
        cases: dict[str, tuple[bytes | None, dict[str, list[Any]]]] = {
            "delay level": (b"x", {"delayLevel": [0, 3]}),
            "delivery time": (b"x", {"deliverTimestamp": [None, later]}),
            "body over the limit": (b"x" * (_LIMIT + 1), {}),
            "body at the limit, with what a batch adds": (b"x" * _LIMIT, {}),
            "properties over the limit": (b"x", {"properties": [{}, {"a": "y" * 33_000}]}),
            "null body": (None, {}),
            "topic of the stage in a row": (b"x", {"topic": [topic, "RMQ_SPARK_STAGE"]}),
        }
        for name, (body, columns) in cases.items():
            target = None if "topic" in columns else topic
            rows: Any = [b"first", body]
            self.note(name, topic, partial(self.write, target, rows, query="of rows", columns=columns))

    def spoil_ledgers(self) -> None:
        """Write with ledgers that are not as `rmq prepare-sink` makes them."""
        topic = "spoilt"
        self.administrator.set_topic(topic)
        self.administrator.set_topic("ledger-twice", 3)
        self.administrator.set_topic("ledger-closed", 3, ["broker-a"], perm=4)
        self.administrator.set_topic("ledger-small", 1, ["broker-a"])
        self.administrator.set_topic("ledger-large", 8, ["broker-a"])
        for name in ("twice", "closed", "small", "large"):
            body = name.encode()
            self.note(
                f"ledger {name}", topic, partial(self.write, topic, [body], query=name, ledgerTopic=f"ledger-{name}")
            )
        self.note("intents of two ledgers", topic, partial(self.skip, "any", ledger_topic="ledger-twice"))

    def repeat_batches(self) -> None:
        """Write batches that are not the next ones of their query."""
        topic = "repeated"
        self.administrator.set_topic(topic)
        self.note("first batch is not 0", topic, partial(self.write, topic, [b"b3"], 3))
        for number in range(2):
            self.write(topic, [b"b%d" % number], number)
        self.note("copied checkpoint", topic, partial(self.write, topic, [b"other"], 1))
        self.note("copied checkpoint, more rows", topic, partial(self.write, topic, [b"b1", b"b2"], 1))
        self.note("older checkpoint", topic, partial(self.write, topic, [b"b0"], 0))
        self.note("gap", topic, partial(self.write, topic, [b"b4"], 4))
        self.note("conflict skipped", topic, partial(self.write, topic, [b"other"], 1, onBatchConflict="skip"))
        self.note("another onBatchGap", topic, partial(self.write, topic, [b"b4"], 4, onBatchGap="ignore"))
        self.write_named(topic, [b"v1"], 1)
        self.note("version with other rows", topic, partial(self.write_named, topic, [b"other"], 1))
        self.note("version repeated", topic, partial(self.write_named, topic, [b"v1"], 1))

    def end_nothing(self) -> None:
        """End batches that are not open."""
        topic, query = "ended", "query of ended"
        self.administrator.set_topic(topic)
        self.write(topic, [b"b0"])
        self.note("skip what is done", topic, partial(self.skip, query, 1))
        self.note("finish what is done", topic, partial(self.finish, query))
        self.note("skip an unknown query", topic, partial(self.skip, "nobody"))
        self.note("skip a negative number", topic, partial(self.skip, query, -1))

    def change_target_before_commit(self) -> None:
        """Change the target topic between the tasks of a batch and its commit."""
        admin = self.administrator
        admin.set_topic("narrowed", 2)
        self.note(
            "target shrunk before the commit",
            "narrowed",
            partial(
                self.write,
                "narrowed",
                [b"%d" % number for number in range(8)],
                0,
                lambda: admin.set_topic("narrowed", 1),
            ),
        )
        self.note("target shrunk, batch repeated", "narrowed", partial(self.write, "narrowed", [b"x"], 0))
        admin.set_topic("vanished")
        self.note(
            "target deleted before the commit",
            "vanished",
            partial(self.write, "vanished", [b"x"], 0, lambda: admin.delete_topic("vanished"), **_IMPATIENT),
        )

    def lose_stage_before_commit(self) -> None:
        """Delete the stage between the tasks of a batch and its commit."""
        topic, admin = "unstaged", self.administrator
        admin.set_topic(topic)
        own = self.prepare_own("lost")

        def delete() -> None:
            admin.delete_topic(own["stageTopic"])

        def replace() -> None:
            delete()
            admin.set_topic(own["stageTopic"])

        attempt = partial(self.write, topic, [b"x"], 0, delete, **own, **_IMPATIENT)
        self.note("stage deleted before the commit", topic, attempt)
        admin.set_topic(own["stageTopic"])
        hasty = {**own, **_IMPATIENT, "requestTimeout": "1s"}
        self.note("stage replaced before the commit", topic, partial(self.write, topic, [b"x"], 0, replace, **hasty))

    def shrink_target(self) -> None:
        """Remove queues of the target while a batch is open, and give them back."""
        topic, admin, query = "shrunk", self.administrator, "query of shrunk"
        admin.set_topic(topic, 2)
        rows = [b"%d" % number for number in range(8)]
        self.begin(topic, rows, 0)
        admin.set_topic(topic, 1)
        self.note("target shrunk while open", topic, partial(self.write, topic, rows, 0))
        self.note("next batch while open", topic, partial(self.write, topic, [b"next"], 1))
        self.note("finish without the queues", topic, partial(self.finish, query))
        self.note("skip without a number", topic, partial(self.skip, query))
        self.note("skip with another number", topic, partial(self.skip, query, 3))
        admin.set_topic(topic, 2)
        self.note("target whole again", topic, partial(self.write, topic, rows, 0))

    def delete_target(self) -> None:
        """Delete the target while a batch is open, and create it again."""
        topic, admin, query = "deleted", self.administrator, "query of deleted"
        admin.set_topic(topic)
        self.write(topic, [b"%d" % number for number in range(8)], 0)
        self.begin(topic, [b"x", b"y"], 1)
        admin.delete_topic(topic)
        self.note("target deleted while open", topic, partial(self.finish, query))
        admin.set_topic(topic)
        self.note("target replaced while open", topic, partial(self.finish, query))
        self.note("skip of a deleted target", topic, partial(self.skip, query, 2))
        self.note("next batch after a skip", topic, partial(self.write, topic, [b"next"], 2))

    def lose_stage(self) -> None:
        """Delete the stage while a batch is open, and create it again."""
        topic, admin, query = "stuck", self.administrator, "query of stuck"
        admin.set_topic(topic)
        own = self.prepare_own("gone")
        names = {"stage_topic": own["stageTopic"], "ledger_topic": own["ledgerTopic"]}
        self.write(topic, [b"b0"], 0, **own)
        self.begin(topic, [b"x", b"y"], 1, **own)
        admin.delete_topic(own["stageTopic"])
        self.note("stage deleted while open", topic, partial(self.finish, query, broker_down_timeout_ms=1000, **names))
        admin.set_topic(own["stageTopic"])
        self.note("stage replaced while open", topic, partial(self.finish, query, **names))
        self.note("skip of a lost stage with another number", topic, partial(self.skip, query, 1, **names))
        self.note("skip of a lost stage", topic, partial(self.skip, query, 2, **names))
        self.note("next batch after a lost stage", topic, partial(self.write, topic, [b"next"], 2, **own))

    def replace_ledger(self) -> None:
        """Delete the ledger, and create it again, between two batches."""
        topic, admin = "forgotten", self.administrator
        admin.set_topic(topic)
        own = self.prepare_own("replaced")
        for number in range(2):
            self.write(topic, [b"b%d" % number], number, **own)
        admin.delete_topic(own["ledgerTopic"])
        hasty = {**own, "requestTimeout": "1s", **_IMPATIENT}
        self.note("ledger deleted", topic, partial(self.write, topic, [b"b2"], 2, **hasty))
        admin.set_topic(own["ledgerTopic"], 3, ["broker-a"])
        self.note("ledger replaced", topic, partial(self.write, topic, [b"b2"], 2, **hasty))

    def write_at_once(self) -> None:
        """Write a batch twice at the same time, and end it while it is being written."""
        topic, query = "at-once", "query of at-once"
        self.administrator.set_topic(topic)
        rows = [b"one", b"two"]
        with self._held_commit(partial(self.write, topic, rows, 0)) as outcome:
            self.note("second query at once", topic, partial(self.write, topic, rows, 0, fenceTimeout="1s"))
            self.note("skip while it is written", topic, partial(self.skip, query, 2, fence_timeout_ms=1000))
        self.note("first query at once", topic, outcome)
        self.note("second query afterwards", topic, partial(self.write, topic, rows, 0))

    @contextmanager
    def _held_commit(self, commit: Callable[[], object]) -> Iterator[Callable[[], None]]:
        """Hold a commit in another thread before it publishes, until the end. Yield what raises its error then."""
        is_held, goes_on = threading.Event(), threading.Event()
        publish, failed = Publishing.run, list[BaseException]()

        def run(publishing: Publishing, *given: Any) -> Any:
            if threading.current_thread() is thread:
                is_held.set()
                assert goes_on.wait(_LIMIT_S)
            return publish(publishing, *given)

        def work() -> None:
            try:
                commit()
            except BaseException as error:
                failed.append(error)
                is_held.set()

        def outcome() -> None:
            thread.join()
            for error in failed:
                raise error

        thread = threading.Thread(target=work)
        with mock.patch.object(Publishing, "run", run):
            thread.start()
            assert is_held.wait(_LIMIT_S)
            try:
                yield outcome
            finally:
                goes_on.set()
                thread.join()


if __name__ == "__main__":
    function, name_servers, target = sys.argv[1:]
    found = globals()[function](name_servers, **pickle.load(sys.stdin.buffer))
    Path(target).write_bytes(pickle.dumps(found))
