"""Settings of `accelerate config` that the run file lacks are refused, with the keys that do the same."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config.run import RunError
from lockstep.launchers.accelerate import Accelerate
from lockstep.launchers.start import run_as_rank
from lockstep.proof.verify import verify
from lockstep.strategies.fsdp2 import FSDP2
from support.harness import tiny
from support.messages import raises

ZERO = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}, "mixed_precision": "bf16"}
PLAIN = {"distributed_type": "MULTI_GPU", "mixed_precision": "no", "use_cpu": True}


class OwnSharding(FSDP2):
    """A user's strategy, which has another name."""


def plan(folder: Path, config: Any, *overrides: str) -> None:
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(config))
    launch = ["launch.name=accelerate", f"launch.config_file={folder}/accelerate.yaml", "launch.processes=2"]
    Accelerate().plan(tiny(*launch, *overrides))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ZERO, ["zero_stage 2: strategy.name=zero2", "mixed_precision bf16: precision=bf16"]),
        (PLAIN | {"mixed_precision": "fp8"}, ["no fp8", "precision=bf16, fp16 or fp32"]),
        (PLAIN | {"mixed_precision": "fp16"}, ["precision=fp16"]),
        (PLAIN | {"distributed_type": "FSDP"}, ["strategy.name=fsdp2"]),
        (PLAIN | {"distributed_type": "MEGATRON_LM"}, ["MEGATRON_LM", "no strategy of lockstep"]),
        (PLAIN | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, ["strategy.options.torch_compile=true"]),
        (
            ZERO | {"deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu", "gradient_clipping": 2.0}},
            ["strategy.name=zero3", "zero_optimization.offload_param={device: cpu}", "optim.max_grad_norm=2.0"],
        ),
        (ZERO | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, ["ds.json", "its entries in"]),
        ([1], ["holds no keys"]),
    ],
)
def test_a_conflicting_configuration_is_refused(config: Any, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        plan(tmp_path, config)
    for word in ["launch.config_file", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        (PLAIN, []),
        (PLAIN, ["precision=bf16"]),  # "no" is Accelerate's default, so the run file decides
        (ZERO, ["strategy.name=zero2", "precision=bf16"]),
        (ZERO, ["strategy.name=hf_accelerate", "strategy.options.deepspeed.zero_stage=2", "precision=bf16"]),
        (
            ZERO | {"deepspeed_config": {"zero_stage": 1, "gradient_clipping": 0.5, "offload_param_device": "none",
                                         "gradient_accumulation_steps": 4}},
            ["strategy.name=zero1", "precision=bf16"],
        ),
        (ZERO | {"deepspeed_config": {"zero_stage": 0}}, ["precision=bf16"]),
        (PLAIN | {"distributed_type": "FSDP"}, ["strategy.name=fsdp2"]),
        (PLAIN | {"distributed_type": "FSDP"}, ["strategy.name=fsdp2", "strategy.options.gather=step"]),
        (PLAIN | {"distributed_type": "FSDP"}, ["strategy.name=hf_accelerate", "strategy.options.fsdp={}"]),
        (PLAIN | {"distributed_type": "FSDP"}, [f"strategy.name={__name__}.OwnSharding"]),
    ],
)  # fmt: skip
def test_an_equal_configuration_is_accepted(config: Any, overrides: list[str], tmp_path: Path) -> None:
    plan(tmp_path, config, *overrides)


@pytest.mark.parametrize("options", ["{}", "3", "{zero_stage: x}"])
def test_options_that_are_refused_later(options: str, tmp_path: Path) -> None:
    with raises("LS7303", "zero_stage 2: strategy.name=zero2"):
        plan(tmp_path, ZERO, "precision=bf16", "strategy.name=hf_accelerate", f"strategy.options.deepspeed={options}")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = tiny("launch.name=accelerate", "launch.processes=2", f"output={tmp_path}")
    (run.folder / "launch").write_text("no folder")
    launcher = Accelerate()
    with raises("LS7388", "launch"):
        launcher.start(launcher.plan(run))


def test_the_default_configuration_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    run = tiny("launch.name=accelerate", "launch.processes=2")
    Accelerate().plan(run)
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").write_text(yaml.safe_dump(ZERO))
    with raises("LS7303", "default_config.yaml"):
        Accelerate().plan(run)
    (tmp_path / "accelerate/default_config.yaml").write_text("a: [")
    with raises("LS7301"):
        Accelerate().plan(run)


def test_ranks_of_accelerate_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "auto",
    }.items():
        monkeypatch.setenv(name, value)
    for start in (run_as_rank, lambda run: verify(run, 1)):
        with pytest.raises(RunError) as caught:
            start(tiny())
        assert str(caught.value).count("\n") == 2
        assert "strategy.name=zero3" in str(caught.value)
        assert "precision=bf16" in str(caught.value)
