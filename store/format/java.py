"""Java's hash of a text, and the bytes of a host (address and port).

Source: String#hashCode, IndexFile#indexKeyHashMethod, MessageExt#socketAddress2ByteBuffer (4.9, 5.3).
"""

import ipaddress
import struct
from dataclasses import dataclass


def string_hash(text: str) -> int:
    """Return Java's String#hashCode of a text, a signed 32-bit number.

    For each UTF-16 unit of the text: h = 31·h + unit.
    """
    data = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for unit in struct.unpack(f">{len(data) // 2}H", data):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def index_key_hash(key: str) -> int:
    """Return the hash of `key` in the key index, from 0 to 2^31-1. `key` has the form `topic#key`."""
    value = abs(string_hash(key))
    return value if value < 1 << 31 else 0  # Java's abs of -2^31 is negative, and the index then uses 0


@dataclass(frozen=True, slots=True)
class Host:
    """IP address and port of a producer or broker. str() returns `address:port`, like "10.0.0.1:9" or "[::1]:9"."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def decode_host(field: bytes) -> Host:
    """Decode the host field of a record: the IP address (4 or 16 bytes), then the port (4 bytes)."""
    assert len(field) in (8, 20), len(field)
    (port,) = struct.unpack(">i", field[-4:])
    return Host(str(ipaddress.ip_address(field[:-4])), port)


def encode_host(host: Host) -> bytes:
    """Return the host field of a record: 8 bytes for an IPv4 address, 20 for IPv6.

    Raises ValueError if `host.ip` is not a valid IP address.
    """
    return ipaddress.ip_address(host.ip).packed + struct.pack(">i", host.port)
