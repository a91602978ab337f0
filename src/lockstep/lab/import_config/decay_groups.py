"""Parameter groups that a script selects by name, some without weight decay.

In: the first argument of an optimizer: a list of `{"params": [p for n, p in model.named_parameters() if ...],
"weight_decay": ...}`. Out: `optim.weight_decay`, entries of `optim.groups` for weights that only the script leaves out,
a note on norms and biases that only the script decays. The conditions are evaluated on the names and shapes of the
script's model, built without memory; where its config cannot be read, on the words that the conditions look for.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.lab.import_config import model_defaults
from lockstep.lab.import_config.script import COMPARISONS, Script, Unknown, code_of
from lockstep.lab.import_config.table import RunDraft, number

_BY_HAND = (
    "give optim.weight_decay, and optim.groups='[{match: NAMES, learning_rate: ..., weight_decay: ...}]' for weights "
    "with a rate or decay of their own; biases and norms have no decay"
)
GROUPS = (
    "groups are read if each is [p for n, p in model.named_parameters() if ...], with a condition on words in n or on "
    f"p.dim(), a weight_decay and the optimizer's rate. For others {_BY_HAND}"
)
_MOST = 12  # entries of optim.groups that are written
_WEIGHT = "matrix"  # stands for a weight whose name has none of the words of a condition
Test = Callable[[str, int], bool]  # (name, number of dimensions) -> whether a weight is in the group
Shapes = Mapping[str, int]  # name of a weight -> its number of dimensions


class NotRead(Exception):
    """Parameter groups have a form that is not supported; the message says which forms are."""


@dataclass(frozen=True)
class WeightGroup:
    """One entry of the list."""

    test: Test
    decay: float


class DecayGroups:
    """The groups of one optimizer. `rate` and `decay`: those of groups that name none. Errors: `NotRead`."""

    def __init__(self, script: Script, node: ast.expr, rate: Any, decay: float, line: str) -> None:
        self.script, self.where, self.line = script, f"{line}: {code_of(node)}", line
        self.words: set[str] = set()  # that the conditions look for in a name
        self.by_name = True  # False if a condition also tests the number of dimensions
        self.models: set[str] = set()
        self.default, self.rate = decay, rate
        value = script.bound(node) if isinstance(node, ast.Name) else node
        if not isinstance(value, ast.List):
            raise NotRead
        self.groups = [self._group(each) for each in value.elts]
        if len(self.models) != 1:
            raise NotRead

    def _group(self, node: ast.expr) -> WeightGroup:
        value = self.script.bound(node) if isinstance(node, ast.Name) else node
        if not isinstance(value, ast.Dict):
            raise NotRead
        keys = [self.script.known(each) if each is not None else None for each in value.keys]
        entries = dict(zip(keys, value.values, strict=True))
        if len(entries) != len(keys) or not {"params"} <= entries.keys() <= {"params", "weight_decay", "lr"}:
            raise NotRead
        if "lr" in entries and (self.rate is None or self.script.known(entries["lr"]) != self.rate):
            raise NotRead
        decay = number(self.script.known(entries["weight_decay"])) if "weight_decay" in entries else self.default
        if decay is None:
            raise NotRead
        return WeightGroup(self._chosen(entries["params"]), decay)

    def _chosen(self, node: ast.expr) -> Test:
        """Return the condition of `[p for n, p in model.named_parameters() if CONDITION]`."""
        value = self.script.bound(node) if isinstance(node, ast.Name) else node
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "list" and len(value.args) == 1:
            value = value.args[0]
        elif isinstance(node, ast.Name) and isinstance(value, ast.GeneratorExp):
            raise NotRead  # may be used up
        if not isinstance(value, ast.ListComp | ast.GeneratorExp) or len(value.generators) != 1:
            raise NotRead
        part = value.generators[0]
        names = part.target.elts if isinstance(part.target, ast.Tuple) else []
        if len(names) != 2 or not all(isinstance(each, ast.Name) for each in names) or part.is_async:
            raise NotRead
        name, weight = (ast.unparse(each) for each in names)
        if ast.unparse(value.elt) != weight or name == weight:
            raise NotRead
        self._named_parameters(part.iter)
        tests = [self._condition(each, name, weight) for each in part.ifs]
        return lambda n, d: all(test(n, d) for test in tests)

    def _named_parameters(self, node: ast.expr, depth: int = 0) -> None:
        """Check that an iterable is all of a model's weights with their names, also by a dictionary: nanoGPT's
        `{n: p for n, p in model.named_parameters()}.items()`."""
        holder = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if isinstance(holder, ast.Name) and ast.unparse(node).endswith(".items()") and depth < 8:
            value = self.script.bound(holder)
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and len(value.args) == 1:
                self._named_parameters(value.args[0], depth + 1)
                return
            if not isinstance(value, ast.DictComp) or len(value.generators) != 1:
                raise NotRead
            part = value.generators[0]
            names = [ast.unparse(each) for each in getattr(part.target, "elts", ())]
            alike = names == [ast.unparse(value.key), ast.unparse(value.value)] and not part.is_async
            if not alike or any(ast.unparse(each) != f"{names[1]}.requires_grad" for each in part.ifs):
                raise NotRead
            self._named_parameters(part.iter, depth + 1)
            return
        if isinstance(node, ast.Name):
            node = self.script.bound(node) or node
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "list" and len(node.args) == 1:
                node = node.args[0]
            else:
                raise NotRead  # an iterator: the second group that reads it is empty
        if not isinstance(node, ast.Call) or node.args or node.keywords or not isinstance(node.func, ast.Attribute):
            raise NotRead
        holder = node.func.value
        if node.func.attr != "named_parameters" or not isinstance(holder, ast.Name):
            raise NotRead
        self.models.add(holder.id)

    def _condition(self, node: ast.expr, name: str, weight: str) -> Test:
        if isinstance(node, ast.BoolOp):
            tests = [self._condition(each, name, weight) for each in node.values]
            whole = all if isinstance(node.op, ast.And) else any
            return lambda n, d: whole(test(n, d) for test in tests)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._condition(node.operand, name, weight)
            return lambda n, d: not inner(n, d)
        if ast.unparse(node) == f"{weight}.requires_grad":
            return lambda n, d: True  # frozen weights are read, or refused, elsewhere
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("any", "all"):
            return self._of_several(node, name)
        if isinstance(node, ast.Compare) and (dimensions := self._dimensions(node, weight)) is not None:
            return dimensions
        return self._of_name(node, name, {})

    def _of_several(self, node: ast.Call, name: str) -> Test:
        """Return the condition of `any(word in name for word in words)`."""
        inner = node.args[0] if len(node.args) == 1 and not node.keywords else None
        if not isinstance(inner, ast.GeneratorExp | ast.ListComp) or len(inner.generators) != 1:
            raise NotRead
        part, whole = inner.generators[0], any if ast.unparse(node.func) == "any" else all
        words = self.script.known(part.iter, Unknown)
        listed = isinstance(words, list) and all(isinstance(each, str) for each in words)
        if not listed or part.ifs or not isinstance(part.target, ast.Name) or part.target.id == name:
            raise NotRead
        tests = [self._of_name(inner.elt, name, {part.target.id: word}) for word in words]
        return lambda n, d: whole(test(n, d) for test in tests)

    def _of_name(self, node: ast.expr, name: str, bound: Mapping[str, str]) -> Test:
        """Return the condition of `"bias" in name`, `name.endswith("bias")` or their negations."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._of_name(node.operand, name, bound)
            return lambda n, d: not inner(n, d)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and ast.unparse(node.comparators[0]) == name:
            word, inside = self._word(node.left, bound), isinstance(node.ops[0], ast.In)
            if isinstance(node.ops[0], ast.In | ast.NotIn):
                return lambda n, d: (word in n) is inside
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.endswith" and len(node.args) == 1:
            word = self._word(node.args[0], bound)
            return lambda n, d: n.endswith(word)
        raise NotRead

    def _word(self, node: ast.expr, bound: Mapping[str, str]) -> str:
        word = bound.get(node.id) if isinstance(node, ast.Name) and node.id in bound else self.script.known(node)
        if not isinstance(word, str) or not word:
            raise NotRead
        self.words.add(word)
        return word

    def _dimensions(self, node: ast.Compare, weight: str) -> Test | None:
        """Return the condition of `p.dim() >= 2`, `p.ndim == 1`, `len(p.shape) < 2`; None for any other."""
        if len(node.ops) != 1 or ast.unparse(node.left) not in (
            f"{weight}.dim()",
            f"{weight}.ndim",
            f"len({weight}.shape)",
        ):
            return None
        least, compare = self.script.known(node.comparators[0]), COMPARISONS.get(type(node.ops[0]))
        if not isinstance(least, int) or compare is None or compare in (operator.is_, operator.is_not):
            raise NotRead
        self.by_name = False
        return lambda n, d: bool(compare(d, least))

    # -- once the model is known ---------------------------------------------------------------------------------------

    def set_keys(self, draft: RunDraft) -> None:
        """Set the keys of the run file, or add a gap."""
        if draft.is_given("optim.groups") or draft.is_given("optim.weight_decay"):
            return
        where = self.where
        shapes, exempt = self._weights(draft)
        if not shapes:
            why = f"the model's config cannot be read here, so the weights of its groups are not known: {_BY_HAND}"
            draft.unclear(where, why, "optim.groups", "optim.weight_decay")
            return
        decays: dict[str, float] = {}
        for name, dimensions in shapes.items():
            holding = [group.decay for group in self.groups if group.test(name, dimensions)]
            if len(holding) != 1:
                why = f"{name} is in {len(holding)} of its groups, and each trained weight must be in exactly one"
                draft.unclear(where, why, "model.freeze" if not holding else "optim.groups")
                return
            decays[name] = holding[0]
        largest = sorted({decay for name, decay in decays.items() if decay})
        more = [name for name, decay in decays.items() if not decay and name not in exempt]
        if not largest:
            draft.set("optim.weight_decay", 0.0, self.line)
            return
        if len(largest) > 1 or len(more) > _MOST or _WEIGHT in more:
            wide = (
                f"{len(more)} weights without decay are neither biases nor norms, for example {more[0]}" if more else ""
            )
            why = f"decays {', '.join(f'{each:g}' for each in largest)}" if len(largest) > 1 else wide
            draft.unclear(where, f"{why}: {_BY_HAND}", "optim.groups")
            return
        decay = largest[0] if largest else 0.0
        draft.set("optim.weight_decay", decay, self.line)
        if more and decay:
            groups = [{"match": name, "weight_decay": 0.0} for name in more]
            draft.set("optim.groups", groups, f"without decay, {self.line}")
        decayed = [name for name, each in decays.items() if each and name in exempt]
        if decayed:
            named = f"{', '.join(decayed[:3])}{', ...' if len(decayed) > 3 else ''}"
            draft.notes.append(f"difference: the original decays {named} by {decay:g}, lockstep decays no bias or norm")
        elif shapes.keys() & {_WEIGHT}:
            draft.notes.append(
                f"{self.line} does not decay weights with {', '.join(sorted(self.words))} in their names; "
                "lockstep does not decay any bias or norm, whatever its name"
            )

    def _weights(self, draft: RunDraft) -> tuple[Shapes, set[str]]:
        """Return the weights, and those that lockstep never decays. Without the model's config: the words that the
        conditions look for, if all of them are parts of names of biases and norms; else nothing."""
        if (weights := model_defaults.weights(draft, self.script)) is not None:
            return weights
        plain = all(any(part in word.lower() for part in ("bias", "norm", "ln_")) for word in self.words)
        if not plain or not self.by_name or not self.words:
            return {}, set()
        return dict.fromkeys((_WEIGHT, *self.words), 1), set(self.words)


def all_weights(script: Script, node: ast.expr | None) -> bool:
    """Return whether an argument is `model.parameters()`, also of a wrapped model, but not of a part of one, nor a
    condition on anything but `requires_grad`: weights without it are frozen elsewhere, or refused there."""
    if isinstance(value := script.bound(node) if isinstance(node, ast.Name) else None, ast.ListComp):
        node = value  # a list; a generator or filter that has a name may be used up
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "list" and len(node.args) == 1 and not node.keywords:
        node = node.args[0]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "filter" and len(node.args) == 2:
        test = node.args[0]
        name = test.args.args[0].arg if isinstance(test, ast.Lambda) and len(test.args.args) == 1 else ""
        trained = isinstance(test, ast.Lambda) and ast.unparse(test.body) == f"{name}.requires_grad"
        return trained and all_weights(script, node.args[1])
    if isinstance(node, ast.ListComp | ast.GeneratorExp) and len(node.generators) == 1:
        source, name = node.generators[0], ast.unparse(node.elt)
        tests = {ast.unparse(each) for each in source.ifs}
        alike = ast.unparse(source.target) == name and tests <= {f"{name}.requires_grad"}
        return alike and all_weights(script, source.iter)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parameters"):
        return False
    owner: ast.expr | None = node.func.value
    for _ in range(20):  # head = model.classifier
        if isinstance(owner, ast.Attribute):
            return owner.attr == "module"
        if not isinstance(owner, ast.Name):
            break
        owner = script.bound(owner, last=True)
    if not isinstance(owner, ast.Call):
        return owner is None
    name, part = script.origin_of(owner.func).rpartition(".")[2], isinstance(owner.func, ast.Attribute)
    return name != "getattr" and not (part and name.startswith("get_") and name != "get_peft_model")
