"""Modifications of both sides of a comparison with the plain reference: no dropout, perturbed weights, fixed masks.

In: models and examples of either side. Out: the same, modified. The reference itself (`lockstep.plain`) does not depend
on this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.config.run import Run
from lockstep.data.batch import IGNORED
from lockstep.distributed.randomness import seed_everything
from lockstep.plain.job import Plain


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Context without dropout and router noise (`router_jitter_noise`): sets them to 0 in modules, module attributes
    and the config."""
    before: list[tuple[Any, str, Any]] = []
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) and hasattr(c, "__dict__")}
    for holder in [*model.modules(), *configs.values()]:
        for name, value in list(vars(holder).items()):
            drops = (
                "drop" in name or "jitter" in name or (name == "p" and type(holder).__module__ == nn.Dropout.__module__)
            )
            if drops and isinstance(value, float) and value:
                before.append((holder, name, value))
                setattr(holder, name, 0.0)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


@torch.no_grad()
def perturb_(model: nn.Module, precision: str, seed: int = 0) -> None:
    """Move every weight one unit in the last place of the computing precision (8 bits for bfloat16), up or down at
    random."""
    draw, unit = torch.Generator().manual_seed(seed), 2.0**-23 if precision == "fp32" else 2.0**-9
    for parameter in model.parameters():
        signs = torch.where(torch.rand(parameter.shape, generator=draw) < 0.5, 1.0, -1.0).to(parameter)
        parameter.mul_(1 + signs * unit)


@contextmanager
def perturbed(model: nn.Module, precision: str, seed: int = 0) -> Iterator[None]:
    """Context with perturbed weights (`perturb_`); restores them."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        perturb_(model, precision, seed)
        yield
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])


def masked(job: Any, example: dict, read: list[int], predicted: list[int]) -> dict[str, Any]:
    """An example with given masks, after checking that they fit the example and the run file's masking rate. Errors:
    `ValueError`."""
    ids, task = example["input_ids"], job.run["task"]
    hidden = [label != IGNORED for label in predicted]
    right = all(
        (label if has else token) == own for token, label, has, own in zip(read, predicted, hidden, ids, strict=True)
    )
    special = {*job.tokenizer.all_special_ids} - {job.tokenizer.unk_token_id}
    most = max(1, round(task["mlm_probability"] * (sum(token not in special for token in ids) or len(ids))))
    if len(read) != len(ids) or not right or (sum(hidden) != most and not task["whole_word_mask"]):
        raise ValueError(f"{sum(hidden)} tokens are masked, {most} were expected, or they belong to another text")
    return {"input_ids": read, "next": predicted}


def drawn_examples(
    run: Run, job: Plain, split: str, rows: Sequence[int], place: tuple[int, int], device: torch.device
) -> list[dict[str, Any]]:
    """The plain path's batch of a user's own items. Random numbers of items, collate and forward count as data:
    generators are seeded as in the run's own path. `place`: step and micro-batch."""
    from lockstep.tasks.modules import dataset as own_data

    data = job.splits[split]
    items = [own_data.item(run, data.dataset, data.indices[row], place[0]) for row in rows]
    seed_everything(run.seed, *place, 1)
    (example,) = job.encode(items)
    seed_everything(run.seed, *place)
    return [{name: (own_data.Bundle(batch, 0, 0).to(device).batch, count) for name, (batch, count) in example.items()}]
