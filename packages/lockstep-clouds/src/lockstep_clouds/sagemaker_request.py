"""Arguments of `create_training_job` for a run.

In: a run and the launcher's options. Out: a mapping that is valid for botocore's API model. AWS is not contacted.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from lockstep.config import error_messages as messages
from lockstep.config import user_code
from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection
from lockstep.data.job import arithmetic_of
from lockstep_clouds import aws
from lockstep_clouds.code_bundle import Parcel, pairs

CODE, DATA, CHECKPOINTS = "/opt/ml/code", "/opt/ml/input/data/data", "/opt/ml/checkpoints"
COMMAND = (
    f"mkdir -p {CODE} && cd {CODE} && tar -xzf /opt/ml/input/data/source/source.tar.gz && "
    "exec python3 -m lockstep_clouds.sagemaker_entry"
)


# Field of the request -> key of the run file.
_KEYS = {
    "TrainingJobName": "name",
    "RoleArn": "launch.role",
    "InputDataConfig": "launch.inputs",
    "EnableManagedSpotTraining": "launch.spot",
    "Environment": "launch.environment",
    "HyperParameters": "the run file",
    "AlgorithmSpecification.TrainingImage": "launch.image",
    "OutputDataConfig.S3OutputPath": "launch.s3",
    "CheckpointConfig.S3Uri": "launch.s3",
    "ResourceConfig.InstanceType": "launch.instance",
    "ResourceConfig.InstanceCount": "launch.machines",
    "ResourceConfig.VolumeSizeInGB": "launch.volume_gb",
    "StoppingCondition.MaxRuntimeInSeconds": "launch.max_hours",
    "StoppingCondition.MaxWaitTimeInSeconds": "launch.wait_hours",
}


def name_of(run: Run) -> str:
    """Name of a run's first training job. Names can be used once per region, so it depends on what is trained."""
    code = user_code.hashes_of(user_code.named(run.task, run.optim, run.strategy).values())
    identity = json.dumps([arithmetic_of(run), str(run.folder), *filter(None, [code])], sort_keys=True, default=str)
    slug = re.sub(r"[^a-zA-Z0-9]+", "-", run.name).strip("-")[:40].strip("-") or "run"
    return f"{slug}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def prefix_of(run: Run, options: Any) -> str:
    """Return the S3 prefix of a run. All attempts share it, so that each finds the checkpoints of the one before."""
    bucket, folder = aws.split_s3(options.s3)
    return "/".join(part for part in (f"s3://{bucket}", folder, name_of(run)) if part)


def request_of(run: Run, options: Any, parcel: Parcel) -> dict[str, Any]:
    """Return the arguments of `create_training_job`. Errors: `RunError`, naming the key."""
    prefix = prefix_of(run, options)
    channels = {"source": f"{prefix}/source"} | ({"data": f"{prefix}/data"} if parcel.data else {})
    channels |= pairs("inputs", options.inputs, "CHANNEL=s3://...")
    for address in channels.values():
        aws.split_s3(address)
    seconds = int(options.max_hours * 3600)
    stopping = {"MaxRuntimeInSeconds": seconds}
    if options.spot:
        stopping["MaxWaitTimeInSeconds"] = seconds + int(options.wait_hours * 3600)
    gpu = aws.has_gpu(options.instance)
    request = {
        "TrainingJobName": name_of(run),
        "AlgorithmSpecification": {
            "TrainingImage": options.image or aws.image(options.pytorch, aws.region_of(options.region), gpu),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/bin/sh", "-c"],
            "ContainerArguments": [COMMAND],
        },
        "RoleArn": options.role,
        "InputDataConfig": [
            {
                "ChannelName": name,
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": address,
                        "S3DataDistributionType": "FullyReplicated",
                    }
                },
            }
            for name, address in channels.items()
        ],
        "OutputDataConfig": {"S3OutputPath": f"{prefix}/output"},
        "ResourceConfig": {
            "InstanceType": options.instance,
            "InstanceCount": options.machines,
            "VolumeSizeInGB": options.volume_gb,
        },
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": options.spot,
        "CheckpointConfig": {"S3Uri": f"{prefix}/checkpoints", "LocalPath": CHECKPOINTS},
        "HyperParameters": hyperparameters(parcel.run),
        "Environment": _environment(options),
    }
    return with_extra(request, options.extra)


def check(launch: LaunchSection, options: Any) -> None:
    """Check for missing keys and unusable values. Errors: `RunError`."""
    for key, what in (
        ("role", "the ARN of an IAM role that SageMaker may assume and that may use the bucket: "
         "arn:aws:iam::ACCOUNT:role/NAME"),
        ("s3", "where code, checkpoints and the model go: s3://BUCKET/PREFIX"),
        ("instance", "a type of instance, for example ml.g5.xlarge (1 GPU) or ml.m5.xlarge (none)"),
    ):  # fmt: skip
        if getattr(options, key) is None:
            raise RunError("LS7270", f"launch.{key}: missing; sagemaker needs {what}")
    if not re.fullmatch(r"arn:aws[a-z\-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+", options.role):
        raise RunError(
            "LS7271", f"launch.role: {options.role!r} is not the ARN of a role; expected arn:aws:iam::ACCOUNT:role/NAME"
        )
    aws.check_instance(options.instance, options.image)
    aws.check_image(options.image)
    if launch.device == "cuda" and not aws.has_gpu(options.instance):
        raise RunError(
            "LS7272",
            f"launch.device: cuda, but {options.instance} has no NVIDIA GPU; choose another launch.instance, "
            "or launch.device=cpu",
        )


def processes_of(run: Run, instance: str) -> int:
    """Processes per instance: `launch.processes`; auto: `launch.processes_per_gpu` per GPU, or 1 without GPUs. Errors:
    `RunError` if the number of GPUs of its type is unknown."""
    if run.launch.processes != "auto":
        return int(run.launch.processes)
    if run.strategy.alone or run.launch.device == "cpu":
        return 1
    gpus = aws.gpus_of(instance)
    if gpus is None:
        raise RunError(
            "LS7520",
            f"launch.instance: the number of GPUs of {instance} is not known here; set launch.processes to the "
            "processes of each instance, one per GPU",
        )
    return gpus * run.launch.processes_per_gpu or 1


def _environment(options: Any) -> dict[str, str]:
    """Environment variables of the containers; for secrets their names. Errors: `RunError` for a value that looks like
    a secret."""
    secrets = pairs("secrets", options.secrets, "VARIABLE=NAME of a secret")
    environment = pairs("environment", options.environment)
    if (hidden := messages.secret({"launch": {"environment": environment}})) is not None:
        raise RunError(
            "LS7273",
            f"{hidden} looks like a secret, which everyone with read access to the job could see. Put it in "
            "AWS Secrets Manager and name it in launch.secrets",
        )
    return environment | ({"LOCKSTEP_SECRETS": json.dumps(secrets)} if secrets else {})


def hyperparameters(run: Run) -> dict[str, str]:
    """Keys of the run that affect the weights, flattened, each as JSON. Containers apply them on top of run.yaml, so a
    modified copy of the job, or a SageMaker tuning job, trains with its own values."""
    values = messages.flat(run.model_dump(mode="json", include={
        "seed", "epochs", "steps", "batch_size", "micro_batches", "precision", "optim", "strategy"}))  # fmt: skip
    return {key: json.dumps(value) for key, value in values.items() if value not in (None, {}, [])}


def with_extra(request: dict[str, Any], extra: Mapping[str, Any], where: str = "launch.extra") -> dict[str, Any]:
    """Add further fields to the request, merging nested ones. Errors: `RunError` for a field that lockstep sets."""
    extended = dict(request)
    for name, value in extra.items():
        path = f"{where}.{name}"
        field = path.removeprefix("launch.extra.")
        if field in ("HyperParameters", "Environment") or (
            name in request and not (isinstance(value, Mapping) and isinstance(request[name], Mapping))
        ):
            key = _KEYS.get(field)
            raise RunError(
                "LS7274", f"{path}: lockstep sets this field" + (f" of {key}; set that" if key else " itself")
            )
        extended[name] = with_extra(request[name], value, path) if name in request else value
    return extended


def facts_of(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows (name -> value) that summarize a request."""
    resources, limits = request["ResourceConfig"], request["StoppingCondition"]
    instances = f"{resources['InstanceCount']} x {resources['InstanceType']}"
    spot = ", spot" if request.get("EnableManagedSpotTraining", False) else ""
    channels = {c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"] for c in request["InputDataConfig"]}
    checkpoints = request["CheckpointConfig"]
    own = {"TrainingJobName", "AlgorithmSpecification", "RoleArn", "InputDataConfig", "OutputDataConfig", "Environment"}
    own |= {"ResourceConfig", "StoppingCondition", "EnableManagedSpotTraining", "CheckpointConfig", "HyperParameters"}
    further = ", ".join(sorted(request.keys() - own))
    return {
        "job": request["TrainingJobName"],
        "instances": f"{instances}, {resources['VolumeSizeInGB']} GB disk each{spot}",
        "limit": f"MaxRuntimeInSeconds {limits['MaxRuntimeInSeconds']}"
        + (f", MaxWaitTimeInSeconds {limits['MaxWaitTimeInSeconds']}" if "MaxWaitTimeInSeconds" in limits else ""),
        "image": request["AlgorithmSpecification"]["TrainingImage"],
        "role": request["RoleArn"],
        "channels": ", ".join(f"{name} {address}" for name, address in channels.items()),
        "checkpoint": f"{checkpoints['LocalPath']} <-> {checkpoints['S3Uri']}",
        "artifacts": request["OutputDataConfig"]["S3OutputPath"],
        "tuning": f"{len(request['HyperParameters'])} hyperparameters: the keys that affect the weights",
        **({"further": further} if further else {}),
    }


def check_request(request: dict[str, Any]) -> None:
    """Validate a request against botocore's API model, without a network. Errors: `RunError`."""
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        raise RunError(
            "LS7275", f"the request for the training job is not valid: {' '.join(report.generate_report().split())}"
        )
    instance = request["ResourceConfig"]["InstanceType"]
    known = shape.members["ResourceConfig"].members["InstanceType"].enum
    if instance not in known:
        near = difflib.get_close_matches(instance, known, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise RunError("LS7276", f"launch.instance: AWS has no {instance!r}{hint}")
