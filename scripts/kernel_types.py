"""Write the C types of the fluid model and of the discrete-event engine: ``python -m scripts.kernel_types [--check]``.

``simulator/kernel/step.pxd`` and ``simulator/events/loop.pxd`` follow from the source beside them and from the modules
that are compiled with it:

- classes with a ``table`` have the attributes of that table of the folder's ``arrays.py``;
- functions have the types of their annotations (``int`` is ``Py_ssize_t``, ``float`` is ``double``), and run without
  the GIL;
- local variables have the type of the values assigned to them, ``double`` if any of these is a ``float``.

``--check`` writes nothing and fails if the file is out of date; a test does the same.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from setup import whole_source
from simulator.events import arrays as events_arrays
from simulator.kernel import arrays as kernel_arrays

SOURCE: Final = Path(kernel_arrays.__file__).with_name("step.py")
EVENTS: Final = Path(events_arrays.__file__).with_name("loop.py")
TABLES: Final = vars(kernel_arrays) | vars(events_arrays)
MATH: Final = ("erfc", "exp", "log", "sqrt")
C_TYPES: Final = {
    "int": "Py_ssize_t",
    "float": "double",
    "bool": "bint",
    "None": "void",
    "Points": "double[::1]",
    "Any": "object",
}
OF_DTYPE: Final = {np.float64: "double", np.int64: "long long", np.intc: "int", np.bool_: "bint"}
RANK: Final = ("bint", "int", "Py_ssize_t", "double")
"""Number types; each can hold the values of those before it."""


class Types:
    """Declarations of the kernel: attributes of classes, results of functions, constants."""

    def __init__(self, tree: ast.Module) -> None:
        self.attributes: dict[str, dict[str, str]] = {}
        self.results: dict[str, str] = dict.fromkeys(MATH, "double")
        self.constants: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.attributes[node.name] = dict(_attributes(node))
            elif isinstance(node, ast.FunctionDef):
                self.results[node.name] = _c_type(node.returns)
            elif isinstance(node, ast.Assign):
                self.constants |= _constants(node)

    def of(self, node: ast.expr, names: dict[str, str]) -> str:
        """C type of an expression; ``names`` has the types of arguments and of the locals so far."""
        match node:
            case ast.Constant(value=value):
                return C_TYPES[type(value).__name__]
            case ast.Name(id=name):
                return names[name] if name in names else _number(self.constants[name])
            case ast.Attribute(attr="shape"):
                return "Py_ssize_t"
            case ast.Attribute(value=value, attr=attribute):
                return _number(self.attributes[self.of(value, names)][attribute])
            case ast.Subscript(value=value):
                return _number(self.of(value, names).partition("[")[0])
            case ast.BinOp(op=ast.Div()):
                return "double"
            case ast.BinOp(left=left, right=right):
                return self._widest([left, right], names)
            case ast.UnaryOp(op=ast.Not()) | ast.Compare() | ast.BoolOp():
                return "bint"
            case ast.UnaryOp(operand=operand):
                return self.of(operand, names)
            case ast.IfExp(body=body, orelse=orelse):
                return self._widest([body, orelse], names)
            case ast.Call(func=ast.Name(id="min" | "max" | "abs"), args=args):
                return self._widest(args, names)
            case ast.Call(func=ast.Name(id=name)):
                return self.results[name]
            case ast.Call(func=ast.Attribute(attr="cast"), args=[kind, _]):
                return ast.unparse(kind).removeprefix("cython.")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return self.results[name]
        raise TypeError(f"no C type is known for {ast.unparse(node)}: extend scripts/kernel_types.py")

    def _widest(self, nodes: Iterable[ast.expr], names: dict[str, str]) -> str:
        return max((self.of(node, names) for node in nodes), key=RANK.index)

    def locals_of(self, function: ast.FunctionDef, arguments: dict[str, str]) -> dict[str, str]:
        """C types of a function's local variables."""
        names = dict(arguments)
        for target, kind in self._assigned(function, names):
            if target not in arguments:
                known = names.get(target)
                names[target] = kind if known in (None, kind) else max(known, kind, key=RANK.index)
        return {name: kind for name, kind in sorted(names.items()) if name not in arguments}

    def _assigned(self, function: ast.FunctionDef, names: dict[str, str]) -> Iterator[tuple[str, str]]:
        for node in _statements(function.body):
            match node:
                case ast.For(target=ast.Name(id=name)):
                    yield name, "Py_ssize_t"
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    yield name, self.of(value, names)
                case ast.AugAssign(target=ast.Name(id=name), op=ast.Div()):
                    yield name, "double"
                case ast.AugAssign(target=ast.Name(id=name), value=value):
                    yield name, self.of(value, names)
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                    kinds = self.of(value, names).strip("()").split(", ")
                    for target, kind in zip(targets, kinds, strict=True):
                        if isinstance(target, ast.Name):
                            yield target.id, kind


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for item in node.body:
        match item:
            case ast.Assign(targets=[ast.Name(id="table")], value=ast.Name(id=table)):
                for name, spec in TABLES[table].items():
                    axes = ", ".join([":"] * (len(spec.axes) - 1) + ["::1"])
                    yield name, OF_DTYPE[spec.dtype] + (f"[{axes}]" if spec.axes else "")
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                kind = ast.unparse(annotation).partition("[")[0]
                yield name, C_TYPES.get(kind, kind)


def _constants(node: ast.Assign) -> dict[str, str]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int() | float() as value)) if (
            name.isupper()
        ):
            return {name: {int: "int", float: "double"}[type(value)]}
    return {}


def _c_type(annotation: ast.expr | None) -> str:
    """C type of an annotation; several results are a tuple of C values."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        return f"({', '.join(_c_type(item) for item in annotation.slice.elts)})"
    name = ast.unparse(annotation) if annotation else "None"
    return C_TYPES.get(name, name)


def _number(kind: str) -> str:
    """Type of a local variable that holds an element or attribute of this type."""
    return "Py_ssize_t" if kind in ("int", "long long") else kind


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements in order of appearance."""
    for node in body:
        yield node
        for field in ("body", "orelse"):
            yield from _statements(getattr(node, field, []))


def declarations(source: str) -> str:
    """Text of the declaration file for all sources."""
    tree = ast.parse(source)
    types = Types(tree)
    name_of: Any = {ast.FunctionDef: _function, ast.ClassDef: _class}
    lines = [
        "# Written by `python -m scripts.kernel_types` from arrays.py and the functions beside it: change those.",
        "cimport cython",
        f"from libc.math cimport {', '.join(MATH)}",
        "",
        *(f"cdef {kind} {name}" for name, kind in types.constants.items()),
    ]
    for node in tree.body:
        if type(node) in name_of:
            lines += ["", *name_of[type(node)](node, types)]
    return "\n".join(lines) + "\n"


def _function(node: ast.FunctionDef, types: Types) -> list[str]:
    arguments = {argument.arg: _c_type(argument.annotation) for argument in node.args.args}
    signature = ", ".join(f"{kind} {name}" for name, kind in arguments.items())
    declared = _wrapped(f"cdef {_c_type(node.returns)} {node.name}({signature}) noexcept nogil")
    return [*_locals(types.locals_of(node, arguments)), declared]


def _class(node: ast.ClassDef, types: Types) -> list[str]:
    """A C class with its attributes; methods without an underscore are callable from C and from Python."""
    attributes = [f"    cdef public {kind} {name}" for name, kind in types.attributes[node.name].items()]
    base = f"({ast.unparse(node.bases[0])})" if node.bases else ""
    final = ["@cython.final"] if attributes else []
    methods = []
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            arguments = {a.arg: _c_type(a.annotation) for a in method.args.args[1:]}
            own = types.locals_of(method, {"self": node.name, **arguments})
            signature = ", ".join(["self", *(f"{kind} {name}" for name, kind in arguments.items())])
            methods += [f"    {line}" for line in _locals(own)] + [
                f"    cpdef {_c_type(method.returns)} {method.name}({signature})"
            ]
    return [*final, f"cdef class {node.name}{base}:", *(attributes + methods or ["    pass"])]


def _locals(kinds: dict[str, str]) -> list[str]:
    listed = ", ".join(f"{name}={kind}" for name, kind in kinds.items())
    return [_wrapped(f"@cython.locals({listed})")] if kinds else []


def _wrapped(line: str) -> str:
    """The line, broken only after commas: elsewhere Cython does not continue a line."""
    words = line.replace(" ", "\0").replace(",\0", ", ")
    return textwrap.fill(words, 120, subsequent_indent="    ", break_long_words=False).replace("\0", " ")


def main(arguments: list[str]) -> int:
    """Write the files, or with ``--check`` say which are out of date."""
    status = 0
    for source in (SOURCE, EVENTS):
        text, target = declarations(whole_source(source)), source.with_suffix(".pxd")
        if target.is_file() and target.read_text(encoding="utf-8") == text:
            continue
        if "--check" in arguments:
            print(f"{target.name} is out of date: run `python -m scripts.kernel_types`")
            status = 1
        else:
            target.write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
