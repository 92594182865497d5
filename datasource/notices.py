"""Lines for people that are no warnings: to the log, or to where they are seen without one."""

import logging
import sys

_LOG = logging.getLogger("rmq_spark")


def is_heard() -> bool:
    """Say whether a line of `tell` would be seen by anybody; making one may cost something."""
    return _LOG.isEnabledFor(logging.INFO) or not _LOG.hasHandlers()


def tell(line: str) -> None:
    """Log a line at INFO; to standard error where nobody has set up logging: Python shows only warnings then."""
    if _LOG.hasHandlers():
        _LOG.info(line)
    else:
        print(line, file=sys.stderr)
