"""A config of DeepSpeed beside a run file: what agrees and what says auto is accepted, the rest is named at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import tiny

from lockstep.cli import main
from lockstep.config.run import RunError
from lockstep.strategies.engines.zero_agreement import check, keeps_bf16_weights, remaining

ORDINARY: dict[str, Any] = {  # as transformers' documentation has it
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
    """Keys that are refused, in a job of two processes."""
    try:
        check(run_of(options, "zero2", *overrides), 2)
    except RunError as caught:
        lines = str(caught).splitlines()
        return [line.split()[0].removeprefix("strategy.options.").rstrip(":") for line in lines[len(lines) > 1 :]]
    return []


def test_an_ordinary_config_needs_one_change_and_says_so() -> None:
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


def test_values_that_agree() -> None:
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


def test_all_that_differ_are_named_at_once() -> None:
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


def test_under_accelerate_the_same() -> None:
    with pytest.raises(RunError, match=r"strategy\.options\.deepspeed: 2 entries"):
        check(run_of({"deepspeed": {"zero_stage": 1, **ORDINARY}}, "hf_accelerate"), 2)


def test_plan_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "strategy.name=zero2", "launch.processes=2"]
    assert main([*words, "strategy.options={train_batch_size: 7, gradient_clipping: 3.0}"]) == 2
    said = capsys.readouterr().err
    assert "2 entries" in said
    assert "optim.clip" in said
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    assert main([*words, "strategy.options={zero_optimization: {overlap_com: true, reduce_bucket_size: many}}"]) == 2
    said = capsys.readouterr().err
    assert "overlap_com: DeepSpeed has no such option" in said
    assert "'many' will not do" in said
    ordinary = json.dumps(ORDINARY | {"steps_per_print": "auto"})
    assert main([*words, f"strategy.options={ordinary}", "optim.schedule=linear"]) == 0
