"""Strategies whose ranks kill themselves at listed steps and phases. Same bits.

In: `strikes.json` in the working directory, a list of {step, rank, phase, world, saved}: from that step on, in a world
of at least that size, the rank (modulo their number) ends by SIGKILL when it reaches the phase; with `saved`, not
before the checkpoint of that step exists. Strikes are carried out in order; `struck-0` and so on record the done ones
with step, rank and world.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from lockstep.checkpoint import manifest, shard_files
from lockstep.distributed.world import World
from lockstep.strategies.allreduce import AllReduce
from lockstep.strategies.ddp import DDP
from lockstep.strategies.engines.accelerated_sharding import AcceleratedZero
from lockstep.strategies.exact import exchange
from lockstep.strategies.fsdp2 import FSDP2
from lockstep.strategies.hf_accelerate import HFAccelerate
from lockstep.strategies.hf_trainer import HFTrainer
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.sharded_optimizer import ShardedOptimizer
from lockstep.strategies.zero1 import Zero1
from lockstep.strategies.zero2 import Zero2
from lockstep.strategies.zero3 import Zero3

EXCHANGE = ("sent", "summed", "agree", "agreed", "update", "updated")
OTHERS = ("step", "forward", "gradient", "evaluation", "saving", "forming", "meeting", "joining")
PHASES = EXCHANGE + OTHERS  # phases to draw from; not every rank reaches the others
MEETS = ("forming", "meeting")
CHOSEN = ("handing", "writing", "naming", "late")
PATIENCE_S = 60.0  # how long a strike waits for its world size


class Striking:
    """Mixin of a strategy."""

    world: Any
    due = -1  # number of this rank's next strike
    phase = ""
    unheard = False  # whether this rank loses contact before an update that the struck one has made: `late`

    def look(self, step: int, patience_s: float = 0.0) -> None:
        """Determine the next strike, and whether it is this rank's."""
        self.due, self.phase = self.next(step, patience_s)

    def next(self, step: int, patience_s: float) -> tuple[int, str]:
        strikes = json.loads(Path("strikes.json").read_text())
        self.unheard = False
        number = next((n for n in range(len(strikes)) if not Path(f"struck-{n}").exists()), -1)
        if number < 0 or step < strikes[number]["step"] or not _is_saved(strikes[number].get("saved", 0)):
            return -1, ""
        since = time.monotonic()
        meets = strikes[number]["phase"] in MEETS  # it comes once somebody joins: before later steps, not at any time
        while (self.world.size < strikes[number]["world"] or meets) and not self.world.members.offered:
            if time.monotonic() - since > patience_s:
                break
            time.sleep(0.02)
        full, after = self.world.size >= strikes[number]["world"], (strikes[number]["rank"] + 1) % self.world.size
        self.unheard = full and strikes[number]["phase"] == "late" and self.world.rank == after
        self.step = step
        if full and self.world.rank == strikes[number]["rank"] % self.world.size:
            return number, strikes[number]["phase"]
        return -1, ""

    def come_to(self, phase: str) -> None:
        """Reach a phase; also called by the thread that writes checkpoints."""
        due = self.due
        if due < 0 or phase != self.phase or self.world.size == 1:
            return
        told = json.dumps({"phase": phase, "step": self.step, "rank": self.world.rank, "world": self.world.size})
        try:
            with open(f"struck-{due}", "x") as file:
                file.write(told)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def train_step(self, batch: Any, rate: float) -> Any:
        global _now
        if batch.step or self.world.members.generation.number or Path("train").exists():  # not in the dry run
            self.look(batch.step, PATIENCE_S)
        _now = self
        self.come_to("step")
        return super().train_step(batch, rate)  # type: ignore[misc]

    def run_micro_batch(self, micro: Any, divisor: float) -> Any:
        self.come_to("forward")
        return super().run_micro_batch(micro, divisor)  # type: ignore[misc]

    def on_grad_ready(self, position: int, parameter: Any) -> None:
        if position == 5:
            self.come_to("gradient")
        super().on_grad_ready(position, parameter)  # type: ignore[misc]

    def build(self, task: Any) -> None:
        super().build(task)  # type: ignore[misc]
        totals: Any = self.totals  # type: ignore[attr-defined]
        plain = totals.all_reduce

        def all_reduce(*arguments: Any) -> Any:
            self.come_to("agree")
            found = plain(*arguments)
            self.come_to("agreed")
            return found

        totals.all_reduce = all_reduce
        state: Any = self.state  # type: ignore[attr-defined]
        own_part, load = state.sharded_state_dict, state.load_sharded_state_dict
        state.sharded_state_dict = lambda: (self.come_to("saving"), own_part())[1]
        state.load_sharded_state_dict = lambda saved: (self.come_to_joining(), load(saved))[1]

    def optimizer_step(self, *arguments: Any) -> Any:
        self.come_to("update")
        if self.unheard:  # as if contact were lost after all have what the update needs
            self.unheard, meet = False, self.world.barrier

            def barrier() -> None:
                self.world.barrier = meet
                meet()
                Path("unheard").touch()
                raise RuntimeError("Connection closed by peer (by a test)")

            self.world.barrier = barrier
        found = super().optimizer_step(*arguments)  # type: ignore[misc]
        self.come_to("late")
        self.come_to("updated")
        return found

    def forward(self, inputs: Any) -> Any:
        self.come_to("evaluation")
        return super().forward(inputs)  # type: ignore[misc]

    def come_to_joining(self) -> None:
        strikes = json.loads(Path("strikes.json").read_text())
        number = next((n for n in range(len(strikes)) if not Path(f"struck-{n}").exists()), -1)
        if number >= 0 and strikes[number]["phase"] == "joining" and self.world.members.generation.number > 0:
            self.due, self.phase, self.step = number, "joining", -1
            self.come_to("joining")


def _meets(recovery: Any) -> Any:
    """The recovery of a strategy that reaches a phase after it has met the others again."""

    class Meets(recovery):
        def attach_group(self) -> None:
            super().attach_group()
            strategy = self.strategy
            strategy.look(strategy.step if strategy.due >= 0 or hasattr(strategy, "step") else 0)
            strategy.come_to("meeting")

    return Meets


def _is_saved(step: int) -> bool:
    return not step or Path(f"out/checkpoints/step-{step:06d}").exists()


_now: Striking | None = None


def _after(name: str, phase: str) -> None:
    """Reach a phase after some of the exchange has begun."""
    plain = getattr(exchange.Scatter if name == "submit" else exchange.Exchange, name)

    def told(self: Any, *arguments: Any, **named: Any) -> Any:
        found = plain(self, *arguments, **named)
        _come_to(phase)
        return found

    setattr(exchange.Scatter if name == "submit" else exchange.Exchange, name, told)


def _before_meeting() -> None:
    """Reach a phase when ranks of a generation form their group."""
    plain: Any = World._meet

    def told(self: World) -> None:
        _look_and_come_to("forming")
        plain(self)

    World._meet = told  # type: ignore[method-assign]


def _while_handing() -> None:
    """Reach a phase on a rank that sends the state, after a part of it has arrived."""
    plain: Any = World.send_round

    def told(self: World, tensor: Any, source: int) -> None:
        plain(self, tensor, source)
        _look_and_come_to("handing")

    World.send_round = told  # type: ignore[method-assign]


def _while_writing() -> None:
    """Reach a phase in the thread that writes a checkpoint: half of a file or all files are written, and the folder is
    not renamed yet."""
    plain = shard_files.write

    def halves(blocks: Any) -> Any:
        for number, block in enumerate(blocks):
            if number:
                yield memoryview(block)[: len(block) // 2]
                _come_to("writing")
                yield memoryview(block)[len(block) // 2 :]
            else:
                yield block

    def told(path: Path, blocks: Any) -> shard_files.Written:
        found = plain(path, halves(blocks))
        if path.name == manifest.FILE:
            _come_to("naming")
        return found

    shard_files.write = told


def _come_to(phase: str) -> None:
    if _now is not None:
        _now.come_to(phase)


def _look_and_come_to(phase: str) -> None:
    if _now is not None and "world" in vars(_now):  # emptied once another strategy is built for other ranks
        _now.look(getattr(_now, "step", 0))
        _now.come_to(phase)


_before_meeting()
_while_handing()
_while_writing()
_after("submit", "sent")
_after("_gather", "summed")


class StruckAllReduce(Striking, AllReduce):
    """`allreduce`."""

    recovery = _meets(AllReduce.recovery)


class StruckDDP(Striking, DDP):
    """`ddp`."""

    recovery = _meets(DDP.recovery)


class StruckAccelerate(Striking, HFAccelerate):
    """`hf_accelerate`."""

    recovery = _meets(HFAccelerate.recovery)


class StruckTrainer(Striking, HFTrainer):
    """`hf_trainer`."""

    recovery = _meets(HFTrainer.recovery)


class StruckFSDP2(Striking, FSDP2):
    """`fsdp2`."""


class StruckShardedOptimizer(Striking, ShardedOptimizer):
    """`fsdp2` with `gather: step`."""


class StruckPipeline(Striking, Pipeline):
    """`pipeline`."""


class StruckZero1(Striking, Zero1):
    """`zero1`."""


class StruckZero2(Striking, Zero2):
    """`zero2`."""


class StruckZero3(Striking, Zero3):
    """`zero3`."""


class StruckAcceleratedZero(Striking, AcceleratedZero):
    """`hf_accelerate` with DeepSpeed."""
