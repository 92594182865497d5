"""The ledger on its broker: where it is, what is read of it, and when a row counts as written."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.sent_messages import address_of, read_rows

from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.exactly_once import ledger_rows
from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.ledger_rows import (
    Done,
    Intent,
    LastBatch,
    LedgerRow,
    LedgerState,
    OpenIntent,
    Take,
    encode_row,
    tag_of,
)
from rmq_spark.store.cluster.exactly_once.marks import Mark, Marks, find_old_marks, marks_group
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BatchConflictError,
    BrokerError,
    IntentStuckError,
    NoPermissionError,
    OptionError,
    StoreError,
    UnknownOutcomeError,
)
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import Answer, Call

RunCluster = Callable[..., RunningCluster]
TOPIC = "RMQ_SPARK_LEDGER"
QUEUE = QueueKey(TOPIC, 0)
Q, OTHER = "5b2c1f6e-3f0e-4c57-9d0a-2f0f6b3d8e11", "another"
SEND, PULL = RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE
COMMIT, ROUTE = RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.GET_ROUTEINFO_BY_TOPIC
CREATE_GROUP = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP


def intent(batch: int, session: str = "e1", query: str = Q) -> Intent:
    return Intent(CommitKey(query, batch), session, 0, 4, 9)


def done(batch: int, session: str = "e1", query: str = Q) -> Done:
    return Done(CommitKey(query, batch), session, 0, 4, 9)


def key(batch: int = 0) -> CommitKey:
    return CommitKey(Q, batch)


def write(ledger: Ledger, *rows: LedgerRow) -> None:
    for row in rows:
        ledger.append(row, encode_row(row))


@pytest.fixture(params=["5.3", "4.9"])
def cluster(run_cluster: RunCluster, request: pytest.FixtureRequest) -> RunningCluster:
    """Two brokers and two name servers. The ledger is on the first broker."""
    cluster = run_cluster(release=request.param, brokers=2, name_servers=2)
    cluster.create_topic(TOPIC, queues=3, brokers=["broker-a"])
    return cluster


@contextmanager
def open_ledger(
    cluster: RunningCluster, on_wait: Callable[[], None] = lambda: None, **address: Any
) -> Iterator[Ledger]:
    client = ClusterClient(address_of(cluster, **{"request_timeout_ms": 10_000, **address}))
    try:
        yield Ledger(client, TOPIC, on_wait)
    finally:
        client.close()


@pytest.fixture
def ledger(cluster: RunningCluster) -> Iterator[Ledger]:
    with open_ledger(cluster) as ledger:
        yield ledger


@pytest.fixture
def _time_flies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ledger's patience end after a few tries, without waiting."""
    clock = itertools.count(step=20_000)
    monkeypatch.setattr("rmq_spark.store.cluster.exactly_once.ledger.monotonic_ms", lambda: next(clock))


def expire(cluster: RunningCluster, before: int, *, keeps_minimum: bool = False) -> None:
    cluster.brokers["broker-a"].expire(TOPIC, 0, before, keeps_minimum=keeps_minimum)


def offsets(cluster: RunningCluster, query: str = Q, namespace: str = "") -> dict[int, int]:
    """Return the marks of a query as the broker has them."""
    prefix = f"{namespace}%" if namespace else ""
    known = cluster.brokers["broker-a"].offsets.committed
    group = prefix + marks_group(query)
    return {queue.queue_id: offset for (one, queue), offset in known.items() if one == group}


# Where it is.


def test_the_ledger_is_found_on_its_broker(cluster: RunningCluster, ledger: Ledger) -> None:
    location = ledger.find()
    assert (location.broker, location.address) == ("broker-a", cluster.brokers["broker-a"].address)


def test_a_ledger_that_one_of_the_name_servers_lists_is_found(cluster: RunningCluster, ledger: Ledger) -> None:
    cluster.name_servers[0].fail(ROUTE, faults.with_code(ResponseCode.TOPIC_NOT_EXIST, "no route"))
    assert ledger.find().broker == "broker-a"
    cluster.name_servers[1].stop()
    with pytest.raises(BackendUnavailableError, match="is nowhere"):
        ledger.find()


def test_no_ledger_is_an_error_that_names_the_command(run_cluster: RunCluster) -> None:
    with open_ledger(run_cluster()) as ledger, pytest.raises(BackendUnavailableError) as error:
        ledger.find()
    assert "the ledger RMQ_SPARK_LEDGER is nowhere" in str(error.value)
    assert "rmq prepare-sink" in str(error.value)


def test_an_address_that_is_no_name_server_is_told_from_a_missing_ledger(
    cluster: RunningCluster, ledger: Ledger
) -> None:
    for server in cluster.name_servers:
        server.fail(ROUTE, faults.with_code(ResponseCode.REQUEST_CODE_NOT_SUPPORTED))
    with pytest.raises(BrokerError, match="so it is a broker"):
        ledger.find()


def test_two_ledgers_are_an_error_also_if_each_name_server_lists_one(cluster: RunningCluster, ledger: Ledger) -> None:
    cluster.create_topic(TOPIC, queues=3, brokers=["broker-b"])
    cluster.name_servers[0].forget("broker-a")
    cluster.name_servers[1].forget("broker-b")
    with pytest.raises(
        BrokerError, match="there are two ledgers: topic RMQ_SPARK_LEDGER is on the brokers broker-a, b"
    ):
        ledger.find()


def test_a_ledger_that_has_moved_to_another_broker_is_a_second_one(cluster: RunningCluster, ledger: Ledger) -> None:
    ledger.find()
    cluster.create_topic(TOPIC, queues=3, brokers=["broker-b"])
    cluster.forget("broker-a")
    with pytest.raises(BrokerError, match="there are two ledgers"):
        ledger.find()


def test_a_ledger_without_a_master_is_away(cluster: RunningCluster, ledger: Ledger) -> None:
    cluster.add_slave("broker-a")
    given = ("broker-a", cluster.brokers["broker-a"].address)
    cluster.forget("broker-a")
    with pytest.raises(BackendUnavailableError, match="broker-a has no master"):
        ledger.find()
    with (
        open_ledger(cluster, broker_addresses=(given,)) as mapped,
        pytest.raises(BackendUnavailableError, match="broker-a has no master"),
    ):
        mapped.find()


@pytest.mark.parametrize("perm", [2, 4])
def test_a_ledger_that_cannot_be_read_and_written_is_an_error(
    cluster: RunningCluster, ledger: Ledger, perm: int
) -> None:
    cluster.create_topic(TOPIC, queues=3, brokers=["broker-a"], perm=perm)
    with pytest.raises(NoPermissionError, match=f"has perm {perm}; expected 6"):
        ledger.find()


def test_a_wrong_account_is_named_and_nothing_is_waited_for(cluster: RunningCluster) -> None:
    cluster.brokers["broker-a"].accounts = AccountTable(Account("key", "secret"))
    with open_ledger(cluster, credentials=Credentials("key", "wrong")) as ledger, pytest.raises(OptionError):
        ledger.find()


def test_another_broker_at_the_address_is_not_taken_for_the_ledgers(cluster: RunningCluster) -> None:
    cluster.create_topic(TOPIC, queues=3, brokers=["broker-b"])
    cluster.forget("broker-b")
    wrong = ("broker-a", cluster.brokers["broker-b"].address)
    with (
        open_ledger(cluster, broker_addresses=(wrong,)) as ledger,
        pytest.raises(BackendUnavailableError, match="found the broker broker-b there; expected broker-a"),
    ):
        ledger.find()


def test_a_new_connection_is_asked_again_whose_it_is(cluster: RunningCluster, ledger: Ledger) -> None:
    ledger.read(key())
    stats = RequestCode.GET_TOPIC_STATS_INFO
    before = len(cluster.brokers["broker-a"].seen_requests(stats))
    ledger.read(key())
    assert len(cluster.brokers["broker-a"].seen_requests(stats)) == before
    cluster.brokers["broker-a"].fail(PULL, faults.closes_connection(), times=1)
    ledger.read(key())
    ledger.read(key())
    assert len(cluster.brokers["broker-a"].seen_requests(stats)) == before + 1


def test_no_broker_creates_a_second_ledger(cluster: RunningCluster) -> None:
    """Brokers create topics at their first message, unless it names no topic to inherit from."""
    other = cluster.brokers["broker-b"]
    other.settings.creates_topics = True
    with open_ledger(cluster) as ledger:
        location = ledger.find()
        moved = type(location)("broker-a", other.address)
        ledger._location, ledger._proved = moved, ledger._client.connection_number(other.address)
        write(ledger, intent(0))  # an old route leads it to broker-b first
    assert TOPIC not in other.topics
    assert len(other.seen_requests(SEND)) == 1
    assert len(read_rows(cluster, TOPIC)[QueueKey(TOPIC, 0, "broker-a")]) == 1


# Reading.


def test_a_new_query_has_no_rows_and_no_marks(ledger: Ledger) -> None:
    view = ledger.read(key())
    assert (view.begin, view.end, view.rows, view.has_expired) == (0, 0, (), False)
    assert view.marks.is_new
    assert view.state() == LedgerState()


def test_the_broker_filters_by_the_tag(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(0))
    cluster.send(TOPIC, b"no row", broker="broker-a", queue_id=0, tags="else")
    cluster.send(TOPIC, b"no row", broker="broker-a", queue_id=0)
    view = ledger.read(key())
    assert (len(view.rows), view.end) == (1, 3)


def test_the_rows_of_a_query_are_read_in_order_and_no_others(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(0, query=OTHER), intent(0), Take(key(), "e2", 0), done(0, query=OTHER), done(0, "e2"))
    view = ledger.read(key())
    assert [one.offset for one in view.rows] == [1, 2, 4]
    assert (view.begin, view.end, view.has_expired) == (0, 5, False)
    assert view.state() == LedgerState(LastBatch(0, 4, 9), None, 1)


def test_a_query_with_the_same_tag_is_told_apart(
    cluster: RunningCluster, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("ledger", "ledger_messages"):
        monkeypatch.setattr(f"rmq_spark.store.cluster.exactly_once.{module}.tag_of", lambda query: "Aa")
    write(ledger, intent(3, query=OTHER), intent(0))
    cluster.send(TOPIC, b'{"query": "third", "v": 9}', broker="broker-a", queue_id=0, tags="BB")  # the hash of "Aa"
    assert [one.row for one in ledger.read(key()).rows] == [intent(0)]


def test_a_row_has_the_tag_and_the_key_of_its_query(cluster: RunningCluster, ledger: Ledger) -> None:
    strange = "txn:a b\x01"
    write(ledger, intent(0), intent(0, query=strange))
    first, second = read_rows(cluster, TOPIC)[QueueKey(TOPIC, 0, "broker-a")]
    assert (first["tags"], first["keys"]) == (tag_of(Q), Q)
    assert (second["tags"], second["keys"]) == (tag_of(strange), "txn%3Aa%20b%01")
    assert [one.row for one in ledger.read(CommitKey(strange, 0)).rows] == [intent(0, query=strange)]


def test_many_rows_are_read_by_several_pulls(cluster: RunningCluster, ledger: Ledger) -> None:
    bodies = [encode_row(intent(number, query=OTHER)) for number in range(40)]
    cluster.send(TOPIC, *bodies, broker="broker-a", queue_id=0, tags=tag_of(OTHER))
    bodies = [encode_row(done(number)) for number in range(40)]
    cluster.send(TOPIC, *bodies, broker="broker-a", queue_id=0, tags=tag_of(Q))
    assert len(ledger.read(key()).rows) == 40
    assert len(ledger.read(CommitKey(OTHER, 0)).rows) == 40


def test_a_row_of_a_newer_version_is_an_error_that_names_the_offset(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(0))
    body = encode_row(done(0)).replace(b'"v":1', b'"v":2')
    cluster.send(TOPIC, body, broker="broker-a", queue_id=0, tags=tag_of(Q))
    with pytest.raises(StoreError, match="newer rmq-spark") as error:
        ledger.read(key())
    assert "ledger offset 1 in queue RMQ_SPARK_LEDGER/0 of broker broker-a" in str(error.value)


def test_reading_begins_at_the_mark(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(0), done(0), intent(1), done(1))
    for mark, value in ((Mark.FROM, 2), (Mark.BEGUN, 2), (Mark.DONE, 2)):
        ledger.store_mark(Q, mark, value)
    view = ledger.read(key(2))
    assert (view.marks, view.begin, len(view.rows)) == (Marks(2, 2, 2), 2, 2)
    assert view.state().last == LastBatch(1, 4, 9)


def test_reading_from_the_end_finds_nothing_expired(ledger: Ledger) -> None:
    ledger.store_mark(Q, Mark.BEGUN, 1)
    ledger.store_mark(Q, Mark.FROM, 0)
    assert not ledger.read(key()).has_expired


@pytest.mark.parametrize("keeps_minimum", [False, True])
def test_rows_that_have_expired_are_noticed_whatever_the_min_offset(
    cluster: RunningCluster, ledger: Ledger, keeps_minimum: bool
) -> None:
    write(ledger, intent(0), done(0), intent(1, query=OTHER), intent(2, query=OTHER))
    for mark, value in ((Mark.FROM, 0), (Mark.BEGUN, 1), (Mark.DONE, 1)):
        ledger.store_mark(Q, mark, value)
    assert not ledger.read(key(1)).has_expired
    expire(cluster, 3, keeps_minimum=keeps_minimum)
    view = ledger.read(key(1))
    assert (view.has_expired, view.rows) == (True, ())
    assert view.state().last == LastBatch(0)
    expire(cluster, 4, keeps_minimum=keeps_minimum)  # all
    assert ledger.read(key(1)).has_expired


def lose_file(cluster: RunningCluster, offset: int, *, next_offset: int = 300_000, times: int | None = None) -> None:
    """Let the file with the entry at an offset of the ledger's queue be missing, as after retention or damage."""

    def miss(answer: Answer) -> Answer:
        fields = {**answer.fields, "nextBeginOffset": str(next_offset)}
        return replace(answer, code=ResponseCode.PULL_NOT_FOUND, fields=fields, body=b"", remark="OFFSET_FOUND_NULL")

    def is_there(call: Call) -> bool:
        return call.command.fields["queueOffset"] == str(offset)

    cluster.brokers["broker-a"].fail(PULL, faults.changed(miss), times, when=is_there)


def test_a_missing_file_at_the_first_offset_means_that_rows_have_expired(
    cluster: RunningCluster, ledger: Ledger
) -> None:
    """A broker of 4.9 keeps the old minimum when all rows have expired."""
    write(ledger, intent(0), done(0))
    for mark, value in ((Mark.FROM, 0), (Mark.BEGUN, 1), (Mark.DONE, 1)):
        ledger.store_mark(Q, mark, value)
    lose_file(cluster, 0)
    view = ledger.read(key(1))
    assert view.has_expired
    assert view.state().last == LastBatch(0)


def test_missing_files_at_the_beginning_are_passed_over(
    cluster: RunningCluster, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the pull that looks for the first row again finds it, because something was wrong for a moment only."""
    write(ledger, intent(0), done(0), done(0), done(0))
    for mark, value in ((Mark.FROM, 0), (Mark.BEGUN, 1), (Mark.DONE, 1)):
        ledger.store_mark(Q, mark, value)
    lose_file(cluster, 0, next_offset=1, times=1)
    lose_file(cluster, 1, next_offset=2)
    view = ledger.read(key(1))
    assert view.has_expired
    assert [one.offset for one in view.rows] == [2, 3]


def test_a_missing_file_at_a_later_offset_is_an_error(
    cluster: RunningCluster, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.exactly_once.ledger._PULL_MESSAGES", 1)
    write(ledger, intent(0), done(0))
    lose_file(cluster, 1)
    with pytest.raises(BackendUnavailableError, match=r"has no file with the entry at ledger offset 1 .*Restart the"):
        ledger.read(key())


def test_a_batch_that_began_before_the_oldest_row_is_stuck(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(0), intent(0, query=OTHER))
    ledger.store_mark(Q, Mark.FROM, 0)
    ledger.store_mark(Q, Mark.BEGUN, 1)
    expire(cluster, 1)
    with pytest.raises(IntentStuckError, match="begun before the oldest ledger row"):
        ledger.read(key()).state()


def test_rows_that_expire_while_they_are_read_are_noticed(
    cluster: RunningCluster, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late intent is void, but the rows that make it void expire before they are read."""
    write(ledger, intent(0), done(0), intent(0, "late"))
    ledger.store_mark(Q, Mark.FROM, 0)
    ledger.store_mark(Q, Mark.BEGUN, 1)
    assert ledger.read(key()).state() == LedgerState(LastBatch(0, 4, 9), None, 0)
    pull_pages = Ledger._pull_pages

    def expiring(self: Ledger, query_id: str, begin: int) -> Any:
        expire(cluster, 2)
        return pull_pages(self, query_id, begin)

    monkeypatch.setattr(Ledger, "_pull_pages", expiring)
    view = ledger.read(key())
    assert (len(view.rows), view.has_expired) == (1, True)
    with pytest.raises(IntentStuckError):
        view.state()


@pytest.mark.usefixtures("_time_flies")
def test_a_ledger_that_ends_before_the_mark_was_replaced(ledger: Ledger) -> None:
    write(ledger, intent(0))
    ledger.store_mark(Q, Mark.FROM, 7)
    ledger.store_mark(Q, Mark.BEGUN, 1)
    with pytest.raises(BatchConflictError, match="it ends at ledger offset 1; expected at least 7"):
        ledger.read(key())


def test_a_reset_of_the_reading_group_is_no_reason_to_leave_rows_out(run_cluster: RunCluster) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic(TOPIC, queues=3)
    with open_ledger(cluster) as ledger:
        write(ledger, intent(0))
        broker = cluster.broker
        broker.loop.run(broker.offsets.reset, "RMQ_SPARK_READER", QUEUE, 1)
        assert len(ledger.read(key()).rows) == 1


def test_a_broker_that_is_back_at_another_address_is_found(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(0))
    cluster.brokers["broker-a"].kill()
    cluster.brokers["broker-a"].restart(new_port=True)
    assert len(ledger.read(key()).rows) == 1
    cluster.brokers["broker-a"].kill()
    cluster.brokers["broker-a"].restart(new_port=True)
    write(ledger, done(0))
    assert ledger.read(key()).state().last == LastBatch(0, 4, 9)


def test_a_plain_write_reads_from_the_end_at_its_begin_and_has_no_marks(
    cluster: RunningCluster, ledger: Ledger
) -> None:
    write(ledger, intent(0, query=OTHER))
    begin = ledger.end()
    plain = CommitKey(Q)
    write(ledger, Intent(plain, "e1", 0, 4, 9))
    cluster.clear_requests()
    view = ledger.read(plain, begin)
    assert (view.begin, view.end, len(view.rows), view.marks.is_kept) == (1, 2, 1, False)
    assert RequestCode.QUERY_CONSUMER_OFFSET not in cluster.clear_requests()["broker-a"]
    assert view.state().open == OpenIntent(Intent(plain, "e1", 0, 4, 9), ("e1",))


def test_the_namespace_is_in_the_names_of_topic_and_group(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic(f"shop%{TOPIC}", queues=3)
    with open_ledger(cluster, namespace="shop") as ledger:
        write(ledger, intent(0))
        ledger.store_mark(Q, Mark.BEGUN, 1)
        assert ledger.read(key()).state().open is not None
    assert offsets(cluster, namespace="shop") == {1: 1}
    groups = cluster.broker.groups
    assert {"shop%RMQ_SPARK_READER", f"shop%{marks_group(Q)}"} <= groups


# Appending.


def test_a_row_counts_as_written_only_after_the_answer_0(cluster: RunningCluster, ledger: Ledger) -> None:
    late = ResponseCode.SLAVE_NOT_AVAILABLE
    cluster.brokers["broker-a"].fail(SEND, faults.stored_late(late), times=2)
    write(ledger, intent(0))
    rows = read_rows(cluster, TOPIC)[QueueKey(TOPIC, 0, "broker-a")]
    assert [row["body"] for row in rows] == [encode_row(intent(0))] * 3  # the same bytes
    assert ledger.read(key()).state().open == OpenIntent(intent(0), ("e1",))


@pytest.mark.parametrize(
    "fault",
    [
        faults.closes_connection(executes=True),
        faults.closes_connection(executes=False),
        faults.nothing(executes=True),
        faults.garbage(executes=True),
        faults.disk_full(),
        faults.busy(),
        faults.with_code(ResponseCode.SYSTEM_ERROR, "out of memory"),
    ],
)
def test_a_row_without_a_clear_answer_is_sent_again(
    cluster: RunningCluster, ledger: Ledger, fault: faults.Fault
) -> None:
    cluster.brokers["broker-a"].fail(SEND, fault, times=1)
    with open_ledger(cluster, request_timeout_ms=300) as impatient:
        write(impatient, intent(0))
    assert ledger.read(key()).state().open == OpenIntent(intent(0), ("e1",))


@pytest.mark.usefixtures("_time_flies")
def test_a_slave_that_stays_away_is_a_clear_error(cluster: RunningCluster) -> None:
    cluster.brokers["broker-a"].fail(SEND, faults.stored_late(ResponseCode.SLAVE_NOT_AVAILABLE))
    waits = []
    with (
        open_ledger(cluster, lambda: waits.append(1)) as ledger,
        pytest.raises(BrokerError, match="11 SLAVE_NOT_AVAILABLE") as error,
    ):
        write(ledger, intent(0))
    assert error.value.code == ResponseCode.SLAVE_NOT_AVAILABLE
    assert "SYNC_MASTER without one" in str(error.value)
    assert "The row may count nevertheless" in str(error.value)
    assert len(waits) > 2  # the caller has kept its connections alive


@pytest.mark.usefixtures("_time_flies")
@pytest.mark.parametrize(
    ("row", "state"),
    [
        (intent(0), "The row begins the batch: none of its rows is in its queue yet."),
        (Take(key(0), "e2", 0), "The row takes the batch over: an earlier session has begun it, and may have stored "),
        (done(0), "The row ends the batch: 4 of its rows are in their queues."),
        (Done(key(0), "e1", 0, 4, 9, 3, 1), "The row ends the batch: 3 of its rows are in their queues."),
    ],
)
def test_a_late_row_says_what_is_in_the_queues(cluster: RunningCluster, row: LedgerRow, state: str) -> None:
    cluster.brokers["broker-a"].fail(SEND, faults.stored_late(ResponseCode.SLAVE_NOT_AVAILABLE))
    with open_ledger(cluster) as ledger, pytest.raises(BrokerError) as error:
        write(ledger, row)
    assert state in str(error.value)


@pytest.mark.usefixtures("_time_flies")
def test_a_row_that_may_be_stored_is_an_unknown_outcome(cluster: RunningCluster, ledger: Ledger) -> None:
    cluster.brokers["broker-a"].fail(SEND, faults.closes_connection(executes=False))
    with pytest.raises(UnknownOutcomeError, match="may be in the ledger or not, and it may appear later"):
        write(ledger, intent(0))


@pytest.mark.usefixtures("_time_flies")
def test_a_row_that_was_never_sent_is_not_stored(cluster: RunningCluster, ledger: Ledger) -> None:
    ledger.find()
    cluster.brokers["broker-a"].kill()
    with pytest.raises(BackendUnavailableError, match="cannot be stored in the ledger"):
        write(ledger, intent(0))


def test_a_row_that_is_refused_is_not_sent_again(cluster: RunningCluster, ledger: Ledger) -> None:
    ledger.find()
    refusal = faults.with_code(ResponseCode.MESSAGE_ILLEGAL, "the message is illegal")
    cluster.brokers["broker-a"].fail(SEND, refusal)
    with pytest.raises(BrokerError):
        write(ledger, intent(0))
    assert len(cluster.brokers["broker-a"].seen_requests(SEND)) == 1


def test_a_row_can_have_several_megabytes(ledger: Ledger) -> None:
    large = Intent(key(), "e" * (ledger_rows.MAX_INTENT_BYTES - 500), 0, 4, 9)
    write(ledger, large)
    assert ledger.read(key()).rows[0].row == large


# One's own row.


def test_the_ledger_is_read_through_ones_own_row(cluster: RunningCluster, ledger: Ledger) -> None:
    view = ledger.read(key())
    write(ledger, intent(0, "e2"), intent(0))  # another session was first
    through = ledger.read_through(view, intent(0))
    assert through.state().open == OpenIntent(intent(0, "e2"), ("e2",))


def test_reading_through_waits_until_the_row_is_visible(cluster: RunningCluster, ledger: Ledger) -> None:
    view = ledger.read(key())
    cluster.brokers["broker-a"].settings.dispatch_delay_ms = 100
    write(ledger, intent(0))
    assert ledger.read_through(view, intent(0)).state().open is not None


@pytest.mark.usefixtures("_time_flies")
def test_a_row_that_never_becomes_visible_is_an_error(ledger: Ledger) -> None:
    view = ledger.read(key())
    with pytest.raises(BackendUnavailableError, match="does not show a row of batch 0"):
        ledger.read_through(view, intent(0))


def test_reading_on_holds_on_to_what_was_believed(cluster: RunningCluster, ledger: Ledger) -> None:
    """After expiry the last batch is known by the marks. The next intent is trusted: none before it is missing."""
    write(ledger, intent(0), done(0), intent(1, query=OTHER))
    for mark, value in ((Mark.FROM, 0), (Mark.BEGUN, 1), (Mark.DONE, 1)):
        ledger.store_mark(Q, mark, value)
    expire(cluster, 2)
    view = ledger.read(key(1))
    assert view.state().last == LastBatch(0)
    write(ledger, intent(1))
    through = ledger.read_through(view, intent(1))
    assert through.state() == LedgerState(LastBatch(0), OpenIntent(intent(1), ("e1",)), 3)


def test_rows_that_expired_between_two_looks_end_the_session(cluster: RunningCluster, ledger: Ledger) -> None:
    view = ledger.read(key())
    write(ledger, intent(0, "e2"), intent(0))
    expire(cluster, 1)
    with pytest.raises(BackendUnavailableError, match="have expired since the last look"):
        ledger.read_on(view).state()


# Marks.


def test_marks_are_stored_and_read(cluster: RunningCluster, ledger: Ledger) -> None:
    for mark, value in ((Mark.FROM, 70), (Mark.BEGUN, 4), (Mark.DONE, 3)):
        ledger.store_mark(Q, mark, value)
    assert offsets(cluster) == {0: 70, 1: 4, 2: 3}
    assert ledger.read_marks(Q) == Marks(70, 4, 3)
    assert ledger.read_marks(OTHER).is_new


def test_a_group_that_does_not_exist_is_created(cluster: RunningCluster, ledger: Ledger) -> None:
    is_5 = cluster.brokers["broker-a"].release.is_5
    ledger.store_mark(Q, Mark.BEGUN, 4)
    ledger.store_mark(Q, Mark.BEGUN, 5)
    assert len(cluster.brokers["broker-a"].seen_requests(CREATE_GROUP)) == int(is_5)
    assert offsets(cluster) == {1: 5}


def test_a_group_is_created_by_a_heartbeat_where_the_account_must_not_create_it(run_cluster: RunCluster) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic(TOPIC, queues=3)
    rights = {"topics": {"*": "PUB|SUB|GET"}, "groups": {"*": "SUB"}}
    cluster.broker.accounts = AccountTable(Account("key", "secret", **rights))
    refusal = faults.with_code(ResponseCode.NO_PERMISSION, "User:key has no permission to access")
    cluster.broker.fail(CREATE_GROUP, refusal)
    with open_ledger(cluster, credentials=Credentials("key", "secret")) as ledger:
        ledger.store_mark(Q, Mark.BEGUN, 1)
        assert cluster.broker.seen_requests(RequestCode.HEART_BEAT)
        assert cluster.broker.members.ids(marks_group(Q)) == []


def test_a_broker_that_ends_while_it_creates_a_group_has_not_refused(run_cluster: RunCluster) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic(TOPIC, queues=3)
    cluster.broker.fail(CREATE_GROUP, faults.garbage(), times=1)
    with open_ledger(cluster) as ledger:
        with pytest.raises(BackendUnavailableError, match="not a frame"):
            ledger.store_mark(Q, Mark.BEGUN, 1)
        ledger.store_mark(Q, Mark.BEGUN, 1)
    assert offsets(cluster) == {1: 1}


def test_a_mark_of_a_later_batch_is_no_loss(cluster: RunningCluster, ledger: Ledger) -> None:
    """Another session has begun a later batch, just after this one has stored its mark."""

    def overtake(call: Call, serve: Callable[[], None]) -> None:
        serve()
        cluster.brokers["broker-a"].offsets.commit(marks_group(Q), QueueKey(TOPIC, Mark.BEGUN), 3)

    ledger.store_mark(Q, Mark.BEGUN, 1)
    cluster.brokers["broker-a"].fail(COMMIT, overtake, times=1)
    ledger.store_mark(Q, Mark.BEGUN, 2)
    assert offsets(cluster) == {1: 3}


def test_an_account_without_rights_is_told_so_and_creates_no_group(run_cluster: RunCluster) -> None:
    """A group that exists may not be written again: that would replace its settings."""
    cluster = run_cluster(release="5.3")
    cluster.create_topic(TOPIC, queues=3)
    rights = {"topics": {"*": "PUB|SUB|GET"}, "groups": {"RMQ_SPARK_READER": "SUB"}}
    cluster.broker.accounts = AccountTable(Account("key", "secret", **rights))
    with (
        open_ledger(cluster, credentials=Credentials("key", "secret")) as ledger,
        pytest.raises(NoPermissionError, match="lacks a right"),
    ):
        ledger.store_mark(Q, Mark.BEGUN, 1)
    assert cluster.broker.requests[CREATE_GROUP] == 0


def test_a_group_that_cannot_be_created_is_named(run_cluster: RunCluster) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic(TOPIC, queues=3)
    for code in (CREATE_GROUP, RequestCode.HEART_BEAT):
        cluster.broker.fail(code, faults.with_code(ResponseCode.NO_PERMISSION, "has no permission to access"))
    with open_ledger(cluster) as ledger, pytest.raises(NoPermissionError, match="does not exist") as error:
        ledger.store_mark(Q, Mark.BEGUN, 1)
    assert any(f"group {marks_group(Q)} cannot be created either" in note for note in error.value.__notes__)


def test_begun_is_read_back_and_a_reset_is_named(run_cluster: RunCluster) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic(TOPIC, queues=3)
    with open_ledger(cluster) as ledger:
        ledger.store_mark(Q, Mark.BEGUN, 4)
        broker = cluster.broker
        broker.loop.run(broker.offsets.reset, marks_group(Q), QueueKey(TOPIC, 1), 0)
        with pytest.raises(BrokerError, match=f"group {marks_group(Q)} in queue 1") as error:
            ledger.store_mark(Q, Mark.BEGUN, 5)
    assert 'is 0 (the broker answered: "Offset has been previously reset"); expected 5' in str(error.value)


def test_begun_that_the_broker_does_not_keep_is_an_error(cluster: RunningCluster, ledger: Ledger) -> None:
    cluster.brokers["broker-a"].fail(COMMIT, faults.with_code(0))
    with pytest.raises(BrokerError, match="was not stored"):
        ledger.store_mark(Q, Mark.BEGUN, 5)
    ledger.store_mark(Q, Mark.DONE, 5)  # the next look repairs it


def test_a_look_repairs_marks_that_a_crash_has_set_back(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(0), done(0), intent(1))
    for mark, value in ((Mark.FROM, 0), (Mark.BEGUN, 1), (Mark.DONE, 1)):
        ledger.store_mark(Q, mark, value)
    view = ledger.read(key(1))
    for mark, value in find_old_marks(view.state(), view.marks).items():
        ledger.store_mark(Q, mark, value)
    assert offsets(cluster) == {0: 2, 1: 2, 2: 1}


# Restating.


def test_restating_lets_the_next_intent_be_believed_after_expiry(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(0), done(0), intent(1, query=OTHER))
    for mark, value in ((Mark.FROM, 0), (Mark.BEGUN, 1), (Mark.DONE, 1)):
        ledger.store_mark(Q, mark, value)
    expire(cluster, 2)
    view = ledger.restate(ledger.read(key(1)), "e2")
    assert view.state().last == LastBatch(0, 0, None)
    assert offsets(cluster)[0] == 3
    ledger.store_mark(Q, Mark.BEGUN, 2)
    write(ledger, intent(1))  # and the session dies before it stores the mark from
    assert ledger.read(key(1)).state().open == OpenIntent(intent(1), ("e1",))


def test_restating_leaves_the_mark_if_another_session_was_first(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(0), done(0), intent(1, query=OTHER))
    for mark, value in ((Mark.FROM, 0), (Mark.BEGUN, 1), (Mark.DONE, 1)):
        ledger.store_mark(Q, mark, value)
    expire(cluster, 2)
    view = ledger.read(key(1))
    write(ledger, intent(1, "e3"))
    view = ledger.restate(view, "e2")
    assert view.state().open == OpenIntent(intent(1, "e3"), ("e3",))
    assert offsets(cluster)[0] == 0


def test_restating_a_query_without_a_batch_moves_its_mark_to_the_end(cluster: RunningCluster, ledger: Ledger) -> None:
    write(ledger, intent(1, query=OTHER), intent(2, query=OTHER))
    ledger.store_mark(Q, Mark.FROM, 0)
    expire(cluster, 1)
    view = ledger.restate(ledger.read(key()), "e2")
    assert (view.marks.start, offsets(cluster)) == (2, {0: 2})


def test_all_requests_name_the_ledger(cluster: RunningCluster, ledger: Ledger) -> None:
    seen: list[str] = []

    def note(call: Call, serve: Callable[[], None]) -> None:
        seen.append(call.command.fields.get("topic") or call.command.fields.get("b") or "")
        serve()

    cluster.brokers["broker-a"].fail(None, note)
    write(ledger, intent(0))
    ledger.read(key())
    assert set(seen) == {TOPIC}
