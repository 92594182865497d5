"""The command as a whole: help, exit statuses, and imported modules."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import rmq_spark
from rmq_spark import command as package
from rmq_spark.command.all_commands import COMMANDS, OTHER_NAMES, make_group
from rmq_spark.command.output import typed

Rmq = Callable[..., Any]
FOLDER = Path(rmq_spark.__file__).parent / "command"


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command by its words, those of groups too."""
    group = make_group()
    for name in COMMANDS:
        found = group.get_command(click.Context(group), name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from ((f"{name} {inner}", one) for inner, one in found.commands.items())
        else:
            yield name, found


every_command = pytest.mark.parametrize(
    ("words", "command"), list(commands()), ids=lambda one: one if isinstance(one, str) else ""
)


def test_the_help_has_a_line_for_each_command(rmq: Rmq) -> None:
    ran = rmq("--help")
    lines = ran.out.rstrip("\n").split("\n")
    assert ran.status == 0
    assert max(map(len, lines)) <= 60
    sections = [one.section for one in COMMANDS.values() if one.section]
    assert [line.rstrip(":") for line in lines if line.endswith(":")] == sections
    assert [line.split()[0] for line in lines[2:] if line.startswith("  ")] == list(COMMANDS)


def test_every_command_that_is_promised_is_there() -> None:
    promised = "topics queues count groups lag cat get send create reset dlq export import check repair close dump"
    promised += " serve demo completion doctor prepare-sink intents members brokers route stats delete watch browse"
    assert " ".join(sorted(COMMANDS)) == " ".join(sorted(promised.split()))
    assert all(FOLDER.joinpath(f"{one.module}.py").exists() for one in COMMANDS.values())


@every_command
def test_every_command_explains_itself_with_an_example_that_parses(words: str, command: click.Command) -> None:
    assert command.help
    assert all(one.help for one in command.params if isinstance(one, click.Option)), words
    examples = re.findall(rf"^  (.*\brmq {words}\b.*)$", command.epilog or "", re.MULTILINE)
    assert examples, f"rmq {words}: no example"
    for example in examples:
        parts = split(example.split(f"rmq {words} ")[1]) if f"rmq {words} " in example else []
        command.make_context(words, parts, resilient_parsing=words in ("dump", "import"))  # they check files


def split(line: str) -> list[str]:
    """Return the words of one command of a pipe."""
    words = shlex.split(line)
    return words[: words.index("|")] if "|" in words else words


@every_command
def test_every_command_has_json_and_its_path_first(words: str, command: click.Command) -> None:
    assert any("--json" in option.opts for option in command.params) or words in ("browse", "completion")
    arguments = [one.name for one in command.params if isinstance(one, click.Argument)]
    of_clusters = {"intents finish": ["query_id"], "intents skip": ["query_id"]}
    of_clusters |= {words: [] for words in ("demo", "doctor", "prepare-sink", "intents list", "brokers")}
    of_clusters |= {"completion": ["shell"], "route": ["topic"], "stats": ["topics"], "delete": ["topics"]}
    assert arguments[:1] == of_clusters.get(words, ["path"])


def test_the_list_of_commands_says_what_each_says_first(rmq: Rmq) -> None:
    for name in COMMANDS:
        ran = rmq(name, "--help")
        assert ran.status == 0, name
        assert f"Usage: rmq {name}" in ran.out


def test_the_version_is_the_packages(rmq: Rmq) -> None:
    assert rmq("--version").out == f"rmq-spark {rmq_spark.__version__}\n"


def test_a_wrong_command_is_answered_with_what_was_meant(rmq: Rmq) -> None:
    ran = rmq("topcs", "store")
    assert ran.status == 2
    assert "unknown command 'topcs'. Did you mean topics?" in ran.err
    assert "`rmq --help` lists them" in rmq("xyz").err


@pytest.mark.parametrize(
    ("word", "meant"),
    [("ls", "topics"), ("list", "topics"), ("topicList", "topics"), ("clusterList", "brokers"), ("queryCq", "dump")],
)
def test_a_name_of_another_program_is_answered_with_the_command(rmq: Rmq, word: str, meant: str) -> None:
    ran = rmq(word, "store")
    assert ran.status == 2
    assert f"unknown command {word!r}. Did you mean {meant}?" in ran.err


def test_each_name_of_mqadmin_in_the_documentation_is_known() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ROCKETMQ.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| `rmq ([\w-]+)[^|]*\|", page.partition("## mqadmin and rmq")[2], re.MULTILINE)
    named = {name.lower(): command for names, command in rows for name in re.findall("`([A-Za-z]+)`", names)}
    assert len(named) > 20
    assert {name: OTHER_NAMES.get(name) for name in named} == named


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("topics",), 2, "Missing argument 'PATH'"),
        (("topics", "none", "--jsn"), 2, "--json"),
        (("topics", "none"), 1, "rmq topics: "),
        (("lag", "{demo}", "nobody"), 1, "nobody"),
        (("get", "{demo}", "--key", "none"), 3, "No message found"),
        (("cat", "{demo}", "ordrs"), 1, "Did you mean orders?"),
        (("dump", "none"), 2, "does not exist"),
    ],
)
def test_the_exit_status_says_whether_it_is_an_error_wrong_words_or_a_no(
    rmq: Rmq, demo: Path, words: tuple[str, ...], status: int, text: str
) -> None:
    ran = rmq(*(word.format(demo=demo) for word in words))
    assert (ran.status, ran.out) == (status, "")
    assert text in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("words", [("cat", "{}", "orders"), ("topics", "{}")])
def test_damage_is_answered_with_words_of_the_command(rmq: Rmq, store: Path, words: tuple[str, ...]) -> None:
    os.truncate(store / "commitlog" / "00000000000000000000", 5_000)
    ran = rmq(*(word.format(store) for word in words))
    assert ran.status == 1
    assert "Find all damage with `rmq check`, read around it with `rmq cat --offset` or --from, or restore" in ran.err
    assert "startingOffsets" not in ran.err


def test_without_its_packages_it_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing, text in (("click", "the package click is"), ("click rich", "the packages click and rich are")):
        monkeypatch.setattr(package, "find_spec", lambda name, missing=missing: None if name in missing else 1)
        with pytest.raises(SystemExit) as end:
            package.main()
        assert end.value.code == 2
        assert f'rmq: {text} not installed; expected rmq-spark\'s extra "cli"' in capsys.readouterr().err


def test_an_error_says_what_is_to_be_typed(rmq: Rmq, store: Path, tmp_path: Path) -> None:
    assert rmq("topics", tmp_path / "none").err.endswith("Give the folder that a broker calls storePathRootDir.\n")
    assert typed("Give the user who runs Spark that right") == "Give the user who runs rmq that right"
    assert "Name the topics to reset with --topic." in rmq("reset", store, "nobody", "earliest").err
    ran = rmq("import", store, tmp_path)
    assert ran.status == 2
    (tmp_path / "text").write_text("no parquet, but twelve bytes and more")
    ran = rmq("import", store, tmp_path / "text")
    assert ran.status == 1
    assert ".." not in ran.err.replace(str(tmp_path), "")


def test_what_the_system_refuses_is_a_sentence(rmq: Rmq, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", "store/commitlog")

    monkeypatch.setattr(rmq_spark, "open_reader", refuse)
    ran = rmq("topics", demo)
    assert (ran.status, ran.err) == (1, "rmq topics: store/commitlog: Permission denied\n")


def test_ctrl_c_is_answered_with_130(rmq: Rmq, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rmq_spark, "check", interrupt)
    monkeypatch.setattr(rmq_spark, "close", interrupt)
    ran = rmq("check", demo)
    assert (ran.status, ran.out, ran.err) == (130, "", "")
    ran = rmq("close", demo)
    assert (ran.status, ran.err) == (130, "rmq close: stopped. Nothing was left half-done.\n")


@pytest.mark.parametrize(
    "words", [("cat", "orders"), ("cat", "orders", "--json"), ("cat", "orders", "--format", "arrow")]
)
def test_who_reads_no_more_ends_it_quietly(
    process: Callable[..., "subprocess.Popen[bytes]"], demo: Path, words: tuple[str, ...]
) -> None:
    started = process(words[0], demo, *words[1:])
    assert started.stdout is not None
    assert started.stderr is not None
    assert started.stdout.read(10)
    started.stdout.close()
    assert started.stderr.read() == b""
    assert started.wait(60) == 0
    started.stdout = None


@pytest.mark.parametrize("closed", [">&-", "<&-", ">&- <&-"])
def test_without_a_standard_stream_it_works_all_the_same(demo: Path, tmp_path: Path, closed: str) -> None:
    words = [sys.executable, "-P", "-m", "rmq_spark.command", "export", str(demo), str(tmp_path / "m.parquet")]
    ran = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "1,493 messages" in ran.stderr
    ran = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *words[:4], "topics", str(demo)], capture_output=True
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_json_is_utf_8_whatever_the_terminal_speaks(store: Path, tmp_path: Path) -> None:
    path = store.rename(tmp_path / "caf\u00e9")
    words = [sys.executable, "-P", "-m", "rmq_spark.command", "close", str(path), "--json"]
    ran = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.decode("utf-8")) == [{"path": str(path), "state": "closed"}]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_command_uses_only_what_the_package_shows(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rmq_spark"):
            if node.module == "rmq_spark":
                assert {alias.name for alias in node.names} <= {*rmq_spark.__all__, "__version__"}
            else:
                # The words are for every layer. Metrics and log lines have options here, and JSON is one text.
                allowed = {"rmq_spark.store.model", "rmq_spark.store.names", "rmq_spark.store"}
                allowed |= {"rmq_spark.metrics", "rmq_spark.new_lines"}
                allowed |= {f"rmq_spark.datasource.spark.{name}" for name in ("log_lines", "json_text")}
                is_allowed = node.module.startswith("rmq_spark.command") or node.module in allowed
                assert is_allowed, f"{path.name}: {node.module}"
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("rmq_spark.") for alias in node.names), path.name
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rmq_spark":
            assert node.attr in rmq_spark.__all__, f"{path.name}: rmq_spark.{node.attr}"


# Modules that read-only commands must not import: the most expensive ones, and those for writers.
WRITERS = (
    "rmq_spark.store.format.message_encoder",
    "rmq_spark.store.log.write_session",
    "rmq_spark.store.log.retention",
)
NO_USE = ("pyspark", "rich", "pyarrow.parquet", "matplotlib", "pandas", *WRITERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "without", "most"),
    [
        (("--help",), (*NO_USE, "numpy", "pyarrow", "rmq_spark.store.log"), 12),
        (("cat", "--help"), (*NO_USE, "rmq_spark.store.log"), 24),
        (("topics", "{demo}"), (*NO_USE, "rmq_spark.store.transaction"), 92),
        (("queues", "{demo}", "orders"), (*NO_USE, "rmq_spark.store.transaction"), 92),
        (("groups", "{demo}"), NO_USE, 107),
        (("lag", "{demo}", "billing"), NO_USE, 107),
        (("cat", "{demo}", "orders", "-n", "1"), (*NO_USE, "rmq_spark.store.transaction"), 95),
        (("get", "{demo}", "--key", "O-1010"), (*NO_USE, "rmq_spark.store.transaction"), 95),
        (("dump", "{demo}/checkpoint"), NO_USE, 75),
        (("dlq", "list", "{demo}"), (*NO_USE, "rmq_spark.store.transaction"), 92),
        (("check", "{demo}"), NO_USE, 130),
        (("demo", "--json"), ("pyspark", "rich", "pyarrow.parquet"), 200),
    ],
)
def test_a_command_loads_nothing_that_it_has_no_use_for(
    demo: Path, tmp_path: Path, words: tuple[str, ...], without: tuple[str, ...], most: int
) -> None:
    """The start-up time depends on the imports: a limited number of our modules, and only necessary external ones."""
    code = (
        "import json, sys\nfrom rmq_spark.command import main\nsys.argv[0] = 'rmq'\ntry:\n    main()\nfinally:\n"
        "    print(json.dumps([name for name, loaded in sys.modules.items() if loaded]), file=sys.stderr)"
    )
    command = [sys.executable, "-P", "-c", code, *(word.format(demo=demo) for word in words)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    loaded = json.loads(ran.stderr.splitlines()[-1])
    assert [name for name in without if name in loaded] == []
    others = {name.partition(".")[0] for name in loaded} - {*sys.stdlib_module_names, "__main__", "rmq_spark"}
    others = {name for name in others if not name.startswith(("_", "cython_runtime"))}  # of the environment, or in C
    assert others <= {"click", "numpy", "pyarrow"}
    ours = [name for name in loaded if name.startswith("rmq_spark")]
    assert len(ours) <= most, f"{len(ours)} modules of ours"


@pytest.mark.parametrize("name", ["name=prod", "export_parquet", "my name=x", "rmq_spark.close"])
def test_an_error_leaves_the_users_paths_as_they_are(rmq: Rmq, tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "store"
    assert str(path) in rmq("topics", path).err
    assert typed("/x/name=prod/export_parquet: see rmq_spark.close") == "/x/name=prod/export_parquet: see `rmq close`"
