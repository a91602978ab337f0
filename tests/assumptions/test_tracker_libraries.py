"""What lockstep takes for granted of trackers and of optuna: their own stores, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.assumed import rests_on_it


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One for all tests: making it takes seconds."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")


@pytest.fixture
def run(store: Any) -> str:
    return store.create_run("0").info.run_id  # type: ignore[no-any-return]


@rests_on_it("src/lockstep/track/mlflow.py")
def test_mlflow_keeps_a_step_twice(store: Any, run: str) -> None:
    """MLflow keeps two values of one step apart: a repeated step must not be logged again."""
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
    """MLflow takes a parameter again with its value, and raises for another one."""
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    for _ in range(2):
        store.log_batch(run, params=[Param("rate", "1")])
    with pytest.raises(MlflowException):
        store.log_batch(run, params=[Param("rate", "2")])
    assert store.get_run(run).data.params == {"rate": "1"}


@rests_on_it("src/lockstep/track/mlflow.py")
def test_mlflow_takes_a_run_that_has_ended(store: Any, run: str) -> None:
    """A run that was terminated takes further metrics, and its status is that of the last set_terminated."""
    from mlflow.entities import Metric

    store.set_terminated(run, "FAILED")
    store.log_batch(run, metrics=[Metric("loss", 1.0, 1, 3)])
    store.set_terminated(run, "FINISHED")
    assert store.get_run(run).info.status == "FINISHED"
    assert [each.value for each in store.get_metric_history(run, "loss")] == [1.0]


@rests_on_it("src/lockstep/track/tensorboard.py")
def test_tensorboard_reads_several_files_of_a_folder(tmp_path: Path) -> None:
    """A folder of two event files is one run: the reader returns the values of both, in the order of the files."""
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
def test_tensorboard_purges_steps_that_are_made_again(tmp_path: Path) -> None:
    """A file with purge_step hides what earlier files have from that step on."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path), filename_suffix=".a") as writer:
        for step in (1, 2, 3):
            writer.add_scalar("loss", float(step), step)
    with SummaryWriter(str(tmp_path), filename_suffix=".b", purge_step=2) as writer:
        writer.add_scalar("loss", 20.0, 2)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


@rests_on_it("src/lockstep/track/trackio.py")
def test_trackio_has_the_step_that_comes_next() -> None:
    """trackio's init takes resume, embed, auto_log_gpu and auto_log_cpu, and a run has `_next_step`."""
    import inspect

    trackio = pytest.importorskip("trackio")
    known = set(inspect.signature(trackio.init).parameters)
    assert {"project", "name", "group", "space_id", "private", "config", "resume", "embed"} <= known
    assert {"auto_log_gpu", "auto_log_cpu"} <= known
    assert "_next_step" in inspect.getsource(trackio.run)


@rests_on_it("src/lockstep/lab/sweep/sweep_file.py")
def test_optuna_asks_for_the_same_trial_again() -> None:
    """A new study with the same seed and the same finished trials, added by add_trial, asks for the same parameters."""
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
def test_optuna_draws_the_first_ten_at_random() -> None:
    """TPESampler draws without a model until ten trials are finished: the first ten do not depend on their values."""
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
