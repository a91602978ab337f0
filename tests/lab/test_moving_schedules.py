"""Every schedule that `init --from` reads has, step by step, the rates that its library sets."""

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from lockstep.config.key_aliases import foreign_keys
from lockstep.config.run import Run
from lockstep.config.schedules import SCHEDULES, learning_rate
from support.messages import mentions
from support.moving_scripts import ACCELERATE, moved, refused

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

RATE, STEPS = 1e-3, 40
TRAINER = foreign_keys("values")["schedules"]
LOOPS = foreign_keys("scripts")["schedules"]
DEEPSPEED = foreign_keys("scripts")["deepspeed_schedules"]
# What these take besides a warm-up, and what they cannot do without.
MORE: dict[str, list[dict[str, Any]]] = {
    "polynomial": [{}, {"power": 2.0}, {"lr_end": 1e-5}],
    "cosine_with_min_lr": [{"min_lr_rate": 0.2}, {"min_lr": 1e-4}],
    "warmup_stable_decay": [
        {"num_decay_steps": 5},
        {"num_decay_steps": 5, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
        {"num_decay_steps": 5, "decay_type": "linear"},
    ],
}


def here_is(run: Run, steps: int = STEPS) -> list[float]:
    return [learning_rate(run.optim, step, steps) for step in range(steps)]


def set_by(make: Callable[[torch.optim.Optimizer], Any], steps: int = STEPS) -> list[float]:
    """Return the rate of each update, if the scheduler steps after it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def same(rates: list[float]) -> Any:
    return pytest.approx(rates, rel=1e-9, abs=1e-15)


def notes(folder: Path) -> str:
    """Return the header of the run file, on one line."""
    lines = (folder / "moved.yaml").read_text().splitlines()
    return " ".join(" ".join(line.lstrip("# ") for line in lines if line.startswith("#")).split())


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm_up", [{}, {"warmup_steps": 1}, {"warmup_steps": 7}, {"warmup_steps": 0.13}])
@pytest.mark.parametrize(("name", "options"), [(name, each) for name in TRAINER for each in MORE.get(name, [{}])])
def test_schedules_of_trainer(name: str, options: dict, warm_up: dict, here: Path) -> None:
    given = {"learning_rate": RATE, "lr_scheduler_type": name, "lr_scheduler_kwargs": options} | warm_up
    run = moved("args.json", json.dumps({"output_dir": "o", **given}))
    args = TrainingArguments("o", **given, use_cpu=True)
    warmup = args.get_warmup_steps(STEPS)
    assert warmup == (math.ceil(0.13 * STEPS) if 0 < warm_up.get("warmup_steps", 0) < 1 else args.warmup_steps)
    theirs = set_by(lambda optimizer: get_scheduler(name, optimizer, warmup, STEPS, options))
    assert here_is(run) == same(theirs)


@pytest.mark.parametrize("name", sorted({str(each.value) for each in TYPE_TO_SCHEDULER_FUNCTION} - {*TRAINER}))
def test_other_schedules_of_trainer_are_refused(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("args.json", json.dumps({"output_dir": "o", "lr_scheduler_type": name}), capsys)
    assert mentions(said, "LS8209", f"lr_scheduler_type: {name}")


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("name", "options"), [(name, each) for name in LOOPS for each in MORE.get(name, [{}])])
def test_schedules_of_a_loop(name: str, options: dict, warmup: int, here: Path) -> None:
    call = "get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=len(train) * 3 // 4)"
    ours = (
        f"get_scheduler({name!r}, optimizer, num_warmup_steps={warmup}, num_training_steps=len(train) * 3 // 4, "
        f"scheduler_specific_kwargs={options!r})"
    )
    text = ACCELERATE.replace(call, ours).replace("get_linear_schedule_with_warmup, ", "get_scheduler, ")
    run = moved("acc.py", text.replace("lr=2e-5", f"lr={RATE}"))
    theirs = set_by(lambda optimizer: get_scheduler(name, optimizer, warmup, STEPS, options))
    assert here_is(run) == same(theirs)


def test_names_that_a_run_file_takes_from_transformers_have_its_rates() -> None:
    assert {name: TRAINER[name] for name in SCHEDULES} == SCHEDULES


@pytest.mark.parametrize("rounding", ["int", "round", "math.ceil"])
def test_a_warmup_share_that_is_not_rounded_up_is_noted(
    rounding: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ACCELERATE.replace("num_warmup_steps=100", f"num_warmup_steps={rounding}(0.13 * len(train) * 3 // 4)")
    text = "import math\n" + text.replace("schedule = get", "total = len(train) * 3 // 4\nschedule = get").replace(
        "len(train) * 3 // 4)", "total)"
    )
    run = moved("acc.py", text)
    assert run.optim.warmup_fraction == 0.13
    assert ("one step" in notes(here)) == (rounding != "math.ceil")


@pytest.mark.parametrize(("steps", "share"), [(100, 0.03), (90, 0.13), (50, 0.03), (77, None), (5000, None)])
def test_a_share_of_axolotl_is_rounded_down_and_never_one_step(steps: int, share: float | None, here: Path) -> None:
    usual = "base_model: a/b\nmicro_batch_size: 2\ndatasets: [{path: c/d, type: completion}]\n"
    usual += "" if share is None else f"warmup_ratio: {share}\n"
    run = moved("ax.yaml", f"{usual}max_steps: {steps}\n")
    count = min(int(0.03 * steps), 100) if share is None else int(share * steps)  # as its trainer builder counts
    assert (run.optim.warmup_steps, run.optim.warmup_fraction) == (2 if count == 1 else count, 0)
    assert moved("ax.yaml", f"{usual}warmup_steps: 1\n").optim.warmup_steps == 2
    assert moved("ax.yaml", usual).optim.warmup_fraction == (share or 0.03)
    assert "may be one step longer" in notes(here)


FREE = {"optim": "schedule_free_adamw", "output_dir": "o", "learning_rate": RATE}


@pytest.mark.extras
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_the_warm_up_of_trainer_s_schedule_free_is_the_optimizer_s(warmup: int, here: Path) -> None:
    """The schedule `constant` has no warm-up; the optimizer receives its steps."""
    pytest.importorskip("schedulefree")
    given = FREE | {"lr_scheduler_type": "constant", "warmup_steps": warmup}
    run = moved("args.json", json.dumps(given))
    args = TrainingArguments(**given, use_cpu=True)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer, theirs = kind([torch.nn.Parameter(torch.zeros(1))], **options), []
    optimizer.train()
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(STEPS), STEPS)
    for _ in range(STEPS):
        optimizer.step()
        theirs.append(optimizer.param_groups[0]["scheduled_lr"])
        scheduler.step()
    assert (run.optim.name, here_is(run)) == ("schedule_free", same(theirs))


def test_the_warm_up_of_schedule_free(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = moved("args.json", json.dumps(FREE | {"lr_scheduler_type": "constant", "warmup_steps": 4}))
    assert here_is(run)[:6] == same([RATE * part / 4 for part in (1, 2, 3, 4, 4, 4)])
    (here / "moved.yaml").unlink()
    twice = FREE | {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}
    assert mentions(refused("args.json", json.dumps(twice), capsys), "LS8209", "warms up twice")
    share = FREE | {"lr_scheduler_type": "constant", "warmup_steps": 0.1}
    assert mentions(refused("args.json", json.dumps(share), capsys), "LS8209", "as a number of steps")
    usual = "base_model: a/b\nmicro_batch_size: 2\ndatasets: [{path: c/d, type: completion}]\nmax_steps: 200\n"
    for kind, optimizer, warmup in (
        ("constant", "adamw_torch", 0),
        ("constant", "schedule_free_adamw", 6),
        ("constant_with_warmup", "adamw_torch", 6),
    ):
        run = moved("ax.yaml", f"{usual}lr_scheduler: {kind}\noptimizer: {optimizer}\n")
        assert run.optim.warmup_steps == warmup, (kind, optimizer)


# -- torch -------------------------------------------------------------------------------------------------------------

OF_TORCH = sorted(
    name
    for name, kind in inspect.getmembers(torch.optim.lr_scheduler, inspect.isclass)
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler) and not name.startswith("_")
)


@pytest.mark.parametrize("name", OF_TORCH)
def test_schedules_of_torch_are_refused_in_a_loop(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tests/config/test_schedules.py compares `one_cycle`, which is one of them."""
    call = "get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=len(train) * 3 // 4)"
    text = ACCELERATE.replace(call, f"torch.optim.lr_scheduler.{name}(optimizer)")
    text = text.replace("get_linear_schedule_with_warmup, ", "")
    said = refused("acc.py", text, capsys)
    assert mentions(said, "LS8209", name)


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def of_deepspeed(kind: str, params: dict[str, Any], steps: int = STEPS) -> list[float]:
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    return set_by(lambda optimizer: getattr(schedules, kind)(optimizer, **params), steps)


def moved_from_deepspeed(kind: str, params: dict[str, Any], *words: str) -> Run:
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": RATE}}}
    scheduler = {"type": kind, "params": {"warmup_type": "linear"} | params}
    return moved("ds.json", json.dumps(config | {"scheduler": scheduler}), *words)


@pytest.mark.parametrize("more", [{}, {"warmup_min_lr": 1e-4}, {"warmup_max_lr": 2e-3}])
@pytest.mark.parametrize("warmup", [1, 2, 9])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
@pytest.mark.parametrize("total", [30, STEPS, 55])
def test_straight_lines_of_deepspeed_are_the_same_rates(
    kind: str, warmup: int, more: dict, total: int, here: Path
) -> None:
    """This also holds if the schedule ends before or after the run."""
    params = {"warmup_num_steps": warmup, "warmup_type": "linear"} | more
    params |= {"total_num_steps": total} if kind == "WarmupDecayLR" else {}
    theirs = of_deepspeed(kind, params)
    assert theirs[0] == theirs[1] == more.get("warmup_min_lr", 0.0)
    run = moved_from_deepspeed(kind, params, f"steps={STEPS}")
    assert here_is(run) == same(theirs)
    assert run.optim.learning_rate == max(more.get("warmup_max_lr", RATE), 0)


@pytest.mark.parametrize("least", [{}, {"cos_min_ratio": 0.1}])
@pytest.mark.parametrize("warmup", [1, 2, 9])
def test_the_late_warmup_of_deepspeeds_cosine_is_noted(warmup: int, least: dict, here: Path) -> None:
    params = {"warmup_num_steps": warmup, "total_num_steps": STEPS, "warmup_type": "linear"} | least
    theirs, run = of_deepspeed("WarmupCosineLR", params), moved_from_deepspeed("WarmupCosineLR", params)
    ours, end = here_is(run), max(2, warmup)
    assert run.steps == STEPS
    assert theirs[0] == 0.0
    assert ours[:end] == same(theirs[1 : end + 1])
    assert ours[end + 1 :] == same(theirs[end + 1 :])
    told = notes(here)
    assert "DeepSpeed's WarmupCosineLR have rate 0, so in the warm-up every rate comes one step later" in told


@pytest.mark.parametrize("arguments", [{}, {"max_steps": STEPS}])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_schedules_that_deepspeed_takes_from_the_trainer(kind: str, arguments: dict, here: Path) -> None:
    """DeepSpeed's schedule applies, whatever schedule the Trainer's arguments name; if its length is unknown, a note
    says that the rates come one step late."""
    params = {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_min_lr": "auto", "warmup_type": "linear"}
    params |= {"total_num_steps": "auto"} if kind == "WarmupDecayLR" else {}
    config = {"scheduler": {"type": kind, "params": params}, "zero_optimization": {"stage": 2}}
    (here / "ds.json").write_text(json.dumps(config))
    given = {
        "learning_rate": RATE,
        "warmup_steps": 7,
        "lr_scheduler_type": "cosine_with_min_lr",
        "deepspeed": "ds.json",
    }
    given |= {"lr_scheduler_kwargs": {"min_lr_rate": 0.3}, "output_dir": "o"} | arguments
    run = moved("args.json", json.dumps(given))
    real = {"warmup_num_steps": 7, "warmup_max_lr": RATE, "warmup_type": "linear"}
    real |= {"total_num_steps": STEPS} if kind == "WarmupDecayLR" else {}
    theirs, told = of_deepspeed(kind, real, STEPS + 1), notes(here)
    if arguments or kind == "WarmupLR":
        assert here_is(run) == same(theirs[:STEPS])
        assert "one step later" not in told
    else:
        assert here_is(run) == same(theirs[1:])
        assert f"DeepSpeed's {kind} have rate 0, so every rate comes one step later there than here" in told


@pytest.mark.parametrize(
    ("kind", "params", "wanted"),
    [
        ("WarmupLR", {"warmup_type": "log"}, "warmup_type: log"),
        ("WarmupCosineLR", {"total_num_steps": STEPS, "warmup_min_ratio": 0.1}, "warmup_min_ratio: 0.1"),
        ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 9}, "falls at once"),
        ("LRRangeTest", {}, "scheduler: LRRangeTest"),
        ("OneCycle", {}, "scheduler: OneCycle"),
    ],
)
def test_other_rates_of_deepspeed_are_refused(
    kind: str, params: dict, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = {"type": kind, "params": {"warmup_type": "linear"} | params}
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "scheduler": scheduler}
    assert mentions(refused("ds.json", json.dumps(config), capsys), "LS8209", wanted)


def test_a_cosine_that_ends_before_or_after_the_run_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = {"warmup_num_steps": 5, "total_num_steps": 100, "warmup_type": "linear"}
    (here / "ds.json").write_text(json.dumps({"scheduler": {"type": "WarmupCosineLR", "params": params}}))
    given = {"learning_rate": RATE, "deepspeed": "ds.json", "output_dir": "o", "max_steps": STEPS}
    assert mentions(refused("args.json", json.dumps(given), capsys), "LS8209", "total_num_steps: 100")
    assert moved("args.json", json.dumps(given), "steps=100").steps == 100


def test_every_schedule_of_the_tables_is_compared() -> None:
    assert set(DEEPSPEED) == {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}
    assert {*LOOPS} <= {*TRAINER}
