"""Kubernetes: manifests against the schemas of the API server and of Kubeflow's CRDs, and kubectl as a stand-in that
writes down what it is asked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.distributed import job_record
from lockstep_clouds.kubernetes import Kubernetes, state_from
from lockstep_clouds.kubernetes_manifests import name_of, output_of
from support.golden import compare
from support.kubernetes import LAUNCH, RUN
from support.messages import mentions

RICH = {
    "gpus": 4,
    "processes": "auto",
    "device": "cuda",
    "namespace": "training",
    "max_restarts": 3,
    "volumes": ["corpus=/data"],
    "secrets": ["HF_TOKEN=hub/token"],
    "environment": ["NCCL_DEBUG=WARN"],
}
CASES = {"plain": {}, "rich": RICH, "one": {"machines": 1}}


def run_of(**launch: Any) -> Run:
    return load(None, [], RUN | {"launch": LAUNCH | launch})


def found(**launch: Any) -> list[dict[str, Any]]:
    (text,) = Kubernetes().plan(run_of(**launch)).files.values()
    return list(yaml.safe_load_all(text))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return tmp_path


# -- manifests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kubeflow", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_manifests_are_as_written_down(case: str, kubeflow: bool) -> None:
    made = found(**CASES[case], kubeflow=kubeflow)
    held = made[0]["data"].pop("run.yaml")  # of which what matters here
    there = yaml.safe_load(held)
    made[0]["data"]["run.yaml"] = yaml.safe_dump({"output": there["output"], "launch": there["launch"]})
    compare(f"kubernetes-{case}{'-kubeflow' * kubeflow}.yaml", yaml.safe_dump_all(made, sort_keys=False, width=110))


@pytest.mark.extras
@pytest.mark.parametrize("case", CASES)
def test_manifests_are_valid_for_the_api_server(case: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs the extra cloud-tests")
    for manifest in found(**CASES[case]):
        validate.validate(manifest, "1.31", strict=True)
    broken = found(**CASES[case])[2]
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 5  # a key that there is not
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.31", strict=True)


@pytest.mark.extras
@pytest.mark.parametrize("case", CASES)
def test_manifests_are_valid_for_kubeflow(case: str) -> None:
    """Its models drop what they do not know: what comes back must be what went in."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the extra cloud-tests")
    _, runtime, job = found(**CASES[case], kubeflow=True)
    for manifest, model in ((runtime, models.TrainerV1alpha1TrainingRuntime), (job, models.TrainerV1alpha1TrainJob)):
        assert model.from_dict(manifest).to_dict() == manifest
    runtime["spec"]["mlPolicy"]["nodes"] = 2
    assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() != runtime


@pytest.mark.parametrize("kubeflow", [False, True])
def test_pods_get_run_file_and_variables(kubeflow: bool) -> None:
    made = found(**RICH, kubeflow=kubeflow)
    text = yaml.safe_dump_all(made)
    there = yaml.safe_load(made[0]["data"]["run.yaml"])
    assert load_of(made[0]["data"]["run.yaml"]).launch.name == "torchrun"
    name = name_of(run_of(**RICH))
    first = f"{name}-node-0-0.{name}" if kubeflow else f"{name}-0.{name}"
    assert there["launch"]["rendezvous"] == f"{first}:29400"
    assert there["launch"]["processes"] == 4
    assert there["output"] == output_of(run_of(**RICH)).replace("'", "")
    assert "secretKeyRef" in text
    assert "HF_TOKEN" in text
    job = made[1]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"] if kubeflow else made[2]
    spec = job["spec"]
    rules = {
        r["onExitCodes"]["values"][0]: r["action"] for r in spec["podFailurePolicy"]["rules"] if "onExitCodes" in r
    }
    assert rules == {2: "FailJob", 75: "Ignore"}
    assert spec["backoffLimit"] == 6  # three restarts of two pods
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a pod failure policy asks for it
    container = spec["template"]["spec"]["containers"][0]
    names = {r["onExitCodes"]["containerName"] for r in spec["podFailurePolicy"]["rules"] if "onExitCodes" in r}
    assert names == {container["name"]}
    mounted = {m["name"] for m in container["volumeMounts"]}
    assert mounted == {v["name"] for v in spec["template"]["spec"]["volumes"]}


def load_of(text: str) -> Run:
    path = Path("there.yaml")
    path.write_text(text)
    try:
        return load(path, ["launch.node_rank=1"])
    finally:
        path.unlink()


@pytest.mark.processes
def test_the_container_takes_the_command_and_the_probes_work(here: Path) -> None:
    """The command's words, with the variable as Kubernetes fills it in, make a run; the probes are run by a shell."""
    made = found()
    container = made[2]["spec"]["template"]["spec"]["containers"][0]
    words = [word.replace("$(LOCKSTEP_NODE_RANK)", "1") for word in container["command"]]
    assert words[:4] == ["python", "-m", "lockstep", "train"]
    (here / "there.yaml").write_text(made[0]["data"]["run.yaml"])
    assert load("there.yaml", words[5:]).launch.options["node_rank"] == 1
    file = here / "metrics.jsonl"

    def probe(kind: str) -> int:
        script = container[kind]["exec"]["command"][2]
        inside = f"{output_of(run_of())}/metrics.jsonl"
        assert inside in script
        script = script.replace(inside, str(file)).replace("/etc/lockstep/run.yaml", str(here / "run.yaml"))
        return subprocess.run(["sh", "-c", script], capture_output=True).returncode

    assert probe("startupProbe") != 0
    file.touch()
    os.utime(file, (0, 0))  # of an earlier try
    assert probe("startupProbe") != 0
    assert probe("livenessProbe") != 0
    later = (here / "run.yaml").stat().st_mtime + 10
    os.utime(file, (later, later))
    assert probe("startupProbe") == 0
    assert probe("livenessProbe") == 0


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"image": None}, "launch.image: missing"),
        ({"pvc": None}, "launch.pvc: missing"),
        ({"processes": "auto"}, "launch.gpus sets none"),
        ({"processes": 5}, "2 pods of 5 processes cannot share 8 micro-batches"),
        ({"device": "cuda"}, "launch.gpus is 0"),
        ({"gpus": 1, "processes": 2}, "launch.processes: 2 per pod, but launch.gpus is 1 per pod; make them equal"),
        ({"volumes": ["data=relative"]}, "the path in the pods must begin with /"),
        ({"secrets": ["HF_TOKEN=hub"]}, "expected VARIABLE=SECRET/KEY"),
        ({"environment": ["HF_TOKEN=hf_" + "x" * 30]}, "looks like a secret"),
        ({"memory": "much"}, "launch.memory"),
        ({"namespace": "Not A Name"}, "launch.namespace"),
        ({"nodes": 2}, "unknown key 'launch.nodes'"),
    ],
)
def test_bad_input_is_one_message(
    launch: dict[str, Any], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.yaml").write_text(yaml.safe_dump(RUN | {"launch": LAUNCH | launch}))
    assert main(["plan", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert "hf_xxx" not in said


def test_data_outside_mounted_volumes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "texts").mkdir()
    assert main(["plan", "run.yaml", "data.source=texts"]) == 2
    assert mentions(capsys.readouterr().err, "LS7243")
    assert main(["plan", "run.yaml", "data.source=/data/texts", "launch.volumes=[corpus=/data]"]) == 0


def test_the_plan_is_pure_and_shows_no_secret(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    assert main(["plan", "run.yaml", "launch.secrets=[HF_TOKEN=hub/token]"]) == 0
    said = capsys.readouterr().out
    assert "secretKeyRef" in said
    assert "hf_xxx" not in said
    assert {p.name for p in here.iterdir()} == {"run.yaml"}


def test_without_kubectl(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(here))
    assert main(["train", "run.yaml"]) == 2
    assert mentions(capsys.readouterr().err, "LS7282")
    assert not (here / "out/launch.json").exists()


# -- a cluster that writes down what it is asked ---------------------------------------------------------------------

KUBECTL = """#!{python}
import json, pathlib, sys
root = pathlib.Path({root!r})
words = sys.argv[1:]
with open(root / "asked", "a") as file:
    file.write(json.dumps(words) + "\\n")
answers = json.loads((root / "answers").read_text())
for word, (status, out, err) in answers.items():
    if word in words:
        sys.stdout.write(out), sys.stderr.write(err)
        sys.exit(status)
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "kubectl").write_text(KUBECTL.format(python=sys.executable, root=str(folder)))
        (folder / "kubectl").chmod(0o755)
        self.answers: dict[str, tuple[int, str, str]] = {"can-i": (0, "yes\n", "")}
        self.answer()

    def answer(self, **answers: tuple[int, str, str]) -> None:
        self.answers |= answers
        (self.folder / "answers").write_text(json.dumps(self.answers))

    def has(self, kind: str = "Job", suspend: bool = False, **status: Any) -> None:
        manifest = {"kind": kind, "spec": {"completions": 2, "suspend": suspend}, "status": status}
        self.answer(get=(0, json.dumps(manifest), ""))

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return [" ".join(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def cluster(here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    folder = tmp_path_factory.mktemp("kubectl")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(Kubernetes, "every_s", 0.0)
    return Cluster(folder)


COMPLETE = [{"type": "Complete", "status": "True", "message": "Reached expected number of succeeded pods"}]
FAILED = [{"type": "Failed", "status": "True", "message": "Container lockstep failed with exit code 2"}]


@pytest.mark.processes
def test_submit_then_status_logs_stop(cluster: Cluster, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml", "launch.context=far"]) == 0
    name = name_of(run_of())
    asked = cluster.asked
    assert all(words.startswith("--context far --namespace default") for words in asked)
    assert asked[-1].endswith("apply -f out/launch/kubernetes.yaml")
    assert not any("delete" in words for words in asked)
    assert list(yaml.safe_load_all((here / "out/launch/kubernetes.yaml").read_text()))[2]["kind"] == "Job"
    record = job_record.read(here / "out")
    assert record is not None
    assert (record.launcher, record.job) == ("kubernetes", name)
    cluster.has(ready=2, active=2)
    assert main(["status", "out"]) == 0
    assert "2 of 2 pods ready" in capsys.readouterr().out
    assert main(["train", "run.yaml"]) == 2  # it is being trained
    assert "lockstep stop" in capsys.readouterr().err
    cluster.answer(logs=(0, "[pod/a] step 1\n[pod/b] step 1\n", ""))
    assert main(["logs", "out"]) == 0
    assert "[pod/b] step 1" in capsys.readouterr().out
    run = load("run.yaml", [])
    assert "suspended" in Kubernetes().stop(run.folder, record)
    assert "patch job" in cluster.asked[-1]
    assert '{"spec": {"suspend": true}}' in cluster.asked[-1]


@pytest.mark.processes
def test_a_job_that_ended_is_deleted_before_the_next_try(cluster: Cluster) -> None:
    cluster.has(conditions=FAILED)
    assert main(["train", "run.yaml"]) == 0
    assert [w.split()[2] for w in cluster.asked][-2:] == ["delete", "apply"]


@pytest.mark.processes
def test_a_complete_job_is_not_started_again(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.has(conditions=COMPLETE)
    assert main(["train", "run.yaml"]) == 0
    assert "is complete" in capsys.readouterr().out
    assert not any("apply" in words for words in cluster.asked)


@pytest.mark.processes
def test_waiting_for_a_kubernetes_job_shows_its_log(
    cluster: Cluster, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answer(logs=(0, "step 1\n", ""))
    run = load("run.yaml", ["launch.wait=true"])
    record = job_record.here("kubernetes", 2, job=name_of(run), facts={"kind": "job", "namespace": "default"})
    job_record.write(run.folder, record)
    for conditions, status in ((COMPLETE, 0), (FAILED, 1)):
        cluster.has(conditions=conditions)
        assert Kubernetes().watch(Kubernetes().plan(run), record) == status
        found = job_record.read(run.folder)
        assert found is not None
        assert found.status == status
    assert "exit code 2" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((1, "no\n", ""), "you have no permission to create jobs.batch in default"),
        ((1, "", "The connection to the server localhost:8080 was refused"), "kubectl reaches no cluster"),
    ],
)
def test_cluster_refuses_the_job(
    answer: tuple[int, str, str], message: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answer(**{"can-i": answer})
    assert main(["train", "run.yaml"]) == 2
    assert message in capsys.readouterr().err
    assert not any("apply" in words for words in cluster.asked)


@pytest.mark.processes
def test_a_manifest_that_the_server_refuses(cluster: Cluster, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.answer(apply=(1, "", 'error: namespaces "default" not found'))
    assert main(["train", "run.yaml"]) == 2
    assert 'namespaces "default" not found' in capsys.readouterr().err
    assert not (here / "out/launch.json").exists()


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ({"kind": "Job", "status": {"active": 2, "ready": 0}}, "waiting"),
        ({"kind": "Job", "status": {"active": 2, "ready": 2}}, "running"),
        ({"kind": "Job", "spec": {"suspend": True}, "status": {"active": 1}}, "running"),
        ({"kind": "Job", "spec": {"suspend": True}, "status": {}}, "stopped"),
        ({"kind": "Job", "status": {"conditions": COMPLETE}}, "done"),
        ({"kind": "TrainJob", "status": {"conditions": FAILED}}, "failed"),
        ({"kind": "TrainJob", "status": {"jobsStatus": [{"name": "node", "active": 1, "ready": 1}]}}, "running"),
        ({"kind": "TrainJob", "status": {"jobsStatus": [{"name": "node", "active": 1, "ready": 0}]}}, "waiting"),
        ({"kind": "TrainJob", "spec": {"suspend": True}, "status": {"jobsStatus": [{"active": 1}]}}, "running"),
        ({"kind": "TrainJob", "spec": {"suspend": True}, "status": {"jobsStatus": [{"suspended": 1}]}}, "stopped"),
        ({"kind": "TrainJob"}, "waiting"),
    ],
)
def test_states(found: dict[str, Any], word: str) -> None:
    assert state_from(found).word == word
