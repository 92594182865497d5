"""Signatures: those of the official client, and what a signature covers."""

from support.remoting_frames import read_frames

from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.signing import compute_signature, sign_command


def test_compute_signature_gives_every_signature_of_the_official_client() -> None:
    signed = [frame.command() for frame in read_frames() if "Signature" in (frame.line.get("ext") or {})]
    assert len(signed) == 52
    for command in signed:
        assert compute_signature(command.fields, command.body, "12345678") == command.fields["Signature"]


def test_sign_command_makes_the_official_client_s_request() -> None:
    for frame in read_frames():
        command = frame.command()
        if "Signature" not in command.fields:
            continue
        plain = {name: text for name, text in command.fields.items() if name not in ("AccessKey", "Signature")}
        unsigned = Command(command.code, command.opaque, plain, command.body, language="JAVA", version=command.version)
        assert sign_command(unsigned, "rocketmq", "12345678").fields == command.fields, frame


def test_a_signature_covers_fields_token_and_body() -> None:
    command = Command(11, 1, {"topic": "ü", "a": "true"}, b"body")
    signatures = [
        sign_command(command, "key", "secret").fields["Signature"],
        sign_command(command, "kez", "secret").fields["Signature"],
        sign_command(command, "key", "secreu").fields["Signature"],
        sign_command(command, "key", "secret", "token").fields["Signature"],
        sign_command(Command(11, 1, {"topic": "ü", "a": "true"}, b"bodz"), "key", "secret").fields["Signature"],
        sign_command(Command(11, 1, {"topic": "ü", "a": "trua"}, b"body"), "key", "secret").fields["Signature"],
    ]
    assert len(set(signatures)) == len(signatures)
    signed = sign_command(command, "key", "secret", "token")
    assert signed.fields | {"Signature": ""} == {
        "topic": "ü",
        "a": "true",
        "AccessKey": "key",
        "SecurityToken": "token",
        "Signature": "",
    }
    assert "SecurityToken" not in sign_command(command, "key", "secret").fields
    assert command.fields == {"topic": "ü", "a": "true"}, "the command itself does not change"


def test_repr_of_a_signed_request_shows_no_account() -> None:
    signed = sign_command(Command(11, 7, {"topic": "orders"}, b"the body"), "access-1", "secret-2", "token-3")
    shown = repr(signed)
    assert "orders" in shown
    assert "8 bytes" in shown
    hidden = ("access-1", "secret-2", "token-3", signed.fields["Signature"], "the body")
    assert not [text for text in hidden if text in shown]
