"""No output stream can end a run: streams that lack a character, or are closed, full, or not read."""

import errno
import io
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.distributed import job_record
from lockstep.track import json_output
from lockstep.track.console import Console, error
from lockstep.training.predicting import _as_utf8
from lockstep_trace import streams
from support.command import LOCKSTEP, CommandJob, ended, start_anew
from support.harness import lean
from support.marks import long
from support.messages import mentions

TEXT = "caf\xe9 \u27f6 joy \u2026 \u2590\U0001f600\u2588"
ASCII = "caf\\xe9 -> joy ... \\u2590\\U0001f600@"


def test_characters_missing_in_an_encoding_are_replaced_or_escaped() -> None:
    assert TEXT.encode("ascii", streams.ERRORS).decode() == ASCII
    assert TEXT.encode("iso-8859-1", streams.ERRORS).decode("iso-8859-1") == ASCII.replace("\\xe9", "\xe9")
    assert TEXT.encode("cp037", streams.ERRORS).decode("cp037") == ASCII.replace("\\xe9", "\xe9")  # no ASCII below it
    assert "b\udcff \ud800 \u2839".encode("utf-8", streams.ERRORS) == b"b\xff \\ud800 \xe2\xa0\xb9"
    assert "\u2839".encode("ascii", streams.ERRORS) == b"*"  # a spinner


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-16"])
def test_a_console_on_a_stream_of_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    console = Console(True)
    console.say(TEXT)
    console.show(3, [{"text": "a", "predicted": TEXT}])
    console.last_samples()
    console.table("", ["a", "b"], [[TEXT, "1"]])
    error(TEXT)
    for stream in (sys.stdout, sys.stderr):
        said = stream.buffer.getvalue().decode(encoding)
        assert TEXT.encode(encoding, streams.ERRORS).decode(encoding) in said


@pytest.mark.parametrize("closed", [True, False])
def test_a_console_without_a_stream(closed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process without a terminal may have None as its stream."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO() if closed else None)
        if closed:
            getattr(sys, name).close()
    console = Console(True, tmp_path / "log.txt")
    console.say("said")
    error("failed", tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == "said\nlockstep: failed\n"


def safe(number: int) -> tuple[io.TextIOWrapper, streams._SafeFile]:
    file = streams._SafeFile(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8"), file


def test_closed_reader_is_remembered() -> None:
    read, write = os.pipe()
    os.close(read)
    stream, file = safe(write)
    try:
        for _ in range(3):
            print(TEXT, file=stream, flush=True)
        assert file.failure is not None
        assert file.failure.errno == errno.EPIPE
        assert os.fstat(write).st_rdev == os.stat(os.devnull).st_rdev  # also for what a library writes there
    finally:
        stream.detach()
        os.close(write)


def test_a_full_disk_is_no_error_and_later_lines_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    number = os.open("/dev/full", os.O_WRONLY)
    stream, file = safe(number)
    monkeypatch.setattr(sys, "stdout", stream)
    try:
        print("lost", flush=True)
        assert file.failure is not None
        assert file.failure.errno == errno.ENOSPC
        assert streams.unwritten() is file.failure
        assert not streams.reader_is_gone()
        read, write = os.pipe()
        os.dup2(write, number)  # there is room again
        print("kept", flush=True)
        assert os.read(read, 100) == b"kept\n"
        for each in (read, write):
            os.close(each)
    finally:
        monkeypatch.undo()
        stream.detach()
        os.close(number)


def test_non_blocking_pipe_receives_everything() -> None:
    """Node and ssh leave terminals and pipes non-blocking: Python then raises BlockingIOError, and drops its buffer."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    stream, file = safe(write)
    got: list[bytes] = []

    def read_all() -> None:
        while block := os.read(read, 1000):
            got.append(block)

    reader = threading.Thread(target=read_all)
    reader.start()
    for _ in range(20):
        print("x" * 99_999, file=stream, flush=True)
    stream.detach()
    os.close(write)
    reader.join()
    os.close(read)
    assert b"".join(got) == (b"x" * 99_999 + b"\n") * 20
    assert file.failure is None


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_stays_json(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    json_output.emit("list", 0, {"text": TEXT})
    out.flush()
    said: Any = out.buffer
    assert json.loads(said.getvalue())["facts"]["text"] == TEXT


def test_a_path_that_this_locale_cannot_name_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    monkeypatch.setattr("lockstep.cli._answer", lambda *_: "d\xe4ta/x.csv".encode("ascii"))
    assert main(["list"]) == 2
    assert mentions(capsys.readouterr().err, "LS0231", "d\xe4ta/x.csv", "LC_ALL=C.UTF-8")


def test_too_few_open_files_are_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("lockstep.cli._answer", answer)
    assert main(["list"]) == 2
    assert mentions(capsys.readouterr().err, "LS0232", "ulimit -n")


def test_too_few_threads_are_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("lockstep.cli._answer", answer)
    assert main(["list"]) == 2
    assert mentions(capsys.readouterr().err, "LS0233", "raise it")
    monkeypatch.setattr("lockstep.distributed.process_limits._address_space", lambda: 1_500_000)
    assert main(["list"]) == 2
    assert mentions(capsys.readouterr().err, "LS0233", "address space (ulimit -v: 1500000 kB) or of processes")


def test_too_little_memory_is_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr("lockstep.cli._answer", answer)
    assert main(["list"]) == 2
    assert mentions(capsys.readouterr().err, "LS0235", "out of memory")
    monkeypatch.setattr("lockstep.distributed.process_limits._address_space", lambda: 1_000_000)
    assert main(["plan"]) == 2
    assert mentions(capsys.readouterr().err, "LS0234", "1000000 kB of address space", "ulimit -v unlimited")


@pytest.mark.parametrize(
    ("number", "file", "values"),
    [
        (errno.EACCES, "out/log.txt", ["out/log.txt: permission denied", "permissions"]),
        (errno.EROFS, "out", ["out: read-only file system", "another folder"]),
        (errno.ENOTDIR, "a/b", ["a/b: not a directory", "it is a file"]),
        (errno.ENOSPC, None, ["no space left", "free space"]),
        (errno.EFBIG, None, ["file too large", "ulimit -f"]),
    ],
)
def test_a_file_that_cannot_be_used_is_a_message(
    number: int,
    file: str | None,
    values: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(*_: object) -> int:
        raise OSError(number, os.strerror(number), file)

    monkeypatch.setattr("lockstep.cli._answer", answer)
    assert main(["list"]) == 2
    assert mentions(capsys.readouterr().err, "LS0260", *values)


def test_arguments_of_a_locale_that_cannot_read_them() -> None:
    assert _as_utf8("caf\xe9".encode().decode("ascii", "surrogateescape")) == "caf\xe9"
    assert _as_utf8("caf\xe9") == "caf\xe9"
    assert _as_utf8(latin := b"caf\xe9".decode("ascii", "surrogateescape")) == latin  # is refused


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "why", "remedy"),
    [
        ("{} list > /dev/full", "No space left on device", "free space on the disk"),
        ("{} train --help > /dev/full", "No space left on device", "free space on the disk"),
        ("ulimit -f 0; {} --version > printed", "File too large", "ulimit -f"),
    ],
)
def test_a_result_that_cannot_be_printed_is_no_success(command: str, why: str, remedy: str, tmp_path: Path) -> None:
    command = command.format(shlex.join(LOCKSTEP))
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert mentions(done.stderr, "LS0230", why, remedy)


@pytest.mark.processes
def test_following_a_log_ends_with_its_reader(job: CommandJob) -> None:
    job.write()
    (job.folder / "out").mkdir()
    (job.folder / "run.yaml").rename(job.folder / "out/run.yaml")
    (job.folder / "out/log.txt").write_text("a line\n" * 100_000)
    job_record.write(job.folder / "out", job_record.here("local", 1))  # this process: it lives on
    command = f"{shlex.join(LOCKSTEP)} logs --follow out | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=job.folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "a line\n")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirected", "variables"),
    [
        long("", {"PYTHONIOENCODING": "iso-8859-1"}),
        long(">&- 2>&- <&-", {}),
        ("| true", {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}),
    ],
)
def test_a_run_succeeds_with_any_standard_streams(redirected: str, variables: dict[str, str], job: CommandJob) -> None:
    job.write(steps=4, evaluate={"every": 2}, checkpoint={"every": 4})
    command = f"{shlex.join(LOCKSTEP)} train run.yaml {redirected}; exit ${{PIPESTATUS[0]}}"
    process = start_anew(["bash", "-c", command], job.folder, job.cache, **lean(), **variables)
    status, out, err = ended(process)
    assert status == 0, err
    assert job_record.read(job.folder / "out").status == 0
    assert "\u27f6" in (job.folder / "out/log.txt").read_text(encoding="utf-8")
    assert redirected or (" -> " in out and not err)
