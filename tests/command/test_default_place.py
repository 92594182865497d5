"""RMQ_STORE and RMQ_NAME_SERVER: the place of commands whose words name none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.command.all_commands import make_group

Rmq = Callable[..., Any]


@pytest.fixture
def of_demo(demo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store, named by RMQ_STORE."""
    monkeypatch.delenv("RMQ_NAME_SERVER", raising=False)
    monkeypatch.setenv("RMQ_STORE", str(demo))
    return demo


@pytest.mark.parametrize(
    "words",
    [
        ("topics",),
        ("queues", "orders", "payments"),
        ("count", "orders"),
        ("groups",),
        ("lag", "billing"),
        ("lag",),
        ("cat", "orders", "--last", 2),
        ("get", "--key", "O-1010"),
        ("dlq", "list"),
        ("dlq", "list", "audit"),
        ("check",),
        ("repair", "--dry-run"),
    ],
)
def test_a_command_without_a_place_uses_the_variable(rmq: Rmq, of_demo: Path, words: tuple[Any, ...]) -> None:
    ran = rmq(*words)
    at = 2 if words[0] == "dlq" else 1
    explicit = rmq(*words[:at], of_demo, *words[at:])
    assert ran.status == explicit.status == 0, ran.err
    if words[0] not in ("lag", "groups"):  # with the seconds of this moment
        assert ran.out == explicit.out


def test_commands_that_write_use_the_variable(
    rmq: Rmq, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMQ_STORE", str(store))
    assert rmq("send", "orders", "hello").status == 0
    assert rmq("send", "orders", stdin="from a pipe").status == 0
    assert [row["body"] for row in rmq("cat", "orders", "--last", 2, "--json").rows] == ["hello", "from a pipe"]
    assert rmq("reset", "billing", "earliest").status == 0
    assert rmq("export", tmp_path / "m.parquet", "--topic", "orders").status == 0
    assert rmq("import", tmp_path / "m.parquet", "--topic", "again").status == 0
    assert rmq("count", "again", "--json").rows[0]["messages"] == 1172
    assert rmq("create", "fresh").status == 0
    assert rmq("create", tmp_path / "other", "fresh").err == f"The store at {tmp_path}/other is new.\n"
    assert rmq("close").status == 0


def test_a_path_has_priority(rmq: Rmq, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMQ_STORE", str(tmp_path / "absent"))
    assert rmq("count", demo, "orders").status == 0
    monkeypatch.chdir(demo.parent)
    assert rmq("count", demo.name, "orders").status == 0, "the folder of a store is PATH"
    assert rmq("lag", demo.name, "billing").status == 0
    assert rmq("check", demo.name).status == 0
    ran = rmq("count", "orders")
    assert (ran.status, str(tmp_path / "absent") in ran.err) == (1, True)


def test_two_variables_need_a_decision_where_both_fit(rmq: Rmq, of_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMQ_NAME_SERVER", "127.0.0.1:1")
    ran = rmq("topics")
    assert ran.status == 2
    assert f"two places: found RMQ_STORE={of_demo} and RMQ_NAME_SERVER=127.0.0.1:1 in the environment" in ran.err
    assert rmq("topics", of_demo).status == 0
    assert "127.0.0.1:1" in rmq("topics", "-n", "127.0.0.1:1").err
    assert rmq("topics", "-n", "127.0.0.1:1").status == 1
    assert rmq("check").status == 0, "it only works on files"
    assert "127.0.0.1:1" in rmq("doctor").out, "it only works on clusters"


@pytest.mark.parametrize("words", [("topics",), ("cat", "orders"), ("lag", "g"), ("intents",), ("intents", "list")])
def test_a_name_server_may_be_a_variable(rmq: Rmq, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.delenv("RMQ_STORE", raising=False)
    monkeypatch.setenv("RMQ_NAME_SERVER", "127.0.0.1:1")
    ran = rmq(*words)
    assert ran.status == 1
    assert "127.0.0.1:1" in ran.err


@pytest.mark.parametrize("command", ["topics", "queues", "count", "lag", "export", "check", "close", "doctor"])
def test_an_error_about_a_missing_place_names_the_variables(
    rmq: Rmq, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delenv("RMQ_STORE", raising=False)
    monkeypatch.delenv("RMQ_NAME_SERVER", raising=False)
    ran = rmq(command)
    assert ran.status == 2
    params = {one.name for one in (make_group().get_command(None, command)).params}  # type: ignore[arg-type,union-attr]
    for parameter, variable in (("path", "RMQ_STORE"), ("name_server", "RMQ_NAME_SERVER")):
        assert (variable in ran.err) is (parameter in params), ran.err


def test_commands_that_write_name_the_place_of_the_environment(rmq: Rmq, store: Path, demo: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RMQ_STORE", str(store))
        for words in (("send", "orders", "x"), ("create", "fresh"), ("reset", "billing", "latest"), ("close",)):
            assert f"RMQ_STORE={store} is the store.\n" in rmq(*words).err
            assert "RMQ_STORE" not in rmq(words[0], store, *words[1:]).err
        assert rmq("topics").err == ""
        patch.delenv("RMQ_STORE")
        patch.setenv("RMQ_NAME_SERVER", "127.0.0.1:1")
        for words in (("send", "orders", "x"), ("create", "fresh"), ("delete", "orders", "--yes")):
            assert "RMQ_NAME_SERVER=127.0.0.1:1 is the cluster.\n" in rmq(*words).err
        assert "is the cluster" not in rmq("route", "orders").err
        assert "is the cluster" not in rmq("delete", "-n", "127.0.0.1:1", "orders", "--yes").err


@pytest.mark.parametrize("variable", ["RMQ_STORE", "RMQ_NAME_SERVER"])
def test_create_with_several_words_needs_a_place(
    rmq: Rmq, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("RMQ_STORE", raising=False)
    monkeypatch.delenv("RMQ_NAME_SERVER", raising=False)
    monkeypatch.setenv(variable, place := str(store) if variable == "RMQ_STORE" else "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    before = rmq("topics", store, "--all", "--json").out
    ran = rmq("create", "new", "orders-2")
    assert (ran.status, ran.out) == (2, "")
    assert f"'new' may be a new store or a topic: found 2 words and {variable}={place} in the environment" in ran.err
    assert "Give ./new for a new store" in ran.err
    assert rmq("topics", store, "--all", "--json").out == before
    assert rmq("create", "./new", "orders-2").err == "The store at ./new is new.\n"
    assert rmq("create", "new", "orders-3").err == "The store at new exists already.\n", "it is the folder of a store"
