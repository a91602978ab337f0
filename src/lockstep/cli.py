"""The commands. Imports no torch at the top, so that `lockstep --help` answers at once.

In: arguments. Out: an exit status: 0 done, 1 failed, 2 bad usage or run file, 75 stopped on request and resumable.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.tokens import Prepared
    from lockstep.launchers.launcher import Launcher, Plan
    from lockstep.run import Run

# The quick start: `lockstep train` without a run file.
QUICK_START = {
    "name": "quickstart",
    "data": {"source": "builtin/emotion", "max_length": 64},
    "model": {
        "type": "gpt2",
        "config": {
            "n_layer": 2,
            "n_head": 8,
            "n_embd": 96,
            "n_positions": 64,
            "initializer_range": 0.04,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    },
    "tokenizer": {"train": "bpe", "vocab_size": 1000},
    "epochs": 3,
    "batch_size": 64,
    "micro_batches": 4,
    "optim": {"learning_rate": 1.5e-3, "schedule": "linear", "warmup_fraction": 0.1, "betas": [0.9, 0.98]},
    "launch": {"processes": 2},
    "checkpoint": {"every": 100},
}


def main(arguments: list[str] | None = None) -> int:
    """The `lockstep` command."""
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description="Train text transformers: the same weights on one process or many, bit for bit.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, help_text in (
        ("train", "train a run file to its end, or go on with it; without one, the built-in quick start"),
        ("plan", "show what would be started; start nothing"),
        ("verify", "compare a few steps of a run with the same steps as one process"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("run", nargs="?", metavar="RUN.yaml", help="the run file; default: the quick start")
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="override keys, for example optim.learning_rate=3e-5",
        )
        command.add_argument("--debug", action="store_true", help="show tracebacks")
        if name == "verify":
            command.add_argument("--steps", type=int, default=5, help="steps to compare (default 5)")
    report = commands.add_parser("report", help="write OUTPUT/report.html again")
    report.add_argument("output", nargs="+")
    score = commands.add_parser("evaluate", help="metrics of the exported model of OUTPUT")
    score.add_argument("output")
    score.add_argument("--split", help="train, validation or test; default: the last two")
    score.add_argument("overrides", nargs="*", metavar="key=value", help="for example task.beams=4")
    ask = commands.add_parser("predict", help="what the exported model of OUTPUT makes of a text")
    ask.add_argument("output")
    ask.add_argument("texts", nargs="*", metavar="TEXT", help="default: the lines of standard input")
    ask.add_argument("--set", action="append", default=[], metavar="key=value", help="for example task.beams=4")
    push = commands.add_parser("push", help="upload OUTPUT/export to the Hub (token from HF_TOKEN)")
    push.add_argument("output")
    push.add_argument("repository", metavar="USER/REPO")
    push.add_argument("--public", action="store_true", help="create the repository public")
    commands.add_parser("list", help="tasks, strategies, launchers and trackers a run file can name")
    commands.add_parser("schema", help="print the JSON Schema of run files")
    known, rest = parser.parse_known_args(_joined(sys.argv[1:] if arguments is None else arguments))
    if known.version:
        from lockstep import __version__

        print(f"lockstep {__version__}")
        return 0
    if known.command is None:
        parser.print_help()
        return 2
    from lockstep.console import error
    from lockstep.run import RunError

    try:
        return _dispatch(known, rest)
    except RunError as caught:
        if os.environ.get("RANK", "0") == "0":
            error(str(caught))
        if getattr(known, "debug", False):
            raise
        return 2
    except KeyboardInterrupt:
        error("interrupted")
        return 130


def _dispatch(known: argparse.Namespace, rest: list[str]) -> int:
    from lockstep.run import RunError, schema

    if known.command not in ("train", "plan", "verify") and rest:
        raise RunError(f"unknown argument {rest[0]}; see lockstep {known.command} --help")
    if known.command == "schema":
        print(json.dumps(schema(), indent=2))
        return 0
    if known.command == "list":
        return _list()
    if known.command == "report":
        return _report(known.output)
    if known.command in ("evaluate", "predict"):
        from lockstep import evaluate

        output = Path(known.output)
        if known.command == "predict":
            return evaluate.predict(output, known.texts, known.set)
        return evaluate.evaluate(output, known.split, known.overrides)
    if known.command == "push":
        from lockstep.hub import publish

        print(publish(Path(known.output) / "export", known.repository, not known.public))
        return 0
    run = _load(known, rest)
    if known.command == "plan":
        return _plan(run)
    return _verify(run, known.steps) if known.command == "verify" else train(run)


def _load(known: argparse.Namespace, rest: list[str]) -> Run:
    from lockstep.run import RunError, load

    if rest:
        raise RunError(f"unknown argument {rest[0]!r}; an override is key=value, --key=value or --key value")
    overrides = [known.run, *known.overrides] if known.run is not None else []
    path = next((word for word in overrides if "=" not in word), None)
    if path is not None:
        overrides.remove(path)
    return load(path, overrides, QUICK_START)


def _joined(words: list[str]) -> list[str]:
    """`--key value` and `--key=value` as `key=value`, which argparse takes in any order; only commands that take a run
    file have such keys, and `verify --steps` is its own option."""
    if not words or words[0] not in ("train", "plan", "verify"):
        return words
    found, options, rest = [], [], list(words[1:])
    while rest:
        word = rest.pop(0)
        if words[0] == "verify" and word.partition("=")[0] == "--steps":  # argparse wants it before what has no name
            options += [word] if "=" in word or not rest else [word, rest.pop(0)]
            continue
        if word.startswith("--") and word not in ("--debug", "--help") and ("=" in word or rest):
            word = word[2:] if "=" in word else f"{word[2:]}={rest.pop(0)}"
        found.append(word)
    return [words[0], *options, *found]


def train(run: Run) -> int:
    """Check everything that can be checked, then start or join the processes."""
    from lockstep.console import Console
    from lockstep.run import keep

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # under torchrun, accelerate launch, srun: join
        from lockstep import worker

        return worker.main(run)
    launcher: Launcher = _find("launch.name", "launchers", run.launch.name)()
    plan = launcher.plan(run)
    if plan.processes > 1 and run.launch.name == "local":
        from lockstep.launchers.local import prestart

        prestart()
    prepared = _prepare(run, plan)
    from lockstep.checkpoint import check_resumable, finished

    manifest = check_resumable(run, prepared)
    if finished(run, manifest) and not launcher.joins:
        assert manifest is not None
        Console(True).say(f"{run.folder} is finished ({manifest.steps} steps); the model is in {run.folder}/export")
        return 0
    if plan.variables.get("RANK", "0") == "0":
        keep(run)
    return launcher.start(run, plan)


def _verify(run: Run, steps: int) -> int:
    from lockstep.run import RunError

    if steps < 1:
        raise RunError(f"--steps: {steps} is not a positive number of steps")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from lockstep.verify import verify

        return verify(run, None, steps)
    launcher: Launcher = _find("launch.name", "launchers", run.launch.name)()
    plan = launcher.plan(run)
    if plan.processes > 1 and run.launch.name == "local":
        from lockstep.launchers.local import prestart

        prestart()
    _prepare(run, plan)
    from lockstep.verify import verify

    return verify(run, launcher, steps)


def _prepare(run: Run, plan: Plan) -> Prepared:
    """Data, tokens, and every check that needs no process group. Errors: `RunError`."""
    from lockstep import plugins
    from lockstep.data.prepare import prepare

    strategy: Any = _find("strategy.name", "strategies", run.strategy.name)
    for name in run.track.to:
        tracker: Any = _find("track.to", "track", name)
        tracker.check()
    strategy.variant(run).check(run, plan.processes)
    return prepare(run, plugins.find("tasks", run.task.name), fresh=True)


def _find(key: str, kind: str, name: str) -> type:
    from lockstep import plugins
    from lockstep.run import RunError

    try:
        return plugins.find(kind, name)
    except (plugins.PluginError, ImportError) as error:
        raise RunError(f"{key}: {error}") from error


def _plan(run: Run) -> int:
    import shlex

    from lockstep.console import Console

    launcher: Launcher = _find("launch.name", "launchers", run.launch.name)()
    plan = launcher.plan(run)
    console = Console(True)
    counts = {r * run.micro_batches // plan.processes for r in range(plan.processes + 1)}
    bounds = sorted(counts)
    shares = sorted({b - a for a, b in itertools.pairwise(bounds)})
    each = f"each with {' or '.join(map(str, shares))} of {run.micro_batches} micro-batches a step"
    if run.strategy.name == "pipeline" or "tensor_parallel" in run.strategy.options:
        each = f"{run.micro_batches} micro-batches a step, some processes working on the same ones"
    console.facts(
        {
            "launcher": run.launch.name,
            "processes": f"{plan.processes}, {each}",
            "command": shlex.join(plan.command),
            "variables": " ".join(f"{k}={v}" for k, v in plan.variables.items()) or "none",
            "strategy": f"{run.strategy.name}{', exact where it can be' if run.strategy.exact else ''}",
            "length": f"{run.steps} steps" if run.steps else f"{run.epochs:g} epochs",
            "output": str(run.folder),
        }
    )
    for path, text in plan.files.items():
        console.say(f"--- {path}\n{text}")
    for note in plan.notes:
        console.say(f"note: {note}")
    return 0


def _list() -> int:
    from lockstep import plugins
    from lockstep.console import Console

    console = Console(True)
    rows = []
    for name in plugins.names("strategies"):
        strategy: Any = plugins.find("strategies", name)
        summary = (sys.modules[strategy.__module__].__doc__ or "").strip().partition("\n")[0]
        lacking = strategy.lacking()
        rows.append(
            [
                name,
                summary,
                "same bits" if strategy.exact else "rounding",
                "yes" if not lacking else f"no: pip install 'lockstep-train[{lacking[0]}]'",
            ]
        )
    console.table("strategies", ["name", "what it is", "against single", "runs here"], rows)
    for kind in ("tasks", "launchers", "track"):
        console.facts({kind: ", ".join(plugins.names(kind))})
    return 0


def _report(outputs: list[str]) -> int:
    from lockstep.report import write_report
    from lockstep.run import RunError

    for output in outputs:
        try:
            print(write_report(Path(output)))
        except (OSError, ValueError) as error:
            raise RunError(f"{output} is not the output folder of a run: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
