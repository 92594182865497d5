"""Public names of `rmq_spark`: they exist, and the type checker and docs/PROGRAMS.md agree."""

import ast
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import rmq_spark
from rmq_spark import store
from rmq_spark.store import errors

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).resolve().parent.parent

ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.RmqError)]


def test_all_names_are_sorted_and_dir_lists_them() -> None:
    assert rmq_spark.__all__ == sorted(rmq_spark.__all__, key=lambda name: (not name.isupper(), name))
    assert dir(rmq_spark) == sorted([*rmq_spark.__all__, "__version__"])


@pytest.mark.parametrize("name", rmq_spark.__all__)
def test_every_name_is_there_and_explains_itself(name: str) -> None:
    value = getattr(rmq_spark, name)
    assert value is getattr(rmq_spark, name)
    assert name == name.upper() or value.__doc__, f"{name} has no docstring"


def test_a_misspelt_argument_of_a_function_is_an_error_with_a_hint() -> None:
    functions = [value for name in rmq_spark.__all__ if isinstance(value := getattr(rmq_spark, name), FunctionType)]
    seen = set()
    for function in functions:
        *_, last = inspect.signature(function).parameters.values()
        if last.kind is last.VAR_KEYWORD:
            continue  # it checks its arguments itself
        with pytest.raises(rmq_spark.OptionError) as caught:
            function(**{f"{last.name}s_": None})
        expected = f"{function.__name__}: unknown argument {last.name}s_. Did you mean {last.name}?"
        assert str(caught.value) == expected
        assert pickle.loads(pickle.dumps(function)) is function
        seen.add(function.__name__)
    assert seen >= {"check", "close", "consume", "create_store", "parse", "plot_lag", "session", "stop_at_end"}


def test_an_argument_unlike_all_others_is_an_error_that_lists_them() -> None:
    with pytest.raises(rmq_spark.OptionError, match=r"^close: unknown argument xyz\. Expected some of path, "):
        rmq_spark.close("store", xyz=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="required positional argument: 'path'"):
        rmq_spark.close()  # type: ignore[call-arg]


def test_the_type_checker_sees_the_same_names() -> None:
    tree = ast.parse(Path(rmq_spark.__file__).read_text())
    seen = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.If)
        for line in node.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert seen == set(rmq_spark.__all__)


def test_every_error_is_public_and_says_where_users_find_it() -> None:
    for error in ERRORS:
        assert getattr(rmq_spark, error.__name__) is error
        assert error.__module__ == "rmq_spark"
        assert pickle.loads(pickle.dumps(error)) is error


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'sesion'.*'session'"):
        rmq_spark.sesion  # noqa: B018


def test_no_function_has_the_name_of_a_module() -> None:
    # Importing rmq_spark.x binds the module to `rmq_spark.x`, and replaces a function of that name.
    modules = {path.stem for path in Path(rmq_spark.__file__).parent.glob("*.py")}
    assert not modules & set(rmq_spark.__all__)


def test_importing_it_loads_neither_spark_nor_numpy() -> None:
    code = (
        "import sys, rmq_spark; dir(rmq_spark); rmq_spark.__version__; "
        "print([m for m in ('pyspark', 'numpy', 'pyarrow', 'rmq_spark.store') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


def test_all_is_listed_in_the_documentation() -> None:
    section = (ROOT / "docs" / "PROGRAMS.md").read_text().split("## Python names")[1].split("\n## ")[0]
    listed = {name.split(".")[-1] for name in re.findall(r"`(?:rmq_spark\.)?(\w+)[`(]", section)}
    assert set(rmq_spark.__all__) <= listed, set(rmq_spark.__all__) - listed


@pytest.mark.parametrize("words", ["errors", "model"])
def test_importing_a_word_of_the_engine_loads_nothing_else_of_it(words: str) -> None:
    code = (
        f"import sys, rmq_spark.store.{words}; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('numpy', 'pyarrow') or m.count('.') > 2])"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


def test_the_engines_door_opens_at_the_first_use_and_lists_what_is_behind_it() -> None:
    assert sorted(store.__all__) == dir(store)
    for name in store.__all__:
        assert getattr(store, name) is getattr(store, name)
    with pytest.raises(AttributeError, match=r"'open_writer_'.*'open_reader'"):
        store.open_writer_  # noqa: B018
