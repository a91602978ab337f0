"""Who leaves a job after `guard` has found ranks that do not come to the same bits, and what follows for each rank.

In: which ranks were wrong, by whose word, and what the run file chooses (`sdc_check.on_difference`). Out: a sentence,
and the ranks that leave; then, on every rank, the state before the step on disk and how this rank goes on.

It takes three to tell who is wrong: three machines where machines leave (torchrun with `launch.machines` as
fewest:most), three ranks on one machine (`launch.on_rank_failure: continue`). With two, the one that is wrong every
time would decide against the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lockstep.config.exit_status import EXCLUDED, FAILED, HALTED
from lockstep.config.guard import fewest
from lockstep.config.run import Run, RunError
from lockstep.distributed import evicted_hosts, job_record
from lockstep.distributed.event_log import launched_by

if TYPE_CHECKING:
    from lockstep.training.guard import Corrupted, Guard
    from lockstep.training.session import Session
    from lockstep.training.throughput import Meter


def leaving(run: Run, hosts: Sequence[str], wrong: Collection[int], told: Collection[int]) -> tuple[str, list[int]]:
    """What becomes of ranks that were `wrong` (none: it could not be decided), by computations of the ranks `told`: in
    words, and the ranks that leave. `hosts` are those of all ranks."""
    if run.sdc_check.on_difference != "evict":
        return "take that machine out", []
    least, kind = fewest(run.launch), "machines"
    places: Sequence[object] = hosts
    if least is None:
        least, kind, places = 1, "ranks", range(len(hosts))
    out = {places[rank] for rank in wrong}
    names = ", ".join(sorted(hosts[rank] if kind == "machines" else f"rank {rank}" for rank in wrong))
    if not out or len({places[rank] for rank in told}) < 3:
        return f"nobody is taken out: it takes computations by three {kind} to tell which of them is wrong", []
    if len(set(places)) - len(out) < least:
        return f"{names} is not taken out, because launch.machines wants at least {least}", []
    return (
        f"{names} is taken out, and the job goes on without it",
        [rank for rank in range(len(hosts)) if places[rank] in out],
    )


def check(run: Run, why: str | None) -> None:
    """Machines, or ranks, can be taken out of this job. `why`: why single ranks cannot be lost here. Errors:
    `RunError`, before the first step."""
    if run.sdc_check.on_difference != "evict" or not run.sdc_check.every:
        return
    how = launched_by(run)
    if fewest(run.launch) is None and why is not None:
        raise RunError(f"sdc_check.on_difference: evict cannot take a rank out here ({why}); take stop or retry")
    if how != f"launcher {run.launch.name}":
        raise RunError(
            f"sdc_check.on_difference: evict takes lockstep's own launcher, and this job was started by {how}; take "
            "stop or retry, or start it as `lockstep train`"
        )


def evict(session: Session, guard: Guard, meter: Meter, step: int, caught: Corrupted) -> int | None:
    """After a difference in the step that follows `step` updates: what this rank ends with; None where it goes on with
    those that are left, in the same process. Collective."""
    run, world, out = session.run, session.world, caught.leaves
    left = [rank for rank in range(world.size) if rank not in out]
    single = fewest(run.launch) is None
    names = sorted({f"rank {rank}" if single else world.hosts[rank] for rank in out})
    session.journal.event("guard", step, weights_agree=caught.sound, ranks=world.size, ranks_out=out, out=names)
    if out and single:
        if world.rank == left[0]:
            session.checkpoints.say(str(caught))
        return EXCLUDED if world.rank in out else None
    checkpoints = session.checkpoints
    if caught.sound and step and guard.agrees(step):
        checkpoints.settle()
        if checkpoints.newest != step:
            checkpoints.meter = meter.state()
            checkpoints.save(step, session.averaged)
            checkpoints.settle()
    if world.is_main or (world.rank in out and world.local_rank == 0):
        for host in names:
            evicted_hosts.note(run.folder, host, step + 1)
    if not out:
        return HALTED if job_record.restarts_left() else FAILED
    return EXCLUDED if world.rank in out else FAILED
