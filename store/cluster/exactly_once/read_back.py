"""Reading back: which rows of a begun batch are stored, after all earlier sessions are fenced and the brokers settled.

Each target queue is read from its floor to its end without a filter, because a filtered pull hides messages that have
expired. `found_rows` decides by what comes. Several queues of a broker share the pulls in flight; memory is bounded by
the answers that wait, and does not depend on the size of the batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.exactly_once.blobs import BlobKey, BlobReader
from rmq_spark.store.cluster.exactly_once.found_rows import FoundRows, RowSearch
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.exactly_once.target_calls import TargetCalls, call_all, pause
from rmq_spark.store.cluster.exactly_once.written_rows import WrittenRows
from rmq_spark.store.cluster.puller import Puller, PullTerms
from rmq_spark.store.cluster.requests import TopicStatsRequest
from rmq_spark.store.cluster.responses import TopicStatsResponse
from rmq_spark.store.errors import DamageError, NoPermissionError, NotFoundError, OffsetRangeError, RmqError
from rmq_spark.store.model import QueueKey, QueueRange


class ReadBack:
    """Reads back in one session. For one thread.

    `calls` are the session's connections. Messages are pulled over `client`, which may be the client of the session;
    `find_address` returns the address of a broker, as `Puller` needs it. `monotonic_ms` is a time that never runs back.
    """

    def __init__(
        self,
        calls: TargetCalls,
        client: ClusterClient,
        find_address: Callable[[str], str],
        terms: PullTerms,
        monotonic_ms: Callable[[], float],
    ) -> None:
        self._calls, self._terms = calls, terms

        def sleep(time_s: float) -> None:
            pause(calls, time_s * 1000, monotonic_ms)

        self._puller = Puller(client, find_address, terms, sleep=sleep)
        self._blobs = BlobReader(calls, terms)

    def read(self, runs: Iterable[StagedRun], floors: Mapping[QueueKey, int]) -> WrittenRows:
        """Return which rows of a batch are stored. `runs` are those of its intent, and `floors` its floors by queue.

        Raises SessionOverError if a registered connection was lost, BackendUnavailableError if a broker does not
        answer, and DamageError if a queue cannot be read.
        """
        by_queue: dict[QueueKey, list[StagedRun]] = {queue: [] for queue in floors}
        for run in runs:
            by_queue[run.queue].append(run)
        stuck: dict[QueueKey, str] = {}
        ranges = self._find_ranges(floors, stuck)
        searches = {queue: RowSearch(self._terms.stored_queue(queue), by_queue[queue]) for queue in ranges}
        for broker in dict.fromkeys(queue.broker for queue in ranges):
            parts = [part for part in ranges.values() if part.queue.broker == broker]
            self._search(parts, searches, stuck)
        found = self._judge({queue: search for queue, search in searches.items() if queue not in stuck})
        return WrittenRows(
            {queue: found[queue].rows if queue in found else 0 for queue in floors},
            stuck | {queue: one.stuck for queue, one in found.items() if one.stuck is not None},
            {queue: one.damaged for queue, one in found.items() if one.damaged},
        )

    # Bounds.

    def _find_ranges(self, floors: Mapping[QueueKey, int], stuck: dict[QueueKey, str]) -> dict[QueueKey, QueueRange]:
        """Return the messages of each queue from its floor to its end. Note queues that are gone or smaller."""
        places = sorted({(queue.broker, queue.topic) for queue in floors})
        outcomes = self._ask_bounds(places)
        ranges = {}
        for queue, floor in floors.items():
            outcome = outcomes[queue.broker, queue.topic]
            if isinstance(outcome, NotFoundError | NoPermissionError):
                stuck[queue] = str(outcome)
                continue
            bounds = outcome.queues.get(self._terms.stored_queue(queue))
            if bounds is None:
                stuck[queue] = "the broker has the topic without this queue; expected the queue of the batch"
            elif bounds.max_offset < floor:
                stuck[queue] = (
                    f"the queue ends at {bounds.max_offset}, and at {floor} when the batch was begun; the topic was "
                    "created again, or the broker was restored from an older copy"
                )
            else:
                ranges[queue] = QueueRange(queue, floor, bounds.max_offset)
        return ranges

    def _ask_bounds(self, places: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """Return the bounds of topics, or the error that a topic or a right is missing, by broker and topic."""
        stored = [self._terms.stored_queue(QueueKey(topic, 0, broker)).topic for broker, topic in places]
        requests = [
            (broker, TopicStatsRequest(topic, broker)) for (broker, _), topic in zip(places, stored, strict=True)
        ]
        outcomes = call_all(self._calls, requests)
        for outcome in outcomes:
            if isinstance(outcome, RmqError) and not isinstance(outcome, NotFoundError | NoPermissionError):
                raise outcome
        return dict(zip(places, outcomes, strict=True))

    def _min_offset(self, queue: QueueKey) -> int:
        """Return the first queue offset that a broker lists, or 0 if it does not list the queue."""
        found = self._ask_bounds([(queue.broker, queue.topic)])[queue.broker, queue.topic]
        bounds = found.queues.get(self._terms.stored_queue(queue)) if isinstance(found, TopicStatsResponse) else None
        return 0 if bounds is None else bounds.min_offset

    # Messages.

    def _search(
        self, parts: Sequence[QueueRange], searches: Mapping[QueueKey, RowSearch], stuck: dict[QueueKey, str]
    ) -> None:
        """Give all messages of the ranges of one broker to the searches. Expired ones are noted as gaps."""
        left = [part for part in parts if part.begin < part.end]
        reached: dict[QueueKey, int] = {}
        while left:
            try:
                self._pull(left, searches, reached)
                return
            except NoPermissionError as error:
                stuck.update((part.queue, str(error)) for part in left)
                return
            except (OffsetRangeError, DamageError, NotFoundError) as error:
                first = next(part for part in left if reached.get(part.queue, part.begin) < part.end)
                at = reached.get(first.queue, first.begin)
                if isinstance(error, NotFoundError) and not isinstance(error, OffsetRangeError):
                    begin, stuck[first.queue] = first.end, str(error)
                else:
                    begin = self._find_rest(first, at, error)
                    searches[first.queue].note_gap(at)
                reached[first.queue] = begin
            left = [
                QueueRange(part.queue, begin, part.end)
                for part in left
                if (begin := reached.get(part.queue, part.begin)) < part.end
            ]

    def _pull(
        self, parts: Sequence[QueueRange], searches: Mapping[QueueKey, RowSearch], reached: dict[QueueKey, int]
    ) -> None:
        with closing(self._puller.pull_all(parts)) as reading:
            for number, pulled in reading:
                queue = parts[number].queue
                searches[queue].add(pulled)
                reached[queue] = pulled[-1].next_offset
                self._calls.beat()
                self._calls.check()

    def _find_rest(self, part: QueueRange, at: int, error: RmqError) -> int:
        """Return where a range continues after messages that have expired. Raises the error if it is about others.

        A broker of 4.9 may answer any bytes for a message that has expired.
        """
        first = error.min_offset if isinstance(error, OffsetRangeError) else self._min_offset(part.queue)
        if first <= at:
            raise error
        return min(first, part.end)

    # Judgement.

    def _judge(self, searches: Mapping[QueueKey, RowSearch]) -> dict[QueueKey, FoundRows]:
        """Judge all queues, those with the same blobs one after the other."""
        found = {}
        order = sorted(searches, key=lambda queue: [BlobKey.of(one) for one in _needed(searches[queue])])
        for queue in order:
            search = searches[queue]
            data = {number: self._blobs.read(search.runs[number]) for number in search.needed_runs()}
            found[queue] = search.judge(data)
        return {queue: found[queue] for queue in searches}


def _needed(search: RowSearch) -> list[StagedRun]:
    return [search.runs[number] for number in search.needed_runs()]
