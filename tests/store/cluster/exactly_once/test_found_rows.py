"""Tests of what a read-back recognises: rows of the batch among those of others, and rows that a kill has torn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import pytest
from support.staged_runs import OTHER_PREFIX, PREFIX, make_id, make_item, run_of

from rmq_spark.store.cluster.exactly_once.blobs import NoBlob
from rmq_spark.store.cluster.exactly_once.found_rows import FoundRows, RowSearch
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.pull_pipeline import Pulled
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.consume_queue_entry import Item, encode_items
from rmq_spark.store.format.record import encode_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage

QUEUE = QueueKey("orders", 3, "broker-a")
STAGE = QueueKey("stage", 0, "broker-a")
FLOOR = 100
KEY_BYTES = 9 + 32 + 1
# What a broker adds to the properties of an item: 5.3 ends with a separator, 4.9 does not.
ADDED = {"5.3": b"MSG_REGION\x01DefaultRegion\x02TRACE_ON\x01true\x02CLUSTER\x01c\x02", "4.9": b"CLUSTER\x01c"}
GONE = NoBlob("the blob is gone")


@dataclass(frozen=True)
class Stored:
    """A message as a broker has stored it."""

    body: bytes
    properties: bytes
    flag: int = 0
    topic: str = QUEUE.topic


def stored(item: Item, release: str = "5.3", cut: int | None = None) -> Stored:
    """Return what a broker stores for an item. If `cut` is given, the properties were written up to this byte."""
    separator = b"" if item.properties.endswith(b"\x02") else b"\x02"
    text = item.properties + separator + ADDED[release]
    if cut is not None:
        text = text[:cut] + bytes(len(text) - cut)
    return Stored(item.body, text, item.flag)


def foreign(body: bytes, text: bytes = b"") -> Stored:
    return Stored(body, text + ADDED["5.3"])


def records_of(messages: Sequence[Stored], begin: int = FLOOR) -> list[bytes]:
    """Return the records of messages that a queue has from the queue offset `begin`."""
    return [record_of(one, offset) for offset, one in enumerate(messages, begin)]


@lru_cache(maxsize=256)
def record_of(one: Stored, offset: int) -> bytes:
    message = SampleMessage(one.topic, QUEUE.queue_id, body=one.body, properties=one.properties, flag=one.flag)
    return encode_record(message.as_record(offset, 1 << 20 | offset << 12, 1_700_000_000_000))


@dataclass
class Batch:
    """The items of a batch for one queue, and its runs."""

    runs: list[StagedRun]
    items: list[list[Item]]

    @classmethod
    def of(cls, *items: list[Item]) -> "Batch":
        return cls([run_of(QUEUE, one, STAGE, number) for number, one in enumerate(items)], list(items))

    @property
    def all_items(self) -> list[Item]:
        return [item for items in self.items for item in items]

    def search(self, messages: Sequence[Stored], answers: Sequence[int] = ()) -> RowSearch:
        """Search messages. `answers` are the indices of messages at which another answer begins."""
        search = RowSearch(QUEUE, self.runs)
        records = records_of(messages)
        cuts = [0, *answers, len(records)]
        for begin, end in pairwise(cuts):
            if begin < end:
                search.add([Pulled(FLOOR + begin, FLOOR + end, b"".join(records[begin:end]))])
        return search

    def judge(
        self, messages: Sequence[Stored], answers: Sequence[int] = (), gone: Callable[[int], bool] = lambda _: False
    ) -> FoundRows:
        """Return what was found. The blobs of the runs that `gone` names are gone."""
        search = self.search(messages, answers)
        data = {
            number: GONE if gone(number) else memoryview(encode_items(self.items[number]))
            for number in search.needed_runs()
        }
        return search.judge(data)


def make_batch() -> Batch:
    """Return a batch of four runs, two of them of one attempt. Several bodies are equal."""
    return Batch.of(
        [make_item(number, b"a%d" % (number % 2)) for number in (5, 6, 9, 10)],
        [make_item(number, b"b") for number in (17, 18)],
        [make_item(number, b"", OTHER_PREFIX) for number in (0, 1, 2)],
        [make_item(4095 << 16, b"d" * 300, OTHER_PREFIX, flag=-1)],
    )


BATCH = make_batch()
ROWS = BATCH.all_items
FOREIGN = [
    foreign(b"a1"),
    foreign(b"a0", b"UNIQ_KEY\x0100000000000000000000000000000000\x02"),
    foreign(f"UNIQ_KEY\x01{make_id(5)}\x02".encode()),
    foreign(b"a1", f"KEYS\x01{make_id(5)}\x02".encode()),
    foreign(b"a1", f"ORIGIN_UNIQ_KEY\x01{make_id(5)}\x02".encode()),
    foreign(b"a1", f"TRACE_ID\x01{make_id(5)}\x02".encode()),
    foreign(b"a1", f"UNIQ_KEY\x01{make_id(5)}0\x02".encode()),  # longer than an id
    foreign(b"a1", f"UNIQ_KEY\x01{PREFIX.replace('0A', '0B')}{5:012X}\x02".encode()),  # by chance the same random bits
    foreign(b"x" * 3000),
    Stored(b"a1", b""),
]


def test_all_rows_are_found_among_those_of_others() -> None:
    messages = [*FOREIGN]
    for item in ROWS:
        messages += [stored(item), *FOREIGN]
    assert BATCH.judge(messages) == FoundRows(len(ROWS))
    assert BATCH.judge(messages, range(1, len(messages))) == FoundRows(len(ROWS)), "each message in an answer"
    assert BATCH.judge(messages, range(7, len(messages), 7)) == FoundRows(len(ROWS))


def test_messages_of_others_are_no_rows() -> None:
    search = BATCH.search(FOREIGN)
    assert search.rows == 0
    assert search.needed_runs() == (0,)
    assert BATCH.judge(FOREIGN) == FoundRows(0)


@pytest.mark.parametrize("release", ["5.3", "4.9"])
def test_each_beginning_is_found(release: str) -> None:
    for number in range(len(ROWS) + 1):
        messages = [*FOREIGN, *(stored(item, release) for item in ROWS[:number]), *FOREIGN]
        assert BATCH.judge(messages) == FoundRows(number)
        assert BATCH.judge(messages, range(1, len(messages))) == FoundRows(number)


def test_needed_runs_are_those_of_the_last_row_and_of_the_next() -> None:
    sizes = [(0,), (0,), (0,), (0,), (0, 1), (1,), (1, 2), (2,), (2,), (2, 3), (3,)]
    for number, expected in enumerate(sizes):
        assert BATCH.search([stored(item) for item in ROWS[:number]]).needed_runs() == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([1], "FEEDF00D|000000000006; expected row 0 of the run"),
        ([0, 0], "000000000005; expected row 1"),
        ([0, 2, 1], "000000000006; expected row 2"),
        ([0, 1, 3], "000000000009"),  # only the blob shows it
        ([0, 1, 2, 4], "000000000011; expected row 3"),  # a row of the next run of the same attempt
        ([0, 1, 2, 3, 5], "000000000012; expected row 0"),
        ([0, 1, 2, 3, 6], "FEEDF00D000000000000; expected row 0"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9], "expected no row, because all rows were found before"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0], "expected no row, because all rows were found before"),
    ],
)
def test_rows_that_are_not_the_beginning_are_refused(order: list[int], expected: str) -> None:
    messages = [stored(ROWS[number]) for number in order]
    for answers in ([], range(1, len(messages))):
        found = BATCH.judge(messages, answers)
        assert found.stuck is not None
        assert expected.rpartition("|")[2] in found.stuck
        assert "not its first rows in order" in found.stuck


def test_row_number_that_is_no_number_is_refused() -> None:
    batch = Batch.of([make_item(15, b"row"), make_item(16, b"row")])
    odd = stored(make_item(15, b"row"))
    odd = replace(odd, properties=odd.properties.replace(b"00000F", b"00001G"))
    assert "expected row 0" in (batch.judge([odd]).stuck or "")


def test_row_with_another_content_is_refused() -> None:
    for changed in (
        replace(stored(ROWS[1]), body=b"other"),
        replace(stored(ROWS[1]), flag=7),
        replace(stored(ROWS[1]), properties=stored(ROWS[1]).properties.replace(b"red", b"RED")),
    ):
        found = BATCH.judge([stored(ROWS[0]), changed])
        assert "queue offset 101 has the id of row" in (found.stuck or "")


# Torn rows.


@pytest.mark.parametrize("release", ["5.3", "4.9"])
@pytest.mark.parametrize("number", [0, 1, 3, 4, 9])
def test_row_torn_at_each_byte_is_recognised(release: str, number: int) -> None:
    item = ROWS[number]
    whole = stored(item, release)
    before = [*FOREIGN, *(stored(one, release) for one in ROWS[:number])]
    for cut in range(len(whole.properties)):
        messages = [*before, stored(item, release, cut), *FOREIGN]
        offset = FLOOR + len(before)
        is_stored = cut >= len(item.properties)
        expected = FoundRows(number + 1) if is_stored else FoundRows(number, (offset,))
        assert BATCH.judge(messages) == expected, cut
        if cut % 16 == 0:
            assert BATCH.judge(messages, range(1, len(messages))) == expected, cut


@pytest.mark.parametrize("release", ["5.3", "4.9"])
def test_item_whose_properties_have_no_end_is_torn_without_the_separator(release: str) -> None:
    item = replace(ROWS[0], properties=ROWS[0].properties.removesuffix(b"\x02"))
    batch = Batch.of([item])
    end = len(item.properties)
    assert batch.judge([stored(item, release)]) == FoundRows(1)
    assert batch.judge([stored(item, release, end)]) == FoundRows(0, (FLOOR,))
    assert batch.judge([stored(item, release, end + 1)]) == FoundRows(1)


def test_item_without_added_properties_is_stored() -> None:
    for item in (ROWS[0], replace(ROWS[0], properties=ROWS[0].properties.removesuffix(b"\x02"))):
        assert Batch.of([item]).judge([Stored(item.body, item.properties)]) == FoundRows(1)


@pytest.mark.parametrize("release", ["5.3", "4.9"])
def test_without_the_blob_zeros_at_the_end_of_the_last_row_show_that_it_is_torn(release: str) -> None:
    last = ROWS[-1]
    before = [stored(item, release) for item in ROWS[:-1]]
    size = len(stored(last, release).properties)
    assert BATCH.judge([*before, stored(last, release)], gone=lambda _: True) == FoundRows(len(ROWS))
    for cut in range(KEY_BYTES, size):
        found = BATCH.judge([*before, stored(last, release, cut)], gone=lambda _: True)
        assert found == FoundRows(len(ROWS) - 1, (FLOOR + len(before),)), cut


def test_blob_that_is_gone_while_rows_are_missing_is_refused() -> None:
    messages = [stored(item) for item in ROWS[:5]]
    assert BATCH.judge(messages, gone=lambda number: number == 1).stuck == GONE.reason
    messages = [stored(item) for item in ROWS[:4]]
    assert BATCH.judge(messages, gone=lambda number: number == 1).stuck == GONE.reason
    assert BATCH.judge(messages, gone=lambda number: number == 0) == FoundRows(4), "the blob of rows that are stored"


def test_torn_row_of_others_with_an_equal_body_is_not_ours() -> None:
    own = len(ROWS[1].properties)
    for text in (
        b"UNIQ_KEY\x010A0000011234DEADBEE0" + bytes(own),
        b"WAIT\x01tr" + bytes(own),
        b"U" + bytes(own - 2),  # less room than our row needs
    ):
        assert BATCH.judge([stored(ROWS[0]), Stored(ROWS[1].body, text)]) == FoundRows(1), text
    other_flag = Stored(ROWS[1].body, bytes(own + 20), flag=1)
    other_body = Stored(ROWS[1].body + b"x", bytes(own + 20))
    assert BATCH.judge([stored(ROWS[0]), other_flag, other_body]) == FoundRows(1)


def test_torn_row_of_others_that_is_equal_in_all_that_is_left_counts_as_ours() -> None:
    nothing = Stored(ROWS[1].body, bytes(len(ROWS[1].properties) + 20))
    assert BATCH.judge([stored(ROWS[0]), foreign(b"x"), nothing]) == FoundRows(1, (FLOOR + 2,))


def test_torn_row_before_the_last_row_does_not_count_unless_its_copy_follows() -> None:
    keyless = stored(ROWS[1], cut=20)
    assert BATCH.judge([stored(ROWS[0]), keyless, stored(ROWS[1])]) == FoundRows(2)
    of_the_next = stored(ROWS[2], cut=20)
    for answers in ([], [1], [2], [1, 2]):
        assert BATCH.judge([stored(ROWS[0]), of_the_next, stored(ROWS[1])], answers) == FoundRows(2)
    cut = stored(ROWS[1], cut=len(ROWS[1].properties))
    for answers in ([], [1], [2]):
        assert BATCH.judge([stored(ROWS[0]), cut, stored(ROWS[2])], answers) == FoundRows(3)
    later = [stored(item) for item in ROWS[2:]]
    torn = stored(ROWS[1], cut=len(ROWS[1].properties) - 1)
    for answers in ([], [1], [2]):
        assert BATCH.judge([stored(ROWS[0]), torn, *later], answers) == FoundRows(len(ROWS), (FLOOR + 1,))
        assert BATCH.judge([stored(ROWS[0]), cut, *later], answers) == FoundRows(len(ROWS))
        assert BATCH.judge([stored(ROWS[0]), cut, *later], answers, lambda run: run == 0) == FoundRows(
            len(ROWS), (FLOOR + 1,)
        )


@pytest.mark.parametrize("answers", [[], [2], [1, 2, 3]])
def test_whole_copy_of_a_torn_row_counts_in_its_place(answers: list[int]) -> None:
    torn = stored(ROWS[1], cut=KEY_BYTES + 3)
    messages = [stored(ROWS[0]), torn, stored(ROWS[1]), stored(ROWS[2])]
    assert BATCH.judge(messages, answers) == FoundRows(3, (FLOOR + 1,))
    assert BATCH.judge(messages[:3], answers[:2]) == FoundRows(2, (FLOOR + 1,))
    twice = [stored(ROWS[0]), torn, torn, stored(ROWS[1])]
    assert BATCH.judge(twice, answers) == FoundRows(2, (FLOOR + 1, FLOOR + 2))


def test_two_whole_copies_of_a_row_are_refused() -> None:
    assert BATCH.judge([stored(ROWS[0]), stored(ROWS[0])]).stuck is not None


# Gaps and damage.


def test_gap_is_refused_while_rows_are_missing() -> None:
    records = records_of([stored(item) for item in ROWS])
    for present in (ROWS, ROWS[:-1]):
        search = RowSearch(QUEUE, BATCH.runs)
        search.note_gap(FLOOR - 7)
        body = b"".join(records[: len(present)])
        search.add([Pulled(FLOOR, FLOOR + len(present), body)])
        data = {number: memoryview(encode_items(BATCH.items[number])) for number in search.needed_runs()}
        stuck = search.judge(data).stuck
        assert (stuck is None) == (present is ROWS)
        assert stuck is None or f"from queue offset {FLOOR - 7} have expired" in stuck


@pytest.mark.parametrize("lost", [0, 3, 9])
def test_gap_inside_of_an_answer_is_noticed(lost: int) -> None:
    batch = Batch.of([make_item(1, b"row"), make_item(2, b"row")])
    records = records_of([*FOREIGN, stored(batch.items[0][0])])
    search = RowSearch(QUEUE, batch.runs)
    search.add([Pulled(FLOOR, FLOOR + len(records), b"".join(records[:lost] + records[lost + 1 :]))])
    found = search.judge({0: memoryview(encode_items(batch.items[0]))})
    assert f"from queue offset {FLOOR + lost} have expired" in (found.stuck or "")


def test_answers_that_are_not_of_the_queue_are_damage() -> None:
    (right,) = records_of([stored(ROWS[0])])
    (other,) = records_of([replace(stored(ROWS[0]), topic="others")])
    for body, begin in (
        (other, FLOOR),
        (right[:-1], FLOOR),
        (right, FLOOR + 1),
        (right.replace((3).to_bytes(4, "big"), (4).to_bytes(4, "big"), 1), FLOOR),
        (b"no record at all" * 10, FLOOR),
    ):
        search = RowSearch(QUEUE, BATCH.runs)
        with pytest.raises(DamageError, match="orders/broker-a:3"):
            search.add([Pulled(begin, begin + 1, body)])
        assert search.rows == 0
