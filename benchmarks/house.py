"""What a newcomer meets: functions that take a whole run, names of plug-ins outside their rooms, members of strategies.

In: the sources beside this file, read by `ast`, and the strategies' classes. Out: the counts of benchmarks/log.md. With
`--functions`, each function that takes a run, the sections of it that the function reads itself, and whether it hands
the run on: who reads one section and hands nothing on could take the section.

    python benchmarks/house.py [--functions]
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lockstep.config import plugins
from lockstep.config.run import Run

ROOT = Path(__file__).resolve().parents[1] / "src/lockstep"


def functions() -> Iterator[tuple[Path, ast.FunctionDef, str]]:
    """Yield (file, function, name of the parameter) of each function with a parameter that is a `Run`."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                kinds = {arg.arg: ast.unparse(arg.annotation).strip("'\"") for arg in every if arg.annotation}
                names = [name for name, kind in kinds.items() if "Run" in kind.replace(" ", "").split("|")]
                yield from ((path.relative_to(ROOT), node, name) for name in names[:1])


def reads(node: ast.FunctionDef, name: str) -> tuple[set[str], bool]:
    """Return the attributes of the run that a function reads, and whether it uses the run in any other way."""
    attributes = [n for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    own = [n for n in attributes if isinstance(n.value, ast.Name) and n.value.id == name]
    uses = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
    return {n.attr for n in own}, len(uses) > len(own)


def members(cls: type) -> set[str]:
    """Return a class's methods, properties and declared attributes, with those of lockstep's classes above it."""
    ours = [each for each in cls.__mro__ if each.__module__.startswith("lockstep")]
    names = {name for each in ours for name in (*vars(each), *vars(each).get("__annotations__", {}))}
    return {name for name in names if name == "__init__" or not name.startswith(("__", "_abc_"))}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="list the functions")
    listed = parser.parse_args(arguments).functions
    taking = list(functions())
    for path, node, name in taking if listed else ():
        sections, on = reads(node, name)
        print(f"{path}:{node.lineno} {node.name}: {', '.join(sorted(sections))}{' and hands it on' * on}")
    rooms = Counter(path.parts[0] for path, *_ in taking)
    print(f"functions that take a Run: {len(taking)} ({', '.join(f'{r} {n}' for r, n in rooms.most_common())})")
    narrow = [sections for _, node, name in taking for sections, on in [reads(node, name)] if not on]
    print(f"of these, read one section and hand nothing on: {sum(len(s & {*Run.model_fields}) == 1 for s in narrow)}")
    for name in plugins.names("strategies"):
        cls = plugins.find("strategies", name)
        above = sum(each.__module__.startswith("lockstep") for each in cls.__mro__)
        print(f"{cls.__name__}: {len(members(cls))} members, {above} classes")


if __name__ == "__main__":
    main()
