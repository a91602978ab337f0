"""What a machine can do: rates of a device and of the links between ranks, each with where the figure is from.

In: `h100`, `a100` or a YAML file. Out: a `Device`. `h100` and `a100` are in `devices/`; what another machine can do is
for its owner to say, in a file with the same keys.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lockstep.config.errors import InvalidValue
from lockstep.config.run import RunError

FOLDER = Path(__file__).parent / "devices"
Rate = float | list[tuple[float, float]]  # a second; or (size of one operation, rate) at several sizes
FIGURES = ("memory_bytes", "flops", "memory_bytes_per_s", "operation_s", "links.inside", "links.between")


class Link(BaseModel):
    """Between two ranks, one way."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    bytes_per_s: Rate  # of one message, by its bytes
    latency_s: float = Field(ge=0)

    def seconds(self, messages: float, size: float) -> float:
        """So many messages, one after the other, of so many bytes in all."""
        return messages * self.latency_s + (size / at(self.bytes_per_s, size / messages) if messages else 0.0)


class DeviceLinks(BaseModel):
    """Within a machine, and from one machine to another; for each rank."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    inside: Link
    between: Link
    shared: dict[int, Link] = {}  # ranks of a machine that send at once -> what each then has inside of it


class Device(BaseModel):
    """What one rank has."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str
    kind: Literal["gpu", "cpu"]
    memory_bytes: float = Field(gt=0)
    ranks_per_node: int = Field(ge=1)
    flops: dict[Literal["fp32", "bf16", "fp16"], Rate]
    reaches: float = Field(1.0, gt=0)  # of `flops`, in training
    memory_bytes_per_s: Rate
    operation_s: float = Field(ge=0)  # of one that does nothing
    view_s: float = Field(0.0, ge=0)  # of one that touches no memory
    links: DeviceLinks
    overlaps: bool  # whether messages travel while it computes
    crowding: dict[int, float] = {}  # ranks of a machine that compute at once -> how much longer each takes
    cores: int | None = Field(
        None, ge=1
    )  # of a machine: where ranks are more, one that waits leaves its turn to others
    step_scale: float | dict[str, float] = 1.0  # how much longer it takes than the sum of its operations; by phase
    micro_batch_s: float = Field(0.0, ge=0)  # of one besides its operations: what a loop in Python takes
    # by strategy, `fsdp2` with a gather for each micro-batch, `fsdp2_step` with one for each step:
    engine_s: dict[str, float] = {}  # of a micro-batch, what the strategy's own code takes besides
    wait_s: dict[str, float] = {}  # of a message, what its ranks wait besides
    sources: dict[str, str]

    @field_validator("flops", "memory_bytes_per_s", "crowding", "step_scale")
    @classmethod
    def positive(cls, rates: Any) -> Any:
        """Every rate, and every factor."""
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
        """One operation of so many FLOP that reads and writes so many bytes (the roofline of Williams et al. 2009)."""
        if not flops and not size:
            return self.view_s
        computing = flops / (at(self.flops[precision], flops) * self.reaches) if flops else 0.0  # type: ignore[index]
        return self.operation_s + max(computing, size / at(self.memory_bytes_per_s, size) if size else 0.0)

    def slower(self, ranks: int) -> float:
        """By how much, with so many ranks in all, a machine's share of which computes at once."""
        here = min(ranks, self.ranks_per_node)
        return at(sorted(self.crowding.items()), here) if self.crowding else 1.0

    def take_turns(self, ranks: int) -> bool:
        """Whether a machine has fewer cores than ranks: then what one rank does not compute others do."""
        return self.cores is not None and min(ranks, self.ranks_per_node) > self.cores

    def scale(self, phase: str) -> float:
        """What its operations take in a step, beside what they take by themselves. Backward is told for the one that
        overlaps; a phase that is not told takes what they do by themselves."""
        if not isinstance(self.step_scale, dict):
            return self.step_scale
        return self.step_scale.get("backward" if phase == "overlapped" else phase, 1.0)

    def inside(self, ranks: int) -> Link:
        """What a rank has to others of its machine: of the numbers of ranks that are told, the nearest one."""
        here = min(ranks, self.ranks_per_node)
        links = self.links.shared
        return links[min(links, key=lambda n: (abs(math.log(n / here)), n))] if links else self.links.inside


def at(rate: Rate, size: float) -> float:
    """A rate at a size: between two that are known on a straight line in logarithms, beyond them the nearest."""
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
    """Errors: `RunError` for a name or file that is none."""
    shipped = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
    path = shipped.get(name, Path(name).expanduser())
    if not path.is_file():
        raise RunError(
            "LS8312", f"--device: unknown device {name!r}; expected a file, or one of {', '.join(sorted(shipped))}"
        )
    try:
        return Device.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunError("LS8314", f"--device: {path}: {place}: {first['msg']}".replace(": : ", ": ")) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError("LS8313", f"--device: {path} cannot be read: {' '.join(str(error).split())[:200]}") from None
