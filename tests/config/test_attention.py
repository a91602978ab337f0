"""`model.attention` that cannot run is refused in one line, before a process starts."""

import importlib.util
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.run import Run
from lockstep.tasks.models import model_configs, models
from support.harness import tiny
from support.messages import mentions, raises

FLASH = ("model.attention=flash_attention_2", "precision=bf16")


def checked(run: Run, here: bool = True) -> None:
    exact = bool(run.strategy.exact)
    model_configs.check_attention(run.model.attention, run.launch.device, run.precision, here, exact)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (FLASH, ("LS3127", "flash_attention_2")),
        (("model.attention=spda",), ("LS3126", "'spda'")),
        ((*FLASH, "launch.device=cuda", "precision=fp32"), ("LS3128",)),
        ((*FLASH, "launch.device=cuda"), ("LS3129", "flash_attn")),
    ],
)
def test_unsupported_attention_is_refused(
    overrides: tuple[str, ...], said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_configs, "_cuda", lambda: "launch.device=cuda" in overrides)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flash_attn" else find(name))
    with raises(*said) as caught:
        checked(tiny(*overrides))
    assert "\n" not in str(caught.value)


HUB = "kernels-community/flash-attn"


def test_attention_whose_gradient_varies_is_refused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-3 and kernels of the Hub's, in exact runs. FlashAttention-2 has a deterministic gradient."""
    monkeypatch.setattr(model_configs, "_cuda", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for name in ("flash_attention_3", "flash_attention_4", HUB):
        keys = (f"model.attention={name}", "precision=bf16", "launch.device=cuda")
        with raises("LS3195", name):
            checked(tiny(*keys))
        checked(tiny(*keys, "strategy.exact=false"))
    checked(tiny(*FLASH, "launch.device=cuda"))


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention", "kernels-community/flash-attn", "null"])
def test_supported_attention_is_accepted(name: str) -> None:
    checked(tiny(f"model.attention={name}"))


def test_a_machine_that_only_submits_may_have_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_configs, "_cuda", lambda: False)
    checked(tiny(*FLASH, "launch.device=auto"), here=False)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_unsupported_request_is_refused_before_a_process_starts(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "launch.processes=1", "launch.device=cpu", *FLASH]) == 2
    said = capsys.readouterr().err
    assert mentions(said, "LS3127", "flash_attention_2")
    assert len(said.splitlines()) == 1
    assert not (here / "outputs/quickstart/metrics.jsonl").exists()


@pytest.mark.parametrize(("family", "head"), [("mpt", "token_classification"), ("funnel", "classification")])
def test_a_family_without_this_attention_is_refused(family: str, head: str) -> None:
    small = tiny(f"model={{type: {family}, attention: eager, config: {{}}}}")
    models.check_arithmetic(small.model, head, "fp32", True)
    for name in ("sdpa", "flex_attention"):
        run = small.model_copy(update={"model": small.model.model_copy(update={"attention": name})})
        with raises("LS3138", name, family, "leave model.attention out"):
            models.check_arithmetic(run.model, head, "fp32", True)
