"""docs/COMMAND.md agrees with the command: every option, every example with its output."""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from rmq_spark.command.all_commands import COMMANDS, make_group
from rmq_spark.command.cluster_options import ClusterOption

PAGE = Path(__file__).resolve().parents[2] / "docs" / "COMMAND.md"
# Commands that also read a cluster, and have all of its options.
READ = {
    "browse",
    "watch",
    "topics",
    "queues",
    "count",
    "cat",
    "get",
    "export",
    "groups",
    "lag",
    "reset",
    "dlq list",
    "dlq republish",
}
# Commands that pull no messages, so that they have no --pull-group.
PULL_NOTHING = {"send", "import", "create", "members", "brokers", "route", "stats", "delete"}
SECTIONS = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])


def commands() -> Iterator[tuple[str, click.Command]]:
    group = make_group()
    for name in COMMANDS:
        found = group.get_command(click.Context(group), name)
        assert found is not None
        inner = found.commands.items() if isinstance(found, click.Group) else [(None, found)]
        yield from ((" ".join(filter(None, (name, part))), one) for part, one in inner)


def test_the_page_has_every_command_in_the_order_of_the_help() -> None:
    assert [name for name in SECTIONS if name != "Everywhere"] == [name for name, _ in commands()]


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda one: one if isinstance(one, str) else "")
def test_the_page_has_every_argument_and_option_of_a_command(name: str, command: click.Command) -> None:
    section = SECTIONS[name]
    options = [one for one in command.params if isinstance(one, click.Option)]
    shows_once = name in READ | PULL_NOTHING
    of_clusters = [one for one in options if shows_once and isinstance(one, ClusterOption)]
    assert listed(section) == [row_of(one) for one in options if one not in of_clusters]
    left_out = {"--pull-group"} if name in PULL_NOTHING else set()
    if not any(one.name == "name_server" for one in of_clusters):  # required, so it is in the section
        left_out.add("-n, --name-server")
    everywhere = listed(SECTIONS["Everywhere"]) if shows_once else []
    assert [row_of(one) for one in of_clusters] == [row for row in everywhere if row[0] not in left_out]
    synopsis = re.search(r"^    rmq (.*)$", section, re.MULTILINE)
    assert synopsis is not None
    pieces = command.collect_usage_pieces(click.Context(command))
    assert synopsis[1] == " ".join([name, *(piece for piece in pieces if piece != "[OPTIONS]")])


def listed(section: str) -> list[tuple[str, str]]:
    """Return the rows of the tables of options."""
    return re.findall(r"^\| `(-.+?)` \| (.+) \|$", section, re.MULTILINE)


def row_of(option: click.Option) -> tuple[str, str]:
    """Return the row of an option."""
    return ", ".join(option.opts), (option.help or "").replace("|", "&#124;")


def test_the_examples_print_what_the_page_says(
    rmq: Callable[..., Any], golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(golden / "demo", tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```console\n\$ ([^\n]*)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 18
    for line, expected in blocks:
        stdin = "".join(f"{number}\n" for number in range(1, 1001)) if line.startswith("seq 1000 ") else ""
        typed = line.removeprefix("seq 1000 | ")
        typed, _, left_out = typed.partition(" | grep -v ")
        ran = rmq(*shlex.split(typed)[1:], stdin=stdin)
        printed = ran.out + ran.err
        if left_out:
            printed = "".join(one for one in printed.splitlines(keepends=True) if left_out not in one)
        pattern = re.escape(expected.rstrip("\n")).replace("…", ".*")
        assert re.fullmatch(pattern, printed.rstrip("\n")), f"{line}\n{printed}"
        assert ran.status == 0, line
