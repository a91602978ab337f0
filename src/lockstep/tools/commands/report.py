"""`lockstep report`: the page of a run, written again; of several runs also one that shows them side by side."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from lockstep.config.run import RunError

EVERY_S = 5  # between two forms of a live page


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", nargs="+", metavar="OUTPUT", help="output folder of a run, at any stage, or a trace")
    parser.add_argument(
        "--to", metavar="FILE.html", help="where the comparison goes; default: comparison.html beside the folders"
    )
    parser.add_argument(
        "--live", action="store_true", help="write the page again and again while the run goes on; it loads itself anew"
    )


def main(known: argparse.Namespace) -> int:
    from lockstep.trace.read import is_trace
    from lockstep.track.report.report import write_comparison, write_report

    folders = [Path(output) for output in known.output]
    if any(traced := [is_trace(folder) for folder in folders]):
        return of_traces(known, folders, all(traced))
    if known.live:
        if len(folders) > 1 or known.to is not None:
            raise RunError("--live: it writes the page of one output folder")
        return watched(folders[0])
    if known.to is not None and len(folders) == 1:
        raise RunError("--to: a comparison needs two output folders or more")
    for folder in folders:
        try:
            print(write_report(folder))
        except (OSError, ValueError) as error:
            raise RunError(f"{folder} is not the output folder of a run, or cannot be written to: {error}") from None
    if len(folders) > 1:
        beside = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
        path = Path(known.to) if known.to is not None else beside / "comparison.html"
        try:
            print(write_comparison(folders, path))
        except (OSError, ValueError) as error:
            raise RunError(f"the comparison of {len(folders)} runs could not be written: {error}") from None
    return 0


def watched(folder: Path) -> int:
    """Write the page of a run until the run has ended, or this is interrupted; its last form does not load itself
    again. Returns the exit status. Errors: `RunError`."""
    from lockstep.distributed import job_record
    from lockstep.tools.commands.status import run_of, state_of
    from lockstep.track.report.report import Live, write_report

    told = False
    try:
        while True:
            run, _ = run_of(str(folder))
            record = job_record.read(folder)
            state = state_of(run, record)
            steps = record.steps if record is not None else None
            page = write_report(folder, Live(EVERY_S, "training" if state.word == "running" else state.word, steps))
            if not told:
                print(page.resolve().as_uri(), flush=True)
                told = True
            if not (state.live or (state.word == "unknown" and record is not None)):
                break
            time.sleep(EVERY_S)
    except KeyboardInterrupt:  # enough was seen; the run goes on
        pass
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} is not the output folder of a run, or cannot be written to: {error}") from None
    write_report(folder)
    return 0


def of_traces(known: argparse.Namespace, folders: list[Path], every: bool) -> int:
    """The page of a trace; of two the page of the second beside the first, the reference."""
    from lockstep.tools import traces

    if not every or len(folders) > 2 or known.live or known.to is not None:
        raise RunError("a page is made of one trace, or of two, the reference first; without --live and --to")
    print(traces.page(folders[-1], folders[0] if len(folders) == 2 else None))
    return 0
