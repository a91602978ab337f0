"""A DeepSpeed config next to a run file: equal and "auto" values are accepted, all others are named in one message."""

import importlib.metadata
import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from lockstep.cli import main
from lockstep.config.run import RunError
from lockstep.strategies.engines import zero_agreement, zero_config
from lockstep.strategies.engines.zero_agreement import check, keeps_bf16_weights, remaining
from lockstep.training.resolve import resolve_strategy
from support.harness import tiny
from support.marks import needs
from support.messages import mentions, raises
from support.places import ROOT

ORDINARY: dict[str, Any] = {  # as in transformers' documentation
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                   "total_num_steps": "auto", "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def run_of(options: Any, name: str = "zero2", *overrides: str) -> Any:
    return tiny(*overrides, strategy={"name": name, "options": options})


def refusals(options: Any, *overrides: str) -> list[str]:
    """Return the keys that are refused in a job of two processes."""
    try:
        check(run_of(options, "zero2", *overrides), 2)
    except RunError as caught:
        lines = str(caught).splitlines()
        return [line.split()[0].removeprefix("strategy.options.").rstrip(":") for line in lines[len(lines) > 1 :]]
    return []


def test_usual_config_needs_one_change_which_is_reported() -> None:
    assert refusals(ORDINARY) == ["steps_per_print"]
    assert refusals(ORDINARY, "track.every=2000") == []
    assert remaining(ORDINARY) == {
        "zero_optimization": {
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "contiguous_gradients": True,
        },
        "wall_clock_breakdown": False,
    }
    assert not keeps_bf16_weights(ORDINARY)
    assert keeps_bf16_weights({"bf16": {"enabled": True}})


def test_equal_values_are_accepted() -> None:
    agreeing = {
        "train_batch_size": 22,
        "train_micro_batch_size_per_gpu": 2.75,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.999], "eps": 1e-8}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 2},
    }
    assert refusals(agreeing) == []


def test_all_differing_values_are_named_in_one_message() -> None:
    differing = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "eps": "auto", "amsgrad": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7}},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "round_robin_gradients": True},
    }
    assert refusals(differing) == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer.params.lr",
        "optimizer.params.amsgrad",
        "scheduler.params.warmup_type",
        "scheduler.params.warmup_num_steps",
        "fp16",
        "zero_optimization.stage",
        "zero_optimization.round_robin_gradients",
        "bf16",
    ]
    assert refusals({"optimizer": {"type": "Lion"}, "scheduler": {"type": "OneCycle"}}) == ["optimizer", "scheduler"]


def test_accelerates_deepspeed_config_is_checked_too() -> None:
    with raises("LS4131", "strategy.options.deepspeed", "2"):
        check(run_of({"deepspeed": {"zero_stage": 1, **ORDINARY}}, "hf_accelerate"), 2)


def test_plan_reports_differing_values(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "strategy.name=zero2", "launch.processes=2"]
    assert main([*words, "strategy.options={train_batch_size: 7, gradient_clipping: 3.0}"]) == 2
    said = capsys.readouterr().err
    assert mentions(said, "LS4131", "2")
    assert "optim.max_grad_norm" in said
    needs("deepspeed")
    assert main([*words, "strategy.options={zero_optimization: {overlap_com: true, reduce_bucket_size: many}}"]) == 2
    said = capsys.readouterr().err
    assert "overlap_com: DeepSpeed has no such option" in said
    assert "invalid value 'many'" in said
    ordinary = json.dumps(ORDINARY | {"steps_per_print": "auto"})
    assert main([*words, f"strategy.options={ordinary}", "optim.schedule=linear"]) == 0


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
OVERLAP = {"zero_optimization": {"overlap_comm": True}}
SCATTERED = {"zero_optimization": {"contiguous_gradients": False}}
ALONE = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("version", "stage", "options", "report"),
    [
        ("0.18.0", 2, {}, "DeepSpeed#7718"),
        ("0.18.2", 2, {}, "DeepSpeed#7718"),
        ("0.18.2+cu128", 2, {}, "DeepSpeed#7718"),
        ("0.18.2", 1, {}, None),
        ("0.18.2", 3, {}, None),
        ("0.18.3", 2, {}, None),
        *(("0.18.9", stage, OFFLOAD, "DeepSpeed#7967, DeepSpeed#7981") for stage in (1, 2)),
        ("0.18.9", 3, OFFLOAD, None),
        ("0.18.9", 2, {"zero_optimization": {"offload_optimizer": {"device": "none"}}}, None),
        ("0.18.9", 2, OVERLAP, "DeepSpeed#7965"),
        ("0.18.9", 1, ALONE, "DeepSpeed#7985"),
        ("0.18.5", 1, ALONE, None),
        *(("0.19.0", stage, OFFLOAD | OVERLAP | ALONE, None) for stage in (1, 2, 3)),
        *(("0.19.7", stage, SCATTERED, "DeepSpeed#8382") for stage in (1, 2)),
        ("0.19.7", 3, SCATTERED, None),
        ("0.19.8", 2, SCATTERED, None),
    ],
)
def test_versions_known_to_be_wrong_are_refused_by_their_report(
    monkeypatch: pytest.MonkeyPatch, version: str, stage: int, options: dict[str, Any], report: str | None
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: {"deepspeed": version}[package])
    if report is None:
        zero_agreement.refuse_known_bad(stage, options, f"zero{stage}", "cpu")
        return
    with raises("LS4130", f"zero{stage}", report):
        zero_agreement.refuse_known_bad(stage, options, f"zero{stage}", "cpu")


def test_a_version_that_is_wrong_only_on_cpus_is_allowed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.19.7")
    zero_agreement.refuse_known_bad(2, SCATTERED, "zero2", "cuda")
    with raises("LS4130", "DeepSpeed#8382"):
        zero_agreement.refuse_known_bad(2, SCATTERED, "zero2", "cpu")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_counts_one_micro_batch_a_step(stage: int) -> None:
    """DeepSpeed#8224 (0.18.3 to 0.19.5) needs several micro-batches per step: benchmarks/deepspeed_shared_module.py."""
    options = {"gradient_accumulation_steps": 4}
    run = run_of(options, f"zero{stage}")
    assert zero_config.config(run.optim, stage, 1000, options)["gradient_accumulation_steps"] == 1


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.parametrize(("name", "options"), [("zero2", {}), ("hf_accelerate", {"deepspeed": {"zero_stage": 2}})])
def test_a_run_does_not_start_with_such_a_version(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    found = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda package: "0.18.2" if package == "deepspeed" else found(package)
    )
    with raises("LS4130", str(name), "0.18.2", "DeepSpeed#7718"):
        resolve_strategy(run_of(options, name), 2)


def test_pip_installs_no_wrong_version() -> None:
    """The extra, the development tools and the lock of `.ci/run` exclude such versions."""
    root = ROOT
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [Requirement(each) for extra in ("deepspeed", "dev") for each in extras[extra]]
    ranges = [each.specifier for each in wanted if each.name == "deepspeed"]
    assert len(ranges) == 2
    for bad in zero_agreement.DEEPSPEED:
        major, minor, patch = map(int, bad.mended.split("."))
        before = f"{major}.{minor}.{patch - 1}" if patch else f"{major}.{minor - 1}.99"
        assert not any(each.contains(before) for each in ranges), f"{before} can be installed"
    locked = (root / ".ci" / "constraints.txt").read_text().split()
    assert all(
        each.contains(line.removeprefix("deepspeed==")) for each in ranges for line in locked if "deepspeed=" in line
    )
