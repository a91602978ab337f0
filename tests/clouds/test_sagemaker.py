"""SageMaker: what is asked of AWS, against its own model of the interface (botocore) and a stand-in (moto); no network.
What happens in the containers is in test_sagemaker_hosts.py."""

import io
import json
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.commands import while_it_runs as logs_command
from lockstep.config.run import load
from lockstep.distributed import job_record
from lockstep.launchers import start
from lockstep_clouds import aws
from lockstep_clouds.sagemaker import Sagemaker
from lockstep_clouds.sagemaker_job import STOPPED, fetch, new_lines, state_from
from lockstep_clouds.sagemaker_request import check_request, name_of
from support.golden import compare
from support.messages import mentions, raises
from support.sagemaker import LAUNCH, RUN, cloud, here, needs, request, run_of

__all__ = ["cloud", "here"]  # fixtures

pytestmark = pytest.mark.extras


def interface() -> Any:
    """AWS's own model of `create_training_job`, and a client that has it."""
    client = needs("boto3").client(
        "sagemaker", region_name="eu-west-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    return client, client.meta.service_model.operation_model("CreateTrainingJob").input_shape


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "launch"),
    [
        ("sagemaker-cpu", {}),
        (
            "sagemaker-spot",
            {
                "spot": True,
                "instance": "ml.g5.12xlarge",
                "device": "auto",
                "processes": 4,
                "region": "cn-north-1",
                "max_hours": 2.5,
                "secrets": ["HF_TOKEN=lockstep/hf"],
                "environment": ["NCCL_DEBUG=WARN"],
                "inputs": ["corpus=s3://data/corpus"],
            },
        ),
    ],
)
def test_the_request_is_as_written_down_and_as_aws_wants_it(name: str, launch: dict[str, Any], here: Path) -> None:
    found = request(run_of(**launch))
    compare(f"{name}.json", json.dumps(found, indent=1) + "\n")
    _, shape = interface()
    check_request(found)
    matches_patterns(found, shape)


def matches_patterns(value: Any, shape: Any, where: str = "") -> None:
    """Check patterns, enumerations and lengths, which botocore leaves to the server."""
    import re

    if shape.type_name == "structure":
        for name, inner in value.items():
            matches_patterns(inner, shape.members[name], f"{where}.{name}")
    elif shape.type_name == "list":
        for inner in value:
            matches_patterns(inner, shape.member, where)
    elif shape.type_name == "map":
        assert len(value) <= int(shape.metadata.get("max", 1e9)), where
        for key, inner in value.items():
            matches_patterns(key, shape.key, where)
            matches_patterns(inner, shape.value, f"{where}.{key}")
    elif shape.type_name == "string":
        pattern, most = shape.metadata.get("pattern"), int(shape.metadata.get("max", 1e9))
        assert len(value) <= most, where
        assert not shape.metadata.get("enum") or value in shape.metadata["enum"], (where, value)
        assert not pattern or re.fullmatch(pattern, value, re.DOTALL), (where, value, pattern)


def test_patterns_are_really_compared(here: Path) -> None:
    _, shape = interface()
    with pytest.raises(AssertionError, match="TrainingJobName"):
        matches_patterns(request(run_of()) | {"TrainingJobName": "not a name"}, shape)


def test_the_plan_is_pure_and_shows_no_secret(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    assert main(["plan", "run.yaml", "launch.secrets=[HF_TOKEN=lockstep/hf]"]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") <= 30
    assert "--verbose prints them" in said
    assert main(["plan", "run.yaml", "launch.secrets=[HF_TOKEN=lockstep/hf]", "--verbose"]) == 0
    said += capsys.readouterr().out
    assert '"TrainingJobName"' in said
    assert said.index('"TrainingJobName"') < said.index("run.yaml\nname:" if "run.yaml\nname:" in said else "\nname: ")
    assert "lockstep/hf" in said
    assert "hf_xxx" not in said
    assert {p.name for p in here.iterdir()} == {"run.yaml"}
    assert Sagemaker().plan(run_of()) == Sagemaker().plan(run_of())


def test_local_data_models_and_modules_travel(here: Path) -> None:
    (here / "data").mkdir()
    for split in ("train", "test"):
        (here / f"data/{split}.jsonl").write_text('{"text": "a", "label": "b"}\n')
    (here / "mine.py").write_text("class Task: pass\n")
    run = run_of()
    run = run.model_copy(
        update={
            "data": run.data.model_copy(update={"source": "data"}),
            "strategy": run.strategy.model_copy(update={"name": "mine.Task"}),
        }
    )
    plan = Sagemaker().plan(run)
    there = yaml.safe_load(plan.files["out/launch/run.yaml"])
    assert there["data"]["source"] is None
    assert there["data"]["train"] == ["/opt/ml/input/data/data/train.jsonl"]
    assert there["data"]["test"] == ["/opt/ml/input/data/data/test.jsonl"]
    channels = [c["ChannelName"] for c in request(run)["InputDataConfig"]]
    assert channels == ["source", "data"]
    assert any("mine.py" in note for note in plan.notes)


# -- bad input: one message, before anything is asked of AWS ---------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"role": None}, "launch.role: missing"),
        ({"role": "lockstep"}, "not the ARN of a role"),
        ({"s3": None}, "launch.s3: missing"),
        ({"s3": "lockstep-tests"}, "not an S3 address"),
        ({"instance": None}, "launch.instance: missing"),
        ({"region": "eu-west-9"}, "did you mean eu-west-"),
        ({"region": None}, "launch.region: missing"),
        ({"pytorch": "1.13"}, "no AWS container for PyTorch '1.13'"),
        ({"processes": "auto", "instance": "ml.g9.xlarge", "device": "auto"}, "launch.instance: the number of GPUs of"),
        ({"processes": 5}, "2 x 5 processes cannot share 8 micro-batches"),
        ({"device": "cuda"}, "launch.device: cuda, but ml.m5.xlarge "),
        ({"secrets": ["HF_TOKEN"]}, "launch.secrets: 'HF_TOKEN' is not VARIABLE=NAME"),
        ({"environment": ["HF_TOKEN=hf_" + "x" * 30]}, "looks like a secret"),
    ],
)
def test_bad_input_is_one_message(
    launch: dict[str, Any], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.yaml").write_text(yaml.safe_dump(RUN | {"launch": LAUNCH | launch}))
    assert main(["train", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert "hf_xxx" not in said


def test_an_instance_that_does_not_exist(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml", "launch.instance=ml.g5.xlarg"]) == 2
    assert "did you mean ml.g5.xlarge" in capsys.readouterr().err
    assert "Contents" not in cloud.client("s3").list_objects_v2(Bucket="lockstep-tests")


def test_no_credentials(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs("boto3")
    assert main(["train", "run.yaml"]) == 2
    assert "sagemaker needs AWS credentials" in capsys.readouterr().err


def test_without_boto3(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    assert main(["train", "run.yaml"]) == 2
    assert mentions(capsys.readouterr().err, "LS7215")


def test_no_such_bucket(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml", "launch.s3=s3://not-there/runs"]) == 2
    assert "cannot write s3://not-there/runs/" in capsys.readouterr().err
    assert cloud.client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []


# -- a job -----------------------------------------------------------------------------------------------------------


def test_submit_then_fetch(cloud: Any, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client, s3 = cloud.client("sagemaker"), cloud.client("s3")
    assert main(["train", "run.yaml"]) == 0
    run = load("run.yaml", [])
    name = name_of(run)
    assert f"training job {name} is submitted" in capsys.readouterr().out
    found = client.describe_training_job(TrainingJobName=name)
    asked = json.loads((here / "out/launch/create_training_job.json").read_text())
    asked.pop("Environment")  # which moto drops
    found["AlgorithmSpecification"].pop("MetricDefinitions", None)  # which it makes up
    assert {key: found[key] for key in asked} == asked
    record = job_record.read(here / "out")
    assert record is not None
    assert (record.launcher, record.job, record.processes) == ("sagemaker", name, 2)

    body = s3.get_object(Bucket="lockstep-tests", Key=f"runs/{name}/source/source.tar.gz")["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        names = tar.getnames()
    assert {"lockstep/__init__.py", "lockstep_clouds/sagemaker_entry.py", "run.yaml", "requirements.txt"} <= {*names}

    held = found["ModelArtifacts"]["S3ModelArtifacts"]
    bucket, key = aws.split_s3(held)
    if bucket != "lockstep-tests":
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    model = io.BytesIO()
    with tarfile.open(fileobj=model, mode="w:gz") as tar:
        for path, text in (("config.json", "{}"), ("model.safetensors", "w"), ("lockstep/metrics.jsonl", "m")):
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    s3.put_object(Bucket=bucket, Key=key, Body=model.getvalue())
    assert main(["train", "run.yaml"]) == 0  # the job is complete: nothing is started
    assert len(client.list_training_jobs()["TrainingJobSummaries"]) == 1
    assert {p.name for p in (here / "out/export").iterdir()} == {"config.json", "model.safetensors"}
    assert (here / "out/metrics.jsonl").read_text() == "m"
    assert main(["status", "out"]) == 0


def test_archives_with_paths_outside_the_folder_are_not_unpacked(cloud: Any, here: Path) -> None:
    model = io.BytesIO()
    with tarfile.open(fileobj=model, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../../evil"), io.BytesIO())
    s3 = cloud.client("s3")
    s3.put_object(Bucket="lockstep-tests", Key="model.tar.gz", Body=model.getvalue())
    with raises("LS7262"):
        fetch(s3, "s3://lockstep-tests/model.tar.gz", here / "out")
    assert not (here.parent / "evil").exists()
    assert not (here / "out/export").exists()


def test_a_job_that_failed_is_tried_again_under_another_name(cloud: Any, here: Path) -> None:
    run = load("run.yaml", [])
    asked = request(run)
    client = Named({asked["TrainingJobName"]: "Failed", asked["TrainingJobName"] + "-2": "Stopped"})
    assert Sagemaker()._former(client, asked) is None
    assert asked["TrainingJobName"] == f"{name_of(run)}-3"
    asked = request(run)
    assert Sagemaker()._former(Named({asked["TrainingJobName"]: "Completed"}), asked) == name_of(run)


class Named:
    """A client that knows jobs."""

    def __init__(self, jobs: dict[str, str]) -> None:
        self.jobs = jobs

    def describe_training_job(self, TrainingJobName: str) -> dict[str, str]:  # AWS's spelling
        from botocore.exceptions import ClientError

        if TrainingJobName not in self.jobs:
            text = "Requested resource not found."
            raise ClientError({"Error": {"Code": "ValidationException", "Message": text}}, "DescribeTrainingJob")
        return {"TrainingJobStatus": self.jobs[TrainingJobName]}


@pytest.mark.parametrize(
    ("found", "word", "status"),
    [
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting"}, "waiting", None),
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "DownloadingTrainingImage"}, "waiting", None),
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}, "running", None),
        ({"TrainingJobStatus": "Deleting", "SecondaryStatus": "Completed"}, "gone", None),
        ({"TrainingJobStatus": "Stopping", "SecondaryStatus": "Stopping"}, "running", None),
        ({"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}, "done", 0),
        ({"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxRuntimeExceeded"}, "stopped", 75),
        ({"TrainingJobStatus": "Failed", "FailureReason": f"AlgorithmError: {STOPPED}"}, "stopped", 75),
        ({"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: exit code: 1"}, "failed", 1),
    ],
)
def test_states(found: dict[str, Any], word: str, status: int | None) -> None:
    state = state_from(found)
    assert (state.word, state.status) == (word, status)


def test_logs_of_two_hosts_each_line_once(cloud: Any) -> None:
    client = cloud.client("logs")
    client.create_log_group(logGroupName="/aws/sagemaker/TrainingJobs")
    for host in (1, 2):
        client.create_log_stream(logGroupName="/aws/sagemaker/TrainingJobs", logStreamName=f"job/algo-{host}-170")

    now = int(time.time() * 1000)

    def say(host: int, *texts: str) -> None:
        events = [{"timestamp": now + i, "message": text} for i, text in enumerate(texts)]
        stream = f"job/algo-{host}-170"
        client.put_log_events(logGroupName="/aws/sagemaker/TrainingJobs", logStreamName=stream, logEvents=events)

    seen: dict[str, str] = {}
    say(1, "one", "two")
    say(2, "three")
    assert list(new_lines(client, "job", seen)) == ["algo-1: one", "algo-1: two", "algo-2: three"]
    assert list(new_lines(client, "job", seen)) == []
    say(2, "four")
    assert list(new_lines(client, "job", seen)) == ["algo-2: four"]
    assert list(new_lines(client, "another", {})) == []


def test_logs_of_more_hosts_than_one_answer_lists() -> None:
    pytest.importorskip("botocore", reason="needs the extra sagemaker")
    hosts = [f"job/algo-{number}-170" for number in range(1, 61)]

    def describe(nextToken: str = "0", **_: str) -> dict[str, Any]:
        first = int(nextToken)
        more = {"nextToken": str(first + 50)} if first + 50 < len(hosts) else {}
        return {"logStreams": [{"logStreamName": name} for name in hosts[first : first + 50]], **more}

    def read(logStreamName: str, **_: Any) -> dict[str, Any]:
        return {"events": [{"message": "here"}], "nextForwardToken": "end"}

    client = SimpleNamespace(describe_log_streams=describe, get_log_events=read)
    assert len({*new_lines(client, "job", {})}) == 60


def test_stop_asks_aws(cloud: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.stub import Stubber

    client = cloud.client("sagemaker")
    monkeypatch.setattr(aws, "session", lambda region: type("S", (), {"client": lambda self, name: client})())
    record = job_record.here("sagemaker", 2, job="job", facts={"region": "eu-west-1"})
    with Stubber(client) as stub:
        stub.add_response("stop_training_job", {}, {"TrainingJobName": "job"})
        assert "AWS was asked to stop training job job" in Sagemaker().stop(run_of().folder, record)
        stub.add_client_error("stop_training_job", "ValidationException", "The request was rejected because it is done")
        with raises("LS7374", "because it is done"):
            Sagemaker().stop(run_of().folder, record)


def test_verify_is_not_submitted_to_sagemaker(cloud: Any) -> None:
    run = run_of()
    with raises("LS7383", "launch.name=local"):
        Sagemaker().start(Sagemaker().plan(run), ("lockstep.proof.recording.record", "5"))


def test_names_fit_and_depend_on_what_is_trained(here: Path) -> None:
    long = load(None, [], RUN | {"name": "x" * 80})
    assert len(name_of(long)) <= 60
    assert name_of(run_of()) == name_of(run_of(instance="ml.m5.4xlarge"))  # its checkpoints are found again
    assert name_of(run_of()) != name_of(load(None, [], RUN | {"seed": 1}))
    assert start.launcher_of(run_of().launch).submits
    assert logs_command.run_logs
