"""Export folder -> the Hub: written with its card at the end of a run, and uploaded.

In: full weights on rank 0 and final scores; later the export folder and HF_TOKEN. Out: `OUTPUT/export/`, which
`from_pretrained` loads, and the same files in a repository of the Hub. Imports no torch at the top, and huggingface_hub
only when called.

A push is one commit: a reader of the repository sees all of it or nothing. Files that arrived before a push was cut are
kept by the Hub, so that the next try sends what is missing; a push of the same bytes sends none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import card, exported
from lockstep.checkpoint.disk_space import size_of
from lockstep.config.run import Run, RunError
from lockstep.data.hub_errors import explained, one_line, status_of, transient
from lockstep.tasks.task import Task
from lockstep.track.console import error as tell

if TYPE_CHECKING:
    from torch import Tensor

PUSHED = "hub.json"  # in OUTPUT: where the export was pushed to, and as which commit
# What a push replaces of an earlier one: weights that this export does not have.
_STALE = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]


class PushFailed(Exception):
    """The Hub could not be reached, or failed, as often as it was tried. The export is there for another try."""


@dataclass(frozen=True)
class PushPatience:
    """The time for which a push is tried. huggingface_hub tries each upload of a file a few times by itself, within
    this."""

    tries: int = 4
    wait_s: float = 2.0  # before the second try; then twice as long each time
    timeout_s: float = 300.0  # that the Hub may be silent in a request


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    repository: str
    commit: str
    address: str


def write_export(
    run: Run,
    task: Task,
    weights: Mapping[str, Tensor],
    scores: dict[str, dict[str, float]],
    steps: int,
    folder: Path | None = None,
) -> Path:
    """Write the export and its model card in OUTPUT, or in another folder; aside, then renamed. Rank 0 only. Errors:
    `OSError`; then nothing is left of it."""
    folder = folder or run.folder
    try:
        exported.settle(_write_aside(folder, run, task, weights, scores, steps), folder)
    finally:
        shutil.rmtree(folder / ".export.partial", ignore_errors=True)
    return folder / "export"


def try_export(run: Run, task: Task, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]]) -> int:
    """Write an export before training and remove it: whether it can be written. Returns its bytes. Rank 0 only.
    Errors: `OSError`."""
    try:
        return size_of(_write_aside(run.folder, run, task, weights, scores, 0))
    finally:
        shutil.rmtree(run.folder / ".export.partial", ignore_errors=True)


def _write_aside(
    folder: Path, run: Run, task: Task, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]], steps: int
) -> Path:
    aside = folder / ".export.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        task.write(aside, weights)
    except Exception as caught:  # safetensors and tokenizers have errors of their own for what the disk says
        number = re.search(r"\(os error (\d+)\)", str(caught))
        if number is None or isinstance(caught, OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(aside)) from caught
    (aside / "README.md").write_text(card.model_card(run, task, scores, steps), encoding="utf-8")
    return aside


# -- before training -------------------------------------------------------------------------------------------------


def require(run: Run) -> None:
    """Refuse a run that is to be pushed and has no token to do it with. Errors: `RunError`."""
    if pending(run):
        _token(str(run.hub.push_to))


def pending(run: Run) -> bool:
    """Whether `hub.push_to` is set and this run's export has not been pushed there."""
    if run.hub.push_to is None:
        return False
    try:
        record = json.loads((run.folder / PUSHED).read_text(encoding="utf-8"))
        return record["repository"] != run.hub.push_to or record["export"] != _fingerprint(run.folder / "export")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def check(run: Run, timeout_s: float = 10.0) -> list[str]:
    """Refuse, before training, a run that could not be pushed at its end. Returns notes for a person.

    Errors: `RunError` without a token, or with one that the Hub does not accept or that may not write there. A Hub that
    cannot be reached now is a note: it may be there at the end.
    """
    if not pending(run):
        return []
    repository = str(run.hub.push_to)
    token = _token(repository)
    from huggingface_hub import HfApi

    _be_patient(timeout_s)
    try:
        account = HfApi(token=token).whoami()
    except Exception as error:  # whatever the Hub and the network do; only a refusal is the user's to mend
        if status_of(error) in (401, 403):
            raise RunError(f"hub.push_to: cannot push to {repository}: {explained(error)}") from error
        return [f"hub.push_to: whether HF_TOKEN may push to {repository} could not be checked: {explained(error)}"]
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise RunError(f"hub.push_to: HF_TOKEN may only read; pushing to {repository} needs a token that may write")
    places = [str(account.get("name")), *(str(each.get("name")) for each in account.get("orgs") or [])]
    user = repository.partition("/")[0]
    if "orgs" in account and user.lower() not in [place.lower() for place in places]:
        raise RunError(
            f"hub.push_to: HF_TOKEN belongs to {places[0]}, who cannot push to {user}; known are {', '.join(places)}"
        )
    return []


def _token(repository: str) -> str:
    """From the environment and nowhere else. Errors: `RunError`."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token or not token.strip():
        raise RunError(
            f"hub.push_to: there is no token to push to {repository} with. Make one that may write at "
            "https://huggingface.co/settings/tokens and set it in the environment: export HF_TOKEN=..."
        )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise RunError(f"hub.push_to: HF_HUB_OFFLINE is set, so nothing can be pushed to {repository}; unset it")
    return token.strip()


# -- pushing ---------------------------------------------------------------------------------------------------------


def push_pending(run: Run, say: Callable[[str], None]) -> int:
    """Push the export of a finished run to where `hub.push_to` says, unless it is there. Rank 0 only. Returns the exit
    status: 1 when it was tried in vain, which leaves the export for another try."""
    if not pending(run):
        return 0
    try:
        pushed = push(run.folder, str(run.hub.push_to), run.hub.private, say)
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
) -> Pushed:
    """Upload the export of an output folder; what is there already is not sent again. Not collective: rank 0 only.

    `say` hears of tries that failed. Errors: `RunError` for what the user can mend (no export, no token, no permission,
    a public repository where a private one was asked for), `PushFailed` when the Hub could not be reached in the end.
    """
    folder, patience = output / "export", patience or PushPatience()
    if not (folder / "README.md").is_file():
        raise RunError(f"{output} has no export to push: its run is not finished; lockstep train goes on with it")
    if link := next((path for path in (folder, *sorted(folder.rglob("*"))) if path.is_symlink()), None):
        raise RunError(f"{link} is a link; what it leads to is not pushed. Put a copy there, or remove it")
    token = _token(repository)
    card.check((folder / "README.md").read_text(encoding="utf-8"), folder / "README.md")
    for attempt in range(1, patience.tries + 1):
        _be_patient(patience.timeout_s)
        try:
            pushed = _once(folder, repository, private, token)
        except RunError:
            raise
        except Exception as error:  # whatever the Hub, the network and the libraries between raise
            if not transient(error):
                raise RunError(
                    f"hub.push_to: pushing {folder} to {repository} was refused: {explained(error)}"
                ) from error
            if attempt == patience.tries:
                raise PushFailed(
                    f"pushing {folder} to {repository} failed {attempt} times, at last because {explained(error)}\n"
                    f"The export is there; go on with: lockstep push {output} {repository}"
                    f"{'' if private else ' --public'}"
                ) from error
            wait = patience.wait_s * 2 ** (attempt - 1)
            say(
                f"note: pushing to {repository}: {explained(error)}; trying again in {wait:g} s "
                f"({attempt}/{patience.tries})"
            )
            time.sleep(wait)
        else:
            _keep(output, pushed)
            return pushed
    raise AssertionError("a push either succeeds or raises")


def _once(folder: Path, repository: str, private: bool, token: str) -> Pushed:
    """One try: one commit, of what is there and has changed."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()  # what goes wrong is told once, by us
    api = HfApi(token=token)
    api.create_repo(repository, private=private, exist_ok=True)
    about = api.model_info(repository)
    if private and about.private is False:
        raise RunError(
            f"hub.private: {repository} is there and public, and the run asks for a private one. Nothing was pushed; "
            "make it private on its page, or push with hub.private=false (lockstep push --public)"
        )
    files: dict[str, Any] = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    text = (folder / "README.md").read_text(encoding="utf-8")
    files["README.md"] = text.replace(card.HERE, repository).encode()
    there = [file.rfilename for file in about.siblings or []]
    stale = [name for name in there if name not in files and any(fnmatch(name, each) for each in _STALE)]
    commit = api.create_commit(  # not upload_folder, which may make several
        repository,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ],
        commit_message="Trained with lockstep",
    )
    return Pushed(repository, str(commit.oid), f"{api.endpoint}/{repository}")


def _be_patient(timeout_s: float) -> None:
    """Let a request end when the Hub is silent for so long; huggingface_hub itself would wait for ever."""
    from huggingface_hub import get_session

    session: Any = get_session()
    session.timeout = timeout_s


def _keep(output: Path, pushed: Pushed) -> None:
    """OUTPUT/hub.json, so that the same run does not push again. A folder that cannot be written does no harm."""
    try:
        values = asdict(pushed) | {"export": _fingerprint(output / "export")}
        (output / PUSHED).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        tell(f"{output / PUSHED} could not be written: {one_line(error)}")


def _fingerprint(export: Path) -> list[list[Any]]:
    """Names, sizes and times of an export's files."""
    files = sorted(path for path in export.rglob("*") if path.is_file())
    return [[str(p.relative_to(export)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
