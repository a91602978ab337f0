"""Modules that are imported at their first use, and how files declare them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.config.lazy import lazy
from support.sources import nodes

SOURCES = sorted(Path(lockstep.__file__).parent.rglob("*.py"))


def declared(tree: ast.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return name -> module: those that type checkers see, and those that `lazy` imports."""
    seen: dict[str, str] = {}
    lazily: dict[str, str] = {}
    for block in (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"):
        for line in block.body:
            if isinstance(line, ast.ImportFrom):
                seen |= {each.asname or each.name: f"{line.module}.{each.name}" for each in line.names}
        for line in block.orelse:
            assert isinstance(line, ast.Assign)
            assert isinstance(line.value, ast.Call)
            assert isinstance(line.targets[0], ast.Tuple)
            package, *modules = [ast.literal_eval(argument) for argument in line.value.args]
            names = [ast.unparse(each) for each in line.targets[0].elts]
            lazily |= dict(zip(names, (f"{package}.{module}" for module in modules), strict=True))
    return seen, lazily


def test_lazy_imports_equal_those_for_type_checkers() -> None:
    """mypy does not look at the other branch: a wrong module there fails at its first use."""
    every = {path: declared(nodes(path).tree) for path in SOURCES}
    assert sum(bool(lazily) for _, lazily in every.values()) > 10
    for path, (seen, lazily) in every.items():
        assert lazily.items() <= seen.items(), path


def test_a_lazy_module_is_imported_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    (module,) = lazy("json", "tool")
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    assert "json.tool" not in sys.modules
    assert callable(module.main)
    assert "json.tool" in sys.modules

    (missing,) = lazy("json", "nothing_like_it")
    with pytest.raises(ModuleNotFoundError, match="nothing_like_it"):
        missing.main()


@pytest.mark.processes
def test_a_task_imports_no_reader_of_data() -> None:
    code = (
        "import sys, lockstep.tasks.classification, lockstep.tasks.models.models\n"
        "readers = ['annotated', 'hub', 'hub_rows', 'object_store', 'remote', 'row_files', 'stream', 'usable_rows']\n"
        "print([name for name in readers if f'lockstep.data.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
