"""Tests of the reading half of the contract (`store.backend`): locations, queues, bounds, positions and reads.

A backend without capabilities passes them. The tests of sizes and of the search by key are skipped without their
capability.
"""

import json
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import pairwise
from typing import Any

import pytest

from rmq_spark.store.backend import COLUMNS, Backend, Capability, Location
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, StoreError, StorePathError
from rmq_spark.store.filter.row_filter import KeyLookup, RowFilter
from rmq_spark.store.model import Away, Gone, QueueBounds, QueueKey, QueueRange, RecordProof
from rmq_spark.store.testing.backend_fixtures import (
    COUNT,
    FIRST_MS,
    LIMITS,
    MESSAGES,
    Append,
    BackendFixtures,
    Expire,
    FailNextCall,
    Message,
    bounds_of,
    read_batches,
    read_rows,
    require,
    sql92_filter,
    tags_filter,
    times_ms,
)

ALL = ["queueOffset", "body"]

_CALLS: dict[str, Callable[[Backend, QueueKey], object]] = {
    "queues": lambda backend, queue: backend.queues([queue.topic]),
    "bounds": lambda backend, queue: backend.bounds([queue]),
    "offsets_at": lambda backend, queue: backend.offsets_at({queue: FIRST_MS}),
    "positions": lambda backend, queue: backend.positions([(queue, 1)]),
    "read": lambda backend, queue: read_rows(backend, QueueRange(queue, 0, 1), ALL),
}
each_call = pytest.mark.parametrize("call", _CALLS.values(), ids=list(_CALLS))


class BackendReadingTests(BackendFixtures):
    """The tests of the reading half. See `BackendFixtures` for the fixtures that a subclass gives."""

    @pytest.fixture
    def filled(self, backend: Backend, append: Append) -> QueueKey:
        """The queue whose offsets 0 to 11 have `MESSAGES`. `backend` knows it."""
        assert append("orders", 1, MESSAGES) == list(range(COUNT))
        backend.refresh()
        (queue,) = [queue for queue in backend.queues(["orders"])["orders"] if queue.queue_id == 1]
        return queue

    @pytest.fixture
    def expired(self, backend: Backend, filled: QueueKey, expire: Expire) -> tuple[QueueKey, int]:
        """A queue whose first messages have expired, and its min offset. `backend` knows it."""
        begin = expire(filled, COUNT // 2)
        assert 0 < begin <= COUNT // 2
        backend.reopen()
        backend.refresh()
        return filled, begin

    # Locations.

    def test_location_without_secrets_is_the_same_place(self, location: Location) -> None:
        shown = location.without_secrets()
        assert (shown.mark(), shown.capabilities) == (location.mark(), location.capabilities)
        assert shown.without_secrets() == shown
        data = pickle.dumps(shown)
        assert not [secret for secret in self.secrets if secret.encode() in data]

    def test_location_is_equal_after_pickling_and_can_be_hashed(self, location: Location) -> None:
        copy = pickle.loads(pickle.dumps(location))
        assert copy == location
        assert hash(copy) == hash(location)
        assert copy.capabilities == location.capabilities

    def test_location_opens_the_same_place_after_pickling(
        self, location: Location, backend: Backend, filled: QueueKey
    ) -> None:
        with closing(pickle.loads(pickle.dumps(location)).open()) as copy:
            copy.refresh()
            assert copy.location == backend.location == location
            assert copy.identity() == backend.identity()
            assert copy.bounds([filled]) == backend.bounds([filled])

    def test_location_names_the_place_without_secrets(self, location: Location) -> None:
        mark = location.mark()
        assert json.loads(json.dumps(mark)) == mark
        assert location.describe()
        assert location.sharing_advice().endswith(".")
        for text in (location.describe(), location.sharing_advice(), repr(mark), repr(location)):
            assert not [secret for secret in self.secrets if secret in text]

    def test_capabilities_decide_whether_there_are_sizes_and_keys(self, location: Location, backend: Backend) -> None:
        assert location.capabilities <= frozenset(Capability)
        assert (backend.sizes is not None) == (Capability.SIZES in location.capabilities)
        assert (backend.size_estimates is not None) == (Capability.SIZE_ESTIMATES in location.capabilities)
        assert (backend.keys is not None) == (Capability.KEY_SEARCH in location.capabilities)

    def test_identity_is_the_same_after_reopen_and_new_messages(
        self, backend: Backend, filled: QueueKey, append: Append
    ) -> None:
        before = backend.identity()
        append("orders", 1, MESSAGES[:1])
        backend.reopen()
        assert backend.identity() == before

    def test_identity_differs_between_places(
        self, backend: Backend, filled: QueueKey, other_location: Location
    ) -> None:
        with closing(other_location.open()) as other:
            assert other.identity() is None or other.identity() != backend.identity()

    # Topics, queues and bounds.

    def test_topics_are_sorted(self, backend: Backend, append: Append) -> None:
        for topic in ("b", "a", "c"):
            append(topic, 0, MESSAGES[:1])
        backend.refresh()
        found = backend.topics()
        assert found == sorted(found)
        assert {"a", "b", "c"} <= set(found)

    def test_queues_are_sorted_and_include_empty_ones(self, backend: Backend, filled: QueueKey) -> None:
        (queues,) = backend.queues(["orders"]).values()
        assert queues == sorted(queues)
        assert len(queues) >= self.QUEUES
        assert {queue.topic for queue in queues} == {"orders"}
        assert filled in queues
        empty = bounds_of(backend, [queue for queue in queues if queue != filled])
        assert all(bounds.min_offset == bounds.max_offset for bounds in empty.values())

    def test_queues_leave_out_missing_topics_only_if_that_is_ok(self, backend: Backend, filled: QueueKey) -> None:
        found = backend.queues(["orders", "missing"], missing_ok=["missing", "orders"])
        assert found == backend.queues(["orders"])
        assert backend.queues([]) == {}
        with pytest.raises(NotFoundError):
            backend.queues(["orders", "missing"], missing_ok=["orders"])

    def test_bounds_are_half_open(self, backend: Backend, filled: QueueKey) -> None:
        assert backend.bounds([filled]) == {filled: QueueBounds(0, COUNT)}

    def test_bounds_of_many_queues(self, backend: Backend, filled: QueueKey, append: Append) -> None:
        append("orders", 2, MESSAGES[:3])
        append("payments", 0, MESSAGES[:2])
        backend.refresh()
        queues = [queue for found in backend.queues(["orders", "payments"]).values() for queue in found]
        bounds = bounds_of(backend, queues)
        assert set(bounds) == set(queues)
        counts = {(queue.topic, queue.queue_id): found.max_offset for queue, found in bounds.items()}
        assert (counts["orders", 1], counts["orders", 2], counts["payments", 0]) == (COUNT, 3, 2)
        assert backend.bounds([]) == {}

    def test_bounds_begin_after_expired_messages(self, backend: Backend, expired: tuple[QueueKey, int]) -> None:
        queue, begin = expired
        assert backend.bounds([queue]) == {queue: QueueBounds(begin, COUNT)}

    def test_refresh_finds_new_messages_queues_and_topics(
        self, backend: Backend, filled: QueueKey, append: Append
    ) -> None:
        assert append("orders", 1, MESSAGES[:2]) == [COUNT, COUNT + 1]
        append("payments", 0, MESSAGES[:1])
        assert backend.refresh()
        assert backend.bounds([filled]) == {filled: QueueBounds(0, COUNT + 2)}
        assert "payments" in backend.topics()
        assert backend.queues(["payments"])["payments"]

    def test_refresh_is_false_if_nothing_has_changed(self, backend: Backend, filled: QueueKey) -> None:
        backend.bounds([filled])
        backend.refresh()
        assert not backend.refresh()

    def test_wait_for_messages_finds_new_messages(self, backend: Backend, filled: QueueKey, append: Append) -> None:
        backend.bounds([filled])
        append("orders", 1, MESSAGES[:1])
        assert any(backend.wait_for_messages({filled: COUNT}, 200) for _ in range(200))
        assert backend.bounds([filled]) == {filled: QueueBounds(0, COUNT + 1)}

    def test_bounds_are_those_of_the_last_refresh(self, backend: Backend, filled: QueueKey, append: Append) -> None:
        before = backend.bounds([filled])
        append("orders", 1, MESSAGES[:1])
        assert backend.bounds([filled]) == before

    # Times and positions.

    def test_offsets_at_the_time_of_each_message(self, backend: Backend, filled: QueueKey) -> None:
        times = times_ms(backend, filled)
        assert times == sorted(times)
        found = [backend.offsets_at({filled: time}) for time in times]
        assert found == [{filled: times.index(time)} for time in times]

    def test_offsets_at_times_between_messages(self, backend: Backend, filled: QueueKey) -> None:
        times = times_ms(backend, filled)
        for number, (one, other) in enumerate(pairwise(times)):
            if other > one + 1:
                assert backend.offsets_at({filled: one + 1}) == {filled: number + 1}

    def test_offsets_at_times_before_and_after_all_messages(self, backend: Backend, filled: QueueKey) -> None:
        times = times_ms(backend, filled)
        assert backend.offsets_at({filled: times[0] - 1}) == {filled: 0}
        assert backend.offsets_at({filled: times[-1] + 1}) == {filled: COUNT}

    def test_offsets_at_of_an_empty_queue_is_its_end(self, backend: Backend, filled: QueueKey) -> None:
        empty = next(queue for queue in backend.queues(["orders"])["orders"] if queue != filled)
        assert backend.offsets_at({empty: FIRST_MS, filled: 0}) == {empty: 0, filled: 0}

    def test_offsets_at_of_an_expired_message_is_the_first_one(
        self, backend: Backend, expired: tuple[QueueKey, int]
    ) -> None:
        queue, begin = expired
        assert backend.offsets_at({queue: 0}) == {queue: begin}

    def test_positions_are_those_in_the_columns(self, backend: Backend, filled: QueueKey) -> None:
        columns = ["queueOffset", "commitLogOffset", "storeTimestamp"]
        expected = {
            (filled, row["queueOffset"]): RecordProof(
                row["commitLogOffset"], round(row["storeTimestamp"].timestamp() * 1000)
            )
            for row in read_rows(backend, QueueRange(filled, 0, COUNT), columns)
        }
        assert backend.positions(expected) == expected
        assert len(expected) == COUNT

    def test_positions_leave_out_messages_that_do_not_exist(self, backend: Backend, filled: QueueKey) -> None:
        found = backend.positions([(filled, COUNT - 1), (filled, COUNT), (filled, COUNT + 7)])
        assert list(found) == [(filled, COUNT - 1)]

    def test_positions_leave_out_expired_messages(self, backend: Backend, expired: tuple[QueueKey, int]) -> None:
        queue, begin = expired
        assert set(backend.positions([(queue, begin - 1), (queue, begin), (queue, 0)])) == {(queue, begin)}

    # Reads.

    @pytest.mark.parametrize(("begin", "end"), [(0, COUNT), (0, 1), (3, 7), (COUNT - 1, COUNT), (5, 5)])
    def test_read_half_open_range(self, backend: Backend, filled: QueueKey, begin: int, end: int) -> None:
        rows = read_rows(backend, QueueRange(filled, begin, end), ALL)
        expected = [{"queueOffset": offset, "body": MESSAGES[offset].body} for offset in range(begin, end)]
        assert rows == expected

    def test_read_every_column_with_its_type(self, backend: Backend, filled: QueueKey) -> None:
        for found in read_batches(backend, QueueRange(filled, 0, COUNT), list(COLUMNS)):
            assert dict(zip(found.batch.schema.names, found.batch.schema.types, strict=True)) == COLUMNS

    def test_read_the_values_of_the_message(self, backend: Backend, filled: QueueKey) -> None:
        columns = ["topic", "queueId", "tags", "keys", "properties", "reconsumeTimes", "physicalTopic"]
        for row, message in zip(read_rows(backend, QueueRange(filled, 0, COUNT), columns), MESSAGES, strict=True):
            assert (row["topic"], row["physicalTopic"], row["queueId"]) == ("orders", "orders", 1)
            assert (row["tags"], row["keys"], row["reconsumeTimes"]) == (message.tags, message.keys, 0)
            assert set(message.properties.items()) <= set(row["properties"])

    @pytest.mark.parametrize("columns", [["body", "brokerName", "queueOffset"], ["tags", "body"], ["brokerName"]])
    def test_read_columns_in_their_order(self, backend: Backend, filled: QueueKey, columns: list[str]) -> None:
        batches = read_batches(backend, QueueRange(filled, 0, COUNT), columns)
        assert {tuple(found.batch.schema.names) for found in batches} == {tuple(columns)}
        assert sum(found.batch.num_rows for found in batches) == COUNT

    def test_read_no_column_counts_the_rows(self, backend: Backend, filled: QueueKey) -> None:
        batches = read_batches(backend, QueueRange(filled, 2, 9), [])
        assert sum(found.batch.num_rows for found in batches) == 7
        assert not [found for found in batches if found.batch.num_columns]

    def test_read_the_name_of_the_broker_of_the_queue(self, backend: Backend, filled: QueueKey) -> None:
        rows = read_rows(backend, QueueRange(filled, 0, COUNT), ["brokerName"])
        assert [row["brokerName"] or "" for row in rows] == [filled.broker] * COUNT

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            (None, range(COUNT)),
            (tags_filter("red"), (0, 5, 6, 11)),
            (tags_filter("Aa || green"), (1, 2, 7, 8)),
            (tags_filter("BB"), (3, 9)),
            (tags_filter("absent"), ()),
            (sql92_filter("number >= 3 AND number < 6"), (3, 4, 5)),
            (sql92_filter("TAGS IS NULL"), (4, 10)),
            (sql92_filter("number > 99"), ()),
        ],
        ids=["all", "tag", "two tags", "tag with the hash of another", "no such tag", "sql92", "no tag", "sql92 none"],
    )
    def test_read_reports_progress_beyond_messages_that_do_not_match(
        self, backend: Backend, filled: QueueKey, wanted: RowFilter | None, expected: tuple[int, ...]
    ) -> None:
        batches = read_batches(backend, QueueRange(filled, 0, COUNT), ALL, wanted)
        searched = 0
        for batch, next_offset in batches:
            offsets = batch.column("queueOffset").to_pylist()
            assert all(searched <= offset < next_offset for offset in offsets)
            searched = next_offset
        assert searched == COUNT, "the last batch reports the end of the range"
        found = [row for batch, _ in batches for row in batch.to_pylist()]
        assert found == [{"queueOffset": offset, "body": MESSAGES[offset].body} for offset in expected]

    def test_read_part_with_a_filter_stays_in_its_range(self, backend: Backend, filled: QueueKey) -> None:
        batches = read_batches(backend, QueueRange(filled, 1, 6), ALL, tags_filter("red"))
        assert [row["queueOffset"] for batch, _ in batches for row in batch.to_pylist()] == [5]
        assert batches[-1].next_offset == 6

    def test_read_many_messages_without_gaps(self, backend: Backend, filled: QueueKey, append: Append) -> None:
        append("orders", 1, [Message(b"%d" % number) for number in range(COUNT, 300)])
        backend.refresh()
        batches = read_batches(backend, QueueRange(filled, 0, 300), ["queueOffset"])
        assert [row for batch, _ in batches for row in batch.column(0).to_pylist()] == list(range(300))
        assert batches[-1].next_offset == 300

    @pytest.mark.parametrize("wanted", [None, tags_filter("red"), sql92_filter("number > 4")])
    def test_read_together_returns_the_messages_of_each_range_or_none(
        self, backend: Backend, filled: QueueKey, append: Append, wanted: RowFilter | None
    ) -> None:
        append("orders", 0, MESSAGES[:3])
        backend.refresh()
        first = next(queue for queue in backend.queues(["orders"])["orders"] if queue.queue_id == 0)
        parts = [QueueRange(first, 0, 2), QueueRange(filled, 3, 7)]
        for columns in (list(COLUMNS), ["body"]):
            found = backend.read_together(parts, columns, LIMITS, wanted)
            expected = [row for part in parts for row in read_rows(backend, part, columns, wanted)]
            assert found is None or found.to_pylist() == expected

    def test_read_that_is_closed_early_disturbs_no_later_one(self, backend: Backend, filled: QueueKey) -> None:
        reading = backend.read(QueueRange(filled, 0, COUNT), ALL, LIMITS, None)
        next(reading)
        del reading
        assert len(read_rows(backend, QueueRange(filled, 0, COUNT), ALL)) == COUNT

    @pytest.mark.parametrize(("begin", "end"), [(0, COUNT + 1), (COUNT - 1, COUNT + 5), (COUNT, COUNT + 1), (90, 99)])
    def test_read_beyond_the_end_raises_an_error_with_the_bounds(
        self, backend: Backend, filled: QueueKey, begin: int, end: int
    ) -> None:
        with pytest.raises(OffsetRangeError) as raised:
            read_rows(backend, QueueRange(filled, begin, end), ALL)
        error = raised.value
        assert (error.begin, error.end, error.min_offset, error.max_offset) == (begin, end, 0, COUNT)
        assert error.queue == str(filled)

    def test_read_of_expired_messages_raises_an_error_with_the_bounds(
        self, backend: Backend, expired: tuple[QueueKey, int]
    ) -> None:
        queue, begin = expired
        with pytest.raises(OffsetRangeError) as raised:
            read_rows(backend, QueueRange(queue, begin - 1, COUNT), ALL)
        assert (raised.value.min_offset, raised.value.max_offset) == (begin, COUNT)
        rows = read_rows(backend, QueueRange(queue, begin, COUNT), ALL)
        assert [row["queueOffset"] for row in rows] == list(range(begin, COUNT))

    # Errors, reopen and close.

    @pytest.mark.parametrize("name", _CALLS)
    def test_not_found_error_for_a_missing_topic(self, backend: Backend, filled: QueueKey, name: str) -> None:
        with _not_found(backend.location, name, match="missing"):
            _CALLS[name](backend, QueueKey("missing", 0, filled.broker))

    @pytest.mark.parametrize("name", [name for name in _CALLS if name != "queues"])
    def test_not_found_error_for_a_missing_queue(self, backend: Backend, filled: QueueKey, name: str) -> None:
        with _not_found(backend.location, name):
            _CALLS[name](backend, QueueKey("orders", 99, filled.broker))

    def test_bounds_of_missing_queues_are_unknown_where_brokers_may_be_away(
        self, backend: Backend, filled: QueueKey
    ) -> None:
        require(backend.location, Capability.BROKERS)
        missing = [QueueKey("missing", 0, filled.broker), QueueKey("orders", 99, filled.broker)]
        for answer in backend.bounds(missing).values():
            assert isinstance(answer, Away | Gone)
            assert answer.reason

    @each_call
    def test_store_path_error_for_a_missing_place(
        self, missing_location: Location, call: Callable[[Backend, QueueKey], object]
    ) -> None:
        with closing(missing_location.open()) as backend, pytest.raises(StorePathError):
            call(backend, QueueKey("orders", 0))

    @pytest.mark.parametrize(
        "part", [QueueRange(QueueKey("missing", 0), 0, 1), None], ids=["not found", "out of range"]
    )
    def test_errors_are_the_same_after_pickling(
        self, backend: Backend, filled: QueueKey, part: QueueRange | None
    ) -> None:
        with pytest.raises(StoreError) as raised:
            read_rows(backend, part or QueueRange(filled, 0, 99), ALL)
        copy: Any = pickle.loads(pickle.dumps(raised.value))
        assert (type(copy), str(copy)) == (type(raised.value), str(raised.value))

    @each_call
    def test_call_that_failed_succeeds_after_reopen(
        self,
        backend: Backend,
        filled: QueueKey,
        fail_next_call: FailNextCall,
        call: Callable[[Backend, QueueKey], object],
    ) -> None:
        expected = call(backend, filled)
        backend.reopen()
        fail_next_call()
        with pytest.raises(StoreError):
            call(backend, filled)
        backend.reopen()
        assert call(backend, filled) == expected

    def test_reopen_keeps_the_answers(self, backend: Backend, filled: QueueKey) -> None:
        expected = [call(backend, filled) for call in _CALLS.values()]
        for _ in range(2):
            backend.reopen()
            backend.reopen()
            assert [call(backend, filled) for call in _CALLS.values()] == expected

    def test_close_twice_and_before_the_first_call(self, location: Location, filled: QueueKey) -> None:
        unused, used = location.open(), location.open()
        used.bounds([filled])
        for backend in (unused, used, unused, used):
            backend.close()

    def test_deliver_due_without_delayed_messages_changes_nothing(self, backend: Backend, filled: QueueKey) -> None:
        due_ms = backend.deliver_due(FIRST_MS)
        assert due_ms is None or due_ms > FIRST_MS
        backend.refresh()
        assert backend.bounds([filled]) == {filled: QueueBounds(0, COUNT)}

    def test_barriers_are_empty_and_the_same_object(self, backend: Backend, filled: QueueKey) -> None:
        queues = backend.queues(["orders"])["orders"]
        for group in (None, "billing"):
            found = backend.barriers(queues, group, is_broadcasting=False)
            assert dict(found) == {}
            assert backend.barriers(queues, group, is_broadcasting=False) is found

    # Sizes and keys.

    def test_measure_adds_up(self, backend: Backend, filled: QueueKey) -> None:
        require(backend.location, Capability.SIZES)
        assert backend.sizes is not None
        all_of_it, *parts = (QueueRange(filled, *ends) for ends in ((0, COUNT), (0, 5), (5, 6), (6, COUNT)))
        sizes = backend.sizes.measure([all_of_it, *parts])
        assert sizes[all_of_it] == sum(sizes[part] for part in parts)
        assert all(sizes[part] >= 200 * part.count for part in parts)

    def test_fit_is_the_largest_end_whose_measure_is_allowed(self, backend: Backend, filled: QueueKey) -> None:
        require(backend.location, Capability.SIZES)
        assert backend.sizes is not None
        part, prefixes = QueueRange(filled, 2, 8), [QueueRange(filled, 2, end) for end in range(3, 9)]
        for prefix, size in backend.sizes.measure(prefixes).items():
            assert backend.sizes.fit({part: size}) == {part: prefix.end}
            assert backend.sizes.fit({part: size - 1}) == {part: prefix.end - 1}
        assert backend.sizes.fit({part: 1 << 40}) == {part: 8}

    def test_share_wanted_is_a_share(self, backend: Backend, filled: QueueKey) -> None:
        require(backend.location, Capability.SIZES)
        assert backend.sizes is not None
        part = QueueRange(filled, 0, COUNT)
        none, some = (backend.sizes.share_wanted(part, tags_filter(tags), COUNT) for tags in ("absent", "red"))
        assert 0 <= none < some <= 1

    @pytest.mark.parametrize("keys", [("key5",), ("all",), ("key1", "key2", "key11"), ("absent",)])
    def test_search_by_key_finds_what_a_scan_finds(
        self, backend: Backend, filled: QueueKey, keys: tuple[str, ...]
    ) -> None:
        require(backend.location, Capability.KEY_SEARCH)
        assert backend.keys is not None
        expected = {offset for offset, message in enumerate(MESSAGES) if set(keys) & set((message.keys or "").split())}
        answer = backend.keys.search([QueueRange(filled, 0, COUNT)], KeyLookup(keys))
        found, unknown = _offsets(answer.found), _offsets(answer.unknown)
        assert found <= expected <= found | unknown

    def test_search_stays_in_its_ranges(self, backend: Backend, filled: QueueKey) -> None:
        require(backend.location, Capability.KEY_SEARCH)
        assert backend.keys is not None
        parts = [QueueRange(filled, 1, 4), QueueRange(filled, 9, COUNT)]
        answer = backend.keys.search(parts, KeyLookup(("all",)))
        assert {1, 2, 3, 9, 10, 11} == _offsets(answer.found) | _offsets(answer.unknown)

    def test_search_by_id_finds_the_message(self, backend: Backend, filled: QueueKey) -> None:
        require(backend.location, Capability.KEY_SEARCH)
        assert backend.keys is not None
        part = QueueRange(filled, 0, COUNT)
        ids = [row["msgId"] for row in read_rows(backend, part, ["msgId"])]
        answer = backend.keys.search([part], KeyLookup((), (ids[7],)))
        assert _offsets(answer.found) <= {7} <= _offsets(answer.found) | _offsets(answer.unknown)


def _not_found(location: Location, name: str, match: str | None = None) -> AbstractContextManager[object]:
    """Return a context in which NotFoundError is expected. Places with brokers answer `bounds` instead."""
    if name == "bounds" and Capability.BROKERS in location.capabilities:
        return nullcontext()
    return pytest.raises(NotFoundError, match=match)


def _offsets(ranges: list[QueueRange]) -> set[int]:
    return {offset for part in ranges for offset in range(part.begin, part.end)}
