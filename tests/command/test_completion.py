"""Completion in shells: what click's protocol answers in a process of its own."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import get_completion_class

import rmq_spark
from rmq_spark.command.all_commands import COMMANDS, make_group
from rmq_spark.command.default_place import COMPLETION_VARIABLE
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

MAIN = "import sys; sys.argv = ['rmq']; from rmq_spark.command import main; main()"


def complete(words: str, **variables: str) -> list[str]:
    """Return the proposals, as "kind,word", for a line whose last word is incomplete."""
    env = {**os.environ, COMPLETION_VARIABLE: "bash_complete", "COMP_WORDS": words, **variables}
    ran = subprocess.run([sys.executable, "-P", "-c", MAIN], env=env, capture_output=True, text=True)
    assert ran.stderr == ""
    return [line for line in ran.stdout.splitlines() if line]


@pytest.mark.slow
def test_completion_proposes_names_of_the_store(demo: Path) -> None:
    assert complete("rmq que") == ["plain,queues"]
    assert "plain,--follow" in complete("rmq cat --fol")
    assert complete("rmq check ") == ["dir,"]
    assert complete(f"rmq cat {demo} or") == ["plain,orders"]
    assert complete(f"rmq lag {demo} bil") == ["plain,billing"]
    assert complete(f"rmq cat {demo} %D") == ["plain,%DLQ%audit"]
    assert "plain,%DLQ%audit" not in complete(f"rmq cat {demo} ")


@pytest.mark.slow
def test_completion_uses_the_default_place_and_is_silent(demo: Path, tmp_path: Path) -> None:
    assert complete("rmq cat or", RMQ_STORE=str(demo)) == ["plain,orders"]
    assert complete(f"rmq cat {tmp_path}/absent or") == []
    assert complete("rmq cat -n 127.0.0.1:1 or") == []


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_prints_the_script_of_a_shell(rmq: Callable[..., Any], shell: str) -> None:
    ran = rmq("completion", shell)
    assert ran.status == 0
    assert f"_RMQ_COMPLETE={shell}_complete" in ran.out


def test_in_zsh_what_is_before_the_value_of_an_option_stays(rmq: Callable[..., Any]) -> None:
    script = rmq("completion", "zsh").out
    assert script.count('compset -P 1 "*="') == 1
    assert script.count('-U -i "$IPREFIX"') == script.count(" -U ") == 2


def proposed(*words: str) -> list[str]:
    """Return the proposals for the last word, in this process."""
    kind = get_completion_class("bash")
    assert kind is not None
    found = kind(make_group(), {}, "rmq", COMPLETION_VARIABLE).get_completions(list(words[:-1]), words[-1])
    return [one.value if one.type == "plain" else one.type for one in found]


def commands_with(parameter: str) -> Iterator[tuple[list[str], dict[str, click.Parameter]]]:
    """Yield the words and the parameters of all commands with a parameter."""
    group = make_group()
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        inner = command.commands.items() if isinstance(command, click.Group) else [("", command)]
        for word, one in inner:
            params = {str(param.name): param for param in one.params}  # type: ignore[union-attr]
            if parameter in params:
                yield [name, *([word] if word else [])], params


def assert_names_are_proposed(start: list[str], params: Mapping[str, click.Parameter]) -> None:
    """Check that the topics and groups of a place are proposed after the words `start`."""
    names = {"topic": "orders", "topics": "orders", "sinks": "orders", "group": "billing", "groups": "billing"}
    for parameter, expected in names.items():
        if isinstance(option := params.get(parameter), click.Option):
            assert expected in proposed(*start, option.opts[0], ""), start
            assert proposed(*start, f"{option.opts[0]}={expected[:3]}") == [expected], start
    positional = [one.name for one in params.values() if isinstance(one, click.Argument) and one.name != "path"]
    if positional[:1] in (["topic"], ["topics"], ["group"]):
        assert ("billing" if positional[0] == "group" else "orders") in proposed(*start, ""), start


@pytest.mark.parametrize(("words", "params"), list(commands_with("path")))
def test_every_topic_and_group_of_a_store_is_completed(
    demo: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], params: Mapping[str, click.Parameter]
) -> None:
    assert_names_are_proposed([*words, str(demo)], params)
    monkeypatch.setenv("RMQ_STORE", str(demo))
    assert_names_are_proposed(words, params)
    monkeypatch.setenv("RMQ_STORE", "/absent")
    assert_names_are_proposed([*words, str(demo)], params)


@pytest.mark.slow
def test_every_topic_and_group_of_a_cluster_is_completed(
    run_cluster: Callable[..., RunningCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = run_cluster(release="5.3", brokers=1)
    cluster.create_topic("orders", queues=1)
    cluster.broker.offsets.commit("billing", QueueKey("orders", 0), 0)
    for words, params in commands_with("name_server"):
        assert_names_are_proposed([*words, "-n", cluster.address], params)
    monkeypatch.setenv("RMQ_NAME_SERVER", cluster.address)
    for words, params in commands_with("name_server"):
        assert_names_are_proposed(words, params)


def test_a_word_with_a_slash_is_a_folder(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RMQ_NAME_SERVER", raising=False)
    monkeypatch.setenv("RMQ_STORE", str(demo))
    assert proposed("cat", "or") == ["orders"]
    assert proposed("cat", "./st") == ["dir"]
    assert proposed("cat", "/da") == ["dir"]


def test_only_names_that_are_one_word_of_a_shell_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["orders", "or$(touch x)", "or ders", "or;ls", "or|ls", "or*", "%RETRY%a_b-C9"]
    monkeypatch.setattr(rmq_spark, "groups", lambda **place: names)
    assert proposed("lag", "store", "") == ["orders", "%RETRY%a_b-C9"]


@pytest.mark.slow
def test_bash_completes_after_a_name_server_with_a_port(
    run_cluster: Callable[..., RunningCluster], tmp_path: Path
) -> None:
    cluster = run_cluster(release="5.3", brokers=1)
    cluster.create_topic("orders-of-the-day", queues=1)
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "rmq"
    program.write_text(f"#!{sys.executable} -P\n{MAIN.replace('sys.argv = ', 'sys.argv[0:1] = ')}\n")
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PS1": "ready$ ", "TERM": "dumb"}
    ours, theirs = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    shown = ""

    def wait_for(text: str) -> None:
        nonlocal shown
        until = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < until, shown
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 65_536).decode(errors="replace")

    try:
        os.write(ours, b'eval "$(rmq completion bash)"; echo is-$((1 + 1))-ready\n')
        wait_for("is-2-ready")
        for start in (f"-n {cluster.address}", f"--name-server={cluster.address}"):
            shown = ""
            os.write(ours, f"echo; rmq count {start} ord\t".encode())
            wait_for("orders-of-the-day")
            os.write(ours, b"\x15")  # empty the line
    finally:
        bash.kill()
        bash.wait()
        os.close(ours)
