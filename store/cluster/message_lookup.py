"""Messages by key and id, looked up at the brokers.

A broker searches its key index by the hash of a key (QUERY_MESSAGE) and returns at most 64 messages, the newest first.
So the messages are compared with the key, and older ones are asked for until none are left. The index knows the store
times of its entries to the second. If more than 64 messages of one second have the same hash, the index cannot return
the others, so all messages of this time are read and compared.

An answer does not show what the index lacks: the messages of a time in which the broker had no index
(messageIndexEnable=false), and those of the last few ms. They are not found.

Source: QueryMessageProcessor, DefaultMessageStore#queryMessage, IndexFile#selectPhyOffset (4.9, 5.3).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.requests import KeySearchRequest, RecordAtRequest
from rmq_spark.store.errors import BackendUnavailableError, DamageError, RmqError
from rmq_spark.store.format.java import decode_host
from rmq_spark.store.format.message_ids import may_be_offset_message_id, parse_offset_message_id
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, parse
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.model import QueueKey

FOR_EVER_MS = (1 << 63) - 1
_ANSWER_MAX = 64  # MessageStoreConfig#maxMsgsNumBatch
INDEX_STEP_MS = 1000  # the precision of store times in the index: an entry's time is earlier by less than this


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A time, from `begin_ms` to `end_ms` (ms since the epoch, inclusive), of which a broker's index hides messages."""

    broker: str
    begin_ms: int
    end_ms: int


@dataclass(slots=True)
class BrokerSearch:
    """The search for one key at one broker, answer by answer. Pure.

    Ask for messages stored from `begin_ms` to `end_ms` until `is_done`. `found` has the records of all answers by
    physical offset, those with another key too. `hidden` are the times that the index cannot answer for.
    """

    broker: str
    begin_ms: int
    end_ms: int
    is_done: bool = False
    found: dict[int, Record] = field(default_factory=dict)
    hidden: list[TimeSpan] = field(default_factory=list)

    def note(self, records: Sequence[Record]) -> None:
        """Take the records of the next answer."""
        new = [record for record in records if record.physical_offset not in self.found]
        self.found.update((record.physical_offset, record) for record in records)
        oldest_ms = min((record.store_timestamp for record in records), default=self.begin_ms)
        if new:
            self.end_ms = min(self.end_ms, oldest_ms)  # with this time, because other messages of it may be missing
        elif len(records) < _ANSWER_MAX:
            self.is_done = True
        else:
            self.hidden.append(TimeSpan(self.broker, oldest_ms - INDEX_STEP_MS, oldest_ms + INDEX_STEP_MS))
            self.end_ms = oldest_ms - INDEX_STEP_MS
        self.is_done = self.is_done or self.end_ms < self.begin_ms


class MessageLookup:
    """Searches of one reader. For one thread.

    `address_of` returns the address of a broker, None if it is unknown. `stored_name` returns the cluster's name of a
    topic.
    """

    def __init__(
        self, client: ClusterClient, address_of: Callable[[str], str | None], stored_name: Callable[[str], str]
    ) -> None:
        self._client, self._address_of, self._stored_name = client, address_of, stored_name

    def by_word(
        self,
        brokers: Mapping[str, Collection[str]],
        word: str,
        properties: Collection[str] = (UNIQ_KEY, KEYS),
        begin_ms: int = 0,
        end_ms: int = FOR_EVER_MS,
    ) -> tuple[set[tuple[QueueKey, int]], list[tuple[str, TimeSpan]]]:
        """Return (queue, queue offset) of messages that have the word in one of the properties.

        Only messages stored from `begin_ms` to `end_ms` are returned. `brokers` has the brokers to ask for each topic.
        The second result are times in which the messages of a topic must be read and compared. Raises the error of a
        broker that does not answer, or that refuses.
        """
        # The index rounds times down, so a message of `begin_ms` may have an earlier entry.
        open_ones = {
            (topic, broker): BrokerSearch(broker, max(begin_ms - INDEX_STEP_MS, 0), end_ms)
            for topic, names in brokers.items()
            for broker in names
        }
        searches = dict(open_ones)
        while open_ones:
            calls = [
                (
                    self._master_of(broker),
                    KeySearchRequest(self._stored_name(topic), broker, word, _ANSWER_MAX, one.begin_ms, one.end_ms),
                )
                for (topic, broker), one in open_ones.items()
            ]
            for one, answer in zip(open_ones.values(), self._ask(calls), strict=True):
                one.note(list(split_records(answer.records, one.broker)))
            open_ones = {pair: one for pair, one in open_ones.items() if not one.is_done}
        found = {
            (QueueKey(topic, record.queue_id, broker), record.queue_offset)
            for (topic, broker), one in searches.items()
            for record in one.found.values()
            if begin_ms <= record.store_timestamp <= end_ms
            and record.topic == self._stored_name(topic).encode()
            and has_word(record, word, properties)
        }
        return found, [(topic, span) for (topic, _), one in searches.items() for span in one.hidden]

    def by_offset_id(self, brokers: Mapping[str, Collection[str]], message_id: str) -> set[tuple[QueueKey, int]]:
        """Return (queue, queue offset) of the message with an offsetMsgId in one of the topics, if there is one.

        `brokers` has the brokers of each topic. The broker whose address is in the id is asked first. The others are
        asked too if it does not have the message, because the address may have changed.
        """
        if not may_be_offset_message_id(message_id):
            return set()
        wanted = parse_offset_message_id(message_id)
        topics = {broker: topic for topic, names in brokers.items() for broker in names}
        address = str(wanted.store_host)
        named = {broker: topic for broker, topic in topics.items() if self._address_of(broker) == address}
        others = {broker: topic for broker, topic in topics.items() if broker not in named}
        for some in (named, others):
            calls = [
                (
                    self._master_of(broker),
                    RecordAtRequest(wanted.physical_offset, self._stored_name(topic), broker),
                )
                for broker, topic in some.items()
            ]
            for broker, answer in zip(some, self._ask(calls), strict=True):
                record = decode_record(answer.records)
                if not isinstance(record, Record) or record.physical_offset != wanted.physical_offset:
                    continue  # an offset inside of a record may give any bytes
                if decode_host(record.store_host) != wanted.store_host:
                    continue
                for topic in brokers:
                    if record.topic == self._stored_name(topic).encode():
                        return {(QueueKey(topic, record.queue_id, broker), record.queue_offset)}
        return set()

    def _master_of(self, broker: str) -> str:
        """Return where to ask a broker. Raises BackendUnavailableError if no name server lists a master of it."""
        address = self._address_of(broker)
        if address is None:
            raise BackendUnavailableError(
                f"cannot search the messages of broker {broker}: no name server lists a master of it; expected one. "
                "Repeat the search when the broker is back."
            )
        return address

    def _ask(self, calls: Sequence[tuple[str, Any]]) -> list[Any]:
        """Return the responses. Raises the first error."""
        outcomes = self._client.call_all(calls)
        for outcome in outcomes:
            if isinstance(outcome, RmqError):
                raise outcome
        return outcomes


def has_word(record: Record, word: str, properties: Collection[str]) -> bool:
    """Return whether one of the properties is the word, or, in KEYS, has it among its words."""
    found = parse(record.properties)
    return any(word in (found.get(name, "").split(" ") if name == KEYS else [found.get(name)]) for name in properties)


def split_records(records: bytes | memoryview, broker: str) -> Iterator[Record]:
    """Yield the records in an answer of a broker. Raises DamageError for bytes that are not a record."""
    rest = memoryview(records)
    while len(rest):
        record = decode_record(rest)
        if not isinstance(record, Record):
            position = len(records) - len(rest)
            raise DamageError(
                "a message in the answer to a search by key",
                f"commit log of broker {broker}",
                position,
                "a whole record",
                str(record),
                "Search in a narrower time, or repair the broker's store.",
            )
        yield record
        rest = rest[record.total_size :]
