"""The fork server for this machine's ranks, and the start of a rank."""

import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytest

from lockstep.config.errors import BAD
from lockstep.config.run import RunError
from lockstep.launchers import local
from lockstep.training import rank
from support.harness import tiny

NAME = "GLIBC_TUNABLES"


@pytest.mark.parametrize(
    ("gpus", "theirs", "seen"),
    [(0, None, local.TUNABLES), (0, "glibc.malloc.perturb=1", "glibc.malloc.perturb=1"), (0, "", ""), (1, None, None)],
)
def test_ranks_on_a_cpu_keep_no_small_blocks(
    gpus: int, theirs: str | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str | None] = []
    monkeypatch.setattr(forkserver, "ensure_running", lambda: started.append(os.environ.get(NAME)))
    monkeypatch.setattr(resource_tracker, "ensure_running", lambda: None)
    monkeypatch.setattr(forkserver, "set_forkserver_preload", lambda names: None)
    monkeypatch.setattr(local, "gpus_of", lambda run: gpus)
    monkeypatch.setenv(NAME, theirs or "")  # so that the test restores it afterwards
    if theirs is None:
        monkeypatch.delenv(NAME)
    local.prestart(tiny(launch={"device": "auto"}).launch, 1, loopback=True)
    assert started == [seen]
    assert os.environ.get(NAME) == theirs  # other child processes do not get the variable


def test_rank_that_cannot_read_its_job_reports_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(text: str) -> Any:
        raise RunError("LS1130", "data: cannot be read")

    monkeypatch.setattr(rank.Job, "load", load)
    with pytest.raises(SystemExit) as caught:
        rank.main_of_job("{}")
    assert caught.value.code == BAD
    assert "data: cannot be read" in capsys.readouterr().err
