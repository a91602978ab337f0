"""A script with its own training loop: plain PyTorch, DDP, Accelerate, Lightning.

In: a `Script`. Out: a mover: the loop's settings and the task. The task is the model's own loss for a transformers
model, else `module` with the names of the script's functions (`task.model`, `task.data`, `task.loss` and their
arguments). A function without an importable name is a gap, and FILL-IN takes its place.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.lab.import_config import (
    attributes,
    call_arguments,
    lightning,
    lightning_data,
    lightning_values,
    loading,
    loop_module,
    loss_means,
    object_flows,
    precision_calls,
    schedule_calls,
    shared_rows,
    step_order,
    trained_model,
    trainer_script,
)
from lockstep.lab.import_config.decay_groups import GROUPS, DecayGroups, NotRead, all_weights
from lockstep.lab.import_config.epoch_ends import EpochEnd, ScheduleEnd
from lockstep.lab.import_config.inlining import needs_inlining, written_out
from lockstep.lab.import_config.kinds import kind_of
from lockstep.lab.import_config.library_names import is_own, is_seed
from lockstep.lab.import_config.loader_calls import draws_all, is_around_rows, loaders_of, note_others, without_order
from lockstep.lab.import_config.loading import Reading
from lockstep.lab.import_config.loop_statements import Statements
from lockstep.lab.import_config.model_inputs import learns_logits
from lockstep.lab.import_config.resuming import best_saved, without_resuming
from lockstep.lab.import_config.schedule_calls import COSINE, assignments
from lockstep.lab.import_config.script import Arguments, Call, Script, code_of
from lockstep.lab.import_config.table import (
    ADAFACTOR,
    NAMES,
    RunDraft,
    batches,
    decays_all,
    number,
)


def read(script: Script) -> tuple[str, Callable[[RunDraft, int | None], None]] | None:
    """Return the mover of a script with a loop, or None if it has none."""
    if lightning.modules(script):
        name = "a script of Lightning"
    elif any(c.origin.endswith("accelerate.Accelerator") or c.name == "Accelerator" for c in script.calls):
        name = "a loop of Accelerate"
    elif any(c.name == "backward" for c in script.calls):
        name = "a training loop"
    else:
        return None
    tree = None
    if name == "a script of Lightning":
        tree = lightning_values.with_values(script)
    elif needs_inlining(script.tree):
        tree = written_out(script.tree)
    script = script if tree is None else Script(script.path, script.text, script.options, tree)
    script, notes = without_resuming(script)
    notes += best_saved(script)
    return name, lambda draft, processes: _move(script, draft, processes, notes)


def _move(script: Script, draft: RunDraft, processes: int | None, notes: list[str]) -> None:
    draft.notes += notes
    at = Loop(script, draft, processes=processes, lightning=bool(lightning.modules(script)))
    if at.lightning:
        at.trained_on, missing = lightning_data.train_loaders(script)
        if missing is not None:
            draft.unclear(f"the loader {missing}", "the loader that Lightning trains on was not found", "batch_size")
        if len(at.trained_on) > 1:
            draft.unclear("the loader", "Lightning may train on several loaders", "batch_size")
    for call in script.calls:
        if is_seed(script, call.node.func) or not is_own(script, call.node.func):
            at.call(call)
    statements = None
    if at.lightning:
        lightning.module(at, at.is_transformers())
    else:
        nodes = [call.node for call in at.optimizers]
        created = frozenset() if at.is_transformers() else loop_module.created(script, at.optimizers, at.loader)
        statements = Statements(script, draft, at.is_transformers(), nodes, created)
        statements.of_logits = at.is_transformers() and learns_logits(script)
        statements.read()
        precision_calls.contexts(at, statements)
        at.loaders(statements)
        step_order.note_epochs(statements, at.loader)
        step_order.note_seeds(statements)
    note_others(script, draft, at.loader)
    shared_rows.check(at)
    at.constants(statements)
    at.settle()
    at.ends(statements)
    object_flows.refuse(script, draft)
    if draft.by_hand.get("task.name", "module" if not at.is_transformers() else "") != "module":
        at.library_task()
        if draft.keys.get("model.dtype") == "bfloat16" and not any(c.name == "autocast" for c in script.calls):
            draft.keys.setdefault("precision", "bf16")
    else:
        loop_module.name_functions(script, draft, at.optimizers, at.loader)


@dataclass
class Loop(Reading):
    """Settings found in a loop's calls."""

    processes: int | None = None
    lightning: bool = False  # whether Lightning runs the loop
    batch: int | None = None  # examples per process and forward pass
    accumulated: int = 1
    optimizers: list[Call] = field(default_factory=list)
    loader: Call | None = None
    trained_on: set[int] = field(default_factory=set)  # ids of the DataLoaders that Lightning trains on; empty: unknown
    scheduled: bool = False
    schedule_end: tuple[str, ast.expr | None] | None = None  # line of its creation, num_training_steps
    schedule_advances: tuple[bool, bool] = False, False  # by Accelerate; with a length times the processes
    dropped: str = ""  # the line that drops the last, smaller batch
    every_at: str = ""  # the line that sets the batches per step, if a library divides by them

    def call(self, call: Call) -> None:
        self._dispatch(call)
        root = call.origin.partition(".")[0]
        evaluates = call.name == "DataLoader" and call is not self.loader
        if not evaluates and (call.name != "Trainer" or root in trainer_script.LOOPS) and call.name != "fit":
            call_arguments.check(self.script, self.draft, call, call_arguments.row_of(call.origin))

    def _dispatch(self, call: Call) -> None:
        name = call.name
        root = call.origin.partition(".")[0]
        if name in NAMES["optimizers"] and root in (
            "torch",
            "transformers",
            "bitsandbytes",
            "bnb",
            "optim",
            "lion_pytorch",
        ):
            self._optimizer(call)
        elif name in _WITHOUT:
            self.draft.lacks(str(call), *_WITHOUT[name])
        elif (
            call.origin.startswith(("torch.optim.", "optim.")) and name[:1].isupper() and "lr_sched" not in call.origin
        ):
            self.optimizers.append(call)
            self.draft.lacks(str(call), "`lockstep list` names the optimizers", "optim.name")
        elif name == "DataLoader":
            self._loader(call)
        elif name in ("clip_grad_norm_", "clip_grad_norm") and len(call.node.args) + len(call.node.keywords) > 1:
            self._clipping(call)
        elif is_seed(self.script, call.node.func) and call.node.args:
            self._seed(call)
        elif name in ("autocast", "Accelerator", "GradScaler"):
            precision_calls.precision(self, call)
        elif name == "Trainer" and root in trainer_script.LOOPS:
            lightning.trainer(call, self)
        elif name in ("EarlyStopping", "ModelCheckpoint"):
            lightning.callback(call, self)
        elif name in ("DistributedDataParallel", "DDP"):
            self.setting(call, "strategy.name", "ddp")
        elif name in ("FullyShardedDataParallel", "FSDP", "fully_shard"):
            self.setting(call, "strategy.name", "fsdp2")
        elif name in ("get_scheduler", COSINE) or ("schedule" in name and name.startswith("get_")):
            schedule_calls.schedule(self, call)
        elif ("lr_scheduler" in call.origin and name[:1].isupper()) or name == "LambdaLR":
            self.scheduled = True
            self.draft.lacks(str(call), _STEPWISE, "optim.schedule")
        elif call.origin == "torch.compile":
            self.setting(call, "model.compile", True)

    def _seed(self, call: Call) -> None:
        """Read a seed, also one that a function of the script gets from its only call."""
        node = call.node.args[0]
        function = self.script.scopes.get(id(node))
        if isinstance(node, ast.Name) and isinstance(function, ast.FunctionDef):
            names = tuple(each.arg for each in function.args.args)
            calls = [c for c in self.script.calls if c.name == function.name and c.receiver is None]
            if node.id in names and len(calls) == 1 and self.script.bindings.get((id(function), node.id)) == [None]:
                own = self.script.arguments(calls[0], names)
                defaults = dict(zip(names[::-1], function.args.defaults[::-1], strict=False))
                value = own.known.get(
                    node.id, None if node.id in own.nodes else self.script.known(defaults.get(node.id))
                )
                if value is not None and not own.more:
                    self.setting(calls[0], "seed", value)
                    return
        self._known(call, "seed", ("seed",), "seed")

    def setting(self, call: Call, key: str, value: Any) -> None:
        self.draft.set(key, value, f"{call.name}, line {call.line}")
        self.read(call, key)

    def _known(self, call: Call, key: str, names: tuple[str, ...], name: str) -> None:
        arguments = self.script.arguments(call, names)
        if name in arguments.known:
            self.setting(call, key, arguments.known[name])
        else:
            self.draft.unclear(f"{call}", loading.RUNS, key, decides=key != "seed")

    def unknown_values(self, call: Call, arguments: Arguments, keys: Mapping[str, str]) -> None:
        for name, key in keys.items():
            if name in arguments.unknown:
                code = f"line {call.line}: {call.name}({name}={arguments.unknown[name]})"
                self.draft.unclear(code, loading.RUNS, key)
        for code in arguments.more:
            self.draft.unclear(f"line {call.line}: {call.name}({code})", "its content is unknown")

    def _clipping(self, call: Call) -> None:
        arguments = self.script.arguments(call, ("parameters", "max_norm", "norm_type"))
        if not all_weights(self.script, arguments.nodes.get("parameters")):
            why = "optim.max_grad_norm is the largest norm of all gradients together"
            self.draft.lacks(str(call), why, "optim.max_grad_norm")
        elif "norm_type" in arguments.nodes and arguments.known.get("norm_type") != 2:
            why = "optim.max_grad_norm is a Euclidean norm"
            self.draft.lacks(f"line {call.line}: norm_type", why, "optim.max_grad_norm")
        else:
            self._known(call, "optim.max_grad_norm", ("parameters", "max_norm", "norm_type"), "max_norm")

    def _optimizer(self, call: Call) -> None:
        self.optimizers.append(call)
        arguments = self.script.arguments(call, _POSITIONS.get(call.name, ("params", "lr")))
        if len(self.optimizers) > 1:
            self.draft.unclear(str(call), "a second optimizer", "optim.name")
            return
        rate, decay = NAMES["optimizer_defaults"][call.name]
        if call.origin.startswith("transformers."):  # older releases of transformers
            decay = 0.0
            if call.name == "Adafactor":
                self.draft.lacks(f"line {call.line}: the rate of adafactor", ADAFACTOR, "optim.learning_rate")
        decay = arguments.known.get("weight_decay", 0.0 if arguments.more else decay)
        if call.name in ("Adam", "Adam8bit") and decay:
            why = "Adam adds the decay to the gradient; AdamW, lockstep's, does not"
            self.draft.lacks(str(call), why, "optim.name")
        self.draft.set("optim.name", NAMES["optimizers"][call.name], f"line {call.line}")
        later = f"(to be checked: its value in line {call.line} is known only when the script runs)"
        values = {"learning_rate": ("lr", arguments.known.get("lr", rate)), "weight_decay": ("weight_decay", decay)}
        for key, (name, value) in values.items():
            known = name not in arguments.unknown
            constant = None if known else number(self._constant_of(arguments.nodes[name]))
            value = value if constant is None else constant
            if arguments.more and name not in arguments.nodes:
                continue  # `**options` may have it
            self.draft.set(f"optim.{key}", value, f"{name}, line {call.line}" if known else later)
        self._weights(call, arguments, rate, number(decay) or 0.0)
        keys = {name: f"optim.{name}" for name in ("betas", "eps", "momentum")}
        defaults: dict[str, Any] = {"momentum": 0.0} if call.name == "SGD" else {}
        if call.name == "Muon":
            defaults = {"adjust_lr_fn": "original"}
            keys = {name: f"optim.{name}" for name in ("momentum", "nesterov", "ns_steps")}
            keys |= {"adjust_lr_fn": "optim.lr_adjust"}
        for name, value in (defaults | arguments.known).items():
            if name in keys and value is not None:
                self.draft.set(keys[name], value, f"{name}, line {call.line}")
            elif value and name not in (*keys, *NAMES["optimizer_quiet"]):
                why = f"{NAMES['optimizers'][call.name]} has no such key"
                self.draft.lacks(f"line {call.line}: {call.name}({name}={value})", why, "optim.name")
        by = keys | {"lr": "optim.learning_rate", "weight_decay": "optim.weight_decay"}
        quiet = {"params", *NAMES["optimizer_quiet"]} - by.keys()
        others = dict.fromkeys(arguments.unknown.keys() - by.keys() - quiet, "optim.name")
        self.unknown_values(call, arguments, others | by)
        self.read(call, "optim")

    def _weights(self, call: Call, arguments: Arguments, rate: float | None, decay: float) -> None:
        """Read which weights an optimizer has: all of them, or groups with and without decay."""
        node = arguments.nodes.get("params")
        if node is None or all_weights(self.script, node):
            decays_all(self.draft, decay)
            return
        try:
            groups = DecayGroups(self.script, node, arguments.known.get("lr", rate), decay, f"line {call.line}")
        except NotRead:
            largest = max(self._decays(node), default=decay)
            note = "(the largest of the groups of"
            self.draft.set("optim.weight_decay", largest, f"{note} line {call.line}, which were not read)")
            self.draft.unclear(f"line {call.line}: {code_of(node)}", GROUPS, "optim.groups")
            return
        self.draft.at_end.append(groups.set_keys)

    def _decays(self, node: ast.expr) -> list[float]:
        """Return the known decays of groups that are not read."""
        value = self.script.bound(node, last=True) if isinstance(node, ast.Name) else node
        dicts = [each for each in ast.walk(value or node) if isinstance(each, ast.Dict)]
        pairs = [pair for each in dicts for pair in zip(each.keys, each.values, strict=True)]
        known = [number(self._constant_of(each)) for key, each in pairs if self.script.known(key) == "weight_decay"]
        return [each for each in known if each is not None]

    def _constant_of(self, node: ast.expr) -> Any:
        """Return a known value; for an argument of a function, that of the script's constant of the same name."""
        value = self.script.known(node)
        return self._constant(node.id) if value is None and isinstance(node, ast.Name) else value

    def _loader(self, call: Call) -> None:
        if self.trained_on and id(call.node) not in self.trained_on:
            return
        arguments = self.script.arguments(call, call_arguments.positions("DataLoader"))
        about = ast.unparse(call.node).lower()
        trains = arguments.known.get("shuffle") or "train" in about or "sampler" in arguments.nodes
        trains = trains or bool(self.trained_on)
        if self.loader is not None and (not trains or self.batch is not None):
            return
        if not trains and any(c.name == "DataLoader" and c is not call for c in self.script.calls):
            return
        self.loader = call
        size = arguments.known.get("batch_size", None if "batch_size" in arguments.unknown else 1)
        self.batch = size if isinstance(size, int) and not arguments.more else None
        self.unknown_values(call, arguments, {"batch_size": "batch_size"})
        last = arguments.known.get("drop_last", False)
        if "drop_last" in arguments.unknown or last:
            self.dropped = f"line {call.line}: {call.name}(drop_last={code_of(arguments.nodes['drop_last'])})"
        drawn = arguments.nodes.get("batch_sampler")
        if drawn is not None and not (isinstance(drawn, ast.Constant) and drawn.value is None):
            why = "a step has batch_size examples, in an order from the seed"
            self.draft.lacks(f"line {call.line}: batch_sampler={code_of(drawn)}", why)
        self._split_of(call, arguments.nodes.get("dataset"))
        self._sampler_of(call, arguments.nodes.get("sampler"))
        drawing = {name for name, node in arguments.nodes.items() if ast.unparse(node) != "None"}
        ordered = not ({"sampler", "batch_sampler"} & drawing or arguments.known.get("shuffle"))
        sampler = next((c for c in self.script.calls if c.name == "DistributedSampler"), None)
        if sampler is not None and "sampler" in drawing:
            names = ("dataset", "num_replicas", "rank", "shuffle")
            ordered = self.script.arguments(sampler, names).known.get("shuffle", True) is not True
        if sampler is not None and not self.dropped and self.script.arguments(sampler).known.get("drop_last"):
            self.dropped = f"line {sampler.line}: {sampler.name}(drop_last=True)"
        if ordered:
            why = "the script uses the data's order, or an unknown one; in lockstep every epoch has an order "
            self.draft.lacks(f"{call}", f"{why}from the seed: set shuffle=True in the script if that is intended")
        self.read(call, "batch_size")

    def _split_of(self, call: Call, node: ast.expr | None) -> None:
        """Return the rows of a loader; from a dictionary of splits, those of train."""
        if node is not None and self.is_transformers() and is_around_rows(self.script, node):
            why = "code of the script builds these rows: write them to a file, and give --data FILE"
            value = self._assigned_to(node) or node
            self.draft.unclear(f"line {call.line}: {code_of(value)}", why, "data.source", "data.train")
        node = self._assigned_to(node)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            split = node.slice.value
            if isinstance(split, str) and not split.startswith("train"):
                why = f"the loop trains on the split {split!r}; a run trains on data.train"
                self.draft.unclear(f"line {call.line}: {code_of(node)}", why, "data.train", "data.source")

    def _sampler_of(self, call: Call, node: ast.expr | None) -> None:
        """Check for a sampler that yields each example once per epoch, in random order."""
        node = self._assigned_to(node)
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            return
        sampler = next((c for c in self.script.calls if c.node is node), None)
        rows = self.script.arguments(call, ("dataset",)).nodes.get("dataset")
        if sampler is None or not draws_all(self.script, sampler.node, rows):
            why = "in lockstep each epoch has every example once, in an order from the seed"
            self.draft.lacks(f"line {call.line}: sampler={code_of(node)}", why)

    def _assigned_to(self, node: ast.expr | None) -> ast.expr | None:
        """Return the value of a name that the script assigns once; else the node itself."""
        if not isinstance(node, ast.Name):
            return node
        values = [
            each.value
            for each in assignments(self.script)
            if any(isinstance(target, ast.Name) and target.id == node.id for target in each.targets)
        ]
        return values[0] if len(values) == 1 else node

    def loaders(self, statements: Statements) -> None:
        """Check that the loop goes through the loader that was read, and through no other one."""
        loop = statements.batch_loop
        calls = loaders_of(self.script, loop.iter) if loop is not None and statements.walked else {}
        if self.loader is None or not calls:
            return
        usual = without_order(self.loader.node)
        for node in calls.values():
            if without_order(node) != usual:
                why = f"the loop may go through this loader, and through that of line {self.loader.line}"
                self.draft.unclear(f"line {node.lineno}: {code_of(node)}", why, "batch_size")

    # -- values outside of calls ---------------------------------------------------------------------------------------

    def constants(self, statements: Statements | None) -> None:
        """Read `for epoch in range(3)`, and names such as max_iters if no loop over a DataLoader was understood."""
        if statements is not None and statements.accumulated is not None:
            self.accumulated = statements.accumulated
        if statements is not None and statements.batch_loop is not None:
            self._epochs(statements.epoch_loop)
            return
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range":
                target, last = ast.unparse(node.target).lower(), node.iter.args[-1] if node.iter.args else None
                key = "steps" if target in ("step", "iter", "iteration", "it") else None
                if "epoch" in target:
                    key = "epochs"
                if key is not None and len(node.iter.args) in (1, 2) and key not in self.draft.keys:
                    first = number(self.script.known(node.iter.args[0], 0)) if len(node.iter.args) == 2 else 0
                    self._count(key, last, int(first or 0), node.lineno)
        for name, key in NAMES["constants"].items():
            value = number(self._constant(name))
            if (
                value is not None
                and key not in self.draft.keys
                and not (key == "epochs" and "steps" in self.draft.keys)
            ):
                one, where = self._one_more(name) if key == "steps" else (0, "")
                self.draft.set(key, int(value) + one if value == int(value) else value, f"{name}{where}")
                self.draft.read.append(f"{name} = {value:g}{where} -> {key}")
        for name in NAMES["accumulation"]:
            if self.accumulated == 1 and (times := number(self._constant(name)) or self._shared_out(name)):
                self.accumulated = int(times)
                self.draft.read.append(f"{name} = {times:g} -> micro_batches")
            elif self.accumulated == 1 and len(self.script.bindings.get((id(None), name), [])) > 1:
                self.draft.unclear(name, loading.RUNS, "micro_batches", "batch_size")
        if self.batch is None and (size := number(self._constant("batch_size"))):
            self.batch = int(size)

    def _epochs(self, loop: ast.For | None) -> None:
        """Read the loop around the one over batches; without one, training lasts one epoch."""
        if loop is None:
            self.draft.set("epochs", 1, "the loop makes one pass over the data")
            return
        node: ast.expr = loop.iter
        while isinstance(node, ast.Call) and not ast.unparse(node.func).endswith("range") and node.args:
            node = node.args[0]
        if isinstance(node, ast.Call) and len(node.args) in (1, 2):
            first = number(self.script.known(node.args[0])) if len(node.args) == 2 else 0
            self._count("epochs", node.args[-1] if first is not None else node, int(first or 0), loop.lineno)
        else:
            self.draft.unclear(f"line {loop.lineno}: {code_of(loop.iter)}", loading.RUNS, "epochs", "steps")

    def _constant(self, name: str) -> Any:
        values = self.script.bindings.get((id(None), name), [])
        return self.script.known(values[0]) if len(values) == 1 else None

    def _one_more(self, name: str) -> tuple[int, str]:
        """Return 1 and where, if a loop counts its steps from 0 and ends by `if count > NAME: break` behind a step, as
        nanoGPT's does; else 0."""
        for loop in (each for each in ast.walk(self.script.tree) if isinstance(each, ast.While)):
            counted: set[str] = set()
            for line in loop.body:
                if (
                    isinstance(line, ast.AugAssign)
                    and isinstance(line.op, ast.Add)
                    and self.script.known(line.value) == 1
                ):
                    counted.add(ast.unparse(line.target))
                test = line.test if isinstance(line, ast.If) and isinstance(line.body[-1], ast.Break) else None
                text = ast.unparse(test) if test is not None else ""
                count = next((each for each in counted if text == f"{each} > {name}"), None)
                starts = [v for v in self.script.bindings.get((id(None), count or ""), []) if v is not None]
                if count is not None and len(starts) == 1 and self.script.known(starts[0]) == 0:
                    return 1, f" + 1: line {line.lineno} ends the loop when {text}"
        return 0, ""

    def _shared_out(self, name: str) -> int | None:
        """Return the steps of a process where the script divides those of the job: nanoGPT's
        `gradient_accumulation_steps //= ddp_world_size`."""
        values = self.script.bindings.get((id(None), name), [])
        changes = [
            n for n in ast.walk(self.script.tree) if isinstance(n, ast.AugAssign) and ast.unparse(n.target) == name
        ]
        by = ast.unparse(changes[0].value).lower() if len(changes) == 1 else ""
        whole = number(self.script.known(values[0])) if values else None
        known = isinstance(changes[0].op, ast.FloorDiv) and "world_size" in by if changes else False
        if not known or whole is None or any(each is not None for each in values[1:]):
            return None
        return int(whole) // (self.processes or 1)

    def _count(self, key: str, node: ast.expr | None, first: int, line: int) -> None:
        value = number(self.script.known(node))
        if value is not None:
            self.draft.set(key, int(value) - first, f"line {line}")
            self.draft.read.append(f"line {line}: range({value:g}) -> {key}")
        elif node is not None:
            ranged = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("range")
            code = code_of(node) if ranged else f"range({code_of(node)})"
            self.draft.unclear(f"line {line}: {code}", loading.RUNS, "epochs", "steps")

    def settle(self) -> None:
        """Set the keys that the loop leaves at a default."""
        draft = self.draft
        if self.batch is not None:
            batches(draft, self.batch, self.accumulated, self.processes, ("batch_size", "accumulation"))
        else:
            if not any("batch_size" in gap.by for gap in draft.gaps):
                draft.unclear("the batch size", "no DataLoader with one was found", "batch_size")
        if "optim.max_grad_norm" not in draft.keys and str(draft.keys.get("strategy.name")).startswith("zero"):
            draft.set("optim.max_grad_norm", 1.0, "DeepSpeed's own clipping: its config sets none")
        elif "optim.max_grad_norm" not in draft.keys:
            draft.set("optim.max_grad_norm", 0.0, "a script without clipping")
        if not self.scheduled:
            if any(
                "lr" in ast.unparse(n.targets[0]) and "param_group" in ast.unparse(n.targets[0])
                for n in assignments(self.script)
            ):
                why = "the script sets the rate itself: optim.schedule is the rate as a function of the step"
                draft.unclear("param_group['lr'] = ...", why, "optim.schedule")
            draft.keys.setdefault("optim.schedule", "constant")
        trained_model.note(self.script, draft, self.optimizers)
        trained_model.unprepared(self)
        if not self.optimizers:
            draft.unclear("the optimizer", "no torch optimizer was found", "optim.name")
        listed = any({"epochs", "steps"} & set(gap.by) for gap in draft.gaps)
        if not listed and not {"epochs", "steps"} & draft.keys.keys():
            draft.unclear("how long it trains", "no loop over epochs or steps was found", "epochs", "steps")

    def ends(self, statements: Statements | None) -> None:
        """Schedule checks of how an epoch and the schedule end, for when the data are known."""
        processes = self.processes or 1
        kinds: list[tuple[Any, str]] = [("dropped", self.dropped)] if self.dropped else []
        guard = statements.guard if statements is not None else None
        if self.accumulated > 1 and guard is not None:
            kinds.append(("divided" if guard[1] else "left over", guard[0]))
        elif self.accumulated > 1 and self.every_at:
            kinds.append(("divided", self.every_at))
        for kind, where in kinds:
            self.draft.at_end.append(EpochEnd(kind, where, self.batch, self.accumulated, processes).check)
        if self.schedule_end is not None:
            node = self.loader.node if self.loader is not None else None
            several = processes if self.every_at and not self.lightning else 1
            end = ScheduleEnd(self.script, *self.schedule_end, node, several, *self.schedule_advances)
            self.draft.at_end.append(lambda draft: end.check(draft, self.accumulated))

    def is_transformers(self) -> bool:
        """Return whether the loss is computed by a transformers model."""
        endings = tuple(f"{ending}.from_pretrained" for ending in loading.TASKS)
        loaded = any(c.origin.startswith("transformers.") and c.origin.endswith(endings) for c in self.script.calls)
        has_loss = any(c.name in NAMES["losses"] or c.name.endswith("Loss") for c in self.script.calls)
        by_model = any(map(self._is_loss, ast.walk(self.script.tree)))
        return loaded and ((by_model and not has_loss) or (not self.lightning and learns_logits(self.script)))

    def _is_loss(self, node: ast.AST) -> bool:
        """Return whether code is `outputs.loss`, or `outputs[0]` of a model."""
        if not isinstance(node, ast.Subscript):
            return isinstance(node, ast.Attribute) and node.attr == "loss"
        value = self.script.bound(node.value, last=True) if isinstance(node.value, ast.Name) else node.value
        of_model = isinstance(value, ast.Call) and kind_of(self.script, value.func) == "model"
        return of_model and getattr(node.slice, "value", None) in (0, "loss")

    def library_task(self) -> None:
        """Set model, tokenizer and rows, as for a script with a Trainer."""
        loading.task_first(self.script, self.draft)
        self._collator()
        for call in self.script.calls:
            # Optimizers, schedules and seeds are read elsewhere.
            if call.name not in (*NAMES["optimizers"], "set_seed") and "schedule" not in call.name:
                trainer_script.read_call(call, self)
        attributes.read(self)
        trainer_script.own_tokenizer(self)
        self.draft.at_end += [self.check_inputs, loss_means.note_loop]
        if not self.mapped:
            why = "init found no tokenizing function"
            self.draft.unclear("the text columns and the maximum length", why, "data.max_length", "task.block_size")

    def _collator(self) -> None:
        node = None if self.loader is None else self.script.arguments(self.loader).nodes.get("collate_fn")
        if self.loader is not None and node is not None and (code := trainer_script.own_collator(self.script, node)):
            self.draft.lacks(f"line {self.loader.line}: collate_fn={code}", "lockstep builds batches itself")


_STEPWISE = "optim.schedule is the rate as a function of the step"
_CLIPPING = "optim.max_grad_norm is the largest norm of all gradients", "optim.max_grad_norm"
_WITHOUT = {
    **dict.fromkeys(("clip_grad_value_", "clip_grads_with_norm_", "clip_gradients"), _CLIPPING),
    "AveragedModel": ("checkpoint.average averages weights by another rule", "checkpoint.average"),
    "SWALR": (_STEPWISE, "optim.schedule"),
}
_POSITIONS = {
    "SGD": ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adam": ("params", "lr", "betas", "eps", "weight_decay", "amsgrad"),
    "AdamW": ("params", "lr", "betas", "eps", "weight_decay", "amsgrad"),
}
