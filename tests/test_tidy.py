"""House rules that a reader would have to watch: sizes, names, who touches files, words."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rmq_spark", "store", "datasource")
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
# A name that says nothing: what is in there has a noun of its own.
EMPTY_NAMES = {"util", "utils", "manager", "helper", "helpers", "common", "misc", "base"}
TEXT = {".py", ".md", ".cfg", ".toml", ".ipynb", ".txt", ".yml", ".sh", ""}

MODULES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
MODULES.append(ROOT / "pyspark_rmq.py")


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_module = pytest.mark.parametrize("path", MODULES, ids=where)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@every_module
def test_a_module_and_its_functions_are_short(path: Path) -> None:
    source = path.read_text()
    count = len(source.splitlines())
    assert count <= MODULE_LINES_MAX, f"{count} lines: it is two nouns, make it two files"
    for function in functions(ast.parse(source)):
        count = (function.end_lineno or 0) - function.lineno + 1
        assert count <= FUNCTION_LINES_MAX, (
            f"{where(path)}:{function.lineno} {function.name} has {count} lines, more than "
            f"{FUNCTION_LINES_MAX}: name a part of it"
        )


@every_module
def test_a_file_is_named_by_a_noun_that_says_something(path: Path) -> None:
    words = {word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")}
    assert not words & EMPTY_NAMES, f"{where(path)}: what is in it?"


@every_module
def test_every_public_thing_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{where(path)}: what does it hold, and what does it leave to whom?"
    missing = [
        f"{where(path)}:{node.lineno} {node.name}" for node in public_definitions(tree) if not ast.get_docstring(node)
    ]
    assert not missing, f"no promise: {missing}"


def public_definitions(
    scope: ast.Module | ast.ClassDef,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield what it shows to others. A base class has the promise of what overrides it."""
    for node in scope.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef) and not node.bases:
                yield from public_definitions(node)


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each call: `open` for a plain name, `.unlink` for a method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.lineno, node.func.id
            elif isinstance(node.func, ast.Attribute):
                yield node.lineno, f".{node.func.attr}"


OPENS_FILES = {"open", ".read_bytes", ".read_text", ".write_bytes", ".write_text"}
DESTROYS_BYTES = {".ftruncate", ".unlink", ".rmtree", ".remove_file", ".rename"}
# Calls of the disk, or of what stands on it, by which bytes of a store go; and who may call them, to take what away.
TAKES_AWAY = {".remove", ".remove_folder", ".truncate"}
MAY_TAKE_AWAY = {
    "store/log/recovery": "what a writer that died left half-done, the note that vouches for it",
    "store/log/log_writer": "segments behind a torn tail",
    "store/log/queue_writer": "an empty file in the place of one to be made",
    "store/log/store_files": "`abort` of a store that is whole again",
    "store/log/retention": "segments, queue files and index files that expired",
    "store/log/key_index": "index files behind the watermark",
    "store/log/store_lock": "the name of the holder, which is its own",
    "store/commit/": "intents and staged files that the ledger has passed",
    "store/group/lease": "files of a member that leaves, which are its own",
    "store/group/membership": "files of members that are dead",
    "store/log/rebuilding": "files of queues and of the index that a repair makes anew, the note of it",
    "store/explore/repairing": "folders of queues whose topic was deleted",
    "store/explore/parquet_file": "its own file, half written, of an export that ended in an error",
    "store/delivery/timer_files": "files of the timer log whose messages expired, an empty one in another's place, "
    "log and wheel after a repair has put all that waited back into the queue",
}


def may_touch_files(path: Path) -> bool:
    return where(path).startswith(("store/disk", "store/testing"))


@every_module
def test_only_the_disk_opens_files(path: Path) -> None:
    if not may_touch_files(path):
        for line, name in calls(ast.parse(path.read_text())):
            assert name not in OPENS_FILES, f"{where(path)}:{line} {name}(): ask store/disk for it"


@every_module
def test_only_the_disk_destroys_bytes(path: Path) -> None:
    if not may_touch_files(path):
        for line, name in calls(ast.parse(path.read_text())):
            assert name not in DESTROYS_BYTES, f"{where(path)}:{line} {name}(): ask store/disk/changing.py for it"


@every_module
def test_only_who_is_named_here_takes_anything_away(path: Path) -> None:
    if not may_touch_files(path) and not where(path).startswith(tuple(MAY_TAKE_AWAY)):
        for line, name in calls(ast.parse(path.read_text())):
            assert name not in TAKES_AWAY, (
                f"{where(path)}:{line} {name}(): reading takes nothing away, and of those that write only "
                f"{', '.join(MAY_TAKE_AWAY)}. For a list or a set write del or discard"
            )


def texts() -> list[Path]:
    """Return every text file of the project: what git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:  # an unpacked archive
        folders = [*PACKAGES, "docs", "notebooks", "tests", "benchmarks", ".ci"]
        files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        files += list(ROOT.glob("*"))
    return [
        path
        for path in files
        if path.is_file()
        and not path.is_symlink()
        and path.suffix in TEXT
        and path.name != "LICENSE"
        # Bytes and outputs of a real RocketMQ.
        and not (where(path).startswith("tests/golden/") and path.suffix not in {".py", ".md"})
    ]


# Each with what to write instead. Put together from pieces, so that this file does not find itself.
FOREIGN_WORDS = {
    r"(?i)\b(issue|ticket|pull request|PR)s? ?(no\.? ?|number )?#?\d": "say what, not which number",
    r"(?<![\w&#/])#\d{1,5}\b(?![\w-])": "say what, not which number",
    r"(?<![\w.~/-])/(" + "|".join(["work", "tmp", "root", "home", "Users"]) + r")/\w": "a path of one machine",
}


def foreign_words(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, advice in FOREIGN_WORDS.items():
            for found in re.finditer(pattern, line):
                yield f"{number}: {found[0]!r}: {advice}"


def test_no_words_from_outside_the_project() -> None:
    breaches = [
        f"{where(path)}:{words}"
        for path in texts()
        if path != Path(__file__)
        for words in foreign_words(path.read_text(errors="replace"))
    ]
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize("line", ["see issue 3", "fixes #12", "in /tmp/x/y", "PR 7", "a (issue #4)"])
def test_the_search_finds_planted_words(line: str) -> None:
    assert list(foreign_words(line))


@pytest.mark.parametrize("line", ["CommitLog#append", "%RETRY%g/tmp", "# 12 bytes", "&#12;", "store/tmp/a"])
def test_the_search_leaves_other_words_alone(line: str) -> None:
    assert not list(foreign_words(line))


def test_every_text_ends_with_one_newline() -> None:
    for path in texts():
        text = path.read_text(errors="replace")
        if text and path.suffix != ".ipynb":
            assert text.endswith("\n"), f"{where(path)}: no newline at the end"
            assert not text.endswith("\n\n"), f"{where(path)}: empty lines at the end"
