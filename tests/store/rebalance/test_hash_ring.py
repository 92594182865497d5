"""The hash ring, compared with RocketMQ's positions."""

import json
from pathlib import Path

import pytest

from rmq_spark.store.rebalance import strategies as hash_ring
from rmq_spark.store.rebalance.strategies import HashRing, ring_hash

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "value"), VECTORS["md5RingHash"].items())
def test_ring_hash_equals_javas(text: str, value: int) -> None:
    assert ring_hash(text) == value


def test_ring_hash_replaces_a_lone_surrogate_by_a_question_mark() -> None:
    assert ring_hash("a\ud800b") == ring_hash("a?b")


@pytest.fixture
def plain_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash `a-1` and any other text to the number after its first dash: places that can be seen."""
    monkeypatch.setattr(hash_ring, "ring_hash", lambda text: int(text.split("-")[1]))


@pytest.mark.usefixtures("plain_hash")
def test_route_returns_the_next_node_and_wraps_around() -> None:
    ring = HashRing(["n-10", "m-20"], 1)
    assert [ring.route(f"k-{place}") for place in (0, 10, 11, 20, 21)] == ["n-10", "n-10", "m-20", "m-20", "n-10"]


@pytest.mark.usefixtures("plain_hash")
def test_hash_ring_gives_a_shared_position_to_the_later_node() -> None:
    ring = HashRing(["a", "b"], 3)
    assert [ring.route(f"k-{place}") for place in (0, 1, 2, 3)] == ["b", "b", "b", "b"]


@pytest.mark.usefixtures("plain_hash")
def test_hash_ring_continues_the_numbering_of_a_repeated_node() -> None:
    ring = HashRing(["a", "a"], 2)
    assert ring.route("k-2") == "a"
    assert [ring.route(f"k-{place}") for place in (0, 3, 4)] == ["a", "a", "a"]
    # b has both of a's places, so a starts at 0 again and replaces b there.
    assert HashRing(["a", "b", "a"], 2).route("k-0") == "a"


def test_hash_ring_doubles_the_positions_of_a_repeated_node() -> None:
    seen: list[str] = []
    original = ring_hash
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_ring, "ring_hash", lambda text: seen.append(text) or original(text))
        HashRing(["a", "b", "a"], 2)
    assert seen == ["a-0", "a-1", "b-0", "b-1", "a-2", "a-3"]


def test_route_returns_none_without_positions() -> None:
    assert HashRing(["a", "b"], 0).route("k") is None
    assert HashRing([], 10).route("k") is None
