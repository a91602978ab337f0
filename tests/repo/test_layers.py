"""Thirteen rooms, one above the other: a file imports only from its own room and from those below. Commands that must
answer at once import nothing heavy; few places use private names of other libraries."""

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import lockstep
from lockstep.config.plugins import BUILT_IN
from support.places import ROOT as CHECKOUT
from support.places import TESTS
from support.sources import Nodes, nodes

ROOT = Path(lockstep.__file__).parent
FILES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py"))

# The distributions beside lockstep-train: package -> the highest room that its files import from, as one room's do.
PACKAGES = {"lockstep_clouds": "launchers", "lockstep_plan": "commands"}
PACKAGE_TOOLS = ("lockstep_clouds/sagemaker_script.py",)  # of `lockstep init --from`, by whom it is called
GROUND = "lockstep_trace"  # beneath the core, which imports it: torch and numpy, and nothing of lockstep
PACKAGE_ADAPTERS = (  # as `ADAPTERS` below
    "lockstep_plan/simulated.py",
    "lockstep_trace/tracer/engines.py",
)
PAGE = "lockstep_trace_report"  # on top of the ground, which finds it when it is asked for a page
ALL = (*PACKAGES, GROUND, PAGE)
PACKAGE_FILES = {name: sorted((CHECKOUT / "packages").glob(f"*/src/{name}/**/*.py")) for name in ALL}

# From the ground up. Four files beside them (`api`, `cli`, `__init__`, `__main__`) are the roof, `_version`
# and lockstep-trace the ground.
ROOMS = (
    "plain",
    "config",
    "track",
    "distributed",
    "data",
    "tasks",
    "checkpoint",
    "strategies",
    "training",
    "launchers",
    "proof",
    "lab",
    "commands",
)

# Where private names of torch, transformers, accelerate and deepspeed may be used.
# src/lockstep/strategies/engines/README.md has a row for each.
ADAPTERS = (
    "strategies/engines/",
    "launchers/processes/elastic",
    "launchers/processes/surviving_ranks.py",
    "distributed/torch_internals.py",
    "tasks/models/masks.py",
    "tasks/models/repeatable.py",
    "tasks/models/source_files.py",
)
ENGINES = ("torch", "transformers", "accelerate", "deepspeed")


def floor(path: str) -> int:
    """Return the floor of a file or folder below `ROOT`."""
    room = path.partition("/")[0]
    if room == "_version.py":
        return -1
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


class Facts(NamedTuple):
    """Facts about a file that the tests need."""

    imports: list[tuple[str, bool]]  # modules, also for its types only, and whether at its top
    private: list[str]
    functions: dict[str, int]  # line and name -> lines
    finds: bool  # whether it turns names of plug-ins into classes
    compared: set[str]  # texts and numbers that it compares something with
    takes_run: bool  # whether a function of it has a parameter that is a `Run`


@functools.cache
def facts(path: Path) -> Facts:
    file = nodes(path)
    functions = {f"{n.lineno} {n.name}": (n.end_lineno or 0) - n.lineno for n in file.of(ast.FunctionDef)}
    attributes = [n for n in file.of(ast.Attribute) if n.attr in ("find", "of_key")]
    finds = any(ast.unparse(n) in ("plugins.find", "plugins.of_key") for n in attributes)
    comparisons = [part for n in file.of(ast.Compare) for part in ast.walk(n)]
    compared = {str(part.value) for part in comparisons if isinstance(part, ast.Constant)}
    kinds = [ast.unparse(n.annotation) for n in file.of(ast.arg) if n.annotation is not None]
    takes_run = any("Run" in kind.strip("'\"").replace(" ", "").split("|") for kind in kinds)
    return Facts(_imports(file), _private(file), functions, finds, compared, takes_run)


def _imports(file: Nodes) -> list[tuple[str, bool]]:
    top = {id(n) for n in file.tree.body}
    found = []
    for node in file.of(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            found += [(a.name, id(node) in top) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in (f"{node.module}.{a.name}" for a in node.names):
                found.append((name if file_of(name) else node.module, id(node) in top))
    return found


BY_NAME = ("getattr", "setattr", "hasattr")


def _private(file: Nodes) -> list[str]:
    """Yield the names with a leading underscore that are used on objects that the file itself does not define."""
    own = {n.name for n in file.of(ast.FunctionDef, ast.ClassDef)}
    own |= {n.id for n in file.of(ast.Name) if isinstance(n.ctx, ast.Store)}
    own |= {n.attr for n in file.of(ast.Attribute) if isinstance(n.ctx, ast.Store)}
    found = []
    for node in file.of(ast.ImportFrom, ast.Attribute, ast.Call):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in ENGINES:
            names = [*node.module.split("."), *(a.name for a in node.names)]
            found += [f"from {node.module}" for name in names if name.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr in own:
                continue
            told = ast.unparse(node)
            public = told.startswith(
                ("torch._foreach_", "os._exit", "sys._current_frames", "sys._getframe")
            )  # documented as they are
            found += [] if public else [told]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            found += [ast.unparse(node)] if str(name).startswith("_") and not str(name).startswith("__") else []
    return found


@functools.cache
def file_of(module: str) -> str | None:
    """Return the file of one of our modules, below `ROOT`."""
    if module.partition(".")[0] != "lockstep":
        return None
    path = module.removeprefix("lockstep").strip(".").replace(".", "/")
    names = (f"{path}.py", f"{path}/__init__.py".lstrip("/"))
    return next((name for name in names if (ROOT / name).exists()), None)


def test_packages_and_top_level_modules_are_those_listed() -> None:
    inside = [p for p in ROOT.iterdir() if p.name != "__pycache__"]
    assert sorted(p.name for p in inside if p.is_dir()) == sorted(ROOMS)
    assert sorted(p.stem for p in inside if p.suffix == ".py") == [
        "__init__",
        "__main__",
        "_version",
        "api",
        "cli",
    ]
    folders = [p for p in ROOT.rglob("*") if p.is_dir() and any(p.glob("*.py"))]
    assert not [p.name for p in folders if p.name in ("parts", "utils", "common", "helpers", "misc")]
    for folder in folders:  # says what it is for
        assert ast.get_docstring(nodes(folder / "__init__.py").tree), folder


def test_a_file_imports_from_its_own_room_and_those_below() -> None:
    ours = [(file, found) for file in FILES for name, _ in facts(ROOT / file).imports if (found := file_of(name))]
    above = [f"{file}: {found}" for file, found in ours if floor(found) > floor(file)]
    assert above == []


@pytest.mark.parametrize("package", PACKAGES)
def test_other_distributions_import_public_modules_of_the_core(package: str) -> None:
    assert PACKAGE_FILES[package]
    for file in PACKAGE_FILES[package]:
        names = [name for name, _ in facts(file).imports if name.partition(".")[0] == "lockstep"]
        rooms = {name: floor(file_of(name) or "") for name in names if name != "lockstep"}
        highest = ROOMS.index("lab" if str(file).endswith(PACKAGE_TOOLS) else PACKAGES[package])
        assert [name for name, room in rooms.items() if room > highest] == [], file
        assert [name for name in names if any(part.startswith("_") for part in name.split("."))] == [], file
        assert [name for name, _ in facts(file).imports if name.partition(".")[0] in PACKAGES.keys() - {package}] == []
        if not str(file).endswith(PACKAGE_ADAPTERS):
            assert facts(file).private == [], file


def test_core_imports_no_other_distribution() -> None:
    """It finds the other distributions by their entry points, like anyone's plug-ins."""
    names = [(file, name) for file in FILES for name, _ in facts(ROOT / file).imports]
    assert len(names) > 1000
    assert [(file, name) for file, name in names if name.partition(".")[0] in PACKAGES] == []


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the files that reach each other: strongly connected components of more than one file, by Kosaraju's two
    passes."""
    order: list[str] = []
    backwards: dict[str, set[str]] = {file: set() for file in graph}
    for file, targets in graph.items():
        for target in targets:
            backwards[target].add(file)

    def visit(file: str, edges: dict[str, set[str]], visited: set[str], into: list[str]) -> None:
        stack = [(file, iter(sorted(edges[file])))]
        visited.add(file)
        while stack:
            rest = stack[-1][1]
            following = next((each for each in rest if each not in visited), None)
            if following is None:
                into.append(stack.pop()[0])
            else:
                visited.add(following)
                stack.append((following, iter(sorted(edges[following]))))

    visited: set[str] = set()
    for file in graph:
        if file not in visited:
            visit(file, graph, visited, order)
    components, visited = [], set()
    for file in reversed(order):
        if file not in visited:
            visit(file, backwards, visited, component := [])
            components.append(sorted(component))
    return [component for component in components if len(component) > 1]


def test_no_file_imports_itself_by_a_detour() -> None:
    """This includes imports for types only, inside of functions, or by the package's `__init__`."""
    graph = {
        file: {target for name, _ in facts(ROOT / file).imports if (target := file_of(name))} - {file} for file in FILES
    }
    assert cycles(graph) == []
    graph["_version.py"] |= {"api.py"}  # the control: whoever is below everything imports from above
    (component,) = cycles(graph)
    assert {"_version.py", "api.py", "launchers/start.py"} <= set(component)


# Of other packages, which no strategy depends on.
OTHERS: dict[str, str | tuple[str, ...]] = {
    "cli.py": "command._actions",  # argparse's
    "commands/__init__.py": "parser._actions",
    # a mode that hears of each operation on the meta device; the operation is the one by which a number leaves a tensor
    "tasks/models/chunked_loss.py": ("from torch.utils._python_dispatch", "torch.ops.aten._local_scalar_dense"),
    # torch's own operations beneath cross_entropy, which take the memory of what they give
    "tasks/cross_entropy.py": "torch.ops.aten._log_softmax",
    "tasks/models/storage_dtype.py": "getattr(base, '_keep_in_fp32_modules'",  # what transformers itself loads in fp32
    "tasks/translation.py": "metric._",  # sacrebleu's sums, without which BLEU of parts cannot be added up
    "track/trackio.py": "self._trackio._next_step",
}


# And of lockstep-trace, in which nothing else private is used.
GROUND_OTHERS: dict[str, str | tuple[str, ...]] = {
    "tracer/hooks.py": "self._scale",  # the loss scale on its device: GradScaler.get_scale waits for it
    "tracer/engines.py": (  # importlib's; and what Trainer removes from a data set
        "getattr(spec, '_initializing'",
        "getattr(kind, '_remove_unused_columns'",
    ),
    # likewise: targets, results of softmaxes, weights of attention, differences of pairs, shapes before views, tokens
    "tracer/logits.py": (
        *("getattr(node, '_", "getattr(parent, '_", "node._saved", "getattr(node, name"),
        *("softmax._saved", "embedding._saved", "under._saved"),
    ),
    # one pass over all tensors; whether Accelerate accumulates
    "tracer/lifetimes.py": ("torch._foreach_", "getattr(kind, '_shared_state'"),
    # owners of a tensor in C++, as gloo's threads
    "tracer/observers.py": ("tensor._use_count", "value._use_count", "hasattr(value, '_use_count')"),
    "tracer/modes.py": ("from torch.utils._python_dispatch", "func._schema"),  # as operations.py
    # what autograd keeps of a loss: targets, reduction, shapes, masks, ratios before a clamp; and a mode of recording
    # that is off while a number of a loss is read
    "tracer/graph.py": ("getattr(node, '_", "node._saved", "from torch.utils._python_dispatch"),
    "tracer/evidence.py": ("getattr(node, '_", "node._saved", "getattr(end, '_", "end._saved", "operand._saved"),
    # a mode that sees each operation, below those of the script; autograd's sequence numbers; what operations write
    "tracer/operations.py": (
        *("from torch.utils._python_dispatch", "from torch.utils", "dispatch._", "getattr(m, '_mode_key'", "torch._C"),
        *("torch.autograd._get_sequence_nr", "node._sequence_nr", "func._schema", "getattr(func, '_schema'"),
    ),
    "tracer/placement.py": "getattr(ddp, '_comm_hooks'",  # whether gradients are reduced in a way of the script's own
    # whether a model of transformers has any to tie; the rates of a scheduler's state, and what SequentialLR is made of
    "tracer/layouts.py": (
        "getattr(module, '_tied_weights_keys'",
        *("getattr(scheduler, '_last_lr'", "scheduler._schedulers", "scheduler._milestones"),
    ),
    "tracer/gradient_history.py": ("getattr(tensor, '_version'", "getattr(part, '_version'"),  # torch's count of writes
    "tracer/inputs.py": "torch._C",  # a tensor inside of vmap has no values
    # what a copy of a module would call beside its forward, and the module inside of a compiled one
    "tracer/replay.py": ("torch_module._global_forward", "module._orig_mod", "getattr(m, '_compiled_call_impl'"),
    # what changes a gradient on its way to a parameter
    "tracer/checker.py": ("getattr(p, '_backward_hooks'", "getattr(p, '_post_accumulate_grad_hooks'"),
}


def test_private_names_of_engines_are_used_in_adapters_only() -> None:
    for file in (f for f in FILES if not f.startswith(ADAPTERS)):
        known = OTHERS.get(file, "nothing")
        assert [name for name in facts(ROOT / file).private if not name.startswith(known)] == [], file

    for path in (f for f in PACKAGE_FILES[GROUND] if not str(f).endswith(PACKAGE_ADAPTERS)):
        known = next((name for end, name in GROUND_OTHERS.items() if str(path).endswith(end)), "nothing")
        assert [name for name in facts(path).private if not name.startswith(known)] == [], path


def test_the_ground_needs_torch_and_numpy_alone() -> None:
    """Users without lockstep install only these. Another distribution writes the page, with jinja2; DeepSpeed is
    examined if the traced script uses it."""
    names = {(file.name, name.partition(".")[0]) for file in PACKAGE_FILES[GROUND] for name, _ in facts(file).imports}
    foreign = {(file, name) for file, name in names if name not in sys.stdlib_module_names}
    own = {name for file in PACKAGE_FILES[GROUND] for name in (file.stem, file.parent.name)} | {"lockstep_tracer"}
    assert {name for _, name in foreign} - own == {"torch", "numpy", PAGE, "deepspeed"}
    assert [file for file, name in foreign if name == PAGE] == ["report.py"]
    of_page = {name.partition(".")[0] for file in PACKAGE_FILES[PAGE] for name, _ in facts(file).imports}
    assert of_page - sys.stdlib_module_names == {GROUND, "jinja2"}


def test_every_adapter_is_in_the_table() -> None:
    page = (TESTS.parent / "src/lockstep/strategies/engines/README.md").read_text()
    using = [f for f in FILES if f.startswith(ADAPTERS) and facts(ROOT / f).private]
    packages = [f for files in PACKAGE_FILES.values() for f in files if str(f).endswith(PACKAGE_ADAPTERS)]
    assert len(packages) == len(PACKAGE_ADAPTERS)
    using += [file.relative_to(CHECKOUT).as_posix() for file in packages if facts(file).private]
    assert [file for file in using if f"`{file}`" not in page] == []


def test_only_a_rank_that_may_lose_others_trains_with_recovery() -> None:
    """`training/recovery/` is not a room: it is above the loop, which it calls, and below `train_job`."""
    inside = "training/recovery/"
    asking = {
        file for file in FILES for name, _ in facts(ROOT / file).imports if (file_of(name) or "").startswith(inside)
    }
    assert {file for file in asking if not file.startswith(inside)} == {"training/train_job.py"}
    loop = [file_of(name) for file in FILES if file.startswith(inside) for name, _ in facts(ROOT / file).imports]
    assert "training/loop.py" not in loop  # `train` is handed to it


def test_the_loop_can_be_read_at_a_glance() -> None:
    lines = (ROOT / "training/loop.py").read_text().splitlines()
    documented = nodes(ROOT / "training/loop.py").of(ast.Module, ast.FunctionDef)
    texts = [n.body[0] for n in documented if ast.get_docstring(n)]
    told = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    code = [
        line for n, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#") and n not in told
    ]
    assert len(code) <= 120
    assert not [line for line in code if "Any" in line]
    assert [line for line in code if "train_step(batch" in line]


def test_no_module_patches_a_method_of_a_step() -> None:
    """`StepObserver` is the way to observe a step."""
    for file in (f for f in FILES if f.startswith(("training/", "strategies/"))):
        for node in nodes(ROOT / file).of(ast.Assign):
            names = [ast.unparse(target) for target in node.targets if isinstance(target, ast.Attribute)]
            assert not {name for name in names if name.endswith((".backward", ".loss_sum", ".train_step"))}, file


# Where a name of the run file becomes a class: the file itself, the job that is made of it, and what runs plug-ins.
PLUGIN_HOSTS = ("config/", "data/job.py", "training/resolve.py", "launchers/start.py", "track/tracker.py")
# Where names are compared, beside the kind's own room: everybody else asks the class.
KINDS = {
    "tasks": "tasks/",
    "strategies": "strategies/",
    "optimizers": "strategies/optimizers/",
    "launchers": "launchers/",
    "track": "track/",
}
NAMES_COMPARED = (
    "plain/",  # a judge that imports nothing of lockstep
    "lab/import_config/",  # what other systems call them
    "lab/init/columns.py",  # the table by which a task is guessed from columns
)


def test_plug_in_names_are_resolved_in_one_place() -> None:
    """`task.cuts_blocks` instead of a comparison with `language_modeling`, `job.task` instead of `plugins.find`."""
    finding = [file for file in FILES if facts(ROOT / file).finds]
    assert [file for file in finding if not file.startswith(PLUGIN_HOSTS)] == []
    named = {file: facts(ROOT / file).compared for file in FILES}
    comparing = [(file, kind) for file, texts in named.items() for kind in BUILT_IN if texts & BUILT_IN[kind].keys()]
    assert [pair for pair in comparing if not pair[0].startswith((KINDS[pair[1]], *NAMES_COMPARED))] == []
    for known in (*PLUGIN_HOSTS, *NAMES_COMPARED):  # no exception that nobody needs
        assert any(file.startswith(known) for file in (*finding, *(file for file, _ in comparing))), known


# Where functions up to `training/` take a whole run, and why. Everybody else takes the job, or what it reads.
RUN_TAKERS = {
    "config/": "the run file",
    "track/tracker.py": "trackers write it down, as those of the next four files",
    "track/mlflow.py": "",
    "track/tensorboard.py": "",
    "track/trackio.py": "",
    "track/wandb.py": "",
    "data/job.py": "the job is made of it",
    "data/prepare.py": "resolve prepares its data",
    "data/tokenizer.py": "picks the values that decide its tokenizer",
    "tasks/models/model_configs.py": "picks the values that decide its model",
    "tasks/modules/dataset.py": "picks the values that the user's functions depend on",
    "tasks/models/models.py": "fits its defaults to the model, for resolve",
    "checkpoint/manifest.py": "picks the values that tell whether it is finished",
    "checkpoint/remote_sync.py": "writes it into the object store",
    "distributed/world.py": "a rank is there before it resolves its run",
    "strategies/engines/zero_agreement.py": "refuses it, for resolve",
    "training/resolve.py": "makes the job",
    "training/rank.py": "makes the job, if its launcher did not",
    "training/evaluate_export.py": "makes the job of a command",
    "training/summary.py": "shows how to train it elsewhere",
}


def test_who_takes_a_run() -> None:
    taking = {file for file in FILES if floor(file) <= ROOMS.index("training") and facts(ROOT / file).takes_run}
    assert sorted(file for file in taking if not file.startswith(tuple(RUN_TAKERS))) == []
    for known in RUN_TAKERS:
        assert any(file.startswith(known) for file in taking), known


def test_tasks_know_nothing_of_ranks() -> None:
    tasks = [file for file in FILES if file.startswith("tasks/")]
    knowing = [f for f in tasks if any(n.startswith("torch.distributed") for n, _ in facts(ROOT / f).imports)]
    assert tasks
    assert knowing == []


SUBMITTING = ("config/", "launchers/", "commands/", "cli.py")
ELASTIC = ("launchers/processes/elastic", "launchers/processes/surviving_ranks.py")  # runs on machines that train


def test_modules_for_submission_import_no_torch_at_the_top() -> None:
    needed = [ROOT / file for file in FILES if file.startswith(SUBMITTING) and not file.startswith(ELASTIC)]
    needed += PACKAGE_FILES["lockstep_clouds"]
    heavy = ("torch", "transformers", "datasets")
    at_top = [(file, name) for file in needed for name, top in facts(file).imports if top]
    assert at_top
    assert [f"{file}: {name}" for file, name in at_top if name.split(".")[0] in heavy] == []


def test_a_file_can_be_held_in_the_head() -> None:
    paths = [*ROOT.rglob("*.py"), *TESTS.rglob("*.py"), *(file for files in PACKAGE_FILES.values() for file in files)]
    lines = {path: len(path.read_text().splitlines()) for path in paths}
    assert {str(path): count for path, count in lines.items() if count >= 700} == {}


def test_a_function_can_be_read_without_scrolling() -> None:
    paths = [*(ROOT / file for file in FILES), *(file for files in PACKAGE_FILES.values() for file in files)]
    assert [f"{file}: {name}" for file in paths for name, lines in facts(file).functions.items() if lines >= 60] == []


def test_a_conditional_expression_holds_no_other() -> None:
    """Three outcomes need a separate statement. ruff limits complexity: max-complexity in pyproject.toml."""
    sources = [path for folder in ("src", "packages") for path in sorted((CHECKOUT / folder).rglob("*.py"))]
    assert len(sources) > 400
    nested = [
        f"{path.relative_to(CHECKOUT)}:{node.lineno}"
        for path in sources
        for node in nodes(path).of(ast.IfExp)
        if any(isinstance(inner, ast.IfExp) for part in (node.test, node.body, node.orelse) for inner in ast.walk(part))
    ]
    assert nested == []


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["--help"], ["plan"], ["schema"]])
def test_these_commands_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from lockstep.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    if arguments == ["--help"]:
        code = code.replace("{'torch',", "{'pydantic', 'yaml', 'rich', 'torch',")
    if arguments == ["plan"]:
        code = code.replace("['plan']", "['plan', 'launch.name=kubernetes', 'launch.image=x', 'launch.pvc=y']")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.processes
def test_a_strategy_takes_no_transformers_before_there_is_a_model() -> None:
    """`init` and `plan` ask a strategy for its abilities; they need no more for a table whose tokens are cached."""
    code = "import sys, lockstep.strategies.ddp, lockstep.lab.init.init\nsys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
