"""Brokers of a real RocketMQ that check accounts, or demand TLS, on stores that we wrote."""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compat_kit.clusters import run_reader, with_broker
from compat_kit.our_stores import broker_conf, open_small
from compat_kit.rocketmq import Broker, Java, free_port
from compat_kit.rows import Rows, our_rows, table_rows

NAME = "broker-a"
GROUP = "rmq-spark-reader"
RESET_GROUP = "billing"  # of which operators may move the offsets
MEMBERS = "shipping"  # of which members may consume
READ, CLOSED = "orders", "salaries"  # the second one may be read by nobody but administrators
SECRET = "planted-secret-of-readers"
ADMIN = ("administrator", "planted-secret-of-administrator")
Rights = Mapping[str, Mapping[str, list[str]]]  # by account and resource; a group may be "Group:*"
# The bare reader has no right for the bounds of a topic (5.3), the lonely one no group.
_SUB, _SUB_GET = ["Sub"], ["Sub", "Get"]
RIGHTS: Rights = {
    "full-reader": {f"Topic:{READ}": _SUB_GET, f"Group:{GROUP}": _SUB},
    "bare-reader": {f"Topic:{READ}": _SUB, f"Group:{GROUP}": _SUB},
    "lonely-reader": {f"Topic:{READ}": _SUB_GET},
    "full-member": {f"Topic:{READ}": _SUB_GET, f"Group:{GROUP}": _SUB, f"Group:{MEMBERS}": _SUB_GET},
    "operator": {
        f"Topic:{READ}": [*_SUB_GET, "Update"],
        f"Group:{RESET_GROUP}": [*_SUB_GET, "Update"],
        f"Group:{GROUP}": _SUB,
    },
    "half-operator": {f"Topic:{READ}": _SUB_GET, f"Group:{RESET_GROUP}": _SUB_GET, f"Group:{GROUP}": _SUB},
}


def keys_of(account: str, secret: str = SECRET) -> dict[str, str]:
    """Return the options of an account."""
    return {"accessKey": account, "secretKey": secret}


@dataclass
class SecuredBroker:
    """A broker on a store with messages in two topics. `written` are the rows of the topic that may be read."""

    java: Java
    folder: Path
    broker: Broker
    written: Rows

    @property
    def address(self) -> str:
        """The address of the broker itself."""
        return f"127.0.0.1:{self.broker.port}"

    def read(self, cases: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """Return for each case the rows that a query with its options reads, or the text of its error."""
        given = {"subscribe": READ, "requestTimeout": "5s"}
        asked = {
            name: {option: value for option, value in {**given, **options}.items() if value}
            for name, options in cases.items()
        }
        outcomes = run_reader(self.java, self.broker.namesrv, self.folder, "try_reads", cases=asked)
        for name, (found, seconds) in outcomes.items():
            print(f"{self.java.version} {name}: {seconds:.2f} s, {found if isinstance(found, str) else len(found)}")
        return {
            name: found if isinstance(found, str) else with_broker(table_rows(found), NAME)
            for name, (found, _) in outcomes.items()
        }

    def call(self, how: str, **arguments: object) -> None:
        """Call another function of `cluster_reader.py`."""
        run_reader(self.java, self.broker.namesrv, self.folder, how, **arguments)


def prepare(java: Java, folder: Path, *, empty_topics: Iterable[str] = (), **conf: object) -> SecuredBroker:
    """Write a store, and return a broker on it that was not started."""
    store = folder / "store"
    with open_small(store) as writer:
        for topic, count in ((READ, 60), (CLOSED, 5), *((one, 0) for one in empty_topics)):
            writer.create_topic(topic, 2)
            for number in range(count):
                writer.send(topic, b"%d" % number * number, tags="a", queue_id=number % 2)
    written = {queue: rows for queue, rows in our_rows(store).items() if queue.topic == READ}
    broker = Broker(java, store, port=free_port(), **{**broker_conf(), "brokerName": NAME, **conf})
    return SecuredBroker(java, folder, broker, with_broker(written, NAME))


def with_accounts(java: Java, folder: Path, rights: Rights = RIGHTS) -> SecuredBroker:
    """Return a broker that checks accounts: ACL 1.0 of 4.9, or ACL 2.0 of 5.3. Its TLS is that of the defaults.

    A broker of 5.3 has only the administrator at first: see `create_users`. It alone has the rights Get and Create.
    """
    if not java.is_5:
        return prepare(replace(java, files={"conf/plain_acl.yml": _plain_acl(rights)}), folder, aclEnable=True)
    package = "org.apache.rocketmq.auth"
    return prepare(
        java,
        folder,
        authenticationEnabled=True,
        authenticationProvider=f"{package}.authentication.provider.DefaultAuthenticationProvider",
        authenticationMetadataProvider=f"{package}.authentication.provider.LocalAuthenticationMetadataProvider",
        initAuthenticationUser=json.dumps({"username": ADMIN[0], "password": ADMIN[1]}),
        authorizationEnabled=True,
        authorizationProvider=f"{package}.authorization.provider.DefaultAuthorizationProvider",
        authorizationMetadataProvider=f"{package}.authorization.provider.LocalAuthorizationMetadataProvider",
    )


def create_users(broker: SecuredBroker, rights: Rights = RIGHTS) -> None:
    """Create the accounts at a running broker of 5.3. One of 4.9 has them in its file."""
    if broker.java.is_5:
        users = dict.fromkeys(rights, SECRET)
        broker.call("create_users", broker=broker.address, keys=ADMIN, users=users, policies=rights)


def _plain_acl(rights: Rights) -> str:
    accounts: list[dict[str, Any]] = [
        {
            "accessKey": name,
            "secretKey": SECRET,
            "admin": False,
            "defaultTopicPerm": "DENY",
            "defaultGroupPerm": "SUB" if "Group:*" in given else "DENY",
            "topicPerms": _perms(given, "Topic:"),
            "groupPerms": _perms(given, "Group:"),
        }
        for name, given in rights.items()
    ]
    accounts.append({"accessKey": ADMIN[0], "secretKey": ADMIN[1], "admin": True})
    return json.dumps({"globalWhiteRemoteAddresses": [], "accounts": accounts})  # JSON is YAML


def _perms(given: Mapping[str, list[str]], kind: str) -> list[str]:
    """Return the rights on topics or groups that ACL 1.0 has."""
    return [
        f"{resource.removeprefix(kind)}={'|'.join(one.upper() for one in actions if one in ('Pub', 'Sub'))}"
        for resource, actions in given.items()
        if resource.startswith(kind) and resource != f"{kind}*"
    ]


class TlsFiles:
    """The files with which a name server and a broker demand TLS. They read them again after a change."""

    def __init__(self, folder: Path, certificates: Path) -> None:
        self.folder, self._certificates = folder, certificates
        folder.mkdir(parents=True, exist_ok=True)
        self.properties = {"tls.config.file": str(folder / "tls.properties"), "tls.server.mode": "enforcing"}

    def use(self, certificate: str, *, demands_client: bool = False) -> str:
        """Write the files for one of the certificates of the tests, and return its text."""
        settings = {
            "tls.test.mode.enable": "false",
            "tls.server.need.client.auth": "require" if demands_client else "none",
            "tls.server.authClient": str(demands_client).lower(),
            "tls.server.trustCertPath": self._certificates / "authority.crt",
            "tls.server.keyPath": self.folder / "server.key",
            "tls.server.certPath": self.folder / "server.crt",
            "tls.client.authServer": "false",
        }
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self.folder / "tls.properties").write_text(text)
        source = self._certificates / f"{certificate}.pem"
        for name in ("server.key", "server.crt"):  # a server waits until both have changed
            shutil.copy(source, self.folder / name)
        return source.read_text()
