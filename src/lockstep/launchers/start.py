"""Starts a run: resolves it into a job, then starts its ranks or becomes one of them.

In: a run. Out: an exit status. A finished run whose `epochs` or `steps` were raised becomes a new run that continues
from its export, in a new folder (`continued_as_new_run`). Imports no torch at the top.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep._version import __version__
from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.manifest import Goal, Manifest, newest_first
from lockstep.config import plugins
from lockstep.config.errors import EXCLUDED, coded
from lockstep.config.lazy import lazy
from lockstep.config.run import Run, RunError, load, write_run_yaml
from lockstep.config.sections import LaunchSection
from lockstep.config.written import naming_defaults
from lockstep.data.job import Job, Scope, arithmetic_of, default, optimizer_class, task_class
from lockstep.distributed import job_record
from lockstep.distributed.job_record import INTRODUCED, JOB_WORDS, PLANNED_SIZE, RESOLVED, STATUS, TORCHRUN_ENV, TRAIN
from lockstep.distributed.signals import listen_no_more
from lockstep.launchers import output_lock
from lockstep.track import history
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console, error
from lockstep.training.resolve import Machine, fitted, resolve, resolve_launch
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.launchers.launcher import Launcher, LaunchPlan
    from lockstep.launchers.processes import srun
else:
    (srun,) = lazy("lockstep.launchers.processes", "srun")


def train(run: Run) -> int:
    """Run `lockstep train`, resuming from the newest checkpoint if there is one; under torchrun etc., as one rank.

    Returns the exit status. Steps of a launching process: plan, lock OUTPUT, resolve, return early if finished, write
    run.yaml, start ranks.
    """
    if (task := task_of_srun(run.launch)) is not None and run.launch.options.get("ranks") == "elastic":
        return agent(run, task)
    if joining():
        return run_as_rank(run)
    console = Console(True, voice=run.track.console)
    # before slow imports
    console.facts({"lockstep": f"{__version__}, {run.name} -> {run.folder}"})
    run = continued_as_new_run(run, console.note)  # also if quiet: another folder gets the output
    job_record.refuse_evicted(run.folder)
    ACTIVITY.set("importing torch")
    with ExitStack() as stack:
        with console.busy(lambda: ACTIVITY.name):
            launcher, plan = planned(run)
            leads = launcher.leads(plan)  # else another process of the job leads
            lock = stack.enter_context(output_lock.owned(run.folder, console.note)) if leads else None
            if lock is not None:
                only_one(launcher, plan)
            plan, steps = ready(launcher, plan, console)
        if lock is None:
            with introduced():
                return launcher.start(plan)
        if plan.job is not None and steps is not None:
            return lock.verdict(report_finished(plan.job, steps))
        write_run_yaml(plan.run)
        if launcher.submits:
            lock.release()  # the job's ranks lock it from here on
            return lock.verdict(launcher.start(plan))
        return lock.verdict(run_ranks(launcher, plan))


@contextmanager
def introduced() -> Iterator[None]:
    """Context manager in which ranks do not repeat the header that this process printed in the same terminal."""
    os.environ[INTRODUCED] = "1"
    try:
        yield
    finally:
        os.environ.pop(INTRODUCED, None)


def ready(launcher: Launcher, plan: LaunchPlan, console: Console) -> tuple[LaunchPlan, int | None]:
    """Resolve the job, and return (plan with the job, number of steps if the run is finished already, else None).

    Errors: `RunError` for every problem detectable before a process starts."""
    run, machine = plan.run, machine_of(launcher, plan)
    if checked_by_ranks_only(launcher):
        resolve_launch(run, machine, plan.processes, Scope.START)
        return plan, None
    ACTIVITY.set("importing torch and transformers")

    def tell(label: str, text: str) -> None:
        (console.facts if "again because" in text else console.detail)({label: text})

    job = resolve(run, machine, plan.processes, Scope.START, tell)
    plan, manifest = plan.resolved(job), job.newest
    for note in job.notes:
        console.note(note)
    goal = Goal.of(run)
    if manifest is not None and goal.met_by(manifest) and not launcher.joins:
        if not history.history_complete(run.folder):  # the previous start was killed after its export
            from lockstep.training.finish import finish_interrupted

            if not (run.folder / "run.yaml").is_file():  # the folder was moved during training
                write_run_yaml(run)
            finish_interrupted(job, manifest.step)
        return plan, manifest.step
    if manifest is not None and goal.ended_at(manifest) and (run.folder / "export").exists():
        if (other := goal.other_export()) is not None:
            console.note(
                f"{run.folder}/export was written with export: {other}; it is written again with export: {goal.export}"
            )
        else:
            fault = export_hashes.damage(run.folder)
            console.note(f"{run.folder}/export: {fault}; it is written again from step {manifest.step}")
    return plan, None


def report_finished(job: Job, steps: int) -> int:
    """Report that a run is finished already, publish its export if configured, and return the exit status."""
    from lockstep.training.publish import publish

    run = job.run
    console = Console(True, voice=run.track.console)
    console.say(
        f"{run.folder} is finished ({quantity(steps, 'step')}), so nothing was trained; the model is in "
        f"{run.folder}/export. To train again, give another output=FOLDER"
    )
    status = publish(job, console.say)
    record = job_record.read(run.folder)
    if record is None:  # damaged or deleted
        job_record.write(run.folder, job_record.here(run.launch.name, job.processes))
    if record is None or record.status != status:  # the previous start may have ended before this
        job_record.note(run.folder, steps=steps, status=status, ended=time.time())
    return status


def run_ranks(launcher: Launcher, plan: LaunchPlan) -> int:
    """Start the ranks, wait for their end, record it in OUTPUT/launch.json, and return the exit status."""
    folder, voice = plan.folder, plan.run.track.console
    before = job_record.read(folder)
    if before is not None and (why := job_record.recorded_loss(before)) is not None:
        Console(True, voice=voice).note(f"the previous start left no exit status: {why}")
    job_record.write(folder, mine := job_record.here(plan.launch.name, plan.processes))
    try:
        with introduced():
            status = launcher.start(plan)
    except KeyboardInterrupt:
        job_record.note(folder, status=130, ended=time.time())
        raise
    listen_no_more()
    record = job_record.read(folder)
    if status == EXCLUDED and record is not None and record.status is not None:
        return status  # the remaining ranks recorded the status
    if record is not None and (record.began, record.status) == (mine.began, 0):
        status = 0  # rank 0 completed the run; the other ranks' statuses do not matter
    if not job_record.note(folder, status=status, ended=time.time()):
        error(
            coded(
                "LS7410",
                f"{folder / job_record.FILE} could not be written, so `lockstep status` will not show that the "
                "run ended",
            )
        )
    return status


def agent(run: Run, task: srun.SlurmTask) -> int:
    """Run as the elastic agent of this node, which starts its ranks. Returns the exit status."""
    from lockstep.launchers.slurm import agent_of

    if task.rank:
        return agent_of(run, task)
    with output_lock.owned(run.folder, Console(True).note) as lock:
        return lock.verdict(agent_of(run, task))


def task_of_srun(launch: LaunchSection) -> srun.SlurmTask | None:
    """Return the srun task of a job of the slurm launcher that this process runs in, or None.

    Any srun task gets torchrun's environment variables to become a rank, unless torch elastic starts the ranks of its
    node."""
    task = srun.task_of(os.environ) if "SLURM_STEP_ID" in os.environ else None
    if task is None or "RANK" in os.environ:
        return None
    ours = os.environ.get(job_record.VARIABLE) == "slurm"
    if ours and launch.options.get("ranks") == "elastic":
        return task
    if ours or (task.size > 1 and launcher_of(launch).takes_srun):
        os.environ.update(task.variables())
        if not ours:  # manual srun
            os.environ.update(
                {job_record.VARIABLE: "slurm", job_record.JOB: task.job, job_record.FACT: f"step={task.step}"}
            )
    return task if ours else None


def run_as_rank(run: Run) -> int:
    """Run as one rank of a job that another program started, and return the exit status.

    Errors: `RunError` if the world size differs from the one that lockstep's launcher requested."""
    with plugins.importing():
        from lockstep.training import rank as worker
    from lockstep.launchers.processes import accelerate_config

    accelerate_config.check_variables(run, os.environ)
    came, planned_size = os.environ["WORLD_SIZE"], os.environ.get(PLANNED_SIZE)
    if planned_size is not None and planned_size != came:
        leave_status(2)
        raise RunError("LS7411", f"launch: expected {planned_size} processes, but {came} joined; nothing was trained")
    words = tuple(os.environ.get(JOB_WORDS, "").split()) or TRAIN
    sent = os.environ.get(RESOLVED)
    with ExitStack() as stack:
        lock, refusal = None, None
        if os.environ["RANK"] == "0" and words == TRAIN and not output_lock.held_by_launcher(run.folder):
            try:
                lock = stack.enter_context(output_lock.owned(run.folder, Console(True).note))
                if job_record.VARIABLE not in os.environ:
                    job_record.write(run.folder, job_record.here("", int(os.environ["WORLD_SIZE"])))
            except RunError as caught:
                refusal = str(caught)  # raised once all ranks have joined: otherwise they would wait for this one
        job = run if sent is None else Job.load(Path(sent).read_text(encoding="utf-8"))
        status = worker.main(job, words=words, refusal=refusal)
        listen_no_more()
        if lock is not None:
            status = lock.verdict(status)
    leave_status(status)
    return status


def leave_status(status: int) -> None:
    """Write the exit status for lockstep's launcher, if it started the program that started this rank."""
    if (path := os.environ.get(STATUS)) and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).write_text(str(status), encoding="utf-8")


def only_one(launcher: Launcher, plan: LaunchPlan) -> None:
    """Check that no other job trains into OUTPUT. Errors: `RunError`."""
    record = job_record.read(plan.folder)
    if record is None or (record.job is None and record.process == job_record.Process.this()):
        return
    try:
        known = launcher if record.launcher == plan.launch.name else launcher_named(record.launcher)
    except RunError:  # the launcher is no longer installed
        return
    state = known.state(plan.folder, record)
    if state.live:
        raise RunError(
            "LS7412",
            f"output: {plan.folder} is already in use by a training run "
            f"({state.word}{f': {state.text}' if state.text else ''}). `lockstep stop {plan.folder}` ends that "
            "run; or give another output=FOLDER",
        )


def joining() -> bool:
    """Return whether this process was started as a rank, by torchrun's environment variables."""
    if "RANK" not in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:  # accelerate with a single process
        if "MASTER_ADDR" in os.environ:
            raise RunError(
                "LS7413",
                "accelerate launch was given several processes but started this one as a single process (it "
                "does so with --cpu). On CPUs use ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu "
                "--num_processes N ..., or lockstep train with launch.name=accelerate",
            )
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return False
    _check_rank_variables()
    return True


def _check_rank_variables() -> None:
    """Check torchrun's variables, which another job may have left in a terminal. Errors: `RunError`."""
    leave = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE to start a job from this terminal"
    values = {name: os.environ[name] for name in TORCHRUN_ENV if name in os.environ}
    for name, value in values.items():
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise RunError("LS7570", f"{name}={value} in the environment is not a number >= 0; correct it, or {leave}")
    rank, size = int(values["RANK"]), int(values["WORLD_SIZE"])
    if rank >= size:
        raise RunError(
            "LS7571", f"RANK={rank} in the environment must be less than WORLD_SIZE={size}; correct it, or {leave}"
        )
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 and not values.get(name)]
    if lacking:
        raise RunError(
            "LS7572",
            f"RANK={rank} and WORLD_SIZE={size} in the environment make this process a rank of a job, but "
            f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not set; use torchrun, or {leave}",
        )


def launcher_of(launch: LaunchSection) -> Launcher:
    """Return the launcher of a run. Errors: `RunError`."""
    return plugins.of_key("launch.name", "launchers", launch.name)()


def launcher_named(name: str) -> Launcher:
    """Return the launcher named in OUTPUT/launch.json; an empty name (started by hand) means `local`. Errors:
    `RunError`."""
    return plugins.of_key("launcher", "launchers", name or "local")()


def plan_of(run: Run, launcher: Launcher) -> LaunchPlan:
    """Return the launcher's plan of a run. Errors: `RunError`, which marks values that are defaults."""
    with naming_defaults(run):
        return launcher.plan(run)


def planned(run: Run) -> tuple[Launcher, LaunchPlan]:
    """Return the launcher and its plan. Starts the fork server in the background if ranks need it, unless the run is
    finished."""
    launcher = launcher_of(run.launch)
    plan = plan_of(run, launcher)
    record = job_record.read(run.folder)
    done = record is not None and record.status == 0
    if plan.processes > 1 and launcher.forks_ranks and not done:
        from lockstep.launchers.local import prestart, processes_of

        prestart(run.launch, processes_of(run), launcher.meets_on_loopback(run.launch))
    return launcher, plan


def machine_of(launcher: Launcher, plan: LaunchPlan) -> Machine:
    """Return what is known here about the machines of a plan's ranks."""
    return Machine(not launcher.submits, launcher=launcher, plan=plan)


def checked_by_ranks_only(launcher: Launcher) -> bool:
    """Return whether data and model are checked only by the ranks: a machine that only submits may have no torch."""
    return launcher.submits and not (launcher.shares_files and importlib.util.find_spec("torch") is not None)


def resolved(run: Run) -> tuple[Launcher, Job]:
    """Return the launcher and the job, for commands that start ranks without writing to OUTPUT. Prepares the data.
    Errors: `RunError`."""
    launcher, plan = planned(run)
    return launcher, resolve(run, machine_of(launcher, plan), plan.processes)


def start_ranks(launcher: Launcher, job: Job, words: Sequence[str]) -> int:
    """Write the job's run.yaml, start its ranks with `words`, and return their exit status."""
    write_run_yaml(job.run)
    return launcher.start(launcher.plan(job.run).resolved(job), words)


def refuse_options(run: Run) -> None:
    """Check everything that needs neither the data nor a process. Errors: `RunError`."""
    launcher = launcher_of(run.launch)
    plan = plan_of(run, launcher)
    resolve(run, machine_of(launcher, plan), plan.processes, Scope.OPTIONS)


def preview(launcher: Launcher, plan: LaunchPlan) -> Job | str:
    """Return the job for `lockstep plan`, after all checks that `train` makes before it starts a process, or the reason
    why it cannot be resolved here. Writes to the cache, not to OUTPUT. Errors: `RunError`."""
    run, machine = plan.run, machine_of(launcher, plan)
    if checked_by_ranks_only(launcher):
        resolve_launch(run, machine, plan.processes, Scope.OUTPUT)
        return "data and model are checked where the job runs"
    from lockstep.data.hub import unreached

    try:
        return resolve(run, machine, plan.processes, Scope.OUTPUT)
    except RunError as error:
        if unreached(error):  # not an error in the run file
            return str(error)
        raise


def continued_as_new_run(run: Run, say: Callable[[str], object]) -> Run:
    """Return the run to train: for a finished run whose `epochs` or `steps` were raised, a new run from its export.

    The finished run's schedule is at its end, so continuing could not equal one longer run. `say` prints an
    explanation."""
    if run.model.source is None and run.model.type is None:  # a user's module, which cannot start from an export
        return run
    manifest = next((newest for _, newest in newest_first(run.folder)), None)
    run = run if manifest is None else fitted(run)
    added = None if manifest is None else _added(run, manifest)
    if (
        manifest is None
        or added is None
        or not Goal.of(run).ended_at(manifest)
        or export_hashes.damage(run.folder) is not None
    ):
        return run
    key, more = added
    whole = run.epochs if key == "epochs" else run.steps
    output = f"{run.output}-{whole:g}-{key}"
    values: dict[str, Any] = run.model_dump(mode="json")
    left = ("source", "revision", "type", "config")  # contained in the export
    model_keys = {name: value for name, value in values["model"].items() if name not in left}
    values |= {"name": f"{run.name}-{whole:g}-{key}", "output": output, key: more}
    if run.remote_dir is not None:
        values["remote_dir"] = f"{run.remote_dir}-{whole:g}-{key}"
    values |= {"model": model_keys | {"source": str(run.folder)}, "tokenizer": {}}
    say(
        f"{run.folder} is finished (step {manifest.step}) and stays as it is. {more:g} more {key} start from its "
        f"export, in {output}: a new run with a new optimizer and a new schedule, so its weights differ from those of "
        f"{whole:g} {key} in one run"
    )
    gone = (*(f"model.{name}" for name in left), "tokenizer")
    written = {each for each in run.written_keys if not each.startswith(gone)} | {"model.source", key}
    return load(None, [], values, str(run.folder / "run.yaml")).as_written(written)


def _added(run: Run, manifest: Manifest) -> tuple[str, float] | None:
    """Return (`epochs` or `steps`, its increase) if that is the only difference, else None."""
    now, then = arithmetic_of(run), manifest.arithmetic
    classes = task_class(run.task.name), optimizer_class(run.optim.name)
    differing = [key for key in now if now[key] != (then[key] if key in then else default(run, key, *classes))]
    if differing not in (["epochs"], ["steps"]):
        return None
    (key,) = differing
    before, after = then.get(key), now[key]
    return (key, after - before) if before is not None and after is not None and after > before else None
