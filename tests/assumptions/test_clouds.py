"""Assumptions about Ray Train, Kubeflow's interface, botocore, SageMaker's toolkit and its image tables."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from lockstep_clouds import aws
from support.assumed import rests_on_it
from support.assumed_ray import facts

pytestmark = [pytest.mark.extras, pytest.mark.processes]


@pytest.fixture(scope="module")
def ray_facts() -> dict[str, Any]:
    pytest.importorskip("ray", reason="needs the extra ray")
    return facts()


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/ray_train.py")
@pytest.mark.long  # starting a Ray cluster takes two minutes
def test_ray_connects_once(ray_facts: dict[str, Any]) -> None:
    """is_initialized is False before init; init("local") starts a cluster, and shutdown ends it."""
    assert [ray_facts[name] for name in ("before", "begun", "after")] == [False, True, False]


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/ray_train.py")
@pytest.mark.long  # starting a Ray cluster takes two minutes
def test_ray_workers_know_their_ranks(ray_facts: dict[str, Any]) -> None:
    """get_context returns the rank, the number of workers, and the ranks on this machine; with RAY_CHDIR_TO_TRIAL_DIR=0
    workers run in the caller's folder; broadcast_from_rank_zero gives every worker rank 0's value."""
    rows = ray_facts["rows"]
    for rank in (0, 1):
        own = [row for row in rows if row["rank"] == rank]
        assert own
        assert all(row["of"] == [2, rank, 2] for row in own)
    assert {row["folder"] for row in rows} == {ray_facts["folder"]}
    assert {row["sent"][1] for row in rows} == {4711}


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/ray_train.py")
@pytest.mark.long  # starting a Ray cluster takes two minutes
def test_ray_forms_no_process_group_with_the_base_backend(ray_facts: dict[str, Any]) -> None:
    """A TorchConfig whose backend_cls is Backend forms no process group. The training function runs in a separate
    thread, where Python handles no signals."""
    assert {row["group"] for row in ray_facts["rows"]} == {False}
    assert {row["main thread"] for row in ray_facts["rows"]} == {False}


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/ray_train.py")
@pytest.mark.long  # starting a Ray cluster takes two minutes
def test_ray_reports_a_workers_error(ray_facts: dict[str, Any]) -> None:
    """If a worker fails more often than max_failures, fit raises an error that contains the worker's error."""
    (error,) = ray_facts["fit"]
    assert "rank 1 went" in error


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/kubernetes.py")
def test_kubeflow_counts_pending_jobs_as_active() -> None:
    """In a TrainJob's jobsStatus, `active` also counts child Jobs with a pending pod; `ready` counts Jobs whose pods
    all run or have ended."""
    pytest.importorskip("kubeflow_trainer_api", reason="needs the extra cloud-tests")
    from kubeflow_trainer_api.models.trainer_v1alpha1_job_status import TrainerV1alpha1JobStatus

    said = {name: str(field.description) for name, field in TrainerV1alpha1JobStatus.model_fields.items()}
    assert "running or pending" in said["active"]
    assert "child Jobs" in said["ready"]
    assert "total expected pod count" in said["ready"]


@rests_on_it(
    "packages/lockstep-clouds/src/lockstep_clouds/kubernetes.py",
    "packages/lockstep-clouds/src/lockstep_clouds/kubernetes_manifests.py",
)
def test_kubeflow_names_pods_by_their_job_set() -> None:
    """Jobs of a JobSet are named NAME-node-0. The actions for a Job's exit code are FailJob, Ignore and Count. A
    TrainJob can be suspended. The SDK waits for Complete and Failed, and finds pods by the labels jobset-name and step.
    """
    pytest.importorskip("kubeflow_trainer_api", reason="needs the extra cloud-tests")
    from kubeflow_trainer_api.models.io_k8s_api_batch_v1_pod_failure_policy_rule import (
        IoK8sApiBatchV1PodFailurePolicyRule as Rule,
    )
    from kubeflow_trainer_api.models.jobset_v1alpha2_replicated_job import JobsetV1alpha2ReplicatedJob
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job_spec import TrainerV1alpha1TrainJobSpec

    name = str(JobsetV1alpha2ReplicatedJob.model_fields["replicas"].description)
    assert "<jobSet.name>-<spec.replicatedJob.name>-<job-index>" in name
    assert {Rule(action=action).action for action in ("FailJob", "Ignore", "Count")}
    with pytest.raises(ValueError):
        Rule(action="Restart")
    assert "suspend" in TrainerV1alpha1TrainJobSpec.model_fields
    constants: Any = pytest.importorskip("kubeflow.trainer.constants.constants", reason="needs kubeflow's SDK")
    assert (constants.TRAINJOB_COMPLETE, constants.TRAINJOB_FAILED) == ("Complete", "Failed")
    assert constants.TRAINJOB_ANCESTOR_LABEL == "trainer.kubeflow.org/trainjob-ancestor-step"
    assert constants.JOBSET_NAME_LABEL == "jobset.sigs.k8s.io/jobset-name"
    assert (constants.NODE, constants.JOB_INDEX_LABEL) == ("node", "batch.kubernetes.io/job-completion-index")


@pytest.fixture(scope="module")
def sagemaker() -> Any:
    session = pytest.importorskip("botocore.session", reason="needs the extra sagemaker")
    return session.get_session().get_service_model("sagemaker")


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/sagemaker_job.py")
def test_states_of_a_training_job(sagemaker: Any) -> None:
    """A training job is InProgress, Stopping, Stopped, Completed, Failed or Deleting; its secondary status before
    Training is Starting, Pending, LaunchingMLInstances, PreparingTrainingStack, Downloading or
    DownloadingTrainingImage."""
    states = {"InProgress", "Completed", "Failed", "Stopping", "Stopped", "Deleting"}
    assert set(sagemaker.shape_for("TrainingJobStatus").enum) == states
    before = {"Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "Downloading"}
    before |= {"DownloadingTrainingImage"}
    later = {"Training", "Uploading", "Stopping", "Stopped", "MaxRuntimeExceeded", "MaxWaitTimeExceeded", "Completed"}
    later |= {"Failed", "Interrupted", "Updating", "Restarting"}
    assert set(sagemaker.shape_for("SecondaryStatus").enum) == before | later


@rests_on_it(
    "packages/lockstep-clouds/src/lockstep_clouds/sagemaker_request.py",
    "packages/lockstep-clouds/src/lockstep_clouds/sagemaker.py",
)
def test_botocore_checks_names_and_types_of_a_request(sagemaker: Any) -> None:
    """ParamValidator reports unknown fields, missing fields and wrong types in a request, but not values outside an
    enum, patterns that do not match or strings that are too long. Instance types are listed in the shape's `enum`."""
    from botocore.validate import ParamValidator

    shape = sagemaker.operation_model("CreateTrainingJob").input_shape
    request: dict[str, Any] = {
        "TrainingJobName": "a",
        "AlgorithmSpecification": {"TrainingInputMode": "File", "ContainerEntrypoint": ["/bin/sh"]},
        "RoleArn": "arn:aws:iam::123456789012:role/a",
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/a"},
        "ResourceConfig": {"InstanceType": "ml.none.such", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 1},
        "Environment": {"not a name": "v" * 5000},
    }

    def reported(**fields: Any) -> bool:
        return bool(ParamValidator().validate(request | fields, shape).has_errors())

    assert not reported()
    assert reported(Enviroment={})
    assert reported(EnableManagedSpotTraining="yes")
    assert reported(StoppingCondition={"MaxRuntimeInSeconds": 0})
    assert reported(RoleArn=None)
    known = shape.members["ResourceConfig"].members["InstanceType"].enum
    assert "ml.g5.xlarge" in known
    assert "ml.none.such" not in known


@pytest.fixture(scope="module")
def sagemaker_tables() -> dict[str, Any]:
    """The image tables of sagemaker-core, by file name; its code is not imported."""
    try:
        files = distribution("sagemaker-core").files or []
    except PackageNotFoundError:
        pytest.skip("needs sagemaker-core, which .ci/newest installs")
    paths = [Path(str(file.locate())) for file in files if "image_uri_config" in str(file)]
    names = ("pytorch-amzn2023", "instance_gpu_info")
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths if path.stem in names}


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/aws.py")
def test_the_sagemaker_sdk_has_these_images(sagemaker_tables: dict[str, Any]) -> None:
    """sagemaker-core's table pytorch-amzn2023 has the account, repository (pytorch) and tag of lockstep's table for
    each of its versions and regions."""
    versions = sagemaker_tables["pytorch-amzn2023"]["training"]["versions"]
    for version, (gpu, cpu) in aws.TAGS.items():
        row = versions[version]
        tags = {kind: f"{row['tag_prefix']}-{ending}" for kind, ending in row["container_version"].items()}
        assert (tags, row["repository"], row["processor_in_tag"]) == ({"gpu": gpu, "cpu": cpu}, "pytorch", False)
        assert {region: row["registries"].get(region) for region in aws._ACCOUNTS} == aws._ACCOUNTS


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/aws.py")
def test_only_chinese_regions_have_another_domain() -> None:
    """botocore's partitions give the regions of lockstep's image table the domain amazonaws.com, and those of China
    amazonaws.com.cn."""
    botocore = pytest.importorskip("botocore", reason="needs the extra sagemaker")
    text = (Path(botocore.__file__).parent / "data/partitions.json").read_text(encoding="utf-8")
    partitions = json.loads(text)["partitions"]
    domains = {region: each["outputs"]["dnsSuffix"] for each in partitions for region in each["regions"]}
    for region, account in aws._ACCOUNTS.items():
        start = f"{account}.dkr.ecr.{region}.{domains[region]}/pytorch:"
        assert aws.image("2.13", region, False).startswith(start)


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/aws.py")
def test_gpu_counts_equal_those_of_the_sagemaker_sdk(sagemaker_tables: dict[str, Any]) -> None:
    """For each instance type in both tables, sagemaker-core's instance_gpu_info has the number of GPUs of lockstep's
    table."""
    regions = sagemaker_tables["instance_gpu_info"].values()
    counts = {name: facts["Count"] for types in regions for name, facts in types.items()}
    known = {name: count for name, count in counts.items() if aws.gpus_of(name) is not None}
    assert len(known) > 20
    assert {name: aws.gpus_of(name) for name in known} == known


TOOLKIT = """
import json, os, sys
os.environ["SAGEMAKER_BASE_DIR"] = sys.argv[1]
from sagemaker_training import environment, params
made = environment.Environment()
variables = made.to_env_vars()
print(json.dumps([variables[name] for name in ("SM_HOSTS", "SM_CURRENT_HOST", "SM_NETWORK_INTERFACE_NAME")]))
print(json.dumps([made.hyperparameters, environment.output_dir, environment.model_dir]))
"""


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/sagemaker_entry.py")
def test_sagemaker_toolkit_describes_hosts(tmp_path: Path) -> None:
    """SageMaker's toolkit reads hosts, current_host and network_interface_name from input/config/resourceconfig.json
    and exports them as SM_HOSTS (JSON), SM_CURRENT_HOST and SM_NETWORK_INTERFACE_NAME; hyperparameters.json holds
    values as JSON strings; errors are written to output/failure, and the model to model/."""
    pytest.importorskip("sagemaker_training", reason="needs SageMaker's toolkit, sagemaker-training")
    config = tmp_path / "input/config"
    config.mkdir(parents=True)
    hosts = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth1"}
    (config / "resourceconfig.json").write_text(json.dumps(hosts))
    (config / "hyperparameters.json").write_text(json.dumps({"seed": "7", "sagemaker_program": '"a.py"'}))
    (config / "inputdataconfig.json").write_text("{}")
    words = [sys.executable, "-c", TOOLKIT, str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    variables, others = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert [json.loads(variables[0]), *variables[1:]] == [["algo-1", "algo-2"], "algo-2", "eth1"]
    assert others == [{"seed": 7}, str(tmp_path / "output"), str(tmp_path / "model")]


@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/sagemaker_entry.py")
def test_get_secret_value_returns_a_string() -> None:
    """AWS Secrets Manager's GetSecretValue takes SecretId and answers with SecretString, a string."""
    session = pytest.importorskip("botocore.session", reason="needs the extra sagemaker")
    operation = session.get_session().get_service_model("secretsmanager").operation_model("GetSecretValue")
    assert "SecretId" in operation.input_shape.required_members
    assert operation.output_shape.members["SecretString"].type_name == "string"


@rests_on_it(
    "packages/lockstep-clouds/src/lockstep_clouds/sagemaker_job.py",
    "packages/lockstep-clouds/src/lockstep_clouds/sagemaker.py",
    "packages/lockstep-clouds/src/lockstep_clouds/aws.py",
)
def test_responses_and_errors_of_aws(sagemaker: Any) -> None:
    """DescribeTrainingJob's error for an unknown job is ResourceNotFound. GetLogEvents returns events with a message
    and nextForwardToken, which at the end of a stream equals the token of the request. DescribeLogStreams returns at
    most 50 streams, and a nextToken if there are more. A ClientError has its code in response["Error"]["Code"].
    ClientError, BotoCoreError and S3UploadFailedError are not subclasses of one another. A session without a configured
    region has the region None."""
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import get_session

    described = sagemaker.operation_model("DescribeTrainingJob")
    assert [each.name for each in described.error_shapes] == ["ResourceNotFound"]
    assert {"TrainingJobStatus", "SecondaryStatus", "FailureReason"} <= described.output_shape.members.keys()
    for name in ("CreateTrainingJob", "StopTrainingJob"):
        assert "TrainingJobName" in sagemaker.operation_model(name).input_shape.members
    logs = get_session().get_service_model("logs")
    events, streams = logs.operation_model("GetLogEvents"), logs.operation_model("DescribeLogStreams")
    said = events.output_shape.members["nextForwardToken"].documentation
    assert "it returns the same token you passed in" in said
    assert "message" in events.output_shape.members["events"].member.members
    assert {"logGroupName", "logStreamName", "startFromHead", "nextToken"} <= events.input_shape.members.keys()
    assert "50 items" in streams.input_shape.members["limit"].documentation
    assert "logStreamNamePrefix" in streams.input_shape.members
    assert streams.output_shape.members.keys() == {"logStreams", "nextToken"}
    error = ClientError({"Error": {"Code": "ValidationException", "Message": "none"}}, "DescribeTrainingJob")
    assert error.response["Error"]["Code"] == "ValidationException"
    kinds = (ClientError, BotoCoreError, S3UploadFailedError)
    assert not any(issubclass(a, b) for a in kinds for b in kinds if a is not b)


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove credentials, region and instance role from the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)


@rests_on_it(
    "packages/lockstep-clouds/src/lockstep_clouds/aws.py",
    "packages/lockstep-clouds/src/lockstep_clouds/sagemaker_entry.py",
)
@pytest.mark.usefixtures("no_aws")
def test_how_boto3_finds_region_and_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without configuration, get_credentials and the region are None, and creating a client raises NoRegionError. boto3
    reads AWS_DEFAULT_REGION, not AWS_REGION; the keyword region_name overrides it, and None leaves the default."""
    session = pytest.importorskip("botocore.session", reason="needs the extra sagemaker")
    import boto3
    from botocore.exceptions import BotoCoreError, NoRegionError

    def region() -> Any:
        return session.get_session().get_config_variable("region")

    own = boto3.session.Session(region_name="eu-west-1")
    assert own.get_credentials() is None
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    assert region() is None
    assert issubclass(NoRegionError, BotoCoreError)
    with pytest.raises(NoRegionError):
        boto3.session.Session().client("secretsmanager")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
    assert region() == "eu-west-2"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert boto3.session.Session().get_credentials().access_key == "a"
    regions = [
        boto3.session.Session().client("secretsmanager", region_name=name).meta.region_name
        for name in (None, "eu-west-1")
    ]
    assert regions == ["eu-west-2", "eu-west-1"]


@rests_on_it(
    "packages/lockstep-clouds/src/lockstep_clouds/aws.py",
    "packages/lockstep-clouds/src/lockstep_clouds/sagemaker_job.py",
    "packages/lockstep-clouds/src/lockstep_clouds/sagemaker_entry.py",
)
@pytest.mark.usefixtures("no_aws")
def test_s3_transfers_and_their_errors(tmp_path: Path) -> None:
    """put_object uploads bytes, upload_file a file by path. A rejected put_object raises ClientError, a rejected
    upload_file S3UploadFailedError, and a missing file FileNotFoundError. download_fileobj writes into an open file and
    raises ClientError for a missing object. The response of get_secret_value has SecretString."""
    stub = pytest.importorskip("botocore.stub", reason="needs the extra sagemaker")
    import boto3
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import ClientError
    from botocore.response import StreamingBody

    session = boto3.session.Session("key", "secret", region_name="eu-west-1")
    client, secrets = session.client("s3"), session.client("secretsmanager")
    (file := tmp_path / "file").write_bytes(b"content")
    bodies: list[bytes] = []

    def look(params: dict[str, Any], **_: Any) -> None:
        body = params["Body"]
        bodies.append(body if isinstance(body, bytes) else body.read())

    client.meta.events.register("before-parameter-build.s3.PutObject", look)
    with stub.Stubber(client) as answers:
        for _ in range(2):
            answers.add_response("put_object", {})
        client.put_object(Bucket="bucket", Key="a/b", Body=b"text")
        client.upload_file(str(file), "bucket", "a/c")
        answers.assert_no_pending_responses()
        assert bodies == [b"text", b"content"]
        for _ in range(2):
            answers.add_client_error("put_object", "AccessDenied", "no")
        with pytest.raises(ClientError, match="AccessDenied"):
            client.put_object(Bucket="bucket", Key="a/b", Body=b"text")
        with pytest.raises(S3UploadFailedError, match="AccessDenied"):
            client.upload_file(str(file), "bucket", "a/c")
        with pytest.raises(FileNotFoundError):
            client.upload_file(str(tmp_path / "missing"), "bucket", "a/c")
        found = {"ContentLength": 5, "ETag": '"x"'}
        answers.add_response("head_object", found)
        answers.add_response("get_object", found | {"Body": StreamingBody(io.BytesIO(b"hello"), 5)})
        with (tmp_path / "back").open("w+b") as back:
            client.download_fileobj("bucket", "a/b", back)
            back.seek(0)
            assert back.read() == b"hello"
            answers.add_client_error("head_object", "404", "Not Found", 404)
            with pytest.raises(ClientError, match="404"):
                client.download_fileobj("bucket", "a/b", back)
    with stub.Stubber(secrets) as answers:
        answers.add_response("get_secret_value", {"SecretString": "text"}, {"SecretId": "name"})
        assert secrets.get_secret_value(SecretId="name")["SecretString"] == "text"


class Cluster(BaseHTTPRequestHandler):
    """The part of a cluster's API that kubectl calls here; the job does not exist, and creating one is forbidden."""

    def do_GET(self) -> None:
        jobs = {"name": "jobs", "singularName": "job", "namespaced": True, "kind": "Job", "verbs": ["get", "create"]}
        batch = {"groupVersion": "batch/v1", "version": "v1"}
        answers = {
            "/api": {"kind": "APIVersions", "versions": []},
            "/apis": {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [{"name": "batch", "versions": [batch], "preferredVersion": batch}],
            },
            "/apis/batch/v1": {"kind": "APIResourceList", "groupVersion": "batch/v1", "resources": [jobs]},
        }
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        known = answers.get(self.path.partition("?")[0])
        self.answer(404 if known is None else 200, known or missing)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))  # not JSON
        review = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "spec": {}}
        self.answer(201, review | {"status": {"allowed": False}})

    def answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@rests_on_it("packages/lockstep-clouds/src/lockstep_clouds/kubernetes.py")
def test_kubectl_output_for_refusals_and_missing_jobs(tmp_path: Path) -> None:
    """`kubectl auth can-i` prints "no" to standard output and exits with 1 if the cluster refuses; if the cluster
    cannot be reached, standard output is empty. `get --ignore-not-found -o json` of a missing job prints nothing and
    exits with 0."""
    environment = os.environ | {"KUBECONFIG": os.devnull, "HOME": str(tmp_path)}  # its cache of the interface

    def kubectl(port: int, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "--server", f"http://127.0.0.1:{port}", "--namespace", "a", "--request-timeout=20s"]
        return subprocess.run(
            [*command, *words], env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    can = ("auth", "can-i", "create", "jobs.batch")
    with ThreadingHTTPServer(("127.0.0.1", 0), Cluster) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        refused = kubectl(server.server_port, *can)
        missing = kubectl(server.server_port, "get", "job", "x", "-o", "json", "--ignore-not-found")
        server.shutdown()
    assert (refused.stdout.strip(), refused.returncode) == ("no", 1), refused.stderr
    assert (missing.stdout, missing.returncode) == ("", 0), missing.stderr
    unreached = kubectl(9, *can)
    assert (unreached.stdout.startswith("no"), unreached.returncode) == (False, 1)
