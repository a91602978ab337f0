"""The model card: the README.md that the Hub shows, with the metadata that it indexes.

In: a run, its task and final scores. Out: Markdown under a YAML head. The words of the head are the Hub's
(https://github.com/huggingface/hub-docs, modelcard.md); `huggingface_hub` writes and checks them.
"""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep._version import __version__
from lockstep.config.redaction import printable, redact_all
from lockstep.config.run import Run, RunError
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

HERE = "PATH_OR_REPO"  # stands for the model's place in `Task.usage`; a push writes the repository instead
# Our metric -> the Hub's name for it, what people call it, and its arguments.
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


def model_card(run: Run, task: Task, scores: dict[str, dict[str, float]], steps: int) -> str:
    """The card of a run that ended after `steps`, with the scores of its splits."""
    from huggingface_hub.utils import yaml_dump

    base, data = hub_model(run), _data_name(run, task)
    where = f"[{run.data.source}](https://huggingface.co/datasets/{run.data.source})" if hub_data(run) else code(data)
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
        origin = f"{'An adapter of' if _adapter_alone(run) else 'Fine-tuned from'} {named}"
    averaged = f" The weights are {run.average.summary}." if run.average.summary else ""
    same = " Under `strategy.exact` the same bits come out at any number of processes." if run.strategy.exact else ""
    # struck before they are YAML, to which a bare *** means something else
    head = yaml_dump(redact_all(metadata(run, task, scores).to_dict(), printable), sort_keys=False).strip()
    file = without_home(run.dump(printable))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", file)), default=0))  # longer than any in the file
    return (
        f"---\n{head}\n---\n\n# {run.name}\n\n"
        f"{origin} on {where} for {steps} steps of {run.batch_size} examples in {run.precision}.{averaged}{labels}\n\n"
        f"## Use\n\n```python\n{_usage(run, task, base)}\n```\n\n"
        f"## Metrics\n\n{_table(scores)}\n\n{_part(run)}"
        f"## Training\n\nTrained with lockstep {__version__}.{same} The run file, complete:\n\n"
        f"{fence}yaml\n{file}{fence}\n\n"
        f"## Licence\n\n{_licence(run, base)}\n"
    )


def metadata(run: Run, task: Task, scores: dict[str, dict[str, float]]) -> ModelCardData:
    """The metadata that the Hub indexes."""
    from huggingface_hub import ModelCardData

    base, results = hub_model(run), _results(run, task, scores)
    extra: dict[str, Any] = {"base_model_relation": "adapter" if run.model.adapter else "finetune"} if base else {}
    return ModelCardData(
        license=run.hub.license,
        language=languages(run) or None,
        library_name="peft" if _adapter_alone(run) else task.library,
        pipeline_tag=task.pipeline,
        base_model=base,
        datasets=[str(run.data.source)] if hub_data(run) else None,
        metrics=sorted({result.metric_type for result in results if result.metric_type != "loss"}) or None,
        tags=["lockstep", task.pipeline, *run.hub.tags],
        model_name=run.name,
        eval_results=results or None,
        **extra,
    )


def check(text: str, path: Path) -> None:
    """Refuse a card whose head the Hub would refuse, as far as huggingface_hub can tell. Errors: `RunError`."""
    import yaml
    from huggingface_hub import ModelCard

    try:
        head = ModelCard(text).data
        missing = [name for name in ("library_name", "pipeline_tag") if not head.get(name)]
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise RunError(f"{path}: the head of the model card is not valid: {' '.join(str(error).split())}") from error
    if missing:
        raise RunError(f"{path}: the head of the model card says nothing of {', '.join(missing)}")


def hub_model(run: Run) -> str | None:
    """The Hub id of the base model; None from scratch, or from a local folder."""
    return run.model.source if _is_id(run.model.source) else None


def hub_data(run: Run) -> str | None:
    """The Hub id of the data set; None for local files and generated data."""
    from lockstep.data import source

    try:
        local = run.data.source == source.BUILTIN or bool(source.files_of(run.data))
    except RunError:  # local files that are gone by now
        local = True
    return run.data.source if not local and _is_id(run.data.source) else None


def languages(run: Run) -> list[str]:
    """`hub.language`; for translation, the columns where they are called as languages are (en, de)."""
    language = run.hub.language
    if language is not None:
        return [language] if isinstance(language, str) else list(language)
    columns = [str(run.task.options.get(side, "")) for side in ("source", "target")]
    translates = run.task.name == "translation" and all(_LANGUAGE.fullmatch(column) for column in columns)
    return columns if translates else []


def words(text: str) -> str:
    """A person's text as words of Markdown: on one line, and none of it a link, markup or HTML."""
    plain = html.escape(" ".join(printable(text).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#|!~])", r"\\\1", plain)


def code(text: str) -> str:
    """A person's text as code of Markdown, on one line."""
    return f"`{' '.join(printable(text).split()).replace('`', chr(39))}`"


def without_home(text: str) -> str:
    """Paths below the home folder begin with ~: a card says nothing of who wrote it."""
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


def _adapter_alone(run: Run) -> bool:
    return run.model.adapter.get("export", "merged") == "adapter" if run.model.adapter else False


def _data_name(run: Run, task: Task) -> str:
    """The name of the data: a Hub id, or a file's or folder's own name without where it lies."""
    name = str(task.prepared.facts["source"])
    return name if hub_data(run) or not Path(name).expanduser().exists() else Path(name).name


def _results(run: Run, task: Task, scores: dict[str, dict[str, float]]) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    name = _data_name(run, task)
    results = []
    for split, values in scores.items():
        for metric, value in values.items():
            if metric == "examples" or not math.isfinite(value):  # the Hub's parser knows no nan
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
    """The scores for a reader, a row a split."""
    if not scores:
        return "None were computed."
    names = [name for name in dict.fromkeys(n for values in scores.values() for n in values) if name != "examples"]
    rows = ["| split | examples | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for split, values in scores.items():
        cells = " | ".join(f"{values[name]:.4f}" if name in values else "" for name in names)
        rows.append(f"| {split} | {values['examples']:.0f} | {cells} |")
    return "\n".join(rows)


def _part(run: Run) -> str:
    if run.evaluate.limit is None:
        return ""
    return f"Validation was scored on at most {run.evaluate.limit:,} of its examples, drawn with the seed.\n\n"


def _usage(run: Run, task: Task, base: str | None) -> str:
    if not _adapter_alone(run):
        return task.usage
    return f"# needs peft, and {base or run.model.source}, of which this is an adapter\n{task.usage}"


def _licence(run: Run, base: str | None) -> str:
    if run.hub.license is not None:
        return f"{words(run.hub.license)}."
    others = [f"of the base model `{base}`"] if base else []
    others += ["of the data"]
    return f"None is stated. Those {' and '.join(others)} apply."
