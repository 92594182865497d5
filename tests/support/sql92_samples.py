"""Random SQL92 expressions and random messages to try them on: odd numbers, odd blanks, other scripts, nulls.

Drawn from the grammar, so that most are right; some have a token too much, too few or wrong.
"""

import random

_PROPERTIES = ("a", "b", "c", "_d$1")
_ABSENT_SHARE = 0.15

# Texts that Java and Python read differently, numbers at a limit, and texts that are not numbers.
ODD_TEXTS = (
    *(
        "",
        " ",
        "0",
        "-0",
        "+0",
        "-0.0",
        "1",
        "-1",
        "+1",
        "007",
        "3",
        "3.5",
        "4.0",
        "5",
        " 4",
        "4 ",
        "\t4\n",
        "\x004\x1f",
    ),
    *(
        "\u00a04",
        "\u30004",
        "1_0",
        "0x10",
        "0x10p0",
        "0X1.8P-3d",
        "-0x.8p1",
        "0x1p99999999999",
        "0x0p1",
        "0x1p",
        "0x.p1",
    ),
    *(
        "NaN",
        "-NaN",
        "+NaN",
        "nan",
        "NaNd",
        "Infinity",
        "-Infinity",
        "inf",
        "Infinityd",
        "1e5",
        "1E+5",
        "1e",
        "e5",
        "1e5f",
    ),
    *(
        ".5",
        "5.",
        ".",
        "-.5",
        "+.5e1",
        "-",
        "+",
        "--1",
        "+-1",
        "- 1",
        "1.2.3",
        "1d",
        "1F",
        "1dd",
        "1l",
        "3L",
        "1e+",
        "-5.",
    ),
    *("1e400", "-1e400", "1e-400", "4.9e-324", "2.4703282292062327e-324", "2.4703282292062328e-324", "1e99999999999"),
    *("1.7976931348623157e308", "1.7976931348623159e308", "0.30000000000000004", "9007199254740993", "0.1", "1e23"),
    *("2147483647", "2147483648", "-2147483648", "-2147483649", "3000000000", "9223372036854775807"),
    *("9223372036854775808", "-9223372036854775808", "-9223372036854775809", "00000000000000000000001", "12345678"),
    *("123456789", "1234567890123456", "12345678901234567", "123456789012345678", "1234567890123456789", "12345.678"),
    *("\uff14", "\u0967\u0968", "1\uff14", "-\u0663", "\U0001d7cf", "\u00b2", "\u0661.5", "\u216b", "1\u0301"),
    *("true", "TRUE", "tRuE", " true", "false", "FALSE", "null", "x", "ax", "axb", "X", "it's", "''", "'", "5'"),
    *(
        "中文",
        "中",
        "文",
        "é",
        "e\u0301",
        "\U0001f600",
        "a\U0001f600b",
        "\ufffd",
        "\ud7ff\ue000",
        "\u212a",
        "\x00",
        "a\x00b",
    ),
)
_LITERALS = ("0", "1", "3", "5", "7L", "12l", "2147483647", "2147483648", "3000000000", "9223372036854775807")
_FLOATS = (
    "3.0",
    ".5",
    "5.",
    "0.5",
    "1e1",
    "3.1E10",
    "4.9e-324",
    "1.7976931348623157e308",
    "9007199254740993.0",
    "1E-7",
)
_ORDERS = ("<", "<=", ">", ">=")
_BLANKS = (" ",) * 8 + ("  ", "\t", "\n", "\r\n", "\f", "/* x */", "/***/", "-- '\n", " --\r\n")
_STRAY = (
    *("(", ")", ",", "=", "<>", ">", "-", "+", "not", "and", "or", "is", "null", "in", "between", "like", "contains"),
    *(
        "a",
        "x",
        "'x'",
        "''",
        "1",
        "0.0",
        "0",
        "01",
        "5.5.5",
        "1x",
        "0l",
        "99999999999999999999",
        "1e999",
        "true",
        "false",
    ),
    *('"', "!", "*", "/", "/*", "--", ".", "a.b", "'", "\u00a0", "\v", "中", ";", "#", "\x00", "endswith", "$", "_"),
)


class Sql92Samples:
    """Draws expressions and messages; the same ones for the same seed."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def expression(self, *, wrong_share: float = 0.0) -> str:
        """Return an expression; this share of them gets a stray token, loses one, or has two changed places."""
        tokens = self._condition(self._random.choice((1, 1, 2, 2, 3)))
        if self._random.random() < wrong_share:
            self._spoil(tokens)
        return "".join(self._spaced(tokens))

    def message(self) -> dict[str, str]:
        """Return the properties of a message, some of them absent."""
        names = [name for name in _PROPERTIES if self._random.random() >= _ABSENT_SHARE]
        return {name: self.text() for name in names}

    def text(self) -> str:
        """Return the value of a property: a plain number, one in some form, or something odd."""
        draw = self._random.random()
        if draw < 0.4:
            return self._random.choice(ODD_TEXTS)
        if draw < 0.6:
            return str(self._random.randint(-2, 8))
        sign = self._random.choice(("", "", "", "-", "+"))
        digits = self._digits()
        if draw < 0.75:
            return sign + digits
        fraction = f"{sign}{digits if draw < 0.9 else ''}.{self._digits()}"
        exponent = f"e{self._random.randint(-330, 330)}" if self._random.random() < 0.3 else ""
        return fraction + exponent + self._random.choice(("",) * 8 + ("d", " "))

    def _digits(self) -> str:
        count = self._random.choice((1, 2, 3, 7, 8, 9, 10, 15, 16, 17, 18, 19, 20))
        return "".join(self._random.choices("0123456789", k=count))

    # Each returns a list of tokens.

    def _condition(self, depth: int) -> list[str]:
        draw = self._random.random()
        if depth > 0 and draw < 0.5:
            parts = [self._condition(depth - 1) for _ in range(self._random.choice((2, 2, 2, 3)))]
            word = self._random.choice(("AND", "OR"))
            joined = parts[0]
            for part in parts[1:]:
                joined = [*joined, word, *part]
            return joined
        if depth > 0 and draw < 0.65:
            return [*self._random.choice((["NOT"], [])), "(", *self._condition(depth - 1), ")"]
        if draw < 0.68:
            return [self._random.choice(("TRUE", "FALSE", "NULL", *_PROPERTIES))]
        return self._random.choice(
            (self._order, self._order, self._equal, self._equal, self._between, self._predicate)
        )(depth)

    def _order(self, depth: int) -> list[str]:
        sides = [self._number(depth), self._number(depth)]
        if self._random.random() < 0.8:
            sides[self._random.randrange(2)] = [self._property()]
        return [*sides[0], self._random.choice(_ORDERS), *sides[1]]

    def _equal(self, depth: int) -> list[str]:
        left = [self._property()] if self._random.random() < 0.75 else self._operand(depth)
        return [*left, self._random.choice(("=", "<>")), *self._operand(depth)]

    def _between(self, depth: int) -> list[str]:
        negated = self._random.choice(([], ["NOT"]))
        low, high = self._number(depth), self._number(depth)
        return [self._property(), *negated, "BETWEEN", *low, "AND", *high]

    def _predicate(self, depth: int) -> list[str]:
        draw = self._random.random()
        negated = self._random.choice(([], ["NOT"]))
        if draw < 0.3:
            return [*self._operand(depth, property_share=0.5), "IS", *negated, "NULL"]
        if draw < 0.6:
            texts = [self._quoted() for _ in range(self._random.choice((1, 2, 3, 6)))]
            return [self._property(), *negated, "IN", "(", *",".join(texts).replace("','", "' , '").split(" "), ")"]
        how = self._random.choice(("CONTAINS", "STARTSWITH", "ENDSWITH"))
        return [*self._operand(depth, property_share=0.85), *negated, how, self._quoted()]

    def _number(self, depth: int) -> list[str]:
        draw = self._random.random()
        if draw < 0.2:
            return [self._property()]
        if draw < 0.3:
            return [self._random.choice(("-", "-", "+")), *self._number(depth)]
        if draw < 0.33 and depth > 0:
            return ["-", "(", *self._condition(depth - 1), ")"]
        if draw < 0.36:
            return ["(", *self._number(depth), ")"]
        return [self._random.choice((*_LITERALS, *_FLOATS))]

    def _operand(self, depth: int, property_share: float = 0.2) -> list[str]:
        draw = self._random.random()
        if draw < property_share:
            return [self._property()]
        rest = (draw - property_share) / (1 - property_share)
        if rest < 0.35:
            return [self._quoted()]
        if rest < 0.7:
            return self._number(depth)
        if rest < 0.85 or depth == 0:
            return [self._random.choice(("TRUE", "FALSE"))]
        return ["(", *self._condition(depth - 1), ")"]

    def _property(self) -> str:
        return self._random.choice(_PROPERTIES)

    def _quoted(self) -> str:
        text = self._random.choice(ODD_TEXTS)
        return "'" + text.replace("'", "''") + "'"

    def _spoil(self, tokens: list[str]) -> None:
        place = self._random.randrange(len(tokens) + 1)
        draw = self._random.random()
        if draw < 0.5:
            tokens.insert(place, self._random.choice(_STRAY))
        elif draw < 0.7 and tokens:
            tokens[min(place, len(tokens) - 1)] = self._random.choice(_STRAY)
        elif draw < 0.85 and len(tokens) > 1:
            del tokens[min(place, len(tokens) - 1)]
        else:
            tokens.append(self._random.choice(_STRAY))

    def _spaced(self, tokens: list[str]) -> list[str]:
        """Put blanks between the tokens, none where none is needed now and then, keywords in any case of letters."""
        pieces: list[str] = []
        for number, token in enumerate(tokens):
            if number and (self._random.random() < 0.7 or (pieces[-1][-1:] + token[:1]).replace("_", "a").isalnum()):
                pieces.append(self._random.choice(_BLANKS))
            if token.isascii() and token.isalpha() and len(token) > 1:
                token = self._random.choice((token, token.lower(), token.title()))
            pieces.append(token)
        return pieces
