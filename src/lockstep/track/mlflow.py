"""MLflow: one run in a tracking server or in a local SQLite file.

In: numbers and samples. Out: an MLflow run with metrics `train/...`, `eval/...` and `system/...` against the step, the
resolved run as its parameters, a table of samples as an artifact. Needs the extra `lockstep-train[mlflow]`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import posixpath
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from lockstep.config import error_messages as messages
from lockstep.config.output_files import FolderInside
from lockstep.config.run import Run
from lockstep.config.sections import Section
from lockstep.track.tracker import End, Sample, Tracker, named

TOKEN = "lockstep.run"  # name of a tag, and prefix of its values, which no run id of MLflow (hexadecimal) can have
STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """Tracker for MLflow. View a local store: `mlflow ui --backend-store-uri sqlite:///OUTPUT/mlflow.db`."""

    packages = ("mlflow",)

    class Options(Section):
        uri: str | None = Field(
            None, description="tracking server or store; default: $MLFLOW_TRACKING_URI, else a SQLite file in OUTPUT"
        )
        experiment: str = Field("lockstep", description="MLflow experiment")
        name: str | None = Field(None, description="name of the run in MLflow; default: the run's name")
        tags: dict[str, str] = Field(default_factory=dict, description="tags of the run")

    def __init__(self, run: Run, options: Any, after: int, run_id: str | None) -> None:
        # MLflow creates the run id in `open`, which takes seconds; a checkpoint written before that stores this token
        super().__init__(run, options, after, run_id or f"{TOKEN}-{secrets.token_hex(8)}")
        self._places = [FolderInside(run.folder, name) for name in ("mlflow.db", "mlflow")]

    def open(self) -> str:
        elsewhere = self.options.uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._places = [] if elsewhere else self._places
        self._refuse_link()
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)  # only the console writes to the terminal

        folder = self.run.folder.resolve()
        uri = elsewhere or _database(folder)
        self._client: Any = MlflowClient(uri)
        self.stored = 0 if self.after else None  # `log` leaves out what is there
        self._last_steps: dict[str, int] = {}  # metric -> last step in the store, for a resumed run
        experiment = self._client.get_experiment_by_name(self.options.experiment)
        token = own = str(self.run_id)
        if token.startswith(TOKEN) and experiment is not None:
            tagged = self._client.search_runs([experiment.experiment_id], f"tags.`{TOKEN}` = '{token}'", max_results=1)
            own = tagged[0].info.run_id if tagged else token
        if not own.startswith(TOKEN):
            self._client.update_run(own, status="RUNNING")
            self.run_id = own
            return f"{uri}, run {own} continues"
        artifacts = (folder / "mlflow").as_uri() if uri.startswith("sqlite:") else None
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(self.options.experiment, artifact_location=artifacts)
        )
        name, tags = self.options.name or self.run.name, {**self.options.tags, TOKEN: token}
        self.run_id = self._client.create_run(number, run_name=name, tags=tags).info.run_id
        self._parameters()
        return f"{uri}, run {self.run_id}"

    def _refuse_link(self) -> None:
        """Raise `OSError` if the store in OUTPUT now links elsewhere: MLflow opens its files by name."""
        for place in self._places:
            if (fault := place.redirected()) is not None:
                raise OSError(fault)

    def _parameters(self) -> None:
        from mlflow.entities import Param

        rows = [Param(allowed(key), str(value)[:6000]) for key, value in messages.flat(self.config).items()]
        for start in range(0, len(rows), 100):  # limit per request
            self._client.log_batch(self.run_id, params=rows[start : start + 100])

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        self._refuse_link()
        now = int(time.time() * 1000)
        own = {allowed(name): value for name, value in named(split, numbers).items()}
        fresh = {k: v for k, v in own.items() if step > self._last(k) and math.isfinite(v)}
        rows = [Metric(name, value, now, step) for name, value in fresh.items()]
        for start in range(0, len(rows), 1000):
            self._client.log_batch(self.run_id, metrics=rows[start : start + 1000])

    def _last(self, name: str) -> int:
        """Return the last step in the store, or -1. MLflow cannot delete, so repeated steps are not logged again."""
        if not self.after:
            return -1
        if name not in self._last_steps:
            history = self._client.get_metric_history(self.run_id, name)
            self._last_steps[name] = max((metric.step for metric in history), default=-1)
        return self._last_steps[name]

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Log one file per evaluation."""
        self._refuse_link()
        text = {"columns": ["step", *samples[0]], "data": [[step, *sample.values()] for sample in samples]}
        self._client.log_dict(self.run_id, text, f"samples/step-{step:06d}.json")

    def close(self, end: End) -> None:
        self._client.set_terminated(self.run_id, STATUS[end])


def _database(folder: Path) -> str:
    """Return the address of the SQLite store in OUTPUT, created if missing. Creating its tables takes MLflow seconds,
    and it cannot use an incomplete store, so a new store is renamed into place when complete."""
    file, aside = folder / "mlflow.db", folder / ".mlflow.db.partial"
    if not file.exists():
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        aside.unlink(missing_ok=True)
        store = SqlAlchemyStore(f"sqlite:///{aside}", (folder / "mlflow").as_uri())
        store.engine.dispose()
        os.replace(aside, file)
    return f"sqlite:///{file}"


def allowed(name: str) -> str:
    """Return a name that MLflow accepts: characters other than letters, digits and `_-. :/` become `_`, at most 250
    remain, and no part of a path is empty or only dots. A changed name ends in a hash of the original: two names never
    become one. MLflow rejects a whole request for one invalid name."""
    changed = re.sub(r"[^/\w.\- :]", "_", name)
    if posixpath.normpath(changed) != changed or changed.startswith(("/", "..")):
        changed = changed.replace("/", "_")
    if changed == name and len(name) <= 250:
        return name
    return f"{changed[:240]}_{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"
