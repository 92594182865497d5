"""Facts in the documents: paths exist, commands exist, code runs."""

import ast
import configparser
import dataclasses
import inspect
import os
import re
import shlex
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rmq_spark
from rmq_spark.store import Producer, PullConsumer, SendResult
from rmq_spark.store.pull_result import GetMessageStatus, PullStatus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "recipes").glob("*.md")),
]
# How blocks of a document run: `python` one after the other, `console` as commands whose output is compared.
RUN = {
    ("README.md", "python"): "tests/test_docs.py",
    ("README.md", "console"): "tests/command/test_page_examples.py",
    ("PROGRAMS.md", "python"): "tests/test_docs.py",
    ("GUIDE.md", "python"): "tests/test_guides.py",
    ("OPERATIONS.md", "python"): "tests/test_guides.py",
    ("OPERATIONS.md", "console"): "tests/command/test_page_examples.py",
    ("OPTIONS.md", "python"): "tests/test_guides.py",
    ("TESTING.md", "python"): "tests/store/testing/test_pytest_plugin.py",
    ("LOGGING.md", "python"): "tests/test_logging_page.py",
    ("METRICS.md", "python"): "tests/test_metrics_page.py",
    ("ERRORS.md", "python"): "tests/datasource/test_bad_input.py",
    ("COMMAND.md", "console"): "tests/command/test_command_page.py",
    ("index.md", "python"): "tests/test_recipes.py",
    **{(path.name, "python"): "tests/test_recipes.py" for path in (ROOT / "docs" / "recipes").glob("*.md")},
}
PROGRAMS = ROOT / "docs" / "PROGRAMS.md"
# A path of ours in backticks: with a folder of ours in front, or a file at the top.
PATH = re.compile(
    r"`((?:store|datasource|rmq_spark|tests|docs|notebooks|benchmarks|deploy|\.ci)/[\w./*-]*"
    r"|(?:README|CHANGELOG|CONTRIBUTING)\.md|setup\.(?:cfg|py)|pyproject\.toml|Makefile|pyspark_rmq\.py)`"
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
# A comment just before a block gives the reason why it is not run.
BLOCK = re.compile(r"(<!-- not run: .*?-->\s*)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(BLOCK.pattern.replace(r"(\w*)", "python"), BLOCK.flags)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@each_document
def test_a_path_in_backticks_exists(document: Path) -> None:
    for path in PATH.findall(document.read_text()):
        found = list(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()
        assert found, f"{document.name} names {path}"


def test_the_architecture_names_functions_that_exist() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    steps = re.findall(r"^\| *\d* *\| `([\w/]+\.py)` \| (.*?) \|", text, re.MULTILINE)
    inline = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`\s+\(`((?:store|datasource)/[\w/]+\.py)`\)", text)
    named = [(path, name) for path, cell in steps for name in re.findall(r"`([\w.]+)`", cell)]
    named += [(path, name) for name, path in inline if not name.endswith(".json")]
    assert len(named) > 50
    assert not [f"{path}: {name}" for path, name in named if name not in defined_names(path)]


def defined_names(path: str) -> set[str]:
    """Return the functions, classes and methods of a module: `name`, `Class`, `Class.method`."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@each_document
def test_a_link_leads_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@each_document
def test_a_make_target_that_is_named_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = document.read_text()
    named = set(re.findall(r"(?:^    |`)make ([a-z]+)", text, re.MULTILINE))
    named |= set(re.findall(r"^make ([a-z]+)", "".join(SHELL.findall(text)), re.MULTILINE))
    assert named <= targets, f"{document.name}: {named - targets}"


@each_document
def test_every_block_of_code_is_run_or_says_why_not(document: Path) -> None:
    text = document.read_text()
    for reason, language, code in BLOCK.findall(text):
        if language == "python":
            ast.parse(code)
        if reason or language == "text" or (language == "sh" and all(map(is_looked_at, code.splitlines()))):
            continue
        assert (document.name, language) in RUN, (
            f"{document.name}: nobody runs its {language} code. Put `<!-- not run: reason -->` before\n{code}"
        )
        runner = (ROOT / RUN[document.name, language]).read_text()
        assert document.stem in runner, f"{RUN[document.name, language]} knows no {document.name}"
    # COMMAND.md has lines of the command's own help, which its test compares.
    indented = re.findall(r"^ {4}\S.*", BLOCK.sub("", text), re.MULTILINE) if document.name != "COMMAND.md" else []
    in_lists = re.findall(r"^(?:\d+\.|-) .*\n(?: {2,}\S.*\n)+", text, re.MULTILINE)
    for line in indented:
        assert any(line in item for item in in_lists), f"{document.name}: fence code that is indented: {line}"


def is_looked_at(line: str) -> bool:
    """Return whether a shell line names only existing things: targets of make, our programs and tests."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    if "pytest" in words:
        (test,) = [word for word in words if word.startswith("tests/")] or ["tests"]
        chosen = words[words.index("-k") + 1] if "-k" in words else ""
        return (ROOT / test).exists() and (not chosen or chosen in (ROOT / test).read_text())
    if words[0] == "make":  # the test above knows the targets
        return True
    return words[0] == ".venv/bin/ruff" or os.access(ROOT / words[0], os.X_OK)


@each_document
def test_what_is_for_a_shell_is_in_its_language(document: Path) -> None:
    code = "".join(SHELL.findall(document.read_text()))
    checked = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
    assert checked.returncode == 0, f"{document.name}: {checked.stderr}"


@pytest.mark.spark
def test_the_readme_s_examples_run_in_order(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # their path is relative
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace: dict[str, object] = {"__name__": "readme"}
    text = DOCUMENTS[0].read_text()
    blocks = [code for reason, code in CODE.findall(text) if not reason]
    assert len(blocks) >= 2
    for code in blocks:
        exec(compile(code, "README.md", "exec"), namespace)
    printed = capfd.readouterr().out
    for shown in SHOWN.findall(text):
        assert shown in printed, f"the README shows\n{shown}and its examples print\n{printed}"
    assert property_names(str(namespace["store"])) == property_names("tests/golden/demo"), "a copy keeps properties"


def property_names(path: str) -> Counter[str]:
    """Return how many messages of the topic orders have each property."""
    names: Counter[str] = Counter()
    with rmq_spark.open_reader(path) as store:
        for queue in store.queues("orders"):
            held = store.bounds(queue)
            for batch in store.read(queue, held.min_offset, held.max_offset, ["properties"]):
                names.update(name for row in batch.column("properties").to_pylist() for name, _ in row)
    return names


def test_the_examples_for_programs_run_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stores").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "stores"))
    monkeypatch.chdir(tmp_path)  # there is its picture
    monkeypatch.setenv("MPLBACKEND", "Agg")
    blocks = [code for reason, code in CODE.findall(PROGRAMS.read_text()) if not reason]
    if find_spec("matplotlib") is None:  # of an extra
        blocks = [code for code in blocks if "rmq_spark.plot_" not in code]
    namespace: dict[str, object] = {"__name__": "programs"}
    for code in blocks:
        exec(compile(code, PROGRAMS.name, "exec"), namespace)
    printed = capfd.readouterr().out
    assert re.search(r"^orders \d 0 0 [0-9A-F]{32}$", printed, re.MULTILINE), printed
    assert "'orders', 'payments']" in printed
    assert sum(printed.count(f"'body': b'{body}'") for body in ("a body", "one", "two")) == 8, (
        "each body is read and pulled, one is redelivered"
    )
    (store,) = (tmp_path / "stores").iterdir()
    assert not (store / "abort").exists()


def test_the_page_for_programs_has_every_argument_with_its_default() -> None:
    section = PROGRAMS.read_text().split("## Opening")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE)
    parameters = inspect.signature(rmq_spark.open_store).parameters.values()
    assert [(name, value_of(default)) for name, default in rows] == [
        (parameter.name, parameter.default)
        for parameter in parameters
        if parameter.name != "path" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def value_of(text: str) -> object:
    """Return the value of an expression of numbers and texts."""
    return eval(compile(text, "default", "eval"), {"__builtins__": {}})


def test_the_page_for_programs_names_every_call() -> None:
    text = PROGRAMS.read_text()
    calls = {name for name in dir(Producer) if not name.startswith("_")}
    assert calls == set(re.findall(r"(?<!\.)messages\.(\w+)\(", text))
    assert {f"place.{field.name}" for field in dataclasses.fields(SendResult)} <= set(re.findall(r"place\.\w+", text))


def test_the_page_for_programs_names_every_call_and_answer_of_a_consumer() -> None:
    text = PROGRAMS.read_text()
    calls = {name for name in dir(PullConsumer) if not name.startswith("_")}
    assert calls == set(re.findall(r"consumer\.(\w+)\(", text)) - {"open_consumer"}
    table = text.split("| `pull_status` |")[1].split("\n\n")[0]
    assert {str(word) for enum in (PullStatus, GetMessageStatus) for word in enum} == set(
        re.findall(r"`([A-Z][A-Z_]+)`", table)
    )


def test_the_readme_and_setup_cfg_ask_for_the_same_python() -> None:
    cfg = configparser.ConfigParser(interpolation=None)
    cfg.read(ROOT / "setup.cfg")
    assert cfg["options"]["python_requires"] == ">=3.11"
    assert "Python 3.11 or newer" in DOCUMENTS[0].read_text()


def test_the_changelog_says_what_is_coming() -> None:
    if "dev" not in rmq_spark.__version__:
        return  # in the commit of a release nothing is unreleased
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased = text.split("## [Unreleased]")[1].split("\n## ")[0]
    assert re.search(r"^- \w", unreleased, re.MULTILINE), "Unreleased lists nothing"


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
