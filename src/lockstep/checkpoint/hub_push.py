"""Push an export to a Hub repository, in one atomic commit.

In: the export folder and HF_TOKEN. Out: the commit. Imports no torch, and huggingface_hub only when called.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.export import HERE, check_card
from lockstep.config.errors import CodedError, coded
from lockstep.config.output_files import replace_text, require_output
from lockstep.config.redaction import one_line
from lockstep.config.run import RunError
from lockstep.config.sections import HubSection
from lockstep.data.hub import explained, status_of, transient
from lockstep.track.console import error as tell

PUSH_KEY = "hub.push_to"  # run-file key that requests a push
_COMMIT = "Trained with lockstep"  # title of a push
_SIZE = re.compile(r"^(n|num|d)_|^dim$|_(size|dim|layers|heads)$")  # keys of a config that are sizes of weights
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
    uploaded: bool = True  # False: the repository holds this export already, in the commit

    def __str__(self) -> str:
        if self.uploaded:
            return f"pushed to {self.address}, commit {self.commit[:12]}"
        return f"unchanged: {self.address} holds this export already, in commit {self.commit[:12]}"


def require(output: Path, repository: str) -> None:
    """Refuse to push the export of an output folder without a token. Errors: `RunError`."""
    if pending(output, repository):
        _token(repository)


def pending(output: Path, repository: str | None) -> bool:
    """Return whether there is a `repository` (`hub.push_to`) and the export in `output` has not been pushed there."""
    if repository is None:
        return False
    try:
        record = json.loads((output / PUSHED).read_text(encoding="utf-8"))
        return record["repository"] != repository or record["export"] != _fingerprint(output / "export")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def check(
    output: Path, section: HubSection, config: Callable[[], Mapping[str, Any]], timeout_s: float = 10.0
) -> list[str]:
    """Refuse, before training, a run whose push would fail. Returns notes for the user. `config`: returns the model's
    config as far as it is known; empty if none is exported.

    Errors: `RunError` if there is no token, the Hub rejects it, or it lacks write permission, and if the repository is
    public or holds another model. An unreachable Hub is only a note: it may be reachable at the end.
    """
    if not pending(output, section.push_to):
        return []
    repository = str(section.push_to)
    token = _token(repository)
    from huggingface_hub import HfApi

    _be_patient(timeout_s)
    api = HfApi(token=token)
    try:
        account = api.whoami()
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
    try:
        about = api.model_info(repository)
        other = _another_model(api, repository, config(), about)
    except Exception:  # no repository yet, or no network: the push checks again
        return []
    _refuse(repository, section.private and about.private is False, other, PUSH_KEY, output)
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


def push_pending(output: Path, section: HubSection, say: Callable[[str], None]) -> int:
    """Push the export of a finished run's output folder to `hub.push_to`, unless it is there. Rank 0 only. Returns the
    exit status: 1 if the push failed; the export is kept for another attempt."""
    if not pending(output, section.push_to):
        return 0
    try:
        pushed = push(output, str(section.push_to), section.private, say, called=PUSH_KEY)
    except (PushFailed, RunError) as failed:
        tell(str(failed))
        return 1
    say(str(pushed))
    return 0


def push(
    output: Path,
    repository: str,
    private: bool,
    say: Callable[[str], None],
    patience: PushPatience | None = None,
    called: str = "lockstep push",
    replace: bool = False,
) -> Pushed:
    """Upload the export of an output folder; unchanged files are not sent again. Not collective: rank 0 only.

    `say` receives messages about failed attempts; `called`: the key or command to name in messages; `replace`: also a
    model of another size. Errors: `RunError`
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
    _check_files(output, say)
    token = _token(repository, called)
    check_card((folder / "README.md").read_text(encoding="utf-8"), folder / "README.md")
    for attempt in range(1, patience.tries + 1):
        _be_patient(patience.timeout_s)
        try:
            pushed = _once(folder, repository, private, token, called, replace)
        except RunError:
            raise
        except Exception as error:  # anything that the Hub, the network or a library raises
            if not transient(error):
                raise RunError(
                    "LS6019", f"{called}: the Hub refused {folder} for {repository}: {explained(error, writes=True)}"
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


def _check_files(output: Path, say: Callable[[str], None]) -> None:
    """Note files that were edited. Errors: `RunError` for a link, for damage, and for a config that was edited to other
    sizes than the weights have."""
    folder = output / "export"
    if link := next((path for path in (folder, *sorted(folder.rglob("*"))) if path.is_symlink()), None):
        raise RunError(
            "LS6018", f"{link} is a link, and the file behind a link is not pushed; replace it by a copy, or remove it"
        )
    export_hashes.require_whole(output)
    if (text := export_hashes.note_of_edits(output)) is not None:
        say(f"note: {text}")
        if not (folder / "adapter_config.json").is_file():
            from lockstep.tasks.models.source_files import check_edited  # imports torch

            check_edited(folder)


def _once(folder: Path, repository: str, private: bool, token: str, called: str, replace: bool) -> Pushed:
    """One attempt: one commit with the changes."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()  # lockstep reports errors itself, once
    api = HfApi(token=token)
    api.create_repo(repository, private=private, exist_ok=True)
    about = api.model_info(repository)
    path = folder / "config.json"
    ours = json.loads(path.read_bytes()) if path.is_file() and not replace else {}
    other = _another_model(api, repository, ours, about)
    _refuse(repository, private and about.private is False, other, called, folder.parent)
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
    uploaded = str(commit.oid) != str(about.sha)  # huggingface_hub makes no empty commit
    return Pushed(repository, str(commit.oid), f"{api.endpoint}/{repository}", uploaded)


def _refuse(repository: str, is_public: bool, other: str | None, called: str, output: Path) -> None:
    """Refuse a repository that is public, for a private push, or holds another model: `other`. Errors: `RunError`."""
    if is_public:
        if called != PUSH_KEY:
            raise RunError(
                "LS6120",
                f"{called}: {repository} exists and is public, but without --public a push must be private. "
                "Nothing was pushed; make the repository private on its page, or add --public",
            )
        raise RunError(
            "LS6021",
            f"hub.private: {repository} exists and is public, but the run asks for a private one. Nothing was pushed; "
            "make the repository private on its page, or set hub.private=false",
        )
    if other is not None:
        raise RunError(
            "LS6023",
            f"{called}: {repository} holds another model ({other}), and nothing was pushed. Push to a new repository, "
            f"or replace that model by the export: lockstep push {output} {repository} --replace",
        )


def _another_model(api: Any, repository: str, ours: Mapping[str, Any], about: Any) -> str | None:
    """Describe how the model of a repository differs in family or size from a config, or return None. `about`: the
    Hub's answer on the repository."""
    if not ours or "config.json" not in [file.rfilename for file in about.siblings or []]:
        return None
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    session: Any = get_session()
    address = f"{api.endpoint}/{repository}/resolve/main/config.json"
    answer = session.get(address, headers=build_hf_headers(token=api.token), follow_redirects=True)
    hf_raise_for_status(answer)
    try:
        theirs = json.loads(answer.content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(theirs, dict):
        return None
    names = [name for name in ours if name in theirs and (name == "model_type" or _SIZE.search(name))]
    other = [f"{name} {theirs[name]} there, {ours[name]} here" for name in names if theirs[name] != ours[name]]
    return one_line("; ".join(other), 200) or None


def _of_others(api: Any, repository: str, names: list[str]) -> set[str]:
    """Return the configs in the repository whose last commit is not lockstep's: the user added them by hand, so a push
    keeps them. Weights and tokenizer files are never kept: transformers would load them instead of the export's."""
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
        del values["uploaded"]
        replace_text(output / PUSHED, json.dumps(values, indent=2) + "\n")
    except OSError as error:
        tell(coded("LS6022", f"{output / PUSHED} could not be written: {one_line(error, 300)}"))


def _fingerprint(export: Path) -> list[list[Any]]:
    """Names, sizes and modification times of an export's files."""
    files = sorted(path for path in export.rglob("*") if path.is_file())
    return [[str(p.relative_to(export)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
