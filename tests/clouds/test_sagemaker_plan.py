"""SageMaker: further fields of the interface, and what `plan` refuses. AWS's own model of the interface is asked where
botocore is installed."""

import importlib.util
import re
import tomllib
from typing import Any

import pytest
import yaml

from lockstep.config.run import RunError, load
from lockstep_clouds import aws
from lockstep_clouds.sagemaker import Sagemaker
from support.messages import raises
from support.places import ROOT
from support.sagemaker import LAUNCH, RUN, here, request, run_of

__all__ = ["here"]  # a fixture
pytestmark = pytest.mark.usefixtures("here")
ECR = "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training"
EXTRA: dict[str, Any] = {
    "VpcConfig": {"SecurityGroupIds": ["sg-0123456789abcdef0"], "Subnets": ["subnet-0123456789abcdef0"]},
    "Tags": [{"Key": "project", "Value": "names"}],
    "OutputDataConfig": {"KmsKeyId": "alias/training"},
    "ResourceConfig": {"VolumeKmsKeyId": "alias/training"},
    "EnableNetworkIsolation": False,
    "AlgorithmSpecification": {"MetricDefinitions": [{"Name": "validation:loss", "Regex": "loss ([0-9.]+)"}]},
}


def test_further_fields_pass_through() -> None:
    plain, found = request(run_of()), request(run_of(extra=EXTRA))
    assert found["VpcConfig"] == EXTRA["VpcConfig"]
    assert found["Tags"] == EXTRA["Tags"]
    for section in ("OutputDataConfig", "ResourceConfig", "AlgorithmSpecification"):
        assert found[section] == plain[section] | EXTRA[section]
    assert found.keys() - plain.keys() == {"VpcConfig", "Tags", "EnableNetworkIsolation"}


@pytest.mark.parametrize(
    ("extra", "values"),
    [
        ({"RoleArn": "x"}, ["launch.extra.RoleArn: ", "launch.role"]),
        ({"ResourceConfig": {"InstanceCount": 9}}, ["launch.extra.ResourceConfig.InstanceCount: ", "launch.machines"]),
        ({"ResourceConfig": 9}, ["launch.extra.ResourceConfig: "]),
        ({"Environment": {"A": "b"}}, ["launch.extra.Environment: ", "launch.environment"]),
        ({"HyperParameters": {"seed": "1"}}, ["launch.extra.HyperParameters: "]),
        ({"InputDataConfig": []}, ["launch.extra.InputDataConfig: ", "launch.inputs"]),
    ],
)
def test_fields_that_lockstep_sets(extra: dict[str, Any], values: list[str]) -> None:
    with raises("LS7274", *values):
        request(run_of(extra=extra))


@pytest.mark.extras
@pytest.mark.skipif(importlib.util.find_spec("botocore") is None, reason="needs the extra sagemaker")
@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ({"extra": {"VpcConfg": {}}}, 'Unknown parameter in input: "VpcConfg"'),
        ({"extra": {"Tags": "a"}}, "Invalid type for parameter Tags"),
        ({"instance": "ml.g5.xlarg"}, "did you mean ml.g5.xlarge"),
    ],
)
def test_plan_refuses_requests_that_aws_would_reject(launch: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError, match=said):
        request(run_of(**launch))


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ({"instance": "ml.trn1.2xlarge"}, ("LS7214", "ml.trn1.2xlarge")),
        ({"instance": "ml.p2.xlarge"}, ("LS7214", "K80")),
        ({"instance": "ml.p3.2xlarge"}, ("LS7214", "V100")),
        ({"instance": "ml.p6e-gb200.36xlarge"}, ("LS7214", "Arm")),
        ({"image": f"{ECR}:2.1.0-cpu-py310-ubuntu20.04-sagemaker"}, ("LS7213", "2.1", "2.11")),
        ({"image": f"{ECR}:2.11.0-gpu-py310-cu128-ubuntu22.04"}, ("LS7213", "3.10", "3.11")),
    ],
)
def test_unsupported_instances_and_containers_are_refused(launch: dict[str, Any], said: tuple[str, ...]) -> None:
    with raises(*said):
        request(run_of(**launch))


@pytest.mark.parametrize(
    "launch",
    [
        {"instance": "ml.p3.2xlarge", "image": "me/lockstep:cu126"},
        {"image": f"{ECR}:2.11.0-gpu-py312-cu128-ubuntu22.04-sagemaker"},
        {"image": "registry:5000/lockstep"},
        {"instance": "ml.g4dn.xlarge"},
    ],
)
def test_instances_that_are_accepted(launch: dict[str, Any]) -> None:
    request(run_of(**launch))


def test_the_oldest_versions_equal_those_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(line for line in package["dependencies"] if re.match(r"torch\b", line))
    wanted = {"PyTorch": torch, "Python": package["requires-python"]}
    for what, said in wanted.items():
        assert said.split(",")[0].endswith(">=" + ".".join(map(str, aws.OLDEST[what])))


@pytest.mark.parametrize(
    ("instance", "gpus"),
    [
        ("ml.m5.xlarge", 0),
        ("ml.g4dn.xlarge", 1),
        ("ml.g5.16xlarge", 1),
        ("ml.g5.12xlarge", 4),
        ("ml.g6e.48xlarge", 8),
        ("ml.p3.8xlarge", 4),
        ("ml.p4d.24xlarge", 8),
        ("ml.p5.48xlarge", 8),
        ("ml.g9.xlarge", None),
    ],
)
def test_the_gpus_of_an_instance(instance: str, gpus: int | None) -> None:
    assert aws.gpus_of(instance) == gpus


@pytest.mark.parametrize(
    ("launch", "each"),
    [
        ({"instance": "ml.m5.xlarge"}, 1),
        ({"instance": "ml.g5.12xlarge"}, 4),
        ({"instance": "ml.g5.xlarge", "processes_per_gpu": 2}, 2),
        ({"instance": "ml.g5.12xlarge", "device": "cpu"}, 1),
    ],
)
def test_instance_type_determines_the_number_of_processes(launch: dict[str, Any], each: int) -> None:
    run = run_of(**{"device": "auto", "processes": "auto", "machines": 2} | launch)
    plan = Sagemaker().plan(run)
    assert plan.processes == 2 * each
    inner = yaml.safe_load(next(text for name, text in plan.files.items() if name.endswith("run.yaml")))
    assert inner["launch"]["processes"] == each


def test_sharded_strategies_on_several_instances_are_noted() -> None:
    for strategy, machines, noted in [("zero3", 2, True), ("zero3", 1, False), ("ddp", 2, False)]:
        launch = LAUNCH | {"instance": "ml.m5.xlarge", "processes": 1, "machines": machines}
        run = load(None, [], RUN | {"launch": launch, "strategy": strategy})
        notes = Sagemaker().plan(run).notes
        assert any(note.startswith(f"{strategy} cannot resume") for note in notes) == noted
