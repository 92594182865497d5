"""Checks of what a program passes as arguments: integers, times, words, and the place to open."""

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, ParamSpec, TypeVar

from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import describe_unit, is_in_another_unit

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")
MAX_LONG = (1 << 63) - 1  # of Java's long, in which RocketMQ stores offsets and times
# The arguments of programs that say how to reach a cluster, beside name_server.
CLUSTER_ARGUMENTS = (
    "broker_addresses",
    "namespace",
    "access_key",
    "secret_key",
    "security_token",
    "credentials_file",
    "tls",
    "tls_verify",
    "tls_ca_file",
    "tls_cert_file",
    "tls_key_file",
    "tls_key_password",
    "request_timeout_ms",
    "broker_down_timeout_ms",
    "pull_group",
)


def check_integer(name: str, value: object, least: int, most: int = MAX_LONG) -> int:
    """Return the argument `name` as an int. Raises OptionError unless it is an integer from `least` to `most`.

    numpy's integers are valid. True and 1.0 are not.
    """
    number = _as_int(value)
    if number is None or not least <= number <= most:
        raise OptionError(f"{name}={value!r} must be an integer {_bounds_text(least, most)}.")
    return number


def check_setting(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise OptionError unless the setting `name` is an int from `least` to `most`; without `most` there is no limit.

    numpy's integers are not valid, because the setting is stored without conversion.
    """
    if type(value) is not int or value < least or (most is not None and value > most):
        unit = " Times are ms, sizes are bytes." if name.endswith(("_ms", "_bytes")) else ""
        raise OptionError(f"{name}={value!r} must be an integer {_bounds_text(least, most)}.{unit}")


def as_ms(name: str, value: object) -> object:
    """Convert a datetime to ms since the epoch, rounded. Return any other value unchanged.

    Raises OptionError if a datetime has no time zone, because the machine's zone would then determine its meaning.
    """
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is None:
        raise OptionError(
            f"{name}={value!r} has no time zone; expected one, or ms since the epoch. Add it: "
            "datetime(…, tzinfo=timezone.utc)."
        )
    return round(value.timestamp() * 1000)


def check_time(name: str, value: object) -> int:
    """Return a time in ms since the epoch. `value` is such a time, or a datetime with a time zone.

    Raises OptionError for any other value of the argument `name`, and for a time that was given in another unit.
    """
    time_ms = check_integer(name, as_ms(name, value), -MAX_LONG)
    if is_in_another_unit(time_ms) and not isinstance(value, datetime):
        raise OptionError(f"{name}={time_ms} {describe_unit(time_ms)}.")
    return time_ms


def check_flags(**flags: object) -> None:
    """Raise OptionError unless each of the named values is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r} must be True or False.")


def check_limits(**limits: object) -> None:
    """Raise OptionError unless each of the named values is an integer ≥ 0, or None."""
    for name, value in limits.items():
        if value is not None:
            check_setting(name, value, 0)


def check_word(name: str, value: object, accepted: tuple[str, ...]) -> None:
    """Raise OptionError unless `value` is one of the `accepted` words. `name` is the option's name."""
    if value not in accepted:
        raise OptionError(f"{name}={value!r} is none of: {', '.join(accepted)}.")


def check_name_list(call: str, name: str, value: object) -> None:
    """Raise OptionError if the argument `name`, a list of names, is a text. It would be split into its letters."""
    if isinstance(value, str):
        raise OptionError(f"{call}: {name}={value!r} is a text; expected a list of names, such as [{value!r}].")


def check_offset(call: str, value: object) -> int:
    """Return a queue offset as an int. Raises OptionError for any other value; the message begins with `call`."""
    number = _as_int(value)
    if number is None or not 0 <= number <= MAX_LONG:
        raise OptionError(
            f"{call}: offset={value!r} is not a queue offset; expected an integer from 0 to 2**63 - 1. min_offset "
            "and max_offset return the range that a queue holds."
        )
    return number


def check_place(
    call: str,
    path: object,
    name_server: object,
    purpose: str,
    cluster_options: Mapping[str, Any] | None = None,
    function: Callable[..., object] | None = None,
) -> None:
    """Raise OptionError unless exactly one place was given, and each of the `cluster_options` has a known name.

    `function` is the one that was called.
    """
    unknown = [name for name in cluster_options or () if name not in CLUSTER_ARGUMENTS]
    if unknown:
        code: Any = getattr(function, "__code__", None)
        own = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        raise unknown_arguments(call, unknown, dict.fromkeys(("name_server", "path", *own, *CLUSTER_ARGUMENTS)))
    if (path is None) == (name_server is None):
        found = "path and name_server were both given" if path is not None else "neither path nor name_server was given"
        raise OptionError(f"{call}: {found}; expected one of them. Name one place to {purpose}.")


def unknown_arguments(call: str, unknown: Iterable[str], known: Iterable[str]) -> OptionError:
    """Return the error for unknown arguments. `known` are the names of the others."""
    names = list(known)
    near = [match for name in unknown for match in difflib.get_close_matches(name, names, 1)]
    hint = f"Did you mean {' and '.join(near)}?" if near else f"Expected some of {', '.join(names)}."
    return OptionError(f"{f'{call}: ' if call else ''}unknown argument {', '.join(unknown)}. {hint}")


def refuse_unknown(call: str, method: Callable[..., object], given: Iterable[str]) -> None:
    """Raise OptionError with a hint if one of the `given` names is not a parameter of a method."""
    parameters = inspect.signature(method).parameters
    unknown = sorted(set(given) - parameters.keys())
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        raise unknown_arguments(call, unknown, [name for name in parameters if name != "self"]) from None


def refuse_unknown_arguments(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Return a public function, which now raises OptionError with a hint for a keyword argument that it does not have.

    Python's own TypeError has no hint. A function that accepts any keyword argument checks them itself, and is returned
    unchanged.
    """
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return function

    @functools.wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        unknown = kwargs.keys() - parameters.keys()
        if unknown:
            raise unknown_arguments(call.__name__, sorted(unknown), parameters)
        return function(*args, **kwargs)

    call.__module__ = "rmq_spark"  # pickle looks for the function there
    return call


def changed_arguments(function: Callable[..., object], given: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return which of the arguments `names` differ from their defaults, in the order of `function`."""
    defaults = getattr(function, "__kwdefaults__", None) or {}
    return [name for name in defaults if name in names and given[name] != defaults[name]]


def refuse_cluster_options(call: str, cluster_options: Collection[str]) -> None:
    """Raise OptionError if arguments for a cluster, here their names, were given with a store directory."""
    if cluster_options:
        is_for, them = _words_of(cluster_options)
        raise OptionError(
            f"{call}: {is_for} a cluster; expected none of the arguments for clusters with path. Leave {them} out, or "
            "give name_server instead of path."
        )


def refuse_store_options(
    call: str, function: Callable[..., object], given: Mapping[str, Any], accepted: Collection[str]
) -> None:
    """Raise OptionError if an argument differs from its default that is not in `accepted`, the ones for clusters."""
    found = changed_arguments(function, given, given.keys() - {*accepted, "name_server"})
    if found:
        is_for, them = _words_of(found)
        raise OptionError(
            f"{call}: {is_for} a store directory; expected none of the arguments for stores with name_server. Leave "
            f"{them} out."
        )


def _words_of(names: Collection[str]) -> tuple[str, str]:
    """Return "x is for" and "it", or "x, y are for" and "them"."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} for", "it" if len(names) == 1 else "them"


def _bounds_text(least: int, most: int | None) -> str:
    return f"≥ {least}" if most in (None, MAX_LONG) else f"from {least} to {most}"


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # it raises for what has no __index__
    except TypeError:
        return None
