"""Conditions around a step that count batches: `if (i + 1) % 4 == 0:`.

In: the condition, and the loop over batches. Out: the batches per step, or None for any other condition.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from lockstep.lab.import_config.script import Script


@dataclass
class BatchCounts:
    """Reads conditions. `loop`: the `Statements` of the loop."""

    script: Script
    loop: Any

    def every(self, test: ast.expr) -> int | None:
        """Return N of `(i + 1) % N == 0`, optionally with `or i + 1 == len(loader)`. The counter must start so that the
        first step is whole."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) and len(test.values) == 2:
            return self.every(test.values[0]) if self._is_last(test.values[1]) else None
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq) or len(test.ops) != 1:
            return None
        if self.script.known(test.comparators[0]) != 0 or not isinstance(test.left, ast.BinOp):
            return None
        if not isinstance(test.left.op, ast.Mod) or not isinstance(every := self.script.known(test.left.right), int):
            return None
        count, added = test.left.left, 0
        if isinstance(count, ast.BinOp) and isinstance(count.op, ast.Add):
            count, more = (count.left, count.right) if isinstance(count.left, ast.Name) else (count.right, count.left)
            added = self.script.known(more, -1)
        first = self.loop.counters.get(ast.unparse(count))
        if first is None and isinstance(count, ast.Name):
            first = self._counted(count)
        return every if every > 0 and first is not None and first + added == 1 else None

    def _counted(self, count: ast.Name) -> int | None:
        """Return the first value that a counter kept by hand has here: one that is set to 0 before the loop over the
        batches, incremented once in its body, and set nowhere else. None for any other name."""
        stores = [
            each
            for each in ast.walk(self.script.tree)
            if isinstance(each, ast.Name) and each.id == count.id and not isinstance(each.ctx, ast.Load)
        ]
        writes = sorted((self.loop.parents[id(each)] for each in stores), key=lambda node: getattr(node, "lineno", 0))
        if len(writes) != 2 or self.loop.batch_loop is None:
            return None
        start, step = writes
        if not isinstance(start, ast.Assign) or len(start.targets) != 1 or self.script.known(start.value) != 0:
            return None
        if not isinstance(step, ast.AugAssign) or not isinstance(step.op, ast.Add):
            return None
        body, loop = self.loop.batch_loop.body, self.loop.around(self.loop.batch_loop)
        place = next((i for i, each in enumerate(body) if count in ast.walk(each)), None)
        above = self.loop.around(start)
        if step not in body or place is None or self.script.known(step.value) != 1:
            return None
        if not all(each in (*loop, self.script.tree) for each in above) or start.lineno > self.loop.batch_loop.lineno:
            return None
        if self.script.scopes.get(id(start)) is not self.script.scopes.get(id(self.loop.batch_loop)):
            return None
        return 1 if body.index(step) < place else 0

    def _is_last(self, test: ast.expr) -> bool:
        """Return whether a test is `i + 1 == len(loader)`: the last batch of an epoch."""
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
            return False
        sides = dict(self._shifted(each) for each in (test.left, test.comparators[0]))
        count = next((name for name in sides if name in self.loop.counters), None)
        length = next((name for name in sides if name.startswith("len(")), None)
        if count is None or length is None:
            return False
        loader: Any = ast.parse(length, mode="eval").body
        return (
            sides[length] - sides[count] == self.loop.counters[count] - 1
            and ast.unparse(loader.args[0]) in self.loop.loaders
        )

    def _shifted(self, node: ast.expr) -> tuple[str, int]:
        """Split an expression into the part without an added or subtracted number, and that number."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            for part, other in ((node.left, node.right), (node.right, node.left)):
                value = self.script.known(other)
                if isinstance(value, int) and (part is node.left or isinstance(node.op, ast.Add)):
                    return ast.unparse(part), value if isinstance(node.op, ast.Add) else -value
        return ast.unparse(node), 0
