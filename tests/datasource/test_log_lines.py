"""Log lines as JSON, and the set-up by the environment."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.datasource.spark.clocks import log_info
from rmq_spark.datasource.spark.log_lines import JsonFormatter, configure_from_environment, json_logging
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.testing.embedded import EmbeddedStore

LOGGER = logging.getLogger("rmq_spark")


@pytest.fixture(autouse=True)
def _the_logger_as_before() -> Iterator[None]:
    """Keep the logger of this process as it is."""
    before = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    yield
    LOGGER.handlers[:], level, LOGGER.propagate = before
    LOGGER.setLevel(level)


@pytest.fixture
def lines() -> io.StringIO:
    """The stream to which JSON is logged."""
    stream = io.StringIO()
    json_logging("debug", stream)
    return stream


def objects(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_JsonFormatter_has_the_usual_fields() -> None:
    record = logging.makeLogRecord(
        {"name": "rmq_spark", "levelname": "INFO", "module": "serve", "msg": "ü %s", "args": (1,), "created": 0.5}
    )
    assert JsonFormatter().format(record) == (
        '{"time": "1970-01-01T00:00:00.500Z", "level": "INFO", "logger": "rmq_spark", "module": "serve", '
        '"message": "ü 1"}'
    )


@pytest.mark.parametrize(
    ("text", "args", "fields"),
    [
        ("rmq: the lag of consumer group %s: %s", ("billing", "x"), {"group": "billing"}),
        ('rmq: topic "%s": queues [%s]', ("orders", "0"), {"topic": "orders"}),
        ("rmq: queue %s", (QueueKey("orders", 3, "broker-a"),), {"topic": "orders", "queue": 3, "broker": "broker-a"}),
        ("rmq: queue %s", (QueueKey("orders", 3),), {"topic": "orders", "queue": 3}),
        ("rmq: %d of %d, %s", (1, 2, CommitKey("q", 4)), {"query": "q", "batch": 4}),
        ("rmq: delay level %d: 5%% of broker %s", (3, "broker-a"), {"delayLevel": 3, "broker": "broker-a"}),
        ("rmq: %s", ("x",), {}),
    ],
)
def test_JsonFormatter_names_arguments(
    lines: io.StringIO, text: str, args: tuple[object, ...], fields: dict[str, object]
) -> None:
    LOGGER.info(text, *args)
    (found,) = objects(lines)
    usual = {"time", "level", "logger", "module", "message"}
    assert {name: value for name, value in found.items() if name not in usual} == fields
    assert found["message"] == text % args


def test_JsonFormatter_has_fields_of_extra_and_errors(lines: io.StringIO) -> None:
    try:
        raise ValueError("planted")
    except ValueError:
        LOGGER.warning("rmq: x", exc_info=True, extra={"group": "billing", "path": Path("a")})
    (found,) = objects(lines)
    assert (found["group"], found["path"]) == ("billing", "a")
    assert found["error"].endswith("ValueError: planted")


def test_JsonFormatter_renames_fields_of_extra_whose_names_are_taken(lines: io.StringIO) -> None:
    LOGGER.info("rmq: x", extra={"time": 1, "time_": 2, "level": 3, "error": "none"})
    (found,) = objects(lines)
    assert found["time"].endswith("Z")
    assert (found["time_"], found["time__"], found["level"], found["level_"]) == (2, 1, "INFO", 3)
    assert found["error"] == "none"


def test_JsonFormatter_has_the_stack(lines: io.StringIO) -> None:
    LOGGER.info("rmq: x", stack_info=True)
    (found,) = objects(lines)
    assert found["stack"].startswith("Stack (most recent call last):\n")
    assert __file__ in found["stack"]


def test_JsonFormatter_loses_no_line(lines: io.StringIO) -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    LOGGER.info(Path("group %s"), "billing")  # type: ignore[arg-type]
    LOGGER.info("rmq: x", extra={"rate": float("nan"), "cycle": cycle, "rates": [float("inf")], "path": Path("a")})
    first, second = (json.loads(line) for line in lines.getvalue().split("\n")[:-1])
    # Not by the logger: pytest captures its lines, and cannot report half a surrogate pair.
    record = logging.makeLogRecord({"msg": "rmq: topic %s", "args": ("\ud800\x9b\u2028",)})
    line = JsonFormatter().format(record)
    line.encode()
    assert (first["message"], first["group"]) == ("group billing", "billing")
    assert (second["rate"], second["cycle"], second["rates"], second["path"]) == (
        None,
        "[[[[[[[...]]]]]]]",
        "[inf]",
        "a",
    )
    assert json.loads(line)["topic"] == "\ud800\x9b\u2028"
    assert "\x9b" not in line


def test_log_info_has_fields(lines: io.StringIO) -> None:
    log_info("rmq: line", group="billing", lagMessages=3)
    (found,) = objects(lines)
    assert (found["message"], found["group"], found["lagMessages"]) == ("rmq: line", "billing", 3)


def test_json_logging_replaces_its_handler_and_has_a_level(lines: io.StringIO) -> None:
    second = io.StringIO()
    rmq_spark.json_logging("WARNING", second)
    LOGGER.info("rmq: quiet")
    LOGGER.warning("rmq: loud")
    assert lines.getvalue() == ""
    assert [one["message"] for one in objects(second)] == ["rmq: loud"]
    with pytest.raises(rmq_spark.OptionError, match='level is "loud"; expected one of debug, info'):
        rmq_spark.json_logging("loud")


def test_configure_from_environment(capsys: pytest.CaptureFixture[str]) -> None:
    configure_from_environment({"RMQ_LOG_LEVEL": "WARNING", "RMQ_LOG_FORMAT": "json"})
    LOGGER.info("rmq: quiet")
    LOGGER.warning("rmq: loud")
    assert json.loads(capsys.readouterr().err)["message"] == "rmq: loud"


def test_configure_from_environment_leaves_handlers_of_the_program(lines: io.StringIO) -> None:
    configure_from_environment({"RMQ_LOG_LEVEL": "error"})
    LOGGER.info("rmq: x")
    assert len(objects(lines)) == 1


def test_configure_from_environment_does_nothing_without_variables() -> None:
    before = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    configure_from_environment({})
    assert (LOGGER.handlers, LOGGER.level, LOGGER.propagate) == before


def test_configure_from_environment_logs_a_wrong_value(capsys: pytest.CaptureFixture[str]) -> None:
    configure_from_environment({"RMQ_LOG_FORMAT": "xml"})
    LOGGER.info("rmq: line")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith('WARNING rmq: RMQ_LOG_FORMAT is "xml"; expected one of text, json. Give one of them.')
    assert second.endswith("INFO rmq: line")


def test_configure_from_environment_ignores_case(capsys: pytest.CaptureFixture[str]) -> None:
    configure_from_environment({"RMQ_LOG_LEVEL": "Loud", "RMQ_LOG_FORMAT": "JSON"})
    LOGGER.info("rmq: line")
    first, second = (json.loads(line)["message"] for line in capsys.readouterr().err.splitlines())
    assert first == 'rmq: RMQ_LOG_LEVEL is "Loud"; expected one of debug, info, warning, error. Give one of them.'
    assert second == "rmq: line"


_QUERY = """
import sys, rmq_spark

spark = rmq_spark.session(master="local[1]", conf={"spark.ui.enabled": "false"})
found = spark.read.format("rmq").option("subscribe", "orders").load(sys.argv[1]).where("keys = 'k1'")
print(found.count())
"""


@pytest.mark.slow
def test_the_environment_sets_up_the_processes_that_Spark_starts(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store")
    store.send("orders", "x", "y", keys="k1")
    environment = {**os.environ, "RMQ_LOG_LEVEL": "info", "RMQ_LOG_FORMAT": "json"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", _QUERY, store.path], env=environment, capture_output=True, text=True
    )
    assert run.stdout.splitlines()[-1] == "2", run.stderr
    found = [json.loads(line) for line in run.stderr.splitlines() if line.startswith("{")]
    assert any("pushed down" in one["message"] for one in found), run.stderr
