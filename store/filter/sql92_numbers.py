"""How Java reads a number from a text: Integer#valueOf, Long#valueOf, Double#valueOf, one text at a time.

Python's int() and float() read other texts as numbers: underscores, blanks around whole numbers, `inf`, digits of
other scripts in floating point numbers. Source: the documentation of these methods (Java 8 to 21), RocketMQ 5.3.
"""

import re
import unicodedata

INTEGER_BITS = 32
LONG_BITS = 64

# String#trim takes these away, and no others: a no-break or an ideographic space stays.
JAVA_BLANKS = "".join(map(chr, range(0x21)))
_LAST_OF_BMP = "\uffff"  # Integer#valueOf looks at UTF-16 units, so that digits beyond are none
_DECIMAL = re.compile(r"([+-]?)(?:(NaN|Infinity)|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?)")
_HEX = re.compile(r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")


def read_integer(text: str, bits: int) -> int | None:
    """Return the whole number as an Integer (32 bits) or a Long (64) has it, None where Java refuses the text.

    A sign is allowed, and decimal digits of any script; blanks, points and what does not fit are not.
    """
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits or digits[0] in ("+", "-"):
        return None
    limit = 2 ** (bits - 1)
    value = 0
    for character in digits:
        digit = unicodedata.decimal(character, None) if character <= _LAST_OF_BMP else None
        if digit is None:
            return None
        value = value * 10 + digit
        if value > limit:
            return None
    if text[0] == "-":
        return -value
    return value if value < limit else None


def read_double(text: str) -> float | None:
    """Return the floating point number, None where Java refuses the text.

    Blanks around it are trimmed, a type suffix (d, f) is allowed, NaN, Infinity and hexadecimal forms too. What is too
    large is an infinity, what is too small a zero with its sign.
    """
    text = text.strip(JAVA_BLANKS)
    decimal = _DECIMAL.fullmatch(text)
    if decimal:
        sign, name, number = decimal.groups()
        value = float(name or number)
        return -value if sign == "-" else value
    hexadecimal = _HEX.fullmatch(text)
    if hexadecimal is None:
        return None
    try:
        return float.fromhex(hexadecimal[1])
    except OverflowError:
        return float("-inf" if text[0] == "-" else "inf")


def read_boolean(text: str) -> bool:
    """Return Boolean#valueOf: `true` in any case of letters is true, all else false."""
    return text.isascii() and text.lower() == "true"
