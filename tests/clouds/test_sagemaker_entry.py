"""SageMaker's containers, piece by piece: the hosts' names, the run that comes back, secrets, the entry's own code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.run import load
from lockstep_clouds.sagemaker_entry import Hosts, overrides, set_secrets
from support.sagemaker import RUN, cloud, here, request, run_of

__all__ = ["cloud", "here"]  # fixtures


def test_hosts_in_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"algo-{i}" for i in (10, 2, 1)]
    (tmp_path / "resourceconfig.json").write_text(
        json.dumps({"hosts": names, "current_host": "algo-2", "network_interface_name": "eth0"})
    )
    found = Hosts.read(tmp_path, {})
    assert found.names == ("algo-1", "algo-2", "algo-10")
    assert (found.mine, found.interface) == ("algo-2", "eth0")


def test_hosts_from_the_sagemaker_toolkit(tmp_path: Path) -> None:
    told = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1", "SM_NETWORK_INTERFACE_NAME": "eth1"}
    assert Hosts.read(tmp_path, told) == Hosts(("algo-1", "algo-2"), "algo-1", "eth1")


def test_hyperparameters_come_back_as_the_run_they_came_from(here: Path) -> None:
    run = run_of()
    (here / "hyperparameters.json").write_text(
        json.dumps(request(run)["HyperParameters"] | {"sagemaker_region": '"eu-west-1"', "optim.learning_rate": "0.25"})
    )
    words = overrides(here / "hyperparameters.json")
    found = load(None, words, RUN | {"optim": {}, "seed": 7})
    assert found.optim.learning_rate == 0.25  # a tuning job's value
    assert found.optim.max_grad_norm == run.optim.max_grad_norm
    assert found.seed == run.seed
    assert overrides(here / "nothing.json") == []


@pytest.mark.extras
def test_secrets_are_read_by_name(cloud: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.client("secretsmanager").create_secret(Name="lockstep/hf", SecretString="very secret")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")  # boto3 does not read it by itself
    monkeypatch.setenv("LOCKSTEP_SECRETS", json.dumps({"LOCKSTEP_TEST_TOKEN": "lockstep/hf"}))
    monkeypatch.setenv("LOCKSTEP_TEST_TOKEN", "")  # so that it is gone afterwards
    set_secrets()
    assert os.environ["LOCKSTEP_TEST_TOKEN"] == "very secret"


@pytest.mark.processes
def test_container_output_is_forwarded_and_its_tail_kept() -> None:
    code = (
        "import os, sys; from lockstep_clouds.sagemaker_entry import Tail; t = Tail(10); "
        "os.system('echo child went wrong >&2'); text = t.text(); print(repr(text)); print('after', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == repr("ent wrong\n")
    assert done.stderr == "child went wrong\nafter\n"


@pytest.mark.processes
def test_the_entry_needs_nothing_that_is_not_installed_yet() -> None:
    lacking = "import sys; sys.modules |= dict.fromkeys(('pydantic', 'yaml', 'torch', 'rich')); "
    code = f"{lacking}import lockstep_clouds.sagemaker_entry"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
