"""The keys that sign requests, read from `Credentials` or from its file.

The file has one key on each line, as the file `conf/tools.yml` of RocketMQ's mqadmin:

    accessKey: reader
    secretKey: "a secret"
    securityToken: only for temporary accounts

A line that is empty or begins with # is ignored. Quotes around a value are optional. The file is UTF-8 text.
"""

from collections.abc import Callable
from pathlib import Path

from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.errors import OptionError

CHECK_PERIOD_S = 1.0  # how often a file is looked at
_FIELDS = {"accessKey": "access_key", "secretKey": "secret_key", "securityToken": "security_token"}
_MAX_FILE_BYTES = 64 << 10


class CredentialsReader:
    """The keys of an account, at the time of each request.

    A file is read again when it has changed, and is looked at once a second at most, or when a server refuses the keys.
    If it is missing or incomplete at that time, because it is being replaced, the keys that were read last stay valid.
    """

    def __init__(self, credentials: Credentials | None, monotonic_s: Callable[[], float]) -> None:
        self._keys = credentials if credentials is not None and credentials.file is None else None
        self._file = None if credentials is None else credentials.file
        self._monotonic_s = monotonic_s
        self._checked_s: float | None = None
        self._version: object = None

    def current(self) -> Credentials | None:
        """Return the keys, or None if requests are not signed.

        Raises OptionError if the file cannot be read for the first time, or if the keys are withheld in this process.
        """
        if self._file is not None:
            self._look_at(self._file)
        elif self._keys is not None and self._keys.is_withheld:
            raise OptionError(
                "the keys of the account are not in this process; expected the address that the reader was made with. "
                "Call ClusterAddress.with_secrets_of, or use credentialsFile."
            )
        return self._keys

    def read_again(self) -> Credentials | None:
        """Return the keys that are in the file at present. Otherwise like `current`."""
        self._checked_s = None
        return self.current()

    def _look_at(self, file: str) -> None:
        now_s = self._monotonic_s()
        if self._checked_s is not None and now_s < self._checked_s + CHECK_PERIOD_S:
            return
        try:
            status = Path(file).stat()
            version = status.st_mtime_ns, status.st_size, status.st_ino
            if version != self._version:
                self._keys = _parse(file, _read(file))
                self._version = version
        except OSError as error:
            if self._keys is None:
                raise OptionError(
                    f"the file of credentialsFile ({file}) cannot be read: {error.strerror}; expected the keys of an "
                    "account, on every machine of the query. Correct the option, or the rights of the file."
                ) from None
        except OptionError:
            if self._keys is None:
                raise
        self._checked_s = now_s


def _read(file: str) -> bytes:
    with open(file, "rb") as stream:
        return stream.read(_MAX_FILE_BYTES)


def _parse(file: str, data: bytes) -> Credentials:
    """Return the keys in the text of a file. Errors show no part of the text, because it may be secret."""
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise _refused(file, "bytes that are not UTF-8 text") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, value = line.partition(":")
        field = _FIELDS.get(name.strip())
        value = value.strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        if not colon or field is None:
            raise _refused(file, f"line {number} with another content")
        keys[field] = value
    missing = [name for name, field in _FIELDS.items() if not keys.get(field) and name != "securityToken"]
    if missing:
        raise _refused(file, f"no {' and no '.join(missing)}")
    return Credentials(keys["access_key"], keys["secret_key"], keys.get("security_token", ""))


def _refused(file: str, found: str) -> OptionError:
    return OptionError(
        f"the file of credentialsFile ({file}) has {found}; expected the lines accessKey: …, secretKey: …, and for "
        "temporary accounts securityToken: …. Correct the file."
    )
