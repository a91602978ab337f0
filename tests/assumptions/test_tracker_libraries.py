"""Assumptions about trackers and optuna, tested with their own local stores, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.track.wandb_file import records
from support.assumed import rests_on_it

pytestmark = pytest.mark.slow  # imports each tracker


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return one MLflow store for all tests: creating it takes seconds."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")


@pytest.fixture
def run(store: Any) -> str:
    return store.create_run("0").info.run_id  # type: ignore[no-any-return]


@rests_on_it("src/lockstep/track/mlflow.py")
def test_mlflow_keeps_a_step_twice(store: Any, run: str) -> None:
    """MLflow stores both values if a step is logged twice, so a repeated step must not be logged again."""
    from mlflow.entities import Metric

    store.log_batch(run, metrics=[Metric("loss", 1.0, 1, 3)])
    store.log_batch(run, metrics=[Metric("loss", 2.0, 2, 3), Metric("loss", 4.0, 2, 1)])
    assert sorted((each.step, each.value) for each in store.get_metric_history(run, "loss")) == [
        (1, 4.0),
        (3, 1.0),
        (3, 2.0),
    ]


@rests_on_it("src/lockstep/track/mlflow.py")
def test_mlflow_refuses_another_value_of_a_parameter(store: Any, run: str) -> None:
    """MLflow accepts a parameter again with the same value, and raises for a different one."""
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    for _ in range(2):
        store.log_batch(run, params=[Param("rate", "1")])
    with pytest.raises(MlflowException):
        store.log_batch(run, params=[Param("rate", "2")])
    assert store.get_run(run).data.params == {"rate": "1"}


@rests_on_it("src/lockstep/track/mlflow.py")
def test_mlflow_accepts_metrics_of_an_ended_run(store: Any, run: str) -> None:
    """MLflow accepts metrics for a terminated run, whose status is that of the last set_terminated."""
    from mlflow.entities import Metric

    store.set_terminated(run, "FAILED")
    store.log_batch(run, metrics=[Metric("loss", 1.0, 1, 3)])
    store.set_terminated(run, "FINISHED")
    assert store.get_run(run).info.status == "FINISHED"
    assert [each.value for each in store.get_metric_history(run, "loss")] == [1.0]


@rests_on_it("src/lockstep/track/mlflow.py")
def test_mlflow_finds_a_run_by_its_tag(store: Any) -> None:
    """A search for a tag with a dot in its name finds the run, also after it was killed."""
    first, _ = [store.create_run("0", tags={"lockstep.run": value}).info.run_id for value in ("a-1", "a-10")]
    store.set_terminated(first, "KILLED")
    assert [each.info.run_id for each in store.search_runs(["0"], "tags.`lockstep.run` = 'a-1'")] == [first]


@rests_on_it("src/lockstep/track/tensorboard.py")
def test_tensorboard_reads_several_files_of_a_folder(tmp_path: Path) -> None:
    """TensorBoard reads a folder with two event files as one run, with the values of both in file order."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    for suffix, steps in ((".a", (1, 2)), (".b", (3,))):
        with SummaryWriter(str(tmp_path), filename_suffix=suffix) as writer:
            for step in steps:
                writer.add_scalar("loss", float(step), step)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


@rests_on_it("src/lockstep/track/tensorboard.py")
def test_tensorboard_purges_repeated_steps(tmp_path: Path) -> None:
    """RecordWriter writes serialized events to an open file; `scalar` makes a number by name, `text` a text under
    NAME/text_summary. A file whose second event is a SessionLog of START at a step hides earlier files' steps from
    there on."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from torch.utils.tensorboard import RecordWriter
    from torch.utils.tensorboard.summary import scalar, text

    def write(number: int, *events: dict[str, Any]) -> None:
        writer = RecordWriter((tmp_path / f"events.out.tfevents.000000000{number}.host.1.0").open("ab"))
        for event in ({"file_version": "brain.Event:2"}, *events):
            writer.write(Event(wall_time=1.0 + number, **event).SerializeToString())
        writer.flush()
        writer.close()

    write(1, *({"step": step, "summary": scalar("loss", float(step))} for step in (1, 2, 3)))
    started = {"step": 2, "session_log": SessionLog(status=SessionLog.START)}
    write(2, started, {"step": 2, "summary": scalar("loss", 20.0)}, {"step": 2, "summary": text("eval/a", "**b**")})
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    (shown,) = read.Tensors("eval/a/text_summary")
    assert (shown.step, shown.tensor_proto.string_val[0]) == (2, b"**b**")


TRACKIO = """
import json, trackio
from trackio import deploy, run, utils
for module in (trackio, deploy, run, utils):
    module.print = lambda *words, **options: None
steps = []
for resume in ("allow", "allow"):
    made = trackio.init(project="p", name="r", group=None, space_id=None, private=None, config={"a": 1}, resume=resume,
                        embed=False, auto_log_gpu=False, auto_log_cpu=False)
    steps.append(made._next_step)
    made.log({"loss": 1.0}, step=7)
    made.finish()
from trackio.sqlite_storage import SQLiteStorage
logs = [[line["step"], line["loss"]] for line in SQLiteStorage.get_logs("p", "r")]
print(json.dumps([steps, str(utils.TRACKIO_DIR), logs]))
"""


@pytest.mark.processes
@rests_on_it("src/lockstep/track/trackio.py")
def test_a_resumed_trackio_run_continues_after_its_last_step(tmp_path: Path) -> None:
    """A trackio run resumed by name has the step after its last one as `_next_step`, a new run 0. It is stored in
    TRACKIO_DIR. get_logs has an entry with its step for each log call, also if a step is logged again. With `print` of
    its modules replaced, it prints nothing."""
    pytest.importorskip("trackio")
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "kept"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", TRACKIO]
    done = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    assert json.loads(line) == [[0, 8], str(tmp_path / "kept"), [[7, 1.0], [7, 1.0]]]


@rests_on_it("src/lockstep/lab/sweep/sweep_file.py")
def test_optuna_repeats_its_suggestions() -> None:
    """A new study with the same seed and the same finished trials, added by add_trial, suggests the same parameters."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    places = {"rate": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True)}

    def asked() -> float:
        study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=12))
        for trial in range(12):
            rate = 10.0 ** -(1 + trial % 5)
            study.add_trial(optuna.trial.create_trial(params={"rate": rate}, distributions=places, value=rate))
        return study.ask(places).params["rate"]

    assert asked() == asked()


@rests_on_it("src/lockstep/lab/sweep/sweep_file.py")
def test_trials_and_distributions_of_optuna() -> None:
    """create_trial raises ValueError for a NaN value, and for a parameter outside its distribution. A logarithmic
    distribution raises for 0. ask with a dict of distributions suggests a value of each: an index, an integer and a
    float."""
    optuna = pytest.importorskip("optuna")
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    places = {"a": CategoricalDistribution(range(3)), "b": IntDistribution(1, 64, log=True)}
    places["c"] = FloatDistribution(1e-5, 1e-1, log=True)
    params = {"a": 1, "b": 3, "c": 1e-3}
    assert optuna.trial.create_trial(params=params, distributions=places, value=0.5).value == 0.5
    for other, value in ((params, float("nan")), (params | {"b": 65}, 0.5)):
        with pytest.raises(ValueError):
            optuna.trial.create_trial(params=other, distributions=places, value=value)
    with pytest.raises(ValueError):
        FloatDistribution(0.0, 1.0, log=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=2**32 - 1))
    asked = study.ask(places).params
    assert [type(asked[name]) for name in "abc"] == [int, int, float]
    with pytest.raises(ValueError):
        optuna.samplers.TPESampler(seed=2**32)


@rests_on_it("src/lockstep/lab/sweep/sweep_file.py")
def test_optuna_draws_the_first_ten_at_random() -> None:
    """TPESampler draws the first ten trials at random, so they do not depend on each other's values."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    places = {"rate": optuna.distributions.FloatDistribution(0.0, 1.0)}

    def asked(trials: int, value: float) -> float:
        study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=5))
        for trial in range(trials):
            rate = trial / trials
            study.add_trial(optuna.trial.create_trial(params={"rate": rate}, distributions=places, value=value * rate))
        return study.ask(places).params["rate"]

    assert asked(9, 1.0) == asked(9, -1.0)
    assert asked(10, 1.0) != asked(10, -1.0)


@rests_on_it("src/lockstep/lab/sweep/sweep_file.py")
def test_optuna_samples_near_the_best_values() -> None:
    """After many trials, a maximizing study suggests values near those with the greatest result, and a minimizing one
    near those with the least: floats, integers and list items."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds = optuna.distributions
    places = {
        "rate": kinds.FloatDistribution(0.0, 1.0),
        "layers": kinds.IntDistribution(1, 64, log=True),
        "kind": kinds.CategoricalDistribution(range(3)),
    }

    def asked(direction: str) -> list[dict[str, Any]]:
        found = []
        for seed in range(8):
            study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=seed))
            for trial in range(30):
                params = {"rate": trial / 30, "layers": 1 + 2 * trial, "kind": trial * 3 // 30}
                study.add_trial(optuna.trial.create_trial(params=params, distributions=places, value=float(trial)))
            found.append(study.ask(places).params)
        return found

    high, low = asked("maximize"), asked("minimize")
    assert all(type(each["layers"]) is int and type(each["kind"]) is int for each in high + low)
    for name in places:
        assert sum(each[name] for each in high) > sum(each[name] for each in low)


@rests_on_it("src/lockstep/track/mlflow.py")
def test_limits_of_mlflow_requests(store: Any, run: str) -> None:
    """MLflow accepts 100 parameters or 1000 metrics per request, and truncates values longer than 6000 characters."""
    from mlflow.entities import Metric, Param

    long = [Param("whole", "v" * 6000), Param("cut", "v" * 6001)]
    store.log_batch(run, params=[*long, *(Param(f"p{i}", str(i)) for i in range(98))])
    store.log_batch(run, metrics=[Metric(f"m{i}", float(i), 1, 1) for i in range(1000)])
    data = store.get_run(run).data
    assert (len(data.params), len(data.metrics), data.metrics["m999"]) == (100, 1000, 999.0)
    assert (data.params["whole"], data.params["cut"]) == ("v" * 6000, "v" * 6000)


@rests_on_it("src/lockstep/track/mlflow.py")
def test_mlflow_refuses_a_request_with_an_invalid_name(store: Any, run: str) -> None:
    """MLflow accepts names of letters, digits and `_-. :/`, up to 250 characters, that are plain paths; one invalid
    name makes it refuse the whole request."""
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException

    good = ["a.b_c-d e:f/g", "\u00fc1", "n" * 250]
    store.log_batch(run, params=[Param(name, "1") for name in good], metrics=[Metric(name, 1.0, 1, 1) for name in good])
    for name in ("a(b)", "a*", "a[0]", "a//b", "a/./b", "/a", "../a", "a/", "n" * 251):
        with pytest.raises(MlflowException):
            store.log_batch(run, params=[Param("other", "1"), Param(name, "1")])
        with pytest.raises(MlflowException):
            store.log_batch(run, metrics=[Metric("other", 1.0, 1, 1), Metric(name, 1.0, 1, 1)])
    data = store.get_run(run).data
    assert data.params.keys() == data.metrics.keys() == set(good)


@rests_on_it("src/lockstep/track/mlflow.py")
def test_missing_experiments_and_ended_runs_of_mlflow(store: Any, run: str) -> None:
    """get_experiment_by_name is None for an unknown name; update_run sets an ended run to RUNNING again."""
    assert store.get_experiment_by_name("nobody made it") is None
    store.set_terminated(run, "KILLED")
    store.update_run(run, status="RUNNING")
    assert store.get_run(run).info.status == "RUNNING"


@pytest.mark.processes
@rests_on_it("src/lockstep/track/wandb.py", "src/lockstep/track/wandb_file.py")
def test_wandb_offline_is_a_folder_of_rows_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key, login returns False. An offline run is in DIR/wandb/offline-run-TIME-ID, whose `files` is run.dir.
    Values logged for one step are one row, and values for a past step are dropped."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.setup(wandb.Settings(silent=True))
    assert not wandb.login(prompt=False, verify=False)
    settings = wandb.Settings(
        console="off", silent=True, init_timeout=30.0, finish_timeout=60.0, disable_git=True, disable_code=True,
        x_disable_stats=True,
    )  # fmt: skip
    run = wandb.init(
        project="p", entity=None, group=None, name="n", tags=None, notes=None, config={"a": 1}, dir=str(tmp_path),
        id="4711", resume="allow", mode="offline", settings=settings,
    )  # fmt: skip
    folder = Path(run.dir).parent
    assert folder.parent == tmp_path / "wandb"
    assert folder.name.startswith("offline-run-")
    assert folder.name.endswith("-4711")
    for step, numbers in ((5, {"a": 1.0}), (5, {"b": 2.0}), (4, {"a": 9.0}), (6, {"a": 3.0})):
        run.log(numbers, step=step)
    run.mark_preempting()
    run.finish(exit_code=1)
    wandb.teardown()  # as at the end of a process: W&B's service has then written everything
    (file,) = folder.glob("*.wandb")
    rows = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = {
                (each.key or "/".join(each.nested_key)): json.loads(each.value_json) for each in record.history.item
            }
            rows.append({name: value for name, value in items.items() if name in ("a", "b", "_step")})
    assert rows == [{"a": 1.0, "b": 2.0, "_step": 5}, {"a": 3.0, "_step": 6}]
