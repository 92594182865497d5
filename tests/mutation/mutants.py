"""A module's source -> its mutants: one for each byte order, width and place of a field, for each write and each read.

All mutants come from the syntax tree. Dtypes are lists of (name, format). A field is written or read where its name is
a subscript or an argument, in loops over the names of a dtype, in calls of `struct`, and where the arguments of a
dataclass, the pieces of a record or the elements of a result are put together. The expression there is replaced by
`wrong(...)` of it, or by its neighbour's name. Writers and readers are changed separately.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

_HELPERS = (
    "from wrong_values import wrong as _wrong, wrong_at as _wrong_at, wrong_flags as _wrong_flags, "
    "wrong_key as _wrong_key\n"
)
_ORDER = re.compile(r">(?:[bBhHiIqQ]+|[iu][248])")
_OTHER_WIDTH = {"i2": "i4", "i4": "i8", "i8": "i4", "u4": "u2", "h": "i", "b": "h", "i": "h", "q": "i"}
_JSON_NAME = re.compile(r"[a-z]+[A-Z]\w*")
_ANSWERS = re.compile(r".*(Fault|Error)|Torn|NoEntry")  # their arguments are texts of errors
_FLAGS = r".*\[\"sys_flag\"\]"  # code tests single bits of these, and adding one would change other bits
_LISTS = {"pieces", "parts", "columns"}

Layouts = dict[str, list[tuple[str, str]]]  # dtype -> its fields: name, format


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module. `name` is unique in the module and has no line number."""

    kind: str
    name: str
    line: int
    source: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Edit:
    """`begin` and `end` are bytes in the source."""

    begin: int
    end: int
    text: str


_Changes: TypeAlias = Iterator[tuple[str, str, list[_Edit]]]  # kind, what is changed, and how


class MutantFinder:
    """Finds the mutants of one module. `layouts` are the dtypes of all modules, by which field names are known."""

    def __init__(self, source: str, layouts: Layouts) -> None:
        self._source = source.encode()
        self._tree = ast.parse(source)
        self._line_begins = [0]
        for line in self._source.splitlines(keepends=True):
            self._line_begins.append(self._line_begins[-1] + len(line))
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        self._own = find_layouts(self._tree)
        self._layouts = {**self._own, **layouts}
        self._fields = {name for fields in self._layouts.values() for name, _ in fields}
        self._classes = {node.name for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)} | {"cls"}
        self._classes |= {
            alias.name
            for node in ast.walk(self._tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name[0].isupper() and not alias.name.isupper()
        }
        self._json = _text_tables(self._tree)
        self._seen: dict[str, int] = {}

    def mutants(self) -> Iterator[Mutant]:
        """Yield every mutant, in the order of the source as far as one rule goes."""
        seen = set()
        for node in ast.walk(self._tree):
            if self._is_inside(node, ast.Raise | ast.Assert):
                continue
            for kind, what, edits in self._changes(node):
                key = tuple((edit.begin, edit.end, edit.text) for edit in edits)
                if key not in seen:
                    seen.add(key)
                    yield self._mutant(node, kind, what, edits)

    def _changes(self, node: ast.AST) -> _Changes:
        if _is_dtype(node):
            yield from self._of_layout(node.args[0])
        elif isinstance(node, ast.Constant):
            yield from self._of_format(node)
        elif isinstance(node, ast.Subscript):
            yield from self._of_subscript(node)
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)
        elif isinstance(node, ast.For | ast.DictComp | ast.GeneratorExp | ast.ListComp):
            yield from self._of_loop(node)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            yield from self._each(self._direction(node), "part of the result", node.value.elts)
        elif isinstance(node, ast.JoinedStr) and self._function(node).startswith("encode"):
            parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            yield from self._each("write", "text", parts)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield from self._of_assignment(node)

    def _of_layout(self, fields: ast.List) -> _Changes:
        for one in fields.elts:
            name, form = ast.literal_eval(one.elts[0]), one.elts[1]
            if isinstance(form, ast.JoinedStr):
                yield "width", name, [self._put(form, '"V4"')]
                continue
            code = form.value[1:]
            yield "byte order", name, [self._put(form, f'"<{code}"')]
            yield "width", name, [self._put(form, f'">{_OTHER_WIDTH[code]}"')]
        for one, other in pairwise(fields.elts):
            names = f"{one.elts[0].value} and {other.elts[0].value} exchanged"
            yield "place", names, [self._put(one, self._text(other)), self._put(other, self._text(one))]

    def _of_format(self, node: ast.Constant) -> _Changes:
        """A format outside of a dtype's list, and Python's own words for big-endian; names in JSON."""
        value, parent = node.value, self._parents.get(node)
        if not isinstance(value, str) or (self._is_inside(node, ast.List) and self._is_inside_dtype(node)):
            return
        if _ORDER.fullmatch(value):
            if value not in (">b", ">B"):
                yield "byte order", value, [self._put(node, f'"<{value[1:]}"')]
            if value[1:] in _OTHER_WIDTH:
                yield "width", value, [self._put(node, f'">{_OTHER_WIDTH[value[1:]]}"')]
        elif value == "big" and isinstance(parent, ast.Call):
            yield "byte order", "big", [self._put(node, '"little"')]
        elif self._json and _JSON_NAME.fullmatch(value) and self._function(node):
            yield self._direction(node), f"the name {value}", [self._put(node, f'"{value}X"')]

    def _of_subscript(self, node: ast.Subscript) -> _Changes:
        """A field's name in brackets: its value wrong, or its neighbour's."""
        name = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if name not in self._fields:
            return
        whole = self._around(node)
        if isinstance(whole.ctx if isinstance(whole, ast.Subscript) else None, ast.Store):
            kind, value = "write", self._assigned(whole)
        else:
            kind, value = "read", whole
        if value is not None:
            yield kind, f"{name} wrong", [self._wrap(value)]
        yield from self._neighbour(kind, name, node.slice)

    def _of_call(self, node: ast.Call) -> _Changes:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg)]
        values = [value for value in values if not isinstance(value, ast.Starred)]
        if called in self._classes and not _ANSWERS.fullmatch(called):
            yield from self._each(self._direction(node), f"argument of {called}", values)
        elif called in ("pack", "_write_file", "from_arrays"):
            values = values[1:] if self._text(node.func) == "struct.pack" else values
            yield from self._each("read" if called == "from_arrays" else "write", f"argument of {called}", values)
        elif called in ("append", "insert") and self._text(node.func.value) in _LISTS:
            yield from self._each("write", "piece", node.args[-1:])
        elif called == "asdict" and isinstance(self._parents[node], ast.Dict):
            yield from self._of_keys("write", node)
        else:
            yield from self._of_bytes_call(called, node)
        for keyword in node.keywords:
            if keyword.arg is None and called in self._classes and self._text(keyword.value) == "value":
                yield from self._of_keys("read", keyword.value)
        if values and isinstance(values[0], ast.Constant) and values[0].value in self._fields:
            yield "read", f"{values[0].value} wrong", [self._wrap(node)]
            yield from self._neighbour("read", values[0].value, values[0])

    def _of_bytes_call(self, called: str, node: ast.Call) -> _Changes:
        """A call that takes values from bytes, or makes bytes of them."""
        if called in ("unpack", "unpack_from"):
            target = getattr(self._parents[node], "targets", [None])[0]
            for place, one in enumerate(target.elts if isinstance(target, ast.Tuple) else []):
                if one.id != "_":
                    change = "_wrong_flags" if one.id == "sys_flag" else "_wrong"
                    text = f"_wrong_at({self._text(node)}, {place}, {change})"
                    yield "read", f"{one.id} wrong", [self._put(node, text)]
        elif called == "from_bytes":
            yield "read", "number of bytes wrong", [self._wrap(node)]
        elif called == "to_bytes":
            yield "write", "number as bytes wrong", [self._wrap(node.func.value)]
        elif called == "join" and node.args and isinstance(node.args[0], ast.List):
            yield from self._each("write", "piece", node.args[0].elts)

    def _of_loop(self, node: ast.AST) -> _Changes:
        """A loop over the names of a layout, of a dataclass or of a table of JSON names: a mutant for each name."""
        loop = node if isinstance(node, ast.For) else node.generators[0]
        over = self._text(loop.iter)
        variable = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        names = self._names_of(over)
        if not names or not isinstance(variable, ast.Name):
            return
        if isinstance(node, ast.For):
            values = [one.value for one in node.body if isinstance(one, ast.Assign)][-1 if ".names" in over else 0 :]
            value, kind = values[0], self._direction(node)
        else:
            value, kind = getattr(node, "value", None) or node.elt, self._direction(node)
        tests = " ".join(self._text(test) for test in getattr(loop, "ifs", []))
        text = self._text(value)
        for name in names:
            if f'"{name}"' not in tests:
                chosen = f'(_wrong({text}) if {variable.id} == "{name}" else ({text}))'
                yield kind, f"{name} wrong, by its name", [self._put(value, chosen)]

    def _of_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> _Changes:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        name, value = self._text(target), node.value
        if name in _LISTS and isinstance(value, ast.List):
            yield from self._each(self._direction(node), f"element of {name}", value.elts)
        elif isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant):
            if isinstance(value, ast.Tuple):
                yield from self._each("write", f"element of {name}", value.elts)
            elif self._text(target.value) == "properties":
                yield from self._each("read", "name and value", [target.slice, value])
        elif self._parents[node] is self._tree and isinstance(target, ast.Name):
            yield from self._of_constant(name, value)

    def _of_constant(self, name: str, value: ast.expr) -> _Changes:
        """A constant of the module: a magic, a separator, the name of a property, a table of names or of builders."""
        if isinstance(value, ast.Dict) and any(isinstance(one, ast.Lambda) for one in value.values):
            for key, one in zip(value.keys, value.values, strict=True):
                yield "read", f"column {key.value}", [self._wrap(one)]
        elif name in self._json:
            for one, other in pairwise(value.values):
                texts = f"{one.value} and {other.value} exchanged"
                yield "place", texts, [self._put(one, self._text(other)), self._put(other, self._text(one))]
            for key in value.keys:
                yield "name", key.value, [self._put(key, f'"{key.value}X"')]
        elif re.fullmatch(r"(?!MAX_|MIN_)[A-Z][A-Z0-9_]*", name):
            try:
                found = ast.literal_eval(value)
            except ValueError:
                return
            if isinstance(found, int | str):
                yield "constant", name, [self._wrap(value)]

    def _of_keys(self, kind: str, node: ast.expr) -> _Changes:
        for one in ast.walk(self._tree):
            if isinstance(one, ast.ClassDef):
                names = [item.target.id for item in one.body if isinstance(item, ast.AnnAssign)]
                for name in names:
                    yield (
                        kind,
                        f"{name} wrong, by its key",
                        [self._put(node, f'_wrong_key({self._text(node)}, "{name}")')],
                    )

    def _names_of(self, over: str) -> list[str]:
        if ".names" in over:
            named = [name for name in self._layouts if over.startswith(f"{name}.")]
            layout = named[0] if named else next(iter(self._own), "")
            return [name for name, _ in self._layouts.get(layout, [])]
        if over.startswith("asdict(") and self._own:
            return [name for name, _ in next(iter(self._own.values()))]
        if over.endswith(".items()"):
            table = over.removesuffix(".items()")
            return self._json.get(
                table, [name for names in self._json.values() for name in names] if table == "names" else []
            )
        return []

    def _neighbour(self, kind: str, name: str, node: ast.expr) -> _Changes:
        for fields in self._layouts.values():
            names = [one for one, _ in fields]
            if name in names:
                form, place = fields[names.index(name)][1], names.index(name)
                alike = [one for one, other in [*fields[place + 1 :], *reversed(fields[:place])] if other == form]
                if alike:
                    yield kind, f"{alike[0]} in place of {name}", [self._put(node, f'"{alike[0]}"')]
                    return

    def _each(self, kind: str, what: str, values: list[ast.expr]) -> _Changes:
        for number, value in enumerate(values):
            if not (isinstance(value, ast.Constant) and value.value is None) and not isinstance(value, ast.Starred):
                shown = re.sub(r"\s+", " ", self._text(value))
                yield kind, f"{what} {number}: {shown[:60]}", [self._wrap(value)]

    def _around(self, node: ast.expr) -> ast.expr:
        """Return what belongs to a field's value: `x["f"][0]`, `x["f"].itemsize`."""
        while (parent := self._parents[node]) and (
            (isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.slice, ast.Constant))
            or (isinstance(parent, ast.Attribute) and parent.attr in ("itemsize", "dtype"))
        ):
            node = parent
        return node

    def _assigned(self, target: ast.expr) -> ast.expr | None:
        """Return what is assigned to a target, by itself or in a tuple."""
        parent = self._parents[target]
        if isinstance(parent, ast.Tuple):
            values = getattr(self._parents[parent], "value", None)
            return values.elts[parent.elts.index(target)] if isinstance(values, ast.Tuple) else None
        return getattr(parent, "value", None)

    def _direction(self, node: ast.AST) -> str:
        name = self._function(node)
        return "write" if re.search(r"encode|write|put|join|^_?heads$|seeded|fill", name) else "read"

    def _function(self, node: ast.AST) -> str:
        names = []
        while (node := self._parents.get(node)) is not None:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(node.name)
        return ".".join(reversed(names))

    def _is_inside(self, node: ast.AST, kinds: type) -> bool:
        while (node := self._parents.get(node)) is not None:
            if isinstance(node, kinds):
                return True
        return False

    def _is_inside_dtype(self, node: ast.AST) -> bool:
        while (node := self._parents.get(node)) is not None:
            if _is_dtype(node):
                return True
        return False

    def _text(self, node: ast.AST) -> str:
        begin, end = self._bounds(node)
        return self._source[begin:end].decode()

    def _bounds(self, node: ast.AST) -> tuple[int, int]:
        begin = self._line_begins[node.lineno - 1] + node.col_offset
        return begin, self._line_begins[node.end_lineno - 1] + node.end_col_offset

    def _put(self, node: ast.AST, text: str) -> _Edit:
        return _Edit(*self._bounds(node), text)

    def _wrap(self, node: ast.AST) -> _Edit:
        text = self._text(node)
        return self._put(node, f"_wrong_flags({text})" if re.fullmatch(_FLAGS, text) else f"_wrong({text})")

    def _mutant(self, node: ast.AST, kind: str, what: str, edits: list[_Edit]) -> Mutant:
        first = next(one for one in self._tree.body if isinstance(one, ast.Import | ast.ImportFrom))
        begin = self._bounds(first)[0]
        changed = self._source
        for edit in sorted([*edits, _Edit(begin, begin, _HELPERS)], key=lambda edit: -edit.begin):
            changed = changed[: edit.begin] + edit.text.encode() + changed[edit.end :]
        name = f"{self._function(node) or 'module'}: {what}"
        self._seen[kind + name] = number = self._seen.get(kind + name, 0) + 1
        return Mutant(kind, name if number == 1 else f"{name} ({number})", node.lineno, changed.decode())


def find_layouts(tree: ast.AST) -> Layouts:
    """Return the dtypes that a module declares, by the name of what they are assigned to or of who makes them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            name, value = node.name, getattr(node.body[-1], "value", None)
        else:
            name, value = getattr(getattr(node, "targets", [None])[0], "id", None), getattr(node, "value", None)
        if name and _is_dtype(value):
            fields = value.args[0].elts
            found[name] = [(one.elts[0].value, getattr(one.elts[1], "value", "V")) for one in fields]
    return found


def _is_dtype(node: ast.AST | None) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "dtype"
    return (
        is_call
        and isinstance(node.args[0], ast.List)
        and all(isinstance(one, ast.Tuple) and len(one.elts) == 2 for one in node.args[0].elts)
    )


def _text_tables(tree: ast.Module) -> dict[str, list[str]]:
    """Return the module's tables of names in JSON, texts to texts."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            sides = [*node.value.keys, *node.value.values]
            if sides and all(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in sides):
                found[node.targets[0].id] = [key.value for key in node.value.keys]
    return found
