"""Tables of docs/REMOTING.md against the code; run as a script, it rewrites them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `support`, if this runs as a script

from support.remoting_frames import SAMPLES

from rmq_spark.store.cluster.answer_rules import RULES, AnswerRule, Retry, name_code
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.requests import Request

PAGE = Path(__file__).resolve().parents[3] / "docs" / "REMOTING.md"
TO_NAME_SERVER = {105, 106, 206, 216}
BODIES = {310: "that of the message", 320: "items"}


def request_row(request: Request[object]) -> str:
    fields = ", ".join(f"`{name}`" for name in request.fields()) or "none"
    fields += f"; body: {BODIES.get(request.code, 'JSON')}" if request.body else ""
    to = "name server" if request.code in TO_NAME_SERVER else "broker"
    return f"| {int(request.code)} | {request.code.name} | {to} | {fields} | `{type(request).__name__}` |"


def answer_row(rule: AnswerRule) -> str:
    code = "any" if rule.code is None else name_code(rule.code)
    asked = ", ".join(str(int(code)) for code in sorted(rule.requests)) or "all"
    remark = f"`{rule.remark.replace('|', chr(92) + '|')}`" if rule.remark else ""
    error = "answer" if rule.error is None else f"`{rule.error.__name__}`"
    repeat = "" if rule.is_answer else str(rule.retry)
    return f"| {code} | {asked} | {remark} | {rule.meaning} | {error} | {repeat} | {rule.next_step} |"


def rewrite_tables() -> str:
    """Return the page with the rows of its two generated tables as the code has them."""
    lines, is_table = [], False
    rows = {"| code | name |": map(request_row, SAMPLES), "| code | request |": map(answer_row, RULES)}
    for line in PAGE.read_text().split("\n"):
        if is_table and line.startswith(("| ", "<!--")) and "---" not in line:
            continue
        is_table = is_table and line.startswith("|")
        lines.append(line)
        for head, table in rows.items():
            if line.startswith(head):
                is_table = True
                lines += [" ".join(["|", *["--- |"] * (line.count("|") - 1)]), *table]
        if is_table and "---" in line:
            lines.pop()
    return "\n".join(lines)


def test_the_page_has_every_request_and_every_answer() -> None:
    assert PAGE.read_text() == rewrite_tables(), f"run .venv/bin/python {__file__}"
    codes = [request.code for request in SAMPLES]
    assert codes == sorted(codes)
    assert set(codes) == set(RequestCode)


def test_every_error_says_what_is_expected_and_what_to_do_next() -> None:
    for rule in RULES:
        assert rule.is_answer == (not rule.expected) == (not rule.next_step), rule
        assert rule.next_step.endswith(".") or rule.is_answer, rule
        assert not rule.is_answer or rule.retry is Retry.NEVER


if __name__ == "__main__":
    PAGE.write_text(rewrite_tables())
