"""Reads the records of a run from its output folder: run file, numbers, events, times of each rank, samples, tables.

In: OUTPUT of a run that is finished, stopped, killed or in progress. Out: one `History`. Skips incomplete lines, which
a kill may leave; of a repeated step the last line counts. Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from pydantic import ValidationError

from lockstep.config.model_selection import Best
from lockstep.config.schedules import planned
from lockstep.config.sections import OptimSection
from lockstep.track.console import LOG

_ERROR = re.compile(r"lockstep: (.+ \[LS\d{4}\])$")
SCORES = "scores.json"  # in OUTPUT: scores of the exported model
# Phases of local work, if they contain no waiting for other ranks: `distributed/step_timer.py`.
COMPUTE = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Attempt:
    """One start of the run's processes, until their end."""

    began: float  # unix seconds
    ended: float  # time of the last event
    first: int  # updates done at the start
    last: int  # updates done at the last event
    how: str  # finish | stop | failed | lost (killed, or still running)
    facts: dict[str, Any]  # facts of the start event: versions, hosts, launch, ...


_MOST_DIGITS = 300  # maximum length of an integer that is read; the largest float has 309 digits
FEWEST_RANKS = 3  # with two ranks, neither is typical
FEWEST_STEPS = 50  # fewer are noise: first steps allocate, and other programs interfere
SLOW = 1.15  # straggler: this multiple of the median of the other ranks


@dataclass(frozen=True)
class Slowest:
    """The rank with the most local work, relative to the median of the others, from the second log point on."""

    rank: int
    host: str
    ratio: float  # local work per micro-batch over the others' median; median of all log points
    ratio_of_step: float  # the same of the work per step: how long the others wait
    seconds: float  # total time above the others' median
    steps: int  # timed steps
    ranks: int

    @property
    def can_tell(self) -> bool:
        """Whether there are enough ranks and steps to judge."""
        return self.ranks >= FEWEST_RANKS and self.steps >= FEWEST_STEPS

    @property
    def straggles(self) -> bool:
        """Whether the rank is a straggler: slow most of the time, and not by chance."""
        return self.can_tell and min(self.ratio, self.ratio_of_step) >= SLOW


@dataclass(frozen=True)
class History:
    """All records of a run in its output folder."""

    folder: Path
    text: str  # text of run.yaml
    run: dict[str, Any]
    metrics: list[dict[str, Any]]
    ranks: list[dict[str, Any]]  # lines of ranks.jsonl: seconds of each rank in each phase between log points
    system: list[dict[str, Any]]  # lines of system.jsonl: resource usage of each rank
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    tables: dict[str, dict[str, Any]]  # split -> name -> table
    profiles: list[dict[str, Any]]
    scores: dict[str, Any]  # of the exported model: its step, and numbers by split

    @property
    def name(self) -> str:
        return str(self.run.get("name") or self.folder.name)

    def series(self, split: str, key: str) -> list[tuple[float, float]]:
        """Return (step, value) of the finite values of a metric."""
        values = ((line["step"], line.get(key)) for line in self.metrics if line["split"] == split)
        return [(float(x), float(y)) for x, y in values if isinstance(y, int | float) and math.isfinite(y)]

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """split -> metrics, except train: of the exported model, or else of the last evaluation."""
        if self.state == "finished" and self.scores:
            return {split: {"step": self.scores["step"], **numbers} for split, numbers in self.scores["splits"].items()}
        latest: dict[str, dict[str, Any]] = {}
        for line in self.metrics:
            if line["split"] != "train":
                latest[line["split"]] = {k: v for k, v in line.items() if k != "split"}
        return latest

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All starts, in order; empty for a folder without events."""
        places = [i for i, event in enumerate(self.events) if event["event"] == "start"]
        rows = []
        for place, after in zip(places, [*places[1:], len(self.events)], strict=False):
            start, events = self.events[place], self.events[place:after]  # in file order: clocks may be set back
            until = self.events[after]["time"] if after < len(self.events) else math.inf
            during = [*events, *(line for line in self.ranks if start["time"] <= line["time"] < until)]
            ends = [e["event"] for e in events if e["event"] in ("finish", "stop", "failed")]
            rows.append(
                Attempt(
                    start["time"],
                    max(sign["time"] for sign in during),
                    start["step"],
                    max(sign["step"] for sign in during if "step" in sign),
                    ends[-1] if ends else "lost",
                    start,
                )
            )
        return rows

    @cached_property
    def best(self) -> Best:
        """The best evaluation by the run file's metric."""
        saved = Best(_section(self.run, "checkpoint").get("best"))
        for line in self.metrics:
            if line["split"] == "validation":
                saved.update(line["step"], line)
        return saved

    @property
    def state(self) -> str:
        """Describe the state of the run in a few words."""
        words = {"finish": "finished", "stop": "stopped on request", "failed": "failed", "lost": "not finished"}
        if self.attempts:
            return words[self.attempts[-1].how]
        return "finished" if (self.folder / "export" / "config.json").is_file() else "not finished"

    @property
    def newest_checkpoint(self) -> int:
        """The step of the newest checkpoint in the folder or its journal, or 0."""
        steps = [event["step"] for event in self.events if event["event"] == "checkpoint"]
        steps += [int(path.name[5:]) for path in self.folder.glob("checkpoints/step-*") if path.name[5:].isdigit()]
        return max(steps, default=0)

    @property
    def last_error(self) -> str:
        """The last error message in log.txt, with its code, or an empty text."""
        try:
            lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((match[1] for line in reversed(lines) if (match := _ERROR.match(line))), "")

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the newest start: processes, hosts and versions."""
        return self.attempts[-1].facts if self.attempts else {}

    def facts_of(self, event: str) -> dict[str, Any]:
        """Return the newest event with a name, or {}."""
        return next((e for e in reversed(self.events) if e["event"] == event), {})

    @property
    def planned_rates(self) -> list[tuple[float, float]]:
        """(step, learning rate) of the whole run, future steps included; empty if its length or schedule is unknown."""
        total = self.facts.get("steps")
        try:
            optim = OptimSection.model_validate(self.run.get("optim") or {})
        except ValidationError:  # run file of another version
            return []
        points = planned(optim, total, 200) if isinstance(total, int) and total > 0 else []
        return [(float(step + 1), rate) for step, rate in points]  # metrics count finished updates

    @property
    def steps(self) -> int:
        """The largest number of updates recorded in the folder."""
        return max(
            [int(line["step"]) for line in self.metrics] + [attempt.last for attempt in self.attempts], default=0
        )

    @cached_property
    def timed(self) -> list[dict[str, Any]]:
        """The lines of ranks.jsonl with the newest number of ranks, which can be summed rank by rank."""
        return [line for line in self.ranks if line["ranks"] == self.ranks[-1]["ranks"]]

    @property
    def seconds(self) -> dict[str, list[float]]:
        """phase -> seconds on each rank, summed over `timed`."""
        sums: dict[str, list[float]] = {}
        for line in self.timed:
            for phase, each in line["seconds"].items():
                before = sums.get(phase, [0.0] * len(each))
                sums[phase] = [a + b for a, b in zip(before, each, strict=True)]
        return sums

    @property
    def own_phases(self) -> tuple[str, ...]:
        """Phases of local work, without waiting for other ranks."""
        waits = self.facts.get("waits_inside", [])
        return ("data", *(phase for phase in (*COMPUTE, "optimizer") if phase not in waits))

    @property
    def sees_stragglers(self) -> bool:
        """Whether a slow rank can be distinguished from ranks waiting for it: some compute phase is timed without
        waiting."""
        return any(phase in self.seconds for phase in COMPUTE if phase in self.own_phases)

    def own_seconds(self, line: dict[str, Any], per_micro_batch: bool = True) -> list[float]:
        """Return each rank's local work in one line of ranks.jsonl, in seconds per step. `per_micro_batch`: as if every
        rank had computed equally many micro-batches, so that ranks with more of them do not look slow."""
        columns = []
        for phase, each in line["seconds"].items():
            if phase in self.own_phases:
                counts = line.get("micro_batches", {}).get(phase) if per_micro_batch else None
                if counts and all(counts):
                    mean = sum(counts) / len(counts)
                    columns.append([s / n * mean for s, n in zip(each, counts, strict=True)])
                elif not counts or not any(counts):  # else ranks without this phase cannot be compared in it
                    columns.append(each)
        columns = columns or [[0.0] * line["ranks"]]
        return [sum(each) / max(1, line["steps"]) for each in zip(*columns, strict=True)]

    @property
    def slowest(self) -> Slowest | None:
        """The rank with the most local work; None with fewer than two ranks, or if unknown."""
        if not self.ranks or self.ranks[-1]["ranks"] < 2 or not self.sees_stragglers:
            return None
        timed = [line for line in self.timed if line["steps"]]
        timed = timed[1:] or timed  # first steps allocate memory and load kernels
        if not timed:
            return None
        work = [[seconds * line["steps"] for seconds in self.own_seconds(line, False)] for line in timed]
        sums = [sum(each) for each in zip(*work, strict=True)]
        rank = max(range(len(sums)), key=sums.__getitem__)
        more = sums[rank] - sum(_others(rank, each) for each in work)
        ratio = _ratio(rank, [self.own_seconds(line) for line in timed])
        hosts = self.facts.get("hosts", [])
        host = hosts[rank] if rank < len(hosts) else ""
        steps = sum(line["steps"] for line in timed)
        return Slowest(rank, host, ratio, _ratio(rank, work), more, steps, len(sums))

    @cached_property
    def memory(self) -> list[tuple[int, list[float]]]:
        """(step, bytes of each rank): peak of tensors on the GPU, else memory of the process."""
        rows = []
        for line in self.system:
            for name in ("gpu_memory_gb", "memory_gb"):
                each = [v for k, v in line.items() if k.partition("/")[0] == name and isinstance(v, int | float)]
                if each:
                    rows.append((int(line["step"]), [v * 1e9 for v in each]))
                    break
        return rows

    @property
    def peak_bytes(self) -> float | None:
        """The largest recorded memory of a rank in bytes, or None."""
        return max((max(each) for _, each in self.memory), default=None)


def _others(rank: int, work: list[float]) -> float:
    """Return the median of the other ranks' work."""
    return median(work[:rank] + work[rank + 1 :])


def _ratio(rank: int, lines: list[list[float]]) -> float:
    """Return a rank's work over the others' median; the median of all log points."""
    ratios = [work[rank] / usual for work in lines if (usual := _others(rank, work))]
    return median(ratios) if ratios else 1.0


def read(folder: Path) -> History:
    """Read the history of an output folder. Errors: `OSError` without run.yaml, `ValueError` if that is no mapping."""
    text = (folder / "run.yaml").read_text(encoding="utf-8")
    try:
        run = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"run.yaml is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(run, dict):
        raise ValueError("run.yaml holds no mapping of keys")
    last: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines_of(folder / "metrics.jsonl", ("step", "split")):
        last[line["step"], line["split"]] = line
    return History(
        folder,
        text,
        run,
        sorted(last.values(), key=lambda line: line["step"]),
        list(lines_of(folder / "ranks.jsonl", ("time", "step", "steps", "ranks", "seconds"))),
        list(lines_of(folder / "system.jsonl", ("step",))),
        list(lines_of(folder / "events.jsonl", ("time", "event"))),
        list(lines_of(folder / "samples.jsonl", ("step", "samples"))),
        _tables_of(folder / "tables.json"),
        [summary for path in sorted(folder.glob("profile/*.summary.json")) if (summary := _object(path))],
        scores_of(folder),
    )


def history_complete(folder: Path) -> bool:
    """Return whether the journal records the end of the run, and its report exists."""
    try:
        return read(folder).state == "finished" and (folder / "report.html").is_file()
    except (OSError, ValueError):
        return False


_TYPES: dict[str, Any] = {"step": int, "time": (int, float), "split": str, "event": str, "hash": str, "samples": list}


def lines_of(path: Path, needed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the objects in a .jsonl file that have the keys `needed`; none if the file is missing."""
    if path.is_file():
        with open(path, "rb") as file:  # bytes: only "\n" ends a line
            yield from objects_of(file, needed)


def objects_of(lines: Iterable[bytes], needed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the objects on lines that have the keys `needed`. Skips lines truncated by a kill, and lines whose step,
    time or name has a wrong type."""
    for text in lines:
        try:
            line = json.loads(text, parse_int=_whole_number)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and all(
            key in line and isinstance(line[key], _TYPES.get(key, object)) for key in needed
        ):
            yield line


def _whole_number(digits: str) -> int:
    """Parse an integer. Errors: `ValueError` if it exceeds the range of floats, which no recorded number does."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def scores_of(folder: Path) -> dict[str, Any]:
    """Return the scores of an output folder's exported model: `step`, and `splits` (split -> metric -> value); or
    {}."""
    scores = _object(folder / SCORES)
    splits = scores.get("splits")
    valid = isinstance(splits, dict) and all(isinstance(numbers, dict) for numbers in splits.values())
    return scores if isinstance(scores.get("step"), int) and valid else {}


def _tables_of(path: Path) -> dict[str, Any]:
    """Return split -> name -> table, skipping invalid ones."""
    splits = {split: names for split, names in _object(path).items() if isinstance(names, dict)}
    return {split: {n: table for n, table in names.items() if _is_table(table)} for split, names in splits.items()}


def _is_table(value: Any) -> bool:
    """Return whether a value is a table, or a list of plots."""
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(each, dict) for each in value))


def _section(run: dict[str, Any], name: str) -> dict[str, Any]:
    section = run.get(name)
    return section if isinstance(section, dict) else {}


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes(), parse_int=_whole_number)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
