"""launch_jvm: it starts one JVM, and needs no interpreter of Python for that. No JVM is started here."""

import subprocess
import sys
from typing import Any

import pytest
from pyspark import SparkConf

from rmq_spark import gateway_launch


class Context:
    """What `launch_jvm` uses of SparkContext."""

    _gateway: object = None

    @classmethod
    def _ensure_initialized(cls, gateway: object = None, conf: object = None) -> None:
        cls._gateway = gateway or cls._gateway or "started by Spark"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The gateways that were started, and whether the lock was held meanwhile."""
    launched: list[str] = []

    def launch_gateway(conf: object, popen_kwargs: object) -> str:
        launched.append("locked" if gateway_launch._lock.locked() else "not locked")
        return "ours"

    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setattr(Context, "_gateway", None)
    monkeypatch.setattr(gateway_launch, "SparkContext", Context)
    monkeypatch.setattr(gateway_launch, "launch_gateway", launch_gateway)
    return launched


def test_launch_jvm_starts_one_JVM_under_a_lock(launched: list[str]) -> None:
    for _ in range(2):
        gateway_launch.launch_jvm(SparkConf(loadDefaults=False))
    gateway_launch._filters.pop().wait()
    assert (launched, Context._gateway) == (["locked"], "ours")


def test_launch_jvm_without_an_interpreter_shows_what_Java_says(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    gateway_launch.launch_jvm(SparkConf(loadDefaults=False))
    assert (launched, Context._gateway) == ([], "started by Spark")
