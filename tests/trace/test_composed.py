"""What a loss is made of, what becomes of weights, states and updates, and what a script computes: each kind of fault
is named among what is to look at, and correct programs that come close are not."""

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep_trace import tracer
from lockstep_trace.findings import findings, likely, proved
from lockstep_trace.read import read
from lockstep_trace.tracer import Settings
from lockstep_trace.tracer.engines import _constants
from lockstep_trace.tracer.lifetimes import accumulates
from lockstep_trace.tracer.statements import _suspects
from support.composed_cases import COMPOSED

ROWS = [
    pytest.param(case, code, kind, kind in wrong, id=f"{case.__name__}-{code}-{kind or 'wrong'}")
    for case, codes in COMPOSED.items()
    for code, (wrong, right) in codes.items()
    for kind in (*wrong, *right)
]


@pytest.mark.parametrize(("case", "code", "kind", "wrong"), ROWS)
def test_faults_are_worth_a_look_and_healthy_lookalikes_are_not(
    tmp_path: Path, case: Callable[[str], None], code: str, kind: str, wrong: bool
) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    case(kind)
    tracer.end()
    trace = read(tmp_path)
    assert [e["text"] for e in trace.ranks[0].errors] == []
    rows = findings(trace)
    assert (code in {f.code for f in [*proved(rows), *likely(rows)]}) is wrong
    assert all(f.otherwise and f.decides for f in likely(rows) if f.code == code)
    assert wrong or code not in {f.code for f in rows}


COUNTED = "    for x in data:\n        right += hit(x)\n        all += 1\n    print(right / all)"
CODES = "def codes(rows):\n    return {c: i for i, c in enumerate(sorted(set(rows)))}\n"
SOURCES = {
    "mean of batches": (
        "for x, y in loader:\n    total += f1_score(y, model(x))\nprint(total / len(loader))",
        "for i, x in enumerate(rows.split(8)):\n    all.append(math.exp(loss.item()))\nprint(np.mean(all))",
        "for x, y in loader:\n    total += loss.item()\nperplexity = math.exp(total / len(loader))",
        "for x, y in loader:\n    outs.append(model(x))\nf1 = f1_score(ys, outs)",
        "for x, y in loader:\n    weights.append(torch.exp(-distance))",
        "for fold in folds:\n    scores.append(f1_score(y[fold], p[fold]))",
        "for x, y in loader:\n    curve.append(math.exp(loss.item()))\nplt.plot(curve)",
        "for x in DataLoader(d, batch_size=1):\n    all.append(math.exp(loss.item()))\nprint(np.mean(all))",
        "for n, loader in loaders.items():\n    all.append(f1_score(*run(loader)))\nprint(np.mean(all))",
        "for a, b in folds.split(x):\n    all.append(f1_score(y[b], fitted(a)(x[b])))\nprint(np.mean(all))",
        "for w in windows:\n    optimizer = Adam(net())\n    all.append(math.sqrt(mse))\nprint(np.mean(all))",
        "for x in loader:\n    w.append(torch.exp(-energy(x) + loss))\nprint(torch.stack(w).mean(), np.mean(w))",
    ),
    "never reset": (
        f"right = all = 0\nfor e in range(3):\n{COUNTED}",
        "m = Accuracy()\ndef run():\n    m.update(1, 2)\n    return m.compute()\nfor e in range(3):\n    run()",
        f"for e in range(3):\n    right = all = 0\n{COUNTED}",
        "n = 0\nfor e in range(3):\n    for x in data:\n        n += 1\n    print(n / (time() - start))",
        "m = Accuracy()\ndef run():\n    m.update(1, 2)\n    value = m.compute()\n    m.reset()",
        "def run():\n    m = Accuracy()\n    m.update(1, 2)\n    return m.compute()",
        "m = Accuracy()\ndef end():\n    return m.compute()\nfor x in data:\n    m.update(x)\nend()",
        "m = Mean()\nall = {'m': m}\nfor e in range(3):\n    empty(all)\n    m.update(e)\n    print(m.compute())",
        "n = s = 0\nfor e in range(3):\n    for x in data:\n        n += 1\n        s += timed(x)\n    print(n / s)",
    ),
    "logits above": (
        "loss = nn.BCEWithLogitsLoss()\nout = model(x)\nloss(out, y)\nright = (out > 0.5) == y",
        "F.binary_cross_entropy_with_logits(model(x), y)\nhit = model(x).squeeze() > 0.5",
        "loss = nn.BCEWithLogitsLoss()\nout = model(x).sigmoid()\nright = (out > 0.5) == y",
        "loss = nn.BCEWithLogitsLoss()\nout = torch.sigmoid(model(x))\nright = out > 0.5",
        "loss = nn.BCELoss()\nout = model(x)\nright = out > 0.5",
        "loss = nn.BCEWithLogitsLoss()\nout = model(x)\nright = out > 0",
        "loss = nn.BCEWithLogitsLoss()\nshare = size_model(x)\nloss(model(x), y)\nbig = share > 0.5",
        "class Net:\n    def forward(self, x):\n        return x if self.training else x.sigmoid()\n"
        "F.binary_cross_entropy_with_logits(model(x), y)\nhit = model(x) > 0.5",
    ),
    "codes": (
        CODES + "a = codes(train)\nb = codes(test)",
        "a = scaler.fit_transform(x_train)\nb = scaler.fit_transform(x_test)",
        CODES + "a = codes(source)\nb = codes(target)",
        CODES + "a = codes(train + test)\nb = codes(train)",
        "a = scaler.fit_transform(x_train)\nb = scaler.transform(x_test)",
        "a = scaler.fit_transform(x_train)\nb = other.fit_transform(y_train)",
        CODES + "a = codes(train_questions)\nb = codes(val_speakers)",
        "a = pca.fit_transform(x_train)\nb = TSNE(2).fit_transform(x_test)",
    ),
    "aliases": (
        "memory = []\nfor t in range(9):\n    memory.append((state, t))\n    state[0] += 1",
        "out = deque(maxlen=4)\nwhile run():\n    if good():\n        out.append(frame)\n    frame.copy_(next(it))",
        "memory = []\nfor t in range(9):\n    memory.append((state.clone(), t))\n    state[0] += 1",
        "memory = []\nfor t in range(9):\n    memory.append((state, t))\n    state = move(state)\n    state[0] = 1",
        "rows = []\nfor t in range(9):\n    row = {}\n    row['t'] = t\n    rows.append(row)",
        "best = []\nfor t in range(9):\n    cur[t] = f(t)\n    if good(cur):\n        best.append(cur)\n        break",
        "ps = []\nfor p in model.parameters():\n    p.zero_()\n    ps.append(p)",
        "blocks = []\nfor t in range(9):\n    block.requires_grad_(False)\n    blocks.append(block)",
        "buffer = Replay(9)\nfor t in range(9):\n    buffer.append(state)\n    state[0] += 1",
        "sums = []\nfor t in range(9):\n    n += 1\n    sums.append(n)",
    ),
    "number in a term": (
        "loss = f(x) + 0.1 * g(x).item()\nloss.backward()",
        "B = 2.0\ndef run():\n    loss = f(x)\n    loss += B * kl.detach().mean()\n    scaler.scale(loss).backward()",
        "loss = f(x) + log_alpha * (entropy - goal).detach()\nloss.backward()",
        "a, b = f(x), g(x)\nloss = a + b * (a.detach() / b.detach())\nloss.backward()",
        "loss = f(x)\nloss.backward()\ntotal = total + loss.item()",
        "def test():\n    loss = f(x).item() + g(x).item()\ndef run():\n    loss = f(x)\n    loss.backward()",
        "loss = (f(x) - 0.1).abs() + 0.1\nloss.backward()",
        "loss = f(x) - entropy(teacher).detach()\nloss.backward()",
        "n = n + mask.sum().item()\n(loss / n).backward()",
        "loss = decode(z + (q - z).detach()) + 0.25 * g(z, q.detach())\nloss.backward()",
        "loss = f(x) * scale.item() + penalty(x)\naccelerator.backward(loss)",
    ),
    "two orders": (
        "x = x[torch.randperm(n)]\ny = y[torch.randperm(n)]",
        "def pairs(x, y):\n    return x[rng.permutation(n)], y[rng.permutation(n)]",
        "order = torch.randperm(n)\nx, y = x[order], y[order]",
        "x = x[torch.randperm(n)]\ndef other(y):\n    return y[torch.randperm(n)]",
        "x = x[torch.randperm(n)]\nx = x[torch.randperm(n)]",
        "mixed = 0.5 * x + 0.5 * x[torch.randperm(n)]",
        "null = stat(a[rng.permutation(n)], b[rng.permutation(n)])",
        "u = x[torch.randperm(n)]\nv = y[torch.randperm(n)]\nindependent = mine(u, v)",
        "train = train[rng.permutation(len(train))]\nval = val[rng.permutation(len(val))]",
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_two_scripts_of_each_kind_are_worth_a_look_and_healthy_lookalikes_are_not(kind: str) -> None:
    for i, text in enumerate(SOURCES[kind]):
        rows = {row for row, _ in _suspects(ast.parse(text), text)}
        assert rows == ({kind} if i < 2 else set()), text


def test_the_names_of_a_function_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are looked for in the script's own code; libraries name many."""

    def compute_loss(inputs: dict[str, int]) -> list[int]:
        return [(lambda: inputs.pop("weight"))() for _ in range(1)]

    assert "weight" in _constants(compute_loss.__code__)
    assert "weight" not in _constants(compute_loss.__code__.replace(co_filename="/site-packages/trainer.py"))


STATES = [({"sync_gradients": False}, True), ({"sync_gradients": True}, False), ({}, False)]


@pytest.mark.parametrize(("state", "holds"), STATES)
def test_accelerate_says_whether_it_accumulates(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, bool], holds: bool
) -> None:
    module = SimpleNamespace(GradientState=SimpleNamespace(_shared_state=state))
    monkeypatch.setitem(__import__("sys").modules, "accelerate.state", module)
    assert accumulates() is holds
