"""lockstep-trace alone: its own command, in processes that cannot import lockstep or its other requirements."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep_trace
from support.places import TESTS

SCRIPT = TESTS / "support" / "pages" / "train.py"
BLOCKED = (
    "lockstep",
    "transformers",
    "datasets",
    "pydantic",
    "yaml",
    "rich",
    "huggingface_hub",
    "safetensors",
    "pyarrow",
)
BLOCK = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, in which every Python process lacks the packages of `BLOCKED`."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCK)
    shutil.copy(SCRIPT, tmp_path / "train.py")
    source = Path(lockstep_trace.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(source)]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep_trace", *words], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.processes
def test_lockstep_trace_works_without_lockstep(place: Path) -> None:
    assert subprocess.run([sys.executable, "-c", "import lockstep"], capture_output=True, check=False).returncode == 1
    for name, batch in (("one", "32"), ("same", "32"), ("other", "16")):
        done = command("record", "-o", name, "--steps", "4", "--", sys.executable, "train.py", "--batch", batch)
        assert done.returncode == 0, done.stderr
        assert f"4 steps of AdamW on 1 process, in {name}" in done.stderr
        assert done.stdout.startswith("loss ")
    done = command("diff", "--exact", "one", "same")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the same bits in all 4 common steps" in done.stdout
    done = command("diff", "one", "other")
    assert done.returncode == 1
    assert "other examples: 32 in the reference, 16 here" in done.stdout
    assert done.stdout.startswith("tolerance: "), "without examples in common, a table would be empty"
    done = command("report", "one", "other")
    assert (done.returncode, done.stdout) == (0, "other/report.html\n")
    page = (place / "other" / "report.html").read_text()
    assert "other examples: 32 in the reference" in page
    assert "<script" not in page


@pytest.mark.processes
@pytest.mark.long
def test_verify_and_watch(place: Path) -> None:
    words = f"{sys.executable} train.py --batch 32"
    done = command("verify", "--reference", words, "--job", words, "--steps", "2", "-o", "verified")
    assert done.returncode == 0, done.stderr
    assert "the same bits in all 2 common steps" in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith("loss")], "the commands' own output"
    for name in ("reference", "job", "perturbed"):
        assert (place / "verified" / f"{name}.log").read_text().startswith("loss ")
    assert (place / "verified" / "job" / "report.html").is_file()
    done = command("watch", "verified/job")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "2 optimizer steps on 1 process"
    assert done.stdout.splitlines()[-1] == "the command ended with status 0"


@pytest.mark.processes
def test_verify_prints_the_end_of_a_failed_commands_output_without_secrets(place: Path) -> None:
    text = "import os; print('export HF_TOKEN=swordfish-1234'); os.write(1, b'no data'); raise SystemExit(3)"
    (place / "fails.py").write_text(f"for i in range(30): print('line', i)\n{text}\n")
    failing = f"{sys.executable} -u fails.py"
    done = command("verify", "--reference", failing, "--job", failing, "-o", "verified")
    assert done.returncode == 3
    rows = done.stdout.splitlines()
    assert rows[-3:-1] == ["  export HF_TOKEN=***", "  no data"]
    assert rows[-1].startswith("reference:")
    assert rows[1] == "  line 17", "the last 15 lines"
    assert "swordfish" not in (place / "verified" / "reference.log").read_text()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["record", "-o", "x"], "LS9037"),
        (["record", "-o", "x", "--every", "0", "--", "true"], "LS9034"),
        (["record", "-o", "x", "--", "no-such-program"], "LS9030"),
        (["verify", "--reference", "", "--job", "true"], "LS9036"),
        (["verify", "--reference", "'", "--job", "true"], "LS9035"),
        (["report", "x"], "LS9020"),
        (["report", "x", "y", "z"], "LS9038"),
        (["watch", "x"], "LS9039"),
        (["diff", "x", "y"], "LS9020"),
    ],
)
def test_bad_usage_is_one_message(place: Path, words: list[str], code: str) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("lockstep-trace: ")
    assert f"[{code}]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_help_that_cannot_be_printed_is_no_success() -> None:
    for words in ([], ["diff"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "lockstep_trace", *words, "--help"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        assert "[LS9130]" in done.stderr


@pytest.mark.processes
def test_a_command_whose_trace_holds_no_step_ends_the_watch_with_its_status(tmp_path: Path) -> None:
    from lockstep_trace.commands import main
    from lockstep_trace.terminal import run

    assert run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "none") == 3
    assert main(["watch", str(tmp_path / "none")]) == 3


@pytest.mark.processes
def test_secrets_of_a_command_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep_trace.read import about
    from lockstep_trace.terminal import run

    monkeypatch.setenv("SOME_API_KEY", "opensesame-1234")
    words = [sys.executable, "-c", "pass", "--token", "swordfish one", "--api-key=hunter2hunter2", "x opensesame-1234"]
    assert run(words, tmp_path / "a") == 0
    assert about(tmp_path / "a")["command"][3:] == ["--token", "***", "--api-key=***", "x ***"]
    text = "".join(file.read_text() for file in (tmp_path / "a").rglob("*.json*"))
    assert not [secret for secret in ("swordfish", "hunter2", "opensesame") if secret in text]
