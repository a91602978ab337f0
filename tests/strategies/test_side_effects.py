"""Side effects of a model's forward are detected before training, undone there, and then supported or refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config.run import Run, load
from lockstep.distributed.world import World
from lockstep.strategies.engines import side_effects
from lockstep.strategies.engines.side_effects import SideEffects
from lockstep.training.data_loader import StepLoader
from support import side_effect_modules as modules
from support.harness import build, digest, run_on, works
from support.messages import raises

NONE = ["Plain", "FrozenRows", "SwitchedLate", "Queue", "Functional"]
SEEN = {  # module -> detected side effects of its forward, by field
    "LateHook": {"hooked": ["second.weight"]},
    "Clamped": {"written": ["second.weight"], "alike": ["second.weight"]},
    "ClampedElsewhere": {"written": ["second.weight"], "new_memory": ["second.weight"], "alike": ["second.weight"]},
    "Renormed": {"written": ["words.weight"]},
    "Decayed": {"written": ["second.weight"]},
    "Replaced": {"replaced": ["second.weight"]},
    "Teacher": {"written": ["teacher.bias", "teacher.weight"]},
    "TeacherBuffer": {"written": ["teacher"]},
    "Count": {"written": ["seen"]},
    "Switched": {"switched": ["second.weight"]},
    "Evaluated": {"evaluated": ["second.weight"]},
}
ALONE = {"Renormed", "Decayed", "Teacher", "TeacherBuffer", "Count", "Switched"}  # not supported with several processes


def effects(name: str) -> SideEffects:
    torch.manual_seed(0)
    model, inputs = getattr(modules, name)().train(), modules.data().tensors[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, held = dict(vars(model)), list(model.parameters())
    found = side_effects.effects_of(model, [lambda: model(inputs[:4]), lambda: model(inputs[40:45])], ())
    assert all(side_effects.same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert dict(vars(model)) == plain
    if name != "Replaced":
        assert [id(p) for p in model.parameters()] == [id(p) for p in held]
        assert all(p.requires_grad or n.startswith("teacher") for n, p in model.named_parameters())
    assert not model.second.weight._backward_hooks
    return found


@pytest.mark.parametrize("name", [*NONE, *SEEN])
def test_side_effects_of_forward_are_detected_without_changing_anything(name: str) -> None:
    found = effects(name)
    fields = ("written", "new_memory", "replaced", "switched", "hooked", "evaluated", "alike")
    assert {f: sorted(getattr(found, f)) for f in fields if getattr(found, f)} == SEEN.get(name, {})
    assert bool(found.per_process) == (name in ALONE)


def test_ranks_combine_their_detections() -> None:
    """A side effect that only one rank detected, or detected differently, must be known to all ranks."""
    clamped, plain = effects("Clamped"), SideEffects()
    assert not clamped.together(lambda own: [own, own]).per_process
    assert clamped.together(lambda own: [own, plain]).per_process == {"second.weight"}
    other = SideEffects(clamped.written, alike={"second.weight": "another hash"})
    assert plain.together(lambda own: [own, clamped, other]).per_process == {"second.weight"}


def run_of(name: str, folder: Path, strategy: str, **options: Any) -> Run:
    task = {"name": "module", "data": "support.side_effect_modules.data", "loss": "support.side_effect_modules.loss"}
    values = {
        "task": task | {"model": f"support.side_effect_modules.{name}"},
        "output": str(folder / f"{name}-{strategy}"),
        "strategy": {"name": strategy, "options": options},
        "steps": 6,
        "batch_size": 24,
        "micro_batches": 6,
        "optim": {"learning_rate": 2e-2},
        "launch": {"device": "cpu", "threads": 1},
    }
    return load(None, [], values)


def builds(world: World, run: Run) -> bool:
    build(run, world)[1].close()
    return True


def after_steps(run: Run, tried: bool) -> str:
    """Return the state after three steps."""
    world = World(run)
    try:
        task, strategy = build(run, world)
        feed = StepLoader(task, strategy.own_micro_batches(), torch.device("cpu"))
        if tried:
            strategy.dry_run(feed.longest())
        for step in range(3):
            strategy.train_step(feed.make(step), 1e-2)
        found = digest(strategy.state.state_dict())
        strategy.close()
        return found
    finally:
        world.close()  # fsdp2 has a process group on one rank, too


LEAVES = ["Teacher", "TeacherBuffer", "Clamped", "Renormed", "SwitchedLate", "LateHook", "Center", "Queue"]


@pytest.mark.parametrize("name", LEAVES)
def test_a_trial_step_changes_nothing(name: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path, "single")
    assert after_steps(run, tried=True) == after_steps(run, tried=False)


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("FrozenRows", "LS4110", "words.weight"),
        ("Keeps", "LS4111", "held"),
        ("KeepsInList", "LS4111", "held"),
        ("KeepsInFunction", "LS4111", "held"),
        ("Clamped", "LS4191", "second.weight"),
        ("ClampedElsewhere", "LS4191", "second.weight"),
        ("LateHook", "LS4191", "second.weight"),
        ("Evaluated", "LS4191", "second.weight"),
        ("Replaced", "LS4181", "second.weight"),
        ("HookAfter", "LS4175", "words.weight"),
    ],
)
def test_writes_that_fsdp_would_lose_are_refused(name: str, code: str, value: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path, "fsdp2", gather="micro_batch")
    with raises(code, value):
        after_steps(run, tried=True)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "strategy", "lost"),
    [
        ("Clamped", "zero3", "second.weight"),
        ("ClampedElsewhere", "zero3", "second.weight"),
        ("Evaluated", "zero3", "second.weight"),
        ("Plain", "zero3", None),
        ("LimitedChain", "pipeline", "3.weight"),
        ("Chain", "pipeline", None),
    ],
)
def test_writes_to_sharded_weights_are_refused(name: str, strategy: str, lost: str | None, tmp_path: Path) -> None:
    run = run_of(name, tmp_path, strategy)
    if lost is None:
        assert run_on(2, builds, run) == [True, True]
        return
    with raises("LS4112", lost, error=AssertionError):
        run_on(2, builds, run)


@pytest.mark.parametrize("gather", ["step", "micro_batch"])
def test_calls_with_other_tensors_have_the_bits_of_single(gather: str, tmp_path: Path) -> None:
    wanted = after_steps(run_of("Functional", tmp_path, "single"), tried=True)
    assert after_steps(run_of("Functional", tmp_path, "fsdp2", gather=gather), tried=True) == wanted


NO_STRATEGY = [("Replaced", "LS4181"), ("HookAfter", "LS4175"), ("MovedInMemory", "LS4460"), ("MovedLate", "LS4460")]


@pytest.mark.parametrize(("name", "code"), NO_STRATEGY)
def test_state_that_no_strategy_can_keep_is_refused(name: str, code: str, tmp_path: Path) -> None:
    with raises(code, "model(): "):
        after_steps(run_of(name, tmp_path, "single"), tried=True)


def trained(run: Run, ranks: int) -> dict[str, torch.Tensor]:
    assert run_on(ranks, works, run, joined=False) == [0] * ranks
    return load_file(run.folder / "export/model.safetensors")


@pytest.mark.processes
@pytest.mark.parametrize("name", ["FrozenRows", "Clamped", "Evaluated"])
def test_constant_effects_keep_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    alone = trained(run_of(name, tmp_path, "single"), 1)
    assert "# the same weights on 2 processes" in log(tmp_path / f"{name}-single")
    if name == "Evaluated":  # the export is the trained state, not the evaluated one
        run = run_of("Plain", tmp_path, "single")
        assert digest(alone) == digest(trained(run, 1))
    for run, ranks in ((run_of(name, tmp_path, "ddp"), 3), (run_of(name, tmp_path, "fsdp2", gather="step"), 2)):
        assert digest(trained(run, ranks)) == digest(alone)


@pytest.mark.processes
def test_a_skipped_block_keeps_the_bits_of_one_process(tmp_path: Path) -> None:
    """Such a block is not sharded separately by `fsdp2`: the check before the start finds that some items skip it."""
    alone = trained(run_of("LeavesOut", tmp_path, "single"), 1)
    assert digest(trained(run_of("LeavesOut", tmp_path, "fsdp2", gather="micro_batch"), 3)) == digest(alone)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "strategy", "said"),
    [
        ("Teacher", "ddp", "training changes teacher.bias, teacher.weight of the model outside of the optimizer"),
        ("Renormed", "ddp", "training changes words.weight of the model outside of the optimizer"),
        ("SwitchedLate", "ddp", "changes requires_grad of weights"),
        ("SwitchedLate", "fsdp2", "changes requires_grad of weights"),
        ("LeavesOutOfFour", "fsdp2", "fsdp2 needs all ranks to run the same layers in the same order"),
    ],
)
def test_effects_that_depend_on_the_process_are_refused(name: str, strategy: str, said: str, tmp_path: Path) -> None:
    options = {"gather": "micro_batch"} if strategy == "fsdp2" else {}
    run = run_of(name, tmp_path, strategy, **options)
    with pytest.raises(AssertionError, match=said):
        run_on(3, works, run, joined=False)


def log(folder: Path) -> str:
    return " ".join((folder / "log.txt").read_text().split())


@pytest.mark.parametrize("name", ["Teacher", "Count", "SwitchedLate"])
def test_one_process_promises_nothing_of_several(name: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path, "single")
    assert works(World(run), run) == 0
    said = log(run.folder)
    assert "the same weights on" not in said
    assert f"next {shlex.join(['lockstep', 'evaluate', str(run.folder)])}" in said
    assert "repeat " not in said  # that command is named, and no other
    assert ("this model trains on one process only" in said) == (name != "SwitchedLate")  # detected during training


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("ClampedLate", "forward counts its calls in calls"),
        ("Queue", "the model keeps state between batches: queue"),
        ("Center", "the model keeps state between batches: center"),
    ],
)
def test_effects_that_may_depend_on_a_count_are_noted(name: str, note: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path, "single")
    assert works(World(run), run) == 0
    said = log(run.folder)
    assert note in said
    assert "the same weights on" not in said
    assert "checks that this training equals one on 2 processes" in said
