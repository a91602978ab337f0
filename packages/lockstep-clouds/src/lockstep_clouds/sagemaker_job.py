"""Query a started SageMaker training job: its state, log and model.

In: boto3 clients and the job's name. Out: states, lines of CloudWatch's log, OUTPUT/export.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config import errors
from lockstep.config.run import RunError
from lockstep.distributed import job_record
from lockstep.distributed.job_record import State
from lockstep_clouds import aws

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
# first words of /opt/ml/output/failure for status 75, written by `sagemaker_entry`
STOPPED = "lockstep: stopped on request"
_WAITING = (
    *("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack"),
    *("Downloading", "DownloadingTrainingImage"),
)


def describe(client: Any, name: str) -> dict[str, Any] | None:
    """Describe a training job; None if there is none with this name. Errors: `RunError`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        description: dict[str, Any] = client.describe_training_job(TrainingJobName=name)
        return description
    except ClientError as caught:
        if caught.response.get("Error", {}).get("Code") in ("ValidationException", "ResourceNotFound"):
            return None
        raise RunError(
            "LS7260",
            f"AWS does not report the status of training job {name}: {aws.explained(caught)}; run the command again",
        ) from None
    except BotoCoreError as caught:
        raise RunError(
            "LS7261",
            f"the status of training job {name} cannot be read from AWS: {aws.explained(caught)}; "
            "run the command again",
        ) from None


def state_from(description: dict[str, Any]) -> State:
    """Convert AWS's status to a job state."""
    status, second = description["TrainingJobStatus"], str(description.get("SecondaryStatus", ""))
    text = str(description.get("FailureReason") or second)
    if status in ("InProgress", "Stopping"):
        return State("waiting" if second in _WAITING else "running", second or status)
    if status == "Deleting":
        return State("gone", "AWS is deleting the training job")
    if status == "Stopped" or STOPPED in text:
        return job_record.outcome(errors.STOPPED, text)
    return job_record.outcome(0 if status == "Completed" else 1, text)


def new_lines(client: Any, job: str, next_tokens: dict[str, str]) -> Iterator[str]:
    """Yield new lines of a job's CloudWatch streams (one per machine). `next_tokens`: stream -> position."""
    from botocore.exceptions import ClientError

    names, more = list[str](), dict[str, str]()
    try:
        while True:  # an answer has at most 50 streams
            answer = client.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/", **more)
            names += [stream["logStreamName"] for stream in answer["logStreams"]]
            more = {"nextToken": answer["nextToken"]} if "nextToken" in answer else {}
            if not more:
                break
    except ClientError:  # the log group is created with the first line of the first job
        return
    names.sort()
    for name in names:
        host = name.removeprefix(f"{job}/").rpartition("-")[0] if len(names) > 1 else ""
        while True:
            place = {"nextToken": next_tokens[name]} if name in next_tokens else {}
            page = client.get_log_events(logGroupName=LOG_GROUP, logStreamName=name, startFromHead=True, **place)
            yield from (f"{host}: {e['message']}" if host else e["message"] for e in page["events"])
            if next_tokens.get(name) == page["nextForwardToken"]:
                break
            next_tokens[name] = page["nextForwardToken"]


def fetch(client: Any, address: str, folder: Path) -> None:
    """Download a job's model to `folder`/export, and its other results to `folder`. Errors: `RunError`."""
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, key = aws.split_s3(address)
    aside = folder / ".export.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with tempfile.TemporaryFile() as file:
            client.download_fileobj(bucket, key, file)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:gz") as tar:
                tar.extractall(aside, filter="data")
        for path in aside.glob("lockstep/*"):  # metrics.jsonl, report.html
            shutil.move(path, folder / path.name)
        shutil.rmtree(aside / "lockstep", ignore_errors=True)
    except (BotoCoreError, ClientError, OSError, tarfile.TarError) as caught:
        raise RunError(
            "LS7262",
            f"the model cannot be downloaded from {address}: {aws.explained(caught)}. The job is complete; "
            "run the same command again",
        ) from None
    shutil.rmtree(folder / "export", ignore_errors=True)
    aside.rename(folder / "export")
