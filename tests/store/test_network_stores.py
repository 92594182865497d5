"""A store on a network file system: every call that writes refuses it, and takes `allow_network_store`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import rmq_spark
from rmq_spark.store.errors import StorePathError

Write = Callable[[Path, bool], object]


def _import(path: Path, allowed: bool) -> object:
    file = path.parent / "f.parquet"
    parquet.write_table(pa.table({"topic": ["orders"], "body": ["x"]}), file)
    return rmq_spark.import_parquet(path, file, allow_network_store=allowed)


def _repair(path: Path, allowed: bool) -> object:
    (path / "consumequeue" / "orders" / "0" / "00000000000000000000").unlink()
    return rmq_spark.repair(path, allow_network_store=allowed)


def _dead_letter(path: Path) -> None:
    with rmq_spark.open_store(path) as store:
        store.send("orders", "bad", queue_id=0)
        with rmq_spark.open_reader(path) as reader:
            reader.refresh()
            columns = ["commitLogOffset", "queueId", "queueOffset", "reconsumeTimes", "physicalTopic"]
            (rows,) = reader.read(reader.queues("orders")[0], 1, 2, columns)
        store.send_back(rows, "billing", -1)


WRITES: dict[str, Write] = {
    "close": lambda path, allowed: rmq_spark.close(path, allow_network_store=allowed),
    "create_store": lambda path, allowed: rmq_spark.create_store(path, topics=["t"], allow_network_store=allowed),
    "import_parquet": _import,
    "republish_dead_letters": lambda path, allowed: rmq_spark.republish_dead_letters(
        path, "billing", allow_network_store=allowed
    ),
    "repair": _repair,
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a message and a dead letter, which is said to be on a network file system."""
    with rmq_spark.open_store(tmp_path / "s", segment_bytes=1 << 20) as store:
        store.send("orders", "first", queue_id=0)
    _dead_letter(tmp_path / "s")
    monkeypatch.setattr("rmq_spark.store.log.store_lock.is_remote", lambda path: True)
    return tmp_path / "s"


@pytest.mark.parametrize("name", WRITES)
def test_allow_network_store_is_taken_by_every_call_that_writes(path: Path, name: str) -> None:
    with pytest.raises(StorePathError, match="allowNetworkStore=true"):
        WRITES[name](path, False)
    if name == "repair":
        (path / "consumequeue" / "orders" / "0" / "00000000000000000000").touch()
    WRITES[name](path, True)
    assert rmq_spark.check(path).is_healthy


@pytest.mark.parametrize(
    "words",
    [("send", "{}", "orders", "x"), ("create", "{}", "more"), ("close", "{}"), ("dlq", "republish", "{}", "billing")],
    ids=lambda words: words[0],
)
def test_commands_that_append_have_the_option_that_their_error_names(
    path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from rmq_spark.command.all_commands import run

    typed: list[Any] = [word.format(path) for word in words]
    assert run(typed) == 1
    assert "give --allow-network-store" in capsys.readouterr().err
    assert run([*typed, "--allow-network-store"]) == 0
