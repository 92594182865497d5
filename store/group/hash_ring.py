"""The ring of consistent hashing, number by number as RocketMQ's clients make it.

Source: ConsistentHashRouter, its MD5Hash and VirtualNode (4.9, 5.3).
"""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable


def ring_hash(text: str) -> int:
    """Return where a text stands on the ring: the first four bytes of its MD5, as a number without a sign."""
    # A lone surrogate becomes "?", as in String#getBytes.
    digest = hashlib.md5(text.encode("utf-8", "replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


class HashRing:
    """Which of some nodes a key belongs to. Never changes, so any thread may ask.

    Each node stands at `virtual_node_count` places, named `<node>-0`, `<node>-1`, …; one that is given twice goes on
    counting. Where two stand at one place the later keeps it. A ring without a place gives every key to nobody.
    """

    def __init__(self, nodes: Iterable[str], virtual_node_count: int) -> None:
        assert virtual_node_count >= 0, virtual_node_count
        places: dict[int, str] = {}
        # A node counts on from the places that it still has (getExistingReplicas): others may have taken some.
        held: Counter[str] = Counter()
        for node in nodes:
            first = held[node]
            for number in range(first, first + virtual_node_count):
                place = ring_hash(f"{node}-{number}")
                if place in places:
                    held[places[place]] -= 1
                places[place] = node
                held[node] += 1
        self._places = sorted(places)
        self._nodes = [places[place] for place in self._places]

    def route(self, key: str) -> str | None:
        """Return the node at the key's place or the next one after it, the first one of all behind the last place."""
        if not self._places:
            return None
        number = bisect_left(self._places, ring_hash(key))
        return self._nodes[number % len(self._nodes)]
