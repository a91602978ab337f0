"""Eviction: which ranks leave a job after the check for silent data corruption has caught a difference.

In: which ranks were wrong, by whose word, and what the run file chooses (`sdc_check.on_difference`). Out: a sentence,
and the ranks that leave; then, on every rank, the state before the step on disk and how this rank goes on.

It takes three to tell who is wrong: three machines where machines leave (torchrun with `launch.machines` as
fewest:most), three ranks on one machine (`launch.on_rank_failure: continue`). With two, the one that is wrong every
time would decide against the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from lockstep.config.errors import EXCLUDED, FAILED, HALTED
from lockstep.config.run import Run, RunError
from lockstep.config.sections import fewest
from lockstep.distributed import evicted_hosts, job_record
from lockstep.distributed.event_log import launched_by
from lockstep.training.errors import CorruptionDetected, Regroup, TrainingFailed
from lockstep.training.session import Session
from lockstep.training.train_state import TrainState


def decide_eviction(
    run: Run, hosts: Sequence[str], wrong: Collection[int], voters: Collection[int]
) -> tuple[str, list[int]]:
    """Decide which ranks to evict. `wrong`: ranks that were outvoted (empty if undecided); `voters`: ranks that
    computed; `hosts`: those of all ranks. Returns a message and the ranks to evict."""
    if run.sdc_check.on_difference != "evict":
        return "take that machine out", []
    least, kind = fewest(run.launch), "machines"
    places: Sequence[object] = hosts
    if least is None:
        least, kind, places = 1, "ranks", range(len(hosts))
    out = {places[rank] for rank in wrong}
    names = ", ".join(sorted(hosts[rank] if kind == "machines" else f"rank {rank}" for rank in wrong))
    if not out or len({places[rank] for rank in voters}) < 3:
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
            "stop "
            "or retry, or start it as `lockstep train`"
        )


def evict(
    session: Session, state: TrainState, caught: CorruptionDetected, agrees: Callable[[int], bool]
) -> TrainingFailed | Regroup:
    """Carry out what follows a difference in the step after `state`. `agrees`: whether all ranks hold the same state.
    Returns the error that this rank raises: `Regroup` where it goes on in the same process. Collective."""
    run, world, out, step = session.run, session.world, caught.leaves, state.step
    left = [rank for rank in range(world.size) if rank not in out]
    single = fewest(run.launch) is None
    names = sorted({f"rank {rank}" if single else world.hosts[rank] for rank in out})
    session.journal.event("guard", step, weights_agree=caught.sound, ranks=world.size, ranks_out=out, out=names)
    if out and single:
        if world.rank == left[0]:
            session.checkpoints.say(str(caught))
        return TrainingFailed(str(caught), EXCLUDED, True) if world.rank in out else Regroup()
    checkpoints = session.checkpoints
    if caught.sound and step and agrees(step):
        checkpoints.settle()
        if checkpoints.newest != step:
            checkpoints.save(step, session.averaged, state=state.state_dict())
            checkpoints.settle()
    if world.is_main or (world.rank in out and world.local_rank == 0):
        for host in names:
            evicted_hosts.note(run.folder, host, step + 1)
    status = EXCLUDED if world.rank in out else FAILED
    if not out and job_record.restarts_left():
        status = HALTED
    return TrainingFailed(str(caught), status, bool(out))
