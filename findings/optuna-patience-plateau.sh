#!/usr/bin/env bash
# optuna 5.0.0: `PatientPruner` never prunes a trial whose metric stands still, however bad it is: it waits until the values
# within the patience are worse than the best before, by more than `min_delta`. A plateau is no end of improvement to it, and
# a larger `min_delta` prunes later; in Keras' and Lightning's early stopping it stops sooner.
# Documentation: "Pruning is disabled until the objective doesn't improve for patience consecutive steps", and "prunes the trial
# if the improvement in the intermediate values after a patience period is less than a threshold".
# Seen: beside trials with a loss of 1, one that stays at 5 is pruned by `MedianPruner` at its first report, by
# `PatientPruner(MedianPruner(), patience=2)` not in 30; one that rises by 1e-9 a report is, one that falls by that is not.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q optuna==5.0.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import warnings
from collections.abc import Callable

import optuna
from optuna.pruners import BasePruner, MedianPruner, PatientPruner

warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.ERROR)
REPORTS = 30


def pruned_at(pruner: BasePruner, loss: Callable[[int], float]) -> int | None:
    """The report after which the pruner stops a trial with these losses, beside six trials with a loss of 1."""
    study = optuna.create_study(direction="minimize", pruner=pruner)
    for _ in range(6):
        study.add_trial(optuna.trial.create_trial(value=1.0, intermediate_values=dict.fromkeys(range(REPORTS), 1.0)))
    trial = study.ask()
    for step in range(REPORTS):
        trial.report(loss(step), step)
        if trial.should_prune():
            return step
    return None


losses = {
    "stays at 5": lambda step: 5.0,
    "rises by 1e-9": lambda step: 5.0 + 1e-9 * step,
    "falls by 1e-9": lambda step: 5.0 - 1e-9 * step,
    "rises by 0.1": lambda step: 5.0 + 0.1 * step,
}
pruners = {
    "MedianPruner": lambda: MedianPruner(),
    "patience 2": lambda: PatientPruner(MedianPruner(), patience=2),
    "patience 2 alone": lambda: PatientPruner(None, patience=2),
    "patience 2, min_delta 1": lambda: PatientPruner(MedianPruner(), patience=2, min_delta=1.0),
}
seen = {name: {kind: pruned_at(make(), loss) for kind, make in pruners.items()} for name, loss in losses.items()}
for name, reports in seen.items():
    print(f"a loss that {name}: pruned at report", reports)
assert all(reports["MedianPruner"] == 0 for reports in seen.values())
for kind in ("patience 2", "patience 2 alone"):
    assert seen["stays at 5"][kind] is None and seen["falls by 1e-9"][kind] is None
    assert seen["rises by 1e-9"][kind] == seen["rises by 0.1"][kind] == 3
late = seen["rises by 0.1"]["patience 2, min_delta 1"]
assert seen["falls by 1e-9"]["patience 2, min_delta 1"] is None and late is not None and late > 10
PYTHON
environment/bin/python shown.py
