"""The floors: a file imports from lower floors only. What must answer at once imports nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(lockstep.__file__).parent
# file or folder -> floor; a file may import from its own floor's folder-mates and from lower floors
FLOORS: dict[str, float] = {
    "checkpoint": -1,
    "models": -1,
    "report": -1,
    "measure": -1,
    "hub": -1,
    "bench": -1,
    "sweep": -1,
    "doctor": -1,
    "starter": -1,
    "processes": -1,
    "__init__": 0,
    "plugins": -1,
    "exit_status": -1,
    "messages": -1,
    "disclosure": -2,
    "sections": -1,
    "processes/network": -1,
    "processes/stops": -1,
    "run": 0,
    "quick_start": 0,
    "user_code": 1,
    "console": 0,
    "processes/launched": 1,
    "processes/output": 2,
    "processes/ownership": 3,
    "processes/srun": 1,
    "batch": 1,
    "world": 1,
    "data": 2,
    "optim": 3,
    "models/models": 3,
    "models/adapters": 1,
    "models/attention": 1,
    "models/bleu": 2,
    "models/decoding": 2,
    "reduction": 2,
    "strategies/parts/zero_agreement": 1,
    "strategies/parts/zero_config": 2,
    "rows": 3,
    "models/cuts": 3,
    "strategies/parts/stages": 4,
    "tasks/task": 3,
    "tasks/parts/per_token": 4,
    "strategies/strategy": 4,
    "launchers/launcher": 3,
    "track/tracker": 3,
    "data/prepare": 4,
    "data/feed": 4,
    "strategies/parts/gate": 2,
    "strategies/parts/gradient": 3.5,
    "strategies/parts/held_state": 3.5,
    "strategies/parts/statistics": 2,
    "randomness": 1,
    "processor": -1,
    "processes/place": -1,
    "processes/group": 0.7,
    "processes/torch_internals": 0.6,
    "strategies/parts/accelerate": 2,
    "strategies/parts/accelerate_fsdp": 6.5,
    "strategies/parts/accelerate_zero": 6,
    "session": 6.5,
    "strategies/parts/native": 5,
    "strategies/parts/hooked": 5,
    "strategies/parts/zero": 5,
    "strategies/parts/sharding": 4,
    "checkpoint/parts": 2,
    "checkpoint/exported": 0,
    "checkpoint/manifest": 3,
    "processes/secret": 0.5,
    "processes/stores": 0.5,
    "processes/meeting_state": 1,
    "processes/agreement": 3,
    "processes/meeting": 4,
    "processes/elastic": 5,
    "checkpoint/storage": 3,
    "checkpoint/checkpoint": 5,
    "track": 5,
    "track/parts": 6,
    "tasks": 5,
    "strategies": 6,
    "hub/hub_errors": -1,
    "starter/columns": 3,
    "hub/card": 5,
    "hub/hub": 6,
    "doctor/machine": 3,
    "doctor/between_ranks": 4,
    "starter/starter": 11,
    "doctor/doctor": 10,
    "child": 1,
    "sweep/grid": 1,
    "sweep/sweep_file": 2,
    "sweep/search": 3,
    "sweep/trial_names": 2,
    "bench/timing": 9,
    "bench/bench_results": 10,
    "sweep/slots": 10,
    "sweep/job_array": 10,
    "bench/bench": 11,
    "sweep/sweep": 11,
    "report/history": 0,
    "measure/phases": 1,
    "measure/journal": 2,
    "measure/profiling": 2,
    "report/charts": -1,
    "report/panels": 1,
    "report/report": 6,
    "train": 7,
    "measure/memory": 2,
    "measure/usage": 3,
    "recording": 8,
    "dry_run": 7.5,
    "processes/watch": 2,
    "evaluate": 8,
    "verify": 9,
    "summary": 7,
    "processes/failure": 2,
    "worker": 8,
    "processes/preload": 9,
    "launchers/parts": 8,
    "launchers": 9,
    "start": 10,
    "api": 12,
    "commands": 12,
    "cli": 13,
    "launchers/parts/sagemaker_entry": 14,
    "__main__": 14,
}


def floor(module: str) -> float:
    path = module.removeprefix("lockstep").strip(".").replace(".", "/") or "__init__"
    while path not in FLOORS:
        path = path.rpartition("/")[0]
    return FLOORS[path]


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules a file imports, and whether at its top (`TYPE_CHECKING` blocks are left out)."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for n in ast.walk(node)
    }
    top = {id(n) for n in tree.body}
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [(a.name, id(node) in top) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = ROOT / node.module.removeprefix("lockstep").strip(".").replace(".", "/")
            deeper = [
                a.name for a in node.names if node.module.startswith("lockstep") and (inner / f"{a.name}.py").exists()
            ]
            found += [(f"{node.module}.{name}", id(node) in top) for name in deeper] or [(node.module, id(node) in top)]
    return found


FILES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_from_lower_floors_only(file: str) -> None:
    module = "lockstep." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    for name, _ in imports(ROOT / file):
        if name.startswith("lockstep"):
            folder = module.rpartition(".")[0]
            together = folder == name.rpartition(".")[0] and folder != "lockstep"
            assert floor(name) < floor(module) or (together and floor(name) <= floor(module)), (
                f"{module} imports {name}"
            )


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("tasks/")])
def test_tasks_know_nothing_of_ranks(file: str) -> None:
    assert not any(name.startswith("torch.distributed") for name, _ in imports(ROOT / file))


SUBMITTING = ("run.py", "sections.py", "plugins.py", "start.py", "cli.py")


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith(("launchers/", "commands/")) or f in SUBMITTING])
def test_what_a_submitting_machine_needs_imports_no_torch_at_the_top(file: str) -> None:
    assert not any(
        top and name.split(".")[0] in ("torch", "transformers", "datasets") for name, top in imports(ROOT / file)
    )


@pytest.mark.parametrize("file", FILES)
def test_a_file_can_be_held_in_the_head(file: str) -> None:
    assert len((ROOT / file).read_text().splitlines()) <= 400


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["--help"], ["plan"], ["schema"]])
def test_these_commands_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from lockstep.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    if arguments == ["plan"]:
        code = code.replace("['plan']", "['plan', 'launch.processes=2']")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
