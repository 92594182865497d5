"""Names of topics and groups with a namespace."""

import pytest

from rmq_spark.store.cluster.namespace import is_in_namespace, is_shared_name, unwrap_name, wrap_name


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("orders", "ns%orders"),
        ("%RETRY%billing", "%RETRY%ns%billing"),
        ("%DLQ%billing", "%DLQ%ns%billing"),
        ("orders_REPLY_TOPIC", "ns%orders_REPLY_TOPIC"),
        ("other%orders", "ns%other%orders"),
        ("nsorders", "ns%nsorders"),
        ("RMQ_SPARK_STAGE", "ns%RMQ_SPARK_STAGE"),
    ],
)
def test_wrap_name_and_unwrap_name_undo_each_other(name: str, wrapped: str) -> None:
    assert wrap_name("ns", name) == wrapped
    assert wrap_name("ns", wrapped) == wrapped, "a name that has the namespace stays"
    assert unwrap_name("ns", wrapped) == name
    assert unwrap_name("other-ns", wrapped) == wrapped
    assert is_in_namespace("ns", wrapped)
    assert not is_in_namespace("ns", name)
    assert wrap_name("", name) == unwrap_name("", name) == name
    assert is_in_namespace("", name)


@pytest.mark.parametrize(
    "name", ["SCHEDULE_TOPIC_XXXX", "TBW102", "rmq_sys_TRACE", "CID_RMQ_SYS_TRANS", "BenchmarkTest"]
)
def test_rocketmq_s_own_names_are_in_no_namespace(name: str) -> None:
    assert is_shared_name(name)
    assert wrap_name("ns", name) == unwrap_name("ns", name) == name
    assert not is_in_namespace("ns", name)


def test_wrap_name_leaves_the_empty_group_alone() -> None:
    assert wrap_name("ns", "") == ""
