"""A store for programs that consume, too: what `store/commit/message_store.py` does, and failed messages sent back."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.commit import message_store
from rmq_spark.store.commit.arguments import check_number, check_word
from rmq_spark.store.commit.row_slices import split_records
from rmq_spark.store.delivery.failed_rows import failed_rows_of
from rmq_spark.store.delivery.retry_decision import next_times
from rmq_spark.store.delivery.retry_topics import check_retrying_group
from rmq_spark.store.delivery.send_back import EXPIRED_ORIGINALS, SendBacks, SendBackTerms, SentBack
from rmq_spark.store.disk.synchronized import synchronized
from rmq_spark.store.errors import OptionError, RmqError
from rmq_spark.store.log.section import MAX_SECTION_BYTES

# What `send_back` returns for each row: where its copy goes, after which delay level, and where that lies by now.
SENT_BACK = pa.schema(
    [
        ("topic", pa.string()),
        ("delayLevel", pa.int32()),
        ("reconsumeTimes", pa.int32()),
        ("commitLogOffset", pa.int64()),
        ("storeTimestamp", pa.timestamp("ms", tz="UTC")),
    ]
)


class MessageStore(message_store.MessageStore):
    """A store opened to append. Several threads may share it, and several processes may open it; no broker may.

    The calls of one object run one at a time: threads gain nothing from sharing it, and lose nothing either.
    Messages are visible, and safe from the death of any process, once the call returns; with `flush="sync"`, or after
    `settle` or `close`, from a power cut too. Use it in `with`, or `close` it: then every call but `close` raises
    StoreError.
    """

    @synchronized
    def send_back(
        self,
        rows: pa.Table | pa.RecordBatch | list[dict[str, object]],
        group: str,
        delay_level: int = 0,
        max_reconsume_times: int | None = None,
        *,
        expired_original: str = "error",
    ) -> pa.Table:
        """Send messages back that the consumer group failed to consume; return where their copies are.

        Rows are those of the source: commitLogOffset, queueId, queueOffset, reconsumeTimes and physicalTopic (or topic)
        say which message it is; delayLevel (else `delay_level`) and error may be there. A copy comes again after its
        level's delay, 3 + reconsumeTimes unless a level is given, in the topic %RETRY%group; one that failed
        `max_reconsume_times` before (None: as the group may, else 16) or has a level below 0 goes to %DLQ%group. With
        `expired_original` "resend" a message that is not in the log any more is sent from its row.

        Raises OptionError for rows that are none of this store's and for a group without retry queues, NotFoundError
        for a message that has expired, and what `send_many` raises; what of a call of more than 64 MiB was sent
        back by then, a note on the error says. Called again it sends back again.
        """
        terms = check_send_back(group, delay_level, max_reconsume_times, expired_original)
        batch = failed_rows_of(rows)
        self._refuse_if_closed()
        places = np.zeros((3, batch.num_rows), np.int64)  # level, physical offset, store time
        are_dead = np.zeros(batch.num_rows, np.bool_)
        done = 0
        with SendBacks(self.path, terms, commit_log_path=self._outbox_settings.commit_log_path) as sending:
            try:
                for sent in sending.prepare(batch, delay_level):
                    are_dead[sent.rows] = sent.decisions.are_dead
                    places[0, sent.rows] = sent.decisions.levels
                    for numbers, offsets, time_ms in self._append_back(sending, sent):
                        places[1, numbers], places[2, numbers] = offsets, time_ms
                        done += len(numbers)
            except RmqError as error:
                if done:
                    error.add_note(f"{done} rows of the call were sent back before that. Send only the others again.")
                raise
            topics = pa.array([sending.topics.retry, sending.topics.dead]).take(pa.array(are_dead.astype(np.int8)))
        times = next_times(batch.column("reconsumeTimes").cast(pa.int64()).to_numpy())
        columns = [topics, *map(pa.array, (places[0], times, places[1], places[2]))]
        return pa.table([one.cast(field.type) for one, field in zip(columns, SENT_BACK, strict=True)], schema=SENT_BACK)

    def _append_back(
        self, sending: SendBacks, sent: SentBack
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int64], int]]:
        """Append the copies of some rows; yield for each section the rows, their physical offsets and store time."""
        first = 0
        for part in split_records(sent.records, MAX_SECTION_BYTES):
            numbers = sent.rows[first : first + len(part)]
            dead = sent.decisions.are_dead[first : first + len(part)]
            first += len(part)
            with self._writer.section() as section:
                sending.topics.ensure(section, retry=not dead.all(), dead=bool(dead.any()))
                appended = section.append(part)
                if self._flush == "sync":
                    section.settle()
            yield numbers, appended.physical_offsets, appended.store_time_ms


def check_send_back(
    group: object, delay_level: object, max_reconsume_times: object, expired_original: object
) -> SendBackTerms:
    """Return how messages go back, as a program asked for it. Raises OptionError."""
    if not isinstance(group, str):
        raise OptionError(f"group={group!r} is no str: the name of the consumer group that failed.")
    check_retrying_group(group)
    if type(delay_level) is not int or not -(2**31) <= delay_level < 2**31:
        raise OptionError(
            f"delay_level={delay_level!r} is no level: 0 for 3 + reconsumeTimes, below 0 for dead letters."
        )
    if max_reconsume_times is not None:
        check_number("max_reconsume_times", max_reconsume_times, 0, 2**31 - 1)
    check_word("expired_original", expired_original, EXPIRED_ORIGINALS)
    return SendBackTerms(group, max_reconsume_times, str(expired_original))  # type: ignore[arg-type]
