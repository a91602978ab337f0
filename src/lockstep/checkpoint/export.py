"""Write the export folder with its model card at the end of a run, and upload it to the Hub.

In: full weights on rank 0 and the final scores; for a push, the export folder and HF_TOKEN. Out: `OUTPUT/export`, which
`from_pretrained` loads, and the same files in a Hub repository, in one atomic commit. The card's metadata fields are
the Hub's (https://github.com/huggingface/hub-docs, modelcard.md). Imports no torch at the top, and huggingface_hub only
when called.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep._version import __version__
from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.folder import size_of
from lockstep.config.errors import CodedError, coded
from lockstep.config.redaction import one_line, printable, redact_all
from lockstep.config.run import Run, RunError, require_output
from lockstep.data.hub import explained, status_of, transient
from lockstep.tasks.task import Task
from lockstep.track.console import error as tell
from lockstep_trace.plurals import quantity

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData
    from torch import Tensor


PUSH_KEY = "hub.push_to"  # run-file key that requests a push
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
    same = " Under `strategy.exact` the same bits come out at any number of processes." if run.strategy.exact else ""
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
        f"## Training\n\nTrained with lockstep {__version__}.{same} The run file, complete:\n\n"
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
    return f"Validation was scored on at most {run.evaluate.limit:,} of its examples, drawn with the seed.\n\n"


def _usage(task: Task, base: str | None) -> str:
    if not _adapter_alone(task):
        return task.usage
    return f"# needs peft, and {base or task.run.model.source}, of which this is an adapter\n{task.usage}"


def _licence(task: Task, base: str | None) -> str:
    run = task.run
    if run.hub.license is not None:
        return f"{words(run.hub.license)}."
    others = [f"of the base model `{base}`"] if base else []
    others += ["of the data"]
    return f"None is stated. Those {' and '.join(others)} apply."


_COMMIT = "Trained with lockstep"  # title of a push
_CONFIGS = ("config.json", "generation_config.json")
PUSHED = "hub.json"  # file in OUTPUT: repository and commit of the pushed export
# Files of an earlier push that a push deletes if this export lacks them.
_STALE = [
    *("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json", "generation_config.json"),
    *("pytorch_model*.bin", "pytorch_model.bin.index.json", "adapter_model.bin", "training_args.bin"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*", "added_tokens.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "preprocessor_config.json"),
    *("processor_config.json", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
]


class PushFailed(CodedError):
    """All attempts to push to the Hub failed. The export is kept for another attempt."""


@dataclass(frozen=True)
class PushPatience:
    """Retries and timeouts of a push. In addition, huggingface_hub retries each file upload a few times."""

    tries: int = 4
    wait_s: float = 2.0  # before the second attempt; doubles each time
    timeout_s: float = 300.0  # per request, without a response


@dataclass(frozen=True)
class Pushed:
    """Result of a push."""

    repository: str
    commit: str
    address: str


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
        export_hashes.clear(folder / ".export.partial")
    return folder / "export"


def try_export(task: Task, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]]) -> int:
    """Write an export before training, to check that it can be written, and remove it. Returns its bytes. Rank 0 only.
    Errors: `OSError`."""
    run = task.run
    try:
        return size_of(_write_aside(run.folder, task, weights, scores, 0))
    finally:
        export_hashes.clear(run.folder / ".export.partial")


def _write_aside(
    folder: Path, task: Task, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]], steps: int
) -> Path:
    aside = folder / ".export.partial"
    export_hashes.clear(aside)
    aside.mkdir(parents=True)
    try:
        task.write(aside, weights)
    except Exception as caught:  # safetensors and tokenizers wrap OS errors in their own classes
        number = re.search(r"\(os error (\d+)\)", str(caught))
        if number is None or isinstance(caught, OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(aside)) from caught
    (aside / "README.md").write_text(model_card(task, scores, steps), encoding="utf-8")
    return aside


# -- before training -------------------------------------------------------------------------------------------------


def require(run: Run) -> None:
    """Refuse a run that pushes to the Hub but has no token. Errors: `RunError`."""
    if pending(run):
        _token(str(run.hub.push_to))


def pending(run: Run) -> bool:
    """Return whether `hub.push_to` is set and this run's export has not been pushed there."""
    if run.hub.push_to is None:
        return False
    try:
        record = json.loads((run.folder / PUSHED).read_text(encoding="utf-8"))
        return record["repository"] != run.hub.push_to or record["export"] != _fingerprint(run.folder / "export")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def check(run: Run, timeout_s: float = 10.0) -> list[str]:
    """Refuse, before training, a run whose push would fail. Returns notes for the user.

    Errors: `RunError` if there is no token, the Hub rejects it, or it lacks write permission. An unreachable Hub is
    only a note: it may be reachable at the end.
    """
    if not pending(run):
        return []
    repository = str(run.hub.push_to)
    token = _token(repository)
    from huggingface_hub import HfApi

    _be_patient(timeout_s)
    try:
        account = HfApi(token=token).whoami()
    except Exception as error:  # any failure of Hub or network; only a refusal is for the user to fix
        if status_of(error) in (401, 403):
            raise RunError(
                "LS6012", f"hub.push_to: cannot push to {repository}: {explained(error, writes=True)}"
            ) from error
        why = explained(error, writes=True)
        return [f"hub.push_to: whether HF_TOKEN may push to {repository} could not be checked: {why}"]
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise RunError(
            "LS6013",
            f"hub.push_to: HF_TOKEN is a read-only token; pushing to {repository} needs a token with write access",
        )
    places = [str(account.get("name")), *(str(each.get("name")) for each in account.get("orgs") or [])]
    user = repository.partition("/")[0]
    if "orgs" in account and user.lower() not in [place.lower() for place in places]:
        raise RunError(
            "LS6014",
            f"hub.push_to: HF_TOKEN belongs to {places[0]}, who cannot push to {user}; it can push to "
            f"{', '.join(places)}",
        )
    return []


def _token(repository: str, called: str = PUSH_KEY) -> str:
    """Token for pushing to the Hub, from the environment only. `called`: the key or command that needs it. Errors:
    `RunError`."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token or not token.strip():
        raise RunError(
            "LS6015",
            f"{called}: no token to push to {repository}. Create one with write access at "
            "https://huggingface.co/settings/tokens and set it in the environment: export HF_TOKEN=...",
        )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise RunError("LS6016", f"{called}: HF_HUB_OFFLINE is set, so nothing can be pushed to {repository}; unset it")
    return token.strip()


# -- pushing ---------------------------------------------------------------------------------------------------------


def push_pending(run: Run, say: Callable[[str], None]) -> int:
    """Push the export of a finished run to `hub.push_to`, unless it is there. Rank 0 only. Returns the exit status: 1
    if the push failed; the export is kept for another attempt."""
    if not pending(run):
        return 0
    try:
        pushed = push(run.folder, str(run.hub.push_to), run.hub.private, say, called=PUSH_KEY)
    except (PushFailed, RunError) as failed:
        tell(str(failed))
        return 1
    say(f"pushed to {pushed.address}, commit {pushed.commit[:12]}")
    return 0


def push(
    output: Path,
    repository: str,
    private: bool,
    say: Callable[[str], None],
    patience: PushPatience | None = None,
    called: str = "lockstep push",
) -> Pushed:
    """Upload the export of an output folder; unchanged files are not sent again. Not collective: rank 0 only.

    `say` receives messages about failed attempts; `called`: the key or command to name in messages. Errors: `RunError`
    for problems that the user can fix (no export, no token, no permission, a public repository although a private one
    was requested), `PushFailed` if the Hub could not be reached.
    """
    folder, patience = output / "export", patience or PushPatience()
    if not output.is_dir():
        require_output(output)
    if not (folder / "README.md").is_file():
        raise RunError(
            "LS6017",
            f"{output} has no export to push: its run is not finished, or the folder is gone; run lockstep "
            "train again to write it",
        )
    if link := next((path for path in (folder, *sorted(folder.rglob("*"))) if path.is_symlink()), None):
        raise RunError(
            "LS6018", f"{link} is a link, and the file behind a link is not pushed; replace it by a copy, or remove it"
        )
    export_hashes.require_whole(output)
    if (text := export_hashes.note_of_edits(output)) is not None:
        say(f"note: {text}")
    token = _token(repository, called)
    check_card((folder / "README.md").read_text(encoding="utf-8"), folder / "README.md")
    for attempt in range(1, patience.tries + 1):
        _be_patient(patience.timeout_s)
        try:
            pushed = _once(folder, repository, private, token, called)
        except RunError:
            raise
        except Exception as error:  # anything that the Hub, the network or a library raises
            if not transient(error):
                raise RunError(
                    "LS6019", f"{called}: pushing {folder} to {repository} was refused: {explained(error, writes=True)}"
                ) from error
            if attempt == patience.tries:
                raise PushFailed(
                    "LS6020",
                    f"pushing {folder} to {repository} failed {attempt} times; the last error was: "
                    f"{explained(error, writes=True)}\nThe export is complete; push it again with: lockstep push "
                    f"{output} {repository}{'' if private else ' --public'}",
                ) from error
            wait = patience.wait_s * 2 ** (attempt - 1)
            say(
                f"note: pushing to {repository}: {explained(error, writes=True)}; trying again in {wait:g} s "
                f"({attempt}/{patience.tries})"
            )
            time.sleep(wait)
        else:
            _keep(output, pushed)
            return pushed
    raise AssertionError("a push either succeeds or raises")


def _once(folder: Path, repository: str, private: bool, token: str, called: str) -> Pushed:
    """One attempt: one commit with the changes."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()  # lockstep reports errors itself, once
    api = HfApi(token=token)
    api.create_repo(repository, private=private, exist_ok=True)
    about = api.model_info(repository)
    if private and about.private is False:
        if called != PUSH_KEY:
            raise RunError(
                "LS6120",
                f"{called}: {repository} exists and is public, but without --public a private one is asked for. "
                "Nothing was pushed; make the repository private on its page, or add --public",
            )
        raise RunError(
            "LS6021",
            f"hub.private: {repository} exists and is public, but the run asks for a private one. Nothing was pushed; "
            "make the repository private on its page, or set hub.private=false",
        )
    files: dict[str, Any] = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    text = (folder / "README.md").read_text(encoding="utf-8")
    files["README.md"] = text.replace(HERE, repository).encode()
    there = [file.rfilename for file in about.siblings or []]
    stale = [name for name in there if name not in files and any(fnmatch(name, each) for each in _STALE)]
    stale = [name for name in stale if name not in _of_others(api, repository, stale)]
    commit = api.create_commit(  # not upload_folder, which may create several commits
        repository,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ],
        commit_message=_COMMIT,
    )
    return Pushed(repository, str(commit.oid), f"{api.endpoint}/{repository}")


def _of_others(api: Any, repository: str, names: list[str]) -> set[str]:
    """Configs that somebody put into the repository by hand: their last commit is not one of lockstep's. Weights and a
    tokenizer are not among them: transformers would load them in place of the export's."""
    configs = [name for name in names if name in _CONFIGS]
    if not configs:
        return set()
    about = api.get_paths_info(repository, configs, expand=True)
    return {each.path for each in about if each.last_commit is None or each.last_commit.title != _COMMIT}


def _be_patient(timeout_s: float) -> None:
    """Set a request timeout; by default huggingface_hub waits forever."""
    from huggingface_hub import get_session

    session: Any = get_session()
    session.timeout = timeout_s


def _keep(output: Path, pushed: Pushed) -> None:
    """Write OUTPUT/hub.json, so that the run does not push again. A failure to write is ignored."""
    try:
        values = asdict(pushed) | {"export": _fingerprint(output / "export")}
        (output / PUSHED).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        tell(coded("LS6022", f"{output / PUSHED} could not be written: {one_line(error, 300)}"))


def _fingerprint(export: Path) -> list[list[Any]]:
    """Names, sizes and modification times of an export's files."""
    files = sorted(path for path in export.rglob("*") if path.is_file())
    return [[str(p.relative_to(export)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
