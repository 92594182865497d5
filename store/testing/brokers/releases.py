"""The two releases of RocketMQ that the servers can play, and how their answers differ."""

from dataclasses import dataclass

from rmq_spark.store.cluster.codes import RequestCode

LITE_PULL_MESSAGE = 361  # RequestCode of 5.x
STANDARD_JSON_VERSION = 403  # MQVersion.V4_9_4: from this version of a client, routes are strict JSON


@dataclass(frozen=True, slots=True)
class Release:
    """One release.

    `number` is its MQVersion. `mirrors_headers` says whether it answers a binary request with a binary header. `faq` is
    the address that its remarks point to. `unsupported` are the requests that it does not know.
    """

    name: str
    number: int
    mirrors_headers: bool
    faq: str
    unsupported: frozenset[int] = frozenset()

    @property
    def is_5(self) -> bool:
        """Whether this is a release 5.x."""
        return self.name.startswith("5")

    def with_faq(self, remark: str) -> str:
        """Return a remark with the advice that RocketMQ adds to some of them (FAQUrl#suggestTodo)."""
        return f"{remark}\nSee {self.faq} for further details."


RELEASES = {
    "4.9": Release(
        "4.9",
        407,
        mirrors_headers=True,
        faq="http://rocketmq.apache.org/docs/faq/",
        unsupported=frozenset({LITE_PULL_MESSAGE, RequestCode.GET_TOPIC_CONFIG}),
    ),
    "5.3": Release("5.3", 479, mirrors_headers=False, faq="https://rocketmq.apache.org/docs/bestPractice/06FAQ"),
}
