"""Options of a consumer group against each other and the rest: what goes together, and in which kind of query."""

import pytest

from rmq_spark.datasource.options import ReadOptions, parse_options
from rmq_spark.store.errors import OptionError

GROUP = {"consumerGroup": "billing"}
SHARED = GROUP | {"assignment": "shared"}
LOUD = GROUP | {"messageModel": "broadcasting"}
TIME = {"startingTimestamp": "1000000000005"}
BY_TIME = TIME | {"groupFallback": "timestamp"}
AT_GROUP = {"startingOffsets": "group"}
TOGETHER = "groupFallback=timestamp and startingTimestamp go together"


def parse(given: dict[str, str]) -> ReadOptions:
    return parse_options({"path": "/data/store", "subscribe": "orders"} | given, 0)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (SHARED | {"onOffsetConflict": "fail"}, "onOffsetConflict=fail is for a query that is alone"),
        (SHARED | {"onOffsetConflict": "group"}, "onOffsetConflict=group is for a query that is alone"),
        (GROUP | {"allocateStrategy": "circle"}, "Add assignment=shared, or leave allocateStrategy out"),
        (GROUP | {"groupFallback": "earliest"}, "That takes startingOffsets=group"),
        (GROUP | {"groupFallback": "earliest", "startingOffsets": "latest"}, "That takes startingOffsets=group"),
        (GROUP | BY_TIME, "That takes startingOffsets=group"),
        (GROUP | AT_GROUP | TIME, TOGETHER),
        (
            GROUP | AT_GROUP | {"groupFallback": "timestamp"},
            TOGETHER,
        ),
        (LOUD | AT_GROUP, "with messageModel=broadcasting a group has no offsets"),
        (LOUD | {"groupFallback": "earliest"}, "groupFallback=earliest is for topics in which a group has no"),
        (LOUD | {"commitOffsets": "required"}, "messageModel=broadcasting publishes no offsets"),
        (SHARED | {"messageModel": "broadcasting"}, "Keep one of them"),
        (SHARED | {"commitOffsets": "off"}, "Accepted with it: auto, required"),
        (AT_GROUP, "Add consumerGroup=name"),
        ({"orderly": "true"}, "Add consumerGroup=name"),
        (GROUP | {"orderly": "true", "minPartitions": "2"}, "minPartitions splits queues"),
        (GROUP | {"handoverTimeout": "10s"}, "Add assignment=shared, or leave handoverTimeout out"),
        *(
            (LOUD | {name: text}, f"Leave {name} out")
            for name, text in {
                "orderly": "true",
                "fenceLostQueues": "true",
                "onOffsetConflict": "fail",
                "leaseTimeout": "90s",
                "leaseHeartbeat": "10s",
                "handoverTimeout": "10s",
                "allocateStrategy": "circle",
            }.items()
        ),
        *(
            (
                GROUP | AT_GROUP | BY_TIME | {"startingOffsetsByTimestampStrategy": word},
                "Leave startingOffsetsByTimestampStrategy out",
            )
            for word in ("error", "latest", "earliest")
        ),
    ],
)
def test_what_would_change_nothing_or_contradicts_is_refused_with_what_to_do(given, part) -> None:
    with pytest.raises(OptionError) as caught:
        parse(given)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "name", ["nonsense", "consistentHash:0", "machineRoom:", "config:[1]", "no_such_module:f", "os.path:no_such_name"]
)
@pytest.mark.parametrize("given", [SHARED, SHARED | {"orderly": "true"}])
def test_a_strategy_that_is_none_is_refused_before_a_store_is_looked_at(given, name) -> None:
    with pytest.raises(OptionError, match="accepted are avg") as caught:
        parse(given | {"allocateStrategy": name})
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        SHARED | {"allocateStrategy": "circle", "groupFallback": "earliest", "orderly": "true"},
        SHARED | {"handoverTimeout": "10s"},
        GROUP | {"handoverTimeout": "60s"},
        SHARED | BY_TIME,
        SHARED | AT_GROUP,
        GROUP | AT_GROUP | BY_TIME,
        GROUP | {"onOffsetConflict": "fail", "fenceLostQueues": "true", "leaseTimeout": "90s"},
        LOUD | TIME | {"startingOffsetsByTimestampStrategy": "latest"},
        LOUD | {"onOffsetConflict": "checkpoint", "groupFallback": "latest", "orderly": "false"},
    ],
)
def test_what_goes_together_in_a_stream_is_accepted(given) -> None:
    parse(given).check_stream()


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (SHARED | {"startingOffsets": "earliest"}, "with assignment=shared a query begins in each queue where"),
        (SHARED | {"startingOffsets": '{"orders": {"0": 1}}'}, "with assignment=shared a query begins in each queue"),
        (SHARED | TIME, TOGETHER),
        (SHARED | {"groupFallback": "timestamp"}, TOGETHER),
    ],
)
def test_a_start_of_its_own_is_refused_to_a_stream_that_shares_queues(given, part) -> None:
    with pytest.raises(OptionError) as caught:
        parse(given).check_stream()
    assert part in str(caught.value)


@pytest.mark.parametrize("start", [{}, {"startingOffsets": "earliest"}, TIME])
def test_in_a_batch_query_sharing_has_no_say_in_where_it_begins(start) -> None:
    options = parse(SHARED | start)
    options.check_batch()
    assert not options.names_group_as_start
    assert parse(SHARED | AT_GROUP).names_group_as_start


def test_a_batch_query_that_does_not_begin_at_the_group_is_refused_a_fallback() -> None:
    with pytest.raises(OptionError, match=r"groupFallback=earliest .* takes startingOffsets=group \(a batch query"):
        parse(SHARED | {"groupFallback": "earliest"}).check_batch()
    parse(SHARED | AT_GROUP | {"groupFallback": "earliest"}).check_batch()


def test_topics_in_another_order_are_the_same_subscription() -> None:
    texts = {str(parse({"subscribe": names}).subscription) for names in ("orders,payments", "payments, orders")}
    assert texts == {'subscribe="orders,payments"'}
