"""group_options: which options of a consumer group go together, and in which kind of query."""

import pytest
from support.parsed_options import parse_options

from rmq_spark.datasource.options.read_options import ReadOptions
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
        (SHARED | {"onOffsetConflict": "fail"}, "onOffsetConflict=fail has no effect with assignment=shared"),
        (SHARED | {"onOffsetConflict": "group"}, "onOffsetConflict=group has no effect with assignment=shared"),
        (GROUP | {"allocateStrategy": "circle"}, "Add assignment=shared, or leave allocateStrategy out"),
        (GROUP | {"groupFallback": "earliest"}, "Add startingOffsets=group"),
        (GROUP | {"groupFallback": "earliest", "startingOffsets": "latest"}, "Add startingOffsets=group"),
        (GROUP | BY_TIME, "Add startingOffsets=group"),
        (GROUP | AT_GROUP | TIME, TOGETHER),
        (
            GROUP | AT_GROUP | {"groupFallback": "timestamp"},
            TOGETHER,
        ),
        (LOUD | AT_GROUP, "with messageModel=broadcasting a group has no offsets"),
        (LOUD | {"groupFallback": "earliest"}, "groupFallback=earliest has no effect in a query that"),
        (LOUD | {"commitOffsets": "required"}, "messageModel=broadcasting: found commitOffsets=required"),
        (SHARED | {"messageModel": "broadcasting"}, "Keep one of them"),
        (SHARED | {"commitOffsets": "off"}, "expected auto or required"),
        (AT_GROUP, "Add consumerGroup=name"),
        ({"orderly": "true"}, "Add consumerGroup=name"),
        (GROUP | {"orderly": "true", "maxRecordsPerPartition": "2"}, "maxRecordsPerPartition splits queues"),
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
def test_build_group_options_refuses_options_without_effect_or_in_contradiction(given, part) -> None:
    with pytest.raises(OptionError) as caught:
        parse(given)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "name", ["nonsense", "consistentHash:0", "machineRoom:", "config:[1]", "no_such_module:f", "os.path:no_such_name"]
)
@pytest.mark.parametrize("given", [SHARED, SHARED | {"orderly": "true"}])
def test_allocateStrategy_is_refused_before_a_store_is_read(given, name) -> None:
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
def test_check_stream_accepts_options_that_go_together(given) -> None:
    parse(given).check_stream()


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (
            SHARED | {"startingOffsets": "earliest"},
            "with assignment=shared a query begins in each queue at the group's offset",
        ),
        (SHARED | {"startingOffsets": '{"orders": {"0": 1}}'}, "with assignment=shared a query begins in each queue"),
        (SHARED | TIME, TOGETHER),
        (SHARED | {"groupFallback": "timestamp"}, TOGETHER),
    ],
)
def test_check_stream_refuses_startingOffsets_beside_shared_queues(given, part) -> None:
    with pytest.raises(OptionError) as caught:
        parse(given).check_stream()
    assert part in str(caught.value)


@pytest.mark.parametrize("start", [{}, {"startingOffsets": "earliest"}, TIME])
def test_check_batch_ignores_assignment_shared_for_the_start(start) -> None:
    options = parse(SHARED | start)
    options.check_batch()
    assert not options.names_group_as_start
    assert parse(SHARED | AT_GROUP).names_group_as_start


def test_check_batch_refuses_groupFallback_unless_it_begins_at_the_group() -> None:
    with pytest.raises(
        OptionError,
        match=r"groupFallback=earliest .* Add startingOffsets=group \(assignment=shared has no effect in a batch",
    ):
        parse(SHARED | {"groupFallback": "earliest"}).check_batch()
    parse(SHARED | AT_GROUP | {"groupFallback": "earliest"}).check_batch()


def test_subscription_is_the_same_for_topics_in_another_order() -> None:
    texts = {str(parse({"subscribe": names}).subscription) for names in ("orders,payments", "payments, orders")}
    assert texts == {'subscribe="orders,payments"'}
