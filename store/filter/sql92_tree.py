"""What an SQL92 expression says: a tree of small values, made by the parser, read by both evaluators.

Conditions are what RocketMQ calls a BooleanExpression: true, false, unknown (null) or an error for each message.
Chains of AND and OR are one node with all their parts, so that a long one is no deep one. BETWEEN, <> and IS NOT NULL
are no nodes of their own: the parser writes them with the others, as RocketMQ does.
"""

from dataclasses import dataclass
from typing import TypeAlias


class Long(int):
    """A whole number that is a Long in Java. A plain int is an Integer."""


JavaValue: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal. TRUE, FALSE and NULL are conditions too."""

    value: JavaValue


@dataclass(frozen=True, slots=True)
class Property:
    """A property's value: a string, or null where a message has none of the name."""

    name: str


@dataclass(frozen=True, slots=True)
class Negation:
    """The number with its sign turned; null for whatever is no number, a property's text among it."""

    operand: "Node"


@dataclass(frozen=True, slots=True)
class Truth:
    """A property that stands where a condition must: false for any text, null where there is none."""

    operand: Property


@dataclass(frozen=True, slots=True)
class Not:
    """True for false and false for true; unknown stays unknown."""

    operand: "Node"


@dataclass(frozen=True, slots=True)
class And:
    """False as soon as a part is, from left to right: what stands behind is not looked at."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Or:
    """True as soon as a part is, from left to right: what stands behind is not looked at."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Order:
    """`>`, `>=`, `<` or `<=`: unknown where a side is null."""

    sign: str
    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class Equal:
    """`=`: both null is true, only the left null is unknown, only the right null is false."""

    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class IsNull:
    """True or false, never unknown."""

    operand: "Node"


@dataclass(frozen=True, slots=True)
class In:
    """Whether the property is one of the texts (`negated`: none of them); unknown where it is null."""

    operand: Property
    texts: tuple[str, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Has:
    """CONTAINS, STARTSWITH or ENDSWITH (`how`).

    False for null, for what is no text and for an empty `text`, and `negated` too.
    """

    how: str
    operand: "Node"
    text: str
    negated: bool


Condition: TypeAlias = Truth | Not | And | Or | Order | Equal | IsNull | In | Has
Node: TypeAlias = Constant | Property | Negation | Condition


def is_condition(node: Node) -> bool:
    """Say whether the node is true or false by itself. A property is not; where it must be, it becomes a Truth."""
    return isinstance(node, Condition) or (isinstance(node, Constant) and isinstance(node.value, bool | None))


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below."""
    match node:
        case Constant() | Property():
            return ()
        case And(parts) | Or(parts):
            return parts
        case Order(_, left, right) | Equal(left, right):
            return (left, right)
        case _:
            return (node.operand,)


def height(node: Node) -> int:
    """Return how many nodes stand above each other."""
    level, count = [node], 0
    while level:
        level, count = [below for above in level for below in children(above)], count + 1
    return count
