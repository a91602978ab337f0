"""Commands for a run in progress, on any launcher: `lockstep status`, `logs`, `stop` and `report`.

In: the parser, then the parsed command line. Out: an exit status. An output folder may come from a stranger, so no
module that it names is imported without `--trust`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import export_hashes
from lockstep.config.error_messages import read_yaml
from lockstep.config.errors import coded, reason_of
from lockstep.config.output_files import require_output
from lockstep.config.run import Run, RunError, load, override_of
from lockstep.distributed import job_record
from lockstep.distributed.job_record import JobRecord, State
from lockstep.launchers import output_lock, start
from lockstep.track import history, json_output
from lockstep.track.console import Console, error
from lockstep_trace import streams
from lockstep_trace.coded import quantity
from lockstep_trace.redaction import printable

if TYPE_CHECKING:
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.launchers.launcher import Launcher


def status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output")
    what = "read every byte of the checkpoints and the export; status 1 where one is damaged"
    parser.add_argument("--verify", action="store_true", help=what)
    trust(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run_status(args: argparse.Namespace) -> int:
    run, record = run_and_record(args.output, args.trust)
    state = state_of(run.folder, record, args.trust)
    metrics = last_metrics(run.folder)
    sound, damaged = checkpoints(run.folder, args.verify)
    total = (record.steps if record else None) or next((m.steps for m in sound.values()), None) or run.steps
    reached = (record.reached if record else None) or 0
    recorded = max((line["step"] for line in metrics.values()), default=0)
    step = max([recorded, reached, *sound])
    ended = came_to_its_end(run, sound, total or 0)
    finished = ended and export_hashes.missing(run.folder) is None
    lacking = _lacks_export(run.folder, record, state)
    looks = args.verify and not state.live and (lacking or (run.folder / "export").is_dir())
    if looks and (fault := export_hashes.damage(run.folder)) is not None:
        finished, damaged["export"] = False, fault
    edits = export_hashes.note_of_edits(run.folder) if looks and "export" not in damaged else None
    rescued = record.rescued if record and not finished else None
    status = int(args.verify and bool(damaged))
    if args.json:
        facts = {
            "output": str(run.folder),
            "launcher": record.launcher if record else None,
            "job": record.job if record else None,
            "state": state.word,
            "text": state.text,
            "status": state.status,
            "step": step,
            "steps": total,
            "finished": finished,
            "metrics": metrics,
            "checkpoints": sorted(sound),
            "damaged": damaged,
            "taken_out": [asdict(each) for each in job_record.evictions_of(run.folder)],
            "resumable_from": max(sound, default=None) if not finished else None,
            "rescued": rescued,
        }
        return json_output.emit("status", status, facts)
    rows = {"run": f"{run.name} -> {run.folder}"}
    rows |= {"launched": origin(record)} if record else {}
    rows["state"] = state_sentence(state)
    rows["step"] = f"{step} of {total} ({100 * step // total}%)" if total else str(step)
    rows |= {split: numbers_in(line) for split, line in metrics.items()}
    if reached - recorded >= run.track.every:
        rows["records"] = (
            f"metrics.jsonl ends at step {recorded}: later lines could not be written, for example on a full disk"
        )
    rows["saved"] = ", ".join(f"step {s}" for s in sorted(sound)) or "no checkpoint"
    for name, reason in damaged.items():
        rows[name] = f"cannot be used: {reason}"
    if edits is not None:
        rows["export"] = edits
    if rescued is not None:
        lost = ", which does not exist any more" * (not os.path.lexists(rescued))
        rows["rescued"] = f"the model is in {rescued}{lost}"
    if gone := job_record.evictions_of(run.folder):
        rows["taken out"] = "; ".join(map(str, gone))
    where = max(sound, default=None), ended, lacking or "export" in damaged
    rows["resume"] = advice(run.folder, state, finished, *where)
    Console(True).facts(rows)
    return status


def _lacks_export(folder: Path, record: JobRecord | None, state: State) -> bool:
    """Return whether a run that is done has no whole export, although its disk was not full."""
    rescued = record is not None and record.rescued is not None
    return state.status == 0 and not rescued and export_hashes.missing(folder) is not None


NOT_WRITTEN = f"there is no readable {job_record.FILE}: no run was launched into this folder"


def trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust`, for commands whose OUTPUT may come from a stranger."""
    parser.add_argument(
        "--trust", action="store_true", help="OUTPUT is yours: import the modules that its files name, if any"
    )


def launcher_of(record: JobRecord, trusted: bool) -> Launcher:
    """Return the launcher named in launch.json. Errors: `RunError` for a class of a module, unless OUTPUT is
    trusted."""
    if "." in record.launcher and not trusted:
        raise RunError(
            "LS8130",
            f"{job_record.FILE} names the launcher {record.launcher}, whose module would be imported; if you "
            "trust this output folder, add --trust",
        )
    return start.launcher_named(record.launcher)


def run_and_record(output: str, trusted: bool = False) -> tuple[Run, JobRecord | None]:
    """Return the run of an output folder and its last launch, without importing untrusted modules. Errors: `RunError`
    if it is not an output folder."""
    folder = Path(output)
    record, state = output_lock.now(folder, job_record.read(folder))
    if not (folder / "run.yaml").is_file():
        if state is not None:
            doing = " is preparing a run there; there is nothing to show yet" if state.live else ". Nothing was saved"
            raise RunError("LS8131", f"{output}: {state.text}{doing}")
        require_output(folder)
    return load(folder / "run.yaml", [f"output={json.dumps(output)}"], imports=trusted), record


def state_of(folder: Path, record: JobRecord | None, trusted: bool = False) -> State:
    """Return the present state of the run. Errors: `RunError` if the launcher cannot be asked."""
    if record is None:
        return State("unknown", NOT_WRITTEN)
    state = launcher_of(record, trusted).state(folder, record)
    _, lock_state = output_lock.now(folder, record)
    return lock_state if lock_state is not None and state.word in ("unknown", "gone") else state


def origin(record: JobRecord) -> str:
    """Describe how, where and when the run was launched."""
    how = record.launcher or "another launcher (such as torchrun)"
    job = f", job {record.job}" if record.job else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.began))
    return f"{how}{job}, {quantity(record.processes, 'process')}, from {record.process.host}, {when}"


def state_sentence(state: State) -> str:
    """Describe the state in a sentence."""
    words = {
        "done": "finished (exit status 0)",
        "stopped": "stopped on request (exit status 75)",
        "failed": f"failed (exit status {state.status})" if state.status is not None else "failed",
    }
    if state.word == "failed" and state.status == 130:  # Ctrl-C before training, or twice
        words["failed"] = "interrupted (exit status 130)"
    return words.get(state.word, state.word) + (f": {state.text}" if state.text else "")


def numbers_in(line: Mapping[str, Any]) -> str:
    """Describe a line of metrics.jsonl, without the ratios of padding."""
    skipped = ("step", "split", "padding", "padding_by_chance")
    numbers = {k: v for k, v in line.items() if k not in skipped and isinstance(v, int | float)}
    return f"step {line['step']}: " + ", ".join(f"{k} {v:.4g}" for k, v in numbers.items())


def last_metrics(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of metrics.jsonl for each split."""
    return {line["split"]: line for line in history.lines_of(folder / "metrics.jsonl", ("step", "split"))}


def checkpoints(folder: Path, thorough: bool) -> tuple[dict[int, Manifest], dict[str, str]]:
    """Return the resumable checkpoints by step, and the faults of the others by name. File contents are compared with
    their hashes only if `thorough`."""
    from lockstep.checkpoint.manifest import broken, candidates, misfit

    sound: dict[int, Manifest] = {}
    damaged: dict[str, str] = {}
    for path, manifest in candidates(folder):
        if isinstance(manifest, str):
            damaged[path.name] = manifest or "not readable"
        elif (reason := broken(path, manifest) if thorough else misfit(path, manifest)) is not None:
            damaged[path.name] = reason
        else:
            sound[manifest.step] = manifest
    return sound, damaged


def came_to_its_end(run: Run, sound: dict[int, Manifest], total: int) -> bool:
    """Return whether the newest checkpoint is from the run's last step."""
    from lockstep.checkpoint.manifest import Goal

    return bool(sound) and (max(sound) >= total or Goal.of(run).ended_at(sound[max(sound)]))


def advice(
    folder: Path, state: State, finished: bool, newest: int | None, ended: bool = False, damaged: bool = False
) -> str:
    """Say whether the run can continue, from where, and how. `ended`: its last step has a checkpoint. `damaged`: the
    export differs from what was written."""
    if finished:
        return f"nothing left to do; the model is in {folder / 'export'}"
    words = ["lockstep", "train", str(folder / "run.yaml")]
    if Path(str(read_yaml((folder / "run.yaml").read_text(encoding="utf-8")).get("output"))) != folder:
        # Commands as in this folder: the run was started in another one.
        words.append(override_of("output", str(folder)))
    again = shlex.join(words)
    if state.live:
        where = f"step {newest}" if newest else "the start"
        return (
            f"starts from {where} when it is scheduled" if state.word == "waiting" else f"from {where}, if killed now"
        )
    if damaged and ended:
        return f"`{again}` writes the export again, from the checkpoint of step {newest}"
    if state.word == "done" and not damaged and (folder / "export" / "config.json").exists():
        where = f"step {newest}" if newest else "the start"
        return f"the model is in {folder / 'export'}, but its checkpoint is gone: `{again}` trains from {where}"
    if newest is None:
        return f"there is no checkpoint: `{again}` starts over"
    return f"`{again}` resumes from step {newest}"


def logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output")
    trust(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="follow the log until the run ends")
    parser.add_argument("--tail", type=int, metavar="N", help="start with the last N lines")


def run_logs(args: argparse.Namespace) -> int:
    run, record = run_and_record(args.output, args.trust)
    if record is None:
        raise RunError("LS8133", f"{args.output}: {NOT_WRITTEN}")
    if args.tail is not None and args.tail < 0:
        raise RunError("LS8134", f"--tail: invalid value {args.tail}; expected an integer >= 0 (lines)")
    launcher = launcher_of(record, args.trust)
    skip = 0
    if args.tail is not None:
        lines = collections.deque(enumerate(launcher.logs(run.folder, record, False)), args.tail or 1)
        skip = lines[0][0] + (args.tail == 0) if lines else 0
    for place, line in enumerate(launcher.logs(run.folder, record, args.follow)):
        if place >= skip:
            print(printable(line), flush=args.follow)
        if streams.reader_is_gone():
            break
    return 0


def stop_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output")
    trust(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=300,
        metavar="SECONDS",
        help="seconds to wait for its end (default 300); 0: do not wait",
    )


def run_stop(args: argparse.Namespace) -> int:
    """Stop a run. Returns 0 if it has ended (or, with `--wait 0`, was asked to), 1 if it still runs."""
    run, record = run_and_record(args.output, args.trust)
    if record is None:
        raise RunError("LS8135", f"{args.output}: {NOT_WRITTEN}")
    if args.wait < 0:
        raise RunError("LS8136", f"--wait: invalid value {args.wait:g}; expected a number >= 0 (seconds)")
    if not args.trust and (owner := job_record.stranger(run.folder)) is not None:
        raise RunError(
            "LS8137",
            f"{args.output}/{job_record.FILE} belongs to user {owner}, who could have named any of your "
            "processes or jobs in it; if you trust it, add --trust",
        )
    launcher, console = launcher_of(record, args.trust), Console(True)
    state = state_of(run.folder, record, args.trust)
    if not state.live and state.word != "unknown":
        console.say(f"{run.folder} is not running: {state_sentence(state)}")
        return 0
    console.say(launcher.stop(run.folder, record))
    until = time.monotonic() + args.wait
    while (state := state_of(run.folder, record, args.trust)).live and time.monotonic() < until:
        time.sleep(0.2 if record.job is None else 2.0)  # poll a scheduler less often
    console.say(f"{run.folder}: {state_sentence(state)}")
    if state.live and args.wait:
        error(
            coded(
                "LS8138",
                f"the run has not ended after {args.wait:g} s; it ends after its current step and a checkpoint. "
                "Raise --wait to wait longer",
            )
        )
        return 1
    return 0


LIVE_EVERY_S = 5  # between two updates of a live page


def report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", nargs="+", metavar="OUTPUT", help="output folder of a run, at any stage, or a trace")
    parser.add_argument(
        "--to", metavar="FILE.html", help="file of the comparison; default: comparison.html beside the folders"
    )
    parser.add_argument(
        "--live", action="store_true", help="update the page while the run trains; the page reloads itself"
    )


def run_report(args: argparse.Namespace) -> int:
    from lockstep.track.report.report import DAMAGED, write_comparison, write_report
    from lockstep_trace.read import is_trace

    folders = [Path(output) for output in args.output]
    if any(traced := [is_trace(folder) for folder in folders]):
        return of_traces(args, folders, all(traced))
    if args.live:
        if len(folders) > 1 or args.to is not None:
            raise RunError("LS8139", "--live: supports one output folder only")
        return watched(folders[0])
    if args.to is not None and len(folders) == 1:
        raise RunError("LS8140", "--to: writes a comparison, which needs two output folders or more")
    for folder in folders:
        require_output(folder)
        what = f"the report of {folder}"
        try:
            print(write_report(folder))
        except OSError as error:
            raise RunError("LS8141", _not_written(what, error, folder / "report.html")) from None
        except DAMAGED as error:
            raise RunError("LS8530", _not_readable(what, [folder], error)) from None
    if len(folders) > 1:
        common_folder = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
        path = Path(args.to) if args.to is not None else common_folder / "comparison.html"
        what = f"the comparison of {len(folders)} runs"
        try:
            print(write_comparison(folders, path))
        except OSError as error:
            raise RunError("LS8142", _not_written(what, error, path)) from None
        except DAMAGED as error:
            raise RunError("LS8510", _not_readable(what, folders, error)) from None
    return 0


def _not_written(what: str, error: OSError, path: Path) -> str:
    """Return the message for a page that cannot be written, or whose input cannot be read."""
    return f"{what} cannot be written: {error.filename2 or error.filename or path}: {reason_of(error).lower()}"


def _not_readable(what: str, folders: list[Path], error: Exception) -> str:
    """Return the message for a page whose input holds values that lockstep does not write."""
    from lockstep.track.report.report import damaged_records

    damage = str(error)
    if "run.yaml" not in damage:
        files = [str(folder / name) for folder in folders for name in damaged_records(folder)]
        named = " and ".join(files) or "a record in it (a .jsonl file, tables.json or scores.json)"
        holds = "hold" if len(files) > 1 else "holds"
        damage = f"{named} {holds} other values than lockstep writes ({type(error).__name__}: {error})"
    return f"{what} cannot be written: {damage}. Restore it, or move it away"


def watched(folder: Path) -> int:
    """Update the page of a run until the run ends or the command is interrupted; its last version does not reload
    itself. Returns the exit status. Errors: `RunError`."""
    from lockstep.distributed import job_record
    from lockstep.track.report.report import DAMAGED, Live, write_report

    announced = False
    try:
        while True:
            run, _ = run_and_record(str(folder))
            record = job_record.read(folder)
            state = state_of(run.folder, record)
            steps = record.steps if record is not None else None
            page = write_report(
                folder, Live(LIVE_EVERY_S, "training" if state.word == "running" else state.word, steps)
            )
            if not announced:
                print(page.resolve().as_uri(), flush=True)
                announced = True
            if not (state.live or (state.word == "unknown" and record is not None)):
                break
            time.sleep(LIVE_EVERY_S)
    except KeyboardInterrupt:  # ends only the display: the run continues
        pass
    except OSError as error:
        raise RunError("LS8143", _not_written(f"the report of {folder}", error, folder / "report.html")) from None
    except DAMAGED as error:
        raise RunError("LS8511", _not_readable(f"the report of {folder}", [folder], error)) from None
    write_report(folder)
    return 0


def of_traces(args: argparse.Namespace, folders: list[Path], every: bool) -> int:
    """Write the page of a trace; of two traces, the page of the second compared with the first, the reference."""
    from lockstep_trace.report import write

    if not every or len(folders) > 2 or args.live or args.to is not None:
        raise RunError("LS8144", "expected one trace, or two with the reference first, without --live and --to")
    print(write(folders[-1], folders[0] if len(folders) == 2 else None))
    return 0
