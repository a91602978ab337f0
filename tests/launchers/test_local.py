"""The server that ranks of this machine fork from."""

import os
from multiprocessing import forkserver, resource_tracker

import pytest

from lockstep.launchers import local
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
    monkeypatch.setenv(NAME, theirs or "")  # so that it is as before afterwards
    if theirs is None:
        monkeypatch.delenv(NAME)
    local.prestart(tiny(launch={"device": "auto"}))
    assert started == [seen]
    assert os.environ.get(NAME) == theirs  # what this process starts besides has none of it
