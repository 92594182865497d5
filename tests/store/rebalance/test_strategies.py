"""Shares of queues: the strategies answer as RocketMQ's compiled classes did."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey, sort_client_ids, sort_queues
from rmq_spark.store.rebalance.strategies import (
    Average,
    Circle,
    Config,
    ConsistentHash,
    MachineRoom,
    MachineRoomNearby,
    Strategy,
)

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))[
    "allocate"
]


def queues_of(broker: str, count: int, topic: str = "t") -> list[QueueKey]:
    return [QueueKey(topic, number, broker) for number in range(count)]


def strategy_of(vector: dict[str, Any]) -> Strategy:
    if vector["strategy"] == "consistent-hash":
        return ConsistentHash(vector["virtualNodes"])
    return {"averagely": Average(), "averagely-by-circle": Circle()}[vector["strategy"]]


def shares(strategy: Strategy, queues: Sequence[QueueKey], clients: Sequence[str]) -> list[list[QueueKey]]:
    return [strategy("g", client, queues, clients) for client in clients]


def ids(queues: Iterable[QueueKey]) -> list[int]:
    return [queue.queue_id for queue in queues]


@pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda v: f"{v['strategy']}-{v['virtualNodes']}-{v['queues']}-{len(v['cids'])}-{v['cid']}"
)
def test_a_member_gets_the_queues_that_the_java_class_gave_it(vector: dict[str, Any]) -> None:
    queues = queues_of(vector["broker"], vector["queues"], vector["topic"])
    assert ids(strategy_of(vector)("g", vector["cid"], queues, vector["cids"])) == vector["queueIds"]


def numbers(text: str) -> list[list[int]]:
    return [[int(word) for word in part.split()] for part in text.split("/")]


@pytest.mark.parametrize(
    ("queue_count", "client_count", "average", "circle"),
    [
        (8, 3, "0 1 2/3 4 5/6 7", "0 3 6/1 4 7/2 5"),
        (4, 4, "0/1/2/3", "0/1/2/3"),
        (4, 2, "0 1/2 3", "0 2/1 3"),
        (4, 3, "0 1/2/3", "0 3/1/2"),
        (3, 4, "0/1/2/", "0/1/2/"),
        (1, 3, "0//", "0//"),
        (10, 4, "0 1 2/3 4 5/6 7/8 9", "0 4 8/1 5 9/2 6/3 7"),
        (6, 1, "0 1 2 3 4 5", "0 1 2 3 4 5"),
        (16, 5, "0 1 2 3/4 5 6/7 8 9/10 11 12/13 14 15", "0 5 10 15/1 6 11/2 7 12/3 8 13/4 9 14"),
    ],
)
def test_average_gives_neighbours_and_circle_takes_turns(
    queue_count: int, client_count: int, average: str, circle: str
) -> None:
    queues, clients = queues_of("b", queue_count), [f"c{number}" for number in range(client_count)]
    assert [ids(share) for share in shares(Average(), queues, clients)] == numbers(average)
    assert [ids(share) for share in shares(Circle(), queues, clients)] == numbers(circle)


def test_average_goes_across_brokers() -> None:
    queues = queues_of("a", 4) + queues_of("b", 4)
    named = [
        [f"{queue.broker}{queue.queue_id}" for queue in share]
        for share in shares(Average(), queues, ["c0", "c1", "c2"])
    ]
    assert named == [["a0", "a1", "a2"], ["a3", "b0", "b1"], ["b2", "b3"]]


ROOMS = queues_of("room1@broker", 10) + queues_of("room2@broker", 5) + queues_of("nobroker", 2)


def room_names(share: Iterable[QueueKey]) -> str:
    return " ".join(f"{queue.broker.partition('@')[0][-1]}.{queue.queue_id}" for queue in share)


def test_a_machine_room_gives_what_is_left_to_the_members_in_front() -> None:
    given_ = shares(MachineRoom(frozenset({"room1"})), ROOMS, ["CID_0", "CID_1", "CID_2"])
    assert [room_names(share) for share in given_] == ["1.0 1.1 1.2 1.9", "1.3 1.4 1.5", "1.6 1.7 1.8"]


def test_two_machine_rooms_are_shared_as_one_row() -> None:
    given_ = shares(MachineRoom(frozenset({"room1", "room2"})), ROOMS, ["CID_0", "CID_1", "CID_2", "CID_3"])
    assert [room_names(share) for share in given_] == [
        "1.0 1.1 1.2 2.2",
        "1.3 1.4 1.5 2.3",
        "1.6 1.7 1.8 2.4",
        "1.9 2.0 2.1",
    ]


def test_a_machine_room_with_one_queue_leaves_the_second_member_none() -> None:
    given_ = shares(MachineRoom(frozenset({"r"})), queues_of("r@b", 1), ["CID_0", "CID_1"])
    assert [ids(share) for share in given_] == [[0], []]


@pytest.mark.parametrize(
    ("broker", "holds"),
    [("r@b", True), ("r@b@", True), ("r@", False), ("r", False), ("r@b@c", False), ("@r", False), ("", False)],
)
def test_a_broker_names_its_room_in_two_parts_as_java_splits_them(broker: str, holds: bool) -> None:
    assert MachineRoom(frozenset({"r"})).holds(QueueKey("t", 0, broker)) is holds


IDC = [queue for room in ("IDC1", "IDC2", "IDC3") for queue in queues_of(f"{room}-broker", 4)]


def nearby(clients: Sequence[str], queues: Sequence[QueueKey] = IDC) -> list[list[str]]:
    return [
        [f"{queue.broker[3]}.{queue.queue_id}" for queue in share]
        for share in shares(MachineRoomNearby(), queues, clients)
    ]


def test_nearby_keeps_queues_in_their_room_and_shares_those_of_a_room_without_members() -> None:
    assert nearby(["IDC1-CID-0", "IDC1-CID-1", "IDC2-CID-0"]) == [
        ["1.0", "1.1", "3.0", "3.1"],
        ["1.2", "1.3", "3.2"],
        ["2.0", "2.1", "2.2", "2.3", "3.3"],
    ]


def test_nearby_leaves_the_member_of_a_room_without_queues_none_when_every_other_room_has_a_member() -> None:
    assert nearby(["IDC1-CID-0", "IDC2-CID-0", "IDC3-CID-0", "IDC4-CID-0"]) == [
        ["1.0", "1.1", "1.2", "1.3"],
        ["2.0", "2.1", "2.2", "2.3"],
        ["3.0", "3.1", "3.2", "3.3"],
        [],
    ]


def test_nearby_takes_rooms_without_members_by_their_names() -> None:
    queues = queues_of("IDC9-b", 1) + queues_of("IDC5-b", 1)
    assert nearby(["IDC1-CID-0"], queues) == [["5.0", "9.0"]]


def test_nearby_takes_a_host_that_is_named_like_a_stores_broker_for_the_stores_room() -> None:
    queues = [QueueKey("T", number, "broker") for number in range(2)]
    members = ["broker-1@7#a", "other@8#b"]
    assert [len(share) for share in shares(MachineRoomNearby(), queues, members)] == [2, 0]
    assert [len(share) for share in shares(MachineRoomNearby(), queues, ["node-1@7#a", members[1]])] == [1, 1]


def test_nearby_asks_the_strategy_that_it_was_given() -> None:
    strategy = MachineRoomNearby(Circle())
    assert strategy.name == "MACHINE_ROOM_NEARBY-AVG_BY_CIRCLE"
    assert ids(strategy("g", "IDC1-a", IDC[:4], ["IDC1-a", "IDC1-b"])) == [0, 2]


@pytest.mark.parametrize(
    ("queues", "clients", "why"),
    [
        (
            queues_of("-b", 1),
            ["a-1"],
            r"null for mq MessageQueue \[topic=t, brokerName=-b, queueId=0\]",
        ),
        (queues_of("a-b", 1), ["a-1", "-2"], "Machine room is null for consumer id -2"),
    ],
)
def test_nearby_must_know_everybodys_room(queues: list[QueueKey], clients: list[str], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        MachineRoomNearby()("g", "a-1", queues, clients)


def test_nearby_takes_no_answer_from_who_says_the_rooms_as_an_unknown_room() -> None:
    with pytest.raises(OptionError, match="consumer id a"):
        MachineRoomNearby(client_room=lambda _: None)("g", "a", queues_of("r-b", 1), ["a"])


def test_config_answers_what_it_was_told_whoever_asks() -> None:
    told = tuple(queues_of("b", 2))
    assert Config(told)("g", "stranger", [], []) == list(told)
    assert Config()("g", "c0", queues_of("b", 2), ["c0"]) == []


CHECKED: list[Strategy] = [
    Average(),
    Circle(),
    MachineRoom(frozenset({"r"})),
    MachineRoomNearby(),
    ConsistentHash(),
]
every_checked = pytest.mark.parametrize("strategy", CHECKED, ids=lambda strategy: strategy.name)


@every_checked
@pytest.mark.parametrize(
    ("client", "queue_count", "clients", "why"),
    [
        ("", 1, ["c0"], "currentCID is empty"),
        ("c0", 0, ["c0"], "mqAll is null or mqAll empty"),
        ("c0", 1, [], "cidAll is null or cidAll empty"),
    ],
)
def test_nothing_to_share_is_an_error_in_rocketmqs_words(
    strategy: Strategy, client: str, queue_count: int, clients: list[str], why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        strategy("g", client, queues_of("r@b", queue_count), clients)


@every_checked
def test_a_client_that_is_no_member_gets_nothing(strategy: Strategy) -> None:
    assert strategy("g", "c9", queues_of("r@b", 4), ["c0", "c1"]) == []


def test_strategies_have_rocketmqs_names() -> None:
    names = ["AVG", "AVG_BY_CIRCLE", "MACHINE_ROOM", "MACHINE_ROOM_NEARBY-AVG", "CONSISTENT_HASH"]
    assert [strategy.name for strategy in CHECKED] == names
    assert Config().name == "CONFIG"


def test_a_negative_number_of_virtual_nodes_is_an_error() -> None:
    with pytest.raises(OptionError, match="illegal virtualNodeCnt: -1"):
        ConsistentHash(-1)


queue_rows = st.lists(
    st.builds(
        QueueKey,
        st.sampled_from(["t", "u"]),
        st.integers(0, 12),
        st.sampled_from(["r@a", "r@b", "IDC1-a", "IDC2-b"]),
    ),
    min_size=1,
    max_size=40,
    unique=True,
)
client_rows = st.lists(
    st.text("ab-12IDC", min_size=1, max_size=6).filter(lambda text: not text.startswith("-")),
    min_size=1,
    max_size=9,
    unique=True,
)
sharing = st.sampled_from([Average(), Circle(), MachineRoomNearby(), MachineRoomNearby(Circle()), ConsistentHash()])


@given(sharing, queue_rows, client_rows)
def test_together_the_members_have_every_queue_once(
    strategy: Strategy, queues: list[QueueKey], clients: list[str]
) -> None:
    given_ = [queue for share in shares(strategy, sort_queues(queues), sort_client_ids(clients)) for queue in share]
    assert sort_queues(given_) == sort_queues(queues)


@given(client_rows, st.sets(st.sampled_from(["r", "s"]), min_size=1), st.integers(1, 12))
def test_machine_rooms_share_each_queue_of_theirs_once(clients: list[str], rooms: set[str], count: int) -> None:
    queues = queues_of("r@b", count) + queues_of("s@b", count) + queues_of("b", count)
    given_ = [q for share in shares(MachineRoom(frozenset(rooms)), queues, clients) for q in share]
    assert sort_queues(given_) == [queue for queue in queues if queue.broker.partition("@")[0] in rooms - {"b"}]


@given(queue_rows, client_rows, st.data())
def test_on_the_ring_a_member_who_goes_moves_only_its_own_queues(
    queues: list[QueueKey], clients: list[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(clients))
    left = [client for client in clients if client != gone]
    before = {queue: client for client in clients for queue in ConsistentHash()("g", client, queues, clients)}
    after = {queue: client for client in left for queue in ConsistentHash()("g", client, queues, left)}
    # Read backwards: the member who comes takes queues from others, and nothing else moves.
    assert {queue: client for queue, client in before.items() if client != gone}.items() <= (
        after.items() if left else set()
    )
