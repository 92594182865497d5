"""The language of the project: the counts of phrases that native readers stumble over may only fall."""

import pytest
from support.language import PATTERNS, Tally, count

# Phrases in 1,000 lines of text. Lower a limit when its count has fallen; never raise one.
LIMITS = {"documents": 4.0, "messages": 4.0, "product": 10.0, "tests": 10.0}


@pytest.fixture(scope="module")
def tallies() -> dict[str, Tally]:
    return count()


@pytest.mark.parametrize("kind", LIMITS)
def test_language_stays_below_its_limit(tallies: dict[str, Tally], kind: str) -> None:
    tally = tallies[kind]
    assert tally.per_thousand <= LIMITS[kind], "\n".join(["rewrite some of these:", *tally.places])


def test_count_finds_texts_of_every_kind(tallies: dict[str, Tally]) -> None:
    assert all(tally.lines > 1000 for tally in tallies.values()), tallies


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("headless who", "Whoever reads it is fast."),
        ("headless what", "What was sent, is read."),
        ("is no X", "A folder is no store."),
        ("fronted of", "Of a queue the end counts."),
        ("things that speak", "the file says so"),
        ("behind for order", "the bytes behind the end"),
        ("stands, lies", "the entry stands at 7"),
        ("goes on", "the query goes on"),
        ("for good, anew", "read it anew"),
        ("passed over", "the row is passed over"),
        ("is there", "if the file is there"),
        ("from 1 on", "a number from 1 on"),
        ("nothing but", "nothing but zeros"),
        ("is to be", "it is to be read"),
        ("mend, spoilt", "mend the file"),
    ],
)
def test_tally_counts_each_phrase(what: str, line: str) -> None:
    tally = Tally()
    tally.add("file:1", line)
    assert dict(tally.phrases) == {what: 1}
    assert len(PATTERNS) == 15
