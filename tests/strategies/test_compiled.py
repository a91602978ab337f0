"""`model.compile`: one compiled function for all equal layers and all lengths, compiled from the same examples on every
rank."""

import os
from collections.abc import Callable
from functools import cache as once
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.data.job import Job, arithmetic_of
from lockstep.distributed.world import World
from lockstep.strategies.engines import blocks
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate
from lockstep.training.resolve import resolve_strategy
from support.harness import build, build_with_feed, digest, rank_0_of, run_on, tiny
from support.marks import long
from support.messages import raises
from support.strategy_runs import steps_of
from support.task_runs import make

COMPILE = "model.compile=true"
SEVERAL = ("ddp", "allreduce", "fsdp2", "hf_accelerate", "hf_trainer", "pipeline")


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the compiler by a backend that runs the traced graph as it is, and return the list of functions that it
    returned."""
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def code(*args: Any) -> Any:
            code.calls += 1  # type: ignore[attr-defined]
            return graph(*args)

        code.calls = 0  # type: ignore[attr-defined]
        found.append(code)
        return code

    monkeypatch.setattr(blocks, "BACKEND", backend)
    return found


def here(*overrides: str, **values: Any) -> dict[str, Any]:
    """Return the results of six steps in this process."""
    run = tiny("strategy.name=single", *overrides, **values)
    return steps_of(World(run), run)


@pytest.mark.slow
def test_three_compiled_functions_serve_all_lengths_and_layers(codes: list[Any]) -> None:
    """Padded micro-batches, unpadded ones and single examples need three compiled functions, whatever shapes follow.
    Names of weights and results of the steps stay as without compilation."""
    sizes = ("model.config.n_layer=2", "batch_size=9")  # micro-batches of one and of two examples
    run = tiny("strategy.name=single", COMPILE, *sizes)
    world = World(run)
    task, strategy = build(run, world)
    assert len(codes) == 3
    before = sum(code.calls for code in codes)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    batches = [feed.make(step) for step in range(6)]
    assert len({m.inputs["input_ids"].shape for batch in batches for m in batch.micro_batches}) > 10
    for step, batch in enumerate(batches):
        strategy.train_step(batch, learning_rate(run.optim, step, 6))
    evaluate(world, task, strategy, task.splits["validation"])
    assert len(codes) == 3
    assert sum(code.calls for code in codes) == before + 6 * 8 * 2  # steps, micro-batches, layers
    assert strategy.state.export().keys() == strategy.model.state_dict().keys()  # type: ignore[union-attr]
    assert not [name for name in strategy.state.state_dict() if "_orig_mod" in name]
    assert not [name for name, _ in strategy.model.named_modules() if "_orig_mod" in name]
    found = digest(strategy.state.state_dict())
    strategy.close()
    assert found == here(*sizes)["digest"]


def test_layers_are_compiled_before_training(codes: list[Any]) -> None:
    """Inputs that no compiled function fits run uncompiled."""
    layer = nn.Linear(4, 4)
    run = blocks.in_training(layer, layer.forward)
    run(torch.ones(2, 4))
    assert codes == []
    with blocks.making():
        run(torch.ones(2, 4))
    assert [code.calls for code in codes] == [1]
    run(torch.ones(7, 4))
    assert [code.calls for code in codes] == [2]
    run(torch.ones(3, 2, 4))
    assert [code.calls for code in codes] == [2]


def test_evaluation_runs_uncompiled_layers(codes: list[Any]) -> None:
    layer = nn.Linear(4, 4)
    run = blocks.in_training(layer, layer.forward)
    with blocks.making():
        layer.eval()
        run(torch.ones(2, 4))
        layer.train()
        with torch.no_grad():
            run(torch.ones(2, 4))
    assert codes == []


def test_compiled_code_of_other_shapes_is_not_reused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of shapes has its own cache folder. Inductor alone would reuse code of other sizes, and a run's bits
    would depend on what ran before it on this machine."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def folder(*overrides: str) -> Path:
        run = tiny("strategy.name=single", COMPILE, *overrides)
        task, strategy = build(
            run.model_copy(update={"model": run.model.model_copy(update={"compile": False})}), World(run)
        )
        with blocks.shared_cache(list(blocks.examples(strategy, task))):
            found = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        strategy.close()
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
        assert found.is_dir()
        return found

    assert folder() == folder("optim.learning_rate=1e-3")
    assert folder().is_relative_to(cache / "compiled")
    assert folder() != folder("data.max_length=12")
    before = cache_dir()  # this call sets the variable
    with blocks.shared_cache([]):
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(cache / "compiled")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == before
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "given")
    with blocks.shared_cache([]):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "given"


# Compiling for one precision takes a minute, once for all tests, and two more minutes for the layers that FSDP2
# gathers. CI runs bf16 only, whose code is that of fp32 plus autocast. In CI, the resumed run covers `ddp`. `fsdp2` and
# pipelines, which take a minute of CPU time to compile, run with the backend "eager" there: it covers how the compiler
# treats gathered weights.
LATER = {"fp32": [pytest.mark.slow, pytest.mark.long], "bf16": [pytest.mark.slow]}
PRECISIONS = [pytest.param(precision, marks=marks) for precision, marks in LATER.items()]
LIMIT_S = 1500  # compiling takes minutes on a busy machine


@once  # several tests use one job
def of(name: str, ranks: int, *overrides: str) -> dict[str, Any]:
    """Return rank 0's results of six steps on `ranks` processes."""
    run = tiny(f"strategy.name={name}", *overrides)
    return rank_0_of(ranks, steps_of, run, alike=("loss",), timeout_s=LIMIT_S)


# -- compiled by inductor --------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.long
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled_ranks_have_the_bits_of_one_process(name: str, precision: str) -> None:
    """`ranks` processes match one process bit for bit, with dropout, whose random numbers are the compiler's own."""
    one, two = (of(n, ranks, f"precision={precision}", COMPILE) for n, ranks in (("single", 1), (name, 2)))
    assert two["digest"] == one["digest"]
    assert two["loss"] == one["loss"]
    assert one["digest"] != of("single", 1, f"precision={precision}")["digest"]


def steps_in_themselves(world: World, run: Run) -> dict[str, Any]:
    """Return `steps_of` with layers that torch.compile traces and runs as they are, and the number of graphs."""
    blocks.BACKEND = "eager"
    counters.clear()
    return {**steps_of(world, run), "graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.processes
def test_stages_of_a_pipeline_are_compiled() -> None:
    """Compiled pipeline stages match one uncompiled process bit for bit."""
    run, alone = tiny("strategy.name=pipeline", COMPILE), of("single", 1)
    first, last = run_on(2, steps_in_themselves, run, timeout_s=LIMIT_S)
    assert min(first["graphs"], last["graphs"]) > 0
    assert first["digest"] == alone["digest"]
    assert first["loss"] == last["loss"] == alone["loss"]


@pytest.mark.processes
@pytest.mark.parametrize("gather", ["step", long("micro_batch")])
def test_layers_of_fsdp2_are_compiled_and_computed_again(gather: str) -> None:
    """FSDP2 with compiled, recomputed layers matches one uncompiled process bit for bit. The next test uses inductor's
    code."""
    words = (COMPILE, "model.checkpoint_activations=true", f"strategy.options.gather={gather}")
    run, alone = tiny("strategy.name=fsdp2", *words), of("single", 1)
    first, second = run_on(2, steps_in_themselves, run, timeout_s=LIMIT_S)
    assert min(first["graphs"], second["graphs"]) > 0
    assert first["digest"] == alone["digest"]
    assert first["loss"] == second["loss"] == alone["loss"]


@pytest.mark.processes
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.long
@pytest.mark.parametrize("gather", ["alone", "step", "micro_batch"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputed_activations_have_the_same_bits(gather: str, precision: str) -> None:
    words = (f"precision={precision}", COMPILE)
    again = (*words, "model.checkpoint_activations=true")
    alone = of("single", 1, *words)["digest"]
    if gather == "alone":
        assert of("single", 1, *again)["digest"] == alone
    else:
        assert of("fsdp2", 2, *again, f"strategy.options.gather={gather}")["digest"] == alone


CHUNKS = (
    "precision=bf16",
    "model.dtype=bfloat16",
    "task.loss_chunk=16",
)  # bf16 weights, and a loss computed in chunks of logits


@once
def of_chunks(folder: Path, name: str, ranks: int, *overrides: str) -> tuple[str, list[float]]:
    """Return rank 0's digest and losses of a language model."""
    run = make(folder, "packed", f"strategy.name={name}", *CHUNKS, *overrides)
    found = run_on(ranks, steps_of, run, timeout_s=LIMIT_S)[0]
    return found["digest"], found["loss"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("ddp", 2, ()),
        ("allreduce", 3, ()),
        ("fsdp2", 2, ("strategy.options.gather=step",)),
        ("fsdp2", 3, ("strategy.options.gather=micro_batch",)),
    ],
)
def test_weights_in_bf16_and_a_loss_in_chunks(name: str, ranks: int, options: tuple[str, ...], packed: Path) -> None:
    one = of_chunks(packed, "single", 1, COMPILE)
    assert of_chunks(packed, name, ranks, COMPILE, *options) == one
    assert one != of_chunks(packed, "single", 1)


def several_alone() -> None:
    """Compile, in this process, only for micro-batches of several examples: compiling for single examples as well takes
    half a minute more."""
    blocks.examples = partial(lambda made, *given: islice(made(*given), 1), blocks.examples)


def in_one_go(world: World, run: Run) -> str:
    several_alone()
    return str(steps_of(world, run)["digest"])


def stopped_and_gone_on_with(world: World, run: Run) -> tuple[str, dict[str, int]]:
    """Return the digest after three steps and three more in a newly built model, and the counters of torch's cache."""
    several_alone()
    _, strategy, feed = build_with_feed(run, world)
    for step in range(6):
        if step == 3:
            state = world.broadcast(strategy.state.state_dict())
            strategy.close()
            _, strategy = build(run, world)
            strategy.state.load_state_dict(state)
        strategy.train_step(feed.make(step), learning_rate(run.optim, step, 6))
    found = digest(strategy.state.state_dict())
    strategy.close()
    return found, dict(counters["aot_autograd"])


@pytest.mark.processes
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_has_the_same_bits(precision: str) -> None:
    words = (f"precision={precision}", COMPILE, "data.max_length=4")  # one length, so no code for padded micro-batches
    (before,) = run_on(1, in_one_go, tiny("strategy.name=single", *words), timeout_s=LIMIT_S)
    assert before != of("single", 1, *words[:1], *words[2:])["digest"]  # compiled code draws its own dropout masks
    for found, cached in run_on(2, stopped_and_gone_on_with, tiny("strategy.name=ddp", *words), timeout_s=LIMIT_S):
        assert found == before
        assert cached["autograd_cache_hit"] >= 1  # the second build, at the latest, reuses cached code
        assert "autograd_cache_bypass" not in cached


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with raises("LS4046", "'no-such-compiler'") as caught:
        blocks.check(Job.of(tiny(COMPILE)), here=True)
    assert "\n" not in str(caught.value)
    blocks.check(Job.of(tiny(COMPILE)), here=False)  # the launcher leaves this check to the ranks


@pytest.mark.parametrize("name", ["zero1", "zero3", "hf_accelerate"])
def test_deepspeed_is_refused(name: str) -> None:
    options = {"deepspeed": {"zero_stage": 2}} if name == "hf_accelerate" else {}
    run = tiny(COMPILE, strategy={"name": name, "options": options})
    with raises("LS4142"):
        resolve_strategy(run, 1)


def test_a_layer_that_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr(blocks, "BACKEND", backend)
    with raises("LS4048"):
        here(COMPILE)


def test_layers_that_cannot_be_traced_are_refused_before_processes_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longformer's attention computes how many tokens are global, which a graph cannot express. The check refuses it
    before ranks start, which would fail as well."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {"type": "longformer", "config": sizes | {"attention_window": 8}}
    with raises("LS4048", "model.compile: ") as caught:
        blocks.check(Job.of(tiny(COMPILE, model=model)), here=True)
    assert "\n" not in str(caught.value)
    blocks.check(Job.of(tiny(COMPILE, model=model)), here=False)  # the launcher leaves this check to the ranks
    blocks.check(Job.of(tiny(model=model)), here=True)
    with raises("LS4048"):
        here(COMPILE, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [long("fp32"), "bf16"])
def test_layers_that_can_be_traced_are_not_refused(
    precision: str, cache: Path, codes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check compiles nothing, leaves torch's random state alone, and caches its result."""
    state = torch.get_rng_state()
    run = tiny(COMPILE, f"precision={precision}", "model.config.n_layer=2")
    blocks.check(Job.of(run), here=True)
    assert codes == []
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(blocks, "in_training", None)
    blocks.check(Job.of(run), here=True)


@pytest.mark.slow
@pytest.mark.long
def test_embeddings_that_are_kept_in_one_piece_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's untied word embeddings, which transformers lists among the layers, are not compiled: their gradient has a
    number of rows that a graph cannot express. The steps match those with only the layers traced."""
    model = {"type": "bert", "config": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}}
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")  # forward and backward are traced, and no code is generated
    traced = here(COMPILE, model=model)
    assert traced["norm"] == pytest.approx(here(model=model)["norm"], rel=1e-4)
    monkeypatch.setattr(blocks, "_looks_up_tokens", lambda block: False)
    with raises("LS4048"):
        here(COMPILE, model=model)


def test_a_checkpoint_stores_whether_layers_are_compiled() -> None:
    assert arithmetic_of(tiny(COMPILE))["model.compile"] is True
    assert arithmetic_of(tiny("model.compile=false"))["model.compile"] is False
    assert "model.compile" not in arithmetic_of(tiny())  # decided later
