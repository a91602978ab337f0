"""One-line faults, injected into the process that judges a job: controls that the judge must all detect.

Each function changes one thing in lockstep and is called before anything else; ranks are forked from there.
"""

from __future__ import annotations

import os
from typing import Any


def late_rate() -> None:
    """Each step uses the learning rate of the next one."""
    from lockstep.training import loop

    right = loop.learning_rate
    loop.learning_rate = lambda section, step, steps: right(section, step + 1, steps)  # type: ignore[assignment]


def dropout_of_a_rank() -> None:
    """Dropout masks depend on the rank."""
    from lockstep.strategies import single

    right = single.seed_everything
    single.seed_everything = lambda seed, *more: right(seed + int(os.environ["RANK"]), *more)  # type: ignore[assignment]


def leaves_from_left_to_right() -> None:
    """One process adds leaves from left to right, while tensor ranks add them as a tree."""
    from lockstep.strategies.exact.tensor_leaves import LeafRanks

    right = LeafRanks.sum

    def added(self: Any, tensors: Any) -> Any:
        return right(self, tensors) if self.size > 1 else sum((t.float() for t in tensors[1:]), tensors[0].float())

    LeafRanks.sum = added  # type: ignore[method-assign]


def pieces_by_threads() -> None:
    """Split portable matrix products differently if there are two threads."""
    from lockstep.distributed import portable

    right = portable.install

    def install(threads: int) -> None:
        portable.ROWS = 1 if threads > 1 else portable.ROWS
        right(threads)

    portable.install = install  # type: ignore[assignment]


def forgotten_moments() -> None:
    """A resumed optimizer begins with moments of zero."""
    from lockstep.strategies.exact.training_state import TrainingState

    right = TrainingState.load_sharded_state_dict

    def load(self: Any, saved: Any) -> None:
        right(self, saved)
        for moments in self.stepper.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name].zero_()

    TrainingState.load_sharded_state_dict = load  # type: ignore[method-assign]


def forgotten_clip() -> None:
    """Gradients are not clipped."""
    from lockstep.strategies.exact.update import Gradient

    Gradient.clip_ = lambda self, norm, limit: None  # type: ignore[method-assign]


def unread_mask() -> None:
    """The model attends to padding."""
    from lockstep.tasks.classification import Classification

    right = Classification.collate

    def collate(self: Any, *what: Any) -> Any:
        found = right(self, *what)
        found.inputs["attention_mask"].fill_(1)
        return found

    Classification.collate = collate  # type: ignore[method-assign]


def unscored_row() -> None:
    """An evaluation scores one example twice and omits another."""
    import numpy

    from lockstep.training import evaluation

    class Numpy:
        """numpy with another order of evaluation rows."""

        def __getattr__(self, name: str) -> Any:
            return getattr(numpy, name)

        def argsort(self, *what: Any, **how: Any) -> Any:
            order = numpy.argsort(*what, **how)
            order[-1] = order[0]
            return order

    evaluation.np = Numpy()  # type: ignore[assignment]


def late_refusal() -> None:
    """Unsupported strategies are refused by their ranks, not before the start."""
    from lockstep.training import resolve

    right, of_rank = resolve._refuse_strategy, resolve.for_rank

    def for_rank(*what: Any, **how: Any) -> Any:
        resolve._refuse_strategy = right
        return of_rank(*what, **how)

    resolve._refuse_strategy = lambda job: None  # type: ignore[assignment]
    resolve.for_rank = for_rank  # type: ignore[assignment]
