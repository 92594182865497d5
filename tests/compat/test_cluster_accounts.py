"""Accounts and TLS of real brokers: what a query reads, or what its user is told.

Each version has two brokers: one checks accounts and takes plain connections and TLS, the other one demands TLS.
"""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import support.loopback_server
from compat_kit import secured
from compat_kit.clusters import run_doctor
from compat_kit.rocketmq import Java
from compat_kit.rows import count, differences
from compat_kit.secured import CLOSED, GROUP, MEMBERS, NAME, READ, SecuredBroker, TlsFiles, keys_of

pytestmark = pytest.mark.compat

CERTIFICATES = Path(support.loopback_server.__file__).parent / "certificates"
OF_AUTHORITY = {"tls": "true", "tlsCaFile": str(CERTIFICATES / "authority.crt")}
OF_OTHER = {"tls": "true", "tlsCaFile": str(CERTIFICATES / "other-authority.crt")}
CLIENT = {name: str(CERTIFICATES / "client.pem") for name in ("tlsCertFile", "tlsKeyFile")}
CLIENT_WITH_PASSWORD = CLIENT | {
    "tlsKeyFile": str(CERTIFICATES / "client-with-password.key"),
    "tlsKeyPassword": "test-password",
}
UNCHECKED = {"tls": "true", "tlsVerify": "none"}

_ROWS = None  # the outcome of a query that reads everything
_WRONG_ACCOUNT = "OptionError: .*{broker}.*the account is unknown, or its key is wrong.*accessKey.*credentialsFile"
_FULL = keys_of("full-reader")
_MEMBER = {"consumerGroup": MEMBERS, "groupFallback": "earliest", "pullGroup": GROUP}
# Options of a query, and the text of its error.
ACCOUNT_CASES: dict[str, tuple[Mapping[str, str], str | None]] = {
    "right key": (_FULL, _ROWS),
    "key in a file": ({"credentialsFile": "{folder}/keys"}, _ROWS),
    "wrong key": (keys_of("full-reader", "another-secret"), _WRONG_ACCOUNT),
    "unknown account": (keys_of("nobody-at-all"), _WRONG_ACCOUNT),
    "no key": ({}, _WRONG_ACCOUNT),
    "no right of a topic": (
        _FULL | {"subscribe": CLOSED},
        f"NoPermissionError: .*{CLOSED}.*SUB of the topic and the group",
    ),
    "no right of one of two topics": (
        _FULL | {"subscribe": f"{READ},{CLOSED}"},
        f"NoPermissionError: .*{CLOSED}.*SUB of the topic and the group",
    ),
    "no right of the group": (
        keys_of("lonely-reader"),
        "NoPermissionError: .*SUB of the topic and the group.*pullGroup",
    ),
    "another group": (
        _FULL | {"pullGroup": "another-group"},
        "NoPermissionError: .*another-group.*SUB of the topic and the group.*pullGroup",
    ),
    "no right for bounds": (keys_of("bare-reader"), _ROWS),
    "no right for bounds, by time": (keys_of("bare-reader") | {"startingTimestamp": "2020-01-01T00:00:00Z"}, _ROWS),
    "member": (keys_of("full-member") | _MEMBER, _ROWS),
    "member of another group": (
        keys_of("full-reader") | _MEMBER,
        f"NoPermissionError: .*{MEMBERS}.*SUB of the group|NoPermissionError: .*{MEMBERS}.*Get of the group",
    ),
    "pattern": (_FULL | {"subscribe": "", "subscribePattern": "ord.*"}, _ROWS),
    "tags": (_FULL | {"tags": "a"}, _ROWS),
    "sql92": (_FULL | {"sql92": "TAGS = 'a'"}, _ROWS),
    "key and TLS": (_FULL | UNCHECKED, _ROWS),
    "TLS with a certificate that the server made": (
        _FULL | {"tls": "true"},
        "BackendUnavailableError: .*{namesrv}.*certificate is not accepted.*tlsCaFile.*tlsVerify=none",
    ),
}
_REFUSED = "BackendUnavailableError: .*{namesrv}.*certificate is not accepted .*"
# The server's certificate and whether it demands one of clients; then queries as above.
TLS_CASES: dict[tuple[str, bool], dict[str, tuple[Mapping[str, str], str | None]]] = {
    ("localhost", False): {
        "authority": (OF_AUTHORITY, _ROWS),
        "authority and host": (OF_AUTHORITY | {"tlsVerify": "full"}, _ROWS),
        "unchecked": (UNCHECKED, _ROWS),
        "plain connection": ({}, "BackendUnavailableError: .*{namesrv}.*set tls=true"),
        "other authority": (OF_OTHER, _REFUSED + "tlsCaFile=.*other-authority.crt"),
        "authorities of the machine": ({"tls": "true"}, _REFUSED + "authorities of this machine"),
    },
    ("expired", False): {
        "expired": (OF_AUTHORITY, _REFUSED + "expired.*renew the certificate"),
        "expired and unchecked": (UNCHECKED, _ROWS),
    },
    ("elsewhere", False): {
        "another host": (OF_AUTHORITY | {"tlsVerify": "full"}, _REFUSED + "not valid for '127.0.0.1'"),
        "another host and unchecked": (OF_AUTHORITY, _ROWS),
    },
    ("localhost", True): {
        "client's certificate": (OF_AUTHORITY | CLIENT, _ROWS),
        "client's certificate with a password": (OF_AUTHORITY | CLIENT_WITH_PASSWORD, _ROWS),
        "no client's certificate": (OF_AUTHORITY, "BackendUnavailableError: .*{namesrv}.*tlsCertFile and tlsKeyFile"),
    },
}


@dataclass
class Outcomes:
    """The rows that queries of a broker read, or the texts of their errors."""

    served: SecuredBroker
    found: dict[str, Any]

    def check(self, case: str, expected: str | None) -> None:
        found = self.found[case]
        if expected is None:
            assert not isinstance(found, str), found
            assert differences(found, self.served.written) == []
            assert count(found) == 60
            return
        assert isinstance(found, str), "an error is expected"
        names = {"{broker}": self.served.address, "{namesrv}": self.served.broker.namesrv}
        for name, address in names.items():
            expected = expected.replace(name, re.escape(address))
        assert re.search(expected, found), found
        assert "planted" not in found
        assert "test-password" not in found


@pytest.fixture(scope="module")
def brokers(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SecuredBroker, SecuredBroker]]:
    """The broker that checks accounts and the one that demands TLS."""
    folder = tmp_path_factory.mktemp(f"secured-{java.version}")
    files = TlsFiles(folder / "tls" / "certificates", CERTIFICATES)
    files.use("localhost")
    encrypted = replace(java, properties=files.properties)
    with_accounts = secured.with_accounts(java, folder / "accounts")
    with_tls = secured.prepare(encrypted, folder / "tls", useTLS=True)
    with ExitStack() as stack:

        def start(served: SecuredBroker) -> None:
            served.broker.start()
            stack.callback(served.broker.kill)  # faster than a stop, and nobody looks at its store

        with ThreadPoolExecutor() as pool:
            list(pool.map(start, (with_accounts, with_tls)))
        yield with_accounts, with_tls


@pytest.fixture(scope="module")
def accounts(brokers: tuple[SecuredBroker, SecuredBroker]) -> Outcomes:
    served = brokers[0]
    secured.create_users(served)
    # A server's first handshake may take seconds, because it makes a certificate.
    served.call("await_certificates", servers=[served.broker.namesrv, served.address], pem=None)
    (served.folder / "keys").write_text(f"accessKey: full-reader\nsecretKey: {secured.SECRET}\n")
    cases = {
        name: {option: value.replace("{folder}", str(served.folder)) for option, value in options.items()}
        for name, (options, _) in ACCOUNT_CASES.items()
    }
    return Outcomes(served, served.read(cases))


@pytest.fixture(scope="module")
def tls(brokers: tuple[SecuredBroker, SecuredBroker]) -> Outcomes:
    served, found = brokers[1], dict[str, Any]()
    files = TlsFiles(served.folder / "certificates", CERTIFICATES)
    for (certificate, demands_client), cases in TLS_CASES.items():
        pem = files.use(certificate, demands_client=demands_client)
        served.call("await_certificates", servers=[served.broker.namesrv, served.address], pem=pem)
        found |= served.read({name: options for name, (options, _) in cases.items()})
    return Outcomes(served, found)


@pytest.mark.parametrize("case", ACCOUNT_CASES)
def test_account(accounts: Outcomes, case: str) -> None:
    accounts.check(case, ACCOUNT_CASES[case][1])


@pytest.mark.parametrize(
    ("case", "expected"), [(case, text) for cases in TLS_CASES.values() for case, (_, text) in cases.items()]
)
def test_tls(tls: Outcomes, case: str, expected: str | None) -> None:
    tls.check(case, expected)


def examine(served: SecuredBroker, account: str, topic: str = READ) -> tuple[int, list[str]]:
    """Return the exit status of `rmq doctor`, and the lines that it prints."""
    words = ("--topic", topic, "--request-timeout", "5", "--access-key", account)
    status, lines = run_doctor(served.java, served.broker.namesrv, *words, RMQ_SECRET_KEY=secured.SECRET)
    assert not [line for line in lines if "planted" in line]
    return status, lines


# Account, topic, what is missing, and the next step.
DOCTOR_CASES = (
    (
        "full-reader",
        CLOSED,
        f"topic {CLOSED} on {NAME}: read a topic: the account lacks the right .* {CLOSED}",
        "topic Sub",
    ),
    ("lonely-reader", READ, f"topic {READ} on {NAME}: read a topic: .* the right .* group {GROUP}", "option pullGroup"),
    ("nobody-at-all", READ, f"broker {NAME} at {{broker}}: .* the account is unknown", "accessKey, secretKey"),
)


@pytest.mark.parametrize(("account", "topic", "missing", "step"), DOCTOR_CASES, ids=[case[0] for case in DOCTOR_CASES])
def test_doctor_names_the_right_that_an_account_lacks(
    accounts: Outcomes, account: str, topic: str, missing: str, step: str
) -> None:
    status, lines = examine(accounts.served, account, topic)
    assert (status, lines[-1]) == (1, "A query cannot run: 1 missing.")
    (at,) = [number for number, line in enumerate(lines) if line.startswith("missing")]
    assert re.search(missing.replace("{broker}", re.escape(accounts.served.address)), lines[at]), lines[at]
    assert step in lines[at + 1]


def test_doctor_warns_of_rights_that_make_a_query_faster(accounts: Outcomes) -> None:
    for account, count_of_5 in (("full-reader", 0), ("bare-reader", 3)):
        status, lines = examine(accounts.served, account)
        assert (status, lines[-1]) == (0, "A query can run. Rights for writing were not tried.")
        warned = [number for number, line in enumerate(lines) if line.startswith("warning")]
        assert len(warned) == (count_of_5 if accounts.served.java.is_5 else 0)
        assert all("the account lacks the right" in lines[number] for number in warned)
        assert all("Ask an administrator for the right: topic Get" in lines[number + 1] for number in warned)
