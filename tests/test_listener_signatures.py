"""Listeners that `consume` refuses before the query starts, by their own signature, not that of a wrapped function."""

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rmq_spark.consuming import _check_signature
from rmq_spark.store.errors import OptionError


def of_one(messages: list[Any]) -> str:
    return "SUCCESS"


async def wait(name: str, messages: list[Any], context: Any) -> str:
    return "SUCCESS"


def generate(name: str, messages: list[Any], context: Any) -> Iterator[str]:
    yield "SUCCESS"


async def generate_later(messages: list[Any], context: Any) -> Any:
    yield "SUCCESS"


@functools.wraps(of_one)
def adapter(messages: list[Any], context: Any) -> str:
    return of_one(messages)


@functools.wraps(wait)
def runner(messages: list[Any], context: Any) -> str:
    return asyncio.run(wait("name", messages, context))


@functools.wraps(adapter)
def narrower(messages: list[Any]) -> str:
    return of_one(messages)


class Asynchronous:
    async def __call__(self, messages: list[Any], context: Any) -> str:
        return "SUCCESS"


class Cached:
    @functools.lru_cache  # noqa: B019
    def method(self, messages: list[Any], context: Any) -> str:
        return "SUCCESS"


@pytest.mark.parametrize("listener", [adapter, runner, functools.partial(adapter), Cached().method, {}.get])
def test_a_listener_is_judged_by_its_own_signature(listener: Callable[..., Any]) -> None:
    _check_signature(listener)


@pytest.mark.parametrize(
    "listener",
    [
        functools.partial(wait, "name"),
        functools.partial(functools.partial(generate), "name"),
        functools.partial(Asynchronous()),
        Asynchronous(),
        generate_later,
    ],
)
def test_a_coroutine_or_a_generator_is_refused_within_a_partial_too(listener: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="is a coroutine or a generator"):
        _check_signature(listener)


@pytest.mark.parametrize("listener", [narrower, of_one, functools.partial(wait), functools.partial(adapter, [], None)])
def test_a_listener_that_does_not_take_two_arguments_is_refused(listener: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match=r"called with two arguments|coroutine"):
        _check_signature(listener)
