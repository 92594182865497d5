"""Queries on a place whose brokers go away, come back, are retired, or refuse to answer. Without Spark."""

import json
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from support.broker_place import ANSWERS, FIRST_MS, LEAVING, SILENT, UNLISTED, BrokerBackend, BrokerPlace, away, fill
from support.dict_backend import PLACES

from rmq_spark.datasource.options.read_options import ReadOptions, ReadSettings, parse_options
from rmq_spark.datasource.spark.batch_reader import RmqBatchReader
from rmq_spark.datasource.spark.stream_reader import RmqStreamReader
from rmq_spark.store.errors import BackendUnavailableError, DataLossError, NoPermissionError, NotFoundError, OptionError
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, Forbidden, Gone, QueueKey

NOW_MS = FIRST_MS + 3_600_000  # later than all messages of a queue with fewer than 3600
COLUMNS = ("brokerName", "queueId", "queueOffset")
EARLIEST = {"startingOffsets": "earliest"}


def parsed(given: dict[str, str]) -> tuple[ReadOptions, ReadSettings]:
    subscription = {} if "assign" in given else {"subscribe": "orders"}
    options = parse_options({"path": "main"} | subscription | given, NOW_MS, lambda found: BrokerPlace(found["path"]))
    settings = ReadSettings(COLUMNS, False, MAX_DECOMPRESSED_BYTES, options.fail_on_data_loss, secrets=options.location)
    return options, settings


class Stream:
    """A stream driven as by Spark. `restart` gives another run with the same checkpoint.

    With a `wait` the trigger is AvailableNow.
    """

    def __init__(self, checkpoint: str | None = None, wait: "Wait | None" = None, **given: str) -> None:
        self.now_ms = NOW_MS
        self.given = given
        options, settings = parsed(given)
        self.sleeps: list[float] = []
        sleep = self.sleeps.append if wait is None else wait
        self.reader = RmqStreamReader(options, settings, lambda: self.now_ms, sleep=sleep)
        self.committed = checkpoint or json.dumps(self.reader.initialOffset())
        if wait is not None:
            self.reader.prepareForTriggerAvailableNow()

    def restart(self, **given: str) -> "Stream":
        return Stream(self.committed, **(self.given | given))

    def plan(self) -> str:
        return json.dumps(self.reader.latestOffset(json.loads(self.committed), self.reader.getDefaultReadLimit()))

    def rows(self, start: str, end: str) -> list[tuple[str, int]]:
        """Return the broker and the queue offset of each row of a batch."""
        task = pickle.loads(pickle.dumps(self.reader))
        return [
            (row["brokerName"], row["queueOffset"])
            for partition in self.reader.partitions(json.loads(start), json.loads(end))
            for batch in task.read(pickle.loads(pickle.dumps(partition)))
            for row in batch.to_pylist()
        ]

    def trigger(self) -> list[tuple[str, int]]:
        """Run one micro-batch, and return its rows; [] if there is none."""
        end = self.plan()
        rows = [] if end == self.committed else self.rows(self.committed, end)
        self.committed = end
        return rows

    @property
    def positions(self) -> dict[str, int]:
        return json.loads(self.committed).get("orders", {})


@pytest.fixture(autouse=True)
def _brokers() -> Iterator[None]:
    """A topic with one queue of three messages at each of two brokers."""
    fill("a", 0, 3)
    fill("b", 0, 3)
    yield
    PLACES.clear()
    ANSWERS.clear()
    UNLISTED.clear()
    LEAVING.clear()
    SILENT.clear()


def leave(broker: str = "b", *, is_listed: bool = True) -> None:
    ANSWERS[broker] = away(broker)
    if not is_listed:
        UNLISTED.add(broker)


def come_back(broker: str = "b") -> None:
    del ANSWERS[broker]
    UNLISTED.discard(broker)


def offsets(broker: str, *numbers: int) -> list[tuple[str, int]]:
    return [(broker, number) for number in numbers]


is_listed = pytest.mark.parametrize("is_listed", [True, False])


@is_listed
def test_broker_that_leaves_keeps_its_positions_and_is_read_when_it_is_back(is_listed: bool) -> None:
    stream = Stream(**EARLIEST)
    assert stream.trigger() == offsets("a", 0, 1, 2) + offsets("b", 0, 1, 2)
    leave(is_listed=is_listed)
    before = stream.committed
    assert stream.trigger() == []
    assert stream.committed == before
    fill("a", 0, 1)
    fill("b", 0, 2)
    assert stream.trigger() == offsets("a", 3)
    assert stream.positions == {"a:0": 4, "b:0": 3}
    come_back()
    assert stream.trigger() == offsets("b", 3, 4)


@is_listed
def test_restart_without_a_broker_keeps_its_positions(is_listed: bool) -> None:
    stream = Stream(**EARLIEST)
    stream.trigger()
    leave(is_listed=is_listed)
    fill("b", 0, 2)
    stream = stream.restart()
    assert stream.trigger() == []
    assert stream.positions == {"a:0": 3, "b:0": 3}
    come_back()
    assert stream.trigger() == offsets("b", 3, 4)


@is_listed
def test_broker_that_was_away_at_the_first_plan_is_read_from_its_first_message(is_listed: bool) -> None:
    leave(is_listed=is_listed)
    stream = Stream(**EARLIEST)
    assert stream.trigger() == offsets("a", 0, 1, 2)
    stream = stream.restart()
    come_back()
    assert stream.trigger() == offsets("b", 0, 1, 2)


@is_listed
def test_latest_reads_of_a_broker_that_was_away_what_was_stored_since_the_begin(is_listed: bool) -> None:
    leave(is_listed=is_listed)
    stream = Stream()
    stream.now_ms = FIRST_MS + 62_000  # the third message and later ones are at most a minute older
    assert stream.trigger() == []
    fill("a", 0, 1)
    assert stream.trigger() == offsets("a", 3)
    stream = stream.restart(startingOffsets="earliest")  # without effect, as the begin is in the checkpoint
    come_back()
    fill("b", 0, 1)
    assert stream.trigger() == offsets("b", 2, 3)
    assert stream.trigger() == []


def test_broker_that_leaves_while_the_first_batch_is_planned_is_away() -> None:
    LEAVING.add("b")
    stream = Stream(startingTimestamp=str(FIRST_MS))
    assert stream.trigger() == offsets("a", 0, 1, 2)
    come_back()
    assert stream.trigger() == offsets("b", 0, 1, 2)


def test_starting_offset_of_a_queue_that_is_away_holds_when_it_is_back() -> None:
    leave()
    stream = Stream(startingOffsets='{"orders": {"a:0": 2, "b:0": 1}}')
    assert stream.trigger() == offsets("a", 2)
    come_back()
    assert stream.trigger() == offsets("b", 1, 2)


def test_plan_is_idle_while_a_broker_is_away() -> None:
    stream = Stream(**EARLIEST)
    leave()
    stream.trigger()
    start = json.loads(stream.committed)
    assert stream.reader.latestOffset(start, stream.reader.getDefaultReadLimit()) is start


def test_all_brokers_away_at_the_first_plan_is_a_first_batch_without_rows() -> None:
    leave("a")
    leave("b")
    stream = Stream()
    assert stream.trigger() == []
    assert json.loads(stream.committed) == {"@": {"v": 2, "start": {}, "since": NOW_MS - 60_000}}
    come_back("a")
    fill("a", 0, 1)
    assert stream.trigger() == []
    assert stream.positions == {"a:0": 4}, "the messages are an hour older than the query"


def test_limit_is_shared_among_the_brokers_that_answer() -> None:
    fill("a", 1, 5)
    leave()
    stream = Stream(maxOffsetsPerTrigger="4", **EARLIEST)
    assert len(stream.trigger()) == 4
    assert len(stream.trigger()) == 4
    come_back()
    assert stream.trigger() == offsets("b", 0, 1, 2)


def test_batch_that_was_planned_is_read_whole_after_its_broker_left() -> None:
    stream = Stream(**EARLIEST)
    end = stream.plan()
    leave(is_listed=False)
    restarted = stream.restart()
    partitions = restarted.reader.partitions(json.loads(stream.committed), json.loads(end))
    pieces = [(piece.queue.broker, piece.begin, piece.end) for part in partitions for piece in part.pieces]
    assert pieces == [("a", 0, 3), ("b", 0, 3)]


def test_partitions_have_no_secret() -> None:
    stream = Stream(**EARLIEST)
    partitions = stream.reader.partitions(json.loads(stream.committed), json.loads(stream.plan()))
    assert len(partitions) == 1
    assert b"planted" not in pickle.dumps(partitions)


def test_wait_is_for_messages_of_the_brokers_that_answer() -> None:
    stream = Stream(longPollingMs="5s", **EARLIEST)
    stream.trigger()
    leave()
    clock = iter(range(0, 100_000, 1000))
    stream.reader._monotonic_ms = lambda: float(next(clock))
    assert stream.trigger() == []
    waits = stream.reader._view.backend.waits
    assert len(waits) > 1
    assert all(after == {QueueKey("orders", 0, "a"): 3} for after in waits)
    come_back()
    fill("b", 0, 1)
    assert stream.trigger() == offsets("b", 3)


def test_progress_names_the_brokers_that_are_away() -> None:
    stream = Stream(**EARLIEST)
    stream.trigger()
    assert stream.reader.reportLatestOffset() == {"orders": {"a:0": 3, "b:0": 3}, "@": {"v": 2}}
    leave()
    stream.trigger()
    assert stream.reader.reportLatestOffset() == {
        "orders": {"a:0": 3},
        "@": {
            "v": 2,
            "away": {"b": {"since": "2023-11-14T22:13:20+00:00", "queues": 1, "reason": "the connection was refused"}},
        },
    }
    come_back()
    stream.trigger()
    assert stream.reader.reportLatestOffset()["@"] == {"v": 2}


def test_absence_and_return_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(**EARLIEST)
    stream.trigger()
    leave()
    for _ in range(3):
        fill("a", 0, 1)
        stream.trigger()
    come_back()
    for _ in range(3):
        fill("a", 0, 1)
        stream.trigger()
    lines = [record.getMessage() for record in caplog.records if "the broker b" in record.getMessage()]
    assert len(lines) == 2
    assert "away since 2023-11-14T22:13:20+00:00: the connection was refused. 1 of its queues" in lines[0]
    assert "is back" in lines[1]


def test_stream_fails_when_a_broker_is_away_for_longer_than_its_timeout() -> None:
    stream = Stream(brokerDownTimeout="10m", **EARLIEST)
    stream.now_ms = FIRST_MS + 599_999
    leave()
    assert stream.trigger() == offsets("a", 0, 1, 2)
    stream.now_ms += 1
    with pytest.raises(BackendUnavailableError, match=r"brokerDownTimeout=600000ms .*: b since .* retiredBrokers"):
        stream.trigger()


def test_queue_that_is_gone_is_a_loss() -> None:
    stream = Stream(**EARLIEST)
    stream.trigger()
    ANSWERS["b"] = Gone("the topic was deleted at the broker, which said so twice")
    with pytest.raises(DataLossError, match=r"in queue orders/b:0: .* the topic was deleted at the broker"):
        stream.trigger()
    stream = stream.restart(failOnDataLoss="false")
    stream.trigger()
    assert stream.positions == {"a:0": 3}


def test_queue_that_is_forbidden_names_the_right() -> None:
    ANSWERS["b"] = Forbidden("Topic: Get", "User:reader has no permission")
    with pytest.raises(NoPermissionError, match=r"queue orders/b:0 .*User:reader .*expected the right Topic: Get"):
        Stream(**EARLIEST).trigger()
    whole = "User:reader has no permission; expected the right Sub. Ask an administrator."
    ANSWERS["b"] = Forbidden("Topic: Get", whole)
    with pytest.raises(NoPermissionError) as caught:
        Stream(**EARLIEST).trigger()
    assert str(caught.value).endswith(f": {whole}")


def test_retired_broker_is_dropped_once(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(**EARLIEST)
    stream.trigger()
    fill("b", 0, 4)
    stream = stream.restart(retiredBrokers="b")
    stream.trigger()
    fill("a", 0, 1)
    assert stream.trigger() == offsets("a", 3)
    assert stream.positions == {"a:0": 4}
    lines = [record.getMessage() for record in caplog.records if "retiredBrokers" in record.getMessage()]
    assert len(lines) == 1
    assert "1 queues of the broker b; 4 messages of them were not read" in lines[0]


def test_batch_that_was_planned_before_its_broker_was_retired_logs_what_it_leaves_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = Stream(**EARLIEST)
    end = stream.plan()
    leave(is_listed=False)
    again = stream.restart(retiredBrokers="b")
    assert again.rows(again.committed, end) == offsets("a", 0, 1, 2)
    assert "leaves out 3 messages of the broker b" in caplog.text


def test_stream_waits_while_nobody_answers(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(**EARLIEST)
    stream.trigger()
    SILENT.append(True)
    fill("a", 0, 1)
    with caplog.at_level(logging.WARNING):
        assert stream.trigger() == stream.trigger() == []
    assert len([one for one in caplog.records if "no name server answered" in one.getMessage()]) == 1
    assert len(stream.sleeps) == 2
    SILENT.clear()
    assert stream.trigger() == offsets("a", 3)


def test_wait_for_messages_goes_on_while_nobody_answers() -> None:
    stream = Stream(longPollingMs="5s", **EARLIEST)
    stream.trigger()
    waits = stream.reader._view.backend.wait_for_messages

    def wait_for_messages(after: Any, timeout_ms: float) -> bool:
        SILENT.append(True)
        return waits(after, timeout_ms)

    stream.reader._view.backend.wait_for_messages = wait_for_messages
    assert stream.trigger() == []
    SILENT.clear()
    fill("a", 0, 1)
    assert stream.trigger() == offsets("a", 3)


def test_stream_fails_if_nobody_answers_for_longer_than_the_timeout() -> None:
    stream = Stream(brokerDownTimeout="10m", **EARLIEST)
    stream.trigger()
    SILENT.append(True)
    assert stream.trigger() == []
    stream.now_ms += 600_000
    with pytest.raises(BackendUnavailableError, match="no name server answered"):
        stream.trigger()


def test_stream_fails_if_nobody_answers_at_its_start() -> None:
    SILENT.append(True)
    with pytest.raises(BackendUnavailableError, match="no name server answered"):
        Stream(**EARLIEST).trigger()


class Wait:
    """The sleep of a query that waits for a broker. The broker comes back in the last of some pauses."""

    def __init__(self, pauses: int) -> None:
        self.left = pauses

    def __call__(self, seconds: float) -> None:
        self.left -= 1
        if not self.left:
            come_back()


@is_listed
def test_available_now_waits_for_a_broker(is_listed: bool) -> None:
    stream = Stream(**EARLIEST)
    stream.trigger()
    fill("b", 0, 2)
    leave(is_listed=is_listed)
    wait = Wait(3)
    later = Stream(stream.committed, wait, **EARLIEST)
    assert later.trigger() == offsets("b", 3, 4)
    assert wait.left == 0
    assert later.trigger() == []


def batch(sleeps: list[float], **given: str) -> list[tuple[str, int]]:
    """Return the rows of a batch query. The broker b comes back after three pauses."""

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            come_back()

    reader = RmqBatchReader(*parsed(given), lambda: sum(sleeps) * 1000, sleep)
    partitions = reader.partitions()
    task = pickle.loads(pickle.dumps(reader))
    rows = [row for part in partitions for found in task.read(part) for row in found.to_pylist()]
    return [(row["brokerName"], row["queueOffset"]) for row in rows]


@pytest.mark.parametrize("given", [{}, {"brokerDownTimeout": "0"}, {"brokerDownTimeout": "1501ms"}])
def test_batch_query_waits_for_a_broker(given: dict[str, str]) -> None:
    leave()
    assert batch([], **given) == offsets("a", 0, 1, 2) + offsets("b", 0, 1, 2)


def test_batch_query_fails_when_a_broker_stays_away() -> None:
    leave()
    sleeps: list[float] = []
    with pytest.raises(BackendUnavailableError, match=r"brokerDownTimeout=900ms for brokers .*: b since"):
        batch(sleeps, brokerDownTimeout="900ms")
    assert sum(sleeps) == pytest.approx(0.9)


NAMED = {  # options, offsets of the rows
    "assign": ({"assign": '{"orders": [0]}'}, (0, 1, 2)),
    "startingOffsets": ({"startingOffsets": '{"orders": {"0": 2}}'}, (2,)),
    "endingOffsets": ({"endingOffsets": '{"orders": {"0": 2}}'}, (0, 1)),
    "startingTimestamp": ({"startingTimestamp": json.dumps({"orders": {"0": FIRST_MS + 1000}})}, (1, 2)),
    "endingTimestamp": ({"endingTimestamp": json.dumps({"orders": {"0": FIRST_MS + 1000}})}, (0,)),
}
each_named = pytest.mark.parametrize(("given", "numbers"), NAMED.values(), ids=NAMED)


@each_named
def test_queue_id_alone_is_that_of_the_only_broker(given: dict[str, str], numbers: tuple[int, ...]) -> None:
    del PLACES["main"][fill("b", 0, 0)]
    assert batch([], **given) == offsets("a", *numbers)
    earliest = {} if given.keys() & {"startingOffsets", "startingTimestamp"} else EARLIEST
    assert Stream(**(earliest | given)).trigger() == offsets("a", *numbers)


@each_named
def test_queue_id_alone_is_refused_where_several_brokers_have_the_topic(
    given: dict[str, str], numbers: tuple[int, ...]
) -> None:
    name = next(iter(given))
    with pytest.raises(OptionError, match=f'^{name}: .* expected one of the brokers a, b before it, as in "a:0"'):
        batch([], **given)


def test_broker_name_alone_chooses_among_several() -> None:
    assert batch([], assign='{"orders": ["b:0"]}') == offsets("b", 0, 1, 2)
    with pytest.raises(NotFoundError, match=r'topic "orders" has no queue c:0\. Its queues are: a:0, b:0'):
        batch([], assign='{"orders": ["c:0"]}')


def test_restarted_query_needs_no_broker_in_its_start() -> None:
    del PLACES["main"][fill("b", 0, 0)]
    stream = Stream(startingOffsets='{"orders": {"0": 1}}')
    assert stream.trigger() == offsets("a", 1, 2)
    fill("b", 0, 1)
    assert stream.restart().trigger() == []


def test_checkpoint_of_a_directory_is_refused_with_offsets_to_paste() -> None:
    with pytest.raises(OptionError, match=r'is one of a store directory; .* startingOffsets={"orders":{"0":3}} '):
        Stream('{"orders": {"0": 3}, "@": {"v": 1}}').trigger()


def has_ended(stream: Stream) -> bool:
    return bool(json.loads(stream.committed)["@"].get("ended", False))


def test_stream_with_an_end_time_does_not_end_while_a_broker_is_away() -> None:
    end_ms = NOW_MS + 60_000
    stream = Stream(**EARLIEST, endingTimestamp=str(end_ms))
    assert len(stream.trigger()) == 6
    fill("b", 0, 1)
    leave()
    stream.now_ms = end_ms + 60_000
    assert stream.trigger() == []
    assert not has_ended(stream), "the end of the queue of b is not known"
    come_back()
    assert stream.trigger() == offsets("b", 3)
    assert has_ended(stream)


def test_stream_with_end_offsets_does_not_end_if_a_broker_leaves_during_its_first_plan() -> None:
    LEAVING.add("b")
    stream = Stream(startingTimestamp=str(FIRST_MS), endingOffsets="latest")
    assert stream.trigger() == offsets("a", 0, 1, 2)
    assert not has_ended(stream), "the queue of b was not read"
    come_back()
    assert stream.trigger() == offsets("b", 0, 1, 2)
    assert has_ended(stream)


def test_task_of_several_queues_asks_for_each_position_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(**EARLIEST)
    end = stream.plan()
    (partition,) = stream.reader.partitions(json.loads(stream.committed), json.loads(end))
    asked: list[Any] = []
    positions = BrokerBackend.positions

    def record(backend: BrokerBackend, at: Any) -> Any:
        asked.extend(at)
        return positions(backend, at)

    monkeypatch.setattr(BrokerBackend, "positions", record)
    assert sum(batch.num_rows for batch in stream.reader.read(partition)) == 6
    assert sorted(asked) == [(QueueKey("orders", 0, broker), offset) for broker in "ab" for offset in (0, 2)]
