"""Terms that transformers' models add to the cross entropy of their logits: lockstep computes none of them, so it
refuses the configs that ask for one, names the entry, and takes those that ask for none."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from lockstep.config.plugins import find
from lockstep.config.run import Run, RunError
from lockstep.distributed.world import World
from lockstep.tasks.models import config_checks, model_configs, models, small_models
from lockstep.tasks.models.inference import Decoding
from lockstep.tasks.models.model_configs import ModelChoice
from support.family_configs import BERT, GROUPED
from support.harness import build, tiny
from support.messages import raises
from support.task_runs import make

ROUTED = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
ASKED = {"output_router_logits": True}
JETMOE = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16}
JETMOE |= {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
BAMBA = GROUPED | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "attn_layer_indices": [1]}
NLLB = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
NLLB |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_experts": 4}
NLLB |= {"encoder_sparse_step": 1, "decoder_sparse_step": 1}
PROPHETNET = {"hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_ffn_dim": 64}
PROPHETNET |= {"decoder_ffn_dim": 64, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}
SILENT = {"disable_ngram_loss": True}


def run_of(family: str, config: dict[str, Any], **more: Any) -> Run:
    return tiny(model={"type": family, "config": config} | more)


REFUSED = [
    ("mixtral", "causal", ROUTED | ASKED, "output_router_logits: true", "output_router_logits: false"),
    ("mixtral", "causal", ROUTED | ASKED | {"router_aux_loss_coef": 1e-3}, "output_router_logits: true", "false"),
    ("jetmoe", "causal", JETMOE | ASKED, "output_router_logits: true", "output_router_logits: false"),
    ("bamba", "causal", BAMBA | {"z_loss_coefficient": 0.1}, "z_loss_coefficient: 0.1", "z_loss_coefficient: 0.0"),
    ("nllb-moe", "seq2seq", NLLB | ASKED, "output_router_logits: true", "output_router_logits: false"),
    ("prophetnet", "seq2seq", PROPHETNET, "disable_ngram_loss: false", "disable_ngram_loss: true"),
    ("prophetnet", "seq2seq", PROPHETNET | SILENT | {"eps": 0.1}, "eps: 0.1", "eps: 0.0"),
]


@pytest.mark.parametrize(("family", "head", "config", "given", "instead"), REFUSED)
def test_auxiliary_losses_are_refused_with_their_config_entry(
    family: str, head: str, config: dict[str, Any], given: str, instead: str
) -> None:
    with pytest.raises(RunError) as caught:
        models.check(ModelChoice.of(run_of(family, config)), head)
    said = caught.value.message
    assert said.startswith(f"model.config.{given} adds a term to the loss of {family} that lockstep does not compute")
    assert said.endswith(instead)


TAKEN = [
    ("mixtral", "causal", ROUTED),
    ("mixtral", "causal", ROUTED | ASKED | {"router_aux_loss_coef": 0.0}),
    ("mixtral", "classification", ROUTED | ASKED),  # transformers' own classifier has no such term
    ("bamba", "causal", BAMBA),
    ("prophetnet", "seq2seq", PROPHETNET | SILENT),
    ("gpt2", "causal", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    ("bart", "causal", {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}),
    *(("bert", head, BERT) for head in ("classification", "token_classification", "masked", "question_answering")),
    ("t5", "seq2seq", {"num_layers": 1, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}),
]


@pytest.mark.parametrize(("family", "head", "config"), TAKEN)
def test_models_with_plain_cross_entropy_are_accepted(family: str, head: str, config: dict[str, Any]) -> None:
    run = run_of(family, config)
    with torch.random.fork_rng([]):
        small = small_models.smaller(model_configs.load_config(run.model), head)
        assert any(tried(run, head, each) for each in small)  # and not taken because nothing could be tried
    config_checks.check(run.model, head)


def tried(run: Run, head: str, config: Any) -> bool:
    try:
        return config_checks.agree(config_checks.loss_pairs(run.model, head, config))
    except Exception:
        return False


def test_mixtrals_router_loss_is_the_refused_term() -> None:
    """Plain transformers: the loss of labels is the cross entropy and the coefficient times the loss of the routers."""
    config = transformers.MixtralConfig(**ROUTED | ASKED, router_aux_loss_coef=0.5, vocab_size=60)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(5, 60, (2, 9))
    with torch.no_grad():
        found = model(input_ids=ids, labels=ids)
    plain = cross_entropy(found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(found.loss) == pytest.approx(float(plain + 0.5 * found.aux_loss), rel=1e-6)
    assert float(found.aux_loss) > 0.5
    pairs = config_checks.loss_pairs(run_of("mixtral", ROUTED).model, "causal", config)
    assert not config_checks.agree(pairs)


def test_unknown_loss_terms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later transformers may add a term in training only."""
    forward = transformers.LlamaForCausalLM.forward

    def planted(self: Any, **inputs: Any) -> Any:
        found = forward(self, **inputs)
        if self.training:
            found.loss = found.loss + 1e-3 * found.logits.square().mean()
        return found

    run = run_of("llama", GROUPED)
    config = model_configs.load_config(run.model)
    assert config_checks.auxiliary_term(run.model, "causal", config) is None
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", planted)
    said = config_checks.auxiliary_term(run.model, "causal", config)
    assert said is not None
    assert "llama adds a term" in said


def test_a_config_that_cannot_be_tried_is_judged_by_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise ValueError("no such model")

    monkeypatch.setattr(small_models, "small", unknown)
    for config, refused in ((ROUTED | ASKED, True), (ROUTED, False)):
        run = run_of("mixtral", config)
        said = config_checks.auxiliary_term(run.model, "causal", model_configs.load_config(run.model))
        assert (said is not None and "output_router_logits: true" in said) == refused


def test_the_task_sets_the_problem_type_of_a_classifier() -> None:
    with raises("LS3110"):
        models.check(ModelChoice.of(run_of("bert", BERT | {"problem_type": "regression"})))


def test_routers_without_loss_do_not_stop_samples(tmp_path: Path) -> None:
    """Transformers computes the loss of routers while it writes, too, and fails where there is a cache."""
    run = make(tmp_path, "documents", "strategy.name=single")
    routed = {"type": "mixtral", "config": ROUTED | ASKED | {"router_aux_loss_coef": 0.0}}
    run = run.model_copy(update={"model": run.model.model_copy(update=routed)})
    assert find("tasks", "language_modeling")(run).prepare().facts["texts"]
    _, strategy = build(run, World(run))
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    assert strategy.generate(inputs, Decoding(4, 0, None)).shape == (2, 4)
    strategy.close()
