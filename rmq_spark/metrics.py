"""Prometheus metrics of places, and the HTTP server that shows metrics: `serve_metrics`. Needs the extra `metrics`.

A place is measured when Prometheus asks, at most once in `max_age_s`, and nothing is measured in between.
"""

import contextlib
import logging
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self

from rmq_spark.joined_collectors import add_collectors, remove_collectors
from rmq_spark.metric_table import Labels, make_families
from rmq_spark.new_lines import NewLines
from rmq_spark.store import Served, lags_at, open_reader
from rmq_spark.store.argument_checks import check_name_list, refuse_cluster_options
from rmq_spark.store.errors import OptionError, RmqError
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.names import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, check_group_name
from rmq_spark.store.places import locate, locate_cluster

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector, CollectorRegistry

    from rmq_spark.store import GroupLags
    from rmq_spark.store.backend import Location

_LOG = logging.getLogger("rmq_spark")

MAX_AGE_S = 5.0
_LAG_COLUMNS = {
    "rmq_group_lag_messages": "lagMessages",
    "rmq_group_lag_bytes": "lagBytes",
    "rmq_group_oldest_waiting_seconds": "secondsBehind",
    "rmq_group_expired_messages": "expiredMessages",
    "rmq_group_offset": "groupOffset",
}
_DELIVERY_TOPICS = {
    "rmq_group_retries_total": RETRY_TOPIC_PREFIX,
    "rmq_group_dead_letters_total": DLQ_TOPIC_PREFIX,
}
Samples = defaultdict[str, dict[Labels, float]]


@dataclass(frozen=True, slots=True)
class MeasuredPlace:
    """A place, and the groups whose lag is measured. `name` is the value of the label `place`."""

    name: str
    location: "Location"
    groups: Collection[str] | None = None  # None: all groups

    @property
    def key(self) -> tuple[str, ...]:
        """The name and the groups, which identify what is measured."""
        return (self.name, *sorted(self.groups or ()))


class PlaceCollector:
    """A collector of prometheus_client with the metrics of places: the lag of groups, and the deliveries to them.

    Thread-safe: `add` and `drop` never wait for a measurement. `monotonic_s` is a clock that never runs back. A place
    that does not answer has only `rmq_up` 0, and a named group that cannot be measured has no lag. What is wrong is
    logged once, until it has changed. `measure` returns the lag of groups of a place, of all groups if they are None.
    """

    def __init__(
        self,
        places: Iterable[MeasuredPlace] = (),
        *,
        max_age_s: float = MAX_AGE_S,
        monotonic_s: Callable[[], float],
        measure: "Callable[[Location, Sequence[str] | None], GroupLags]" = lags_at,
    ) -> None:
        self._places = {place.key: place for place in places}
        self._owners: dict[tuple[str, ...], set[str]] = {}  # of places that were added
        self._max_age_s, self._monotonic_s, self._measure_lags = max_age_s, monotonic_s, measure
        self._lock = threading.Lock()  # for the places
        self._measuring = threading.Lock()  # for all below
        self._measured: Samples = defaultdict(dict)
        self._measured_places: list[tuple[str, ...]] | None = None
        self._measured_s = 0.0
        self._down: set[tuple[str, type[RmqError]]] = set()
        self._lines = NewLines()
        # The queues by place, kind (group or topic) and name. Name servers forget those of a broker that has stopped.
        self._queues: dict[tuple[str, str, str], set[QueueKey]] = {}

    def add(self, place: MeasuredPlace, owner: str) -> None:
        """Measure a place from now on, until `drop` was called for each of its owners.

        It is measured once, even if it is added for several owners, or again.
        """
        with self._lock:
            self._places.setdefault(place.key, place)
            self._owners.setdefault(place.key, set()).add(owner)

    def drop(self, owner: str) -> None:
        """Stop measuring the places that were added for this owner only."""
        with self._lock:
            for key, owners in list(self._owners.items()):
                owners.discard(owner)
                if not owners:
                    del self._owners[key], self._places[key]

    def describe(self) -> "list[Family]":
        """Return nothing, so that registering does not measure."""
        return []

    def collect(self) -> "list[Family]":
        """Measure, unless the last result is young enough and of the same places, and return the metrics."""
        with self._measuring:
            with self._lock:
                places = list(self._places.values())
            now_s, keys = self._monotonic_s(), [place.key for place in places]
            if self._measured_places != keys or now_s - self._measured_s >= self._max_age_s:
                self._measured, self._measured_s, self._measured_places = self._measure(_join(places)), now_s, keys
            return make_families({name: found.items() for name, found in self._measured.items()})

    def _measure(self, places: Iterable[MeasuredPlace]) -> Samples:
        samples: Samples = defaultdict(dict)
        down = set[tuple[str, type[RmqError]]]()
        with self._lines:
            self._lines.begin_look()
            for place in places:
                of_place: Samples = defaultdict(dict)
                try:
                    groups, answering = self._add_lags(of_place, place)
                    self._add_deliveries(of_place, place, groups, answering)
                except RmqError as error:
                    reason = place.name, type(error)
                    if reason not in self._down | down:
                        _LOG.warning("rmq: %s was not measured, and rmq_up is 0: %s", place.name, error)
                    down.add(reason)
                    samples["rmq_up"][place.name,] = 0
                    continue
                samples["rmq_up"].setdefault((place.name,), 1)
                for name, found in of_place.items():
                    samples[name].update(found)
        self._down = down
        return samples

    def _add_lags(self, samples: Samples, place: MeasuredPlace) -> tuple[set[str], frozenset[str]]:
        """Add the lag of the place's groups. Return their names, and the brokers that answered."""
        named = None if place.groups is None else list(dict.fromkeys(place.groups))
        found = self._measure_lags(place.location, named)
        for group, error in found.errors.items():
            _LOG.warning("rmq: the lag of consumer group %s of %s was not measured: %s", group, place.name, error)
        rows = found.table.to_pylist()
        _add_lag(samples, place.name, rows)
        groups = {row["group"] for row in rows} | set(named or ())
        seen = {name for of, kind, name in self._queues if (of, kind) == (place.name, "group")}
        for group in groups if named is not None else groups | seen:
            states = {_queue_of(row): row["state"] for row in rows if row["group"] == group}
            away = self._away((place.name, "group", group), states, found.answering)
            away |= {queue for queue, state in states.items() if state == "away"}
            counts = dict.fromkeys((queue.broker for queue in states if queue.broker), 0) | Counter(
                queue.broker for queue in away
            )
            for broker, count in counts.items():
                samples["rmq_group_away_queues"][place.name, group, broker] = count
        return groups, found.answering

    def _away(
        self, key: tuple[str, str, str], queues: Collection[QueueKey], answering: Collection[str]
    ) -> set[QueueKey]:
        """Return those of the queues, and of the earlier queues of the same key, whose broker does not answer."""
        away = {queue for queue in {*queues, *self._queues.get(key, ())} if queue.broker not in answering}
        self._queues[key] = away | set(queues)
        return away

    def _add_deliveries(
        self, samples: Samples, place: MeasuredPlace, groups: Collection[str], answering: Collection[str]
    ) -> None:
        """Add the number of messages that retry and dead-letter topics have had. Expired ones count too.

        A topic with a queue whose broker does not answer is left out, because Prometheus takes a counter that falls for
        a restart. One of `groups` that has no such topic yet has 0: increase() of Prometheus notices no first message
        of a series that begins with 1.
        """
        with contextlib.closing(place.location.open()) as backend:
            backend.refresh()
            for name, prefix in _DELIVERY_TOPICS.items():
                topics = [
                    topic
                    for topic in backend.topics()
                    if topic.startswith(prefix) and (place.groups is None or topic.removeprefix(prefix) in place.groups)
                ]
                found = backend.queues(topics, missing_ok=topics)
                for topic in {*found, *(prefix + group for group in groups)}:
                    queues = found.get(topic, [])
                    if self._away((place.name, "topic", topic), queues, answering):
                        continue
                    answers = backend.bounds(queues).values() if queues else ()
                    if all(isinstance(answer, QueueBounds) for answer in answers):
                        ends = [answer.max_offset for answer in answers if isinstance(answer, QueueBounds)]
                        samples[name][place.name, topic.removeprefix(prefix)] = float(sum(ends))


def _join(places: Iterable[MeasuredPlace]) -> list[MeasuredPlace]:
    """Return each place once, with the groups that any of its measurements names."""
    joined: dict[tuple[str, Location], MeasuredPlace] = {}
    for place in places:
        known = joined.setdefault((place.name, place.location), place)
        is_all = known.groups is None or place.groups is None
        groups = None if is_all else tuple(dict.fromkeys([*(known.groups or ()), *(place.groups or ())]))
        joined[place.name, place.location] = replace(known, groups=groups)
    return list(joined.values())


def _queue_of(row: Mapping[str, Any]) -> QueueKey:
    return QueueKey(row["topic"], row["queueId"], row.get("brokerName") or "")


def _add_lag(samples: Samples, place: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add the lag in the rows of a table."""
    for row in rows:
        key = _queue_of(row)
        queue = key.topic, key.broker, str(key.queue_id)
        for name, column in _LAG_COLUMNS.items():
            if row[column] is not None:
                samples[name][place, row["group"], *queue] = float(row[column])
        if row["maxOffset"] is not None:
            samples["rmq_queue_max_offset"][place, *queue] = float(row["maxOffset"])


class CountCollector:
    """A collector of prometheus_client for numbers that a function returns, such as those of `rmq serve`."""

    def __init__(self, labels: Labels, count: Callable[[], Mapping[str, float]]) -> None:
        self._labels, self._count = labels, count

    def describe(self) -> "list[Family]":
        """Return nothing, so that registering does not count."""
        return []

    def collect(self) -> "list[Family]":
        """Return the metrics."""
        return make_families({name: [(self._labels, value)] for name, value in self._count().items()})


class MetricsServer:
    """An HTTP server with the page `/metrics`, in a daemon thread. Use it in `with`, or call `close`.

    `url` is the address of the page. Programs make one with `serve_metrics`.
    """

    def __init__(self, address: str, registry: "CollectorRegistry", *collectors: "Collector") -> None:
        """Listen at `address`, with the `collectors` in the registry. Raises OptionError if it is invalid or in use."""
        host, port = parse_address(address)
        start = load_client("serving metrics").start_http_server
        try:
            self._server, self._thread = start(port, host, registry)
        except OSError as error:
            raise OptionError(
                f'cannot serve metrics at "{address}": {error.strerror or error}; expected a free port of an address '
                "of this machine. Give another one."
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.registry, self.url = registry, f"http://{shown}:{self._server.server_port}/metrics"
        self._collectors = collectors
        add_collectors(registry, collectors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, end the thread, and take the metrics out of the registry. A second call does nothing."""
        remove_collectors(self.registry, self._collectors)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(
    address: str,
    path: str | PurePath | None = None,
    *,
    groups: Collection[str] | None = None,
    name_server: str | None = None,
    commit_log_path: str | None = None,
    registry: "CollectorRegistry | None" = None,
    max_age_s: float = MAX_AGE_S,
    **cluster_options: Any,
) -> MetricsServer:
    """Serve Prometheus metrics of the store at `path`, or the cluster of `name_server`, and return the server.

    `address` is "HOST:PORT"; port 0 chooses a free port, which `url` of the result has. `groups` are the groups to
    measure, None for all. Each request measures the place, but at most once in `max_age_s`. `registry` is a registry of
    prometheus_client whose other metrics are shown too; default: one of its own. The other arguments are those of
    `open_reader` for a cluster. docs/METRICS.md lists the metrics.

    Changes nothing in the place. Raises ModuleNotFoundError without the extra `metrics`, OptionError for an invalid
    argument or an address in use, and StorePathError if there is no store at `path`.
    """
    client = load_client("serve_metrics")
    place = _place_of(path, name_server, groups, commit_log_path, cluster_options)
    registry = client.CollectorRegistry() if registry is None else registry
    return MetricsServer(address, registry, PlaceCollector([place], max_age_s=max_age_s, monotonic_s=time.monotonic))


def serve_delivery_metrics(
    address: str, path: str, served: Served, commit_log_path: str | None = None
) -> MetricsServer:
    """Serve what `serve_metrics` does for the store at `path`, and the totals `served` of `rmq serve`.

    Raises the errors of `serve_metrics`.
    """
    registry = load_client("--metrics").CollectorRegistry()
    place = _place_of(path, None, None, commit_log_path, {})
    totals = CountCollector((place.name,), lambda: _count_served(served))
    return MetricsServer(address, registry, PlaceCollector([place], monotonic_s=time.monotonic), totals)


def _place_of(
    path: str | PurePath | None,
    name_server: str | None,
    groups: Collection[str] | None,
    commit_log_path: str | None,
    cluster_options: Mapping[str, Any],
) -> MeasuredPlace:
    if (path is None) == (name_server is None):
        found = "neither" if path is None else "both"
        raise OptionError(f"serve_metrics: found {found} path and name_server; expected one of them.")
    check_name_list("serve_metrics", "groups", groups)
    for group in groups or ():
        check_group_name(group)
    location: Location | None
    if name_server is not None:
        location = locate_cluster(name_server, cluster_options)
        return MeasuredPlace(name_server, location, groups)
    refuse_cluster_options("serve_metrics", cluster_options)
    logs = None if commit_log_path is None else commit_log_path.split(",")
    location = locate({"path": str(path), "commitLogPath": logs})
    assert location is not None
    root = str(location.mark()["path"])
    open_reader(root, commit_log_path=commit_log_path).close()
    return MeasuredPlace(root, location, groups)


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT", of "[IPV6]:PORT", or of ":PORT" for all interfaces. Raises OptionError."""
    host, colon, port = str(text).rpartition(":")
    is_port = port.isascii() and port.isdecimal() and int(port) < 1 << 16
    if not colon or not is_port or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise OptionError(
            f'the address of metrics is "{text}"; expected HOST:PORT with a port below 65536, such as 127.0.0.1:9464.'
        )
    return host.strip("[]") or "0.0.0.0", int(port)


def load_client(what: str) -> Any:
    """Return the module prometheus_client. Raises ModuleNotFoundError with the pip command if it is not installed."""
    try:
        import prometheus_client
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ModuleNotFoundError(
            f"{what} needs prometheus_client: it is not installed for {sys.executable}; expected the extra metrics. "
            'Install it: pip install "rmq-spark[metrics]".',
            name="prometheus_client",
        ) from None
    return prometheus_client


def _count_served(served: Served) -> dict[str, float]:
    """Return the metrics of the totals of `rmq serve` (`Served`), by name."""
    return {
        "rmq_delivered_messages_total": served.messages,
        "rmq_delivery_rounds_total": served.rounds,
        "rmq_delivery_failures_total": served.failures,
        "rmq_delivery_latest_seconds": served.latest_ms / 1000,
    }
