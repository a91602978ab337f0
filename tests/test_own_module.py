"""The task `module`: a model, data and a loss of one's own; what is found out about them, and what is refused."""

from pathlib import Path

import pytest
from own_modules import TOY, found_of, job

from lockstep.config.run import RunError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("loss", "kind", "each"),
    [
        ("((outputs - answers) ** 2).sum()", "sum", 1),
        ("torch.nn.functional.mse_loss(outputs, answers)", "mean", 1),
        ("torch.nn.functional.mse_loss(outputs, answers, reduction='none')", "each", 2),
        ("((outputs - answers) ** 2).sum(-1)", "each", 1),
    ],
)
def test_what_a_loss_is_is_found_out(loss: str, kind: str, each: int, here: Path) -> None:
    found = found_of(job(here, TOY.replace("LOSS", loss)))
    assert (found["loss"], found["each"]) == (kind, each)
    assert found["doubts"] == []


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("((outputs - answers) ** 2).sum() ** 0.5", "neither a sum over targets nor their mean"),
        ("outputs.sum() * 0", "neither a sum"),
        ("(outputs ** 2).sum() / (answers ** 2).sum()", "a mean, but not over examples"),
        ("(outputs * float('nan')).sum()", "no finite number"),
        ("float(outputs.sum())", "wanted is a tensor of floats, and it gave a float"),
        ("outputs.flatten()[: len(outputs) + 1] ** 2", "does not say how many targets"),
        ("outputs.missing", "task.loss: TOY.loss failed: AttributeError: 'Tensor' object has no attribute 'missing' "),
    ],
)
def test_a_loss_that_cannot_be_told_is_refused(loss: str, said: str, here: Path) -> None:
    run = job(here, TOY.replace("LOSS", loss))
    with pytest.raises(RunError) as caught:
        found_of(run)
    assert said.replace("TOY", str(run.task.options["loss"]).partition(".")[0]) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sum_that_hangs_on_the_other_examples_is_told(here: Path) -> None:
    loss = "((outputs - outputs.mean(0)) ** 2).sum()"
    assert "not the sum of both" in found_of(job(here, TOY.replace("LOSS", loss)))["doubts"][0]
