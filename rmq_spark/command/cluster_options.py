"""The options with which a command connects to a live cluster, and the arguments of `open_reader` that they mean."""

import os
from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from rmq_spark.command.default_place import NAME_SERVER_VARIABLE, argument_words, is_path, note_default_place
from rmq_spark.command.parameters import Decorator, together

SECRET_KEY_VARIABLE = "RMQ_SECRET_KEY"


class ClusterOption(click.Option):
    """An option that only concerns a cluster."""


_file = click.Path(exists=True, dir_okay=False)
PULL_GROUP = click.option(
    "--pull-group",
    cls=ClusterOption,
    metavar="GROUP",
    help="Consumer group in whose name messages are pulled.  [default: rmq-spark-reader]",
)
CONNECTION_OPTIONS: tuple[Decorator, ...] = (
    click.option("--namespace", cls=ClusterOption, metavar="NAME", help="Namespace of the topics and groups."),
    click.option(
        "--broker-addresses",
        cls=ClusterOption,
        metavar="BROKER=HOST:PORT",
        help="Address of a broker, if not the one that it registered. Several are separated by semicolons.",
    ),
    click.option(
        "--access-key",
        cls=ClusterOption,
        metavar="KEY",
        help="Account; its secret key is in the environment variable RMQ_SECRET_KEY.  [default: RMQ_ACCESS_KEY]",
    ),
    click.option(
        "--credentials-file",
        cls=ClusterOption,
        type=_file,
        metavar="FILE",
        help="File with the keys of the account, in lines accessKey: and secretKey:.",
    ),
    click.option("--tls", cls=ClusterOption, is_flag=True, help="Encrypt all connections."),
    click.option(
        "--tls-verify",
        cls=ClusterOption,
        type=click.Choice(["ca", "full", "none"]),
        help="How certificates are checked: ca the issuer, full also the host, none nothing.  [default: ca]",
    ),
    click.option(
        "--tls-ca-file",
        cls=ClusterOption,
        type=_file,
        metavar="FILE",
        help="Certificates of authorities (PEM).  [default: those of this machine]",
    ),
    click.option(
        "--tls-cert-file", cls=ClusterOption, type=_file, metavar="FILE", help="Certificate of this client (PEM)."
    ),
    click.option("--tls-key-file", cls=ClusterOption, type=_file, metavar="FILE", help="Its key, without a password."),
    click.option(
        "--request-timeout",
        cls=ClusterOption,
        type=click.FloatRange(min=0.001),
        metavar="SECONDS",
        help="Maximum time of a request, in seconds.  [default: 3]",
    ),
    PULL_GROUP,
)

CONNECTION_NAMES = (
    *("namespace", "broker_addresses", "access_key", "credentials_file", "tls", "tls_verify", "tls_ca_file"),
    *("tls_cert_file", "tls_key_file", "request_timeout", "pull_group"),
)


def _note_environment(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if ctx.get_parameter_source("name_server") is ParameterSource.ENVIRONMENT:
        note_default_place(ctx, NAME_SERVER_VARIABLE, value)
    return value


class _RequiredNameServer(click.Option):
    """The option `--name-server` of a command that only knows clusters. It is part of the usage."""

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage."""
        return [f"{self.opts[0]} {self.metavar}"]

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Take the value. Raises UsageError, with the next step, if neither a word nor the variable is one."""
        try:
            return super().handle_parse_result(ctx, opts, args)
        except click.MissingParameter:
            arguments = [one for one in ctx.command.params if isinstance(one, click.Argument)]
            raise _no_cluster(ctx, [*argument_words(arguments, opts), *args]) from None


def _no_cluster(ctx: click.Context, words: list[str]) -> click.UsageError:
    store = words[0] if words and is_path(words[0]) else None
    advice = f"Add -n HOST:PORT, or set {NAME_SERVER_VARIABLE}."
    if store is not None and ctx.info_name in _OF_STORES:
        advice += f" For a store use `rmq {_OF_STORES[ctx.info_name]}`."
    return click.UsageError(
        f"cannot find the cluster: found {'' if store is None else f'the store {store} and '}no -n HOST:PORT; expected "
        f"the name server of a cluster. {advice}",
        ctx,
    )


_OF_STORES = {"route": "queues", "stats": "watch"}  # the commands that answer the same of a store
_REQUIRED_NAME_SERVER = click.option(
    "-n",
    "--name-server",
    cls=_RequiredNameServer,
    required=True,
    envvar=NAME_SERVER_VARIABLE,
    show_envvar=True,
    callback=_note_environment,
    metavar="HOST:PORT",
    help="Name server of the cluster. Several are separated by semicolons.",
)
# For commands that only know clusters: of those of the exactly-once sink the messages are pulled by another group.
CLUSTER = together(_REQUIRED_NAME_SERVER, *CONNECTION_OPTIONS)
ADMIN_CLUSTER = together(_REQUIRED_NAME_SERVER, *(one for one in CONNECTION_OPTIONS if one is not PULL_GROUP))
SINK_CLUSTER = together(
    _REQUIRED_NAME_SERVER,
    *(one for one in CONNECTION_OPTIONS if one is not PULL_GROUP),
    click.option(
        "--pull-group",
        cls=ClusterOption,
        metavar="GROUP",
        help="Consumer group in whose name messages are pulled.  [default: RMQ_SPARK_READER]",
    ),
)
# The topics of the exactly-once sink itself.
own_topics = together(
    click.option("--stage-topic", metavar="TOPIC", help="Topic for staged rows.  [default: RMQ_SPARK_STAGE]"),
    click.option("--ledger-topic", metavar="TOPIC", help="Topic of the ledger.  [default: RMQ_SPARK_LEDGER]"),
)


def option_name(parameter: str) -> str:
    """Return the name of the option of a parameter."""
    return f"--{parameter.replace('_', '-')}"


def cluster_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `open_reader` for the parameters of a command, with the secret key from the environment.

    Parameters that are None or False are left out. Raises UsageError for options that do not fit together.
    """
    found = {name: value for name, value in given.items() if value not in (None, False)}
    without_tls = [option_name(name) for name in found if name.startswith("tls_")]
    if without_tls and "tls" not in found:
        raise click.UsageError(f"{', '.join(without_tls)} without --tls has no effect. Add --tls.")
    if "access_key" in found:
        if "credentials_file" in found:
            raise click.UsageError("--access-key and --credentials-file cannot be combined. Give one of them.")
        secret_key = os.environ.get(SECRET_KEY_VARIABLE)
        if not secret_key:
            raise click.UsageError(
                f"--access-key: the environment variable {SECRET_KEY_VARIABLE} is missing; expected the secret key of "
                "the account. Set it, or give --credentials-file."
            )
        found["secret_key"] = secret_key
    if "request_timeout" in found:
        found["request_timeout_ms"] = max(1, round(found.pop("request_timeout") * 1000))
    return found
