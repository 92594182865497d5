"""The command `rmq`: what was typed -> calls of what `rmq_spark` exports. Needs the extra `cli`.

    rmq topics PATH                 what a store holds
    rmq cat PATH orders --follow    its messages
    rmq check PATH                  is anything damaged?
    rmq --help                      the others

Exit status: 0 done, 1 an error that a message explains, 2 wrong words, or the extra is missing, 3 the answer is no
(`check` found something, `get` nothing), 130 stopped by Ctrl-C. Never loads Spark.
"""

import gc
import sys
from importlib.util import find_spec

# What is loaded stays, so looking for rubbish among it is in vain: at Python's own 700 objects that is done over a
# hundred times before the command begins. `serve` and `cat --follow` still get rid of theirs.
_OBJECTS_BEFORE_COLLECTION = 50_000
_UNUSED = ("pandas", "dateutil")
_EXTRA = ("click", "rich")
_MISSING = """\
rmq needs {missing}, which rmq-spark's extra "cli" brings. Install it:

    pip install "rmq-spark[cli]"
"""


class _WithoutUnused:
    """Lets packages of which this process makes no use be as if they were not installed.

    Arrow asks of each list whether it is a pandas one, and of each value whether it is a time of dateutil's. To ask it
    loads them: longer than all else that is loaded.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing; refuse what is unused, before others are asked."""
        if name in _UNUSED:
            raise ModuleNotFoundError(f"the command rmq makes no use of {name}", name=name)


def main() -> None:
    """Run the command with the words of the command line; ends the process."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        sys.stderr.write(_MISSING.format(missing=" and ".join(missing)))
        raise SystemExit(2)
    sys.meta_path.insert(0, _WithoutUnused())
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
    try:
        from rmq_spark.command.all_commands import keep_interrupts, open_streams, run

        open_streams()
        keep_interrupts()
        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command had begun, or behind its end
        status = 130
    finally:
        gc.freeze()  # else all modules are searched at the end, several times: an eighth of what a short command takes
    raise SystemExit(status)
