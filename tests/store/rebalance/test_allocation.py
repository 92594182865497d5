"""The option `allocateStrategy`: its values, and the checks of a strategy's results."""

import sys
import types
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.rebalance.allocation import (
    ACCEPTED_STRATEGIES,
    Imported,
    allocate,
    check_allocation,
    find_strategy,
)
from rmq_spark.store.rebalance.strategies import (
    Average,
    Circle,
    Config,
    ConsistentHash,
    MachineRoom,
    MachineRoomNearby,
    MessageQueue,
    Strategy,
)


def queues_of(topic: str, count: int) -> list[QueueKey]:
    return [QueueKey(topic, number) for number in range(count)]


def names(queues: Sequence[QueueKey]) -> str:
    return " ".join(str(queue) for queue in queues)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("avg", Average()),
        (" AVG ", Average()),
        ("circle", Circle()),
        ("consistentHash", ConsistentHash(10)),
        ("consistenthash:3", ConsistentHash(3)),
        ("machineRoom:r1, r2,", MachineRoom(frozenset({"r1", "r2"}))),
        ("machineRoomNearby", MachineRoomNearby()),
        ("machineRoomNearby:circle", MachineRoomNearby(Circle())),
        (
            'config:{"u": [2], "t": [1, 0]}',
            Config((QueueKey("t", 0), QueueKey("t", 1), QueueKey("u", 2))),
        ),
        ('config:{"t": []}', Config(())),
    ],
)
def test_find_strategy_returns_the_strategy_of_the_option(text: str, strategy: Strategy) -> None:
    found = find_strategy(text)
    if isinstance(strategy, MachineRoomNearby):
        assert isinstance(found, MachineRoomNearby)
        assert found.inner == strategy.inner
    else:
        assert found == strategy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no strategy of that name"),
        ("averagely", "no strategy of that name"),
        ("averagely:", "no strategy of that name"),
        ("consistentHash:0", "virtual nodes are a number from 1 to 10000, found '0'"),
        ("consistentHash:-1", "virtual nodes are a number"),
        ("consistentHash:10001", "virtual nodes are a number"),
        ("consistentHash:" + "9" * 5000, "virtual nodes are a number"),
        ("consistentHash:many", "virtual nodes are a number"),
        ("consistentHash:²", "virtual nodes are a number"),
        ("machineRoom", "found an empty list of rooms"),
        ("machineRoom: , ", "found an empty list of rooms"),
        ("machineRoomNearby:machineRoom:r", "the strategy within a room is avg, circle or consistentHash"),
        ("machineRoomNearby:machineRoomNearby", "the strategy within a room"),
        ("config", "the queues are not valid JSON"),
        ("config:{", "the queues are not valid JSON"),
        ("config:" + "[" * 100_000, "the queues are not valid JSON"),
        ("config:[]", "the queues are a JSON object"),
        ("config:{}", "the queues are a JSON object"),
        ("config:[1]", "the queues are a JSON object"),
        ("config:7", "the queues are a JSON object"),
        ('config:{"t": 1}', "found 1 for 't'"),
        ('config:{"t": {"u": [1]}}', "found .* for 't'"),
        ('config:{"t": [true]}', r"found \[True\] for 't'"),
        ('config:{"t": [-1]}', "found .* for 't'"),
        ('config:{"t": [1.0]}', "found .* for 't'"),
        ('config:{"t": [1, 1]}', "found a queue twice"),
        ('config:{"t": [1], "t": [1]}', "found a queue twice"),
        ("no_such_module:name", "ModuleNotFoundError"),
        ("math:no_such_name", "AttributeError"),
        ("math:pi", "found 3.14.*, which is not a function"),
        ("decimal:Decimal", "which is not a function"),
        (":name", "importable"),
        ("..:name", "importable"),
    ],
)
def test_find_strategy_lists_the_accepted_values(text: str, why: str) -> None:
    with pytest.raises(OptionError, match=why) as caught:
        find_strategy(text)
    assert ACCEPTED_STRATEGIES in str(caught.value)


@pytest.fixture
def users_module() -> Iterator[types.ModuleType]:
    module = types.ModuleType("a_users_strategies")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_find_strategy_imports_a_callable(users_module: types.ModuleType) -> None:
    def backwards(group: str, client: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
        assert group == "g"
        assert str(queues[0]) == "MessageQueue [topic=t, brokerName=broker, queueId=0]"
        return queues[::-1][clients.index(client) :: len(clients)]

    users_module.shares = types.SimpleNamespace(backwards=backwards)  # type: ignore[attr-defined]
    strategy = find_strategy(" a_users_strategies:shares.backwards ")
    assert strategy.name == "a_users_strategies:shares.backwards"
    assert names(allocate(strategy, "g", "c1", queues_of("t", 3), ["c2", "c1"])) == "t/0 t/2"


def test_find_strategy_names_a_module_that_fails_to_import() -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "a_broken_module":
                raise ZeroDivisionError("while importing")

    finder = Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        with pytest.raises(OptionError, match=r"a_broken_module:f.*ZeroDivisionError: while importing"):
            find_strategy("a_broken_module:f")
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]


def test_allocate_shares_each_topic_separately() -> None:
    queues = [*queues_of("t", 3), *queues_of("a", 3)]
    assert names(allocate(Average(), "g", "c0", queues, ["c0", "c1"])) == "a/0 a/1 t/0 t/1"
    assert names(allocate(Average(), "g", "c1", queues, ["c0", "c1"])) == "a/2 t/2"


@given(st.permutations(range(7)), st.permutations(["c0", "c1", "c10"]), st.sampled_from([Average(), Circle()]))
def test_allocate_does_not_depend_on_the_order_of_its_arguments(
    order: list[int], clients: list[str], strategy: Strategy
) -> None:
    queues = queues_of("t", 7)
    shuffled = [queues[number] for number in order]
    assert allocate(strategy, "g", "c1", shuffled, clients) == allocate(
        strategy, "g", "c1", queues, ["c0", "c1", "c10"]
    )


def test_allocate_returns_nothing_without_queues() -> None:
    assert allocate(Average(), "g", "c0", [], ["c0"]) == []


def test_allocate_returns_nothing_for_a_client_that_is_not_a_member() -> None:
    everything = Imported("m:f", lambda _group, client, queues, clients: queues if client == clients[0] else [])
    for strategy in (Average(), everything):
        assert allocate(strategy, "g", "c9", queues_of("t", 2), ["c0"]) == []


def test_allocate_by_config_returns_each_queue_once() -> None:
    told = Config((*queues_of("t", 1), *queues_of("u", 2)))
    assert names(allocate(told, "g", "c0", [*queues_of("t", 2), *queues_of("u", 2)], ["c0"])) == "t/0 u/0 u/1"


def test_allocate_by_config_refuses_unknown_queues() -> None:
    with pytest.raises(OptionError, match=r"CONFIG of group 'g' lists unknown queues: t/1, t/2\. There are.* t/0 "):
        allocate(Config(tuple(queues_of("t", 3))), "g", "c0", queues_of("t", 1), ["c0"])


CLIENTS = ["c0", "c1"]


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ({"c0": [0, 1]}, r"gave 1 queue\(s\) to nobody: t/2"),
        ({"c0": None, "c1": None}, r"gave 3 queue\(s\) to nobody: t/0, t/1, t/2"),
        ({"c0": [0, 1], "c1": [1, 2]}, "gave a queue twice, to members 'c0' and 'c1': t/1"),
        ({"c0": [0, 1, 0], "c1": [2]}, "gave a queue twice, to 'c0': t/0"),
        ({"c0": [0, 1, 2], "c1": [3]}, "gave member 'c1' an unknown queue: t/3"),
    ],
)
def test_allocate_refuses_a_callable_that_loses_or_duplicates_a_queue(
    shares: dict[str, list[int] | None], why: str
) -> None:
    def share(_group: str, client: str, *_: object) -> list[MessageQueue] | None:
        ids = shares.get(client, [])
        return None if ids is None else [MessageQueue("t", "broker", one) for one in ids]

    for client in CLIENTS:
        with pytest.raises(OptionError, match=why) as caught:
            allocate(Imported("m:share", share), "g", client, queues_of("t", 3), CLIENTS)
        assert "allocateStrategy m:share of group 'g'" in str(caught.value)
        assert "the queues t/0, t/1, t/2 and the members c0, c1" in str(caught.value)


def test_allocate_lists_the_first_queues_in_an_error() -> None:
    with pytest.raises(OptionError, match=r"t/8, t/9 and 990 more\. There are"):
        allocate(Imported("m:none", lambda *_: []), "g", "c0", queues_of("t", 1000), ["c0"])


@pytest.mark.parametrize("answer", [["t/0"], [("t", "b", 0)], "ab", [None]])
def test_allocate_refuses_a_callable_that_returns_other_items(answer: object) -> None:
    with pytest.raises(OptionError, match=r"m:f gave member 'c0' of group 'g' .*; expected a MessageQueue"):
        allocate(Imported("m:f", lambda *_: answer), "g", "c0", queues_of("t", 1), ["c0"])


@pytest.mark.parametrize("answer", [7, object()])
def test_allocate_refuses_a_callable_that_returns_no_list(answer: object) -> None:
    with pytest.raises(OptionError, match="m:f failed for member 'c0' of group 'g': TypeError"):
        allocate(Imported("m:f", lambda *_: answer), "g", "c0", queues_of("t", 1), ["c0"])


def test_allocate_names_the_error_of_a_callable() -> None:
    def share(*_: object) -> list[MessageQueue]:
        raise KeyError("room")

    with pytest.raises(OptionError, match="m:f failed for member 'c0' of group 'g': KeyError: 'room'") as caught:
        allocate(Imported("m:f", share), "g", "c0", queues_of("t", 1), ["c0"])
    assert isinstance(caught.value.__cause__, KeyError)


def test_allocate_gives_each_call_its_own_lists() -> None:
    def greedy(_group: str, _client: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
        clients.clear()
        return [queues.pop()] if len(queues) == 1 else []

    with pytest.raises(OptionError, match="gave a queue twice"):
        allocate(Imported("m:f", greedy), "g", "c0", queues_of("t", 1), CLIENTS)


@pytest.mark.parametrize("strategy", [Average(), Circle(), ConsistentHash(), MachineRoomNearby()])
def test_check_allocation_accepts_rocketmqs_strategies(strategy: Strategy) -> None:
    shares = check_allocation(strategy, "g", queues_of("t", 20), ["c0", "c1", "c2"])
    assert sorted(queue.queue_id for share in shares.values() for queue in share) == list(range(20))


def test_check_allocation_refuses_rooms_that_omit_queues() -> None:
    with pytest.raises(OptionError, match=r"MACHINE_ROOM of group 'g' gave 2 queue\(s\) to nobody"):
        check_allocation(MachineRoom(frozenset({"r"})), "g", queues_of("t", 2), ["c0"])
