"""Rejects Accelerate settings that the run file does not have, because they would silently have no effect.

In: a file of `accelerate config`, or the variables that `accelerate launch` sets. Out: nothing, or a `RunError` that
names the equivalent keys of the run file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.run import Run, RunError
from lockstep.config.sections import StrategySection
from lockstep.data.job import StrategyRules, strategy_class

_UNUSED = ("no", "none", "false", "auto", "")  # Accelerate's values for off, or decided by the program


@dataclass(frozen=True)
class AccelerateSettings:
    """Settings of an Accelerate configuration that affect arithmetic and engine."""

    engine: str  # deepspeed, fsdp, ...; empty: plain data parallelism
    precision: str
    compiler: str  # of torch.compile
    details: Mapping[str, Any] = field(default_factory=dict)  # engine options, by their names in `accelerate config`


def check_file(run: Run, config_file: str | None) -> None:
    """Check `launch.config_file`, or the default file that `accelerate launch` reads. Errors: `RunError`."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    path = Path(config_file or f"{home}/accelerate/default_config.yaml").expanduser()
    if config_file is None and not path.is_file():
        return
    try:
        config = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text(encoding="utf-8"))
    except OSError as caught:
        raise RunError("LS7300", f"launch.config_file: cannot read {path}: {caught.strerror}") from None
    except (ValueError, yaml.YAMLError) as caught:
        raise RunError("LS7301", f"launch.config_file: {path} is not valid: {' '.join(str(caught).split())}") from None
    if not isinstance(config, Mapping):
        raise RunError(
            "LS7302", f"launch.config_file: {path} holds no keys; expected a file that `accelerate config` wrote"
        )
    engine = str(config.get("distributed_type", "NO")).lower()
    settings = AccelerateSettings(
        "" if engine == "no" or engine.startswith("multi_") else engine,
        str(config.get("mixed_precision") or "no").lower(),
        str((config.get("dynamo_config") or {}).get("dynamo_backend", "no")).lower(),
        dict(config.get(f"{engine}_config") or {}),
    )
    where = f"launch.config_file: {path}" if config_file else f"launch.name: {path}, which accelerate reads,"
    _refuse(_differing(run, settings), where)


def check_variables(run: Run, variables: Mapping[str, str]) -> None:
    """Check the environment of a process that `accelerate launch` may have started. Errors: `RunError`."""
    engines = [
        e for e in ("deepspeed", "fsdp", "megatron_lm") if variables.get(f"ACCELERATE_USE_{e.upper()}") == "true"
    ]
    names = {
        "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
        "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    }
    settings = AccelerateSettings(
        next(iter(engines), ""),
        variables.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
        variables.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(),
        {name: variables[variable] for name, variable in names.items() if variable in variables},
    )
    _refuse(_differing(run, settings), "accelerate launch: its configuration")


def _refuse(differing: Iterator[tuple[str, str]], where: str) -> None:
    """Refuse settings that the run does not have. Errors: `RunError` if there are any."""
    rows = [f"  {setting}: {instead}" for setting, instead in differing]
    if rows:
        raise RunError(
            "LS7303",
            f"{where} has settings that only the run file can set, so they would be ignored. Set the keys below in "
            "the run file, or remove the settings:\n" + "\n".join(rows),
        )


def _differing(run: Run, settings: AccelerateSettings) -> Iterator[tuple[str, str]]:
    """Yield (setting that the run does not have, equivalent keys of the run file)."""
    if settings.precision not in (*_UNUSED, "fp32", run.precision):
        known = f"precision={settings.precision}"
        if settings.precision not in ("bf16", "fp16"):
            known = f"precision=bf16, fp16 or fp32; lockstep has no {settings.precision}"
        yield f"mixed_precision {settings.precision}", known
    compiled = run.model.compile not in (False, "auto") or run.strategy.options.get("torch_compile")
    if settings.compiler not in _UNUSED and not compiled:
        instead = (
            "model.compile=true, or strategy.name=hf_trainer strategy.options.torch_compile=true strategy.exact=false"
        )
        yield f"dynamo_backend {settings.compiler}", instead
    if settings.engine == "deepspeed":
        zero = _zero_of(run.strategy, strategy_class(run))
        yield from _deepspeed(zero, run.micro_batches, run.optim.max_grad_norm, settings.details)
    elif settings.engine == "fsdp":
        if strategy_class(run).facts.accelerate_type != "fsdp":
            yield (
                "distributed_type FSDP",
                "strategy.name=fsdp2, or strategy.name=hf_accelerate with strategy.options.fsdp",
            )
    elif settings.engine:
        yield (
            f"distributed_type {settings.engine.upper()}",
            "no strategy of lockstep does this; `lockstep list` names them",
        )


def _deepspeed(
    zero: tuple[str | None, Mapping[str, Any]],
    micro_batches: int,
    max_grad_norm: float | None,
    details: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    """Compare DeepSpeed's settings with a run's. `zero`: its stage of ZeRO and DeepSpeed config."""
    stage, engine = zero
    if (path := str(details.get("deepspeed_config_file", ""))).lower() not in _UNUSED:
        yield (
            f"deepspeed_config_file {path}",
            "strategy.name=zero1, zero2 or zero3, and its entries in strategy.options",
        )
        return
    config_stage = str(details.get("zero_stage", 2))
    if stage != config_stage:
        same = f"strategy.name=zero{config_stage}" if config_stage in ("1", "2", "3") else "strategy.name=ddp"
        yield f"distributed_type DEEPSPEED, zero_stage {config_stage}", same
    clip = str(details.get("gradient_clipping", "")).lower()
    if clip not in _UNUSED and float(clip) != (max_grad_norm or 0.0):
        yield f"gradient_clipping {clip}", f"optim.max_grad_norm={clip}"
    each = str(details.get("gradient_accumulation_steps", "")).lower()
    if each not in (*_UNUSED, "1") and micro_batches % int(each):
        yield f"gradient_accumulation_steps {each}", f"micro_batches: {each} for each process"
    section = engine.get("zero_optimization", {})
    for key in ("offload_optimizer", "offload_param"):
        device = str(details.get(f"{key}_device", "none")).lower()
        if device not in _UNUSED and not (isinstance(section, Mapping) and key in section):
            yield f"{key}_device {device}", f"strategy.options.zero_optimization.{key}={{device: {device}}}"


def _zero_of(section: StrategySection, strategy: type[StrategyRules]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the stage of ZeRO that a strategy is, and its DeepSpeed config. Stage 0 is plain data parallelism; None:
    something else."""
    if strategy.facts.accelerate_type == "deepspeed":
        from lockstep.strategies.engines.zero import DeepSpeedStrategy

        assert issubclass(strategy, DeepSpeedStrategy), strategy
        with suppress(KeyError, TypeError, ValueError):  # options that `resolve` refuses
            return str(strategy.stage_of(section)), strategy.options_of(section)
        return None, {}
    return "0" if strategy.facts.runs_whole_model and not strategy.facts.accelerate_type else None, {}
