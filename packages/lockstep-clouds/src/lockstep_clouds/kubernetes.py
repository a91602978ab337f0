"""Kubernetes: an Indexed Job and a headless Service, or a TrainJob of Kubeflow Trainer, applied with kubectl.

In: `launch: {name: kubernetes, image: ..., pvc: ..., machines: ..., gpus: ...}`. Out: an exit status. `lockstep plan`
shows the manifests; they are also written to OUTPUT/launch and can be applied by hand. Checkpoints and the model
are on the volume of `launch.pvc`.

It uses kubectl rather than the Python client: cluster users have it, it finds their credentials, and its commands can
be repeated by hand.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from lockstep.config.errors import STOPPED
from lockstep.config.redaction import one_line
from lockstep.config.run import Run, RunError
from lockstep.config.sections import Positive, Section, Steps
from lockstep.distributed import job_record
from lockstep.distributed.job_record import JobRecord, State
from lockstep.launchers.launcher import LaunchPlan, SubmittedJob, write_files
from lockstep.track.console import Console
from lockstep_clouds.code_bundle import distributions_of
from lockstep_clouds.kubernetes_manifests import dump, manifests, name_of, output_of, processes_of


class Kubernetes(SubmittedJob):
    """Pods of a cluster, one per machine."""

    shares_files = False

    class Options(Section):
        """Resources and settings of the pods."""

        image: str | None = Field(None, description="container image that holds lockstep (docker/Dockerfile)")
        pvc: str | None = Field(
            None, description="PersistentVolumeClaim for OUTPUT; with machines > 1 it must be ReadWriteMany"
        )
        namespace: str = Field(
            "default", pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", description="namespace of all objects"
        )
        kubeflow: bool = Field(False, description="a TrainJob of Kubeflow Trainer 2 instead of a plain Job")
        machines: Positive = Field(1, description="pods")
        gpus: Steps = Field(0, description="NVIDIA GPUs of each pod")
        cpus: Positive = Field(4, description="CPU cores per pod")
        memory: str = Field(
            "16Gi", pattern=r"^[1-9]\d*(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$", description="memory of each pod"
        )
        volumes: list[str] = Field(default_factory=list, description="CLAIM=/path of more volumes, for data")
        environment: list[str] = Field(default_factory=list, description="VARIABLE=value, set in the pods")
        secrets: list[str] = Field(default_factory=list, description="VARIABLE=SECRET/KEY of a Secret of the cluster")
        grace_s: Positive = Field(120, description="seconds for a pod to write its checkpoint before it is evicted")
        stuck_minutes: Steps = Field(
            120, description="minutes without a new line in metrics.jsonl after which a pod is restarted; 0: never"
        )
        context: str | None = Field(None, description="kubectl context; default: the current one")
        wait: bool = Field(True, description="follow the log; false: return once submitted")

    # -- the plan ----------------------------------------------------------------------------------------------------

    def plan(self, run: Run) -> LaunchPlan:
        options = self.options(run.launch)
        each = processes_of(run.launch, options)
        processes = options.machines * each
        run.check_shared(processes, f"launch.machines: {options.machines} pods of {each} processes")
        sized = run.with_keys("launch", processes=each)
        objects = manifests(sized, options)
        file = str(run.folder / "launch/kubernetes.yaml")
        notes = [
            f"OUTPUT is {output_of(run)} on the volume of the claim {options.pvc}",
            f"to submit by hand: kubectl apply -f {file}",
        ]
        if packages := distributions_of(run):
            notes.append(f"the image must hold {', '.join(packages)}")
        if options.machines > 1:
            notes.append(f"the claim {options.pvc} must allow ReadWriteMany: pods on several nodes write checkpoints")
        command = next(m for m in objects if m["kind"] in ("Job", "TrainingRuntime"))
        spec = command["spec"]["template"]["spec"]
        if options.kubeflow:
            spec = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        return LaunchPlan(run, processes, spec["containers"][0]["command"], files={file: dump(objects)}, notes=notes)

    # -- submission --------------------------------------------------------------------------------------------------

    def submit(self, plan: LaunchPlan) -> JobRecord | None:
        options = self.options(plan.launch)
        kind, name = kind_of(options.kubeflow), name_of(plan.run)
        facts = {"kind": kind, "namespace": options.namespace, "context": options.context or ""}
        record = job_record.here("kubernetes", plan.processes, job=name, facts=facts)
        allowed(facts)
        state = self.state(plan.folder, record)
        if state.word == "done":
            Console(True).say(f"{kind} {name} is complete")
            self.complete(plan, record)
            return None
        write_files(plan)
        if state.word != "gone":  # an earlier attempt: jobs are immutable, and its results are on the volume
            kubectl(facts, "delete", kind, name, "--wait=true", "--ignore-not-found")
        kubectl(facts, "apply", "-f", *plan.files)
        return record

    def label(self, record: JobRecord) -> str:
        return f"{record.facts['kind']} {record.job} of the namespace {record.facts['namespace']}"

    def complete(self, plan: LaunchPlan, record: JobRecord) -> None:
        Console(True).say(f"the model is in {output_of(plan.run)}/export on the claim {self.options(plan.launch).pvc}")

    # -- a submitted job ---------------------------------------------------------------------------------------------

    def state(self, folder: Path, record: JobRecord) -> State:
        description = kubectl(
            record.facts, "get", record.facts["kind"], str(record.job), "-o", "json", "--ignore-not-found"
        ).strip()
        if not description:
            return State("gone", f"there is no {record.facts['kind']} {record.job} in {record.facts['namespace']}")
        return state_from(json.loads(description))

    def logs(self, folder: Path, record: JobRecord, follow: bool) -> Iterator[str]:
        """Lines of all pods that the cluster still has, each prefixed with the pod's name."""
        while follow and (state := self.state(folder, record)).word == "waiting":
            if state.text:
                yield f"waiting: {state.text}"
            time.sleep(self.every_s)
        label = (
            "jobset.sigs.k8s.io/jobset-name" if record.facts["kind"] == "trainjob" else "batch.kubernetes.io/job-name"
        )
        words = ["logs", "-l", f"{label}={record.job}", "--tail=-1", "--prefix", "--max-log-requests=200"]
        process = subprocess.Popen(
            [*command(record.facts), *words, *(["--follow"] if follow else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
        finally:
            process.terminate()
            process.wait()

    def stop(self, folder: Path, record: JobRecord) -> str:
        kubectl(record.facts, "patch", record.facts["kind"], str(record.job), "--type=merge", "-p", SUSPEND)
        return f"{record.facts['kind']} {record.job} suspended: its pods write a checkpoint and end"


SUSPEND = json.dumps({"spec": {"suspend": True}})


def kind_of(kubeflow: bool) -> str:
    return "trainjob" if kubeflow else "job"


def command(facts: Any) -> list[str]:
    """Return the kubectl command for this namespace and context. Errors: `RunError` if it is not installed."""
    if shutil.which("kubectl") is None:
        raise RunError(
            "LS7282",
            "launch.name: kubernetes needs kubectl, which is not on PATH. Install it, or apply the manifests "
            "of `lockstep plan` on a machine that has it",
        )
    context = ["--context", facts["context"]] if facts.get("context") else []
    return ["kubectl", *context, "--namespace", facts["namespace"]]


def kubectl(facts: Any, *words: str) -> str:
    """Run kubectl and return its standard output. Errors: `RunError` with kubectl's message."""
    done = subprocess.run([*command(facts), *words], capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        reason = one_line(done.stderr or done.stdout, 500)
        raise RunError("LS7283", f"kubectl {words[0]}: {reason or f'status {done.returncode}'}")
    return done.stdout


def allowed(facts: Any) -> None:
    """Check that the cluster answers and that this user may create jobs. Errors: `RunError`."""
    what = "trainjobs.trainer.kubeflow.org" if facts["kind"] == "trainjob" else "jobs.batch"
    done = subprocess.run(
        [*command(facts), "--request-timeout=20s", "auth", "can-i", "create", what],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode == 0:
        return
    reason = " ".join((done.stderr or done.stdout).split())[-400:]
    if done.stdout.strip().startswith("no"):
        hint = ". Is Kubeflow Trainer installed there?" if facts["kind"] == "trainjob" else ""
        raise RunError(
            "LS7284", f"launch.namespace: you have no permission to create {what} in {facts['namespace']}{hint}"
        )
    raise RunError("LS7285", f"launch.name: kubernetes: kubectl reaches no cluster: {reason}")


def state_from(resource: dict[str, Any]) -> State:
    """Return the state of a Job or TrainJob."""
    status, jobs = resource.get("status", {}), resource.get("status", {}).get("jobsStatus", [])
    true = {c["type"]: c for c in status.get("conditions", []) if c.get("status") == "True"}
    for word, code in (("Complete", 0), ("Failed", 1)):
        if word in true:
            return job_record.outcome(code, " ".join(str(true[word].get("message", "")).split()))
    # a TrainJob counts its child Jobs; one whose pods still wait for a node already counts as active
    ready, active = (sum(int(each.get(name, 0)) for each in [status, *jobs]) for name in ("ready", "active"))
    if "Suspended" in true or resource.get("spec", {}).get("suspend"):
        return State("stopped" if not active else "running", "suspended", None if active else STOPPED)
    if resource["kind"] == "TrainJob":
        waits = "its pods start" if active else "its pods are being created"
        return State("running") if ready else State("waiting", waits)
    completions = resource.get("spec", {}).get("completions", 1)
    return State("running" if ready else "waiting", f"{ready} of {completions} pods ready, {active} active")
