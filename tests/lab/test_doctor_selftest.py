"""`lockstep doctor --selftest` reports which strategies keep their promise, break it or cannot run; its page has no
secrets."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.lab import doctor, machine_info
from support.command import ended, start
from support.messages import mentions
from support.places import TESTS_PATH

# `lockstep`, in one precision and without looks at torch's devices and the network
QUICK = """
import sys
from lockstep.cli import main
from lockstep.lab import doctor, machine_info
doctor.PRECISIONS = ("fp32",)
machine_info._TORCH = "print('{}')"
machine_info._PORTABLE = "print('a hash')"
machine_info.network = lambda: {"host_resolves": "127.0.0.1"}
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.processes
def test_the_selftest_reports_each_kind_of_result(tmp_path: Path, cache: Path) -> None:
    """The self-test and its jobs are forked, because importing would take longer than all else."""
    own = (f"support.misbehaving.{name}" for name in ("Refuses", "Lacks", "Breaks"))
    names = ["allreduce", "support.buggy.OneNotReduced", *own]
    words = ["--processes", "2", "--page", "page.html", "--json", "--device", "cpu", "--strategies", *names]
    command = [sys.executable, "-c", QUICK, "doctor", "--selftest", *words]
    path = os.pathsep.join([TESTS_PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = start(command, tmp_path, cache, PYTHONPATH=path, WANDB_API_KEY="very_secret")
    status, out, err = ended(process, 280)
    assert status == 1, err
    outcomes = {
        each["strategy"]: (each["result"], " ".join(each["why"])) for each in json.loads(out)["tables"]["outcomes"]
    }
    assert outcomes["allreduce"] == ("same bits", "")
    mistake, why = outcomes["support.buggy.OneNotReduced"]
    assert mistake == "NOT as promised"
    assert "transformer.h.1.mlp.c_fc.weight" in why
    assert "may not be reduced over all ranks" in why
    assert outcomes["support.misbehaving.Refuses"] == ("refused", "strategy.name: not on this machine")
    assert outcomes["support.misbehaving.Lacks"] == ("not installed", "pip install 'lockstep-train[no_such_engine]'")
    broken, why = outcomes["support.misbehaving.Breaks"]
    assert broken == "failed"
    assert "the link is <down>" in why
    text = (tmp_path / "page.html").read_text()
    assert "the link is &lt;down&gt;" in text
    assert "very_secret" not in text
    assert f">{socket.gethostname()}<" not in text
    assert ">2 did not do as promised" in text.replace("<b>", ">")


@pytest.mark.processes
def test_a_hanging_job_of_the_selftest_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job, limit = doctor._job, 0.5
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setattr(doctor, "PRECISIONS", ("fp32",))
    monkeypatch.setattr(machine_info, "_TORCH", "print('{}')")
    monkeypatch.setattr(machine_info, "_PORTABLE", "print('a hash')")
    monkeypatch.setattr(machine_info, "network", lambda: {"host_resolves": "127.0.0.1"})
    monkeypatch.setattr(
        doctor, "_job", lambda kind, run, folder: ("", []) if kind == "alone" else job(kind, run, folder)
    )
    monkeypatch.setattr(doctor, "LIMIT_S", limit)
    words = ["--page", str(tmp_path / "page.html"), "--device", "cpu", "--strategies", "allreduce"]
    assert main(["doctor", "--selftest", *words]) == 1
    assert "took too long" in capfd.readouterr().out
    assert "hf_very_secret" not in (tmp_path / "page.html").read_text()


def test_gpus_that_are_fewer_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert doctor.run_of("ddp", "bf16", 5, "auto").launch.processes_per_gpu == 3
    assert doctor.run_of("ddp", "bf16", 5, "auto").micro_batches == 8
    assert doctor.run_of("single", "fp32", 5, "auto").launch.processes == 1
    assert doctor.run_of("ddp", "fp32", 2, "cpu").launch.processes_per_gpu == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--selftest", "--page", "/no/such/folder/page.html"],
            "--page: no such folder: /no/such/folder",
        ),
        (["--selftest", "--processes", "0"], "--processes: invalid value 0"),
        (["--selftest", "--strategies", "dpd"], "known are allreduce, ddp"),
        (["--page", "page.html"], "--page: has an effect only with --selftest"),
    ],
)
def test_invalid_selftest_options_are_refused(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capfd.readouterr().err


def test_under_a_launcher(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", "--selftest"]) == 2
    assert mentions(capfd.readouterr().err, "LS8084")
