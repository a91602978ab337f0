"""Versions of DeepSpeed that compute wrong gradients without an error, by the report that says so.

In: a stage of ZeRO, DeepSpeed's options, the device, and the version that is installed. Out: nothing, or a `RunError`
that names the report. pip installs none of them (pyproject.toml); environments that were made otherwise are refused
here.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from lockstep.config.run import RunError
from lockstep.strategies.engines.zero_agreement import keeps_bf16_weights


def _every(options: Mapping[str, Any]) -> bool:
    return True


def _offloads(options: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state is in host memory or on a disk."""
    section = options.get("zero_optimization", {})
    wanted = section.get("offload_optimizer")
    return section.get("cpu_offload") is True or (
        isinstance(wanted, Mapping) and wanted.get("device", "none") != "none"
    )


def _overlaps(options: Mapping[str, Any]) -> bool:
    return options.get("zero_optimization", {}).get("overlap_comm") is True


def _reduces_scattered(options: Mapping[str, Any]) -> bool:
    return options.get("zero_optimization", {}).get("contiguous_gradients") is False


def _sums_in_fp32(options: Mapping[str, Any]) -> bool:
    """Whether weights are bf16, and micro-batches are added in fp32."""
    types = options.get("data_types")
    return keeps_bf16_weights(options) and isinstance(types, Mapping) and types.get("grad_accum_dtype") == "fp32"


@dataclass(frozen=True)
class KnownBad:
    """Versions below `mended` and from `since` on, at these stages of ZeRO and on these devices, with options that
    `concerns` recognizes."""

    since: str
    mended: str
    stages: tuple[int, ...]
    concerns: Callable[[Mapping[str, Any]], bool]
    fault: str
    reports: str
    devices: tuple[str, ...] = ("cpu", "cuda")


OFFLOADED = "with offload_optimizer leaves out gradients of micro-batches"
OVERLAPPED = "with overlap_comm reduces gradients in memory that is already used again"
ALONE = "with bf16 weights and grad_accum_dtype fp32 does not average the last micro-batch over the ranks"
SCATTERED = "on CPUs with contiguous_gradients false leaves every gradient to its rank, reduced with no other"
DEEPSPEED = (
    KnownBad("0.17.6", "0.18.3", (2,), _every, "leaves out gradients of micro-batches", "DeepSpeed#7718"),
    KnownBad("0", "0.19.0", (1, 2), _offloads, OFFLOADED, "DeepSpeed#7967, DeepSpeed#7981"),
    KnownBad("0", "0.19.0", (1, 2), _overlaps, OVERLAPPED, "DeepSpeed#7965"),
    KnownBad("0.18.6", "0.19.0", (1,), _sums_in_fp32, ALONE, "DeepSpeed#7985"),
    KnownBad("0", "0.19.8", (1, 2), _reduces_scattered, SCATTERED, "DeepSpeed#8382", ("cpu",)),
)


def check(stage: int, options: Mapping[str, Any], name: str, device: str) -> None:
    """Refuse a version that is known to be wrong for this stage and these options. `name`: of the strategy. `device`:
    cpu or cuda. Errors: `RunError`."""
    try:
        installed = Version(importlib.metadata.version("deepspeed"))
    except importlib.metadata.PackageNotFoundError:  # on a path of its own
        return
    for bad in DEEPSPEED:
        inside = Version(bad.since) <= installed < Version(bad.mended)
        if inside and stage in bad.stages and device in bad.devices and bad.concerns(options):
            raise RunError(
                f"strategy.name: {name} with deepspeed {installed}: its ZeRO-{stage} {bad.fault} ({bad.reports}); "
                f"install deepspeed {bad.mended} or later: pip install 'lockstep-train[deepspeed]'"
            )
