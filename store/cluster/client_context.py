"""What the servers of one client share: the address of the cluster, TLS, the account, numbers, and names for errors."""

from collections.abc import Callable, Mapping
from typing import Any

from rmq_spark.store.cluster.address import ClusterAddress, split_address
from rmq_spark.store.cluster.answer_fields import AnswerError
from rmq_spark.store.cluster.answer_rules import Retry, make_error, rule_for
from rmq_spark.store.cluster.connection import Connection, ConnectionFailure, find_machines, make_tls_context
from rmq_spark.store.cluster.credentials import CredentialsReader
from rmq_spark.store.cluster.failures import ServerKind, ServerName, explain_answer, explain_failure
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.cluster.signing import sign_command
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.errors import BackendUnavailableError

RequestHook = Callable[[str, Command], Command | None]

_MAX_OPAQUE = (1 << 31) - 1


class ClientContext:
    """What the servers of one client share. Raises OptionError if a file of TLS cannot be used."""

    def __init__(
        self, address: ClusterAddress, monotonic_s: Callable[[], float], on_request: RequestHook | None
    ) -> None:
        self.address = address
        self._monotonic_s = monotonic_s
        self._on_request = on_request
        self._tls = None if address.tls is None else make_tls_context(address.tls)
        self._credentials = CredentialsReader(address.credentials, monotonic_s)
        self._names = {to: ServerName(to, ServerKind.NAME_SERVER) for to in address.name_servers}
        self._hidden: tuple[str, ...] = ()  # what must not be in errors
        self._opaque = 0
        self.connection_count = 0  # how many connections were made

    def connect(self, address: str) -> Connection:
        """Begin a connection."""
        name = self.name_of(address)
        host = name.name if name.kind is ServerKind.NAME_SERVER and name.name else None
        self.connection_count += 1
        return Connection(address, self._monotonic_s(), tls=self._tls, host=host)

    def encode(self, ticket: Ticket[Any], opaque: int) -> bytes:
        """Return the frame of a request, signed if there is an account. Raises OptionError."""
        ticket.keys = keys = self._credentials.current()
        if keys is None:
            frame: bytes = ticket.request.frame(opaque)
            return frame
        self._hidden = keys.access_key, keys.secret_key, keys.security_token
        command = ticket.request.command(opaque)
        return encode_command(sign_command(command, keys.access_key, keys.secret_key, keys.security_token))

    def has_new_keys(self, ticket: Ticket[Any], command: Command) -> bool:
        """Return whether a response refuses the account of a request, and the account's file has other keys by now."""
        rule = rule_for(ticket.request, command)
        return rule.retry is Retry.NEW_KEYS and self._credentials.read_again() != ticket.keys

    def next_opaque(self) -> int:
        """Return a number that no request in flight has: 1, 2, …"""
        self._opaque = self._opaque % _MAX_OPAQUE + 1
        return self._opaque

    def settle(self, ticket: Ticket[Any], command: Command) -> None:
        """Set the outcome of a request to a response, or to the error that its code stands for."""
        request = ticket.request
        ticket.is_answered = True
        rule = rule_for(request, command)
        if not rule.is_answer:
            ticket.is_for_others = rule.retry is Retry.ELSEWHERE
            ticket.fail(make_error(request, command, str(self.name_of(ticket.to)), self._hidden))
            return
        try:
            ticket.finish(request.read(command))
        except AnswerError as error:
            ticket.fail(BackendUnavailableError(explain_answer(self.name_of(ticket.to), request.purpose, str(error))))

    def is_for_later(self, ticket: Ticket[Any], command: Command) -> bool:
        """Return whether a response that refuses a request asks to repeat it at the same server."""
        return rule_for(ticket.request, command).retry is Retry.LATER

    def answer(self, address: str, command: Command) -> Command | None:
        """Return the response to a request of a server. None: it is not supported."""
        return None if self._on_request is None else self._on_request(address, command)

    def name_of(self, address: str) -> ServerName:
        """Return the name of a server for errors."""
        return self._names.get(address) or ServerName(address)

    def name_brokers(self, names: Mapping[str, str]) -> None:
        """Set the names of brokers by their addresses."""
        mapped = {address for _, address in self.address.broker_addresses}
        for to, name in names.items():
            self._names[to] = ServerName(to, ServerKind.BROKER, name, to in mapped)

    def find_name_servers(self) -> tuple[str, ...]:
        """Return the addresses of all machines that are name servers. A name that cannot be resolved stays."""
        machines: dict[str, None] = {}
        for address in self.address.name_servers:
            try:
                found = find_machines(address)
            except ConnectionFailure:
                found = [address]
            for machine in found:
                machines[machine] = None
                if machine != address:
                    host = split_address(address)[0]
                    self._names.setdefault(machine, ServerName(machine, ServerKind.NAME_SERVER, host))
        return tuple(machines)

    def explain(self, connection: Connection) -> str:
        """Return the text of the error for a connection that failed."""
        assert connection.failure is not None, connection.address
        return explain_failure(
            connection.failure,
            self.name_of(connection.address),
            uses_tls=self._tls is not None,
            ca_file=None if self.address.tls is None else self.address.tls.ca_file,
        )
