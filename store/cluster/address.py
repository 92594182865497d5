"""The location of a live cluster: name servers, account, TLS. Every partition and every task carries it.

Secrets are the secret key, the security token and the password of the TLS key. `repr`, `describe` and `mark` show none
of them. A pickled `ClusterAddress` contains them, because a task must sign its requests. Spark ships and logs pickled
partitions, so a partition carries `ClusterAddress.without_secrets()`, and the task calls `with_secrets_of` with the
address of the reader that Spark pickled into the task's function. With `credentialsFile` only the path travels, and
every process reads the file itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from rmq_spark.store.backend import (
    Backend,
    BatchSink,
    Capability,
    CommitTerms,
    Guarantee,
    SendBackSink,
    SendBackTerms,
    SinkTerms,
)
from rmq_spark.store.errors import OptionError

NAME_SERVER_PORT = 9876  # the default of NamesrvStartup
DEFAULT_PULL_GROUP = "rmq-spark-reader"  # the group of pulls if no other one was chosen
# The variables of the environment that have the account's keys if no option gives them.
ACCESS_KEY_VARIABLE, SECRET_KEY_VARIABLE = "RMQ_ACCESS_KEY", "RMQ_SECRET_KEY"
_NAME_SERVER, _BROKER_ADDRESSES, _NAMESPACE = "nameServer", "brokerAddresses", "namespace"
_CREDENTIALS_FILE, _TLS_VERIFY = "credentialsFile", "tlsVerify"
_TLS_FILES = {"tlsCaFile": "ca_file", "tlsCertFile": "cert_file", "tlsKeyFile": "key_file"}  # and fields of TlsOptions
_PULL_GROUP = "pullGroup"

_WRITE_WAIT_MS = 300_000  # the default of brokerDownTimeout for writes


@dataclass(frozen=True, slots=True)
class Credentials:
    """The account that signs requests (SessionCredentials): keys, or the path of a file with them.

    `file` is absolute; `store.cluster.credentials` describes and reads it. `is_withheld` says that the account has
    keys which this copy does not contain. `repr` hides the keys.
    """

    access_key: str = ""
    secret_key: str = ""
    security_token: str = ""
    file: str | None = None
    is_withheld: bool = False

    def __repr__(self) -> str:
        return "Credentials(…)" if self.file is None else f"Credentials(file={self.file!r})"

    @classmethod
    def of_options(
        cls,
        access_key: str | None,
        secret_key: str | None,
        security_token: str | None,
        file: str | None,
        environment: Mapping[str, str],
    ) -> "Credentials | None":
        """Return the account in the options, or else the one in the environment. None: requests are not signed.

        Raises OptionError if the options contradict each other or are incomplete.
        """
        given = {"accessKey": access_key, "secretKey": secret_key, "securityToken": security_token}
        present = [name for name, value in given.items() if value]
        if file:
            if present:
                raise OptionError(
                    f"the options credentialsFile and {', '.join(present)} were given; expected the file or the keys. "
                    f"Remove credentialsFile, or {', '.join(present)}."
                )
            return cls(file=file)
        if not present:
            access_key, secret_key = environment.get(ACCESS_KEY_VARIABLE), environment.get(SECRET_KEY_VARIABLE)
            if not access_key and not secret_key:
                return None
            names = ACCESS_KEY_VARIABLE, SECRET_KEY_VARIABLE
        else:
            names = "accessKey", "secretKey"
        for name, value in zip(names, (access_key, secret_key), strict=True):
            if not value:
                where = "the environment variable" if names[0] == ACCESS_KEY_VARIABLE else "the option"
                raise OptionError(
                    f"{where} {name} is missing; expected both {names[0]} and {names[1]}. Set both, or none of them."
                )
        keys = access_key or "", secret_key or "", security_token or ""
        try:
            "".join(keys).encode()
        except UnicodeEncodeError:
            raise OptionError(
                f"{names[0]} or {names[1]} contains bytes that are not UTF-8 text; expected text. Correct the value."
            ) from None
        return cls(*keys)


TlsVerify = Literal["ca", "full", "none"]


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How connections are encrypted, if they are (TlsHelper). The files must exist on every machine.

    `verify` is what is checked of a server's certificate: "ca" that `ca_file` (None: the system's authorities) issued
    it, "full" that it also names the host, "none" nothing. `cert_file` and `key_file` are the client's own certificate
    and key. `repr` hides the password of the key.
    """

    verify: TlsVerify = "ca"
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Where a cluster is, and how to connect to it. A `Location`.

    `name_servers` are addresses, such as "ns1:9876". `broker_addresses` are pairs of a broker's name and the address
    that replaces the one in the route. `tls` is None for plain connections, `credentials` None for unsigned requests.
    `broker_down_timeout_ms` None means the default of the kind of read; `pulls_in_flight` None means that the answers
    decide. `pull_group` is the group in whose name tasks pull. `known_addresses` are pairs of a broker's name and the
    address in the last route that the driver has seen. Tasks use it while no name server lists the broker.
    """

    name_servers: tuple[str, ...]
    broker_addresses: tuple[tuple[str, str], ...] = ()
    credentials: Credentials | None = None
    tls: TlsOptions | None = None
    namespace: str = ""
    request_timeout_ms: int = 3000
    broker_down_timeout_ms: int | None = None
    retired_brokers: tuple[str, ...] = ()
    pulls_in_flight: int | None = None
    pull_group: str = ""
    known_addresses: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """A cluster can be read and written, shares queues among consumers, and names the brokers of its queues."""
        return frozenset(
            {
                Capability.BROKERS,
                Capability.NAME_SERVERS,
                Capability.GROUP_OFFSETS,
                Capability.GROUPS,
                Capability.FENCES,
                Capability.SIZE_ESTIMATES,
                Capability.WRITES,
                Capability.EXACTLY_ONCE,
                Capability.AT_LEAST_ONCE,
                Capability.SEND_BACK,
            }
        )

    @property
    def write_wait_ms(self) -> float:
        """How long a task waits for a broker that stores nothing (ms); infinity for brokerDownTimeout=0."""
        wait_ms = self.broker_down_timeout_ms
        return _WRITE_WAIT_MS if wait_ms is None else wait_ms or math.inf

    def describe(self) -> str:
        """Return the name of the cluster for errors and logs, without secrets."""
        inside = f", namespace {self.namespace}" if self.namespace else ""
        return f"the cluster at {_NAME_SERVER}={self._name_server_text}{inside}"

    def sharing_advice(self) -> str:
        """Return what to do if the driver and the executors do not see the same cluster."""
        return (
            "Every executor must reach the same name servers, and every broker at the address in the route; the option "
            f"{_BROKER_ADDRESSES} gives other addresses."
        )

    def mark(self) -> dict[str, str]:
        """Return the cluster as JSON for a query's progress, without secrets. `of_mark` reads it.

        Paths of files with keys are not secret, but the password of a key is one.
        """
        addresses = ";".join(f"{name}={address}" for name, address in self.broker_addresses)
        tls = self.tls
        optional = {
            _NAMESPACE: self.namespace,
            _BROKER_ADDRESSES: addresses,
            _CREDENTIALS_FILE: self.credentials and self.credentials.file,
            _TLS_VERIFY: tls and tls.verify,
            _PULL_GROUP: self.pull_group,
            **({name: getattr(tls, field) for name, field in _TLS_FILES.items()} if tls else {}),
        }
        return {_NAME_SERVER: self._name_server_text} | {name: text for name, text in optional.items() if text}

    @classmethod
    def of_mark(cls, mark: Mapping[str, str]) -> "ClusterAddress":
        """Return the cluster that `mark` returned. It lacks the keys of an account that are not in a file."""
        verify: Any = mark.get(_TLS_VERIFY)
        files = {field: mark.get(name) for name, field in _TLS_FILES.items()}
        return cls(
            parse_name_servers(mark[_NAME_SERVER]),
            parse_broker_addresses(mark.get(_BROKER_ADDRESSES, "")),
            Credentials(file=mark[_CREDENTIALS_FILE]) if _CREDENTIALS_FILE in mark else None,
            None if verify is None else TlsOptions(verify, **files),
            namespace=mark.get(_NAMESPACE, ""),
            pull_group=mark.get(_PULL_GROUP, ""),
        )

    def without_secrets(self) -> "ClusterAddress":
        """Return a copy whose pickled form contains no secret, for partitions. A credentials file's path stays."""
        credentials, tls = self.credentials, self.tls
        if credentials is not None and credentials.file is None:
            credentials = Credentials(is_withheld=True)
        return replace(self, credentials=credentials, tls=tls and replace(tls, key_password=None))

    def with_secrets_of(self, source: "ClusterAddress") -> "ClusterAddress":
        """Return a copy with the account and the TLS options of `source`, the address from which this one was made."""
        return replace(self, credentials=source.credentials, tls=source.tls)

    def open(self) -> Backend:
        """Return a backend, which connects at its first call."""
        # By name, because the backend and its client import this module.
        backend: Backend = import_module("rmq_spark.store.cluster.backend").ClusterBackend(self)
        return backend

    def sink(self, terms: SinkTerms, commit: CommitTerms) -> BatchSink:
        """Return a sink for new messages, with the guarantee of the terms."""
        sink: BatchSink
        if terms.guarantee is Guarantee.AT_LEAST_ONCE:
            sink = import_module("rmq_spark.store.cluster.sink").ClusterSink(self, terms, commit)
        else:
            sink = import_module("rmq_spark.store.cluster.exactly_once.sink").ExactSink(self, terms, commit)
        return sink

    def send_back_sink(self, terms: SendBackTerms, commit: CommitTerms) -> SendBackSink:
        """Return a sink for messages that a group failed to consume, which sends each back at least once."""
        module = import_module("rmq_spark.store.cluster.send_back_sink")
        sink: SendBackSink = module.ClusterSendBackSink(self, terms, commit)
        return sink

    @property
    def _name_server_text(self) -> str:
        return ";".join(self.name_servers)


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port". Raises ValueError if it is none.

    The host of an IPv6 address comes without its brackets. A broker writes "[fe80::1%eth0]:10911" into the route
    (NetworkUtil#normalizeHostAddress), or "fe80::1:10911" if its brokerIP1 has no brackets. So the last colon counts,
    as in NetworkUtil#string2SocketAddress.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not colon or set(host) & set("[]/@= \t") or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{text!r} is not an address; expected host:port")
    if not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} has the port {port}; expected 1 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_name_servers(text: str) -> tuple[str, ...]:
    """Return the addresses in the option nameServer, each once, in their order. Raises OptionError.

    They are separated by ";" or ",". Follows NameServerAddressUtils and RemotingClient#updateNameServerAddressList.
    """
    addresses = [_parse_address(_NAME_SERVER, part, f"ns1:{NAME_SERVER_PORT}") for part in _split_list(text)]
    if not addresses:
        raise OptionError(
            f"the option {_NAME_SERVER} is {text!r}; expected one or more addresses. Write for example "
            f"{_NAME_SERVER}=ns1:{NAME_SERVER_PORT};ns2:{NAME_SERVER_PORT}."
        )
    return tuple(dict.fromkeys(addresses))


def parse_broker_addresses(text: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs of broker name and address in the option brokerAddresses, sorted. Raises OptionError."""
    pairs: dict[str, str] = {}
    for part in _split_list(text):
        name, equals, address = part.rpartition("=")
        name = name.strip()
        if not equals or not name:
            raise OptionError(
                f"the option {_BROKER_ADDRESSES} has the part {part!r}; expected broker=host:port. Separate several "
                "with a semicolon, for example broker-a=host1:10911;broker-b=host2:10911."
            )
        if name in pairs:
            raise OptionError(
                f"the option {_BROKER_ADDRESSES} has two addresses for the broker {name}; expected one for each "
                "broker. Remove one of them."
            )
        pairs[name] = _parse_address(_BROKER_ADDRESSES, address, f"{name}=host:10911")
    return tuple(sorted(pairs.items()))


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.replace(",", ";").split(";") if part.strip()]


def _parse_address(option: str, text: str, example: str) -> str:
    """Return an address from an option in its normal form. An IPv6 address must have brackets there."""
    try:
        host, port = split_address(text)
        if ":" in host and "[" not in text:
            raise ValueError(f"{text.strip()!r} has several colons; expected brackets around an IPv6 address")
    except ValueError as error:
        raise OptionError(f"the option {option}: {error}. Write for example {example} or [::1]:9876.") from None
    return join_address(host, port)
