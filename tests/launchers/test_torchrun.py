"""The launchers `torchrun` and `accelerate` on one machine: plans, refusals, a real job each, and the messages that
machines exchange when they meet."""

import dataclasses
import json
import re
import shlex
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import EventSource
from torch.distributed.elastic.multiprocessing.api import RunProcsResult

from lockstep.config.plugins import find
from lockstep.config.run import Run, RunError, load
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.launchers.accelerate import Accelerate
from lockstep.launchers.launcher import LaunchPlan
from lockstep.launchers.processes.elastic_agent import Agent, run_agent
from lockstep.launchers.processes.elastic_rendezvous import ElasticRendezvous, Limits, Node
from lockstep.launchers.start import joining, run_as_rank
from lockstep.launchers.torchrun import Torchrun, node_range
from lockstep.training import consistency_check
from lockstep.training.consistency_check import agree, disagreement, facts, fingerprint
from lockstep.training.resolve import for_rank
from lockstep.training.session import join_ranks
from lockstep.training.train_job import console_of_other_machine
from support.command import LOCKSTEP, RUN, bits, ended, free_port, start, step_of, until, write
from support.documents import chapters
from support.harness import lean, run_on, tiny
from support.messages import raises
from support.places import ROOT

MEET = "launch.rendezvous=10.0.0.1:29400"


def job(*overrides: str, name: str = "torchrun") -> Run:
    return tiny("launch.processes=2", f"launch.name={name}", *overrides)


# -- plans -----------------------------------------------------------------------------------------------------------


def test_the_plan_of_two_machines() -> None:
    plan = Torchrun().plan(job("launch.machines=2", MEET, "launch.max_restarts=3"))
    assert plan.processes == 4
    assert shlex.join(plan.command[1:]) == (
        "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d "
        "--rdzv-endpoint=10.0.0.1:29400 -m lockstep train RUN.yaml"
    )
    assert plan.variables == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TOKENIZERS_PARALLELISM": "false"}
    assert plan.notes[0] == (
        "start the same command on 2 machines; they meet at 10.0.0.1:29400, each starts 2 processes"
    )


def test_the_plan_of_one_to_four_machines() -> None:
    plan = Torchrun().plan(job("launch.machines=1:4", MEET, "launch.max_restarts=3", "launch.interface=eth1"))
    assert plan.processes == 8
    assert "--nnodes=1:4" in plan.command
    assert plan.variables["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "a failed machine costs a restart" in plan.notes[-1]


def test_the_plan_of_accelerate() -> None:
    plan = Accelerate().plan(job("launch.machines=2", "launch.machine_rank=1", MEET, name="accelerate"))
    assert plan.processes == 4
    assert shlex.join(plan.command[1:]) == (
        "-m accelerate.commands.launch --num_machines=2 --num_processes=4 --multi_gpu --machine_rank=1 "
        "--rdzv_backend=static --main_process_ip=10.0.0.1 --main_process_port=29400 --mixed_precision=no "
        "--dynamo_backend=no --num_cpu_threads_per_process=1 --module lockstep train "
        "outputs/tiny/launch/machine-1.yaml"
    )
    assert plan.variables == {
        "LOCKSTEP_WORLD_SIZE": "4",
        "LOCKSTEP_LAUNCHER": "accelerate",
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "1",
    }
    (text,) = plan.files.values()
    assert yaml.safe_load(text)["launch"]["machine_rank"] == 1


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("torchrun", ["launch.machines=2"], ("LS7433",)),
        ("torchrun", ["launch.machines=2", "launch.rendezvous=host"], ("LS7020", "launch.rendezvous")),
        ("torchrun", ["launch.machines=5", MEET], ("LS1104", "launch.machines", "5", "8")),
        ("torchrun", ["launch.machines=1:2", MEET], ("LS7432",)),
        ("torchrun", ["launch.machines=3:2", MEET, "launch.max_restarts=1"], ("LS7430",)),
        ("torchrun", ["launch.machines=two", MEET], ("LS1002", "launch.machines")),
        ("torchrun", ["launch.keep_alive_timeout_s=1"], ("LS7431", "1")),
        ("torchrun", ["launch.machine=2"], ("LS1000", "'launch.machine'", "'machines'")),
        ("accelerate", ["launch.machines=2"], ("LS7201",)),
        ("accelerate", ["launch.machines=2", "launch.machine_rank=2", MEET], ("LS7200", "2")),
        ("accelerate", ["launch.machines=5", MEET], ("LS1104", "8")),
    ],
)
def test_invalid_keys_are_refused_before_the_start(name: str, overrides: list[str], said: tuple[str, ...]) -> None:
    launcher: Any = find("launchers", name)
    with raises(*said):
        launcher().plan(job(*overrides, name=name))


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "tcp"])
def test_every_key_is_documented(name: str) -> None:
    page = chapters("how-to/launchers.md", "how-to/torchrun.md")
    keys = find("launchers", name).Options.model_fields  # type: ignore[attr-defined]
    assert [key for key in keys if f"launch.{key}" not in page] == []


def test_machines_in_a_run_file_are_no_number_to_base_60(tmp_path: Path) -> None:
    text = yaml.safe_dump(RUN).replace("launch:\n", f"launch:\n  name: torchrun\n  {MEET[7:].replace('=', ': ')}\n")
    (tmp_path / "run.yaml").write_text(text.replace("  name: torchrun\n", "  name: torchrun\n  machines: 1:4\n"))
    run = load(tmp_path / "run.yaml", [])
    assert node_range(Torchrun.options(run.launch).machines) == (1, 4)
    assert Torchrun.options(load(None, [], yaml.safe_load(run.dump())).launch).machines == "1:4"  # as it was written


def test_addresses_that_do_not_exist_are_refused_at_once(tmp_path: Path) -> None:
    for name in ("torchrun", "accelerate"):
        run = job(f"output={tmp_path}", "launch.machines=2", "launch.rendezvous=nowhere.invalid:1", name=name)
        launcher: Any = find("launchers", name)()
        with raises("LS7021", "launch.rendezvous", "'nowhere.invalid'"):
            launcher.start(launcher.plan(run))


# -- detection of the launcher ---------------------------------------------------------------------------------------


def test_accelerate_that_starts_one_process_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    # the launcher sets it if several ranks were requested, and then starts one
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    with raises("LS7413"):
        joining()


def test_accelerate_with_one_process_is_a_job_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that the test restores them afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert joining()
    assert World(tiny()).size == 1


def test_world_size_differs_from_the_requested_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCKSTEP_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCKSTEP_STATUS_FILE", str(tmp_path / "status"))
    with raises("LS7411", "4", "1"):
        run_as_rank(tiny())
    assert (tmp_path / "status").read_text() == "2"


# -- agreement between ranks -----------------------------------------------------------------------------------------


def facts_of(run: Run) -> dict[str, str]:
    return facts(Job.of(run).with_data())


def test_a_disagreement_names_keys_values_and_hosts() -> None:
    first, second = facts_of(tiny()), facts_of(tiny("seed=3", "optim.learning_rate=0.1", "data.limit=90"))
    assert disagreement([("a", first), ("b", facts_of(tiny("output=elsewhere", "launch.processes=2")))]) == ""
    said = disagreement([("a", first), ("b", second), ("c", first)])
    assert "  seed: 0 on a, c, 3 on b" in said
    assert "  optim.learning_rate: 0.005 on a, c, 0.1 on b" in said
    assert "  the data: " in said
    said = disagreement([("a", first), ("b", first | {"version of torch": "1.0"})])
    assert said.count("\n") == 2
    assert "1.0 on b" in said


def test_a_model_s_folder_is_compared_by_its_files(tmp_path: Path) -> None:
    found = []
    for name, last in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(3 * 2**20) + last)
        found.append(fingerprint(tmp_path / name))
    assert found[0] == found[1] != found[2]


def _refused(world: World, threads: int) -> str:
    run = tiny()
    world.threads = threads if world.rank else 1
    if world.rank and threads > 1:
        consistency_check.instructions = lambda: "another"
    try:
        agree(Job.of(run).with_data(), world, {})
    except RunError as caught:
        return str(caught)
    return ""


@pytest.mark.processes
def test_ranks_with_different_threads_or_instructions_do_not_train() -> None:
    assert run_on(2, _refused, 1) == ["", ""]
    first, second = run_on(2, _refused, 2)
    assert first == second
    assert f"launch.threads: 1 on {socket.gethostname()} (rank 0), 2 on {socket.gethostname()} (rank 1)" in first
    assert f"another on {socket.gethostname()} (rank 1)" in first


# -- rendezvous ------------------------------------------------------------------------------------------------------


def _of_other_versions(world: World, run: Run) -> str:
    if world.rank == 1:
        installed = consistency_check.version
        consistency_check.version = lambda name: "0.1" if name == "accelerate" else installed(name)
    try:
        join_ranks(for_rank(run, world), world)
    except RunError as caught:
        return str(caught)
    return ""


@pytest.mark.processes
@pytest.mark.extras
def test_machines_with_different_engine_versions_do_not_train() -> None:
    version = pytest.importorskip("accelerate").__version__
    said = run_on(2, _of_other_versions, tiny("strategy.name=hf_accelerate"), joined=False)
    assert said[0] == said[1]
    here = socket.gethostname()
    assert f"  version of accelerate: {version} on {here} (rank 0), 0.1 on {here} (rank 1)" in said[0]
    assert run_on(2, _of_other_versions, tiny(), joined=False) == ["", ""]  # ddp computes without it


def test_which_machine_gets_rank_0() -> None:
    plain = Node("a", "10.0.0.9", 1)
    later = Node("b", "10.0.0.10", 1)  # as text it would sort first
    holder = dataclasses.replace(later, holds=True)
    assert sorted([later, plain], key=lambda m: m.precedence) == [plain, later]
    assert sorted([plain, holder], key=lambda m: m.precedence) == [holder, plain]
    wished = dataclasses.replace(plain, place=0)
    assert sorted([holder, wished], key=lambda m: m.precedence) == [wished, holder]
    # the output folder is not shared: this is where the newest checkpoint is
    saved = dataclasses.replace(plain, step=20)
    assert sorted([holder, wished, saved], key=lambda m: m.precedence)[0] == saved


def met(port: int, holds: bool, host: str = "a", most: int = 1) -> ElasticRendezvous:
    return ElasticRendezvous("127.0.0.1", port, 1, most, Node(host, "127.0.0.1", 1, holds=holds), Limits(20, 1, 60))


def test_a_machine_with_another_run_is_not_admitted() -> None:
    first = met(0, True, most=2)
    first.admit({"seed": "0"})
    first.next_rendezvous()
    second = met(first.port, False, "b", most=2)
    with raises("LS7005", "seed", "0", "1"):
        second.admit({"seed": "1"})
    assert second.get_run_id() == first.get_run_id()
    assert first.ended() is None  # the job goes on without it
    first.end(1, "why")
    end = second.ended()
    assert end is not None
    assert (end.status, end.host, end.text) == (1, "a", "why")
    first.shutdown()
    third = met(first.port, False)  # a store that outlives a job is ready for the next
    assert third.get_run_id() != first.get_run_id()
    third.admit({"seed": "2"})
    assert third.ended() is None


def test_two_machines_join_in_order_and_leave_together() -> None:
    limits = Limits(20, 1, 60)
    first = ElasticRendezvous("127.0.0.1", 0, 2, 2, Node("a", "127.0.0.1", 1, holds=True), limits)
    second = ElasticRendezvous("127.0.0.1", first.port, 2, 2, Node("b", "127.0.0.1", 2, place=0), limits)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda rendezvous: rendezvous.next_rendezvous(), (first, second))
        assert (one.rank, two.rank) == (1, 0)  # as b requested
        assert [node.host for node in first.nodes] == [node.host for node in second.nodes] == ["b", "a"]
        ports = {found.bootstrap_store_info.master_port for found in (one, two)}
        assert len(ports) == 1  # of a store on b's machine
        assert first.lost() == second.lost() == []
        assert not second.grows()
        first.grow()
        assert second.grows()
        list(pool.map(lambda rendezvous: rendezvous.leave_together(), (first, second)))
    second.end(75, "stopped on request")
    assert second.ended() is None  # its own message
    end = first.ended()
    assert end is not None
    assert end.status == 75
    assert second.shutdown()
    first.shutdown()


def test_unrecorded_events_look_up_no_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("socket.getfqdn", lambda name="": asked.append(name) or name)
    rendezvous: Any = met(0, True)
    agent = Agent(WorkerSpec("lockstep", 1, rendezvous, entrypoint=print), rendezvous, tiny(), print)
    assert (
        agent._construct_event("FAILED", EventSource.WORKER, raw_error="").name == "torchelastic.worker.status.FAILED"
    )
    assert not asked
    LocalElasticAgent._construct_event(agent, "FAILED", EventSource.WORKER, raw_error="")
    assert asked, "torch elastic's own does, or calls it otherwise now"
    rendezvous.shutdown()


def test_strings_of_a_run_reach_ranks_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(*_: Any, entrypoint: Any, args: Any, **__: Any) -> Any:
        entrypoint(*args[0])
        finished = RunProcsResult(return_values={0: 0})
        return SimpleNamespace(pids=lambda: {0: 4}, wait=lambda _: finished, close=lambda *_: None)

    monkeypatch.setattr(local_elastic_agent, "start_processes", start)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    plan, rendezvous = LaunchPlan(tiny(), 1, []), met(0, True)
    arguments = ('{"prompt": "$$x$$ ${local_rank}"}', ("train",), {})
    assert run_agent(plan, 1, rendezvous, lambda *given: started.extend(given), arguments, print) == 0
    assert tuple(started) == arguments


@pytest.mark.parametrize(
    ("rank", "local_rank", "slurm", "speaks"), [(0, 0, 0, 0), (1, 1, 0, 0), (2, 0, 0, 1), (2, 0, 1, 0)]
)
def test_one_rank_of_every_other_machine_says_where_the_model_is(
    rank: int,
    local_rank: int,
    slurm: int,
    speaks: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World(run := tiny())
    world.rank, world.local_rank = rank, local_rank
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_PROCID", "2")
    console_of_other_machine(run.track, world).say("on host-0")
    assert capsys.readouterr().out == "on host-0\n" * speaks


# -- real jobs -------------------------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


@pytest.mark.processes
@linux
@pytest.mark.usefixtures("nobody_is_left")
def test_torchrun_on_one_machine_stops_and_resumes(tmp_path: Path, cache: Path, untouched: Path) -> None:
    write(tmp_path)
    command = [*LOCKSTEP, "train", "run.yaml", "launch.name=torchrun", f"launch.rendezvous=127.0.0.1:{free_port()}"]
    process = start(command, tmp_path, cache)
    until(lambda: step_of(tmp_path) >= 12, "step 12", process)
    process.terminate()
    status, out, err = ended(process)
    assert status == 75, err
    assert "stopped on request after step" in out
    status, out, err = ended(start(command, tmp_path, cache))
    assert status == 0, err
    assert "ranks      ranks 0, 1 on" in out
    assert "launcher torchrun" in out
    assert "\nrun        " not in out  # the first line says it
    assert bits(tmp_path) == bits(untouched)


@pytest.mark.long
@pytest.mark.processes
@linux
@pytest.mark.usefixtures("nobody_is_left")
def test_accelerate_on_one_machine_stops_and_resumes(tmp_path: Path, cache: Path, untouched: Path) -> None:
    pytest.importorskip("accelerate")
    write(tmp_path)
    command = [*LOCKSTEP, "train", "run.yaml", "launch.name=accelerate"]
    process = start(command, tmp_path, cache)
    until(lambda: step_of(tmp_path) >= 12, "step 12", process)
    process.terminate()
    status, out, err = ended(process)
    assert status == 75, err
    assert not re.search("Traceback|elastic", err), err  # torch elastic prints a long message at the end
    status, out, err = ended(start(command, tmp_path, cache))
    assert status == 0, err
    assert "launcher accelerate" in out
    assert bits(tmp_path) == bits(untouched)
    assert json.loads((tmp_path / "out/launch.json").read_text())["status"] == 0


@pytest.mark.processes
@linux
@pytest.mark.usefixtures("nobody_is_left")
def test_accelerate_s_own_command(tmp_path: Path, cache: Path, untouched: Path) -> None:
    pytest.importorskip("accelerate")
    write(tmp_path)
    (tmp_path / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n"
        "mixed_precision: 'no'\nuse_cpu: true\nmain_process_port: 0\n"
    )
    own = [sys.executable, "-m", "accelerate.commands.launch", "--config_file=accelerate.yaml"]
    status, out, err = ended(start([*own, "-m", "lockstep", "train", "run.yaml"], tmp_path, cache))
    assert status == 0, err
    assert "accelerate launch" in out
    assert bits(tmp_path) == bits(untouched)
    # asked for two on the CPU, Accelerate starts one in silence; lockstep prints a message
    own = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
    status, out, err = ended(start([*own, "-m", "lockstep", "train", "run.yaml", "output=two"], tmp_path, cache))
    assert status != 0
    assert "was given several processes but started this one as a single process" in err
    assert not (tmp_path / "two/metrics.jsonl").exists()


@pytest.mark.long
@pytest.mark.processes
@linux
@pytest.mark.usefixtures("nobody_is_left")
def test_the_task_for_skypilot_in_the_documents(tmp_path: Path, cache: Path, untouched: Path) -> None:
    """Its `run` lines run on two simulated nodes of this machine, with SkyPilot's variables."""
    page = (ROOT / "docs/how-to/clouds.md").read_text().partition("## SkyPilot")[2]
    task = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    write(tmp_path)
    lines = task["run"].replace("~/venv/bin/lockstep", shlex.join(LOCKSTEP)).replace("/outputs/run", "out")
    lines = lines.replace("29400", str(free_port()))
    nodes = [
        start(
            ["bash", "-c", lines],
            tmp_path,
            cache,
            **lean(),
            SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.1",
            SKYPILOT_NUM_NODES=str(task["num_nodes"]),
            SKYPILOT_NODE_RANK=rank,
            SKYPILOT_NUM_GPUS_PER_NODE="1",
        )
        for rank in "01"
    ]
    for status, _, err in map(ended, nodes):
        assert status == 0, err
    assert bits(tmp_path) == bits(untouched)
