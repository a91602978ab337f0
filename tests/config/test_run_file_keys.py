"""Changing a key of the run file has exactly the effects in the table (tests/support/key_table.py)."""

import re
from typing import Any

import numpy as np
import pytest

from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.config.sections import Section
from support.key_table import EFFECTS, KEYS, Elsewhere, Tried
from support.key_table_runs import Place, tried
from support.places import TESTS


def always_one(predictions: np.ndarray, labels: np.ndarray) -> float:
    return 1.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("keys"))


TRIED = {key: case for key, case in KEYS.items() if isinstance(case, Tried)}


# Keys that share the code of a neighbour, which is tried each time.
LIKE_ANOTHER = ("profile.after", "profile.steps", "data.stream_cache_gb", "average.ema_warmup", "task.threshold")
LIKE_ANOTHER += ("evaluate.min_delta", "hub.language", "hub.tags", "task.prefix", "task.answer_tokens", "task.bleu")
LIKE_ANOTHER += ("launch.hang_timeout_s", "launch.rebalance_every", "task.label_names", "name", "launch.timeout_s")
LIKE_ANOTHER += ("optim.power", "optim.decay_fraction", "optim.decay_steps", "optim.decay_shape", "optim.average_power")
LIKE_ANOTHER += ("optim.beta2_decay", "optim.d", "optim.nesterov", "optim.ns_steps", "optim.lr_adjust", "data.quote")
LIKE_ANOTHER += ("data.test_fraction", "data.follow_links", "data.drop_unusable", "tokenizer.vocab_size")
LIKE_ANOTHER += ("model.checkpoint_activations",)


def marks(key: str) -> list[pytest.MarkDecorator]:
    """Runs that learn enough for other scores take a minute each."""
    long = TRIED[key].kind == "easy" or key in LIKE_ANOTHER
    return [] if TRIED[key].quick else [pytest.mark.slow, *([pytest.mark.long] if long else [])]


@pytest.mark.parametrize("key", [pytest.param(key, marks=marks(key)) for key in TRIED])
def test_each_key_changes_exactly_what_its_table_entry_lists(
    key: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = TRIED[key]
    if "optim.name=adamw_8bit" in case.beside:
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    assert case.change.startswith((f"{key}=", f"{key}."))
    assert tried(place, case, monkeypatch) == {*case.effects.split()} - {"nothing"}


def options(kind: str, name: str) -> list[str]:
    """Return the keys of a plug-in."""
    found: Any = plugins.find(kind, name)
    return list(found.Options.model_fields)


def schema_keys() -> set[str]:
    """Return every key that a run file may have, including those of all plug-ins of lockstep."""
    keys = set()
    for name, field in Run.model_fields.items():
        section: Any = field.annotation
        inside = isinstance(section, type) and issubclass(section, Section)
        keys |= {f"{name}.{inner}" for inner in section.model_fields} if inside else {name}
    for kind, section in (("tasks", "task"), ("optimizers", "optim"), ("launchers", "launch")):
        for name in plugins.names(kind):
            keys |= {f"{section}.{key}" for key in options(kind, name)}
    for name in plugins.names("track"):
        keys |= {f"track.{name}.{key}" for key in options("track", name)}
    return keys


def test_every_key_has_an_entry_and_every_entry_a_key() -> None:
    assert schema_keys() == set(KEYS)
    assert len(KEYS) > 250


def test_key_entries_have_known_effects_and_existing_tests() -> None:
    for key, case in KEYS.items():
        assert {*case.effects.split()} <= set(EFFECTS), key
        if isinstance(case, Elsewhere):
            file = TESTS / case.test
            assert file.name.startswith("test_"), (key, case.test)
            assert re.search(rf"\b{key.rpartition('.')[2]}\b", file.read_text()), (key, case.test)
