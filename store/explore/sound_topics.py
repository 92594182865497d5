"""Topics and queues of a store that may be damaged: what topics.json says as far as it can be read."""

from rmq_spark.store.errors import StoreError
from rmq_spark.store.log.topics import FoundTopics, TopicTable


class SoundTopics(TopicTable):
    """The queues that have a folder, also where topics.json cannot be read; that it cannot is told elsewhere."""

    def look_at_configs(self) -> None:
        """Read topics.json again if it has changed and can be read."""
        try:
            super().look_at_configs()
        except StoreError:
            self._found = FoundTopics()
