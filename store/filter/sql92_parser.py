"""The parser of SQL92 expressions, which makes the syntax tree of a text.

Follows SelectorParser.jj and the checks of ComparisonExpression#create… (5.3). Brokers of version 4.9 have the same
grammar without CONTAINS, STARTSWITH and ENDSWITH. The operators, from the lowest to the highest precedence:

1. OR
2. AND
3. `=`, `<>`, IS [NOT] NULL
4. `<`, `<=`, `>`, `>=`, [NOT] BETWEEN, [NOT] IN, CONTAINS, STARTSWITH, ENDSWITH
5. NOT, and the signs `+` and `-`

NOT has the highest precedence, so NOT a = 'x' means (NOT a) = 'x', as in RocketMQ.
"""

from collections.abc import Callable

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.sql92_lexer import (
    TEXT_KEYWORDS,
    And,
    Constant,
    Equal,
    Has,
    In,
    IsNull,
    JavaValue,
    Lexer,
    Long,
    Negation,
    Node,
    Not,
    Or,
    Order,
    Property,
    Token,
    TokenKind,
    Truth,
    fault,
    height,
    is_condition,
)

# Limits of the recursion in the parser and the evaluators, far below Python's limit. A chain of AND or OR is one level.
MAX_NESTED = 50
_MAX_HEIGHT = 120
_MAX_INTEGER = 2**31 - 1
_MAX_LONG = 2**63 - 1
_ORDERS = frozenset([">", ">=", "<", "<="])
_OPERAND = "a property, a number, a text, TRUE, FALSE, NULL, NOT, a sign or ("
_CONTINUED = "AND, OR, a comparison or the end"


def parse_sql92(text: str, *, strict_end: bool) -> Node:
    """Parse a text, and return its syntax tree. The root of the tree is a condition.

    If `strict_end` is True, the whole text must be one expression. Otherwise any text after the longest valid
    expression is ignored, as in RocketMQ. Raises OptionError for a syntax error; the error's message shows where it is.
    """
    parser = _Parser(text)
    tree = parser.condition()
    if strict_end:
        parser.check_end()
    if height(tree) > _MAX_HEIGHT:
        raise parser.too_deep(parser.first)
    return tree


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._lexer = Lexer(text)
        self._token = self._lexer.next()
        self._nested = 0
        self.first = self._token

    def condition(self) -> Node:
        begin = self._token
        return self._as_condition(self._or(), begin)

    def check_end(self) -> None:
        token = self._token
        if token.kind is not TokenKind.END:
            advice = _trailing_advice(token, self._text)
            raise self._fault(token, _CONTINUED, f"{advice} RocketMQ itself ignores the text from this position.")

    def too_deep(self, token: Token) -> OptionError:
        return self._fault(
            token,
            f"at most {MAX_NESTED} levels of parentheses, signs and NOT",
            "Write it with less nesting; a chain of AND or OR may have any length.",
            found="more",
        )

    # The levels of the grammar, lowest precedence first.

    def _or(self) -> Node:
        return self._chain("OR", self._and, Or)

    def _and(self) -> Node:
        return self._chain("AND", self._equality, And)

    def _chain(self, keyword: str, part: Callable[[], Node], join: type[And] | type[Or]) -> Node:
        begin = self._token
        node = part()
        if not self._is_keyword(keyword):
            return node
        parts = [self._as_condition(node, begin)]
        while self._is_keyword(keyword):
            self._advance()
            begin = self._token
            parts.append(self._as_condition(part(), begin))
        return join(tuple(parts))

    def _equality(self) -> Node:
        begin = self._token
        node = self._comparison()
        while True:
            if self._is_sign("=", "<>"):
                sign = self._advance()
                right_begin = self._token
                right = self._comparison()
                equal = self._equal(node, right, begin, right_begin)
                node = equal if sign.value == "=" else Not(equal)
            elif self._is_keyword("IS"):
                self._advance()
                is_not = self._skip_keyword("NOT")
                self._need_keyword("NULL", "NULL or NOT NULL" if not is_not else "NULL")
                node = Not(IsNull(node)) if is_not else IsNull(node)
            else:
                return node

    def _comparison(self) -> Node:
        begin = self._token
        node = self._unary()
        while True:
            if self._is_sign(*_ORDERS):
                sign = self._advance()
                right_begin = self._token
                node = self._order(sign.value, node, self._unary(), begin, right_begin)
            elif self._is_keyword("NOT", "BETWEEN", "IN", *TEXT_KEYWORDS):
                negated = self._skip_keyword("NOT")
                node = self._predicate(node, begin, negated)
            else:
                return node

    def _predicate(self, node: Node, begin: Token, negated: bool) -> Node:
        if self._skip_keyword("BETWEEN"):
            return self._between(node, begin, negated)
        if self._skip_keyword("IN"):
            return self._in(node, begin, negated)
        if self._is_keyword(*TEXT_KEYWORDS):
            how = self._advance().value
            return Has(how, node, self._need_text(how), negated)
        raise self._fault(
            self._token,
            "BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH",
            "NOT after an operand belongs to one of these. For the opposite of a condition write NOT (...) around it.",
        )

    def _between(self, node: Node, begin: Token, negated: bool) -> Node:
        low_begin = self._token
        low = self._unary()
        self._need_keyword("AND", "AND", "Write BETWEEN 1 AND 10.")
        high_begin = self._token
        high = self._unary()
        if negated:
            below = self._order("<", node, low, begin, low_begin)
            return Or((below, self._order(">", node, high, begin, high_begin)))
        above = self._order(">=", node, low, begin, low_begin)
        between = And((above, self._order("<=", node, high, begin, high_begin)))
        if isinstance(low, Constant) and isinstance(high, Constant):
            assert isinstance(low.value, int | float), low  # _order has checked it
            assert isinstance(high.value, int | float), high
            if _is_below(high.value, low.value):
                advice = "Write the smaller number first; no number is between the two in this order."
                raise self._fault(high_begin, f"a number not below {low.value}", advice)
        return between

    def _in(self, node: Node, begin: Token, negated: bool) -> Node:
        self._need_sign("(", "Write IN ('x', 'y').")
        texts = [self._need_text("IN")]
        while self._is_sign(","):
            self._advance()
            texts.append(self._need_text("IN"))
        self._need_sign(")", "Write the texts separated by commas and end them with a parenthesis: IN ('x', 'y').")
        if not isinstance(node, Property):
            advice = (
                "Only a property can be looked up in a list. For the opposite write a NOT IN (...) or NOT (a IN (...))."
            )
            raise self._fault(begin, "a property on the left of IN", advice, found=_found(node, begin))
        return In(node, tuple(texts), negated)

    def _unary(self) -> Node:
        begin = self._token
        if not self._is_sign("+", "-") and not self._is_keyword("NOT"):
            return self._primary()
        self._advance()
        self._enter(begin)
        operand_begin = self._token
        operand = self._unary()
        self._nested -= 1
        if begin.value == "+":
            return operand
        return Negation(operand) if begin.value == "-" else Not(self._as_condition(operand, operand_begin))

    def _primary(self) -> Node:
        token = self._token
        if self._is_sign("("):
            self._advance()
            self._enter(token)
            node = self._or()
            self._nested -= 1
            self._need_sign(")", "The parenthesis before it is not closed.", "), AND, OR or a comparison")
            return node
        if token.kind is TokenKind.NAME:
            self._advance()
            return Property(token.value)
        return Constant(self._literal())

    def _literal(self) -> JavaValue:
        token = self._token
        match token.kind:
            case TokenKind.TEXT:
                value: JavaValue = _text_value(token)
            case TokenKind.WHOLE:
                value = self._whole(token)
            case TokenKind.FLOAT:
                value = self._float(token)
            case TokenKind.KEYWORD if token.value in _LITERALS:
                value = _LITERALS[token.value]
            case _:
                raise self._fault(token, _OPERAND, _operand_advice(token))
        self._advance()
        return value

    # The checks of literals and operands.

    def _whole(self, token: Token) -> int:
        digits = token.value.rstrip("lL")
        value = int(digits) if len(digits) <= len(str(_MAX_LONG)) else _MAX_LONG + 1
        if value > _MAX_LONG:
            advice = f"The largest whole number is {_MAX_LONG}; with a decimal point or an exponent it is a Double."
            raise self._fault(token, "a number that fits a Long", advice)
        return value if value <= _MAX_INTEGER else Long(value)

    def _float(self, token: Token) -> float:
        value = float(token.value)
        if value in (0.0, float("inf")):
            advice = "A Double is between 4.9E-324 and 1.7976931348623157E308; zero is written 0 (an Integer)."
            raise self._fault(token, "a number that fits a Double and is not zero", advice)
        return value

    def _as_condition(self, node: Node, begin: Token) -> Node:
        if isinstance(node, Property):
            return Truth(node)
        if not is_condition(node):
            advice = "A number or a text is neither true nor false: compare it, as in a = 5."
            raise self._fault(begin, "a condition or a property", advice)
        return node

    def _order(self, sign: str, left: Node, right: Node, left_begin: Token, right_begin: Token) -> Order:
        for node, begin in ((left, left_begin), (right, right_begin)):
            is_number = isinstance(node, Constant) and type(node.value) in (int, Long, float)
            if is_condition(node) or (isinstance(node, Constant) and not is_number):
                advice = (
                    "Only numbers and properties can be less or greater. Write numbers without quotes; compare texts, "
                    "TRUE and FALSE by = and <>, and NULL by IS NULL."
                )
                raise self._fault(begin, "a number or a property", advice, found=_found(node, begin))
        return Order(sign, left, right)

    def _equal(self, left: Node, right: Node, left_begin: Token, right_begin: Token) -> Equal:
        for node, begin in ((left, left_begin), (right, right_begin)):
            if node == Constant(None):
                raise self._fault(begin, "a value", "A value never equals NULL: write IS NULL or IS NOT NULL.")
        if (
            isinstance(left, Constant)
            and isinstance(right, Constant)
            and is_condition(left)
            and not is_condition(right)
        ):
            raise self._fault(
                right_begin, "TRUE or FALSE", "TRUE and FALSE can only be compared with conditions and properties."
            )
        return Equal(left, right)

    # Tokens.

    def _advance(self) -> Token:
        token = self._token
        self._token = self._lexer.next()
        return token

    def _is_sign(self, *signs: str) -> bool:
        return self._token.kind is TokenKind.SIGN and self._token.value in signs

    def _is_keyword(self, *keywords: str) -> bool:
        return self._token.kind is TokenKind.KEYWORD and self._token.value in keywords

    def _skip_keyword(self, keyword: str) -> bool:
        if not self._is_keyword(keyword):
            return False
        self._advance()
        return True

    def _need_keyword(self, keyword: str, expected: str, advice: str = "Write a IS NULL or a IS NOT NULL.") -> None:
        if not self._skip_keyword(keyword):
            raise self._fault(self._token, expected, advice)

    def _need_sign(self, sign: str, advice: str, expected: str = "") -> None:
        if not self._is_sign(sign):
            raise self._fault(self._token, expected or sign, advice)
        self._advance()

    def _need_text(self, keyword: str) -> str:
        if self._token.kind is not TokenKind.TEXT:
            advice = f"{keyword} takes texts in single quotes, neither numbers nor properties: '5', not 5."
            raise self._fault(self._token, "a text in single quotes", advice)
        return _text_value(self._advance())

    def _enter(self, token: Token) -> None:
        self._nested += 1
        if self._nested > MAX_NESTED:
            raise self.too_deep(token)

    def _fault(self, token: Token, expected: str, advice: str, *, found: str = "") -> OptionError:
        return fault(self._text, token.position, expected=expected, found=found or str(token), advice=advice)


_LITERALS: dict[str, JavaValue] = {"TRUE": True, "FALSE": False, "NULL": None}


def _is_below(left: float, right: float) -> bool:
    """Return whether `left` is less than `right` in Java.

    If one of them is a Double and the other a Long, the Long is converted to a Double and may lose its last digits.
    """
    if float in (type(left), type(right)):
        return float(left) < float(right)
    return left < right


def _found(node: Node, begin: Token) -> str:
    """Return an operand for an error message: a literal as it is written, any other operand by its kind."""
    if isinstance(node, Constant):
        return str(begin)
    return "a condition" if is_condition(node) else "the negation of an operand"


def _text_value(token: Token) -> str:
    return token.value[1:-1].replace("''", "'")


def _operand_advice(token: Token) -> str:
    """Return the advice if an operand is missing and `token` is found in its place."""
    if token.kind is TokenKind.KEYWORD:
        return (
            f"{token.value} is a reserved keyword, in upper and lower case, and cannot be a property's name. Add the "
            "operand before it."
        )
    if token.kind is TokenKind.END:
        if not token.position:
            return "The expression is empty: write one such as a > 5 AND b IS NOT NULL, or leave the option out."
        return "The expression is incomplete: complete it."
    if token.value == "=":
        return "Write a single = for equal, <> for not equal, >= for greater or equal."
    return "Add an operand there, or remove the token before it."


def _trailing_advice(token: Token, text: str) -> str:
    """Return the advice if `token` is found after a complete expression."""
    if token.value == ")":
        return "Remove the parenthesis: none is open."
    if text.startswith("--", token.position):
        return "A comment that begins with -- needs a line end: add one, or write /* ... */."
    if token.value.upper() == "LIKE":
        return "LIKE is not supported: write CONTAINS 'x', STARTSWITH 'x' or ENDSWITH 'x'."
    if token.value in ("+", "-"):
        return "Arithmetic is not supported: + and - are only the sign of an operand."
    if text[token.position - 1] == "'":
        return "A quote within a text is written twice: 'it''s'."
    if token.kind in (TokenKind.WHOLE, TokenKind.FLOAT) and text[token.position - 1] == "0":
        return "An integer must not have leading zeros: write 1, not 01."
    return "Join conditions by AND or OR, or remove the extra text."
