"""Open intents of a cluster: which are listed, and how an operator finishes or skips them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import exact_commits as commits
from support.begun_batches import TERMS, TOPIC, begin, commit
from support.exact_commits import Process, Script
from support.sent_messages import address_of, count_ids, read_bodies

import rmq_spark
from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.cluster import client as cluster_client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.ledger_rows import Done, Intent, Take, encode_row
from rmq_spark.store.cluster.exactly_once.marks import marks_group
from rmq_spark.store.cluster.exactly_once.open_intents import ListedIntent, list_open_intents
from rmq_spark.store.cluster.exactly_once.preparation import prepare_sink
from rmq_spark.store.cluster.exactly_once.publishing import PublishRequest
from rmq_spark.store.cluster.exactly_once.sink_place import open_place
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BatchConflictError,
    BrokerError,
    IntentStuckError,
    NotFoundError,
    OptionError,
)
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.names import STAGE_TOPIC
from rmq_spark.store.testing.brokers import RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import Call

A, B = "broker-a", "broker-b"
LEDGER = "RMQ_SPARK_LEDGER"
BATCH = RequestCode.SEND_BATCH_MESSAGE
NO_PERMISSION = 16
Q = "0b7f4a56-6a3e-4f0e-8b1e-3a0f6d1f5c11"
PLAIN = CommitKey("9d1c1b1e-52aa-4c0c-bd0a-0d9a0a6a5b22")
ROWS = [f"r{number}".encode() for number in range(4)]


@pytest.fixture(params=["5.3", "4.9"])
def cluster(run_cluster: Callable[..., RunningCluster], request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """Two brokers with the topics of the sink, and a topic with one queue on each of them."""
    cluster = run_cluster(release=request.param, brokers=2)
    cluster.create_topic(TOPIC, queues=1)
    prepare_sink(address_of(cluster), A)
    yield cluster
    cluster_client._idle.forget()


def open_intents(cluster: RunningCluster, **arguments: Any) -> list[ListedIntent]:
    return rmq_spark.open_intents(cluster.address, **arguments)


def finish(cluster: RunningCluster, query_id: str, **arguments: Any) -> CommitKey:
    given = {"settle_time_ms": 10, "request_timeout_ms": 5000, **arguments}
    return rmq_spark.finish_intent(cluster.address, query_id, **given)


def skip(cluster: RunningCluster, query_id: str, missing: Any = None, **arguments: Any) -> Any:
    given = {"settle_time_ms": 10, "request_timeout_ms": 5000, **arguments}
    return rmq_spark.skip_intent(cluster.address, query_id, missing, **given)


def bodies(cluster: RunningCluster) -> list[bytes]:
    return sorted(body for found in read_bodies(cluster, TOPIC).values() for body in found)


def refuse_sends_to(cluster: RunningCluster, broker: str) -> None:
    """Let a broker refuse the rows of batches, as after somebody has withdrawn the right to write."""
    cluster.brokers[broker].fail(BATCH, faults.with_code(NO_PERMISSION, "a planted fault"), when=_is_for_orders)


def _is_for_orders(call: Call) -> bool:
    return call.command.fields["b"] == TOPIC


def append_rows(cluster: RunningCluster, *rows: Intent | Take | Done) -> None:
    with open_place(address_of(cluster), TERMS) as place:
        ledger = Ledger(place.client, LEDGER)
        for row in rows:
            ledger.append(row, encode_row(row))


# The list.


def test_no_intent_is_open(cluster: RunningCluster) -> None:
    assert open_intents(cluster) == []
    commit(cluster, CommitKey(Q, 0), ROWS)
    commit(cluster, PLAIN, ROWS)
    assert open_intents(cluster) == []


def test_open_batches_of_queries_and_plain_writes_are_listed(cluster: RunningCluster) -> None:
    commit(cluster, CommitKey(Q, 0), ROWS)
    begin(cluster, CommitKey(Q, 1), ROWS)
    commit(cluster, CommitKey("done", 0), ROWS)
    begin(cluster, PLAIN, ROWS[:3])
    query, plain = open_intents(cluster)
    assert (query.query, query.batch, query.rows, query.brokers) == (Q, 1, 4, (A, B))
    assert len(query.owners) == 1
    assert (plain.query, plain.batch, plain.rows, plain.problem) == (PLAIN.query_id, None, 3, "")
    assert query.begun_ms is not None
    assert plain.begun_ms is not None
    assert query.begun_ms <= plain.begun_ms
    assert (query.written, query.missing) == (None, None)


def test_rows_that_are_stored_are_counted_and_nobody_is_fenced(cluster: RunningCluster) -> None:
    begin(cluster, CommitKey(Q, 0), ROWS, runs=1)
    before = len(read_bodies(cluster, LEDGER)[QueueKey(LEDGER, 0, A)])
    (found,) = open_intents(cluster, count_rows=True)
    assert (found.written, found.missing, found.problem) == (2, 2, "")
    assert len(read_bodies(cluster, LEDGER)[QueueKey(LEDGER, 0, A)]) == before
    cluster.brokers[B].kill()
    (found,) = open_intents(cluster, count_rows=True, request_timeout_ms=500)
    assert found.written is None
    assert found.problem


def test_late_rows_of_a_plain_write_that_is_done_are_void(cluster: RunningCluster) -> None:
    intent = Intent(PLAIN, "e1", 0, 4, 9)
    append_rows(cluster, intent, Done(PLAIN, "e1", 0, 4, 9), intent, Take(PLAIN, "e2", 0))
    assert open_intents(cluster) == []


def test_a_batch_whose_rows_of_the_ledger_have_expired_is_listed_with_the_problem(cluster: RunningCluster) -> None:
    lose_batch(cluster)
    (found,) = open_intents(cluster)
    assert (found.query, found.batch, found.rows) == (Q, 1, None)
    assert "begun before the oldest ledger row" in found.problem


def lose_batch(cluster: RunningCluster) -> None:
    """Begin batch 1 of a query, and let its intent expire. A take of it is left."""
    commit(cluster, CommitKey(Q, 0), ROWS)
    begin(cluster, CommitKey(Q, 1), ROWS)
    end = len(read_bodies(cluster, LEDGER)[QueueKey(LEDGER, 0, A)])
    append_rows(cluster, Take(CommitKey(Q, 1), "e9", 0))
    cluster.brokers[A].expire(LEDGER, 0, end)


@pytest.mark.parametrize("call", [open_intents, lambda at: finish(at, Q), lambda at: skip(at, Q)])
def test_without_a_ledger_the_error_says_at_once_how_to_create_it(
    run_cluster: Callable[..., RunningCluster], call: Callable[[RunningCluster], Any]
) -> None:
    with pytest.raises(NotFoundError, match=r"do not exist: .* rmq prepare-sink -n NAMESERVER --ledger-broker BROKER"):
        call(run_cluster())


# Finish.


@pytest.mark.parametrize("key", [CommitKey(Q, 0), PLAIN])
@pytest.mark.parametrize("runs", [0, 1, 2])
def test_finish_stores_the_missing_rows_once(cluster: RunningCluster, key: CommitKey, runs: int) -> None:
    begin(cluster, key, ROWS, runs)
    assert finish(cluster, key.query_id) == key
    assert bodies(cluster) == ROWS
    assert set(count_ids(cluster, TOPIC).values()) == {1}
    assert open_intents(cluster) == []
    with pytest.raises(NotFoundError, match=r"has no open intent: found batch 0 as its last one, which is done, in"):
        finish(cluster, key.query_id)


def test_a_query_continues_after_its_batch_was_finished(cluster: RunningCluster) -> None:
    begin(cluster, CommitKey(Q, 0), ROWS)
    finish(cluster, Q)
    commit(cluster, CommitKey(Q, 0), ROWS)
    commit(cluster, CommitKey(Q, 1), [b"next"])
    assert bodies(cluster) == sorted([*ROWS, b"next"])


def test_finish_of_a_query_without_rows_is_an_error(cluster: RunningCluster) -> None:
    with pytest.raises(
        NotFoundError, match=r"query unknown has no open intent: found no row in the ledger; expected a"
    ):
        finish(cluster, "unknown")
    with pytest.raises(OptionError, match="query_id=''; expected the id"):
        finish(cluster, "")


def test_finish_waits_for_a_session_that_a_broker_still_lists(cluster: RunningCluster) -> None:
    begin(cluster, CommitKey(Q, 0), ROWS)
    (listed,) = open_intents(cluster)
    cluster.brokers[B].producers.add(marks_group(Q), listed.owners[0])
    with pytest.raises(BackendUnavailableError, match=r"broker broker-b still lists .* at 192.0.2.1:40000"):
        finish(cluster, Q, fence_timeout_ms=100, broker_down_timeout_ms=1)
    assert bodies(cluster) == []
    cluster.brokers[B].producers.remove(marks_group(Q), listed.owners[0])
    finish(cluster, Q)
    assert bodies(cluster) == ROWS


def test_finish_of_a_batch_that_is_stuck_names_the_missing_rows(cluster: RunningCluster) -> None:
    begin(cluster, CommitKey(Q, 0), ROWS)
    refuse_sends_to(cluster, B)
    with pytest.raises(
        IntentStuckError,
        match=r"a planted fault.*[^.]\. 2 of its rows are written, 2 are missing\. .*intents skip ID --yes 2\.$",
    ):
        finish(cluster, Q)
    assert len(open_intents(cluster)) == 1


# Skip.


@pytest.mark.parametrize("key", [CommitKey(Q, 0), PLAIN])
def test_skip_publishes_what_can_be_and_needs_the_number_of_the_missing_rows(
    cluster: RunningCluster, key: CommitKey
) -> None:
    begin(cluster, key, ROWS)
    refuse_sends_to(cluster, A)
    for missing in (None, 0, 1, 4, "unknown"):
        with pytest.raises(IntentStuckError) as error:
            skip(cluster, key.query_id, missing)
        assert (error.value.written, error.value.missing) == (2, 2)
        confirmed = f"The confirmed number of missing rows is {missing}; expected 2. 2 of its rows are written"
        assert (confirmed in str(error.value)) is isinstance(missing, int)
        assert len(read_bodies(cluster, TOPIC)[QueueKey(TOPIC, 0, B)]) == 2, "published once"
    done = skip(cluster, key.query_id, 2)
    assert (done.key, done.written, done.missing) == (key, 2, 2)
    assert list(done.reasons) == [QueueKey(TOPIC, 0, A)]
    assert open_intents(cluster) == []
    cluster.brokers[A].heal()
    with pytest.raises(NotFoundError):
        finish(cluster, key.query_id)
    assert len(bodies(cluster)) == 2


def test_skip_ends_a_batch_whose_broker_gives_the_same_unknown_answer_each_time(cluster: RunningCluster) -> None:
    """A plug-in of the broker, for example. Nothing tells whether the rows are stored, until they are looked for."""
    begin(cluster, CommitKey(Q, 0), ROWS)
    rule = cluster.brokers[A].fail(
        RequestCode.SEND_BATCH_MESSAGE, faults.with_code(1, "java.lang.IllegalStateException: plug-in")
    )
    for call in (finish, skip):
        with pytest.raises(IntentStuckError, match=r"has answered 3 sessions unexpectedly, .*plug-in") as error:
            call(cluster, Q)
        assert (error.value.written, error.value.missing) == (2, 2)
    assert rule.count in (6, 7)  # 7 if the first session has learned that the rows of the other broker are stored
    assert skip(cluster, Q, 2).missing == 2
    assert len(bodies(cluster)) == 2


def test_a_query_continues_after_its_batch_was_skipped(cluster: RunningCluster) -> None:
    begin(cluster, CommitKey(Q, 0), ROWS)
    refuse_sends_to(cluster, A)
    skip(cluster, Q, 2)
    cluster.brokers[A].heal()
    commit(cluster, CommitKey(Q, 0), ROWS)
    assert len(bodies(cluster)) == 2, "the batch counts as stored"
    commit(cluster, CommitKey(Q, 1), ROWS)
    assert len(bodies(cluster)) == 6


def test_skip_of_a_batch_that_can_be_finished_finishes_it(cluster: RunningCluster) -> None:
    begin(cluster, CommitKey(Q, 0), ROWS, runs=1)
    done = skip(cluster, Q)
    assert (done.written, done.missing, done.reasons) == (4, 0, {})
    assert bodies(cluster) == ROWS
    assert open_intents(cluster) == []


def test_skip_after_a_target_topic_was_deleted(cluster: RunningCluster) -> None:
    begin(cluster, CommitKey(Q, 0), ROWS, runs=1)
    cluster.delete_topic(TOPIC)
    with pytest.raises(IntentStuckError) as error:
        finish(cluster, Q)
    assert (error.value.written, error.value.missing) == (0, 4)
    assert skip(cluster, Q, 4).missing == 4
    assert open_intents(cluster) == []


def test_skip_that_is_overtaken_by_a_later_owner_gives_nothing_up(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(cluster, CommitKey(Q, 0), ROWS)
    refuse_sends_to(cluster, A)
    append = Ledger.append

    def append_late(self: Ledger, row: Any, encoded: bytes) -> None:
        if isinstance(row, Done):
            monkeypatch.setattr(Ledger, "append", append)
            cluster.brokers[A].heal()
            append_rows(cluster, Take(CommitKey(Q, 0), "e9", 0))
        append(self, row, encoded)

    monkeypatch.setattr(Ledger, "append", append_late)
    done = skip(cluster, Q, 2)
    assert (done.written, done.missing) == (4, 0), "the row done of the first session was void"
    assert bodies(cluster) == ROWS


def test_skip_of_a_lost_batch_needs_the_word_unknown(cluster: RunningCluster) -> None:
    lose_batch(cluster)
    for missing in (None, 0, 4):
        with pytest.raises(IntentStuckError, match="begun before the oldest ledger row") as error:
            skip(cluster, Q, missing)
        assert (error.value.missing, error.value.batch_id) == (None, 1)
        assert str(error.value).endswith("give the missing rows up: rmq intents skip ID --yes unknown.")
    done = skip(cluster, Q, "unknown")
    assert (done.key, done.written, done.missing) == (CommitKey(Q, 1), None, None)
    assert open_intents(cluster) == []
    with pytest.raises(BatchConflictError, match="onBatchConflict=skip"):  # Spark repeats a batch that it did not end
        commit(cluster, CommitKey(Q, 1), ROWS)
    before = bodies(cluster)
    commit(cluster, CommitKey(Q, 1), ROWS, on_conflict="skip")
    assert bodies(cluster) == before
    commit(cluster, CommitKey(Q, 2), [b"next"])
    assert b"next" in bodies(cluster)


def test_skip_of_a_lost_batch_first_waits_for_the_owners_of_an_intent_that_is_left(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its author may live, and would publish rows behind those of the next batch."""
    commits.hurry(monkeypatch)
    sink = commits.make_sink(cluster)
    first, second, third = (commits.stage(cluster, CommitKey(Q, number)) for number in range(3))
    commits.commit(sink, first)
    marks = dict(cluster.brokers[A].offsets.committed)
    with commits.watched_requests():
        script = Script(commits.live, 0, when=lambda request: isinstance(request, PublishRequest))
        author = Process(lambda: commits.commit(sink, second), script)
        assert author.await_hold()
        cluster.brokers[A].offsets.committed.update(marks)  # a kill has lost those of the last seconds
        cluster.brokers[A].expire(LEDGER, 0, 1)
        with pytest.raises(BackendUnavailableError, match="may still send"):
            skip(cluster, Q, "unknown", fence_timeout_ms=50, broker_down_timeout_ms=1)
        (found,) = open_intents(cluster)
        assert (found.batch, "an intent for batch 1 is left" in found.problem) == (1, True)
        for broker in cluster.brokers.values():
            broker.close_connections()
        done = skip(cluster, Q, "unknown")
        assert (done.key, done.missing) == (CommitKey(Q, 1), None)
        commits.commit(sink, third)
        assert author.thaw() != CommitTotals(4, second.receipt.bytes, 2)
    commits.check_once(commits.stored(cluster), [first], [third])


def test_finish_after_a_reset_of_the_marks(run_cluster: Callable[..., RunningCluster]) -> None:
    """A broker of 5.x drops marks then. The rows of the ledger suffice to finish the batch, and no later one begins."""
    cluster = run_cluster(brokers=2)
    cluster.create_topic(TOPIC, queues=1)
    prepare_sink(address_of(cluster), A)
    begin(cluster, CommitKey(Q, 0), ROWS)
    broker = cluster.brokers[A]
    for mark in range(3):
        broker.loop.run(broker.offsets.reset, marks_group(Q), QueueKey(LEDGER, mark), 0)
    finish(cluster, Q)
    assert bodies(cluster) == ROWS
    with pytest.raises(BrokerError, match=r"the mark of batch \d of query .* was not stored"):
        commit(cluster, CommitKey(Q, 1), ROWS)
    assert bodies(cluster) == ROWS


def test_skip_ends_only_the_batch_that_was_named(cluster: RunningCluster) -> None:
    """The query may have begun another one since its loss was accepted."""
    begin(cluster, CommitKey(Q, 0), ROWS)
    refuse_sends_to(cluster, A)
    with pytest.raises(IntentStuckError) as error:
        skip(cluster, Q)
    assert error.value.batch_id == 0
    with pytest.raises(NotFoundError, match=f"batch 7 of query {Q} is not open any more: found batch 0"):
        skip(cluster, Q, 2, batch_id=7)
    assert len(open_intents(cluster)) == 1
    assert skip(cluster, Q, 2, batch_id=0).missing == 2
    assert open_intents(cluster) == []


def test_skip_ends_only_the_lost_batch_that_was_named(cluster: RunningCluster) -> None:
    lose_batch(cluster)
    with pytest.raises(NotFoundError, match="found batch 1; expected the batch whose loss was accepted"):
        skip(cluster, Q, "unknown", batch_id=0)
    assert len(open_intents(cluster)) == 1
    assert skip(cluster, Q, "unknown", batch_id=1).key == CommitKey(Q, 1)


def test_skip_after_a_broker_was_lost_and_an_empty_one_has_its_name(cluster: RunningCluster, tmp_path: Path) -> None:
    """As docs/EXACTLY_ONCE.md says. Rows that were staged at the lost broker are missing too."""
    begin(cluster, CommitKey(Q, 0), ROWS, runs=1)
    lost = cluster.brokers[B]
    lost.kill()
    with pytest.raises(BackendUnavailableError):
        skip(cluster, Q, broker_down_timeout_ms=1)
    for topic in (TOPIC, STAGE_TOPIC):
        lost.delete_topic(topic)
    lost.replace_store(tmp_path / "empty")
    lost.restart()
    prepare_sink(address_of(cluster), A)
    with pytest.raises(IntentStuckError) as error:
        skip(cluster, Q)
    assert error.value.missing in (2, 3, 4)
    assert skip(cluster, Q, error.value.missing).written == len(bodies(cluster))
    assert open_intents(cluster) == []


@pytest.mark.parametrize("missing", [-1, 1.0, "all", True])
def test_a_wrong_number_of_missing_rows_is_refused(missing: Any) -> None:
    with pytest.raises(OptionError, match="missing="):
        rmq_spark.skip_intent("127.0.0.1:1", Q, missing)


# A plain write that fails after its intent.


def test_the_error_of_a_plain_write_says_how_to_finish_it(cluster: RunningCluster) -> None:
    refuse_sends_to(cluster, A)
    for key, count in ((PLAIN, 1), (CommitKey(Q, 0), 0)):
        with pytest.raises(IntentStuckError) as error:
            commit(cluster, key, ROWS)
        notes = [one for one in getattr(error.value, "__notes__", []) if "rmq intents finish" in one]
        assert len(notes) == count
        assert all(key.query_id in one for one in notes)


def test_the_error_of_a_plain_write_before_its_intent_has_no_note(cluster: RunningCluster) -> None:
    cluster.brokers[A].fail(RequestCode.GET_PRODUCER_CONNECTION_LIST, faults.with_code(NO_PERMISSION, "refused"))
    with pytest.raises(rmq_spark.RmqError) as error:
        commit(cluster, PLAIN, ROWS)
    assert not getattr(error.value, "__notes__", [])
    assert list_open(cluster) == []


def list_open(cluster: RunningCluster) -> list[ListedIntent]:
    with open_place(address_of(cluster), TERMS) as place:
        return list_open_intents(place, counts=False)
