"""The request of a sweep: a sweep file, or a run file and options.

In: a SWEEP.yaml or RUN.yaml, and the words of the command line. Out: a frozen `Sweep`, or a `RunError` that names the
key, before anything starts; the combinations of its values (also for `lockstep bench --over`); the next trial of an
optuna search, which depends only on the finished trials; and a trial's name, which is also its folder's. Imports no
torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from lockstep.config import error_messages as messages
from lockstep.config.errors import InvalidValue, uncoded
from lockstep.config.run import Run, RunError, load, overrides_of
from lockstep.config.sections import Positive, Section

_RANGE = re.compile(r"(?P<low>[-+.\de]+?)\.\.(?P<high>[-+.\de]+?)(?P<log>:log)?", re.IGNORECASE)


class Range(Section):
    """A range of a search: integers if both ends are, else real numbers."""

    low: int | float
    high: int | float
    log: bool = Field(False, description="search on a logarithmic scale")

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.low >= self.high:
            raise InvalidValue("LS8370", f"low ({self.low:g}) must be below high ({self.high:g})")
        if self.log and self.low <= 0:
            raise InvalidValue("LS8371", f"a logarithmic range must begin above 0, not at {self.low:g}")
        return self


class SearchSection(Section):
    trials: Positive = Field(description="total number of trials")
    seed: int = Field(0, ge=0, description="seed of the search")


class SweepFile(Section):
    """Schema of a SWEEP.yaml."""

    run: str = Field(description="the run file, beside this file")
    output: str | None = Field(None, description="folder of the trials; default: the run's OUTPUT-sweep")
    set: dict[str, Any] = Field(default_factory=dict, description="keys of the run file, the same in every trial")
    over: dict[str, list[Any] | Range] = Field(
        default_factory=dict, description="key -> values; every combination is tried"
    )
    trials: list[dict[str, Any]] = Field(default_factory=list, description="mappings of keys, one per trial")
    metric: str | None = Field(
        None, pattern=r"^-?\w+$", description="sorts the table: accuracy, or -loss (less is better)"
    )
    split: str = Field("validation", description="split of the metric")
    parallel: Positive = Field(1, description="trials at once")
    share: bool = Field(True, description="compute steps that trials have in common once")
    search: SearchSection | None = Field(
        None, description="let optuna choose from over, instead of trying all combinations"
    )


@dataclass(frozen=True)
class Sweep:
    """A complete sweep."""

    path: str | None  # the run file
    defaults: Mapping[str, Any]  # if there is none
    overrides: Mapping[str, Any]  # for every trial
    over: Mapping[str, Sequence[Any] | Range]
    trials: Sequence[Mapping[str, Any]]
    metric: str
    split: str
    parallel: int
    share: bool
    search: SearchSection | None
    folder: Path
    base: Run

    def load(self, keys: Mapping[str, Any]) -> Run:
        """Load the run with a trial's keys. Errors: `RunError`."""
        return load(self.path, {**self.overrides, **keys}, self.defaults)

    def combinations(self) -> list[Overrides]:
        """All trials of a sweep without a search: each listed trial with each combination."""
        listed = self.trials or [{}]
        lists = {key: values for key, values in self.over.items() if not isinstance(values, Range)}
        trials = [{**dict(one), **combined} for one in listed for combined in product(lists)]
        return [keys for i, keys in enumerate(trials) if keys not in trials[:i]]


def read(path: str | None, defaults: Mapping[str, Any], words: Sequence[str], options: Mapping[str, Any]) -> Sweep:
    """Read a sweep from a file (a sweep file or a run file; None: the run is `defaults`), overrides and options: `over`
    words, `metric`, `split`, `parallel`, `share`, `search` (number of trials) and `out`, each None if not given.
    Errors: `RunError`."""
    section = _sweep_file(path) if path is not None else None
    run = str(Path(str(path)).parent / section.run) if section is not None else path
    overrides = {**overrides_of(section.set if section is not None else {}), **overrides_of(words)}
    base = load(run, overrides, defaults)
    over: dict[str, list[Any] | Range] = dict(section.over) if section is not None else {}
    over |= {key: _range(key, values) for key, values in parse(options["over"]).items()}
    trials = [overrides_of(keys) for keys in (section.trials if section is not None else [])]
    options_set = {name: value for name, value in options.items() if value is not None}
    filed = section.model_dump(exclude_none=True) if section is not None else {}
    search = None if section is None else section.search
    if "search" in options_set:
        search = SearchSection(trials=options_set["search"], seed=0)
    sweep = Sweep(
        path=run,
        defaults=defaults,
        overrides=overrides,
        over=over,
        trials=trials,
        metric=options_set.get("metric") or filed.get("metric") or base.checkpoint.best or "-loss",
        split=options_set.get("split") or filed.get("split", "validation"),
        parallel=options_set.get("parallel", filed.get("parallel", 1)),
        share=options_set.get("share", filed.get("share", True)),
        search=search,
        folder=Path(options_set.get("out") or filed.get("output") or f"{base.folder}-sweep"),
        base=base,
    )
    _check(sweep)
    return sweep


def _sweep_file(path: str) -> SweepFile | None:
    """Return the sweep file, or None if the file is a run file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values, lines = messages.read_yaml_with_lines(text)
    except OSError as error:
        raise RunError("LS8372", f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError("LS8373", f"{path} is not valid YAML: {messages.yaml_fault(error)}") from error
    if not isinstance(values, dict) or not {"run", "over", "trials", "search"} & values.keys():
        return None
    values["over"] = {key: _range(key, candidates) for key, candidates in (values.get("over") or {}).items()}
    try:
        return SweepFile.model_validate(values)
    except ValidationError as error:
        raise messages.explain(error, SweepFile, path, lines, {}) from None


def _range(key: str, values: Any) -> Any:
    """Parse `low..high` and `low..high:log` as a range; return anything else unchanged."""
    text = values[0] if isinstance(values, list) and len(values) == 1 else values
    match = _RANGE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return values
    try:
        low, high = (messages.read_yaml(match[end]) for end in ("low", "high"))
        low, high = (end if isinstance(end, int) else float(end) for end in (low, high))
        return Range(low=low, high=high, log=match["log"] is not None)
    except (ValueError, TypeError) as error:
        cause = error.errors()[0].get("ctx", {}).get("error") if isinstance(error, ValidationError) else None
        reason = uncoded(str(cause)) if cause is not None else "both ends must be finite numbers"
        raise RunError("LS8374", f"{key}: {text!r} is not a range such as 1e-5..1e-3:log: {reason}") from None


def _check(sweep: Sweep) -> None:
    if not sweep.over and not sweep.trials:
        raise RunError("LS8375", "nothing to vary: give --over key=value,value, or a sweep file with over or trials")
    ranges = [key for key, values in sweep.over.items() if isinstance(values, Range)]
    if ranges and sweep.search is None:
        raise RunError("LS8376", f"{ranges[0]}: a range needs a search; add --search TRIALS, or list the values to try")
    if sweep.search is not None and (sweep.trials or not sweep.over):
        raise RunError("LS8377", "search: cannot be combined with trials; list values and ranges under over instead")
    if sweep.parallel < 1:
        raise RunError("LS8378", f"--parallel: invalid value {sweep.parallel}; expected an integer >= 1")
    for key in ("output", "name"):
        if key in sweep.over or any(key in keys for keys in sweep.trials):
            raise RunError("LS8379", f"{key}: cannot be varied, because the sweep sets it for every trial")


Overrides = dict[str, Any]  # dotted key of the run file -> value


def parse(words: Sequence[str]) -> dict[str, list[Any]]:
    """Parse words such as `optim.learning_rate=1e-5,3e-5`. Values are YAML; a comma in brackets or quotes does not
    separate. Errors: `RunError`."""
    lists: dict[str, list[Any]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise RunError(
                "LS8380", f"--over: {word!r} is not key=value,value, for example optim.learning_rate=1e-5,3e-5"
            )
        try:
            values = messages.read_yaml(f"[{text}]")
        except yaml.YAMLError as error:
            raise RunError(
                "LS8381", f"--over: the values of {key} are not valid YAML: {' '.join(str(error).split())}"
            ) from None
        if not values:
            raise RunError("LS8382", f"--over: {key} has no values; give them as {key}=value,value")
        if key in lists:
            raise RunError("LS8383", f"--over: {key} is given twice; list all its values once")
        lists[key] = values
    return lists


def product(over: Mapping[str, Sequence[Any]]) -> list[Overrides]:
    """All combinations, the last key's values changing fastest; one empty combination without keys."""
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def format_value(value: Any) -> str:
    """Format a value for a command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).replace("\n...", "").strip()


TrialResult = tuple[Mapping[str, Any], float | None]  # keys of a trial -> its metric, None while it runs


def check() -> None:
    """Check that optuna is installed. Errors: `RunError` if not."""
    if importlib.util.find_spec("optuna") is None:
        raise RunError("LS8384", "search needs optuna, which is not installed: pip install 'lockstep-train[optuna]'")


def corners(over: Mapping[str, Sequence[Any] | Range]) -> list[Overrides]:
    """Key combinations that are valid if all are: both ends of every range, and every value."""
    ends = {k: [v.low, v.high] if isinstance(v, Range) else list(v) for k, v in over.items()}
    first = {key: values[0] for key, values in ends.items()}
    return [{**first, key: value} for key, values in ends.items() for value in values]


def propose(
    over: Mapping[str, Sequence[Any] | Range], results: Sequence[TrialResult], seed: int, more_is_better: bool
) -> Overrides:
    """Propose the next trial's keys with optuna's tree-structured Parzen estimator (Bergstra et al., "Algorithms for
    hyper-parameter optimization", NeurIPS 2011); the first ten are random."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    places = {key: _distribution(values) for key, values in over.items()}
    sampler = optuna.samplers.TPESampler(seed=(seed + len(results)) % 2**32)  # numpy takes no greater ones
    study = optuna.create_study(direction="maximize" if more_is_better else "minimize", sampler=sampler)
    known = [value for _, value in results if value is not None]
    for keys, value in results:
        if value is None:  # a running trial counts as the worst so far, so that the next one is tried elsewhere
            if not known:
                continue
            value = min(known) if more_is_better else max(known)
        params = {key: _place(over[key], keys[key]) for key in over}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=places, value=value))
    params = study.ask(places).params
    return {key: params[key] if isinstance(values, Range) else values[params[key]] for key, values in over.items()}


def outside(over: Mapping[str, Sequence[Any] | Range], keys: Mapping[str, Any]) -> str | None:
    """Return the first key whose value the search cannot propose, as `key=value`, or None."""
    for key, values in over.items():
        value, number = keys[key], isinstance(keys[key], int | float)
        if not (number and values.low <= value <= values.high if isinstance(values, Range) else value in values):
            return f"{key}={format_value(value)}"
    return None


def _distribution(values: Sequence[Any] | Range) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution(range(len(values)))  # indices, because a value may be a mapping
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _place(values: Sequence[Any] | Range, value: Any) -> Any:
    return value if isinstance(values, Range) else list(values).index(value)


LONGEST = 80


def name_of(keys: Mapping[str, Any], taken: Container[str]) -> str:
    """Name a trial: `learning_rate-3e-05_source-gpt2`; a long or used name gets a few digits of its hash."""
    lasts = [key.rpartition(".")[2] for key in keys]
    parts = []
    for key, value in keys.items():
        last = key.rpartition(".")[2]
        parts.append(f"{last if lasts.count(last) == 1 else key}-{format_value(value)}")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(parts)).strip("-._") or "trial"
    if len(name) <= LONGEST and name not in taken:
        return name
    digest = hashlib.sha256(json.dumps(dict(keys), sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{name[: LONGEST - 9]}-{digest}"
