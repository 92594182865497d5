"""Places: from the options of a query to the location of what it reads or writes.

This module is above every implementation of the contract (`store.backend`), so that the Spark side needs none of them.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from rmq_spark.store.argument_checks import CLUSTER_ARGUMENTS, check_setting, unknown_arguments
from rmq_spark.store.backend import Location
from rmq_spark.store.cluster.address import (
    ClusterAddress,
    Credentials,
    TlsOptions,
    parse_broker_addresses,
    parse_name_servers,
)
from rmq_spark.store.disk.files import parent_process_id, refuse_address
from rmq_spark.store.disk.host import usable_cores
from rmq_spark.store.errors import OptionError
from rmq_spark.store.local.directory import StoreDirectory

__all__ = ["from_mark", "locate", "parent_process_id", "usable_cores", "with_wait"]

# The values of these options say where a place is.
PATH, COMMIT_LOG_PATH, READ_MODE, NAME_SERVER = "path", "commitLogPath", "readMode", "nameServer"


class ClusterArguments(TypedDict, total=False):
    """The arguments of programs that say how to reach a cluster, beside `name_server`. All of them may be left out.

    They mean what the options of `_ARGUMENTS` mean. Durations are in ms. `tls_verify` is "ca", "full" or "none".
    """

    broker_addresses: str
    namespace: str
    access_key: str | None
    secret_key: str | None
    security_token: str | None
    credentials_file: str | None
    tls: bool
    tls_verify: str
    tls_ca_file: str | None
    tls_cert_file: str | None
    tls_key_file: str | None
    tls_key_password: str | None
    request_timeout_ms: int
    broker_down_timeout_ms: int
    pull_group: str


# The arguments of programs, and the options of the same meaning.
_ARGUMENTS = {
    "broker_addresses": "brokerAddresses",
    "namespace": "namespace",
    "access_key": "accessKey",
    "secret_key": "secretKey",
    "security_token": "securityToken",
    "credentials_file": "credentialsFile",
    "tls": "tls",
    "tls_verify": "tlsVerify",
    "tls_ca_file": "tlsCaFile",
    "tls_cert_file": "tlsCertFile",
    "tls_key_file": "tlsKeyFile",
    "tls_key_password": "tlsKeyPassword",
    "request_timeout_ms": "requestTimeout",
    "broker_down_timeout_ms": "brokerDownTimeout",
    "pull_group": "pullGroup",
}
assert set(_ARGUMENTS) == ClusterArguments.__optional_keys__ == set(CLUSTER_ARGUMENTS)


def locate(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Location | None:
    """Return the location that parsed options name, by their names. Return None if none of them says where it is.

    A relative path starts at this process's working directory, and `~` is the home of its user. The keys of an account
    may be in `environment`. So call this on the driver: executors may have another working directory and user.
    Raises OptionError for an invalid address, for an address in place of a path, and for keys that are incomplete.
    """
    if options.get(NAME_SERVER) is not None:
        return _locate_cluster(options, environment)
    path = options.get(PATH)
    if path is None:
        return None
    refuse_address(path)
    log = options.get(COMMIT_LOG_PATH)
    log_text = None if log is None else ",".join(map(_absolute, log))
    return StoreDirectory(_absolute(path), log_text, options.get(READ_MODE, "auto"))


def _locate_cluster(options: Mapping[str, Any], environment: Mapping[str, str]) -> ClusterAddress:
    files = {
        name: None if options.get(name) is None else _absolute(options[name])
        for name in ("credentialsFile", "tlsCaFile", "tlsCertFile", "tlsKeyFile")
    }
    tls = TlsOptions(
        options.get("tlsVerify", "ca"),
        files["tlsCaFile"],
        files["tlsCertFile"],
        files["tlsKeyFile"],
        options.get("tlsKeyPassword"),
    )
    credentials = Credentials.of_options(
        options.get("accessKey"),
        options.get("secretKey"),
        options.get("securityToken"),
        files["credentialsFile"],
        environment,
    )
    return ClusterAddress(
        parse_name_servers(options[NAME_SERVER]),
        parse_broker_addresses(options.get("brokerAddresses", "")),
        credentials,
        tls if options.get("tls") else None,
        options.get("namespace", ""),
        options.get("requestTimeout", 3000),
        options.get("brokerDownTimeout"),
        options.get("retiredBrokers", ()),
        options.get("pullsInFlight"),
        options.get("pullGroup", f"{options.get('consumerGroup', 'rmq-spark')}-reader"),
    )


def locate_cluster(
    name_server: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
    *,
    group: str | None = None,
) -> ClusterAddress:
    """Return the cluster that a program names. `arguments` are the other options, by their Python names.

    Unless `pull_group` is given, messages are pulled in the name of a group that is named after the consumer `group`.
    Raises OptionError for an unknown or invalid argument.
    """
    unknown = [name for name in arguments if name not in _ARGUMENTS]
    if unknown:
        raise unknown_arguments("", unknown, _ARGUMENTS)
    verify = arguments.get("tls_verify", "ca")
    if verify not in ("ca", "full", "none"):
        raise OptionError(f"tls_verify={verify!r}; expected ca, full or none.")
    ineffective = [name for name, value in arguments.items() if name.startswith("tls_") and value is not None]
    if ineffective and not arguments.get("tls"):
        raise OptionError(
            f"{', '.join(ineffective)}: found no tls=True, without which connections are not encrypted; expected both. "
            f"Add tls=True, or leave {', '.join(ineffective)} out."
        )
    for name, least in (("request_timeout_ms", 1), ("broker_down_timeout_ms", 0)):
        check_setting(name, arguments.get(name, least), least)
    options = {_ARGUMENTS[name]: value for name, value in arguments.items() if value is not None}
    given = {} if group is None else {"consumerGroup": group}
    return _locate_cluster({"brokerDownTimeout": 300_000, **given, **options, NAME_SERVER: name_server}, environment)


def with_wait(location: Location, wait_ms: int) -> Location:
    """Return the location with the time that a task waits for a broker that is away. 0 means for ever."""
    return replace(location, broker_down_timeout_ms=wait_ms) if isinstance(location, ClusterAddress) else location


def from_mark(mark: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Location:
    """Return the location in a query's progress, which `Location.mark` returned.

    Progress has no secrets. So the account of a cluster is the one in the query's credentialsFile, or else the one in
    `environment`, if there is one.
    """
    if NAME_SERVER in mark:
        address = ClusterAddress.of_mark(mark)
        if address.credentials is not None:
            return address
        return replace(address, credentials=Credentials.of_options(None, None, None, None, environment))
    log = mark.get(COMMIT_LOG_PATH)
    return StoreDirectory(str(mark[PATH]), None if log is None else str(log))


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:  # the user does not exist, so `~name` is a folder
        return str(Path(path).absolute())
