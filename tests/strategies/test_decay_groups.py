"""Weight decay: which weights have none, compared with Trainer of the installed transformers, in every family that its
config can build.

Each difference from Trainer is intended and listed here with its reason.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, Trainer

from lockstep.config.sections import OptimSection
from lockstep.plain import train as plain
from lockstep.strategies.exact import stepper
from lockstep.tasks.models import heads

# Without decay in lockstep, decayed by Trainer: weights of norms whose class is not `nn.LayerNorm` and whose names
# Trainer does not know (ResNet's, Mamba's `norm_f`). A norm's scale is near 1; shrinking it does not regularize the
# model.
NORMS = {
    "Aimv2RMSNorm", "BatchNorm1d", "BatchNorm2d", "BitGroupNormActivation", "Dots3NoteRMSNorm",
    "Exaone4_5_RMSNorm", "FalconMambaRMSNorm", "Gemma4RMSNorm", "Glm4vMoeRMSNorm", "Glm4vRMSNorm",
    "Glm5NextRMSNorm", "GlmOcrRMSNorm", "GroupNorm", "HunYuanVLRMSNorm", "HyperCLOVAXRMSNorm",
    "ImageGPTLayerNorm", "Mamba2RMSNorm", "MambaRMSNorm", "MuseGlimmerAssistantRMSNorm", "NemotronHRMSNorm",
    "Ovis2RMSNorm", "PeAudioMaskedGroupNorm", "PixtralRMSNorm", "Qwen2_5OmniRMSNorm", "Qwen2_5_VLRMSNorm",
    "Sapiens2RMSNorm", "VibeVoiceRMSNorm", "xLSTMRMSNorm",
}  # fmt: skip
# Decayed in lockstep and not by Trainer, which leaves out all weights inside a module called layernorm: matrices of
# small networks that compute a norm's scale, and all of RoBERTa-PreLayerNorm, because of its name.
INSIDE_NORMS = re.compile(
    r"layernorm\.mlp\.fc\d\.weight$|ada_rms_norm\.linear\d\.weight$|^roberta_prelayernorm\..*\.weight$"
)
# Decayed by lockstep and by Trainer, though some recipes leave them out: they are neither biases nor norms.
# `optim.groups` with `weight_decay: 0` excludes them.
DECAYED = {
    "mamba": r"\.(A_log|D)$",
    "mamba2": r"\.(A_log|D)$",
    "convnext": r"\.layer_scale_parameter$",
    "beit": r"\.lambda_[12]$",
    "clip": r"^logit_scale$|\.class_embedding$",
    "gpt_oss": r"\.sinks$",
}
# Without decay in both.
WITHOUT = {
    "t5": r"\.relative_attention_bias\.weight$",
    "mt5": r"\.relative_attention_bias\.weight$",
    "mpnet": r"\.relative_attention_bias\.weight$",
    "layoutlmv3": r"\.rel_pos_(x_|y_)?bias\.weight$",
    "swin": r"\.relative_position_bias_table$",
    "swinv2": r"\.continuous_position_bias_mlp\.\d\.weight$",
    "levit": r"\.attention_biases$",
    "encodec": r"\.lstm\.bias_[ih]h_l\d$",
    "wav2vec2-conformer": r"\.pos_bias_[uv]$",
}
# Config entries without which transformers cannot build a model of these families.
ENTRIES: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
}
LAYERS = 8  # enough for hybrid models to have each kind of layer
QUICK = ("bert", "gpt2", "llama", "resnet", *DECAYED, *WITHOUT)


def model_of(family: str, auto: str) -> Any:
    """Return the family's model with this Auto class, of its default config, on the meta device, or None if
    transformers cannot build it. It has few layers if the config allows that: later layers have the same names."""
    try:
        config = CONFIG_MAPPING[family](**ENTRIES.get(family, {}))
        if type(config) not in getattr(transformers, auto)._model_mapping:
            return None
    except Exception:  # a library or a config entry is missing
        return None
    few = copy.deepcopy(config)
    with suppress(Exception):
        _few_layers(few)
    for each in (few, config):
        with suppress(Exception), torch.device("meta"):
            return getattr(transformers, auto).from_config(each)
    return None


def _few_layers(config: Any) -> None:
    for name in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"):
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > LAYERS:
            setattr(config, name, LAYERS)
    if isinstance(types := getattr(config, "layer_types", None), list):
        config.layer_types = types[:LAYERS]
    for part in vars(config).values():
        if isinstance(part, transformers.PretrainedConfig):
            _few_layers(part)


def differences(model: nn.Module) -> Iterator[tuple[str, str, bool]]:
    """Yield weights that Trainer treats differently: name, class, and whether lockstep decays them. The plain
    reference, which has its own rule, must decay what lockstep decays."""
    theirs = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    ours = {name for name, how in stepper.assigned(OptimSection(weight_decay=0.1), model).items() if how.decay}
    assert plain_groups(model) == ours
    for name, p in model.named_parameters():
        if p.requires_grad and (name in ours) != (name in theirs):
            yield name, type(model.get_submodule(name.rpartition(".")[0])).__name__, name in ours


def plain_groups(model: nn.Module) -> set[str]:
    """Return the names of the weights that the plain reference decays."""
    run = {"optim": OptimSection(weight_decay=0.1).model_dump() | {"betas": [0.9, 0.999], "eps": 1e-8}}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {id(p): name for name, p in trained.items()}
    (optimizer,) = plain.optimizers_of(run, model, trained, {})
    return {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}


HEADS = [head.auto for head in heads.BUILT_IN.values()]
# least number of models built for each class
LEAST = {"AutoModel": 500, "AutoModelForCausalLM": 150, "AutoModelForSequenceClassification": 80}


# Of all families: some start ninja to build their own kernels. Changes with transformers alone: .ci/newest runs it.
OFTEN = {"AutoModelForSequenceClassification": pytest.mark.slow}
EVERY = [
    pytest.param(auto, [*CONFIG_MAPPING], marks=[OFTEN.get(auto, pytest.mark.long), pytest.mark.processes], id=auto)
    for auto in HEADS
]


@pytest.mark.parametrize(("auto", "families"), [pytest.param("AutoModel", QUICK, id="quick"), *EVERY])
def test_decay_groups_equal_trainers_with_listed_exceptions(auto: str, families: Sequence[str]) -> None:
    transformers.logging.set_verbosity_error()
    unwanted, built = {}, 0
    for family in families:
        if (model := model_of(family, auto)) is None:
            continue
        built += 1
        for name, kind, decays in differences(model):
            if not (INSIDE_NORMS.search(name) if decays else kind in NORMS):
                unwanted[f"{family}: {re.sub('[0-9]+', 'N', name)}"] = kind
    assert not unwanted
    assert built >= (len(QUICK) if families is QUICK else LEAST.get(auto, 20)), built


@pytest.mark.parametrize(("named", "decays"), [(DECAYED, True), (WITHOUT, False)])
def test_weights_by_name(named: dict[str, str], decays: bool) -> None:
    for family, pattern in named.items():
        model = model_of(family, "AutoModel")
        found = {n: how.decay for n, how in stepper.assigned(OptimSection(weight_decay=0.1), model).items()}
        matching = {decay for name, decay in found.items() if re.search(pattern, name)}
        assert matching == {0.1 if decays else 0.0}, family


class NormedEmbedding(nn.Embedding):
    """An embedding table with a norm, as in some model families."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.norm = nn.LayerNorm(2)


class Own(nn.Module):
    """A module with names that match the rule for norms, and names that only resemble them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = NormedEmbedding()
        self.bias_detector = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
        self.detector = nn.ModuleDict({"bias": nn.ModuleDict({"encoder": nn.Linear(2, 2)})})
        self.rnn = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        self.shift = nn.utils.parametrizations.orthogonal(nn.Linear(2, 2))
        self.lstm = nn.LSTM(2, 2)


def test_biases_and_norms_of_own_modules() -> None:
    exempt = {
        "tokens.norm.weight", "tokens.norm.bias", "bias_detector.0.0.weight", "bias_detector.0.0.bias",
        "detector.bias.encoder.bias", "rnn.bias", "shift.bias", "lstm.bias_ih_l0", "lstm.bias_hh_l0",
    }  # fmt: skip
    assert stepper.without_decay(Own()) == exempt
    assert plain_groups(Own()) == {name for name, _ in Own().named_parameters()} - exempt


def test_a_copy_that_peft_trains_has_the_decay_of_the_weight() -> None:
    assert stepper.is_bias("base_model.block.0.relative_attention_bias.modules_to_save.default.weight")
    assert not stepper.is_bias("base_model.classifier.modules_to_save.default.weight")
