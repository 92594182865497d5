"""Why a server does not answer, as texts of errors: the server, what was found, and what to do next."""

from dataclasses import dataclass
from enum import Enum

from rmq_spark.store.cluster.connection import ConnectionFailure, FailureKind


class ServerKind(Enum):
    """What a server is. The value is the word for it."""

    NAME_SERVER = "name server"
    BROKER = "broker"
    UNKNOWN = "server"


@dataclass(frozen=True, slots=True)
class ServerName:
    """A server as errors name it.

    `name` is a broker's name, or the host that a name server's address was found by, or "". `is_mapped` says that the
    option brokerAddresses gave the address.
    """

    address: str
    kind: ServerKind = ServerKind.UNKNOWN
    name: str = ""
    is_mapped: bool = False

    def __str__(self) -> str:
        if self.kind is ServerKind.BROKER and self.name:
            return f"broker {self.name} at {self.address}"
        return f"{self.kind.value} {self.address}" + (f" (of {self.name})" if self.name else "")

    @property
    def advice(self) -> str:
        """What to check if the server cannot be reached."""
        if self.kind is ServerKind.NAME_SERVER:
            return "Check the option nameServer, and whether the name server runs (its default port is 9876)."
        if self.is_mapped:
            return "Check the option brokerAddresses, which gives this address, and whether the broker runs."
        return (
            "Check whether the broker runs. The address is the one that it registered (brokerIP1 and listenPort of its "
            "configuration). If this machine must use another one, set the option brokerAddresses="
            f"{self.name or 'broker-name'}=host:port, or correct brokerIP1."
        )


def explain_failure(failure: ConnectionFailure, server: ServerName, *, uses_tls: bool, ca_file: str | None) -> str:
    """Return the text of the error for a connection that could not be made, or that had no response before its end."""
    if failure.kind is FailureKind.CERTIFICATE:
        authority = f"the authorities in tlsCaFile={ca_file}" if ca_file else "the authorities of this machine"
        return (
            f"{server} was refused: its certificate is not accepted ({failure.detail}); expected a valid certificate "
            f"that {authority} issued. Set tlsCaFile to the cluster's authority, or renew the certificate. A server "
            "in test mode made its certificate itself, and only tlsVerify=none accepts it."
        )
    if failure.kind is FailureKind.TLS:
        return (
            f"{server} did not make a TLS connection: {failure.detail}; expected a server that accepts TLS. Set "
            "tls=false if the server has no TLS (tls.server.mode=disabled), or tlsCertFile and tlsKeyFile if it "
            "demands a certificate of clients."
        )
    if failure.kind is FailureKind.GARBAGE:
        return (
            f"{server} answered bytes that are not a frame of RocketMQ: {failure.detail}. Check that the address "
            f"belongs to RocketMQ's remoting protocol (name server 9876, broker 10911). {server.advice}"
        )
    if failure.kind is FailureKind.LOST:
        tls = "" if uses_tls else " A server that demands TLS does so too; then set tls=true."
        return (
            f"{server} did not answer: {failure.detail}; expected a response. Check that the address belongs to "
            f"RocketMQ's remoting protocol (name server 9876, broker 10911).{tls} {server.advice}"
        )
    expected = {
        FailureKind.UNRESOLVED: "a name that this machine can resolve",
        FailureKind.REFUSED: "a server that listens at this port",
        FailureKind.UNREACHABLE: "a network that leads to this machine",
    }.get(failure.kind, "a server that this machine can reach")
    return f"{server} cannot be reached: {failure.detail}; expected {expected}. {server.advice}"


def explain_silence(server: ServerName, purpose: str, timeout_ms: int, *, is_connected: bool) -> str:
    """Return the text of the error for a request without a response."""
    if not is_connected:
        return (
            f"cannot {purpose}: {server} cannot be reached: no connection within {timeout_ms} ms; expected a server "
            f"that this machine can reach. {server.advice}"
        )
    return (
        f"cannot {purpose}: {server} did not answer within {timeout_ms} ms; expected a response. Check that the "
        f"address belongs to RocketMQ's remoting protocol (name server 9876, broker 10911). {server.advice} If the "
        "server is only slow, raise the option requestTimeout."
    )


def explain_end(server: ServerName, why: str) -> str:
    """Return the text of the error for a request that had to go on a connection that is not used any more."""
    return (
        f"the only connection to {server} has ended: {why}; expected that it lasts, because requests must not go on "
        f"another one. Begin again with a new client. {server.advice}"
    )


def explain_answer(server: ServerName, purpose: str, detail: str) -> str:
    """Return the text of the error for a response whose contents are invalid."""
    return (
        f"cannot {purpose}: {server} did not send a response of RocketMQ: {detail}. Check the version of the server, "
        f"and that the address belongs to it. {server.advice}"
    )


def explain_unknown(server: ServerName, purpose: str, detail: str) -> str:
    """Return the text of the error for a request that was sent, must not be repeated, and has no response."""
    return (
        f"the outcome of a request to {server} is unknown (to {purpose}): {detail}; expected a response. The server "
        "has executed it or not. Find out before you repeat it."
    )
