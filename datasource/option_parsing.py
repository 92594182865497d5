"""From what Spark hands over to a table of options: names in any case, values by their parsers, errors in words."""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rmq_spark.datasource.option_table import Option
from rmq_spark.datasource.values import Unacceptable
from rmq_spark.store.errors import OptionError

_SHOWN_CHARACTERS = 120  # of a bad value: a pasted offset of thousands of queues would hide the rest

# What users set for all their queries, or at the wrong end of one: not ours, no harm.
_SPARK_OPTIONS = {"checkpointlocation", "queryname", "outputmode"}


def index_options(table: Iterable[Option]) -> dict[str, Option]:
    """Return the options of a table by name and by alias, in lower case."""
    return {name.lower(): option for option in table for name in (option.name, option.alias) if name}


def strip_spark_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options without those that are Spark's own, and with `paths` as the one path it must be.

    Raises OptionError for a table in Spark's catalog, and for several paths.
    """
    rest = {name: text for name, text in given.items() if name.lower() not in _SPARK_OPTIONS}
    if "provider" in {name.lower() for name in rest}:
        raise OptionError(
            "a table in Spark's catalog hands its options to a Python source when it is created, not when it is used. "
            'Use CREATE TEMPORARY VIEW … USING rmq OPTIONS (…), spark.read.format("rmq") or write.format("rmq").'
        )
    paths = rest.pop("paths", None)
    if paths is not None:
        rest["path"] = _one_path(paths)
    return rest


def _one_path(paths: str) -> str:
    """Return the one path in what Spark makes of load(["…"]): a list in JSON."""
    try:
        listed = json.loads(paths)
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        raise OptionError("paths is what Spark calls the argument of load(). Give one store, as path or to load().")
    if len(listed) != 1:
        raise OptionError(f"{len(listed)} paths were given to load(). Give one store, and union what several give.")
    return str(listed[0])


def parse_given(
    given: Mapping[str, str], table: Collection[Option], now_ms: int, others: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the values that were given, by the canonical names of their options.

    `others` says of names that are in no row (lower case) what is the matter with them. Raises OptionError for an
    unknown name, a name given twice, and a value that is not acceptable.
    """
    by_name = index_options(table)
    found: dict[str, Any] = {}
    for name, text in given.items():
        option = by_name.get(name.lower())
        if option is None:
            raise OptionError(_unknown(name, by_name, table, (others or {}).get(name.lower())))
        if option.name in found:
            raise OptionError(f"{option.name} and its alias {option.alias} are both given. Give one of them.")
        found[option.name] = parse_value(option, text, now_ms)
    return found


def parse_value(option: Option, text: str, now_ms: int) -> Any:
    """Return the value of one option; raises OptionError with what is accepted and an example."""
    try:
        return option.parse(text, now_ms) if option.timed else option.parse(text)
    except Unacceptable as error:
        shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
        raise OptionError(f'{option.name}="{shown}" {error} Example: {option.name}={option.example}') from None


def _unknown(name: str, by_name: Mapping[str, Option], table: Iterable[Option], known: str | None) -> str:
    hint = f" {known}" if known else ""
    for near in difflib.get_close_matches(name.lower(), by_name, 1):
        option = by_name[near]
        hint = f" Did you mean {option.alias if option.alias == near else option.name}?"
    accepted = ", ".join(option.name + (f" (or {option.alias})" if option.alias else "") for option in table)
    return f'unknown option "{name}".{hint} Accepted are: {accepted}.'
