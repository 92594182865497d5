"""The copies of failed messages that an earlier attempt of a batch has sent back, found by the brokers' key index.

If a driver dies after it has sent rows back and before Spark has noted the batch, Spark repeats the batch, and its rows
fail again. A broker makes a copy for each request. So the commit of a repeated batch looks for the copies first. The
broker that stores the message also stores the copy. Its index has the copy under the message's UNIQ_KEY:

| the copy | topic of the record | the group is in |
| --- | --- | --- |
| waits for its delay, or has waited | `SCHEDULE_TOPIC_XXXX` (it stays in the log after its delivery) | REAL_TOPIC |
| is a dead letter | `%DLQ%group` | the topic |

A record is a copy of a row only if all of this holds; else the row is sent back, because a wrong match would lose a
retry:

- it is for the retry topic, or among the dead letters, of the group;
- its UNIQ_KEY is that of the message;
- its ORIGIN_MESSAGE_ID is that of the message, or else the offsetMsgId of the message: the place of its first record;
- its reconsumeTimes is one more than that of the message;
- it was stored since the batch was first planned. A message that is read again after a reset of the group has older
  copies, which belong to its earlier deliveries;
- no other row has this copy.

The last rule but one compares the clock of the driver that planned the batch with that of the broker. A copy in the
retry topic itself does not count, because its store time is that of its delivery. A row also is sent back if the index
does not show its copy: messageIndexEnable=false, no right to read the two topics, or the last few ms.

Source: AbstractSendMessageProcessor#consumerSendMsgBack, IndexService#buildIndex, CommitLog#asyncPutMessage (4.9, 5.3).
"""

import logging
from collections.abc import Sequence

from rmq_spark.store.cluster.broker_calls import BrokerCalls, Call
from rmq_spark.store.cluster.message_lookup import INDEX_STEP_MS, split_records
from rmq_spark.store.cluster.requests import KeySearchRequest
from rmq_spark.store.cluster.resent_messages import ORIGIN_MESSAGE_ID
from rmq_spark.store.cluster.responses import RecordsResponse
from rmq_spark.store.cluster.send_back import BackRow
from rmq_spark.store.cluster.write_routes import WriteRoutes
from rmq_spark.store.errors import NoPermissionError, RmqError
from rmq_spark.store.format.properties import UNIQ_KEY, parse
from rmq_spark.store.format.record import Record
from rmq_spark.store.format.timer import REAL_TOPIC
from rmq_spark.store.names import SCHEDULE_TOPIC, dlq_topic, retry_topic

_LOG = logging.getLogger("rmq_spark")


class SentCopies:
    """The copies that were made of messages for one group since `planned_ms` (ms since the epoch). For one thread."""

    def __init__(self, calls: BrokerCalls, routes: WriteRoutes, group: str, planned_ms: int) -> None:
        self._calls, self._planned_ms = calls, planned_ms
        self._retry, self._dead = routes.topic_of(retry_topic(group)), routes.topic_of(dlq_topic(group))
        self._taken: set[tuple[str, int]] = set()  # broker and physical offset of each copy that a row has

    def missing(self, rows: Sequence[BackRow]) -> list[BackRow]:
        """Return the rows without a copy, in their order.

        Never raises an error of a broker: it is logged, and the rows that were not looked up count as rows without a
        copy. A broker that is away is waited for, as for every request.
        """
        rest = list(rows)
        for topic in (SCHEDULE_TOPIC, self._dead):
            found: set[int] = set()
            try:
                self._search(topic, rest, found)
            except RmqError as error:
                _LOG.warning(
                    "rmq: a repeated batch cannot look for all messages that it has sent back already, and may send "
                    "them back twice: %s",
                    error,
                )
                if not isinstance(error, NoPermissionError):
                    return _without(rest, found)
            rest = _without(rest, found)
        return rest

    def _search(self, topic: str, rows: Sequence[BackRow], found: set[int]) -> None:
        """Add the numbers of the rows that have a copy in a topic to `found`. Raises the first error of a broker."""
        # A message that has left the log is sent from its row, and its copy does not show where it was.
        asked = [number for number, row in enumerate(rows) if row.message_id and row.resent is None]
        begin_ms = max(self._planned_ms - INDEX_STEP_MS, 0)

        def make(call: int) -> Call:
            row = rows[asked[call]]
            request = KeySearchRequest(topic, row.queue.broker, row.message_id, begin_ms=begin_ms)
            return Call(row.queue.topic, row.queue.broker, request)

        def on_response(call: int, response: RecordsResponse) -> None:
            row = rows[asked[call]]
            for record in split_records(response.records, row.queue.broker):
                place = row.queue.broker, record.physical_offset
                if place not in self._taken and is_copy(record, row, self._retry, self._dead, self._planned_ms):
                    self._taken.add(place)
                    found.add(asked[call])
                    return

        self._calls.run([rows[number].queue.broker for number in asked], make, on_response)


def is_copy(record: Record, row: BackRow, retry: str, dead: str, planned_ms: int) -> bool:
    """Return whether a record is the copy of a row that was sent back in a batch which was planned at `planned_ms`.

    `retry` and `dead` are the group's retry topic and its topic of dead letters, as the cluster names them.
    """
    properties = parse(record.properties)
    topic = record.topic.decode("utf-8", "replace")
    is_of_group = properties.get(REAL_TOPIC) == retry if topic == SCHEDULE_TOPIC else topic == dead
    return (
        is_of_group
        and properties.get(UNIQ_KEY) == row.message_id
        and properties.get(ORIGIN_MESSAGE_ID) == row.origin_id
        and record.reconsume_times == row.reconsume_times + 1
        and record.store_timestamp >= planned_ms
    )


def _without(rows: Sequence[BackRow], found: set[int]) -> list[BackRow]:
    return [row for number, row in enumerate(rows) if number not in found]
