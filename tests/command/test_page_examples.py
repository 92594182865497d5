"""Examples of the command on pages other than docs/COMMAND.md: accepted, with the output that the page shows."""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from rmq_spark.command.all_commands import COMMANDS, make_group

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("GUIDE", "ROCKETMQ", "OPERATIONS", "ERRORS"))]
# Values for words in capitals, in commands that are only shown.
MEANT = {
    "PATH": "store",
    "TOPIC": "orders",
    "GROUP": "billing",
    "FILE": "store/checkpoint",
    "ID": "7F00",
    "KEY": "k",
    "BODY": "b",
}
MEANT |= {"N": "3", "TIME": "now-1h", "WHERE": "earliest", "OFFSETS": '{"orders": {"0": 1}}'}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def examples(page: Path) -> Iterator[tuple[str, str]]:
    """Return the commands in a page's `console` blocks, with their output."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```console" in page.read_text()], ids=lambda path: path.name
)
def test_the_examples_of_a_page_print_what_it_says(
    page: Path, rmq: Callable[..., Any], golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(golden / "demo", tmp_path / "store")
    (tmp_path / "tests" / "golden").mkdir(parents=True)
    (tmp_path / "tests" / "golden" / "demo").symlink_to(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    for line, expected in examples(page):
        ran = rmq(*shlex.split(line)[1:])
        pattern = re.escape(expected.rstrip("\n")).replace("…", ".*")
        assert re.fullmatch(pattern, (ran.out + ran.err).rstrip("\n")), f"{page.name}: {line}\n{ran.out}{ran.err}"


def named(page: Path) -> set[str]:
    """Return the commands that a page names, with their words."""
    text = page.read_text()
    shown = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return {
        *re.findall(r"`(rmq (?!does not)[a-z]+ [^`…]+)`", text),
        *(line.split("#")[0].strip() for line in re.findall(r"^rmq .*", shown, re.MULTILINE)),
    }


@each_page
def test_a_command_that_a_page_names_is_accepted(page: Path, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(demo.parent)
    group = make_group()
    for line in named(page):
        _, name, *words = (MEANT.get(word, word) for word in shlex.split(re.sub(r" [>|] .*", "", line)))
        found = group.get_command(click.Context(group), name) if name in COMMANDS else None
        assert found is not None, f"{page.name}: {line}"
        if isinstance(found, click.Group):
            found = found.commands[words.pop(0)]
        try:
            found.make_context(name, words)
        except click.UsageError as error:
            pytest.fail(f"{page.name}: {line}: {error.format_message()}")


@each_page
def test_a_word_of_the_command_alone_is_one_of_its_list(page: Path) -> None:
    for name in re.findall(r"`rmq (?!does not)([a-z]+)[ `]", page.read_text()):
        assert name in COMMANDS, f"{page.name} names rmq {name}"
