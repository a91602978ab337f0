"""A search over values and ranges: optuna chooses what is tried next from what was found so far.

In: what may be tried, and the finished trials. Out: the keys of the next trial: a function of these alone, so that a
sweep that was stopped goes on as if it had not been. Needs the extra `lockstep-train[optuna]`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config.run import RunError
from lockstep.tools.sweep import grid
from lockstep.tools.sweep.sweep_file import Range

Found = tuple[Mapping[str, Any], float | None]  # keys of a trial -> its metric, None while it runs


def check() -> None:
    """Errors: `RunError` when optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise RunError("search needs optuna, which is not installed: pip install 'lockstep-train[optuna]'")


def corners(over: Mapping[str, Sequence[Any] | Range]) -> list[grid.Overrides]:
    """Keys that have to make a run file if all do: both ends of every range, and every value."""
    ends = {k: [v.low, v.high] if isinstance(v, Range) else list(v) for k, v in over.items()}
    first = {key: values[0] for key, values in ends.items()}
    return [{**first, key: value} for key, values in ends.items() for value in values]


def propose(
    over: Mapping[str, Sequence[Any] | Range], found: Sequence[Found], seed: int, more_is_better: bool
) -> grid.Overrides:
    """The keys of the trial after `found`, by optuna's tree-structured Parzen estimator (Bergstra et al., "Algorithms
    for hyper-parameter optimization", NeurIPS 2011); the first ten are drawn at random."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    places = {key: _distribution(values) for key, values in over.items()}
    sampler = optuna.samplers.TPESampler(seed=seed + len(found))
    study = optuna.create_study(direction="maximize" if more_is_better else "minimize", sampler=sampler)
    known = [value for _, value in found if value is not None]
    for keys, value in found:
        if value is None:  # one that runs: taken as the worst so far, so that the next one looks elsewhere
            if not known:
                continue
            value = min(known) if more_is_better else max(known)
        params = {key: _place(over[key], keys[key]) for key in over}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=places, value=value))
    params = study.ask(places).params
    return {key: params[key] if isinstance(values, Range) else values[params[key]] for key, values in over.items()}


def _distribution(values: Sequence[Any] | Range) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution(range(len(values)))  # their places: a value may be a mapping
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _place(values: Sequence[Any] | Range, value: Any) -> Any:
    return value if isinstance(values, Range) else list(values).index(value)
