"""Access to the Hub: resolve a name to repository, folder and commit, download files, and explain errors.

In: a Hub id or an address. Out: names with a commit, download progress, and readable errors.

A stream reads one commit, so that its content does not change during the run or later. Progress is measured from the
outside, as growing files in the Hub's cache, because the libraries' own progress bars would overwrite one another and
ours.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import pickle
import re
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from lockstep.config.data_sources import USUAL, address_of
from lockstep.config.errors import InvalidValue
from lockstep.config.redaction import one_line
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data.cache import cache_folder
from lockstep.track.busy import ACTIVITY

# Retryable status codes: time-outs, commit conflicts, rate limits and server errors.
_AGAIN = (408, 409, 412, 425, 429, 500, 502, 503, 504)
_STATUS = {
    401: "it does not accept the token (401): HF_TOKEN is wrong or has expired",
    402: "it requires payment (402)",
    403: "HF_TOKEN has no permission for this (403): use a token that has it, or ask the repository's owner for access",
    413: "it rejects a file as too large (413)",
    429: "it received too many requests (429)",
}


OFFLINE = "HF_HUB_OFFLINE is set, and it is not in the cache; unset it, give a local folder, or `hf download` it first"
CONNECT_S = 5.0  # connection timeout in seconds
ANSWER_S = 10.0  # time in which a host must answer a request; the Hub library's own limit for one
SILENT = f"it accepts connections and does not answer within {ANSWER_S:g} s"
NO_WRITING = "HF_HUB_OFFLINE is set; unset it"


def explained(error: BaseException, revision: str | None = None, writes: bool = False) -> str:
    """Explain a failure in one sentence. `revision`: as requested. `writes`: an upload, for which local folders or the
    cache do not help."""
    from huggingface_hub import constants, errors

    for each in _chain(error):
        if isinstance(each, errors.GatedRepoError):
            return "it is gated: ask for access on its page, and set HF_TOKEN to a token of the account that has it"
        if isinstance(each, errors.RevisionNotFoundError):
            return f"it has no revision {revision!r}" if revision else "it has no such revision"
        if isinstance(each, errors.RepositoryNotFoundError):
            return "the Hub has no such repository, or it is private and HF_TOKEN is not a token that may read it"
        if _is_offline(each):
            return NO_WRITING if writes else OFFLINE
    if (status := status_of(error)) is not None:
        if status in _STATUS:
            return _STATUS[status]
        response_error = next((e for e in _chain(error) if isinstance(e, errors.HfHubHTTPError)), error)
        message = getattr(response_error, "server_message", None) or response_error
        return f"it answered {status}: {one_line(message, 300)}"
    if any(_lost(each) for each in _chain(error)):
        last = one_line(list(_chain(error))[-1], 300)
        instead = "" if writes else "; a local folder needs none"
        where = "" if constants.ENDPOINT == "https://huggingface.co" else " and HF_ENDPOINT"
        return (
            f"the Hub at {constants.ENDPOINT} cannot be reached: {last.rstrip('.')}. Check the network{where}{instead}"
        )
    return one_line(error, 300)


def be_brief() -> None:
    """Silence the Hub library's messages about failed requests and its progress bars, which would collide with
    lockstep's own progress line and stay on the screen after Ctrl-C (HF_HUB_DISABLE_PROGRESS_BARS=0 keeps them).

    If the Hub is unreachable, also disable the library's retries (six per file, 23 s), and make its requests fail at
    once if the host accepts connections but never answers. Cached files are then used without waiting."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import disable_progress_bars, http_backoff, http_stream_backoff

    if HF_HUB_DISABLE_PROGRESS_BARS is not False:
        disable_progress_bars()
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    fault = unreachable()
    for decorated in (http_backoff, http_stream_backoff) if fault else ():
        function = inspect.unwrap(decorated)  # a context manager's wrapper has no defaults itself
        function.__kwdefaults__ = (function.__kwdefaults__ or {}) | {"max_retries": 0}
    if fault == SILENT:
        _fail_requests(fault)


def _fail_requests(reason: str) -> None:
    """Make every request of the Hub library in this process fail with a connection error, for this reason."""
    from huggingface_hub import get_session, set_client_factory

    client: Any = get_session()
    hooks = client.event_hooks
    library = sys.modules[type(client).__module__.partition(".")[0]]  # httpx or httpx2, by the version

    def fail(request: Any) -> None:
        raise library.ConnectError(reason, request=request)

    hooks["request"].append(fail)
    # a factory, because the library creates another client after each failed connection
    set_client_factory(lambda: library.Client(event_hooks=hooks, follow_redirects=True, timeout=None))


@cache
def unreachable() -> str | None:
    """Return why the Hub's host cannot be reached, or None if it answers or a proxy is configured. Checked once per
    process."""
    from huggingface_hub import constants

    endpoint = urlsplit(constants.ENDPOINT)
    if getproxies().keys() & {endpoint.scheme, "all"}:
        return None
    connecting = HTTPSConnection if endpoint.scheme == "https" else HTTPConnection
    connection = connecting(str(endpoint.hostname), endpoint.port, timeout=CONNECT_S)
    try:
        connection.connect()
        connection.sock.settimeout(ANSWER_S)
        connection.request("HEAD", "/")
        connection.getresponse()
    except TimeoutError:
        return "no connection in time" if connection.sock is None else SILENT
    except ssl.SSLError:  # it answers; the Hub library decides whether to trust it
        return None
    except HTTPException:
        return None
    except OSError as error:
        return one_line(error, 300)
    finally:
        connection.close()
    return None


def transient(error: BaseException) -> bool:
    """Return whether a retry of the same request may succeed."""
    status = status_of(error)
    return status in _AGAIN if status is not None else any(_lost(each) for each in _chain(error))


def unreached(error: BaseException) -> bool:
    """Return whether the Hub could not be reached: no service, no network, or HF_HUB_OFFLINE."""
    return transient(error) or any(_is_offline(each) for each in _chain(error))


def _is_offline(error: BaseException) -> bool:
    """Return whether HF_HUB_OFFLINE blocked a request; transformers and datasets report it only in their messages."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return True
    offline = "couldn't connect" in str(error) or "OfflineModeIsEnabled" in str(error)
    return bool(constants.HF_HUB_OFFLINE) and isinstance(error, OSError) and offline


def status_of(error: BaseException) -> int | None:
    """HTTP status of the Hub's response, or None."""
    from huggingface_hub.errors import HfHubHTTPError

    answers = [each.response for each in _chain(error) if isinstance(each, HfHubHTTPError)]
    return next((int(answer.status_code) for answer in answers if answer is not None), None)


def _lost(error: BaseException) -> bool:
    """Return whether the connection failed, in any library (huggingface_hub 1 and 2 use different httpx versions)."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"TransportError", "ConnectionError", "TimeoutError"})


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    visited: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in visited:
        visited.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


MANIFEST = "manifest.json"


def parts(path: Path) -> tuple[Path, Path | None]:
    """Split a path into the output folder and, if it names one (`OUTPUT/checkpoints/step-N`, or `.../latest`), the
    checkpoint."""
    if path.parent.name == "checkpoints":
        return path.parent.parent, path.resolve() if path.is_symlink() else path
    return path, None


def of_checkpoint(checkpoint: Path) -> Path:
    """Cache folder of a checkpoint's model, in export format; it may not exist yet."""
    return cache_folder() / "models" / hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()


def names_place(source: str) -> bool:
    """Return whether a text can only be a path; an id of the Hub has at most one slash, inside."""
    return source.startswith((".", "/", "~")) or source.endswith("/") or source.count("/") > 1


def model_folder(source: str, key: str = "model.source") -> str:
    """Resolve `model.source` or `tokenizer.source`: an output folder to its export, a checkpoint to its model in the
    cache; anything else unchanged. Errors: `RunError` for a folder that does not exist, and for a run without an
    export, also if `source` names that."""
    path = Path(source).expanduser()
    output, checkpoint = parts(path)
    if checkpoint is not None and (checkpoint / MANIFEST).is_file():
        return str(of_checkpoint(checkpoint))
    if path.name == "export" and not path.is_dir() and (path.parent / "run.yaml").is_file():
        output = path = path.parent
    elif checkpoint is None and names_place(source) and not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise RunError("LS2088", f"{key}: the folder {path} does not exist{where}; correct the path")
    elif not (path / "run.yaml").is_file() or (path / "config.json").is_file():
        return source
    if not (path / "export" / "config.json").is_file():
        raise RunError(
            "LS2080",
            f"{key}: {output} has no export: its run is not finished, or the export was deleted; name one of its "
            f"checkpoints, for example {output}/checkpoints/latest, or run lockstep train again to write the export",
        )
    return str(path / "export")


@contextmanager
def downloading(source: str, kind: Literal["model", "dataset"]) -> Iterator[None]:
    """Show download progress while `source` is loaded from the Hub; only a status line for a local folder."""
    place = ACTIVITY.name
    if Path(source).is_dir():
        ACTIVITY.set(f"reading {source}")
        yield
        ACTIVITY.set(place)
        return
    from huggingface_hub.constants import HF_HUB_CACHE

    be_brief()
    folder = Path(HF_HUB_CACHE) / f"{kind}s--{source.replace('/', '--')}" / "blobs"
    before, over = _bytes_in(folder), threading.Event()
    ACTIVITY.set(f"loading {source}")

    def watch() -> None:
        while not over.wait(0.5):
            if (come := _bytes_in(folder) - before) > 0:
                ACTIVITY.set(f"downloading {source}, {come / 1e6:,.1f} MB so far")

    watcher = threading.Thread(target=watch, name="lockstep-download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        ACTIVITY.set(place)


def _bytes_in(folder: Path) -> int:
    """Total size of a repository's files in the Hub's cache, including incomplete ones."""
    total = 0
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):  # renamed concurrently
                total += file.stat().st_size
    return total


def optional_file(source: str, name: str, revision: str | None, subfolder: str = "") -> Path | None:
    """A file of a model's folder or repository, or None if it does not exist. Also None if there is no such repository:
    loading the model reports that."""
    from transformers.utils import cached_file

    if not Path(source).is_dir():
        be_brief()
    quiet = dict.fromkeys(("gated_repo", "missing_entries", "connection_errors"), False)
    options: Any = {f"_raise_exceptions_for_{what}": no for what, no in quiet.items()}
    with suppress(OSError):
        file = cached_file(source, name, revision=revision, subfolder=subfolder, **options)
        return Path(file) if file else None
    return None


@contextmanager
def reading_weights(source: str) -> Iterator[None]:
    """Convert library errors for damaged or unsafe weight files to `RunError`."""
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and re.search(r"no file named|not appear to have a file named", str(error)):
            raise RunError(
                "LS2430",
                f"model.source: {source} holds no weights ({one_line(error, 200).rstrip('.')}). Name a folder or "
                "repository that save_pretrained wrote, with its model.safetensors",
            ) from error
        is_pickle = isinstance(error, pickle.UnpicklingError)
        if (
            not is_pickle
            and not isinstance(error, SafetensorError | EOFError)
            and "PytorchStreamReader" not in str(error)
        ):
            raise
        text = f"they are damaged ({' '.join(str(error).split())[:160] or type(error).__name__})"
        text = "a pickle of more than tensors is not loaded, because it may run code" if is_pickle else text
        raise RunError(
            "LS2081",
            f"model.source: the weights of {source} cannot be read: {text}. Download them again, or, if you "
            "trust the file, convert it to safetensors elsewhere",
        ) from error


_COMMIT = re.compile(r"[0-9a-f]{40}")
KEYS = ("source", "train", "validation", "test")  # keys of `data` with paths or addresses


def addresses(data: DataSection) -> DataSection:
    """Add the current commit to each Hub address of the section. Errors: `RunError`."""
    commits: dict[str, str] = {}

    def at(value: str) -> str:
        if not value.lower().startswith("hf://"):
            return value
        try:
            address = address_of(value)
        except InvalidValue as error:
            raise RunError(error.code, f"data.train: {error.message}") from None
        repository, _, revision = address.place.removeprefix("datasets/").partition("@")
        if _COMMIT.fullmatch(revision):
            return value
        if address.place not in commits:
            commits[address.place] = _commit(repository, revision or None, value)
        path = f"/{address.path}" if address.path else ""
        return f"hf://datasets/{repository}@{commits[address.place]}{path}" + "/" * value.endswith("/")

    return with_paths(data, at)


def with_paths(data: DataSection, change: Callable[[str], str]) -> DataSection:
    """Apply `change` to all paths and addresses of the section."""
    values = {key: value for key in KEYS if (value := getattr(data, key)) is not None}
    return data.model_copy(
        update={key: list(map(change, v)) if isinstance(v, list) else change(v) for key, v in values.items()}
    )


def repository(data: DataSection) -> DataSection:
    """Replace a `source` that names a repository by its address and files. Errors: `RunError`."""
    import datasets

    assert data.source is not None
    commit = _commit(data.source, data.revision, data.source)
    root = f"hf://datasets/{data.source}@{commit}"
    try:
        files = datasets.load_dataset_builder(data.source, data.config, revision=commit).config.data_files or {}
    except Exception as error:  # Hub and network errors, a missing configuration, or remote code
        raise RunError("LS2083", f"data.source: {data.source}: {explained(error, commit)}") from None
    splits: dict[str, Any] = {}
    for split, names in USUAL.items():
        split_name = getattr(data, split)
        name = next((name for name in ([split_name] if split_name is not None else names) if name in files), None)
        if name is None and split_name is not None:
            raise RunError(
                "LS2084",
                f"data.{split}: {data.source} has no split {split_name!r}; it has {', '.join(map(str, files))}",
            )
        if name is None:
            continue
        if other := next((str(each) for each in files[name] if not str(each).startswith(f"{root}/")), None):
            raise RunError(
                "LS2085",
                f"data.stream: {data.source} reads rows from elsewhere ({other}), so it cannot be streamed by name; "
                "list its shards in data.train",
            )
        splits[split] = [str(each).removeprefix(f"{root}/") for each in files[name]]
    if "train" not in splits:
        raise RunError(
            "LS2086", f"data.train: {data.source} has no split called train; it has {', '.join(map(str, files))}"
        )
    return data.model_copy(update={"source": root, "config": None, "revision": None} | splits)


def _commit(repository: str, revision: str | None, what: str) -> str:
    """The commit that a branch or tag points to now. Errors: `RunError`."""
    from huggingface_hub import HfApi

    be_brief()
    try:
        return str(HfApi().dataset_info(repository, revision=revision).sha)
    except Exception as error:  # any error of Hub, network or library
        raise RunError(
            "LS2087",
            f"data.source: {what} is not a local file or folder, and loading it from the Hub failed: "
            f"{explained(error, revision)}",
        ) from None
