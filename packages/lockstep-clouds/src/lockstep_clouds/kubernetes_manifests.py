"""Kubernetes manifests of a run: an Indexed Job and a headless Service, or a TrainJob of Kubeflow.

In: a run and the launcher's options. Out: manifests for `kubectl apply`. No cluster is contacted.

Each machine is one pod; pods rendezvous at the name of the first. The pod failure policy interprets exit statuses: 2
(an invalid run file) fails the job at once; 75 (stopped, with a checkpoint) and evictions restart the pod without
counting; any other status counts towards `launch.max_restarts`.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.config import error_messages as messages
from lockstep.config.errors import STOPPED
from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection
from lockstep_clouds.code_bundle import inside, modules_of, pairs

OUTPUTS, RUN_FOLDER, CACHE = "/lockstep", "/etc/lockstep", "/cache"
PORT = 29400
GROUP = "trainer.kubeflow.org"
# Annotation with a pod's index in an Indexed Job; Kubeflow's JobSet creates Indexed Jobs, too.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def name_of(run: Run) -> str:
    """Name of all objects of a run in a namespace, the same for every attempt."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:30].strip("-")
    digest = hashlib.sha256(f"{run.name} {run.folder}".encode()).hexdigest()[:6]
    return f"lockstep-{slug or 'run'}-{digest}"


def output_of(run: Run) -> str:
    """Return the path of OUTPUT in the pods, on the volume of `launch.pvc`."""
    return f"{OUTPUTS}/{name_of(run).removeprefix('lockstep-')}"


def manifests(run: Run, options: Any) -> list[dict[str, Any]]:
    """Return all manifests in the order in which to apply them. Errors: `RunError`, naming the key."""
    check(run, options)
    name = name_of(run)
    modules = modules_of(run)
    # the Service of an Indexed Job; Kubeflow's JobSet creates one with the TrainJob's name
    first = f"{name}-node-0-0.{name}" if options.kubeflow else f"{name}-0.{name}"
    there = run.model_copy(
        update={"output": output_of(run), "launch": inside(run.launch, options.machines, f"{first}:{PORT}")}
    )
    texts = {"run.yaml": there.dump()} | {_key(m): _text(m, path) for m, path in modules.items()}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(run, options),
        "data": texts,
    }
    if sum(map(len, texts.values())) > 900_000:
        raise RunError(
            "LS7240", "the run file and your modules exceed the size of a ConfigMap; put them into the image"
        )
    if options.kubeflow:
        return [config, training_runtime(run, options), train_job(run, options)]
    return [config, service(run, options), job(run, options)]


def _key(module: str) -> str:
    """Return a file's key in the ConfigMap. ConfigMaps have no folders, so `/` becomes `..`, which no module
    contains."""
    return module.replace("/", "..")


def _text(module: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RunError(
            "LS7241", f"{module} is not a text file, so it cannot be bundled; put its package into the image"
        ) from None


def dump(objects: list[dict[str, Any]]) -> str:
    """Format objects as one YAML file."""
    return "---\n".join(messages.dump_yaml(m, sort_keys=False, width=110) for m in objects)


def check(run: Run, options: Any) -> None:
    """Check that pods can use all options, paths and devices of the run. Errors: `RunError`."""
    for key, what in (
        ("image", "a container image that holds lockstep; docker/Dockerfile builds one"),
        ("pvc", "the name of a PersistentVolumeClaim for OUTPUT (checkpoints and the model)"),
    ):
        if getattr(options, key) is None:
            raise RunError("LS7242", f"launch.{key}: missing; kubernetes needs {what}")
    mounts = [OUTPUTS, *volumes_of(options).values()]
    for key, path in _named_paths(run):
        if any(PurePosixPath(path).is_relative_to(mount) for mount in mounts):
            continue
        if glob.glob(str(Path(path).expanduser())):
            raise RunError(
                "LS7243",
                f"{key}: {path} is a path of this machine, which pods cannot see. Put it on a volume, mount the "
                "volume with launch.volumes=[CLAIM=/data] and write /data/... here, or use a Hub id",
            )
    if run.launch.device == "cuda" and not options.gpus:
        raise RunError(
            "LS7244",
            "launch.device: cuda, but launch.gpus is 0; set launch.gpus to the GPUs per pod, or launch.device=cpu",
        )
    places = options.gpus * run.launch.processes_per_gpu
    if places and run.launch.processes != "auto" and int(run.launch.processes) > places:
        raise RunError(
            "LS7245",
            f"launch.processes: {run.launch.processes} per pod, but launch.gpus is {options.gpus} per pod; "
            "make them equal",
        )
    if (hidden := messages.secret({"launch": {"environment": pairs("environment", options.environment)}})) is not None:
        raise RunError(
            "LS7246", f"{hidden} looks like a secret. Put it into a Secret of the cluster and name it in launch.secrets"
        )


def _named_paths(run: Run) -> Iterator[tuple[str, str]]:
    """Values of the run file that may be local paths, by key."""
    several = {f"data.sources: {entry.name}: ": entry for entry in run.data.sources or ()}
    for place, entry in several.items() if several else [("data.", run.data)]:
        # beside a source, these keys name its splits or files in it
        for key in ("source",) if entry.source is not None else ("train", "validation", "test"):
            value = getattr(entry, key)
            yield from ((place + key, path) for path in (value if isinstance(value, list) else [value]) if path)
    for section in ("model", "tokenizer"):
        if (path := getattr(run, section).source) is not None:
            yield f"{section}.source", path


def volumes_of(options: Any) -> dict[str, str]:
    """Map claims to paths in the pods. Errors: `RunError`."""
    claims = pairs("volumes", options.volumes, "CLAIM=/path")
    for claim, path in claims.items():
        if not path.startswith("/"):
            raise RunError("LS7247", f"launch.volumes: {claim}={path}: the path in the pods must begin with /")
    return claims


def metadata(run: Run, options: Any) -> dict[str, Any]:
    name = name_of(run)
    labels = {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": name}
    return {"name": name, "namespace": options.namespace, "labels": labels}


def service(run: Run, options: Any) -> dict[str, Any]:
    """Service that gives each pod of the Job a resolvable name, even before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(run, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name_of(run)},
            "ports": [{"name": "meet", "port": PORT}],
        },
    }


def job(run: Run, options: Any) -> dict[str, Any]:
    """Job for a cluster without Kubeflow."""
    spec = {"completionMode": "Indexed", "completions": options.machines, "parallelism": options.machines}
    template = {"metadata": {"labels": metadata(run, options)["labels"]}, "spec": pod(run, options, "lockstep")}
    template["spec"]["subdomain"] = name_of(run)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(run, options),
        "spec": spec | failure_policy(run.launch, options, "lockstep") | {"template": template},
    }


def training_runtime(run: Run, options: Any) -> dict[str, Any]:
    """Kubeflow runtime with all pod settings; a TrainJob only refers to it."""
    template = {"spec": pod(run, options, "node")}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{GROUP}/trainjob-ancestor-step": "trainer"}},
            "spec": failure_policy(run.launch, options, "node") | {"template": template},
        },
    }
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(run, options),
        "spec": {
            "mlPolicy": {"numNodes": options.machines, "torch": {}},
            "template": {"spec": {"replicatedJobs": [node]}},
        },
    }


def train_job(run: Run, options: Any) -> dict[str, Any]:
    """TrainJob for a cluster with Kubeflow Trainer 2."""
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(run, options),
        "spec": {
            "runtimeRef": {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": name_of(run)},
            "trainer": {"numNodes": options.machines, "numProcPerNode": processes_of(run.launch, options)},
        },
    }


def processes_of(launch: LaunchSection, options: Any) -> int:
    """Processes per pod: `launch.processes`; auto: `launch.processes_per_gpu` per GPU. Errors: `RunError`."""
    if launch.processes != "auto":
        return int(launch.processes)
    if options.gpus:
        return int(options.gpus * launch.processes_per_gpu)
    raise RunError(
        "LS7248", "launch.processes: auto is the number of GPUs of a pod, and launch.gpus sets none; set a number"
    )


def failure_policy(launch: LaunchSection, options: Any, container: str) -> dict[str, Any]:
    """Pod failure policy for exit statuses; see the module's docstring."""

    def on(status: int) -> dict[str, Any]:
        return {"containerName": container, "operator": "In", "values": [status]}

    return {
        "backoffLimit": launch.max_restarts * options.machines,  # the pods of all machines fail together
        "podReplacementPolicy": "Failed",  # replace a pod only after it has ended: two would write the same files
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": on(2)},
                {"action": "Ignore", "onExitCodes": on(STOPPED)},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
    }


def _folders(run: Run) -> dict[str, Any]:
    """Return the `items` of the ConfigMap volume, which put files back into folders; {} if no file is in a folder."""
    modules = modules_of(run)
    if not any("/" in module for module in modules):
        return {}
    return {"items": [{"key": _key(path), "path": path} for path in ("run.yaml", *sorted(modules))]}


def pod(run: Run, options: Any, container: str) -> dict[str, Any]:
    """Pod of one machine. SIGTERM reaches `lockstep`, which saves and ends with 75 within the grace period."""
    amounts = {"cpu": str(options.cpus), "memory": options.memory}
    limits = {"memory": options.memory} | ({"nvidia.com/gpu": str(options.gpus)} if options.gpus else {})
    words = ["python", "-m", "lockstep", "train", f"{RUN_FOLDER}/run.yaml"]
    if options.machines > 1:
        words.append("launch.node_rank=$(LOCKSTEP_NODE_RANK)")
    mounts = {"outputs": OUTPUTS, "run": RUN_FOLDER, "cache": CACHE, "shm": "/dev/shm"}
    volumes: list[dict[str, Any]] = [
        {"name": "outputs", "persistentVolumeClaim": {"claimName": options.pvc}},
        {"name": "run", "configMap": {"name": name_of(run)} | _folders(run)},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    for number, (claim, path) in enumerate(volumes_of(options).items()):
        mounts[f"volume-{number}"] = path
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
        "containers": [
            {
                "name": container,
                "image": options.image,
                "command": words,
                "env": environment(options),
                "ports": [{"name": "meet", "containerPort": PORT, "protocol": "TCP"}],
                "resources": {"requests": amounts, "limits": limits},
                "volumeMounts": [
                    {"name": name, "mountPath": path} | ({"readOnly": True} if name == "run" else {})
                    for name, path in mounts.items()
                ],
                **probes(run, options),
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
        "volumes": volumes,
    }


def probes(run: Run, options: Any) -> dict[str, Any]:
    """Probes that restart a pod whose job writes nothing for `launch.stuck_minutes`. All pods watch the same file,
    written by rank 0; the first probe waits until it is newer than the mounted run file.

    `launch.hang_timeout_s` detects ranks that wait for each other much sooner; this probe is for any other hang.
    """
    if not options.stuck_minutes:
        return {}
    file = f"{output_of(run)}/metrics.jsonl"
    begun = {"exec": {"command": ["sh", "-c", f'test -n "$(find {file} -newer {RUN_FOLDER}/run.yaml)"']}}
    going = {"exec": {"command": ["sh", "-c", f'test -n "$(find {file} -mmin -{options.stuck_minutes})"']}}
    return {
        "startupProbe": begun | {"periodSeconds": 60, "timeoutSeconds": 30, "failureThreshold": options.stuck_minutes},
        "livenessProbe": going | {"periodSeconds": 60, "timeoutSeconds": 30, "failureThreshold": 2},
    }


def environment(options: Any) -> list[dict[str, Any]]:
    """Environment variables of the container; secrets by reference. Errors: `RunError`."""
    plain = {
        "LOCKSTEP_CACHE": f"{CACHE}/lockstep",
        "HF_HOME": f"{CACHE}/huggingface",
        "HOME": CACHE,
        "PYTHONPATH": RUN_FOLDER,
        "PYTHONUNBUFFERED": "1",
    }
    variables: list[dict[str, Any]] = [{"name": "LOCKSTEP_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}]
    variables += [{"name": k, "value": v} for k, v in (plain | pairs("environment", options.environment)).items()]
    for variable, reference in pairs("secrets", options.secrets, "VARIABLE=SECRET/KEY").items():
        secret, slash, key = reference.partition("/")
        if not slash or not secret or not key:
            raise RunError("LS7249", f"launch.secrets: {variable}={reference} invalid; expected VARIABLE=SECRET/KEY")
        variables.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return variables
