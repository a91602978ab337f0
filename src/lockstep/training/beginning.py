"""The beginning of a rank: print the opening lines, try a step and the end, load the newest checkpoint.

In: a session, and the console. Out: the state to go on from, and how the run compares with a plain computation.
"""

from __future__ import annotations

from lockstep.distributed import job_record
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.event_log import facts as start_facts
from lockstep.distributed.event_log import launched_by
from lockstep.distributed.randomness import UNCOVERED, own_generators
from lockstep.strategies.engines import side_effects
from lockstep.track.console import Console
from lockstep.training import plain_causes, plain_check
from lockstep.training.dry_run import enough_room, try_a_step, try_the_end
from lockstep.training.model_stats import remarks
from lockstep.training.session import Session
from lockstep.training.summary import facts
from lockstep.training.train_state import TrainState


def resumed(session: Session, console: Console) -> tuple[TrainState, str]:
    """Say what is about to be done, try it, and take up the newest checkpoint. Returns the state to go on from, and how
    the run compares with a plain computation. Collective."""
    run, world, strategy = session.run, session.world, session.strategy
    opening = facts(run, world, session.task, strategy, session.feed)
    console.facts(opening | {"ranks": f"{world.whereabouts}; {launched_by(run)}"})
    if strategy.gives_bits(run) and (own := own_generators(session.task, strategy.model)):
        console.note(f"{UNCOVERED}: {', '.join(own)}")
    prepared = session.task.prepared
    for text in (*session.task.warnings, *remarks(run, prepared)):
        console.note(text)
    ACTIVITY.at("trying a step with the longest examples")
    try_a_step(session, lambda: try_the_end(session))
    if names := strategy.effects.per_process:  # several processes were refused
        console.note(side_effects.one_process(names))
    compared = plain_check.check(session, plain_causes.cause)
    console.facts({"compared": compared})
    ACTIVITY.at("looking for a checkpoint")
    if world.is_main:
        job_record.arrived(run.folder, world.size, session.feed.total)
    state = session.new_state()
    step, notes = session.checkpoints.resume(session.averaged, state)
    for text in notes:
        console.note(text)
    for text in enough_room(session, step):
        console.note(text)
    if step:
        console.say(f"resuming after step {step} of {session.feed.total}")
    ACTIVITY.at("starting")
    session.journal.event(
        "start",
        step,
        steps=session.feed.total,
        **start_facts(run, world, opening, strategy.phases.clock, strategy.waits_inside),
    )
    return state, compared
