"""Resolves a plug-in name in the run file to its class.

In: a kind (`tasks`, `strategies`, `optimizers`, `launchers`, `track`) and a name, or the dotted path of your class.
Out: the class. To add a plug-in, add one file to the kind's folder and its class to `BUILT_IN`, or a distribution with
an entry point in the kind's group (`GROUPS`). A plug-in is a class that inherits `plugin` from the interface
(`tasks/task.py`, ...); a class that sets `plugin` itself is a base class. Listing imports nothing: importing the files
takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.config.errors import InvalidValue, RunError

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from pydantic import BaseModel


GROUPS = {
    "tasks": "lockstep.tasks",
    "strategies": "lockstep.strategies",
    "optimizers": "lockstep.optimizers",
    "launchers": "lockstep.launchers",
    "track": "lockstep.trackers",
    "commands": "lockstep.commands",
}
# Plug-ins and options of this repository's distributions: kind -> name -> extra, so that a message can name what to
# install. The distribution is lockstep-EXTRA. For an option, the kind is the command: `lockstep plan`.
EXTRAS: dict[str, dict[str, str]] = {
    "launchers": dict.fromkeys(("kubernetes", "ray", "sagemaker"), "clouds"),
    "lockstep plan": dict.fromkeys(("--simulate", "--suggest", "--processes", "--device", "--price", "--out"), "plan"),
    "lockstep bench": {"--calibrate": "plan"},
}
_SINGULAR = {"tasks": "task", "strategies": "strategy", "launchers": "launcher", "track": "tracker"}
_SINGULAR |= {"optimizers": "optimizer"}
_FOLDERS = {"optimizers": "strategies.optimizers"}  # kinds with a nested folder
# Kind -> name in the run file -> class. The class stands in the file of the kind's folder that is called as the name.
BUILT_IN: dict[str, dict[str, str]] = {
    "tasks": {
        "classification": "Classification",
        "embedding": "Embedding",
        "image_classification": "ImageClassification",
        "language_modeling": "LanguageModeling",
        "masked_language_modeling": "MaskedLanguageModeling",
        "module": "Module",
        "preference": "Preference",
        "question_answering": "QuestionAnswering",
        "reward": "Reward",
        "summarization": "Summarization",
        "token_classification": "TokenClassification",
        "translation": "Translation",
    },
    "strategies": {
        "allreduce": "AllReduce",
        "ddp": "DDP",
        "fsdp2": "FSDP2",
        "hf_accelerate": "HFAccelerate",
        "hf_trainer": "HFTrainer",
        "pipeline": "Pipeline",
        "single": "Single",
        "zero1": "Zero1",
        "zero2": "Zero2",
        "zero3": "Zero3",
    },
    "optimizers": {
        "adafactor": "Adafactor",
        "adamw": "AdamW",
        "adamw_8bit": "AdamW8bit",
        "lion": "Lion",
        "muon": "Muon",
        "schedule_free": "ScheduleFree",
        "sgd": "SGD",
    },
    "launchers": {
        "accelerate": "Accelerate",
        "local": "Local",
        "slurm": "Slurm",
        "tcp": "Tcp",
        "torchrun": "Torchrun",
    },
    "track": {
        "jsonl": "Jsonl",
        "mlflow": "MLflow",
        "tensorboard": "TensorBoard",
        "trackio": "Trackio",
        "wandb": "WandB",
    },
}


class PluginError(InvalidValue):
    """An unknown plug-in name, or a module that does not define exactly one plug-in."""


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while importing torch and transformers, where it would take a fifth of the time and
    free nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def names(kind: str) -> list[str]:
    """Return all plug-in names of a kind, in alphabetical order."""
    return sorted({*built_in(kind), *entries(kind)})


def built_in(kind: str) -> list[str]:
    """Return the names of lockstep's built-in plug-ins of a kind, in alphabetical order."""
    return list(BUILT_IN[kind])


def _module(kind: str, name: str) -> str:
    """Return the module of a built-in plug-in."""
    return f"lockstep.{_FOLDERS.get(kind, kind)}.{name}"


def described(kind: str, name: str, *attributes: str) -> tuple[str, dict[str, Any]]:
    """Return the first sentence of a plug-in's module docstring, and literal class attributes, inherited ones included.

    Reads source text and imports nothing. Errors: `PluginError` for an attribute that is not a literal, and for a file
    that is not valid Python."""
    _refuse_ambiguous(kind, name)
    if name in BUILT_IN[kind]:
        module, plugin = _module(kind, name), BUILT_IN[kind][name]
        called = module.replace(".", "/") + ".py"
    else:
        (entry,) = entries(kind)[name]
        module, plugin, called = entry.module, entry.attr, f"{entry.module} of {distribution_of(entry)}"
        if file_of(module) is None:
            raise PluginError("LS1096", f"{called} cannot be found; reinstall that package")
    try:
        text = ast.get_docstring(_tree(module)) or ""
        values = {attribute: _literal(module, plugin, attribute) for attribute in attributes}
    except (OSError, SyntaxError, ValueError, LookupError) as error:
        raise PluginError("LS1097", f"{called} cannot be read: {error}") from error
    sentence = re.match(r".*?\.(?=\s|$)|.*", " ".join(text.partition("\n\n")[0].split()))
    return (sentence[0] if sentence else ""), values


def _literal(module: str, name: str, attribute: str) -> Any:
    """Return a class attribute in method resolution order. Errors: `LookupError`, `ValueError` if it is no literal."""
    for home, ancestor in _ancestors(module, name):
        for line in _class(home, ancestor).body:
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            value = getattr(line, "value", None)
            if value is not None and attribute in [each.id for each in targets if isinstance(each, ast.Name)]:
                return ast.literal_eval(value)
    raise LookupError(f"{name} has no {attribute}")


def _ancestors(module: str, name: str) -> list[tuple[str, str]]:
    """Return the (module, class) pairs of a class and its bases in method resolution order (C3). Bases that are neither
    defined nor imported by name in the module are left out."""
    homes = {each.asname or each.name: (line.module, each.name) for line in _imports(module) for each in line.names}
    bases = []
    for base in _class(module, name).bases:
        home = homes.get(base.id, (module, base.id)) if isinstance(base, ast.Name) else None
        if home is not None and home[0] is not None and file_of(home[0]) and _has_class(home[0], home[1]):
            bases.append((home[0], home[1]))
    rows, order = [*(_ancestors(*base) for base in bases), bases], [(module, name)]
    while rows := [row for row in rows if row]:
        first = next((row[0] for row in rows if not any(row[0] in other[1:] for other in rows)), rows[0][0])
        order.append(first)
        rows = [[each for each in row if each != first] for row in rows]
    return order


def _imports(module: str) -> list[ast.ImportFrom]:
    return [line for line in _tree(module).body if isinstance(line, ast.ImportFrom)]


def _has_class(module: str, name: str) -> bool:
    return any(isinstance(line, ast.ClassDef) and line.name == name for line in _tree(module).body)


def _class(module: str, name: str) -> ast.ClassDef:
    """Return the definition of a class. Errors: `LookupError`."""
    for line in _tree(module).body:
        if isinstance(line, ast.ClassDef) and line.name == name:
            return line
    raise LookupError(f"{module} has no class {name}")


@lru_cache(maxsize=512)
def _tree(module: str) -> ast.Module:
    """Parse a module's source, without importing anything. Errors: `LookupError`, `OSError`, `SyntaxError`."""
    if (file := file_of(module)) is None:
        raise LookupError(f"there is no module {module}")
    return ast.parse(file.read_bytes())


def find(kind: str, name: str) -> type:
    """Import and return the plug-in class `name`.

    `name`: a file of `lockstep/KIND/`, an entry point of an installed distribution, or the dotted path of your class
    (`package.module.Class`). Imports the engine that the plug-in needs, too. Errors: `PluginError`, naming the nearest
    known name.
    """
    if "." in name:
        plugin = attribute(name)
        if kind == "optimizers" and getattr(plugin, "plugin", "") != kind:
            raise PluginError(
                "LS1090",
                f"{name} is an optimizer of torch, not of lockstep; how-to/plug-ins/optimizer on the site shows how to "
                "wrap an optimizer of torch",
            )
        return plugin
    _refuse_ambiguous(kind, name)
    if name not in BUILT_IN[kind]:
        if name not in (added := entries(kind)):
            raise PluginError("LS1098", unknown(kind, name))
        return _of_distribution(added[name][0], kind)
    with importing():
        plugin_class: type = getattr(importlib.import_module(_module(kind, name)), BUILT_IN[kind][name])
    return plugin_class


def options_of(kind: str, name: str) -> type[BaseModel]:
    """Return the keys of a plug-in in the run file. Errors: `PluginError`."""
    options: type[BaseModel] = find(kind, name).Options  # type: ignore[attr-defined]
    return options


def fact(kind: str, name: object, attribute: str, default: Any) -> Any:
    """Return a class attribute of a plug-in. The default for a user's own class, and for a name that `find` refuses:
    another check reports it."""
    if not isinstance(name, str) or name not in names(kind):
        return default
    with suppress(PluginError, ImportError):
        return getattr(find(kind, name), attribute)
    return default


def of_key(key: str, kind: str, name: str) -> type:
    """Call `find` for the value of a key of the run file. Errors: `RunError`, naming the key."""
    try:
        return find(kind, name)
    except PluginError as error:
        raise RunError(error.code, f"{key}: {error.message}") from error
    except ImportError as error:
        raise RunError("LS1143", f"{key}: {error}") from error


def _refuse_ambiguous(kind: str, name: str) -> None:
    """Reject a name with several plug-ins. Errors: `PluginError`, naming the distributions."""
    entry = entry_of(kind, name, _SINGULAR[kind])
    if entry is not None and name in BUILT_IN[kind]:
        raise PluginError(
            "LS1099",
            f"{_SINGULAR[kind]} {name!r} is built into lockstep, and {distribution_of(entry)} registers "
            "the same name; uninstall that package, or give its class as a dotted path",
        )


def origin(kind: str, name: str) -> str:
    """Return the distribution and version of a plug-in that is not built in."""
    return distribution_of(entries(kind)[name][0])


def _is(kind: str, plugin_class: Any) -> bool:
    """Return whether this is a plug-in class, not a base class."""
    return (
        inspect.isclass(plugin_class)
        and getattr(plugin_class, "plugin", "") == kind
        and "plugin" not in vars(plugin_class)
    )


def _of_distribution(entry: EntryPoint, kind: str) -> type:
    with importing():
        plugin_class = load_entry(entry, _SINGULAR[kind])
    if not _is(kind, plugin_class):
        raise PluginError(
            "LS1111",
            f"{_SINGULAR[kind]} {entry.name!r} of {distribution_of(entry)} is {entry.value}, which does "
            f"not inherit from lockstep's class {_SINGULAR[kind].capitalize()}",
        )
    return plugin_class


# Names in other systems, mainly the pipelines of transformers, in lower case with underscores.
OTHER_NAMES = {
    "classification": ("text_classification", "sequence_classification", "sentiment_analysis", "sentiment"),
    "language_modeling": ("causal_lm", "text_generation", "clm", "sft", "chat", "pretraining"),
    "masked_language_modeling": ("masked_lm", "fill_mask", "mlm"),
    "translation": ("seq2seq", "seq2seq_lm"),
    "summarization": ("seq2seq", "seq2seq_lm"),
    "token_classification": ("ner", "tagging"),
    "question_answering": ("qa", "extractive_qa"),
    "preference": ("dpo", "simpo", "ipo"),
    "reward": ("reward_model", "reward_modeling", "rm"),
    "embedding": ("sentence_transformers", "sentence_similarity", "feature_extraction"),
    "zero1": ("deepspeed", "zero"),
    "zero2": ("deepspeed", "zero"),
    "zero3": ("deepspeed", "zero"),
    "fsdp2": ("fsdp", "fully_shard", "tp", "tensor_parallel", "megatron"),
    "ddp": ("dp", "data_parallel", "horovod", "mirrored"),
    "pipeline": ("pp", "gpipe", "pipeline_parallel", "megatron"),
    "single": ("none", "no"),
    "adamw_8bit": ("adamw_bnb_8bit", "paged_adamw_8bit"),
    "adamw": ("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf"),
    "kubernetes": ("k8s", "kubeflow"),
    "slurm": ("srun", "sbatch"),
    "sagemaker": ("aws",),
    "tensorboard": ("tb",),
}
_STAGE = re.compile(r"(?:deepspeed|zero|stage|ds).*([123])")  # deepspeed_zero2, zero-3, deepspeed_stage_1


def unknown(kind: str, name: str) -> str:
    """Return the message for an unknown name: what to install, or the nearest known name."""
    if (what := missing(kind, name)) is not None:
        return f"{name} needs {what}"
    known = names(kind)
    plain = re.sub(r"[-. ]+", "_", name.lower())
    if kind == "strategies" and (stage := _STAGE.fullmatch(plain)) is not None:
        plain = f"zero{stage[1]}"
    near = [other for other in known if plain == other or plain in OTHER_NAMES.get(other, ())]
    near = near or difflib.get_close_matches(plain, known, 1)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"unknown {_SINGULAR[kind]} {name!r}; {hint}known are {', '.join(known)}"


def loadable(kind: str) -> Iterator[tuple[str, type]]:
    """Yield (name, class) of every plug-in of a kind, skipping those that cannot be loaded."""
    for name in names(kind):
        try:
            yield name, find(kind, name)
        except PluginError:
            continue


def path_of(kind: str, name: str) -> str:
    """Return the dotted path of an entry point's class; other names unchanged."""
    known = entries(kind).get(name)
    return known[0].value.replace(":", ".") if known else name


def lacking(packages: Sequence[str]) -> list[str]:
    """Return the packages that are not installed, without importing any; a name may include a minimum version, as in
    `torch>=2.13`. A folder of that name in the working directory, such as the one W&B creates, does not count as a
    package."""
    return [package for package in packages if not _installed(*package.partition(">=")[::2])]


def _installed(package: str, least: str) -> bool:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not least:
        return spec is not None and spec.origin is not None
    from packaging.version import Version

    return Version(importlib.metadata.version(package)) >= Version(least)


def install(missing: str, extra: str = "") -> str:
    """The command that installs what `lacking` returned. `extra`: the extra that has it; default: the package."""
    return f"pip install '{missing if '>=' in missing else f'lockstep-train[{extra or missing}]'}'"


def require(packages: Sequence[str], key: str, extra: str = "") -> None:
    """Reject a plug-in whose packages are not installed. `key`: the key of the run file and its value. `extra`: the
    extra that installs them; default: the package's name. Errors: `RunError`."""
    for package in lacking(packages):
        raise RunError("LS1120", f"{key} needs {package}, which is not installed: {install(package, extra)}")


def refuse_old(packages: Sequence[str]) -> None:
    """Reject installed packages older than the minimum version in lockstep's metadata. Errors: `RunError`."""
    from packaging.version import Version

    for package in packages:
        try:
            requirements, installed = _requirements(), Version(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:  # or lockstep itself is not installed
            continue
        for least in (bound for each in requirements if each.name == package for bound in each.specifier):
            if least.operator == ">=" and installed < Version(least.version):
                raise RunError(
                    "LS1094",
                    f"{package} {installed} is older than the versions that lockstep supports: pip install "
                    f"'{package}{least}' (reference/engines on the site says what earlier versions do)",
                )


@cache
def _requirements() -> tuple[Requirement, ...]:
    from packaging.requirements import Requirement

    return tuple(Requirement(line) for line in importlib.metadata.requires("lockstep-train") or ())


# -- entry points of installed distributions -------------------------------------------------------------------------


def entries(kind: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a kind: name -> entries, in alphabetical order. A name has several entries if several
    distributions register it."""
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in _by_group(tuple(sys.path))[GROUPS[kind]]:
        by_name.setdefault(entry.name, []).append(entry)
    # `distribution_of` parses the metadata of a distribution: for the few names that have several entries
    return {name: sorted(each, key=distribution_of) if each[1:] else each for name, each in sorted(by_name.items())}


@lru_cache(maxsize=64)
def _by_group(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Return group -> entry points. `path`: `sys.path`; the first of distributions with the same name counts."""
    owners = dict.fromkeys(name for place in path for name in _owners(os.path.abspath(place)))
    every = [entry for name in owners for entry in importlib.metadata.distribution(name).entry_points]
    return {group: tuple(entry for entry in every if entry.group == group) for group in GROUPS.values()}


@lru_cache(maxsize=512)
def _owners(place: str) -> tuple[str, ...]:
    """Return the distributions in one folder that declare lockstep plug-ins. Reading 200 distributions takes
    milliseconds, so the result is cached per folder: a forked process has another folder in front of its path."""
    installed = importlib.metadata.distributions(path=[place])
    declaring = [each for each in installed if "[lockstep." in (each.read_text("entry_points.txt") or "")]
    return tuple(each.name for each in declaring if each.name)  # `name` parses the metadata


def entry_of(kind: str, name: str, called: str) -> EntryPoint | None:
    """Return the entry point with this name, or None. `called`: the kind's name in messages. Errors: `PluginError` if
    several distributions register it."""
    several = entries(kind).get(name, [])
    if len(several) > 1:
        owners = " and ".join(map(distribution_of, several))
        raise PluginError("LS1140", f"{called} {name!r} is registered by {owners}; uninstall all but one of them")
    return several[0] if several else None


def load_entry(entry: EntryPoint, called: str) -> Any:
    """Import the object of an entry point. Errors: `PluginError`, which names the distribution."""
    try:
        return entry.load()
    except Exception as error:  # third-party code may raise anything during import
        remedy = f"; install {entry.dist.name} again, or remove it" if entry.dist is not None else ""
        text = f"{called} {entry.name!r} of {distribution_of(entry)} cannot be loaded: {error}{remedy}"
        raise PluginError("LS1141", text) from error


def distribution_of(entry: EntryPoint) -> str:
    """Return the distribution of an entry point and its version: `lockstep-clouds 0.1.0`."""
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def summary_of(entry: EntryPoint) -> str:
    """Return the first line of the docstring of an entry point's module, or an empty text."""
    file = file_of(entry.module)
    if file is None:
        return ""
    try:
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    except (OSError, SyntaxError, ValueError):
        return ""
    return text.partition("\n")[0]


def file_of(module: str) -> Path | None:
    """Return the source file of a module, or None."""
    spec = spec_of(module)
    return None if spec is None or spec.origin is None or not spec.has_location else Path(spec.origin)


def spec_of(module: str) -> ModuleSpec | None:
    """Find a module's spec without importing its parent packages, as `importlib.util.find_spec` would."""
    package, _, _ = module.rpartition(".")
    path = None
    if package:
        outer = spec_of(package)
        if outer is None or outer.submodule_search_locations is None:
            return None
        path = list(outer.submodule_search_locations)
    try:
        for finder in sys.meta_path:
            if (spec := finder.find_spec(module, path)) is not None:
                return spec
    except KeyError:  # a nested namespace package: Python requires the outer package to be imported
        spec = ModuleSpec(module, None, is_package=True)
        spec.submodule_search_locations = [str(Path(p) / module.rpartition(".")[2]) for p in path or ()]
        return spec
    return None


def missing(kind: str, name: str) -> str | None:
    """Return what to install for an unknown plug-in or option, or None if no distribution of this repository has it."""
    extra = EXTRAS.get(kind, {}).get(name)
    return None if extra is None else f'lockstep-{extra}: pip install "lockstep-train[{extra}]"'


# -- user code -------------------------------------------------------------------------------------------------------


class Reached(BaseException):
    """Ends the import of a user's script at its first call that starts a job; names defined before it exist."""


_MARK = "__lockstep_imports__"  # set in a user's module while it is imported


def starts_a_job() -> None:
    """Check that this process may start a job; every function of the Python interface that starts one calls this.

    Errors: `Reached`, inside a job that is importing the script with the call."""
    if any(_MARK in vars(module) for module in [*sys.modules.values()] if isinstance(module, ModuleType)):
        raise Reached


def attribute(name: str) -> Any:
    """Import the object with a dotted path (`package.module.thing`).

    The import of a script ends at its first call that starts a job, so scripts need no `__main__` guard. Errors:
    `PluginError`."""
    module_name, _, last = name.rpartition(".")
    if os.getcwd() not in sys.path:  # a user's module in the working directory, as with `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(_imported(module_name), last)
    except (ImportError, AttributeError) as error:
        raise PluginError("LS1095", f"cannot import {name!r}: {error}") from error


def _imported(name: str) -> ModuleType:
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None or spec.origin is None or spec.submodule_search_locations is not None:
        return importlib.import_module(name)
    main = sys.modules["__main__"]
    if (file := getattr(main, "__file__", None)) and Path(file).resolve() == Path(spec.origin).resolve():
        return main  # the running script itself
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    setattr(module, _MARK, True)
    try:
        spec.loader.exec_module(module)
    except Reached:
        pass
    except SystemExit as ended:
        del sys.modules[name]
        raise ImportError(f"{Path(spec.origin).name} calls sys.exit while it is imported") from ended
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        delattr(module, _MARK)
    if (package := sys.modules.get(spec.parent or "")) is not None:
        setattr(package, name.rpartition(".")[2], module)
    return module
