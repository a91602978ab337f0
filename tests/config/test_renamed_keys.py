"""Former names of keys are read, with a note; checkpoints and files in the cache that were made under them go on."""

import json
import warnings
from pathlib import Path

import pytest

from lockstep.checkpoint.manifest import parsed
from lockstep.cli import main
from lockstep.config import key_aliases
from lockstep.config.key_aliases import RENAMED, VALUES, RenamedKey
from lockstep.config.run import Run, load
from support.harness import TINY
from support.messages import raises

FORMER = {
    "optim": {"name": "adamw_8bit", "clip": 0.25, "minimum": 0.1, "least": 64, "learning_rate": 1e-3},
    "launch": {"name": "torchrun", "on_loss": "continue", "hang_s": 9, "join_s": 30},
    "strategy": {"name": "allreduce", "exchange": "tree"},
    "guard": {"every": 3, "on_difference": "exclude"},
    "stop_after": "1h",
}


def test_former_names_and_values_are_read() -> None:
    with pytest.warns(RenamedKey) as notes:
        run = Run.load(dict(TINY) | FORMER, {"data.overlap": "drop"})
    assert (run.optim.max_grad_norm, run.optim.min_lr_ratio, run.optim.options["min_8bit_size"]) == (0.25, 0.1, 64)
    assert (run.launch.on_rank_failure, run.launch.hang_timeout_s) == ("continue", 9)
    assert run.launch.options["join_timeout_s"] == 30
    assert (run.strategy.all_reduce, run.data.decontaminate, run.max_time) == ("hierarchical", True, "1h")
    assert (run.sdc_check.every, run.sdc_check.on_difference) == (3, "evict")
    said = {str(note.message) for note in notes}
    assert "optim.clip is called optim.max_grad_norm now; the former name is read for one release" in said
    assert "sdc_check.on_difference: exclude is written evict now" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error", RenamedKey)
        assert load(None, [], {**TINY, **json.loads(json.dumps(run.model_dump(mode="json")))}) == run


@pytest.mark.parametrize("key", sorted(RENAMED))
def test_every_present_name_is_one(key: str) -> None:
    known = _all_keys() | {name.partition(".")[0] for name in _all_keys()}
    assert RENAMED[key] in known
    assert key not in known


def _all_keys() -> set[str]:
    from support.key_table import KEYS

    return set(KEYS)


def test_both_names_are_refused() -> None:
    with raises("LS1050", "optim.clip", "optim.max_grad_norm"):
        load(None, ["optim.clip=1", "optim.max_grad_norm=2"], TINY)
    words = ["launch.name=torchrun", "launch.join_s=1", "launch.join_timeout_s=2"]
    with raises("LS1050", "launch.join_s", "launch.join_timeout_s"):
        load(None, words, TINY)


def test_a_key_of_the_users_own_keeps_its_name() -> None:
    assert key_aliases.translate("task", {"scale": 3}, {"scale": None}) == {"scale": 3}
    assert key_aliases.translate("task", {"scale": 3}, {}) == {"scale": 3}  # no such key either way: it is refused


def test_a_checkpoint_has_present_names() -> None:
    then = {"optim.clip": 1.0, "data.overlap": "drop", "task.turns": "each", "strategy.exchange": "tree", "seed": 1}
    assert key_aliases.of_checkpoint(then) == {
        "optim.max_grad_norm": 1.0,
        "data.decontaminate": True,
        "task.turns": "per_turn",
        "strategy.all_reduce": "hierarchical",
        "seed": 1,
    }
    back = key_aliases.former("task", {"turns": "per_turn", "attend_across_documents": False, "text": "t"})
    assert back == {"turns": "each", "cross_documents": False, "text": "t"}
    assert {*VALUES} <= {*RENAMED.values(), "task.turns", "sdc_check.on_difference"}
    assert isinstance(parsed(b"{}", "step-000001"), str)


def test_the_command_says_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("data: builtin/emotion\nmodel: {type: gpt2}\noptim: {clip: 1}\n")
    assert main(["schema"]) == 0
    capsys.readouterr()
    main(["plan", str(tmp_path / "run.yaml"), "epochs=-1"])
    said = capsys.readouterr().err
    assert said.count("lockstep: note: optim.clip is called optim.max_grad_norm now") == 1
