"""A rule for what a response code means. `answer_rules` and `send_answers` contain the rules."""

import re
from dataclasses import dataclass
from enum import StrEnum

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.errors import RmqError


class Retry(StrEnum):
    """Whether the same request may succeed if it is sent again, and where."""

    NEVER = "never"
    LATER = "later, at the same address"
    ELSEWHERE = "at another name server"
    NEW_ROUTE = "after a new route"
    NEW_KEYS = "with other keys, if credentialsFile has changed"


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """The meaning of a response code.

    The rule is for the request codes in `requests` (empty: all), the response code `code` (None: all) and remarks that
    contain the regular expression `remark`. With `error` None the response is an answer, which the request's response
    class reads. Else the message of the error is made of the texts `meaning`, `expected` and `next_step`.
    """

    code: ResponseCode | None
    meaning: str
    error: type[RmqError] | None = None
    retry: Retry = Retry.NEVER
    expected: str = ""
    next_step: str = ""
    requests: frozenset[RequestCode] = frozenset()
    remark: str = ""

    @property
    def is_answer(self) -> bool:
        """Whether the response is an answer, not an error."""
        return self.error is None

    def fits(self, request: RequestCode, code: int) -> bool:
        """Return whether the rule is for a response to `request` with `code`, if its remark fits too."""
        return (self.code is None or self.code == code) and (not self.requests or request in self.requests)

    def fits_remark(self, remark: str) -> bool:
        """Return whether the rule is for responses with `remark`."""
        return not self.remark or re.search(self.remark, remark) is not None
