"""The wait of a query that must not read without a broker: a batch query, and a run with the trigger AvailableNow."""

from collections.abc import Callable, Mapping

from rmq_spark.datasource.plan.absence import AwayBroker, describe_overdue
from rmq_spark.datasource.spark import clocks
from rmq_spark.store.errors import BackendUnavailableError

_PAUSE_MS = 500.0  # between two looks at the place


class BrokerWait:
    """One wait of at most `timeout_ms` for brokers that are away; 0 means for ever. It begins with the first pause.

    `is_over` is called before each pause, and says that nobody needs the result any more.
    """

    def __init__(
        self,
        timeout_ms: int,
        monotonic_ms: Callable[[], float] = clocks.monotonic_ms,
        sleep: Callable[[float], None] = clocks.sleep,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._timeout_ms, self._monotonic_ms, self._sleep, self._is_over = timeout_ms, monotonic_ms, sleep, is_over
        self._begun_ms: float | None = None

    def pause(self, brokers: Mapping[str, AwayBroker]) -> None:
        """Wait a moment for `brokers`. Raises BackendUnavailableError, which names them, at the end of the time."""
        now_ms = self._monotonic_ms()
        if self._begun_ms is None:
            self._begun_ms = now_ms
        left_ms = self._begun_ms + self._timeout_ms - now_ms if self._timeout_ms else _PAUSE_MS
        if left_ms <= 0 or self._is_over():
            raise BackendUnavailableError(describe_overdue(brokers, self._timeout_ms))
        self._sleep(min(left_ms, _PAUSE_MS) / 1000)
