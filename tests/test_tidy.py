"""House rules that reviewers would otherwise check: sizes, names, words, and modules that touch files."""

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
# Names without a meaning; use a noun for the contents.
EMPTY_NAMES = {"util", "utils", "manager", "helper", "helpers", "common", "misc", "base"}
TEXT = {".py", ".md", ".cfg", ".toml", ".ipynb", ".txt", ".yml", ".sh", ""}


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


MODULES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
MODULES.append(ROOT / "pyspark_rmq.py")
TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_parts(path: Path, tree: ast.Module) -> Iterator[str]:
    count = len(path.read_text().splitlines())
    if count > MODULE_LINES_MAX:
        yield f"{where(path)} has {count} lines: it holds two nouns; split it"
    for function in functions(tree):
        count = (function.end_lineno or 0) - function.lineno + 1
        if count > FUNCTION_LINES_MAX:
            yield f"{where(path)}:{function.lineno} {function.name} has {count} lines: name a part of it"


def test_modules_and_functions_are_short() -> None:
    assert not [part for path, tree in TREES.items() for part in long_parts(path, tree)]


def test_file_names_are_nouns_of_the_field() -> None:
    words = {path: {word for part in where(path)[:-3].split("/") for word in part.split("_")} for path in MODULES}
    assert not [where(path) for path in MODULES if words[path] & EMPTY_NAMES]


def test_public_names_have_docstrings() -> None:
    missing = [where(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]
    for path, tree in TREES.items():
        for node in public_definitions(tree):
            if not ast.get_docstring(node):
                missing.append(f"{where(path)}:{node.lineno} {node.name}")
    assert not missing


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
# Calls that remove bytes of a store, and the modules that may call them, with what they remove.
TAKES_AWAY = {".remove", ".remove_folder", ".truncate"}
MAY_TAKE_AWAY = {
    "store/log/recovery": "unfinished work of a dead writer, and its metadata",
    "store/log/commit_log_writer": "segments after a torn tail",
    "store/log/consume_queue_writer": "an empty file in place of a new one",
    "store/log/store_files": "`abort` of a recovered store",
    "store/log/retention": "segments, queue files and index files that expired",
    "store/log/key_index": "index files beyond the watermark",
    "store/log/store_lock": "the name of the holder, which is its own",
    "store/transaction/": "intents and staged files that the ledger has passed",
    "store/group/member_lease": "files of a member that leaves, which are its own",
    "store/group/membership": "files of members that are dead",
    "store/log/rebuild": "files of queues and of the index that a repair rebuilds, and its metadata",
    "store/tools/repair": "folders of queues whose topic was deleted",
    "store/tools/parquet_file": "its own incomplete file of a failed export",
    "store/delivery/timer_files": "files of the timer log whose messages expired, an empty file in place of a new one, "
    "log and wheel after a repair has put all waiting messages back into the queue",
}


def forbidden_calls(names: set[str], allowed: tuple[str, ...]) -> list[str]:
    """Return the calls of these names, outside of the modules whose paths begin with one of `allowed`."""
    return [
        f"{where(path)}:{line} {name}()"
        for path, tree in TREES.items()
        if not where(path).startswith(("store/disk", "store/testing", *allowed))
        for line, name in calls(tree)
        if name in names
    ]


def test_only_the_disk_opens_files() -> None:
    """And the reader of an account's keys, which belong to no store."""
    assert not forbidden_calls(OPENS_FILES, ("store/cluster/credentials",))


def test_only_the_disk_destroys_bytes() -> None:
    assert not forbidden_calls(DESTROYS_BYTES, ())


def test_only_named_modules_remove_files() -> None:
    """For a list or a set write `del` or `discard`."""
    assert not forbidden_calls(TAKES_AWAY, tuple(MAY_TAKE_AWAY))


@pytest.mark.parametrize("line", ["open(path)", "disk.remove(path)", "os.unlink(path)", "path.read_bytes()"])
def test_calls_finds_planted_ones(line: str) -> None:
    assert {name for _, name in calls(ast.parse(line))} <= OPENS_FILES | DESTROYS_BYTES | TAKES_AWAY


def texts() -> list[Path]:
    """Return every text file of the project: the files that git tracks or would track."""
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


# Words, with their replacements. Composed of pieces, so that this file does not match.
FOREIGN_WORDS = {
    r"(?i)\b(issue|ticket|pull request|PR)s? ?(no\.? ?|number )?#?\d": "say what, not which number",
    r"(?<![\w&#/])#\d{1,5}\b(?![\w-])": "say what, not which number",
    r"(?<![\w.~/-])/(" + "|".join(["work", "tmp", "root", "home", "Users"]) + r")/\w": "a path of one machine",
}


PICTURE = re.compile(r'^ *"image/png": ".*"', re.MULTILINE)  # in a notebook: not a text, but letters and digits


def foreign_words(text: str) -> Iterator[str]:
    text = PICTURE.sub("", text)
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


@pytest.mark.parametrize(
    "line", ["CommitLog#append", "%RETRY%g/tmp", '  "image/png": "aPR7"', "# 12 bytes", "&#12;", "store/tmp/a"]
)
def test_the_search_leaves_other_words_alone(line: str) -> None:
    assert not list(foreign_words(line))


def test_every_text_ends_with_one_newline() -> None:
    for path in texts():
        text = path.read_text(errors="replace")
        if text and path.suffix != ".ipynb":
            assert text.endswith("\n"), f"{where(path)}: no newline at the end"
            assert not text.endswith("\n\n"), f"{where(path)}: empty lines at the end"
