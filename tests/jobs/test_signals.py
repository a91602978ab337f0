"""After a stop signal at any moment between the first step and the exit, the exit status agrees with the files on
disk."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from lockstep.distributed.signals import AGAIN_S, Interrupts, Stopped
from lockstep.distributed.world import World
from support.command import (
    LOCKSTEP,
    STEPS,
    CommandJob,
    bits,
    each_step_once,
    ended,
    finish,
    free_port,
    lines,
    saved,
    start,
    start_anew,
    step_of,
    write,
)
from support.harness import tiny
from support.marks import slow
from support.messages import mentions
from support.signalling_strategies import Terminal, state_of, variables

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="a pseudo-terminal, /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
]
KEPT = "files saved before are intact"
SIGNALLED = "strategy.name=support.signalling_strategies.Signalled"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Return an undisturbed job that logs metrics every 15 steps."""
    folder = tmp_path_factory.mktemp("calm")
    write(folder, track={"every": 15})
    finish(folder, cache, "launch.processes=1")
    return folder


@pytest.mark.processes
def test_ctrl_c_in_a_terminal_keeps_what_was_trained(tmp_path: Path, cache: Path, calm: Path) -> None:
    write(tmp_path, track={"every": 15}, checkpoint={"every": 1000})
    terminal = Terminal(tmp_path, cache, "launch.processes=2")
    terminal.read(until=lambda: step_of(tmp_path) >= 15)
    terminal.press(b"\x03")
    terminal.read()
    assert terminal.status() == 75, terminal.text
    assert "Traceback" not in terminal.text
    assert (stopped := saved(tmp_path)) >= 15
    assert f"stopped on request after step {stopped} of {STEPS}; the same command continues from there" in terminal.text
    assert state_of(tmp_path, cache)["state"] == "stopped"
    assert f"resuming after step {stopped}" in finish(tmp_path, cache, "launch.processes=1")
    each_step_once(tmp_path, calm)  # no line for the step that it was stopped after
    assert bits(tmp_path) == bits(calm)


@pytest.mark.processes
@pytest.mark.long  # on a busy machine the key was seen to come to nothing, twice in five runs
def test_ctrl_c_while_a_rank_waits_for_the_others(tmp_path: Path, cache: Path) -> None:
    """The rank waits in native code, where no Python signal handler runs."""
    write(tmp_path)
    port = free_port()
    meet = ("launch.name=tcp", f"launch.init_method=tcp://127.0.0.1:{port}", "launch.rank=0", "launch.world_size=2")
    terminal = Terminal(tmp_path, cache, *meet)
    terminal.read(until=lambda: is_open(port))
    terminal.press(b"\x03")
    terminal.read()
    assert terminal.status() == 130, terminal.text
    assert mentions(terminal.text, "LS7110")
    assert "Traceback" not in terminal.text
    assert json.loads((tmp_path / "out/launch.json").read_text())["status"] == 130


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.processes
def test_a_closed_terminal_saves_and_nohup_continues(job: CommandJob) -> None:
    job.write(steps=20, checkpoint={"every": 1000})
    hung_up = variables("step 3", signal.SIGHUP, "group")
    status, out, err = ended(job.start(SIGNALLED, **hung_up))
    assert status == 75, (out, err)
    assert 4 <= job.saved() < 20
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which is all that nohup does
    try:
        hung_up["MOMENT"] = f"step {job.saved() + 2}"
        process = job.start(SIGNALLED, **hung_up)
    finally:
        signal.signal(signal.SIGHUP, before)
    status, out, err = ended(process)
    assert status == 0, (out, err)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("moment", "number", "target", "processes", "expected"),
    [
        ("evaluation", signal.SIGTERM, "launcher", 2, 75),
        slow("evaluation", signal.SIGINT, "group", 1, 75),
        slow("evaluation", signal.SIGHUP, "group", 3, 75),
        ("export", signal.SIGTERM, "launcher", 2, 0),
        slow("export", signal.SIGINT, "group", 4, 0),
        slow("closing", signal.SIGINT, "group", 2, 0),
        slow("closing", signal.SIGTERM, "group", 1, 0),
        slow("delivered", signal.SIGTERM, "group", 2, 0),
        slow("delivered", signal.SIGTERM, "launcher", 1, 0),
        slow("delivered", signal.SIGUSR1, "launcher", 3, 0),
    ],
)
def test_a_signal_after_the_last_step(
    moment: str, number: signal.Signals, target: str, processes: int, expected: int, tmp_path: Path, cache: Path
) -> None:
    write(tmp_path, steps=4, launch={"device": "cpu", "threads": 1, "timeout_s": 1000})
    command = [*LOCKSTEP, "train", "run.yaml", SIGNALLED, f"launch.processes={processes}"]
    status, out, err = ended(start(command, tmp_path, cache, **variables(moment, number, target)))  # within 200 s
    assert status == expected, (out, err)
    assert "Traceback" not in out + err
    found = state_of(tmp_path, cache)
    assert found["finished"] is (expected == 0)
    assert (found["state"], found["status"]) == (("done", 0) if expected == 0 else ("stopped", 75))
    if expected:
        assert found["resumable_from"] == 4
        finish(tmp_path, cache, "launch.processes=1")
        assert state_of(tmp_path, cache)["finished"] is True


@pytest.mark.processes
@pytest.mark.parametrize("processes", [slow(1), 2])
def test_an_interrupted_evaluation_is_left_to_the_next_start(
    processes: int, tmp_path: Path, cache: Path, calm: Path
) -> None:
    write(tmp_path, track={"every": 15}, checkpoint={"every": 1000, "best": "-loss"}, export="last")
    variable = variables("step 20 evaluated", signal.SIGTERM)
    command = [*LOCKSTEP, "train", "run.yaml", SIGNALLED, f"launch.processes={processes}"]
    status, out, err = ended(start([*command, "evaluate.batch_size=4"], tmp_path, cache, **variable))
    assert status == 75, (out, err)
    assert f"stopped on request after step 20 of {STEPS}; the same command continues from there" in out
    # no score of a half evaluation, no line for the last step
    assert [line["step"] for line in lines(tmp_path)] == [1, 15]
    assert "20  validation" in (said := finish(tmp_path, cache, "launch.processes=1")), said
    each_step_once(tmp_path, calm)
    assert bits(tmp_path)["export"] == bits(calm)["export"]
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("out/checkpoints/step-*/manifest.json")]
    assert not any("owed" in manifest["meter"] for manifest in manifests)


@pytest.mark.processes
@pytest.mark.parametrize("processes", [slow(1), 2])
def test_a_stop_without_a_checkpoint_does_not_exit_with_75(processes: int, tmp_path: Path, cache: Path) -> None:
    write(tmp_path, steps=20, checkpoint={"every": 1000})
    command = [*LOCKSTEP, "train", "run.yaml", SIGNALLED, f"launch.processes={processes}"]
    status, out, err = ended(start(command, tmp_path, cache, SPOIL="1", **variables("step 3", signal.SIGTERM)))
    assert status == 1, (out, err)
    assert "of 20; no checkpoint could be written" in out
    assert state_of(tmp_path, cache)["state"] == "failed"


@pytest.mark.processes
def test_a_stop_before_the_first_step_does_not_exit_with_75(tmp_path: Path, cache: Path) -> None:
    write(tmp_path)
    process = start_anew([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache)
    while not (tmp_path / "out" / "launch.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    status, out, err = ended(process)
    assert saved(tmp_path) or status in (1, -signal.SIGTERM), (out, err)
    assert status != 1 or mentions(err, "LS7317")
    assert status != -signal.SIGTERM or "ended by SIGTERM while nothing was being trained" in err


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGHUP)])
def test_a_signal_before_any_handler_ends_with_a_message(number: signal.Signals, tmp_path: Path, cache: Path) -> None:
    """The run file is a pipe, so the command blocks there until the signal arrives."""
    write(tmp_path).unlink()
    os.mkfifo(tmp_path / "run.yaml")
    process = start_anew([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache)
    with open(tmp_path / "run.yaml", "w"):  # waits for the other end
        process.send_signal(number)
        status, out, err = ended(process)
    assert status == -number, (out, err)
    assert err == f"lockstep: ended by {number.name} while nothing was being trained; {KEPT}\n"


def test_a_ctrl_c_received_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("lockstep.distributed.signals.time.monotonic", lambda: clock[0])
    interrupts = Interrupts()
    assert not interrupts.again(signal.SIGTERM)
    assert not interrupts.again(signal.SIGINT)
    clock[0] += AGAIN_S / 2
    assert not interrupts.again(signal.SIGINT)
    clock[0] += AGAIN_S / 2
    assert not interrupts.again(signal.SIGTERM)
    assert interrupts.again(signal.SIGINT)


def test_phases_without_state_stop_at_once() -> None:
    world = World(tiny())
    before = signal.signal(signal.SIGUSR1, world.stop.on_signal)
    try:
        with pytest.raises(Stopped), world.stop.interrupts():
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)  # elsewhere it is noted
        with pytest.raises(Stopped), world.stop.interrupts():
            raise AssertionError("asked before: not even begun")
    finally:
        signal.signal(signal.SIGUSR1, before)
