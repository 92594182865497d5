"""A consumer for programs that pull: what `store/group/pull_consumer.py` does, and failed messages sent back."""

import pyarrow as pa

from rmq_spark.store.commit.outbox import OutboxSettings
from rmq_spark.store.delivery.message_store import MessageStore
from rmq_spark.store.group import pull_consumer
from rmq_spark.store.group.pull import PullResult


class PullConsumer(pull_consumer.PullConsumer):
    """A store to pull from, and a group whose offsets are read and set. Several threads may share it; use it in `with`.

    Its calls run one at a time, except that others may run while `pull_block_if_not_found` waits.
    Every call looks at the store as it is then, beside any writer, a broker too. Offsets that were updated are
    written by `commit`, and at the latest by `close`; a `with` whose body raises writes none.
    """

    def send_back(
        self,
        messages: PullResult | pa.Table | pa.RecordBatch | list[dict[str, object]],
        delay_level: int = 0,
        max_reconsume_times: int | None = None,
        *,
        expired_original: str = "error",
    ) -> pa.Table:
        """Send messages back that the group failed to consume; return where their copies are.

        They are what was pulled, or some of its rows; see `MessageStore.send_back`, whose errors these are. They come
        again in the queues of the topic %RETRY%group, which are pulled like any other. Raises OptionError without a
        group. Source: DefaultMQPullConsumer#sendMessageBack.
        """
        group = self._group_for("retries")
        rows = messages.messages if isinstance(messages, PullResult) else messages
        sender = self._sending()
        assert isinstance(sender, MessageStore), sender  # of whoever opened the store for this consumer
        return sender.send_back(rows, group, delay_level, max_reconsume_times, expired_original=expired_original)

    def _open_store(self) -> MessageStore:
        return MessageStore(self._reader.path, self._settings, OutboxSettings(self._settings.commit_log_path), "async")
