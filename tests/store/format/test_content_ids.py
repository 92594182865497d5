"""Message ids from contents: the same for the same rows in any order, and different for different rows."""

from collections import Counter
from hashlib import blake2b
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.store.format.content_ids import CONTENT_ID, ID_CHARS, ContentIds
from rmq_spark.store.format.message_ids import Digests, may_be_offset_message_id, parse_unique_key

SEED = "query/7/3"
ALL_64_BITS = (1 << 64) - 1
NUMBER_FACTOR = 0xD1B54A32D192ED03
SPLIT_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
few_digests = st.sampled_from([0, 1, 2, 1 << 63, ALL_64_BITS])
pieces_of_few = st.lists(st.lists(few_digests, max_size=9), max_size=12)


def array(digests: list[int]) -> Digests:
    return np.array(digests, np.uint64)


def texts(ids: ContentIds, digests: Digests) -> list[str]:
    return [row.tobytes().decode() for row in ids.take(digests)]


def ids_of(*pieces: list[int], seed: str = SEED) -> list[str]:
    """Return the ids of rows with these digests, which come in pieces."""
    ids = ContentIds(seed)
    return [text for piece in pieces for text in texts(ids, array(piece))]


def slow_scatter(number: int) -> int:
    number ^= number >> 30
    number = number * SPLIT_MIX[0] & ALL_64_BITS
    number ^= number >> 27
    number = number * SPLIT_MIX[1] & ALL_64_BITS
    return number ^ number >> 31


def slow_id(seed: str, digest: int, number: int) -> str:
    """Return the id of row `number` among those with a digest, in Python's integers."""
    hashed = blake2b(seed.encode(), digest_size=16).digest()
    seeds = [int.from_bytes(hashed[at : at + 8], "little") for at in (0, 8)]
    step = number * NUMBER_FACTOR
    first = slow_scatter(slow_scatter(digest + seeds[0] & ALL_64_BITS) + step & ALL_64_BITS)
    second = slow_scatter(slow_scatter(digest ^ seeds[1]) + step + first & ALL_64_BITS)
    return f"{first | 1 << 31:016X}{second & 0xFFFF:04X}{0:08X}{second >> 48:04X}"


def slow_ids(digests: list[int], seed: str = SEED) -> list[str]:
    counts: Counter[int] = Counter()
    found = []
    for digest in digests:
        found.append(slow_id(seed, digest, counts[digest]))
        counts[digest] += 1
    return found


@given(pieces_of_few)
def test_take_equals_a_count_of_each_digest(pieces: list[list[int]]) -> None:
    assert ids_of(*pieces) == slow_ids([digest for piece in pieces for digest in piece])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=8), st.integers(0, 1 << 32))
def test_take_numbers_rows_across_pieces_of_all_sizes(sizes: list[tuple[int, int]], start: int) -> None:
    """Runs of different sizes are joined, and runs that are not joined have digests in common."""
    random = np.random.default_rng(start)
    pieces = [random.integers(0, most + 1, size).tolist() for size, most in sizes]
    assert ids_of(*pieces) == slow_ids([digest for piece in pieces for digest in piece])


def test_take_numbers_rows_of_a_small_piece_after_large_ones() -> None:
    pieces = [list(range(1000)), list(range(0, 1000, 3)), [6, 6, 5], [5, 7, 6], [], [1001, 6]]
    assert ids_of(*pieces) == slow_ids([digest for piece in pieces for digest in piece])


@settings(max_examples=50)
@given(pieces_of_few, st.randoms(use_true_random=False))
def test_take_gives_the_rows_of_a_digest_the_same_ids_in_any_order_and_pieces(
    pieces: list[list[int]], random: Random
) -> None:
    digests = [digest for piece in pieces for digest in piece]
    shuffled = random.sample(digests, len(digests))
    cut = random.randint(0, len(digests))
    before, after = ids_of(*pieces), ids_of(shuffled[:cut], shuffled[cut:])
    for digest in set(digests):
        own, other = ({one for one, at in zip(*pair, strict=True) if at == digest} for pair in (
            (before, digests), (after, shuffled),
        ))  # fmt: skip
        assert own == other
    assert len(set(before)) == len(digests)


def test_take_gives_equal_digests_different_ids() -> None:
    """As equal rows have, and different rows whose digests collide."""
    digests = np.zeros(20_000, np.uint64)
    digests[::2] = ALL_64_BITS
    ids = ContentIds(SEED)
    found = [*texts(ids, digests), *texts(ids, digests[:1000])]
    assert len(set(found)) == len(found)


def test_take_depends_on_the_seed() -> None:
    digests = [0, 1, 2, 2, ALL_64_BITS]
    seeds = ["query/7/3", "query/7/4", "query/8/3", "other/7/3", ""]
    found = [ids_of(digests, seed=seed) for seed in seeds]
    assert len({text for one in found for text in one}) == len(seeds) * len(digests)
    assert ids_of(digests) == found[0]


@pytest.mark.parametrize("step", [1, 1 << 32, 0x9E3779B97F4A7C15], ids=["low bits", "high bits", "all bits"])
def test_take_spreads_the_ids_of_similar_digests(step: int) -> None:
    digests = np.arange(100_000, dtype=np.uint64) * np.uint64(step)
    ids = ContentIds(SEED).take(digests)
    values = np.frombuffer(bytes.fromhex(ids.tobytes().decode()), CONTENT_ID)
    assert len(np.unique(values["mixed"])) == len(digests)
    for part in (values["more"], values["last"]):  # each of 16 bits, evenly used
        counts = np.bincount(part, minlength=1 << 16)
        assert counts.max() < 20
        assert np.count_nonzero(counts) > 0.7 * (1 << 16)


@pytest.mark.slow
def test_take_gives_a_million_rows_different_ids() -> None:
    ids = ContentIds(SEED)
    found: set[bytes] = set()
    for begin in range(0, 1_000_000, 10_000):
        found.update(ids.take(np.arange(begin, begin + 10_000, dtype=np.uint64)).view("S32")[:, 0].tolist())
    assert len(found) == 1_000_000


@given(st.lists(st.integers(0, ALL_64_BITS), max_size=20), st.text(max_size=5))
def test_take_gives_valid_keys_that_are_no_offset_ids(digests: list[int], seed: str) -> None:
    for text in ids_of(digests, seed=seed):
        assert len(text) == ID_CHARS
        assert set(text) <= set("0123456789ABCDEF")
        key = parse_unique_key(text)
        assert (key.month_ms, str(key)) == (0, text)
        assert not may_be_offset_message_id(text)


def test_take_of_no_rows_is_no_id() -> None:
    ids = ContentIds(SEED)
    assert ids.take(array([])).shape == (0, ID_CHARS)
    assert texts(ids, array([3])) == slow_ids([3])


def test_take_leaves_the_digests_unchanged() -> None:
    digests = array([5, 5, 6])
    ContentIds(SEED).take(digests)
    assert digests.tolist() == [5, 5, 6]
