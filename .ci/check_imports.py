"""Check that imports go one way: no circle of modules, and none of the parts of any package.

    python .ci/check_imports.py FOLDER...

Imports for types (`if TYPE_CHECKING:`) and imports inside functions count as all others do. Prints
what is wrong, a line each; exits with 1 if anything is.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MOST_ROOMS = 15  # at the top of a package, without private ones (_native)

Graph = Mapping[str, set[str]]


def modules_of(root: Path) -> dict[str, Path]:
    """Return the files of the package in `root` by their module names."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Return which of `modules` this module imports, wherever the import stands."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return {
        name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        for name in _named_by(node, package, modules)
        if name in modules and name != module
    }


def _named_by(node: ast.AST, package: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """Name the modules of one statement; in `from a import b` that is `a.b` where it is one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([base] if base else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in modules else base


def way(graph: Graph, start: str, end: str) -> list[str]:
    """Return the shortest chain of imports from `start` to `end`; empty where there is none."""
    before: dict[str, str] = {}
    waiting = deque([start])
    while waiting:
        here = waiting.popleft()
        for there in sorted(graph[here] - before.keys()):
            before[there] = here
            if there == end:
                chain = [end, here]
                while chain[-1] != start:
                    chain.append(before[chain[-1]])
                return chain[::-1]
            waiting.append(there)
    return []


def circles(graph: Graph) -> list[list[str]]:
    """Return the modules of each circle, where every one reaches every other."""
    found: list[list[str]] = []
    for module in sorted(graph):
        if any(module in circle for circle in found) or not way(graph, module, module):
            continue
        ahead = [other for other in sorted(graph) if way(graph, module, other)]
        found.append([other for other in ahead if way(graph, other, module)])
    return found


def parts_of(package: str, graph: Graph) -> Graph:
    """Return what the files and folders directly in `package` import of each other."""
    inside = f"{package}."
    found: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if not module.startswith(inside):
            continue
        part = _part(module, inside)
        reached = {_part(other, inside) for other in imported if other.startswith(inside)}
        found.setdefault(part, set()).update(reached - {part})
    return found


def _part(module: str, inside: str) -> str:
    return inside + module.removeprefix(inside).partition(".")[0]


def problems(root: Path) -> list[str]:
    """Return what is wrong in the package in `root`, in words."""
    modules = modules_of(root)
    graph = {name: imports_of(name, path, modules) for name, path in modules.items()}
    said = [_told("modules", graph, circle) for circle in circles(graph)]
    for package in sorted(name for name, path in modules.items() if path.name == "__init__.py"):
        parts = parts_of(package, graph)
        folders = {name for name, path in modules.items() if path.name == "__init__.py"}
        said += [
            _told(f"parts of {package}", parts, circle)
            for circle in circles(parts)
            if not folders.isdisjoint(circle)  # of modules alone: told above
        ]
    rooms = [path.parent for path in root.glob("*/__init__.py")]
    public = [room for room in rooms if not room.name.startswith("_")]
    if len(public) > MOST_ROOMS:
        said.append(
            f"{root.name} has {len(public)} rooms, more than {MOST_ROOMS}: a stranger ranks few"
        )
    for room in rooms:
        if not (ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "").strip():
            said.append(f"{room.name}/__init__.py does not say what the room is for")
    return said


def _told(what: str, graph: Graph, circle: list[str]) -> str:
    return (
        f"{len(circle)} {what} import each other, such as "
        + " -> ".join(way(graph, circle[0], circle[0]))
        + f"; all of them: {', '.join(circle)}"
    )


def main(roots: Sequence[str]) -> int:
    """Check the packages in these folders; return the exit code."""
    said = [problem for root in roots for problem in problems(Path(root).resolve())]
    for problem in said:
        print(problem)
    return 1 if said or not roots else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
