"""Options of a query that is a member of a consumer group in a live cluster: shared queues, and what is refused."""

import pytest
from support.parsed_options import parse_options

from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.store.errors import OptionError

CLUSTER = {"nameServer": "ns1:9876", "subscribe": "orders"}
MEMBER = CLUSTER | {"consumerGroup": "billing"}
OBSERVER = MEMBER | {"commitOffsets": "off"}


def stream(given: dict[str, str]) -> ReadOptions:
    options = parse_options(given, 0)
    options.check_stream()
    return options


@pytest.mark.parametrize("given", [{}, {"assignment": "shared"}, {"startingOffsets": "group"}])
def test_stream_is_a_member_that_shares_the_queues(given) -> None:
    options = stream(MEMBER | given)
    assert options.group is not None
    assert (options.is_member, options.group.is_shared, options.begins_at_group) == (True, True, True)
    assert options.retry_topic == "%RETRY%billing"


def test_stream_with_commitOffsets_off_only_begins_at_the_group() -> None:
    options = stream(OBSERVER | {"groupFallback": "earliest"})
    assert options.group is not None
    assert (options.is_member, options.group.is_shared, options.begins_at_group) == (False, False, True)
    assert options.retry_topic == "%RETRY%billing"
    assert stream(OBSERVER | {"startingOffsets": "group"}).begins_at_group
    assert stream(OBSERVER | {"subscribeRetry": "false"}).retry_topic is None
    assigned = {name: text for name, text in OBSERVER.items() if name != "subscribe"}
    assert not stream(assigned | {"assign": '{"orders": ["broker-a:0"]}'}).is_member


def test_stream_with_broadcasting_is_no_member_and_begins_where_its_options_say() -> None:
    options = stream(MEMBER | {"messageModel": "broadcasting", "startingOffsets": "earliest"})
    assert options.group is not None
    assert (options.is_member, options.group.is_shared, options.begins_at_group) == (False, False, False)
    assert options.retry_topic is None


def test_batch_query_takes_the_options_of_a_stream() -> None:
    parse_options(MEMBER, 0).check_batch()
    given = MEMBER | {"startingOffsets": "group", "groupFallback": "earliest", "subscribeRetry": "false"}
    parse_options(given, 0).check_batch()
    with pytest.raises(OptionError, match=r"^groupFallback=earliest has no effect in a query that does not begin at "):
        parse_options(MEMBER | {"groupFallback": "earliest"}, 0).check_batch()


ASSIGNED = {name: text for name, text in MEMBER.items() if name != "subscribe"} | {
    "assign": '{"orders": ["broker-a:0"]}'
}
REFUSED = {
    "all queues": (
        MEMBER | {"assignment": "all"},
        r"^assignment=all: found the cluster at nameServer=ns1:9876, where the members of a group share its queues; "
        r"expected shared\. Leave assignment out\.",
    ),
    "shared queues without offsets": (OBSERVER | {"assignment": "shared"}, r"^assignment=shared: found commitOffsets="),
    "another start": (
        MEMBER | {"startingOffsets": "earliest"},
        r"^startingOffsets: a member of group billing in a cluster begins in each queue at the group's offset\. .* "
        r"Or leave consumerGroup out to read without a group\.$",
    ),
    "another start without joining": (
        OBSERVER | {"startingOffsets": "earliest"},
        r"^startingOffsets: with commitOffsets=off in a cluster a query begins .* Or leave consumerGroup out to ",
    ),
    "a time without a fallback": (MEMBER | {"startingTimestamp": "-10m"}, "^groupFallback=timestamp and startingTime"),
    "a time without a fallback or joining": (
        OBSERVER | {"startingTimestamp": "-10m"},
        "^groupFallback=timestamp and startingTimestamp go together",
    ),
    "single queues": (
        ASSIGNED,
        r"^assign: found a member of the consumer group billing in a cluster, which gets its queues from the group; "
        r"expected subscribe or subscribePattern\. ",
    ),
    "no retry topic": (
        MEMBER | {"subscribeRetry": "false"},
        r"^subscribeRetry=false: found a member of the consumer group billing in a cluster; expected true, because the "
        r"members share the queues of %RETRY%billing, ",
    ),
    "a conflict that is settled": (
        MEMBER | {"onOffsetConflict": "group"},
        "^onOffsetConflict=group has no effect with assignment=shared: ",
    ),
    "orderly without joining": (
        OBSERVER | {"orderly": "true"},
        "^orderly has no effect in a cluster with commitOffsets=off: the query does not join its group, ",
    ),
    "a strategy without joining": (OBSERVER | {"allocateStrategy": "circle"}, "^allocateStrategy has no effect in a "),
    "order while all read all": (
        MEMBER | {"messageModel": "broadcasting", "orderly": "true"},
        "^orderly has no effect with messageModel=broadcasting",
    ),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_stream_in_a_group_is_refused(given, message) -> None:
    with pytest.raises(OptionError, match=message):
        stream(given)


@pytest.mark.parametrize("name", ["fenceLostQueues", "leaseTimeout", "leaseHeartbeat", "handoverTimeout"])
def test_option_about_leases_is_refused_by_name(name) -> None:
    value = {"fenceLostQueues": "true"}.get(name, "40s")
    with pytest.raises(OptionError) as caught:
        parse_options(MEMBER | {name: value}, 0)
    assert str(caught.value) == (
        f"{name} is not possible here: the cluster at nameServer=ns1:9876 cannot lease the queues of a group to its "
        f"members; expected a place that can. Leave {name} out."
    )


def test_member_may_have_a_strategy_and_order_and_require_commits() -> None:
    options = stream(MEMBER | {"allocateStrategy": "circle", "orderly": "true", "commitOffsets": "required"})
    assert options.group is not None
    assert (options.group.strategy, options.group.is_orderly, options.group.commit) == ("circle", True, "required")
