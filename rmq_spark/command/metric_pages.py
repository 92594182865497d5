"""The page of metrics of `rmq serve` and `rmq watch`, and their option `--metrics`."""

from collections.abc import Callable
from typing import Any

import click

from rmq_spark.command.parameters import require_package
from rmq_spark.metrics import MetricsServer

metrics_option = click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Address (HOST:PORT) at which Prometheus metrics are served, under /metrics. Needs the extra metrics.",
)


def open_page(serve: Callable[..., MetricsServer], *arguments: Any, **named: Any) -> MetricsServer:
    """Call a function that serves metrics. Raises UsageError without the extra."""
    require_package("prometheus_client", "metrics")
    return serve(*arguments, **named)
