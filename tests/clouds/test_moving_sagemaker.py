"""`lockstep init --from` a script of SageMaker's: what its one estimator is given becomes keys of `launch`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config import plugins
from lockstep.config.run import load
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft
from lockstep_clouds.sagemaker_script import NEWER, TABLE, arguments, move
from support.documents import chapters
from support.messages import raises

SECTION = chapters("reference/coming-from/sagemaker.md")
ROLE = "arn:aws:iam::123456789012:role/training"
OLDER = f"""
from sagemaker.huggingface import HuggingFace as Estimator
hours = 3600
rates = {{"learning_rate": 2e-5, "epochs": 4, "text-column": "text", "seed": unknown()}}
job = Estimator(entry_point="train.py", role="{ROLE}", instance_type="ml.g5.12xlarge", instance_count=2,
    volume_size=200, pytorch_version="2.12.1", transformers_version="4.50", py_version="py312", hyperparameters=rates,
    max_run=24 * 60 * 60, use_spot_instances=True, max_wait=36 * 3600, output_path="s3://bucket/out",
    environment={{"HF_HOME": "/tmp/hf", "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"}},
    tags=[{{"Key": "team", "Value": "nlp"}}], subnets=["subnet-1"], security_group_ids=[group], disable_profiler=True,
    distribution={{"torch_distributed": {{"enabled": True}}}}, base_job_name="reviews", sagemaker_session=session)
job.fit({{"train": "s3://bucket/train", "test": TrainingInput(s3_data="s3://bucket/test"), "more": elsewhere}})
"""
NEWER_ONE = f"""
from sagemaker.modules.train import ModelTrainer
from sagemaker.modules.configs import Compute, InputData
compute = Compute(instance_type="ml.p4d.24xlarge", instance_count=4, volume_size_in_gb=500,
                  keep_alive_period_in_seconds=600)
trainer = ModelTrainer(training_image="111122223333.dkr.ecr.eu-west-1.amazonaws.com/own:1", compute=compute,
    role="{ROLE}", source_code=SourceCode(source_dir="src", entry_script="train.py"), distributed=Torchrun(),
    stopping_condition=StoppingCondition(max_runtime_in_seconds=5400), networking=Networking(subnets=["subnet-1"]),
    output_data_config=OutputDataConfig(s3_output_path="s3://bucket/out"))
trainer.train(input_data_config=[InputData(channel_name="train", data_source="s3://bucket/train")])
"""


def moved(text: str) -> RunDraft:
    found, given = RunDraft(), arguments(Script(Path("launch.py"), text))
    assert given is not None
    move(given, found, None)
    return found


def left(found: RunDraft) -> str:
    return "\n".join(f"{name} ({why})" for name, why in ((gap.name, gap.why) for gap in found.gaps))


def launch(found: RunDraft) -> dict[str, Any]:
    return {k.removeprefix("launch."): v for k, v in found.keys.items() if k.startswith("launch.")}


def test_arguments_of_an_estimator_become_keys_of_launch() -> None:
    found = moved(OLDER)
    assert launch(found) == {
        "name": "sagemaker",
        "role": ROLE,
        "instance": "ml.g5.12xlarge",
        "machines": 2,
        "volume_gb": 200,
        "pytorch": "2.12",
        "max_hours": 24.0,
        "wait_hours": 12.0,
        "spot": True,
        "s3": "s3://bucket/out",
        "environment": ["HF_HOME=/tmp/hf"],
        "inputs": ["train=s3://bucket/train", "test=s3://bucket/test"],
        "extra": {"Tags": [{"Key": "team", "Value": "nlp"}], "VpcConfig": {"Subnets": ["subnet-1"]}},
    }
    assert found.keys["name"] == "reviews"
    assert found.keys["strategy.name"] == "ddp"
    assert found.keys["optim.learning_rate"] == 2e-5
    assert found.keys["epochs"] == 4
    told = left(found)
    for part in (
        "environment: HF_TOKEN (a secret",
        "security_group_ids (its value is known only when the script runs; "
        "set launch.extra.VpcConfig.SecurityGroupIds)",
        "more=elsewhere (its value is known only when the script runs; set launch.inputs)",
        "sagemaker_session=session (its value is known only when the script runs",
        "hyperparameters: text-column: text (it is 'task.text' here",
        "hyperparameters: seed: unknown()",
        "entry_point: train.py",
        "transformers_version: 4.50",
    ):
        assert part in told
    assert "hf_abc" not in told
    assert "disable_profiler" not in told


def test_configs_of_sagemakers_model_trainer_are_read() -> None:
    found = moved(NEWER_ONE)
    assert launch(found) == {
        "name": "sagemaker",
        "role": ROLE,
        "image": "111122223333.dkr.ecr.eu-west-1.amazonaws.com/own:1",
        "instance": "ml.p4d.24xlarge",
        "machines": 4,
        "volume_gb": 500,
        "max_hours": 1.5,
        "s3": "s3://bucket/out",
        "inputs": ["train=s3://bucket/train"],
        "extra": {"ResourceConfig": {"KeepAlivePeriodInSeconds": 600}, "VpcConfig": {"Subnets": ["subnet-1"]}},
    }
    assert found.keys["strategy.name"] == "ddp"
    assert "entry_point: train.py" in left(found)


def test_older_containers_and_other_ways_of_working_together_are_listed() -> None:
    found = moved(
        "import sagemaker\n"
        "sagemaker.pytorch.PyTorch(framework_version='1.13.1', instance_type='local_gpu', instance_count=1,"
        " distribution={'smdistributed': {'modelparallel': {'enabled': True}}}, nonsense=1)"
    )
    assert launch(found) == {"name": "local"}
    for part in (
        "framework_version: 1.13.1 (launch.pytorch is one of 2.",
        "distribution: ",
        "nonsense: 1 (unknown argument)",
        "instance_count: 1 (applies only to jobs in the cloud)",
    ):
        assert part in left(found)


def test_other_scripts_have_no_estimator_and_several_estimators_are_refused() -> None:
    assert arguments(Script(Path("launch.py"), "from lightning import PyTorch\nPyTorch(role=1)")) is None
    assert arguments(Script(Path("launch.py"), "import sagemaker\nsagemaker.Session()")) is None
    with raises("LS7398", "2", "3"):
        arguments(Script(Path("launch.py"), "from sagemaker.pytorch import PyTorch\nPyTorch(role=1)\nPyTorch(role=2)"))


def row(name: str) -> str:
    """Return a row of the page's table."""
    of, names = TABLE[name], [name, *(path for path, older in NEWER.items() if older == name)]
    return (
        " | ".join(["| " + ", ".join(f"`{each}`" for each in names), *([f"`{of.here}`"] if of.here else []), of.how])
        + " |"
    )


def test_the_page_has_the_table_and_its_keys_are_keys() -> None:
    rows = [line for line in SECTION.splitlines() if re.match(r"\| `", line)]
    names = sorted(TABLE, key=lambda name: not TABLE[name].here)
    assert rows == [row(name) for name in names]
    assert set(NEWER.values()) <= TABLE.keys()
    options = plugins.find("launchers", "sagemaker").Options.model_fields  # type: ignore[attr-defined]
    ours = {row.here for row in TABLE.values() if row.here}
    assert {key.removeprefix("launch.") for key in ours if key.startswith("launch.")} <= options.keys()
    assert {key for key in ours if not key.startswith("launch.")} == {"name", "strategy.name"}


def test_documented_estimator_becomes_the_documented_run_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    theirs, ours = re.findall(r"```(?:python|yaml)\n(.*?)```", SECTION, re.S)
    Path("launch.py").write_text(f"from sagemaker.huggingface import HuggingFace\n{theirs}")
    Path("ours.yaml").write_text(ours)
    words = ["--from", "launch.py", "--task", "classification", "--model", "distilbert/distilbert-base-uncased"]
    given = [
        "data.source=stanfordnlp/imdb",
        "launch.processes=4",
        "micro_batches=8",
        "task.text=text",
        "task.label=label",
    ]
    assert main(["init", "moved.yaml", "--yes", *words, *given]) == 0
    found, wanted = load("moved.yaml", []), load("ours.yaml", [])
    for key in ("strategy", "optim", "epochs"):
        assert getattr(found, key) == getattr(wanted, key), key
    assert found.launch.model_dump() | {"processes": 0} == wanted.launch.model_dump() | {"processes": 0}
