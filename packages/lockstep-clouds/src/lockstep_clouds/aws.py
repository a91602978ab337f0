"""AWS functions for the SageMaker launcher: regions, container images, sessions, S3.

In: values from the run file. Out: boto3 clients and addresses, or a `RunError` that says what to set. boto3 is imported
only when AWS is contacted.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.run import RunError

# Region -> AWS account of its PyTorch containers, as in the image tables of the sagemaker package (sagemaker-core 2.20,
# image_uri_config/pytorch.json). Most regions share one account.
_COMMON = "763104351884"
_ACCOUNTS = {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-east-2": "975050140332",
    "ap-northeast-1": _COMMON,
    "ap-northeast-2": _COMMON,
    "ap-northeast-3": "364406365360",
    "ap-south-1": _COMMON,
    "ap-south-2": "772153158452",
    "ap-southeast-1": _COMMON,
    "ap-southeast-2": _COMMON,
    "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322",
    "ap-southeast-5": "550225433462",
    "ap-southeast-6": "633930458069",
    "ap-southeast-7": "590183813437",
    "ca-central-1": _COMMON,
    "ca-west-1": "204538143572",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-central-1": _COMMON,
    "eu-central-2": "380420809688",
    "eu-north-1": _COMMON,
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "eu-west-1": _COMMON,
    "eu-west-2": _COMMON,
    "eu-west-3": _COMMON,
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "mx-central-1": "637423239942",
    "sa-east-1": _COMMON,
    "us-east-1": _COMMON,
    "us-east-2": _COMMON,
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
    "us-west-1": _COMMON,
    "us-west-2": _COMMON,
}
# Version -> tags of the GPU and the CPU image, from the release notes of aws/deep-learning-containers.
TAGS = {
    "2.11": ("2.11-cu130-amzn2023-sagemaker", "2.11-cpu-amzn2023-sagemaker"),
    "2.12": ("2.12-cu130-amzn2023-sagemaker", "2.12-cpu-amzn2023-sagemaker"),
    "2.13": ("2.13-cu133-amzn2023-sagemaker", "2.13-cpu-amzn2023-sagemaker"),
}


def region_of(region_option: str | None) -> str:
    """Return `launch.region`, else the region that AWS tools use on this machine. Errors: `RunError`."""
    region = region_option or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None:
        try:
            import botocore.session

            region = botocore.session.get_session().get_config_variable("region")
        except ImportError:
            pass
    if region is None:
        raise RunError("LS7210", "launch.region: missing; set it, for example to eu-west-1, or set AWS_REGION")
    if region not in _ACCOUNTS:
        near = difflib.get_close_matches(region, _ACCOUNTS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RunError(
            "LS7211",
            f"launch.region: AWS has no PyTorch container in a region {region!r}; {hint}for another region, "
            "set launch.image to your own image",
        )
    return region


def image(version: str, region: str, gpu: bool) -> str:
    """Return the address of AWS's PyTorch container for SageMaker. Errors: `RunError`."""
    if version not in TAGS:
        raise RunError(
            "LS7212",
            f"launch.pytorch: no AWS container for PyTorch {version!r} is known; expected one of "
            f"{', '.join(TAGS)}. For any other, set launch.image",
        )
    ending = ".cn" if region.startswith("cn-") else ""
    tag = TAGS[version][0 if gpu else 1]
    return f"{_ACCOUNTS[region]}.dkr.ecr.{region}.amazonaws.com{ending}/pytorch:{tag}"


OLDEST = {"PyTorch": (2, 11), "Python": (3, 11)}  # oldest versions that lockstep supports, as in pyproject.toml


def check_image(address: str | None) -> None:
    """Check an image in AWS's naming scheme (`pytorch-training:2.1.0-gpu-py310-...`) for versions that are too old;
    other tags are not checked. Errors: `RunError`."""
    _, _, tag = (address or "").rpartition("/")[2].partition(":")
    torch, python = re.match(r"(\d+)\.(\d+)[.\d]*-(?:cpu|gpu|cu\d)", tag), re.search(r"-py(\d)(\d+)\b", tag)
    for what, version_match in (("PyTorch", torch), ("Python", python)):
        if version_match is not None and (version := (int(version_match[1]), int(version_match[2]))) < OLDEST[what]:
            raise RunError(
                "LS7213",
                f"launch.image: {tag} has {what} {'.'.join(map(str, version))}; lockstep needs "
                f"{'.'.join(map(str, OLDEST[what]))} or later. Remove launch.image to use AWS's container for "
                "launch.pytorch",
            )


def check_instance(instance: str, own_image: str | None) -> None:
    """Check that lockstep can compute on an instance type. Errors: `RunError` if not."""
    family = instance.removeprefix("ml.").partition(".")[0]
    if re.match(r"(trn|inf)\d", family):
        why = "it has AWS's own chips; lockstep supports CPUs and NVIDIA GPUs"
    elif family == "p2":
        why = "no current CUDA version supports its GPUs (K80)"
    elif family in ("p3", "p3dn") and own_image is None:
        why = "CUDA 13 in AWS's container does not support its GPUs (V100); set launch.image to an image with CUDA 12"
    elif family.startswith("p6e-gb") and own_image is None:
        why = "it has Arm processors, and AWS's container is for x86; set launch.image to an Arm image"
    else:
        return
    raise RunError("LS7214", f"launch.instance: {instance} cannot be used: {why}")


def has_gpu(instance: str) -> bool:
    """Return whether a SageMaker instance type (ml.g5.xlarge) belongs to a family with NVIDIA GPUs."""
    return re.match(r"ml\.(g|p)\d", instance) is not None


_GPUS = {  # types whose number of GPUs does not follow from their size
    "p2": {"xlarge": 1, "8xlarge": 8, "16xlarge": 16},
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
}
_GPUS_OF_SIZE = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_BY_SIZE = ("g4dn", "g5", "g6", "g6e")  # families whose 16xlarge has one GPU


def gpus_of(instance: str) -> int | None:
    """Return the number of GPUs of a SageMaker instance type (ml.g5.12xlarge: 4), 0 without GPUs, or None if
    unknown."""
    if not has_gpu(instance):
        return 0
    family, _, size = instance.removeprefix("ml.").partition(".")
    if family in _BY_SIZE:
        return 1 if size == "16xlarge" else _GPUS_OF_SIZE.get(size)
    return _GPUS.get(family, {}).get(size)


def session(region: str) -> Any:
    """Return an authenticated boto3 session. Errors: `RunError` if boto3 or credentials are missing, or AWS rejects
    them."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise RunError(
            "LS7215",
            "launch.name: sagemaker needs boto3, which is not installed: pip install 'lockstep-train[sagemaker]'",
        ) from None
    try:
        boto_session = boto3.session.Session(region_name=region)
        if boto_session.get_credentials() is None:
            raise RunError(
                "LS7216",
                "launch.name: sagemaker needs AWS credentials, and none were found in AWS_ACCESS_KEY_ID, "
                "AWS_PROFILE, ~/.aws or the role of this machine. Run `aws configure` or `aws sso login`",
            )
        boto_session.client("sts").get_caller_identity()
    except (BotoCoreError, ClientError) as caught:
        raise RunError("LS7217", f"launch.name: AWS does not accept these credentials: {explained(caught)}") from None
    return boto_session


def explained(caught: Exception) -> str:
    """Return AWS's error message on one line, without request ids."""
    return re.sub(r"\(?RequestID: [^)]*\)?", "", " ".join(str(caught).split())).strip()


def split_s3(address: str) -> tuple[str, str]:
    """Split `s3://bucket/prefix` into bucket and prefix, without slashes at its ends. Errors: `RunError`."""
    match = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", address)
    if match is None:
        raise RunError("LS7218", f"launch.s3: {address!r} is not an S3 address; expected s3://BUCKET/PREFIX")
    return match[1], (match[2] or "").strip("/")


def upload(client: Any, prefix: str, contents: Mapping[str, bytes | Path]) -> None:
    """Upload each content below the address `prefix`. Errors: `RunError`."""
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, folder = split_s3(prefix)
    for name, content in contents.items():
        key = f"{folder}/{name}".lstrip("/")
        try:
            if isinstance(content, Path):
                client.upload_file(str(content), bucket, key)
            else:
                client.put_object(Bucket=bucket, Key=key, Body=content)
        except (BotoCoreError, ClientError, S3UploadFailedError, OSError) as caught:
            raise RunError("LS7219", f"launch.s3: cannot write s3://{bucket}/{key}: {explained(caught)}") from None
