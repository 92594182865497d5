"""The ring of consistent hashing stands as RocketMQ's does, number by number."""

import json
from pathlib import Path

import pytest

from rmq_spark.store.group import hash_ring
from rmq_spark.store.group.hash_ring import HashRing, ring_hash

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "value"), VECTORS["md5RingHash"].items())
def test_a_text_has_the_hash_that_java_computes(text: str, value: int) -> None:
    assert ring_hash(text) == value


def test_a_lone_surrogate_is_a_question_mark_as_in_java() -> None:
    assert ring_hash("a\ud800b") == ring_hash("a?b")


@pytest.fixture
def plain_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash `a-1` and any other text to the number after its first dash: places that can be seen."""
    monkeypatch.setattr(hash_ring, "ring_hash", lambda text: int(text.split("-")[1]))


@pytest.mark.usefixtures("plain_hash")
def test_a_key_belongs_to_the_next_place_and_behind_the_last_to_the_first() -> None:
    ring = HashRing(["n-10", "m-20"], 1)
    assert [ring.route(f"k-{place}") for place in (0, 10, 11, 20, 21)] == ["n-10", "n-10", "m-20", "m-20", "n-10"]


@pytest.mark.usefixtures("plain_hash")
def test_where_two_stand_at_one_place_the_later_keeps_it() -> None:
    ring = HashRing(["a", "b"], 3)
    assert [ring.route(f"k-{place}") for place in (0, 1, 2, 3)] == ["b", "b", "b", "b"]


@pytest.mark.usefixtures("plain_hash")
def test_a_node_that_is_given_twice_counts_on_from_the_places_that_it_still_has() -> None:
    ring = HashRing(["a", "a"], 2)
    assert ring.route("k-2") == "a"
    assert [ring.route(f"k-{place}") for place in (0, 3, 4)] == ["a", "a", "a"]
    # b has both of a's places, so that a begins at 0 again and takes them back.
    assert HashRing(["a", "b", "a"], 2).route("k-0") == "a"


def test_a_node_that_is_given_twice_has_twice_the_places() -> None:
    seen: list[str] = []
    original = ring_hash
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_ring, "ring_hash", lambda text: seen.append(text) or original(text))
        HashRing(["a", "b", "a"], 2)
    assert seen == ["a-0", "a-1", "b-0", "b-1", "a-2", "a-3"]


def test_a_ring_without_places_gives_every_key_to_nobody() -> None:
    assert HashRing(["a", "b"], 0).route("k") is None
    assert HashRing([], 10).route("k") is None
