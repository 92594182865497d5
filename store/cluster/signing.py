"""The signature of requests to a cluster that checks accounts. It is the same for both generations of access control.

A signature covers the values of all fields and the body, so nothing may be added to a request after it was signed. It
is not bound to a time or a connection.

Source: AclClientRPCHook, AclUtils#combineRequestContent, AclSigner (4.9, 5.3).
"""

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace

from rmq_spark.store.cluster.frame import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE, Command


def sign_command(command: Command, access_key: str, secret_key: str, security_token: str = "") -> Command:
    """Return a request with the fields of an account and the signature (AclClientRPCHook#doBeforeRequest)."""
    fields = {**command.fields, ACCESS_KEY: access_key}
    if security_token:
        fields[SECURITY_TOKEN] = security_token
    return replace(command, fields={**fields, SIGNATURE: compute_signature(fields, command.body, secret_key)})


def compute_signature(fields: Mapping[str, str], body: bytes | memoryview, secret_key: str) -> str:
    """Return the signature of a request's fields and body, in Base64 (AclUtils#calSignature)."""
    values = [fields[name] for name in sorted(fields) if name != SIGNATURE]
    digest = hmac.new(secret_key.encode(), "".join(values).encode(), hashlib.sha1)
    digest.update(body)
    return base64.b64encode(digest.digest()).decode()
