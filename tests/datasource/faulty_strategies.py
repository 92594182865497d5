"""Strategies as users should not write them, for `allocateStrategy` by their import path."""

from collections.abc import Sequence


def twice(group: str, client_id: str, queues: Sequence[object], client_ids: Sequence[str]) -> list[object]:
    """Give every member all queues, the first one twice."""
    return [queues[0], *queues]


def all_but_one(group: str, client_id: str, queues: Sequence[object], client_ids: Sequence[str]) -> list[object]:
    """Leave the last queue without an owner."""
    return list(queues[:-1])


def failing(group: str, client_id: str, queues: Sequence[object], client_ids: Sequence[str]) -> list[object]:
    """Fail for everybody."""
    return [{}[client_id]]
