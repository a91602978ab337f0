"""Terminal output: a progress bar on a terminal, plain lines elsewhere, notes alone if quiet. A terminal emulator
renders the screens."""

import io
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from lockstep.cli import main
from lockstep.config.model_selection import Best
from lockstep.track.console import Console
from support.command import LOCKSTEP, CommandJob, write
from support.consoles import TRAIN, console, screen
from support.harness import lockstep_environment

SYSTEM = {"cpu_percent/rank0": 99.0, "cpu_percent/rank1": 98.0, "memory_gb/rank0": 0.61, "memory_gb/rank1": 1.25}


def training(told: Console, place: str = "step 3") -> None:
    """Run a few steps of a job, reported as `train_job.py` does."""
    told.facts({"run": "tiny -> out"})
    told.start(400, 100, lambda: place)
    told.log(101, "train", TRAIN)
    told.log(101, "system", SYSTEM)
    told.advance(200)
    told.log(200, "train", TRAIN)
    told.log(200, "validation", {"loss": 0.5, "accuracy": 0.75, "examples": 1000})
    told.note("the disk is full")
    if told._bar is not None:
        told._bar.refresh()


def story(told: Console) -> None:
    training(told)
    told.stop()
    told.say("stopped on request")
    told.table("results", ["", "test"], [["accuracy", "0.9"]])


def test_progress_bar_has_step_loss_speed_and_time() -> None:
    told, out = console(terminal=True)
    training(told)
    lines = screen(out.getvalue())
    (bar,) = [i for i, line in enumerate(lines) if "━" in line and "200/400" in line]
    assert re.fullmatch(r"training [━╸╺]+ +200/400 +50% \S+ left", lines[bar])
    assert lines[bar + 1] == "loss 0.4321  rate 3.00e-05  1,520 examples/s  33,461 tokens/s  1.25 GB"
    assert lines.index("note: the disk is full") < bar, "what is said stands above the bar"
    assert "step    200  validation: loss 0.5, accuracy 0.75; best yet" in lines
    told.stop()
    assert not any("━" in line for line in screen(out.getvalue())), "what it came to is told below"


@pytest.mark.parametrize(("width", "shown"), [(200, "loss, a, b, f1"), (62, "loss, a, f1"), (50, "loss")])
def test_evaluation_is_one_terminal_line_and_complete_in_the_log(tmp_path: Path, width: int, shown: str) -> None:
    told, out = console(terminal=True, width=width)
    told._log = tmp_path / "log.txt"
    told.start(9, 0, best=Best("f1"))
    numbers = {"loss": 0.25, "a": 0.125, "b": 0.5, "f1": 0.75}
    told.log(3, "validation", numbers | {"examples": 1000})
    told.stop()
    (line,) = [line for line in screen(out.getvalue()) if line]
    assert len(line) <= width
    listed = ", ".join(f"{name} {numbers[name]}" for name in shown.split(", "))
    assert line == f"step      3  validation: {listed}; best yet"
    whole = "step      3  validation: loss 0.25, a 0.125, b 0.5, f1 0.75; best yet\n"
    assert (tmp_path / "log.txt").read_text() == whole


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_bar_fits_a_narrow_terminal(width: int) -> None:
    told, out = console(terminal=True, width=width)
    training(told)
    lines = [line for line in screen(out.getvalue()) if line.strip()]
    bars = lines[next(i for i, line in enumerate(lines) if "200/400" in line) :]
    assert all(len(line) <= width for line in bars), bars
    numbers = "  ".join(line.strip() for line in bars[1:])
    assert numbers == "loss 0.4321  rate 3.00e-05  1,520 examples/s  33,461 tokens/s  1.25 GB", "nothing is cut off"


@pytest.mark.parametrize("width", range(58, 74))
def test_the_last_line_leaves_room_for_the_echo_of_ctrl_c(width: int) -> None:
    """Otherwise the echo starts a new line, and erasing the bar begins one line too low: its first line stays."""
    told, out = console(terminal=True, width=width)
    training(told)
    assert all(len(line) + len("^C") <= width for line in screen(out.getvalue()) if "/s" in line or "GB" in line)


def test_progress_bar_shows_the_activity() -> None:
    told, out = console(terminal=True)
    told.start(400, 0, lambda: "evaluation, batch 12")
    assert re.match(r"evaluation +0/400 ", screen(out.getvalue())[0])
    told.stop()


@pytest.mark.parametrize("dumb", [False, True])
def test_without_a_terminal_lines_are_plain(dumb: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    told, out = console(terminal=dumb)
    story(told)
    text = out.getvalue()
    assert "\r" not in text
    assert "━━━╸" not in text
    assert text.splitlines()[:2] == [
        "run        tiny -> out",
        "step    101/400  loss 0.4321  rate 3.00e-05  1,520 examples/s  33,461 tokens/s",
    ]
    assert "step    200/400" not in text, "not more than a line in five seconds"


def test_plain_lines_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("lockstep.track.console.time.monotonic", lambda: now[0])
    told, out = console(terminal=False)
    told.start(100_000, 0)
    for step in range(1, 86_401):  # one step per second, for a day
        now[0] += 1
        told.log(step, "train", TRAIN)
    found = [int(line.split()[1].partition("/")[0]) for line in out.getvalue().splitlines()]
    assert found[:3] == [1, 61, 121]
    assert found[-1] - found[-2] == 60


@pytest.mark.parametrize(("seconds", "lines"), [(4, [1]), (30, [1, 142, 283, 424]), (80, [1, 142, 283, 424])])
def test_a_run_of_a_minute_takes_a_few_plain_lines(
    seconds: float, lines: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines follow the first step, then every quarter of the steps; at least five seconds pass between two."""
    now = [1000.0]
    monkeypatch.setattr("lockstep.track.console.time.monotonic", lambda: now[0])
    told, out = console(terminal=False)
    told.start(564, 0)
    for step in range(1, 565):
        now[0] += seconds / 564
        told.log(step, "train", TRAIN)
    found = [int(line.split()[1].partition("/")[0]) for line in out.getvalue().splitlines()]
    assert len(found) == len(lines)
    assert all(abs(step - wanted) <= 5 for step, wanted in zip(found, lines, strict=True)), found


@pytest.mark.parametrize(("step", "rate"), [(1, "rate 0 (warm-up)  "), (10, "rate 0.00e+00  ")])
def test_zero_rate_at_the_first_step_is_printed_as_warmup(step: int, rate: str) -> None:
    told, out = console(terminal=False)
    told.start(10, 0)
    told.log(step, "train", TRAIN | {"learning_rate": 0.0})
    assert rate in out.getvalue()


def test_closing_details_are_in_the_log_only(tmp_path: Path) -> None:
    told, out = console(terminal=False)
    told._log = tmp_path / "log.txt"
    told.log(9, "test", {"loss": 0.5}, closing=True)
    told.detail({"export": "the same losses"})
    assert out.getvalue() == ""
    assert (tmp_path / "log.txt").read_text() == "step      9  test: loss 0.5\nexport     the same losses\n"


def test_quiet_prints_notes_only() -> None:
    told, out = console(terminal=True, voice="quiet")
    story(told)
    assert out.getvalue().splitlines() == ["note: the disk is full"]


def test_verbose_prints_every_point_in_full() -> None:
    told, out = console(terminal=False, voice="verbose")
    story(told)
    text = out.getvalue()
    assert "step    200  train: loss 0.4321, learning_rate 3e-05, grad_norm 1.5" in text
    assert "step    101  system: cpu_percent/rank0 99, cpu_percent/rank1 98, memory_gb/rank0 0.61" in text


def test_other_ranks_are_silent() -> None:
    told, out = console(terminal=True, loud=False)
    story(told)
    assert out.getvalue() == ""


@pytest.mark.processes
def test_output_to_a_closed_pipe_is_still_logged(tmp_path: Path) -> None:
    """After a window was closed, or under `| head`, later output is in the log."""
    say = (
        "from pathlib import Path; from lockstep.track.console import Console\n"
        "console = Console(True, Path('log.txt'))\n"
        "for i in range(5000): console.say(f'line {i}')"
    )
    command = f'{sys.executable} -c "{say}" | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "line 0\n", "")
    assert (tmp_path / "log.txt").read_text().endswith("line 4999\n")


def test_the_log_is_complete_under_quiet(tmp_path: Path) -> None:
    told = Console(True, tmp_path / "log.txt", "quiet")
    told.rich = RichConsole(file=io.StringIO())
    story(told)
    text = (tmp_path / "log.txt").read_text()
    assert all(words in text for words in ("tiny -> out", "validation: loss 0.5", "note: the disk", "accuracy", "200"))


# -- the command -----------------------------------------------------------------------------------------------------

SHORT = {"steps": 8, "evaluate": {"every": 4}, "launch": {"device": "cpu", "threads": 1, "processes": 2}}


@pytest.mark.processes
def test_quiet_and_verbose_runs_of_two_processes(tmp_path: Path, job: CommandJob) -> None:
    job.write(**SHORT)
    status, out, err = job.train("--quiet")
    assert (status, out, err) == (0, "", "")
    assert "accuracy" in (tmp_path / "out" / "log.txt").read_text()
    job.write(**SHORT)
    out = job.finish("--verbose", "output=again")
    assert len(re.findall(r"^step +\d+  train: ", out, re.MULTILINE)) == 8, "one voice for both ranks"
    assert len(re.findall(r"^step +\d+  system: .*memory_gb/rank1", out, re.MULTILINE)) == 8


def test_quiet_and_verbose_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--quiet", "--verbose"])
    assert caught.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="a pseudo-terminal")
@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_a_real_terminal(variables: dict[str, str], tmp_path: Path, cache: Path) -> None:
    write(tmp_path, **SHORT | {"launch": SHORT["launch"] | {"processes": 1}})  # type: ignore[operator]
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in lockstep_environment(cache).items() if k != "NO_COLOR"}
    process = subprocess.Popen(
        [*LOCKSTEP, "train", "run.yaml"],
        cwd=tmp_path,
        env=environment | {"TERM": "xterm-256color", "COLUMNS": "100"} | variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
    )
    os.close(theirs)
    data = b""
    while select.select([ours], [], [], 200)[0]:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        data += piece
    os.close(ours)
    assert process.wait(60) == 0, data.decode()
    text = data.decode().replace("\r\n", "\n")
    assert ("\x1b[38" in text or "\x1b[3" in text) is (not variables), "colours, but for NO_COLOR"
    assert "8/8" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"


@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_colons_and_backslashes_are_printed_as_they_are(terminal: bool) -> None:
    """`run.yaml:100:` is no emoji, `[bold]` no style, and no backslash is lost or doubled."""
    line = "run.yaml:100: [bold] \\[1 [/x] C:\\"
    told, out = console(terminal=terminal)
    told.facts({"model": line})
    told.say(line)
    told.note(line)
    told.columns(line, [(line, line)])
    told.table(line, [line, "b"], [[line, line]])
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert text.count(line) == 10
