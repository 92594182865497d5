"""The command `rmq`: a command line for the public functions of `rmq_spark`.

    rmq topics PATH                 list topics
    rmq cat PATH orders --follow    print messages
    rmq check PATH                  search for damage
    rmq --help                      list all commands

It needs the extra `cli` and never loads Spark. Exit status: 0 success; 1 error; 2 invalid usage, or the extra is not
installed; 3 `check` or `repair` found the store not healthy, or `get` found no message; 130 stopped by Ctrl-C.
"""

import gc
import sys
from importlib.util import find_spec

# Imported modules are never garbage, and Python's default threshold of 700 objects triggers over a hundred collections
# while they load. Garbage of `serve` and `cat --follow` is still collected.
_OBJECTS_BEFORE_COLLECTION = 50_000
_UNUSED = ("pandas", "dateutil")
_EXTRA = ("click", "rich")
_MISSING = """\
rmq: {missing} not installed; expected rmq-spark's extra "cli". Install it:

    pip install "rmq-spark[cli]"
"""


class _UnusedPackages:
    """Import hook that hides packages which the command does not use.

    Arrow imports pandas and dateutil, where they are installed, to recognise their types. That takes longer than all
    other imports together.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for a hidden package; leave all others to the next finder."""
        if name in _UNUSED:
            raise ModuleNotFoundError(f"the command rmq does not use {name}", name=name)


def main() -> None:
    """Run the command with the arguments of the process, then exit."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        names = f"the packages {' and '.join(missing)} are" if len(missing) > 1 else f"the package {missing[0]} is"
        sys.stderr.write(_MISSING.format(missing=names))
        raise SystemExit(2)
    sys.meta_path.insert(0, _UnusedPackages())
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
    try:
        from rmq_spark.command.all_commands import keep_interrupts, open_streams, run

        open_streams()
        keep_interrupts()
        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command began or after it ended
        status = 130
    finally:
        gc.freeze()  # skips the collections at exit, which take an eighth of a short command's time
    raise SystemExit(status)
