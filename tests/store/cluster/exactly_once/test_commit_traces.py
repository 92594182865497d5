"""Random traces of the model of the protocol, replayed by real commits and brokers in this process."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random

import pytest
from support import exact_commits as commits
from support import exact_mistakes as mistakes
from support.exact_traces import Replay, finish, make_trace
from support.exactly_once_model import World

from rmq_spark.store.testing.brokers import RunningCluster

WORLDS = {
    "two drivers": World(sessions=2),
    "three drivers": World(),
    "a replay with other rows": World(other_rows=True),
}
SEEDS = range(4)
_queries = count()


@pytest.fixture(scope="module", params=["5.3", pytest.param("4.9", marks=pytest.mark.slow)])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """A cluster for all traces. Each has a query of its own."""
    path: Path = tmp_path_factory.mktemp("cluster")
    with RunningCluster(path, release=request.param, brokers=2) as cluster:
        yield commits.prepare(cluster)


def replay(cluster: RunningCluster, world: World, seed: int) -> None:
    query = f"trace-{next(_queries)}"
    since = commits.ends(cluster)
    steps = make_trace(world, Random(seed))
    print("seed", seed, *(step.what for step in steps), sep="\n")
    Replay(cluster, world, query).run(steps)
    finish(cluster, world, query)
    check_promise(commits.stored(cluster, since), world)


def check_promise(found: dict[commits.QueueKey, list[bytes]], world: World) -> None:
    """Check that each batch is stored once and in order, all rows of one attempt."""
    rows = [tuple(map(int, body.split())) for queue in (commits.A, commits.B) for body in found[queue]]
    of = {batch: {attempt for one, attempt, _ in rows if one == batch} for batch in range(world.batches)}
    assert [len(attempts) for attempts in of.values()] == [1] * world.batches, of
    for queue in (commits.A, commits.B):
        expected = [f"{batch} {min(of[batch])} {number}".encode() for batch in of for number in range(2)]
        assert found[queue] == expected, (queue, found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_a_trace_leaves_what_the_model_has(cluster: RunningCluster, world: World, seed: int) -> None:
    replay(cluster, world, seed)


FOUND_BY = [  # the seed of a trace that shows the mistake
    (mistakes.no_settle, 8),
    (mistakes.no_read_back, 0),
    pytest.param(mistakes.no_fence, 23, marks=pytest.mark.slow),
    pytest.param(mistakes.takers_not_fenced, 23, marks=pytest.mark.slow),
    pytest.param(mistakes.late_floor, 0, marks=pytest.mark.slow),
    pytest.param(mistakes.second_intent_counts, 0, marks=pytest.mark.slow),
    pytest.param(mistakes.done_early, 0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("plant", "seed"), FOUND_BY)
def test_a_trace_finds_a_planted_mistake(
    cluster: RunningCluster, plant: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = make_trace(World(), Random(seed))
    Replay(cluster, World(), f"trace-{next(_queries)}").run(steps)
    plant(monkeypatch)

    def replay_planted() -> None:
        for _ in range(3):  # a slow machine may hide a mistake about time
            Replay(cluster, World(), f"trace-{next(_queries)}", patience_s=10).run(steps)

    with pytest.raises(AssertionError, match=r"session \d sends|session \d has ended|the real sessions do not come"):
        replay_planted()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1150, 10))
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_many_traces_leave_what_the_model_has(cluster: RunningCluster, world: World, first: int) -> None:
    for seed in range(first, first + 10):
        replay(cluster, world, seed)
