"""The collectors of this project in a registry of prometheus_client, joined so that a page has each metric once.

prometheus_client writes the families of each collector one after the other. If two collectors of a registry had the
same metric, its HELP and TYPE would appear twice, and Prometheus would refuse the page. So a registry has at most one
collector of ours, which joins what the others return.
"""

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector, CollectorRegistry


class JoinedCollectors:
    """A collector of prometheus_client with the families of other collectors. Thread-safe.

    If two of them return a sample with the same name and labels, that of the first one is shown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[Collector] = []

    def add(self, parts: Iterable["Collector"]) -> None:
        """Show the metrics of these collectors too."""
        with self._lock:
            self._parts.extend(parts)

    def drop(self, parts: Iterable["Collector"]) -> bool:
        """Show the metrics of these collectors no longer. Return whether none is left."""
        with self._lock:
            removed = list(parts)
            self._parts = [one for one in self._parts if one not in removed]
            return not self._parts

    def describe(self) -> "list[Family]":
        """Return nothing, so that registering does not collect."""
        return []

    def collect(self) -> "list[Family]":
        """Return the metrics of all collectors, each family once."""
        with self._lock:
            parts = list(self._parts)
        families: dict[str, Family] = {}
        for part in parts:
            for family in part.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    shown = {(one.name, *sorted(one.labels.items())) for one in known.samples}
                    known.samples += [
                        one for one in family.samples if (one.name, *sorted(one.labels.items())) not in shown
                    ]
        return list(families.values())


_lock = threading.Lock()
_by_registry: "WeakKeyDictionary[CollectorRegistry, JoinedCollectors]" = WeakKeyDictionary()


def add_collectors(registry: "CollectorRegistry", collectors: Iterable["Collector"]) -> None:
    """Show the metrics of collectors in a registry, until `remove_collectors`. Thread-safe."""
    with _lock:
        joined = _by_registry.get(registry)
        if joined is None:
            joined = _by_registry[registry] = JoinedCollectors()
            registry.register(joined)
        joined.add(collectors)


def remove_collectors(registry: "CollectorRegistry", collectors: Iterable["Collector"]) -> None:
    """Take the metrics of collectors out of a registry. Nothing happens if they are not in it. Thread-safe."""
    with _lock:
        joined = _by_registry.get(registry)
        if joined is not None and joined.drop(collectors):
            registry.unregister(joined)
            del _by_registry[registry]
