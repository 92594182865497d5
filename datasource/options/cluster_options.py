"""The options of a place that is a live cluster, and the checks that they fit each other.

These checks need no connection. `store.places.locate` makes the location of their values.
"""

from collections.abc import Mapping
from typing import Any

from rmq_spark.store.errors import OptionError

PATH, NAME_SERVER = "path", "nameServer"
TLS_ON = "tls=true"


def check_place(found: Mapping[str, Any]) -> None:
    """Raise OptionError if the options name two places, or have TLS options without TLS.

    `found` has the parsed values of the given options, by name.
    """
    if PATH in found and NAME_SERVER in found:
        raise OptionError(
            f"{PATH} and {NAME_SERVER} are both given: a query has one place, a store directory or a cluster. Keep one "
            "of them."
        )
    ineffective = [name for name in found if name.startswith("tls") and name != "tls"]
    if NAME_SERVER in found and ineffective and not found.get("tls"):
        raise OptionError(
            f"{', '.join(ineffective)}: found no {TLS_ON}, without which connections are not encrypted. Add {TLS_ON}, "
            f"or leave {', '.join(ineffective)} out."
        )
    if ("tlsCertFile" in found) != ("tlsKeyFile" in found):
        one, missing = ("tlsCertFile", "tlsKeyFile") if "tlsCertFile" in found else ("tlsKeyFile", "tlsCertFile")
        raise OptionError(f"{one} is given without {missing}; expected both, or neither. Add {missing}.")
    if found.get("tlsVerify") == "none" and "tlsCaFile" in found:
        raise OptionError("tlsCaFile has no effect with tlsVerify=none, which verifies nothing. Keep one of them.")
