"""What an output folder remembers of its run: the run file, numbers, events, times of each rank, samples, tables.

In: OUTPUT, of a run that is finished, stopped, killed or still going. Out: one `History`. Half lines, which a kill may
leave, are passed over; of a step that was trained twice the last line counts. Imports no torch.
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

from lockstep.config.optim import OptimSection, planned
from lockstep.track.best import Best
from lockstep.track.console import LOG

_ERROR = re.compile(r"lockstep: (.+ \[LS\d{4}\])$")
SCORES = "scores.json"  # in OUTPUT: what the exported model scores
# Phases that are the rank's own work where no waiting for other ranks is inside: `distributed/step_timer.py`.
COMPUTE = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Attempt:
    """One start of the run's processes, until they ended."""

    began: float  # unix seconds
    ended: float  # of the last sign of life
    first: int  # updates done when it began
    last: int  # updates done at the last sign of life
    how: str  # finish | stop | failed | lost (killed, or still going)
    facts: dict[str, Any]  # what the start event tells: versions, hosts, launch, ...


FEWEST_RANKS = 3  # of two ranks, neither is the usual one
FEWEST_STEPS = 50  # fewer are a matter of chance: first steps allocate, and other programs come and go
SLOW = 1.15  # times the median of the other ranks: a straggler


@dataclass(frozen=True)
class Slowest:
    """How much slower than the others' median the slowest rank does its own work, from the second log point on."""

    rank: int
    host: str
    ratio: float  # its seconds of own work over the others' median: the median of all log points
    seconds: float  # its excess over the others' median, in all
    steps: int  # that were timed
    ranks: int

    @property
    def can_tell(self) -> bool:
        """Whether there are enough ranks and steps to call one slow."""
        return self.ranks >= FEWEST_RANKS and self.steps >= FEWEST_STEPS

    @property
    def straggles(self) -> bool:
        """Whether the rank is a straggler: slow in most of the time, and not by chance."""
        return self.can_tell and self.ratio >= SLOW


@dataclass(frozen=True)
class History:
    """A run as its folder tells it."""

    folder: Path
    text: str  # run.yaml as it is
    run: dict[str, Any]
    metrics: list[dict[str, Any]]
    ranks: list[dict[str, Any]]  # lines of ranks.jsonl: seconds of each rank in each phase between log points
    system: list[dict[str, Any]]  # lines of system.jsonl: what each rank takes of its machine
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    tables: dict[str, dict[str, Any]]  # split -> name of a table -> the table
    profiles: list[dict[str, Any]]
    scores: dict[str, Any]  # of the exported model: its step, and numbers by split

    @property
    def name(self) -> str:
        return str(self.run.get("name") or self.folder.name)

    def series(self, split: str, key: str) -> list[tuple[float, float]]:
        """(step, value) of a number that is finite."""
        values = ((line["step"], line.get(key)) for line in self.metrics if line["split"] == split)
        return [(float(x), float(y)) for x, y in values if isinstance(y, int | float) and math.isfinite(y)]

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """split -> its numbers, for all splits but train: those of the exported model once there is one, else the
        last ones."""
        if self.state == "finished" and self.scores:
            return {split: {"step": self.scores["step"], **numbers} for split, numbers in self.scores["splits"].items()}
        latest: dict[str, dict[str, Any]] = {}
        for line in self.metrics:
            if line["split"] != "train":
                latest[line["split"]] = {k: v for k, v in line.items() if k != "split"}
        return latest

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Every start, in the order in which they came; empty for a folder without events."""
        places = [i for i, event in enumerate(self.events) if event["event"] == "start"]
        rows = []
        for place, after in zip(places, [*places[1:], len(self.events)], strict=False):
            start, events = self.events[place], self.events[place:after]  # in the file's order: clocks are set back
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
        """The best evaluation, by the metric that the run file names."""
        saved = Best(_section(self.run, "checkpoint").get("best"))
        for line in self.metrics:
            if line["split"] == "validation":
                saved.update(line["step"], line)
        return saved

    @property
    def state(self) -> str:
        """One word or two for how far it is."""
        words = {"finish": "finished", "stop": "stopped on request", "failed": "failed", "lost": "not finished"}
        if self.attempts:
            return words[self.attempts[-1].how]
        return "finished" if (self.folder / "export" / "config.json").is_file() else "not finished"

    @property
    def newest_checkpoint(self) -> int:
        """The step of the newest checkpoint that the folder or its journal names; 0: there is none."""
        steps = [event["step"] for event in self.events if event["event"] == "checkpoint"]
        steps += [int(path.name[5:]) for path in self.folder.glob("checkpoints/step-*") if path.name[5:].isdigit()]
        return max(steps, default=0)

    @property
    def last_error(self) -> str:
        """The last message of an error in log.txt, with its code; empty where there is none."""
        try:
            lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((match[1] for line in reversed(lines) if (match := _ERROR.match(line))), "")

    @property
    def facts(self) -> dict[str, Any]:
        """What the newest start told about processes, hosts and versions."""
        return self.attempts[-1].facts if self.attempts else {}

    def facts_of(self, event: str) -> dict[str, Any]:
        """What the newest event of a name told."""
        return next((e for e in reversed(self.events) if e["event"] == event), {})

    @property
    def planned_rates(self) -> list[tuple[float, float]]:
        """(step, rate) of the whole run, also of steps that are to come; empty where its length or its schedule is not
        known here."""
        total = self.facts.get("steps")
        try:
            optim = OptimSection.model_validate(self.run.get("optim") or {})
        except ValidationError:  # of another version
            return []
        points = planned(optim, total, 200) if isinstance(total, int) and total > 0 else []
        return [(float(step + 1), rate) for step, rate in points]  # as metrics count: updates that are done

    @property
    def steps(self) -> int:
        """Updates done, as far as anything in the folder says."""
        return max(
            [int(line["step"]) for line in self.metrics] + [attempt.last for attempt in self.attempts], default=0
        )

    @cached_property
    def timed(self) -> list[dict[str, Any]]:
        """The lines of ranks.jsonl that have the newest number of ranks: those that can be added up rank by rank."""
        return [line for line in self.ranks if line["ranks"] == self.ranks[-1]["ranks"]]

    @property
    def seconds(self) -> dict[str, list[float]]:
        """phase -> seconds on each rank, over `timed`."""
        sums: dict[str, list[float]] = {}
        for line in self.timed:
            for phase, each in line["seconds"].items():
                before = sums.get(phase, [0.0] * len(each))
                sums[phase] = [a + b for a, b in zip(before, each, strict=True)]
        return sums

    @property
    def own_phases(self) -> tuple[str, ...]:
        """Phases in which a rank waits for nobody but itself."""
        waits = self.facts.get("waits_inside", [])
        return ("data", *(phase for phase in (*COMPUTE, "optimizer") if phase not in waits))

    @property
    def sees_stragglers(self) -> bool:
        """Whether a slow rank can be told from those that wait for it: some computing is timed without waiting."""
        return any(phase in self.seconds for phase in COMPUTE if phase in self.own_phases)

    def own_seconds(self, line: dict[str, Any]) -> list[float]:
        """Each rank's own work in one line of ranks.jsonl, in seconds a step."""
        columns = [each for phase, each in line["seconds"].items() if phase in self.own_phases]
        columns = columns or [[0.0] * line["ranks"]]
        return [sum(each) / max(1, line["steps"]) for each in zip(*columns, strict=True)]

    @property
    def slowest(self) -> Slowest | None:
        """The rank that works longest; None with fewer than two ranks, or where it cannot be told."""
        if not self.ranks or self.ranks[-1]["ranks"] < 2 or not self.sees_stragglers:
            return None
        timed = [line for line in self.timed if line["steps"]]
        timed = timed[1:] or timed  # first steps allocate memory and load kernels
        if not timed:
            return None
        work = [[seconds * line["steps"] for seconds in self.own_seconds(line)] for line in timed]
        sums = [sum(each) for each in zip(*work, strict=True)]
        rank = max(range(len(sums)), key=sums.__getitem__)
        usual = [median(each[:rank] + each[rank + 1 :]) for each in work]
        ratios = [each[rank] / other for each, other in zip(work, usual, strict=True) if other]
        hosts = self.facts.get("hosts", [])
        host = hosts[rank] if rank < len(hosts) else ""
        steps = sum(line["steps"] for line in timed)
        return Slowest(rank, host, median(ratios) if ratios else 1.0, sums[rank] - sum(usual), steps, len(sums))

    @cached_property
    def memory(self) -> list[tuple[int, list[float]]]:
        """(step, bytes of each rank): of a GPU the most its tensors took so far, else what the process held."""
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
        """The most memory that a rank was seen to hold."""
        return max((max(each) for _, each in self.memory), default=None)


def read(folder: Path) -> History:
    """The history of an output folder. Errors: `OSError` when it holds no run.yaml, `ValueError` when that is no
    mapping."""
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


def told_whole(folder: Path) -> bool:
    """Whether the end of a run is in its journal, and the page about it is there."""
    try:
        return read(folder).state == "finished" and (folder / "report.html").is_file()
    except (OSError, ValueError):
        return False


_TYPES: dict[str, Any] = {"step": int, "time": (int, float), "split": str, "event": str, "hash": str, "samples": list}


def lines_of(path: Path, needed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file that have the keys that are needed; nothing where there is no file."""
    if path.is_file():
        with open(path, "rb") as file:  # of bytes: only "\n" ends a line
            yield from objects_of(file, needed)


def objects_of(lines: Iterable[bytes], needed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The objects on lines that have the keys that are needed. Halves of lines that a kill left are passed over, as are
    lines whose step, time or name is of another type than we write."""
    for text in lines:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and all(
            key in line and isinstance(line[key], _TYPES.get(key, object)) for key in needed
        ):
            yield line


def scores_of(folder: Path) -> dict[str, Any]:
    """What the exported model of an output folder scores: its `step`, and numbers by name in `splits`; or nothing."""
    scores = _object(folder / SCORES)
    return scores if isinstance(scores.get("step"), int) and isinstance(scores.get("splits"), dict) else {}


def _tables_of(path: Path) -> dict[str, Any]:
    """Split -> name -> table; what is no table is left out."""
    splits = {split: names for split, names in _object(path).items() if isinstance(names, dict)}
    return {
        split: {n: table for n, table in names.items() if isinstance(table, dict)} for split, names in splits.items()
    }


def _section(run: dict[str, Any], name: str) -> dict[str, Any]:
    section = run.get(name)
    return section if isinstance(section, dict) else {}


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
