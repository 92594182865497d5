"""Pages of metrics, read with the parser of prometheus_client."""

import re
import urllib.request

from rmq_spark.metric_table import METRICS

ANY_PORT = "127.0.0.1:0"
Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(url: str) -> Found:
    """Return the samples of a page, by name and labels. Fails unless each has its HELP and TYPE as in the table."""
    from prometheus_client.parser import text_string_to_metric_families  # of an extra

    with urllib.request.urlopen(url) as page:
        text = page.read().decode()
    found: Found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name if sample.name in METRICS else re.sub("_(bucket|sum|count)$", "", sample.name)
            metric = METRICS[name]
            assert (family.documentation, family.type) == (metric.help, metric.kind)
            assert set(sample.labels) - {"le"} == set(metric.labels)
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(found: Found, name: str, **labels: str) -> float:
    """Return the value of the only sample with these labels."""
    (one,) = (value for (known, has), value in found.items() if known == name and labels.items() <= dict(has).items())
    return one
