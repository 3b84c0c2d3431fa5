"""How dense code is: python -m tests.support.readability src/glocal/core src/glocal/wire ...

With a folder or a file, its figures; each function above the limit of p95 is named.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COLUMNS, LINES = 100, 400


@dataclass
class Measured:
    """Figures of some files."""

    bodies: dict[str, int] = field(default_factory=dict)  # AST nodes of each function's body
    comprehensions: dict[str, int] = field(default_factory=dict)
    nodes: int = 0
    code_lines: int = 0
    long_lines: list[str] = field(default_factory=list)
    long_files: list[str] = field(default_factory=list)
    nested: list[str] = field(default_factory=list)  # a comprehension within another

    @property
    def median_nodes(self) -> float:
        return median(self.bodies.values())

    @property
    def p95_nodes(self) -> float:
        return quantiles(self.bodies.values(), n=20)[-1]

    @property
    def nodes_per_line(self) -> float:
        return self.nodes / self.code_lines

    @property
    def comprehensions_per_function(self) -> float:
        return mean(self.comprehensions.values())


def measure(paths):
    """The figures of these files together; C++ has only lines."""
    measured = Measured()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        long = [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS]
        measured.long_lines += [f"{path}:{number}" for number in long]
        if len(lines) > LINES:
            measured.long_files.append(f"{path} ({len(lines)} lines)")
        if path.suffix == ".py":
            _add(measured, path, text)
    return measured


def files(folder):
    """The Python and C++ files in a folder."""
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h"))


def _add(measured, path, text):
    tree = ast.parse(text)
    measured.nodes += sum(1 for _ in ast.walk(tree))
    measured.code_lines += len(code_lines(text))
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS) and _comprehensions(node) > 1:
            measured.nested.append(f"{path}:{node.lineno}")
        if isinstance(node, FUNCTIONS):
            name = f"{path}:{node.lineno} {node.name}"
            body = ast.Module(_body(node), [])
            measured.bodies[name] = sum(1 for _ in ast.walk(body)) - 1
            measured.comprehensions[name] = _comprehensions(body)


def _comprehensions(node):
    """How many comprehensions there are in a node, itself included."""
    return sum(isinstance(each, COMPREHENSIONS) for each in ast.walk(node))


def _body(function):
    """The statements of a function, without its docstring."""
    first, *others = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return others if is_docstring and isinstance(first.value.value, str) else function.body


def code_lines(text):
    """The numbers of the lines that hold code: neither blank, nor only a comment."""
    layout = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def lines_without_docstrings(text):
    """How many lines of code there are, docstrings apart."""
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)) and ast.get_docstring(node):
            docstring = node.body[0]
            documented |= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(code_lines(text) - documented)


def main():
    paths = [path for name in sys.argv[1:] for path in files(Path(name))]
    measured = measure(paths)
    print(f"AST nodes of a function's body: median {measured.median_nodes:.0f}, limit 48")
    print(f"                                p95 {measured.p95_nodes:.0f}, limit 200")
    print(f"nodes per line of code: {measured.nodes_per_line:.2f}, limit 9")
    print(f"comprehensions per function: {measured.comprehensions_per_function:.2f}, limit 0.4")
    print(f"lines over {COLUMNS} columns: {len(measured.long_lines)}")
    print(f"comprehensions within another: {measured.nested}")
    print(f"files over {LINES} lines: {measured.long_files}")
    for name, nodes in sorted(measured.bodies.items(), key=lambda item: -item[1]):
        if nodes > 150:
            print(f"{nodes:5} {name}")


if __name__ == "__main__":
    main()
