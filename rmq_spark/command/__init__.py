"""The command `rmq`: what was typed -> calls of what `rmq_spark` exports. Needs the extra `cli`.

    rmq topics PATH                 what a store holds
    rmq cat PATH orders --follow    its messages
    rmq check PATH                  is anything damaged?
    rmq --help                      the others

Exit status: 0 done, 1 an error that a message explains, 2 wrong words, or the extra is missing, 3 the answer is no
(`check` found something, `get` nothing), 130 stopped by Ctrl-C. Never loads Spark.
"""

import sys
from importlib.util import find_spec

_EXTRA = ("click", "rich")
_MISSING = """\
rmq needs {missing}, which rmq-spark's extra "cli" brings. Install it:

    pip install "rmq-spark[cli]"
"""


def main() -> None:
    """Run the command with the words of the command line; ends the process."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        sys.stderr.write(_MISSING.format(missing=" and ".join(missing)))
        raise SystemExit(2)
    try:
        from rmq_spark.command.all_commands import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command had begun, or behind its end
        status = 130
    raise SystemExit(status)
