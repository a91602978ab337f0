"""Runs that push to a Hub on the loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.distributed.world import World
from lockstep.training.resolve import for_rank
from lockstep.training.train_job import train_job
from support.harness import TINY, lockstep_environment, run_on
from support.hub_server import WRITER, Hub

Command = Callable[..., tuple[int, str, str]]


RUN = TINY | {
    "name": "feelings",
    "output": "out",
    "steps": 2,
    "verify": {"plain": False},  # as in `command.RUN`
    "launch": {"device": "cpu", "threads": 1, "processes": 1},
}


RUN |= {"hub": {"license": "apache-2.0", "language": "en", "tags": ["feelings"]}}


PUSH = ["push", "out", "user/feelings"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


def at_loopback(address: str, token: str | None) -> None:
    """Redirect huggingface_hub in a process that has imported it. Not undone."""
    constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = address, False, True
    os.environ |= {"HF_HUB_OFFLINE": "0", "HF_TOKEN": token or ""}
    time.sleep = lambda seconds: None  # type: ignore[assignment]  # nobody waits before trying again


def train_in(world: World, folder: str, values: dict, address: str | None = None) -> int:
    os.chdir(folder)
    if address is not None:
        at_loopback(address, WRITER)
    return train_job(for_rank(load(None, [], values), world), world)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in `out`."""
    folder = tmp_path_factory.mktemp("trained")
    assert run_on(1, train_in, str(folder), RUN, joined=False) == [0]
    return folder


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of it for pushes of one test."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def lockstep(hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process against the loopback, without waits between attempts."""
    for name in ("ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET"):
        monkeypatch.setattr(constants, name, getattr(constants, name))  # restored afterwards
    monkeypatch.setattr(time, "sleep", time.sleep)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "")

    def run(folder: Path, *words: str, token: str | None = WRITER) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        at_loopback(hub.address, token)
        capfd.readouterr()
        return main(list(words)), *capfd.readouterr()

    return run


def process(folder: Path, cache: Path, hub: Hub, *command: str) -> subprocess.CompletedProcess[str]:
    """A process that finds the loopback in its environment."""
    environment = lockstep_environment(cache) | hub.environment(folder / "hf") | {"GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
