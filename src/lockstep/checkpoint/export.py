"""Write the export folder with its model card, a README.md.

In: full weights on rank 0, a task with its run, and the final scores. Out: `OUTPUT/export`, which `from_pretrained`
loads. The metadata's fields are the Hub's (https://github.com/huggingface/hub-docs, modelcard.md). Imports no torch;
huggingface_hub only when called.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep._version import __version__
from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.folder import size_of
from lockstep.config import output_files
from lockstep.config.redaction import redact_all
from lockstep.config.run import RunError
from lockstep.tasks.task import Task
from lockstep_trace.coded import quantity
from lockstep_trace.redaction import printable

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData
    from torch import Tensor


def write_export(
    task: Task,
    weights: Mapping[str, Tensor],
    scores: dict[str, dict[str, float]],
    steps: int,
    folder: Path | None = None,
) -> Path:
    """Write the export and its model card to OUTPUT or another folder, atomically. Rank 0 only. Errors: `OSError`;
    nothing remains of a failed export."""
    folder = folder or task.run.folder
    try:
        export_hashes.settle(_write_aside(folder, task, weights, scores, steps), folder)
    finally:
        output_files.clear(folder / ".export.partial")
    return folder / "export"


def try_export(task: Task, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]]) -> int:
    """Write an export before training, to check that it can be written, and remove it. Returns its bytes. Rank 0 only.
    Errors: `OSError`."""
    run = task.run
    try:
        return size_of(_write_aside(run.folder, task, weights, scores, 0))
    finally:
        output_files.clear(run.folder / ".export.partial")


def _write_aside(
    folder: Path, task: Task, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]], steps: int
) -> Path:
    aside = folder / ".export.partial"
    output_files.clear(aside)
    aside.mkdir(parents=True)
    with output_files.wrapped_os_errors(aside):
        task.write(aside, weights)
    (aside / "README.md").write_text(model_card(task, scores, steps), encoding="utf-8")
    return aside


HERE = "PATH_OR_REPO"  # placeholder for the model in `Task.usage`; a push replaces it with the repository
# lockstep's metric -> (the Hub's metric type, display name, arguments)
_METRICS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "macro_f1": ("f1", "Macro F1", {"average": "macro"}),
    "f1": ("f1", "F1", None),
    "bleu": ("bleu", "BLEU", None),
    "chrf": ("chrf", "chrF", None),
    "word_perplexity": ("perplexity", "Perplexity per word", None),
    "byte_perplexity": ("perplexity", "Perplexity per byte", None),
}
_TASKS = {
    "text-classification": "Text classification",
    "token-classification": "Token classification",
    "text-generation": "Text generation",
    "translation": "Translation",
}
_LANGUAGE = re.compile(r"[a-z]{2,3}")


def model_card(task: Task, scores: dict[str, dict[str, float]], steps: int) -> str:
    """Model card of a run that ended after `steps`. `scores`: split -> metrics."""
    from huggingface_hub.utils import yaml_dump

    run = task.run
    base, data = hub_model(task), _data_name(task)
    where = f"[{run.data.source}](https://huggingface.co/datasets/{run.data.source})" if hub_data(task) else code(data)
    labels = ", ".join(words(str(label)) for label in task.prepared.facts.get("labels", []))
    labels = f" Labels: {labels}." if labels else ""
    origin = f"A {run.model.type} trained from scratch"
    if task.own_model:
        origin = f"{code(task.origin)}, trained"
    elif run.model.source is not None:
        named = (
            f"[{base}](https://huggingface.co/{base})"
            if base
            else f"the local model {code(Path(run.model.source).name)}"
        )
        origin = f"{'An adapter of' if _adapter_alone(task) else 'Fine-tuned from'} {named}"
    averaged = f" The weights are {run.average.summary}." if run.average.summary else ""
    same = (
        " With `strategy.exact` the weights are the same, bit for bit, on any number of processes."
        if run.strategy.exact
        else ""
    )
    batch = min(run.batch_size, len(task.splits["train"]))
    # redact before dumping: a bare *** has a meaning in YAML
    head = yaml_dump(redact_all(metadata(task, scores).to_dict(), printable), sort_keys=False).strip()
    file = without_home(run.dump(printable))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", file)), default=0))  # longer than any fence in the file
    return (
        f"---\n{head}\n---\n\n# {run.name}\n\n"
        f"{origin} on {where} for {quantity(steps, 'step')} of {quantity(batch, 'example')} in {run.precision}."
        f"{averaged}{labels}\n\n"
        f"## Use\n\n```python\n{_usage(task, base)}\n```\n\n"
        f"## Metrics\n\n{_table(scores)}\n\n{_part(task)}"
        f"## Training\n\nTrained with lockstep {__version__}.{same} The complete run file:\n\n"
        f"{fence}yaml\n{file}{fence}\n\n"
        f"## Licence\n\n{_licence(task, base)}\n"
    )


def metadata(task: Task, scores: dict[str, dict[str, float]]) -> ModelCardData:
    """Metadata that the Hub indexes."""
    from huggingface_hub import ModelCardData

    run = task.run
    base, results = hub_model(task), _results(task, scores)
    extra: dict[str, Any] = {}
    if base:
        extra["base_model_relation"] = "adapter" if run.model.adapter else "finetune"
    return ModelCardData(
        license=run.hub.license,
        language=languages(task) or None,
        library_name="peft" if _adapter_alone(task) else task.library,
        pipeline_tag=task.pipeline,
        base_model=base,
        datasets=[str(run.data.source)] if hub_data(task) else None,
        metrics=sorted({result.metric_type for result in results if result.metric_type != "loss"}) or None,
        tags=["lockstep", task.pipeline, *run.hub.tags],
        model_name=run.name,
        eval_results=results or None,
        **extra,
    )


def check_card(text: str, path: Path) -> None:
    """Refuse a model card whose metadata the Hub would refuse, as far as huggingface_hub can tell. Errors:
    `RunError`."""
    import yaml
    from huggingface_hub import ModelCard

    try:
        head = ModelCard(text).data
        missing = [name for name in ("library_name", "pipeline_tag") if not head.get(name)]
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise RunError(
            "LS6010", f"{path}: the YAML header of the model card is not valid: {' '.join(str(error).split())}"
        ) from error
    if missing:
        raise RunError("LS6011", f"{path}: the YAML header of the model card lacks {', '.join(missing)}")


def hub_model(task: Task) -> str | None:
    """Hub id of the base model. None for a model trained from scratch or a local folder."""
    source = task.run.model.source
    return source if _is_id(source) else None


def hub_data(task: Task) -> str | None:
    """Hub id of the data set. None for local files and generated data."""
    from lockstep.data import source

    run = task.run
    try:
        local = run.data.source == source.BUILTIN or bool(source.files_of(run.data))
    except RunError:  # local files that no longer exist
        local = True
    return run.data.source if not local and _is_id(run.data.source) else None


def languages(task: Task) -> list[str]:
    """Languages of the model: `hub.language`, or columns of the task that have the names of languages (en, de)."""
    run = task.run
    language = run.hub.language
    if language is not None:
        return [language] if isinstance(language, str) else list(language)
    columns = [str(run.task.options.get(key, "")) for key in task.language_keys]
    return columns if all(_LANGUAGE.fullmatch(column) for column in columns) else []


def words(text: str) -> str:
    """Escape user text as plain Markdown on one line: no links, markup or HTML."""
    plain = html.escape(" ".join(printable(text).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#|!~])", r"\\\1", plain)


def code(text: str) -> str:
    """Format user text as inline Markdown code."""
    return f"`{' '.join(printable(text).split()).replace('`', chr(39))}`"


def without_home(text: str) -> str:
    """Abbreviate the home folder to ~ in paths, so that a card does not reveal the user's name."""
    return text.replace(f"{Path.home()}/", "~/") if len(Path.home().parts) > 1 else text


def _is_id(source: str | None) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if source is None or Path(source).expanduser().exists():
        return False
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def _adapter_alone(task: Task) -> bool:
    adapter = task.run.model.adapter
    return bool(adapter) and adapter.get("export", "merged") == "adapter"


def _data_name(task: Task) -> str:
    """Name of the data: the Hub id, or the name of the file or folder without its path."""
    name = str(task.prepared.facts["source"])
    return name if hub_data(task) or not Path(name).expanduser().exists() else Path(name).name


def _results(task: Task, scores: dict[str, dict[str, float]]) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    run = task.run
    name = _data_name(task)
    results = []
    for split, values in scores.items():
        for metric, value in values.items():
            if metric == "examples" or not math.isfinite(value):  # the Hub's parser rejects NaN
                continue
            kind, called, arguments = _METRICS.get(metric, (metric, metric.replace("_", " ").capitalize(), None))
            results.append(
                EvalResult(
                    task_type=task.pipeline,
                    task_name=_TASKS.get(task.pipeline, task.pipeline.replace("-", " ").capitalize()),
                    dataset_type=re.sub(r"[^A-Za-z0-9./_-]", "-", name),
                    dataset_name=name,
                    dataset_config=run.data.config,
                    dataset_revision=run.data.revision,
                    dataset_split=split,
                    metric_type=kind,
                    metric_name=called,
                    metric_value=round(value, 6),
                    metric_args=arguments,
                )
            )
    return results


def _table(scores: dict[str, dict[str, float]]) -> str:
    """Markdown table of the scores, one row per split."""
    if not scores:
        return "None were computed."
    names = [name for name in dict.fromkeys(n for values in scores.values() for n in values) if name != "examples"]
    rows = ["| split | examples | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for split, values in scores.items():
        cells = " | ".join(f"{values[name]:.4f}" if name in values else "" for name in names)
        rows.append(f"| {split} | {values['examples']:.0f} | {cells} |")
    return "\n".join(rows)


def _part(task: Task) -> str:
    run = task.run
    if run.evaluate.limit is None:
        return ""
    return f"Validation metrics use at most {run.evaluate.limit:,} examples, drawn with the run's seed.\n\n"


def _usage(task: Task, base: str | None) -> str:
    if not _adapter_alone(task):
        return task.usage
    return f"# an adapter: needs peft and its base model, {base or task.run.model.source}\n{task.usage}"


def _licence(task: Task, base: str | None) -> str:
    run = task.run
    if run.hub.license is not None:
        return f"{words(run.hub.license)}."
    others = [f"of the base model `{base}`"] if base else []
    others += ["of the data"]
    return f"Not stated. The licences {' and '.join(others)} apply."
