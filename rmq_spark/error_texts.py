"""The text of an error as the user needs it: `explain` takes ours out of what Spark wraps it in."""

import re
from collections.abc import Iterator

from rmq_spark.store.errors import RmqError

_MAX_LINES = 10  # of an error that is not ours
_OURS = re.compile(r'(?<![\w.])(?:rmq_spark\.(?P<name>\w+Error)|(?:ImportError)(?=: format\("rmq"\))): ')
# What Spark and Java add after the message of an error, and Python between two errors.
_NEXT = r"\n\n(?:During handling of the above exception|The above exception was the direct cause)"
_END = re.compile(
    r"\n?[ \t]*SQLSTATE: \w{5}\b|\n\s*at [\w.$/]+\(|\n\s*(?:JVM|Driver) stacktrace:|\n\s*=== Streaming Query"
    r"|\nCaused by: |\nTraceback \(most recent call last\):|" + _NEXT
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t]+.*\n|\n)+")
# What comes before the first useful words of an error of Spark's.
_BEGINNING = re.compile(
    r"^(?:An error occurred while calling [\w.]+\.\n?:\s*|\[STREAM_FAILED\][^\n]*? terminated with exception: )+"
)
_NOT_FOUND = re.compile(r"DATA_SOURCE_NOT_FOUND\b[^\n]*: rmq\b")
_NO_MODE = re.compile(r'UNSUPPORTED_DATA_SOURCE_SAVE_MODE\b[^\n]*"rmq"')
_HINT_NOT_FOUND = (
    "\nCall rmq_spark.register(spark) first, or install rmq-spark for the interpreter that PYSPARK_PYTHON names "
    "(docs/GUIDE.md, Linking)."
)
_HINT_NO_MODE = '\nWrite with .mode("append"): a topic supports appending only, so Overwrite is refused too.'


def explain(error: BaseException | None) -> str:
    """Return the text of an error without the frames of workers and of Java: the class of the error and its message.

    Takes any exception that Spark raises, such as AnalysisException, PythonException, StreamingQueryException, Py4J's
    and those of Spark Connect, the result of `query.exception()`, and an RmqError. If an error of rmq-spark is in it,
    returns that one, as in `OptionError: unknown option "subscrib". …`. Otherwise returns the first useful lines of the
    message. Returns an empty text for None, which `query.exception()` returns for a query that has not failed.
    """
    if error is None:
        return ""
    for one in _chain(error):
        if isinstance(one, RmqError):
            return "\n".join([f"{type(one).__name__}: {one}", *getattr(one, "__notes__", ())])
    text = _text_of(error)
    return _find_ours(text) or _first_lines(error, text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those that it was raised from or while handling, each once."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _text_of(error: BaseException) -> str:
    """Return the message of an error. That of an error of Java may be unknown because Java has exited."""
    try:
        return str(error)
    except Exception as unknown:
        return f"{type(error).__name__}, whose text cannot be read: {unknown}"


def _find_ours(text: str) -> str | None:
    """Return the first error of ours in the text; of errors that Python chains, the last. None if there is none."""
    begin = 0
    while (found := _OURS.search(text, begin)) is not None:
        end = _END.search(text, found.end())
        message = text[found.end() : end.start() if end else len(text)].strip()
        result = f"{found['name'] or 'ImportError'}: {message}"
        if end is None or not end.group().startswith("\n\n") or _OURS.search(text, end.end()) is None:
            return result
        begin = end.end()
    return None


def _first_lines(error: BaseException, text: str) -> str:
    """Return the useful beginning of a message that is not ours: no frames, and at most `_MAX_LINES` lines."""
    shown = _BEGINNING.sub("", _TRACEBACK.sub("", text))
    end = _END.search(shown)
    lines = (shown[: end.start()] if end and shown[: end.start()].strip() else shown).strip().splitlines()
    more = [f"… and {len(lines) - _MAX_LINES} more lines"] if len(lines) > _MAX_LINES else []
    first = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    hint = _HINT_NOT_FOUND if _NOT_FOUND.search(text) else _HINT_NO_MODE if _NO_MODE.search(text) else ""
    return "\n".join([first, *lines[1:_MAX_LINES], *more]) + hint
