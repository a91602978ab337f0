"""Read how the epochs of a loop end, and whether its schedule ends with the run. In lockstep an epoch has each example
once, and its last step may be smaller.

In: what a loop does with leftover batches, and the length given to its schedule. Out: a gap if the run would make other
steps than the script, or if its rates end elsewhere; a note if only the data can tell.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lockstep.lab.import_config.script import Script, code_of
from lockstep.lab.import_config.table import RunDraft
from lockstep_trace.coded import quantity

_WHYS = {
    "dropped": "the script drops the leftover batches of an epoch; lockstep trains on them in a smaller step",
    "left over": "the script adds the gradients of leftover batches to the first step of the next epoch; lockstep "
    "trains on them in a smaller step",
    "divided": "the script divides the last step of an epoch by {every} even if it has fewer batches; lockstep "
    "averages over its examples",
}


@dataclass(frozen=True)
class EpochEnd:
    """How a loop treats leftover batches at the end of an epoch: it drops them, carries their gradients into the next
    epoch, or divides them like a whole step."""

    kind: Literal["dropped", "left over", "divided"]
    where: str  # the line that decides it
    batch: int | None  # examples per process and forward pass; None if unknown
    every: int  # batches per step
    processes: int

    def check(self, draft: RunDraft) -> None:
        """Add a gap unless the rows are known to fill all steps. If the number of rows is unknown, `divided` is only a
        note, as it does not change the number of steps; so is `dropped` if no row is."""
        rows = draft.rows if self.batch is not None and not draft.keys.get("task.packing") else None
        step = (self.batch or 1) * (1 if self.kind == "dropped" else self.every) * self.processes
        if rows is not None and rows % step == 0:
            if self.kind == "dropped":
                draft.notes.append(f"{self.where}: no rows are dropped, because {step:,} divides the {rows:,} rows")
            return
        why = _WHYS[self.kind].format(every=self.every)
        if rows is not None:
            why += f" ({rows:,} rows are {rows // step:,} steps of {step:,} and {rows % step:,} rows)"
        elif self.kind == "divided":
            draft.notes.append(f"{self.where}: {why}, unless the rows fill all steps")
            return
        by = ("epochs", "steps") if draft.task == "module" else ("data.limit", "epochs", "steps")
        draft.lacks(self.where, f"{why}: give data that fill all steps, or set epochs or steps", *by)


@dataclass(frozen=True)
class ScheduleEnd:
    """The length given to a schedule."""

    script: Script
    where: str
    node: ast.expr | None  # num_training_steps
    loader: ast.Call | None  # the DataLoader of the training
    processes: int = 1  # of Accelerate
    prepared: bool = False  # whether Accelerate advances the schedule, once for each process in a step
    multiplied: bool = False  # whether the length is multiplied by the processes

    def check(self, draft: RunDraft, every: int) -> None:
        """Add a gap if the schedule is known to end elsewhere than the run, and a note if that is unknown. `every`:
        batches per step."""
        epochs, steps = draft.keys.get("epochs"), draft.keys.get("steps")
        passes = self.passes(self.node)
        length = self.script.known(self.node)
        if self.node is not None and ast.unparse(self.node).endswith(".estimated_stepping_batches"):
            return  # Lightning's name for the steps of the run
        code = code_of(self.node) if self.node is not None else "its end"
        if passes is not None and epochs and self.processes > 1:
            of_run = epochs / every * self.processes if self.prepared else epochs
            of_length = passes * (1 if self._is_measured_later() else self.processes)
            share = of_length * (self.processes if self.multiplied else 1) / of_run
            if abs(share - 1) > 1e-6:
                why = (
                    f"on {self.processes} processes the schedule of the script is {share:.4g} of its run long; here it "
                )
                draft.lacks(f"{self.where}: num_training_steps={code}", f"{why}ends with the run", "optim.schedule")
            return
        if passes is not None and epochs:
            if abs(passes * every - epochs) > 1e-6:
                of_batches, of_steps = (quantity(f"{each:g}", "epoch") for each in (passes, epochs))
                of_run = f"{epochs / every:g} ({of_steps} of steps of {quantity(every, 'batch')})"
                why = f"the schedule's length is {of_batches} of batches, and the run's {of_run}; "
                why += "here the schedule ends with the run"
                draft.lacks(f"{self.where}: num_training_steps={code}", why, "optim.schedule")
            return
        if (other := self._other_loader(self.node)) is not None:
            why = f"the schedule's length is counted in batches of {other}, which is not the loader of the training; "
            draft.lacks(f"{self.where}: num_training_steps={code}", f"{why}here it ends with the run", "optim.schedule")
            return
        steps = _steps(draft)
        if isinstance(length, int) and steps is not None:
            if length != steps:
                why = f"the schedule is {length} steps long and the run {steps}; here it ends with the run"
                draft.lacks(f"{self.where}: num_training_steps={code}", why, "optim.schedule", "steps")
            return
        draft.notes.append(f"optim.schedule ends with the run: num_training_steps ({code}) is assumed to be its length")

    def passes(self, node: ast.expr | None, depth: int = 0) -> float | None:
        """Return N of `N * len(loader)`, the number of passes over the batches of an epoch; None for any other
        expression."""
        if node is None or depth > 20:
            return None
        if isinstance(node, ast.Name):
            return self.passes(self.script.bound(node), depth + 1)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "len" and len(node.args) == 1:
                return 1.0 if self._is_loader(node.args[0]) else None
            return self.passes(node.args[0], depth + 1) if name in _ROUNDING and len(node.args) == 1 else None
        if not isinstance(node, ast.BinOp):
            return None
        for part, other in ((node.left, node.right), (node.right, node.left)):
            count, factor = self.passes(part, depth + 1), self.script.known(other)
            if count is None or isinstance(factor, bool) or not isinstance(factor, int | float) or not factor:
                continue
            if isinstance(node.op, ast.Mult):
                return count * factor
            if isinstance(node.op, ast.Div | ast.FloorDiv) and part is node.left:
                return count / factor
        return None

    def _is_measured_later(self) -> bool:
        """Return whether the length is that of a loader which Accelerate has prepared before: of one process's part."""
        waiting, lengths = [self.node] if self.node is not None else [], list[ast.Name]()
        for _ in range(20):
            inside = [each for node in waiting for each in ast.walk(node)]
            lengths += [
                each.args[0]
                for each in inside
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "len" and isinstance(each.args[0], ast.Name)
            ]
            bound = [self.script.bound(each) for each in inside if isinstance(each, ast.Name)]
            waiting = [each for each in bound if isinstance(each, ast.BinOp | ast.Call) and each is not self.loader]
        order = self.script.order
        return any(
            order.get(id(value), 0) < order.get(id(name), 0)
            for name in lengths
            for _, value in self._assigned(name)
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith((".prepare", ".prepare_data_loader"))
        )

    def _other_loader(self, node: ast.expr | None, depth: int = 0) -> str | None:
        """Return the code of a DataLoader whose length is a part of an expression and which is not the training's."""
        if depth > 20 or node is None or self.loader is None:
            return None
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and ast.unparse(each.func) == "len" and each.args:
                value = self._unprepared(each.args[0])
                is_loader = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "DataLoader"
                if is_loader and value is not self.loader:
                    return code_of(each.args[0])
            value = self.script.bound(each) if isinstance(each, ast.Name) else None
            if value is not None and (inner := self._other_loader(value, depth + 1)) is not None:
                return inner
        return None

    def _unprepared(self, node: ast.expr, depth: int = 0) -> ast.expr | None:
        """Return what a name is assigned from, without Accelerate's `prepare`, and through a function of the script
        that returns several values."""
        if not isinstance(node, ast.Name) or depth > 10:
            return None
        values: list[ast.expr] = []
        for place, value in self._assigned(node):
            name = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            if name.endswith((".prepare", ".prepare_data_loader")) and isinstance(value, ast.Call):
                inner = value.args[place or 0] if len(value.args) > (place or 0) else None
                if isinstance(inner, ast.Name) and inner.id != node.id:
                    values += [each for each in [self._unprepared(inner, depth + 1)] if each is not None]
            elif place is None:
                inner = self._unprepared(value, depth + 1) if isinstance(value, ast.Name) else None
                values.append(inner or value)
            else:
                values += self._returned(name, place, depth)
        return values[0] if len({id(each) for each in values}) == 1 else None

    def _assigned(self, name: ast.Name) -> Iterator[tuple[int | None, ast.expr]]:
        """Yield the values that are assigned to a name, and its place in the target if that is a tuple."""
        scope = self.script.scopes.get(id(name))
        while scope is not None and (id(scope), name.id) not in self.script.bindings:
            scope = self.script.scopes.get(id(scope))
        for node in ast.walk(self.script.tree):
            if not isinstance(node, ast.Assign) or self.script.scopes.get(id(node)) is not scope:
                continue
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
                values = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else []
                if isinstance(target, ast.Name) and target.id == name.id:
                    yield None, node.value
                for place, part in enumerate(parts):
                    if isinstance(part, ast.Name) and part.id == name.id:
                        whole = len(values) == len(parts)
                        yield (None, values[place]) if whole else (place, node.value)

    def _returned(self, name: str, place: int, depth: int) -> list[ast.expr]:
        """Return the value at a place of the only tuple that a function of the script returns."""
        function = self.script.functions.get(name)
        inside = ast.walk(function) if function is not None else ()
        own = (each for each in inside if isinstance(each, ast.Return))
        returns = [each for each in own if self.script.scopes.get(id(each)) is function]  # not of a function in it
        value = returns[0].value if len(returns) == 1 and name not in self.script.ambiguous else None
        if not isinstance(value, ast.Tuple) or place >= len(value.elts):
            return []
        each = value.elts[place]
        return [self._unprepared(each, depth + 1) or each]

    def _is_loader(self, node: ast.expr) -> bool:
        value = self._unprepared(node)
        return value is not None and self.loader is not None and value is self.loader


def whole_warmup(draft: RunDraft, share: float, nearest: bool, line: int) -> None:
    """Set the steps of a warm-up that the script rounds down, or to the nearest number; lockstep rounds a share up.
    Add a note if the number of steps is unknown."""
    if draft.is_given("optim.warmup_fraction") or draft.is_given("optim.warmup_steps"):
        return
    total = _steps(draft)
    if total is None:
        draft.notes.append(
            f"optim.warmup_fraction is rounded up, so the warm-up may be one step longer than in line {line}, which "
            "does not round up; optim.warmup_steps=N is exact"
        )
        return
    steps = round(share * total) if nearest else int(share * total)
    if steps != math.ceil(share * total):
        del draft.keys["optim.warmup_fraction"]
        draft.set("optim.warmup_steps", steps, f"{share:g} of {total} steps, line {line}")


def _steps(draft: RunDraft) -> int | None:
    """Return the optimizer steps of the run; None if its data are unknown."""
    epochs, steps, batch = (draft.keys.get(key) for key in ("epochs", "steps", "batch_size"))
    if steps is None and draft.rows is not None and batch and epochs and not draft.keys.get("task.packing"):
        return max(1, round(epochs * -(-draft.rows // int(batch))))
    return steps


_ROUNDING = ("int", "round", "math.ceil", "math.floor")
