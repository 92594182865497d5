"""A rule for what a response code means. `answer_rules`, `send_answers` and `admin_answers` contain the rules."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.errors import NoPermissionError, RmqError

MISSING_RIGHT = "the account lacks a right"
# The code and the remark with which brokers of 4.9 and 5.3 answer if an account lacks a right.
_LACKS_RIGHT = (
    (ResponseCode.SYSTEM_ERROR, r"(?s)AclException.*(No default permission|Need admin permission|doesn't support)"),
    (ResponseCode.NO_PERMISSION, r"has no permission to access"),
)


class UnknownGroupError(NoPermissionError):
    """A broker does not know the consumer group of a request, and creates no groups."""


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


def rules_of_rights(next_steps: Mapping[frozenset[RequestCode], str]) -> tuple[AnswerRule, ...]:
    """Return the rules for accounts that lack a right. `next_steps` says for each set of requests what to ask for."""
    return tuple(
        AnswerRule(
            code,
            MISSING_RIGHT,
            NoPermissionError,
            expected="an account with the right",
            next_step=next_step,
            requests=requests,
            remark=remark,
        )
        for code, remark in _LACKS_RIGHT
        for requests, next_step in next_steps.items()
    )
