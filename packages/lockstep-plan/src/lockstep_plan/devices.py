"""Rates of a device and of the links between ranks, each with its source.

In: `h100`, `a100` or a YAML file. Out: a `Device`. `devices/` holds `h100` and `a100`; owners of other machines write a
file with the same keys.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lockstep.config import error_messages as messages
from lockstep.config.errors import InvalidValue, uncoded
from lockstep.config.run import RunError

FOLDER = Path(__file__).parent / "devices"
Rate = float | list[tuple[float, float]]  # per second; or pairs (size of one operation, rate)
FIGURES = ("memory_bytes", "flops", "memory_bytes_per_s", "operation_s", "links.inside", "links.between")


class Link(BaseModel):
    """Link between two ranks, in one direction."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    bytes_per_s: Rate  # by the bytes of one message
    latency_s: float = Field(ge=0)

    def seconds(self, messages: float, size: float) -> float:
        """Seconds of `messages` messages in sequence, with `size` bytes in total."""
        return messages * self.latency_s + (size / at(self.bytes_per_s, size / messages) if messages else 0.0)


class DeviceLinks(BaseModel):
    """Links within a machine and between machines, per rank."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    inside: Link
    between: Link
    shared: dict[int, Link] = {}  # ranks that send at once on a machine -> link of each


class Device(BaseModel):
    """Rates and memory of one rank's device."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str
    kind: Literal["gpu", "cpu"]
    memory_bytes: float = Field(gt=0)
    ranks_per_node: int = Field(ge=1)
    flops: dict[Literal["fp32", "bf16", "fp16"], Rate]
    reaches: float = Field(1.0, gt=0)  # fraction of `flops` reached in training
    memory_bytes_per_s: Rate
    operation_s: float = Field(ge=0)  # fixed cost of an operation that computes or touches memory
    view_s: float = Field(0.0, ge=0)  # cost of an operation that does neither, such as a view
    links: DeviceLinks
    overlaps: bool  # whether communication overlaps with computing
    crowding: dict[int, float] = {}  # ranks that compute at once on a machine -> slowdown of each
    cores: int | None = Field(
        None, ge=1
    )  # per machine: with more ranks than cores, a waiting rank frees its core for another
    step_scale: float | dict[str, float] = 1.0  # time of a step relative to the sum of its operations; by phase
    micro_batch_s: float = Field(0.0, ge=0)  # overhead per micro-batch: Python code of the loop
    # by strategy; `fsdp2` gathers per micro-batch, `fsdp2_step` per step:
    engine_s: dict[str, float] = {}  # per micro-batch: extra time of the strategy's own code
    wait_s: dict[str, float] = {}  # per message: extra waiting time
    sources: dict[str, str]

    @field_validator("flops", "memory_bytes_per_s", "crowding", "step_scale")
    @classmethod
    def positive(cls, rates: Any) -> Any:
        """Check that every rate and factor is positive."""
        each = rates.values() if isinstance(rates, dict) else [rates]
        if not all(rate > 0 for one in each for rate in ([r for _, r in one] if isinstance(one, list) else [one])):
            raise InvalidValue("LS8310", "is not positive")
        return rates

    @model_validator(mode="after")
    def check_sources(self) -> Device:
        if missing := [figure for figure in FIGURES if figure not in self.sources]:
            raise InvalidValue("LS8311", f"sources: missing {', '.join(missing)}; name the source of each figure")
        return self

    def seconds(self, precision: str, flops: int, size: int) -> float:
        """Seconds of one operation of `flops` FLOP that reads and writes `size` bytes (the roofline model of Williams
        et al. 2009)."""
        if not flops and not size:
            return self.view_s
        computing = flops / (at(self.flops[precision], flops) * self.reaches) if flops else 0.0  # type: ignore[index]
        return self.operation_s + max(computing, size / at(self.memory_bytes_per_s, size) if size else 0.0)

    def slower(self, ranks: int) -> float:
        """Slowdown of each rank in a job of `ranks` ranks, because the ranks of a machine compute at the same time."""
        here = min(ranks, self.ranks_per_node)
        return at(sorted(self.crowding.items()), here) if self.crowding else 1.0

    def take_turns(self, ranks: int) -> bool:
        """Return whether a machine has fewer cores than ranks, so that waiting ranks free their core for others."""
        return self.cores is not None and min(ranks, self.ranks_per_node) > self.cores

    def scale(self, phase: str) -> float:
        """Time of a phase relative to the sum of its operations. The overlapped phase uses backward's factor; an
        unknown phase has factor 1."""
        if not isinstance(self.step_scale, dict):
            return self.step_scale
        return self.step_scale.get("backward" if phase == "overlapped" else phase, 1.0)

    def inside(self, ranks: int) -> Link:
        """Link to other ranks of the same machine, for the nearest measured number of ranks."""
        here = min(ranks, self.ranks_per_node)
        links = self.links.shared
        return links[min(links, key=lambda n: (abs(math.log(n / here)), n))] if links else self.links.inside


def at(rate: Rate, size: float) -> float:
    """Rate at a size: log-log interpolation between known sizes, the nearest value outside of them."""
    if isinstance(rate, float | int):
        return float(rate)
    points = sorted(rate)
    if size <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in pairwise(points):
        if size <= b:
            share = math.log(size / a) / math.log(b / a)
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return points[-1][1]


def load(name: str) -> Device:
    """Load a device by name or file. Errors: `RunError` if there is none."""
    shipped = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
    path = shipped.get(name, Path(name).expanduser())
    if not path.is_file():
        raise RunError(
            "LS8312",
            f"--device: unknown device {name!r}; expected {', '.join(sorted(shipped))} or a YAML file of rates; "
            "how-to/plan on the site shows such a file",
        )
    lines: dict[str, int] = {}
    try:
        values, lines = messages.read_yaml_with_lines(path.read_text(encoding="utf-8"))
        return Device.model_validate(values)
    except ValidationError as error:
        reason = uncoded(str(messages.explain(error, Device, str(path), lines, {})))
        raise RunError("LS8314", f"--device: {reason.removeprefix(': ')}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError("LS8313", f"--device: {path} cannot be read: {' '.join(str(error).split())[:200]}") from None
