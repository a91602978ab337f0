"""Jobs for SageMaker, and the requests to AWS."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config.run import Run, load
from lockstep_clouds.sagemaker import Sagemaker
from support.harness import TINY

LAUNCH = {
    "name": "sagemaker",
    "processes": 1,
    "machines": 2,
    "device": "cpu",
    "threads": 1,
    "region": "eu-west-1",
    "instance": "ml.m5.xlarge",
    "role": "arn:aws:iam::123456789012:role/lockstep",
    "s3": "s3://lockstep-tests/runs",
    "wait": False,
}


RUN = TINY | {"name": "tiny", "output": "out", "launch": LAUNCH}


def needs(module: str) -> Any:
    """Import a module of the extras sagemaker and cloud-tests, or skip the test."""
    return pytest.importorskip(module, reason="needs the extras sagemaker and cloud-tests")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


@pytest.fixture
def cloud(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """AWS simulated by moto: a bucket, and credentials that are always accepted."""
    boto3, moto = needs("boto3"), needs("moto")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("SAGEMAKER_VALIDATE_ROLE", "false")
    monkeypatch.setattr(Sagemaker, "every_s", 0.0)
    with moto.mock_aws():
        session = boto3.session.Session(region_name="eu-west-1")
        session.client("s3").create_bucket(
            Bucket="lockstep-tests", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
        yield session


def run_of(**launch: Any) -> Run:
    return load(None, [], RUN | {"launch": LAUNCH | launch})


def request(run: Run) -> dict[str, Any]:
    files = Sagemaker().plan(run).files
    return json.loads(files["out/launch/create_training_job.json"])
