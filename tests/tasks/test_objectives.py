"""Objectives of `classification`: losses equal torch's on the whole step, however it is split, and metrics equal
scikit-learn's; options and label weights."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lockstep.data.batch import IGNORED
from lockstep.tasks.classification import objective_of
from lockstep.tasks.objectives.objective import ClassificationOptions, Objective
from support.messages import mentions, raises

NAMES = ["a", "b", "c", "d"]
COUNTS = [1, 2, 3, 34]  # of 40


def made(names: list[str] = NAMES, counts: list[int] = COUNTS, **options: Any) -> Objective:
    given = ClassificationOptions.model_validate(options)
    return objective_of(given)(given, names, [] if given.regression else counts, 40)


def drawn(kind: str, count: int = 40) -> tuple[Tensor, Tensor]:
    """Logits and targets of a step."""
    random = np.random.default_rng(1)
    logits = torch.tensor(random.normal(size=(count, len(NAMES))), dtype=torch.float32)
    if kind == "one":
        return logits, torch.tensor(np.repeat(np.arange(4), COUNTS))
    if kind == "several":
        return logits, torch.tensor((random.random((count, 4)) < [0.1, 0.3, 0.5, 0.8]).astype(np.int64))
    numbers = np.concatenate([np.zeros((count, 1)), random.normal(size=(count, 4)) * 90], axis=1)
    numbers[3, 1] = IGNORED  # a number like any other
    return logits, torch.tensor(numbers)


W = torch.tensor([2.0, 1.0, 0.5, 1.0])
BALANCED = 40 / (4 * torch.tensor(COUNTS))


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    """The focal loss by its definition, with gamma 1.5."""
    p = logits.double().softmax(-1).gather(1, targets[:, None])[:, 0]
    return (-((1 - p) ** 1.5) * p.log()).mean()


def focal_of_each(logits: Tensor, targets: Tensor) -> Tensor:
    p = logits.double().sigmoid()
    p = torch.where(targets == 1, p, 1 - p)
    return (-((1 - p) ** 1.5) * p.log()).mean()


Wanted = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[str, dict[str, Any], Wanted]] = {
    "plain": ("one", {}, functional.cross_entropy),
    "smoothed": ("one", {"label_smoothing": 0.1}, lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1)),
    "weights": ("one", {"class_weights": {"a": 2, "c": 0.5}}, lambda x, y: functional.cross_entropy(x, y, W)),
    "balanced": ("one", {"class_weights": "balanced"}, lambda x, y: functional.cross_entropy(x, y, BALANCED)),
    "weights and smoothed": (
        "one",
        {"class_weights": {"a": 2, "c": 0.5}, "label_smoothing": 0.2},
        lambda x, y: functional.cross_entropy(x, y, W, label_smoothing=0.2),
    ),
    "focal": ("one", {"loss": "focal", "focal_gamma": 1.5}, focal),
    "focal without gamma": ("one", {"loss": "focal", "focal_gamma": 0}, functional.cross_entropy),
    "focal with weights": (
        "one",
        {"loss": "focal", "focal_gamma": 0, "class_weights": {"a": 2, "c": 0.5}},
        lambda x, y: functional.cross_entropy(x, y, W),
    ),
    "several": ("several", {"multi_label": True}, lambda x, y: functional.binary_cross_entropy_with_logits(x, y * 1.0)),
    "several, weights": (
        "several",
        {"multi_label": True, "class_weights": {"a": 2, "c": 0.5}},
        lambda x, y: functional.binary_cross_entropy_with_logits(x, y * 1.0, pos_weight=W),
    ),
    "several, smoothed": (
        "several",
        {"multi_label": True, "label_smoothing": 0.1},
        lambda x, y: functional.binary_cross_entropy_with_logits(x, y * 0.9 + 0.05),
    ),
    "several, focal": ("several", {"multi_label": True, "loss": "focal", "focal_gamma": 1.5}, focal_of_each),
    "numbers": ("numbers", {"regression": True}, lambda x, y: functional.mse_loss(x.double(), y[:, 1:])),
    "numbers, mae": (
        "numbers",
        {"regression": True, "loss": "mae"},
        lambda x, y: functional.l1_loss(x.double(), y[:, 1:]),
    ),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("cut", [[40], [1, 2, 37], [10, 10, 10, 10]])
def test_a_step_is_divided_once_for_any_micro_batches(case: str, cut: list[int]) -> None:
    """Loss and gradient are those of torch's own mean over the whole step."""
    kind, options, wanted = LOSSES[case]
    objective, (logits, targets) = made(**options), drawn(kind)
    logits.requires_grad_()
    parts = list(zip(logits.split(cut), targets.split(cut), strict=True))
    blank = (logits[:1], torch.full_like(targets[:1], IGNORED))  # as a rank has where examples are few
    divisor = sum(objective.targets_in_batch(part) for _, part in parts)
    loss = sum(objective.loss_sum(*part) for part in [*parts, blank]) / divisor
    (gradient,) = torch.autograd.grad(loss, logits)
    whole = wanted(logits, targets)
    (true,) = torch.autograd.grad(whole, logits)
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
    assert torch.allclose(gradient, true.float(), rtol=1e-4, atol=1e-7)
    assert objective.targets_in_batch(blank[1]) == 0


@pytest.mark.parametrize("case", LOSSES)
def test_divisor_of_a_step_follows_from_labels_alone(case: str) -> None:
    """From the labels alone, without a micro-batch: by it the loss of a step is torch's mean."""
    kind, options, wanted = LOSSES[case]
    objective, (logits, targets) = made(**options), drawn(kind)
    columns: Any = SimpleNamespace(flat=lambda name: targets.numpy())
    divisor = objective.count(columns, np.arange(40))
    assert divisor == objective.targets_in_batch(targets)
    assert float(objective.loss_sum(logits, targets)) / divisor == pytest.approx(
        float(wanted(logits, targets)), rel=1e-5
    )


def test_the_control_a_mean_of_weighted_means_is_another_loss() -> None:
    objective, (logits, targets) = made(class_weights="balanced"), drawn("one")
    parts = list(zip(logits.split(10), targets.split(10), strict=True))
    means = [float(objective.loss_sum(*part)) / objective.targets_in_batch(part[1]) for part in parts]
    whole = float(functional.cross_entropy(logits, targets, BALANCED))
    assert abs(np.mean(means) / whole - 1) > 1e-2


def test_sums_of_weights_are_exact() -> None:
    """In whatever order they are added up: each is a multiple of a power of two."""
    objective, (_, targets) = made(class_weights={"a": 0.1, "b": 1 / 3, "c": 7.7}), drawn("one")
    shuffled = ((size, targets[torch.randperm(40)]) for size in (1, 3, 7, 40))
    sums = {sum(map(objective.targets_in_batch, values.split(size))) for size, values in shuffled}
    assert len(sums) == 1


@pytest.mark.parametrize("kind", ["one", "several"])
def test_focal_gradient_is_finite_for_certain_predictions(kind: str) -> None:
    objective = made(loss="focal", focal_gamma=0.5, multi_label=kind == "several")
    _, targets = drawn(kind)
    logits = torch.full((40, 4), -200.0).masked_fill(functional.one_hot(torch.arange(40) % 4, 4).bool(), 200.0)
    logits.requires_grad_()
    objective.loss_sum(logits, targets).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


# -- metrics ---------------------------------------------------------------------------------------------------------


def of_split(
    objective: Objective, kind: str, threshold: float | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    logits, targets = drawn(kind)
    sums = objective.score(logits, targets)
    return objective.metrics(sums, threshold), objective.tables(sums, threshold)


@pytest.mark.extras
def test_metrics_of_several_labels_are_scikit_learn_s() -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    logits, targets = drawn("several")
    found, tables = of_split(made(multi_label=True), "several")
    p, y = logits.double().sigmoid().numpy(), targets.numpy()
    given = p >= found["threshold"]
    assert found["micro_f1"] == pytest.approx(theirs.f1_score(y, given, average="micro"), abs=1e-12)
    assert found["macro_f1"] == pytest.approx(theirs.f1_score(y, given, average="macro", zero_division=0), abs=1e-12)
    assert found["average_precision"] == pytest.approx(theirs.average_precision_score(y, p), abs=1e-12)
    assert found["roc_auc"] == pytest.approx(theirs.roc_auc_score(y, p), abs=1e-12)
    assert found["loss"] == pytest.approx(theirs.log_loss(y.ravel(), p.ravel()), abs=1e-6)
    table = tables["labels"]
    assert table["examples"] == y.sum(0).tolist()
    assert table["right"] == (given & (y == 1)).sum(0).tolist()
    best = max(theirs.f1_score(y, p >= each, average="micro") for each in p.ravel())
    assert found["micro_f1"] == pytest.approx(best, abs=1e-12)


@pytest.mark.extras
def test_metrics_of_one_label_are_scikit_learn_s() -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    logits, targets = drawn("one")
    found, _ = of_split(made(class_weights="balanced", label_smoothing=0.2), "one")
    p, y = logits.double().softmax(-1).numpy(), targets.numpy()
    assert found["roc_auc"] == pytest.approx(theirs.roc_auc_score(y, p, multi_class="ovr"), abs=1e-12)
    assert found["loss"] == pytest.approx(theirs.log_loss(y, p), abs=1e-6), "without weights or smoothing"
    assert found["accuracy"] == theirs.accuracy_score(y, p.argmax(-1))
    assert found["macro_f1"] == pytest.approx(theirs.f1_score(y, p.argmax(-1), average="macro"), abs=1e-12)


@pytest.mark.extras
def test_metrics_of_numbers_are_the_field_s() -> None:
    theirs, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    logits, targets = drawn("numbers")
    found, tables = of_split(made(regression=True), "numbers")
    p, y = logits.double().numpy(), targets[:, 1:].numpy()
    assert found["loss"] == found["mse"] == pytest.approx(theirs.mean_squared_error(y, p), rel=1e-12)
    assert found["mae"] == pytest.approx(theirs.mean_absolute_error(y, p), rel=1e-12)
    assert found["r2"] == pytest.approx(theirs.r2_score(y, p), rel=1e-12)
    assert found["spearman"] == pytest.approx(np.mean([stats.spearmanr(y[:, i], p[:, i]).statistic for i in range(4)]))
    assert found["pearson"] == pytest.approx(np.mean([stats.pearsonr(y[:, i], p[:, i]).statistic for i in range(4)]))
    assert np.array(tables["scatter"]["true"]).T.tolist() == y.tolist()


@pytest.mark.extras
@pytest.mark.parametrize("seed", range(40))
def test_metrics_of_few_examples_are_the_field_s(seed: int) -> None:
    """One example, one label, equal outputs: NaN where theirs is not defined, and never another number."""
    theirs, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    random = np.random.default_rng(seed)
    count, labels = int(random.integers(1, 7)), 2 + seed % 2
    logits = torch.tensor(random.normal(size=(count, labels)).round(seed % 3), dtype=torch.float32)
    logits = logits[:1].expand(count, -1).contiguous() if seed % 5 == 0 else logits
    one = random.integers(0, labels, count) if seed % 3 else np.full(count, labels - 1)
    several = (random.random((count, labels)) < [0.0, 0.3, 1.0][seed % 3]).astype(np.int64)
    number = random.normal(size=count) if seed % 3 else np.full(count, 0.1)

    def defined(made: Callable[[], float]) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return float(made())
            except ValueError:  # scikit-learn's, or scipy's
                return float("nan")

    def scored(objective: Objective, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return objective.metrics(objective.score(outputs, targets), None)

    names, p = NAMES[:labels], logits.double().softmax(-1).numpy()
    found = scored(made(names, [1] * labels), logits, torch.tensor(one))
    wanted = {"macro_f1": theirs.f1_score(one, p.argmax(-1), average="macro")}
    if labels == 2:
        wanted["roc_auc"] = defined(lambda: theirs.roc_auc_score(one, p[:, 1]))
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, abs=1e-9, nan_ok=True)
    found = scored(made(names, [1] * labels, multi_label=True), logits, torch.tensor(several))
    q = logits.double().sigmoid().numpy()
    some = [n for n in range(labels) if several[:, n].any()]
    told = {"macro_f1": theirs.f1_score(several, q >= found["threshold"], average="macro", zero_division=0)}
    told["average_precision"] = (
        np.mean([theirs.average_precision_score(several[:, n], q[:, n]) for n in some]) if some else np.nan
    )
    assert {key: found[key] for key in told} == pytest.approx(told, abs=1e-9, nan_ok=True)
    outputs, x = logits[:, :1], logits[:, 0].double().numpy()
    targets = torch.tensor(np.stack([np.zeros(count), number], 1))
    found = scored(made(["x"], [], regression=True), outputs, targets)
    wanted = {
        "pearson": defined(lambda: stats.pearsonr(number, x).statistic),
        "spearman": defined(lambda: stats.spearmanr(number, x).statistic),
        "r2": np.nan if np.ptp(number) == 0 else defined(lambda: theirs.r2_score(number, x)),
    }
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, abs=1e-9, nan_ok=True)


def test_a_threshold_decides_between_two_labels() -> None:
    objective = made(["no", "yes"], [30, 10], threshold="validation")
    random = np.random.default_rng(0)
    targets = torch.tensor(random.integers(0, 2, 40))
    logits = torch.tensor(random.normal(size=(40, 2)), dtype=torch.float32)
    sums = objective.score(logits, targets)
    free, told = objective.metrics(sums, None), objective.metrics(sums, 0.9)
    assert told["threshold"] == 0.9
    p = logits.double().softmax(-1)[:, 1].numpy()
    assert told["accuracy"] == np.mean((p >= 0.9) == targets.numpy())
    assert objective.tables(sums, 0.9)["confusion"]["counts"][1][1] == int(((p >= 0.9) & (targets.numpy() == 1)).sum())
    assert free["f1"] >= told["f1"]
    answers = objective.answers(logits, 0.9)
    assert [each["label"] for each in answers] == ["yes" if each >= 0.9 else "no" for each in p]


@pytest.mark.parametrize("kind", ["one", "several"])
def test_a_chosen_threshold_decides_the_same_of_answers_and_of_scores(kind: str) -> None:
    """The logits are so large that all float32 probabilities would be 1."""
    objective = made(["no", "yes"], [30, 10], multi_label=kind == "several", threshold="validation")
    high = torch.linspace(18.0, 24.0, 12)
    logits = torch.stack([torch.zeros(12), high], 1) if kind == "one" else torch.stack([high, high], 1)
    wanted = (high > 21).long()
    sums = objective.score(logits, wanted if kind == "one" else torch.stack([wanted, wanted], 1))
    found = objective.metrics(sums, None)
    assert found["f1" if kind == "one" else "micro_f1"] == 1.0
    answers = objective.answers(logits, found["threshold"])
    given = [each["label"] == "yes" if kind == "one" else "yes" in each["labels"] for each in answers]
    assert given == wanted.bool().tolist()


@pytest.mark.parametrize("kind", ["one", "several", "numbers"])
def test_nan_logits_give_nan_scores(kind: str) -> None:
    objective = made(multi_label=kind == "several", regression=kind == "numbers")
    logits, targets = drawn(kind)
    logits[3] = float("nan")
    sums = objective.score(logits, targets)
    assert set(objective.metrics(sums, None)) == set(of_split(objective, kind)[0])
    assert "reliability" not in objective.tables(sums, None)


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        ({"multi_label": True, "regression": True}, "LS3273", ""),
        ({"label": ["a", "b"]}, "LS3275", "label"),
        ({"label": ["a", "a"], "multi_label": True}, "LS3274", "['a', 'a']"),
        ({"loss": "mse"}, "LS3276", "'mse'"),
        ({"loss": "focal", "regression": True}, "LS3276", "'focal'"),
        ({"class_weights": "balanced", "regression": True}, "LS3277", "class_weights"),
        ({"threshold": 0.5, "regression": True}, "LS3277", "threshold"),
        ({"loss": "focal", "label_smoothing": 0.1}, "LS3278", "label_smoothing"),
        ({"focal_gamma": 1.0}, "LS3279", "focal_gamma"),
        ({"class_weights": {"a": 0}}, "", "greater than or equal to 0.00001"),  # pydantic's own
        ({"class_weights": {"a": float("nan")}}, "", "a finite number"),
        ({"threshold": 1.5}, "", "less than 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], code: str, value: str) -> None:
    with pytest.raises(ValueError) as caught:
        ClassificationOptions.model_validate(options)
    assert mentions(str(caught.value), code, value) if code else value in str(caught.value)


def test_weights_of_labels_that_are_not_there_are_refused() -> None:
    with raises("LS3272", "'x'", "'a'", "'b'"):
        made(class_weights={"x": 2})
    with raises("LS3280", "'01'", "'1'"):
        made(names=["01", "1", "b", "c"], class_weights={"1": 2})
    made(names=["01", "1", "b", "c"], class_weights={"1": 2, "01": 1})
    made(names=["01", "2", "yes", "{"], class_weights={"01": 2})
    with raises("LS3270", "'b'"):
        made(counts=[10, 0, 10, 20], class_weights="balanced")
    with raises("LS3271", "'d'"):
        made(counts=[10, 1, 10, 40], class_weights="balanced", multi_label=True)
    with raises("LS3290", "4"):
        made(threshold=0.5)


def test_yaml_s_numbers_and_truths_name_labels() -> None:
    given = ClassificationOptions.model_validate({"class_weights": {0: 2, True: 3}})
    assert given.class_weights == {"0": 2.0, "true": 3.0}
