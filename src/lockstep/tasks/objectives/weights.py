"""Weights of labels in the training loss.

In: `task.class_weights`, the names of labels, and how often each is in train. Out: a weight for each label.
"""

from __future__ import annotations

import numpy as np

from lockstep.config.run import RunError
from lockstep.tasks.objectives.options import ClassificationOptions

_FINEST = 2.0**-20  # weights are multiples of it, so that sums of them are exact, whatever is added up first


def of_labels(options: ClassificationOptions, names: list[str], counts: list[int], examples: int) -> np.ndarray | None:
    """Float64 [C], or None where all labels weigh the same. Of one label a text the weight of its examples; of several
    that of the examples which have the label, those which have not weighing 1 (torch's `pos_weight`).

    `balanced` is scikit-learn's for one label: examples / (labels x examples of the label); for several the examples
    that have not the label for each one that has it, which is the same ratio. Errors: `RunError`.
    """
    given = options.class_weights
    if given is None:
        return None
    if given == "balanced":
        if 0 in counts:
            raise RunError(
                f"task.class_weights: the training split has no example of {names[counts.index(0)]!r}, so balanced "
                "says nothing of its weight; give weights by label, or more data"
            )
        of = np.array(counts, np.float64)
        found = (examples - of) / of if options.multi_label else examples / (len(names) * of)
        if options.multi_label and (found == 0).any():
            raise RunError(
                f"task.class_weights: every example of train has the label {names[int(np.argmin(found))]!r}, so "
                "balanced says nothing of its weight; give weights by label, or leave that label out"
            )
    else:
        if unknown := sorted(set(given) - set(names)):
            raise RunError(
                f"task.class_weights: there is no label {unknown[0]!r}; known are {', '.join(map(repr, names[:20]))}"
            )
        found = np.array([given.get(name, 1.0) for name in names])
    return np.maximum(np.round(found / _FINEST), 1) * _FINEST
