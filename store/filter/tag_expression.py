"""A subscription to tags: `*` for all, or tags with `||` between them.

Source: FilterAPI#buildSubscriptionData (4.9, 5.3), quirks included: blanks are Java's (up to U+0020), a `*` among
others is a tag of that name, and a text of blanks and separators wants nothing. One difference is on purpose: a tag
with a comma or a bar in it is refused. To RocketMQ it is a tag like any other, that no message has.
"""

import re
from dataclasses import dataclass

import pyarrow as pa

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.java import string_hash

ALL = "*"
_SEPARATOR = "||"
_OTHER_SEPARATORS = re.compile(r"[,|]+")  # what people write who mean `||`
_JAVA_BLANKS = "".join(map(chr, range(0x21)))  # what String#trim takes off: not U+3000, not U+0085


@dataclass(frozen=True, slots=True)
class TagExpression:
    """The tags that a subscription wants, each once, in the order they are named; `tags` None: every message.

    No tags at all want no message: a text of blanks is like that, and a broker gives its consumer nothing.
    """

    text: str
    tags: tuple[str, ...] | None

    @property
    def codes(self) -> frozenset[int]:
        """The hashes of the tags, as units have them in their low 32 bits (String#hashCode, signed)."""
        return frozenset(map(string_hash, self.tags or ()))

    @property
    def values(self) -> pa.StringArray:
        """The tags as an array, to look messages up in."""
        return pa.array(self.tags or (), pa.string())

    def __str__(self) -> str:
        """Return the expression in one form for all that want the same tags."""
        return ALL if self.tags is None else " || ".join(sorted(self.tags))


def parse_tag_expression(text: str | None) -> TagExpression:
    """Return what the text wants: all for None, an empty one and `*`, else the tags between its `||`.

    Raises OptionError for a text of nothing but `||`, which RocketMQ refuses too, for a tag with a comma or a bar in
    it, and for one that is no text that a message can have (a lone half of a surrogate pair).
    """
    if text is None or text in ("", ALL):
        return TagExpression(ALL, None)
    if not any(parts := text.split(_SEPARATOR)):
        raise OptionError(
            f'the tag expression "{text}" has nothing between its separators. Accepted: *, or tags such as "A || B".'
        )
    tags = dict.fromkeys(tag for part in parts if (tag := part.strip(_JAVA_BLANKS)))
    for tag in tags:
        try:
            tag.encode()
        except UnicodeEncodeError:
            raise OptionError(f"the tag {tag!r} is no text: no message can have it.") from None
        if _OTHER_SEPARATORS.search(tag):
            meant = " || ".join(part for one in _OTHER_SEPARATORS.split(text) if (part := one.strip(_JAVA_BLANKS)))
            raise OptionError(
                f'the tag expression "{text}" has the tag "{tag}"; expected tags separated by "||", as in '
                f'"{meant or "A || B"}". For messages whose one tag has a comma or a bar in it, use sql92, as in '
                "TAGS IN ('a,b')."
            )
    return TagExpression(text, tuple(tags))
