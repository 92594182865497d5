"""What a reader remembers of routes, and the topics that it refuses."""

import pytest

from rmq_spark.store.cluster.responses import BrokerData, QueueData, RouteResponse
from rmq_spark.store.cluster.routes import (
    RouteBook,
    join_brokers,
    join_queues,
    refuse_config,
    refuse_light_queue,
    refuse_route,
)
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.config_json import TopicConfig
from rmq_spark.store.model import QueueKey

A, B = "broker-a", "broker-b"


def queue_data(broker: str, reads: int = 2, perm: int = 6) -> QueueData:
    return QueueData(broker, perm, reads, reads)


def broker_data(broker: str, addresses: dict[int, str], *, acting: bool = False) -> BrokerData:
    return BrokerData(broker, "c1", addresses, acting)


def route(*parts: QueueData | BrokerData, is_static: bool = False) -> RouteResponse:
    queues = tuple(part for part in parts if isinstance(part, QueueData))
    return RouteResponse(queues, tuple(part for part in parts if isinstance(part, BrokerData)), "", is_static)


BOTH = route(queue_data(B), queue_data(A, 3), broker_data(B, {0: "h:2"}), broker_data(A, {0: "h:1", 1: "h:9"}))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("[fe80::1%eth0]:10911", "[fe80::1%eth0]:10911"),
        ("fe80::1:10911", "[fe80::1]:10911"),
        ("h.x:1", "h.x:1"),
        ("h", None),
        ("h:0", None),
    ],
)
def test_book_has_addresses_of_both_families(address: str, expected: str | None) -> None:
    book = RouteBook()
    book.note_routes("orders", [route(queue_data(A), broker_data(A, {0: address}))])
    assert book.address(A) == expected


@pytest.mark.parametrize("count", [-1, 2_000_000_000])
def test_book_leaves_out_a_broker_with_an_impossible_number_of_queues(count: int) -> None:
    book = RouteBook()
    book.note_routes("orders", [route(QueueData(A, 6, count, 1), queue_data(B), broker_data(A, {0: "h:1"}))])
    assert {queue.broker for queue in book.queues("orders")} == {B}
    assert book.address(A) == "h:1"


def test_refuse_names_what_cannot_be_read() -> None:
    refuse_route("orders", BOTH)
    refuse_light_queue("orders")
    for attributes in ({}, {"cleanup.policy": "DELETE", "message.type": "FIFO"}, {"queue.type": "SimpleCQ"}):
        refuse_config("orders", TopicConfig("orders", attributes=attributes))
    with pytest.raises(OptionError, match="topic orders is a static topic"):
        refuse_route("orders", route(queue_data(A), is_static=True))
    with pytest.raises(OptionError, match="topic orders has 2000000000 read queues and 1 write queues on broker"):
        refuse_route("orders", route(QueueData(A, 6, 2_000_000_000, 1)))
    with pytest.raises(OptionError, match="topic %LMQ%x is a light message queue"):
        refuse_light_queue("%LMQ%x")
    with pytest.raises(OptionError, match=r"topic orders has cleanup\.policy=COMPACTION"):
        refuse_config("orders", TopicConfig("orders", attributes={"cleanup.policy": "COMPACTION"}))
    with pytest.raises(OptionError, match=r"topic orders has queue\.type=BatchCQ"):
        refuse_config("orders", TopicConfig("orders", attributes={"queue.type": "BatchCQ"}))


def test_name_servers_together_know_the_more_of_each() -> None:
    one = route(queue_data(A, 2, perm=4), broker_data(A, {1: "h:9"}), broker_data(B, {0: "h:2"}))
    other = route(
        queue_data(A, 3, perm=2), broker_data(A, {0: "h:1", 2: "h:8"}, acting=True), broker_data(B, {0: "h:3"})
    )
    assert join_queues([one, other]) == {A: queue_data(A, 3, perm=6)}
    assert join_brokers([one.brokers, other.brokers]) == {
        A: broker_data(A, {0: "h:1", 1: "h:9", 2: "h:8"}, acting=True),
        B: broker_data(B, {0: "h:2"}),
    }


def test_book_lists_the_queues_of_all_brokers_sorted() -> None:
    book = RouteBook()
    assert book.note_routes("orders", [BOTH])
    assert book.queues("orders") == [QueueKey("orders", number, A) for number in range(3)] + [
        QueueKey("orders", number, B) for number in range(2)
    ]
    assert book.queues("other") == []
    assert not book.note_routes("orders", [BOTH]), "the same again"


def test_book_joins_the_routes_of_several_name_servers() -> None:
    book = RouteBook()
    one = route(queue_data(A, 2), broker_data(A, {1: "h:9"}))
    other = route(queue_data(A, 3), queue_data(B), broker_data(A, {0: "h:1"}), broker_data(B, {0: "h:2"}))
    book.note_routes("orders", [one, other])
    assert [queue.id_text for queue in book.queues("orders")] == [f"{A}:{n}" for n in range(3)] + [f"{B}:0", f"{B}:1"]
    assert (book.address(A), book.address(B)) == ("h:1", "h:2")


def test_book_keeps_queues_and_address_of_a_broker_that_left_the_route() -> None:
    book = RouteBook()
    book.note_routes("orders", [BOTH])
    queues = book.queues("orders")
    assert book.note_routes("orders", [route(queue_data(A, 3), broker_data(A, {0: "h:1"}))])
    assert book.queues("orders") == queues
    listing = book.listing("orders", B)
    assert (listing.address, listing.has_broker, listing.has_topic, listing.read_count) == ("h:2", False, False, 2)
    assert book.note_routes("orders", []), "no name server has a route"
    assert book.queues("orders") == queues
    book.note_brokers([{B: broker_data(B, {0: "h:2"})}])
    assert book.listing("orders", B).has_broker


def test_book_uses_the_new_address_of_a_master() -> None:
    book = RouteBook()
    book.note_routes("orders", [BOTH])
    assert book.note_routes("orders", [route(queue_data(A, 3), broker_data(A, {0: "h:7"}))])
    assert book.address(A) == "h:7"


def test_book_says_that_a_broker_has_only_slaves() -> None:
    book = RouteBook()
    book.note_routes("orders", [BOTH])
    book.note_routes("orders", [route(queue_data(A, 3), broker_data(A, {1: "h:9"}))])
    listing = book.listing("orders", A)
    assert (listing.has_master, listing.address, listing.has_topic) == (False, "h:1", True)
    book.note_routes("orders", [BOTH])
    assert book.listing("orders", A).has_master


def test_book_treats_a_broker_without_addresses_as_unknown_until_it_has_registered() -> None:
    book = RouteBook()
    book.note_routes("orders", [route(queue_data(A))])
    assert book.listing("orders", A).address is None
    assert len(book.queues("orders")) == 2


@pytest.mark.parametrize(("perm", "acting", "expected"), [(4, True, True), (6, True, False), (4, False, False)])
def test_listing_says_whether_a_slave_acts_as_master(perm: int, acting: bool, expected: bool) -> None:
    book = RouteBook()
    book.note_routes("orders", [route(queue_data(A, perm=perm), broker_data(A, {0: "h:1"}, acting=acting))])
    assert book.listing("orders", A).is_acting == expected


@pytest.mark.parametrize(("perm", "expected"), [(6, True), (4, True), (7, True), (2, False), (0, False), (3, False)])
def test_listing_says_whether_the_topic_can_be_read(perm: int, expected: bool) -> None:
    book = RouteBook()
    book.note_routes("orders", [route(queue_data(A, perm=perm), broker_data(A, {0: "h:1"}))])
    assert book.listing("orders", A).is_readable == expected


def test_listing_has_the_new_count_of_a_shrunk_topic_and_the_book_keeps_its_queues() -> None:
    book = RouteBook()
    book.note_routes("orders", [BOTH])
    book.note_routes("orders", [route(queue_data(A, 1), broker_data(A, {0: "h:1"}))])
    assert book.listing("orders", A).read_count == 1
    assert len([queue for queue in book.queues("orders") if queue.broker == A]) == 3


def test_book_overrides_addresses_and_leaves_out_retired_brokers() -> None:
    book = RouteBook({A: "localhost:30911"}, [B])
    book.note_routes("orders", [BOTH])
    assert book.address(A) == "localhost:30911"
    assert {queue.broker for queue in book.queues("orders")} == {A}
    assert book.address(B) == "h:2", "it may be asked for its last bounds"


def test_book_knows_brokers_that_the_caller_expects() -> None:
    book = RouteBook()
    book.expect("orders", B)
    assert book.brokers("orders") == [B]
    assert book.listing("orders", B).address is None
    assert book.queues("orders") == []
    book.note_routes("orders", [BOTH])
    book.expect("orders", B)
    assert len(book.queues("orders")) == 5


def test_members_of_a_group_share_the_queues_of_the_newest_route() -> None:
    book = RouteBook(retired=[B])
    book.note_routes("t", [BOTH])
    assert book.shared_queues("t") == [
        QueueKey("t", number, name) for name, count in ((A, 3), (B, 2)) for number in range(count)
    ]
    assert book.shared_queues("unknown") == []
    book.note_routes("t", [route(queue_data(A, 1), queue_data(B, 2, perm=2))])
    assert book.shared_queues("t") == [QueueKey("t", 0, A)], "fewer queues, and none of a broker that forbids reading"
    book.note_routes("t", [route(queue_data(A, 1)), route(queue_data(A, 2))])
    assert len(book.shared_queues("t")) == 2
    book.note_routes("t", [])
    assert len(book.shared_queues("t")) == 2, "the name servers may have just started"
