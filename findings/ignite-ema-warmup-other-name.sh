#!/usr/bin/env bash
# pytorch-ignite 0.5.5: `EMAHandler` with `momentum_warmup`, attached under another name than "ema_momentum" (which two
# handlers of one engine need), warms up `engine.state.ema_momentum`, which nothing reads; a warning says that this attribute
# is new. The handler averages with its final momentum from the first iteration on.
# Documentation: `momentum_warmup` is "the initial momentum during warmup phase", and `name` of `attach` is the "attribute name
# for retrieving EMA momentum from Engine.state".
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 pytorch-ignite==0.5.5 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from ignite.engine import Engine, Events
from ignite.handlers import EMAHandler
from torch import nn

ITERATIONS, FIRST, LAST = 10, 0.5, 0.01


def run(name: str) -> tuple[list[float], float]:
    """The momentum of each iteration under `name`, and the average of a weight that is 1 in all but the start."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    handler = EMAHandler(model, momentum=LAST, momentum_warmup=FIRST, warmup_iters=ITERATIONS)
    engine = Engine(lambda engine, batch: model.weight.data.fill_(1.0))
    handler.attach(engine, name)
    seen: list[float] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(round(getattr(engine.state, name), 3)))
    engine.run(range(ITERATIONS))
    return seen, handler.ema_model.weight.item()


default, renamed = run("ema_momentum"), run("generator_momentum")
for name, (momenta, average) in (("ema_momentum", default), ("generator_momentum", renamed)):
    print(f"{name}: momenta {momenta}, average {average:.3f}")
assert len(set(default[0])) >= ITERATIONS - 1 and default[0][0] > 0.4
assert set(renamed[0]) == {LAST}
assert default[1] > 0.9 and abs(renamed[1] - (1 - (1 - LAST) ** ITERATIONS)) < 1e-5
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
