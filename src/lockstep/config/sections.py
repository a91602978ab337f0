"""The sections of the run file: every key with its type, default and one line of description, unit included.

In: mappings read from YAML. Out: frozen values; an invalid value is a pydantic error, which `error_messages` explains.
A plug-in types its own keys in a nested `Options`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from lockstep.config import plugins
from lockstep.config.data_sources import (
    LAYOUT,
    OWN,
    QUOTE,
    SEPARATOR,
    TYPES,
    USUAL,
    Filter,
    Keys,
    Layout,
    Mixture,
    PathText,
    Quote,
    Separator,
    Streaming,
    Types,
    is_address,
)
from lockstep.config.errors import InvalidValue
from lockstep.config.schedules import ENDING, parse_schedule

Steps = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean
Interval = Steps | Literal["epoch"]  # interval in steps, or the end of every epoch

# Sections with a short form, such as `model: gpt2` -> the key that it sets.
SHORT = {
    "task": "name",
    "data": "source",
    "model": "source",
    "tokenizer": "source",
    "optim": "name",
    "strategy": "name",
    "launch": "name",
    "track": "to",
}
# Names of precisions and devices in other systems.
PRECISIONS = {"bfloat16": "bf16", "bf16-mixed": "bf16", "float32": "fp32", "32": "fp32", "32-true": "fp32"}
PRECISIONS |= {"float16": "fp16", "16": "fp16", "16-mixed": "fp16", "half": "fp16"}


def at_length(section: str, value: Any) -> Any:
    """Expand the short form of a section, a text (for `track` also a list), to a mapping with its main key."""
    short = isinstance(value, str) or (section == "track" and isinstance(value, list))
    return {SHORT[section]: value} if section in SHORT and short else value


def _listed(value: Any) -> Any:
    """Split comma-separated names into a list."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _dtype(value: Any) -> Any:
    return {"bf16": "bfloat16", "fp32": "float32"}.get(name := str(value).removeprefix("torch."), name)


Dtype = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_dtype)]
DEVICES = {"gpu": "cuda"}
Device = Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(lambda value: DEVICES.get(str(value), value))]
Precision = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(lambda value: PRECISIONS.get(str(value), value))]
Names = Annotated[list[str], BeforeValidator(_listed)]
ONE_ORIGIN = "give either source (pretrained) or type (from scratch), and not both"


class Section(Keys):
    """A mapping of the run file: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, values: Any) -> Any:
        return without_empty(cls, values)

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is expected; pydantic would make 1 and 0 of them."""
        kinds = str(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and "bool" not in kinds and (kind := re.search(r"\b(int|float)\b", kinds)):
            raise PydanticKnownError("int_type" if kind[0] == "int" else "float_type")
        return value


def without_empty(model: type[BaseModel], values: Any) -> Any:
    """Drop keys with null (`model.adapter=null`, a YAML section without keys) whose default is a section, or an empty
    mapping or list. Where a key has another default, null might mean that or nothing, so it is left to be refused."""
    if not isinstance(values, dict) or None not in values.values():
        return values
    empty = set()
    for name, field in model.model_fields.items():
        if name in values and values[name] is None and type(None) not in get_args(field.annotation):
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            empty |= {name} if isinstance(default, BaseModel) or default in ([], {}) else set()
    return {name: value for name, value in values.items() if name not in empty}


class OpenSection(Section):
    """A section that also has keys of plug-ins (`your.module.Class` for your own)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class PluginSection(OpenSection):
    """A section that also has the keys of the plug-in that it names."""

    name: str


class TaskSection(PluginSection):
    name: str = Field(
        "classification",
        description="a name that `lockstep list` prints, such as classification; module: a model, data and a loss of "
        "your own; or your.module.Class; its other keys are the task's",
    )


class DataSection(Streaming, Section):
    source: PathText | None = Field(None, description="Hub id, local folder, file or glob, or builtin/emotion")
    sources: Mixture | None = Field(
        None,
        description="several sources instead of one, each with its own keys: name, weight, rename, and the keys of "
        "this section that select and parse files",
    )
    config: str | None = Field(None, description="configuration of a Hub data set")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub data set")
    train: PathText | list[PathText] | None = Field(
        None, description="split name, path or list of paths; default: the split called train"
    )
    validation: PathText | list[PathText] | None = Field(
        None, description="split name, path or list of paths; default: found by its usual names, or cut from train"
    )
    test: PathText | list[PathText] | None = Field(
        None, description="split name, path or list of paths; default: the split called test, if any"
    )
    layout: Layout = Field("rows", description=LAYOUT)
    columns: list[str] | None = Field(
        None,
        min_length=1,
        description="column names, in order, of .csv and .tsv files without a header, and of layout: conll",
    )
    separator: Separator | None = Field(None, description=SEPARATOR)
    quote: Quote | None = Field(None, description=QUOTE)
    types: Types | None = Field(None, description=TYPES)
    validation_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="share of train to split off as validation, seeded and stratified, if no validation split is given",
    )
    test_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of train to split off as test, before validation and likewise, if no test split is given",
    )
    split_column: str | None = Field(
        None, description="column with the split of a row: train, validation (valid, val, dev) or test"
    )
    filter: Filter = Field(
        default_factory=dict,
        description="rows of every split to use, by column: a value, a list of values, or {min, max, none_of, "
        "min_words, max_words, min_characters, max_characters, min_tokens, "
        "max_tokens}; other rows are dropped and counted",
    )
    deduplicate: bool = Field(
        False,
        description="drop and count rows of train that equal an earlier row in all columns the task reads, ignoring "
        "white space",
    )
    decontaminate: bool = Field(
        False,
        description="drop and count rows of train whose texts also occur in validation or test; false: report their "
        "number",
    )
    drop_missing: bool = Field(
        False,
        description="drop and count rows that lack a text or a label (null, empty, blank); false: refuse them",
    )
    drop_unusable: bool = Field(
        False,
        description="drop and count rows that cannot be trained on or scored: a negative equal to its row's own text, "
        "two equal answers, more or fewer tags than words, or a validation or test label that train lacks; false: "
        "refuse them",
    )
    follow_links: bool = Field(
        False,
        description="follow symbolic links in the named folders to files outside of them; false: refuse such links",
    )
    encoding: str = Field(
        "utf-8", description="encoding of text files: utf-8, utf-16, latin-1, cp1252, ..., by Python's names"
    )
    limit: Positive | None = Field(
        None, description="use at most this many examples of each split; fewer for validation alone: evaluate.limit"
    )
    max_length: Positive = Field(128, description="maximum number of tokens of an example")
    padding: Literal["none", "batch"] = Field(
        "none",
        description="none: a micro-batch's texts are concatenated without padding, if the model family supports it "
        "(else as batch); batch: padded to the longest of the micro-batch",
    )
    group_by_length: Positive = Field(
        1,
        description="number of steps whose examples are sorted by length together, so that a step has similar "
        "lengths; 1: no sorting",
    )
    workers: Steps = Field(
        0,
        description="worker processes of each rank that collate its batches (task module only); does not change "
        "results; 0: the rank itself",
    )

    @property
    def splits_named(self) -> dict[str, list[str]]:
        """Split -> paths or names that the run file gives for it."""
        values = {split: getattr(self, split) for split in USUAL}
        return {s: [value] if isinstance(value, str) else value for s, value in values.items() if value is not None}

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """(key, address) of each file elsewhere."""
        places = {"source": [] if self.source is None else [self.source]} | self.splits_named
        return [(f"data.{key}", text) for key, texts in places.items() for text in texts if is_address(text)]

    @model_validator(mode="after")
    def _one_way(self) -> DataSection:
        if self.sources is None:
            return self
        if keys_set := [key for key in OWN if key in self.changed_keys]:
            raise InvalidValue("LS1130", f"{keys_set[0]} cannot be set beside data.sources; set it in each source")
        return self

    @model_validator(mode="after")
    def _something_is_left(self) -> DataSection:
        if self.validation_fraction + self.test_fraction >= 1:
            raise InvalidValue(
                "LS1131",
                f"validation_fraction ({self.validation_fraction:g}) and test_fraction ({self.test_fraction:g}) "
                "sum to 1 or more, which leaves nothing to train on; lower them",
            )
        return self

    @field_validator("encoding")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            "".encode(value)
        except (LookupError, ValueError):
            raise InvalidValue(
                "LS1132",
                f"invalid value {value!r}; expected an encoding that Python knows, such as utf-8, utf-16, "
                "latin-1 or cp1252",
            ) from None
        return value


class ModelSection(Section):
    source: PathText | None = Field(
        None, description="Hub id or local folder of a pretrained model, an OUTPUT, or a checkpoint in one"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a Hub model")
    type: str | None = Field(None, description="model type of transformers (gpt2, bert, ...) to train from scratch")
    config: dict[str, Any] = Field(
        default_factory=dict, description="entries of the model's config to set; a mapping for a config within it"
    )
    attention: str | None = Field(None, description="attn_implementation of transformers (sdpa, eager, ...)")
    compile: bool | Literal["whole", "auto"] = Field(
        "auto",
        description="torch.compile in training; true: each layer; whole: a micro-batch from the embedding to the loss, "
        "for examples of one or a few lengths and strategies with the whole model on each rank; auto: whole on GPUs, "
        "if possible and the run is long enough, else false. Results of true, whole and false differ in bits; each is "
        "the same at any number of processes",
    )
    compile_lengths: list[Positive] | None = Field(
        None, description="lengths to pad texts to for compile: whole; default: up to four, chosen from the data"
    )
    cuda_graphs: bool = Field(
        False, description="launch a micro-batch of compile: whole on GPUs as one CUDA graph; does not change results"
    )
    checkpoint_activations: bool = Field(
        False, description="keep only each layer's inputs for backward, recompute the rest; does not change results"
    )
    offload_activations: bool = Field(
        False, description="keep saved activations in host memory (GPUs only); does not change results"
    )
    adapter: dict[str, Any] = Field(
        default_factory=dict,
        description="train only an adapter of peft (type: lora, r, ...); export: merged | adapter",
    )
    dtype: Dtype = Field(
        "float32",
        description="dtype in which weights are stored; bfloat16 is also the dtype of the computation. With an "
        "adapter: dtype of the frozen matrices only (default bfloat16); precision sets that of the computation",
    )
    freeze: list[str] = Field(
        default_factory=list, description="names of weights to freeze, with * for any part of a name"
    )
    quantization: Literal["nf4", "fp4"] | None = Field(
        None, description="keep the frozen linear layers of an adapter's base in 4 bits (QLoRA)"
    )
    trust_remote_code: bool = Field(False, description="run code that comes with a Hub model; read it first")

    @property
    def compiles_layers(self) -> bool:
        """Whether each layer is compiled."""
        return self.compile is True

    @property
    def changes_layers(self) -> bool:
        """Whether layers are compiled, recomputed or offloaded."""
        return self.compiles_layers or self.checkpoint_activations or self.offload_activations

    @property
    def fixed_lengths(self) -> list[int] | None:
        """Lengths to which training texts are padded; None: each micro-batch has the length of its longest."""
        return self.compile_lengths if self.compile == "whole" else None

    @property
    def compiled(self) -> bool:
        """Whether training runs compiled code; `auto` is decided later (`strategies/engines/region.py`)."""
        return self.compile in (True, "whole")

    @model_validator(mode="before")
    @classmethod
    def _dtype_of_frozen_weights(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("adapter") and values.get("dtype") is None:
            return {**values, "dtype": "bfloat16"}
        return values

    @property
    def trained_in_bfloat16(self) -> bool:
        """Whether the trained weights are bfloat16 and all computation uses it."""
        return self.dtype == "bfloat16" and not self.adapter

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if self.source is not None and self.type is not None:
            raise InvalidValue("LS1135", ONE_ORIGIN)
        if self.revision is not None and self.source is None:
            raise InvalidValue("LS1136", "revision has an effect only with model.source, a model of the Hub; remove it")
        return self


class TokenizerSection(Section):
    source: PathText | None = Field(None, description="Hub id or local folder; default: the model's own")
    train: Literal["bpe", "wordpiece", "wordlevel", "unigram", "character"] | None = Field(
        None, description="train a tokenizer of this kind on the training texts"
    )
    vocab_size: Positive = Field(8000, description="largest vocabulary of a trained tokenizer")

    @model_validator(mode="after")
    def _one_origin(self) -> TokenizerSection:
        if self.source is not None and self.train is not None:
            raise InvalidValue("LS1133", "source and train are both set; remove one of them")
        if self.train is None and "vocab_size" in self.changed_keys:
            raise InvalidValue(
                "LS1137", "vocab_size has an effect only with tokenizer.train; set it, or remove tokenizer.vocab_size"
            )
        return self


ALONE = "single"  # the strategy of one process, which needs no torch to be recognized


class StrategySection(Section):
    name: str = Field(
        "ddp",
        description="single | allreduce | ddp | hf_accelerate | hf_trainer | zero1 | zero2 | zero3 | fsdp2 | pipeline, "
        "or your.module.Class",
    )
    exact: bool | Literal["portable"] = Field(
        True,
        description="true: bitwise equal results at any number of processes, if the strategy supports it; false: "
        "the engine's own reduction; portable: also bitwise equal on any x86-64 processor with AVX2 and "
        "FMA and at any number of threads (on an AMD EPYC, a step took 0.95 times as long in fp32, and "
        "1.7 times in bf16, which is computed in float32)",
    )
    all_reduce: Literal["auto", "flat", "hierarchical"] = Field(
        "auto",
        description="how exact sums are communicated; flat: from every process to every other; hierarchical: in "
        "stages, first within a machine; auto: hierarchical on several machines or above 8 processes. "
        "Does not change results. ZeRO always uses flat",
    )
    tensor_leaves: Positive = Field(
        1,
        description="number of parts of each layer's matrix products, summed in a fixed order, so that any number "
        "of tensor ranks that divides it gives the same bits. Part of the arithmetic",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="passed to the engine untouched")

    @property
    def alone(self) -> bool:
        """Whether this strategy trains on one process only."""
        return self.name == ALONE


class LaunchSection(PluginSection):
    name: str = Field(
        "local",
        description="local | torchrun | accelerate | slurm | tcp; with lockstep-clouds kubernetes | ray | sagemaker; "
        "or your.module.Class; its other keys are the launcher's",
    )
    processes: Positive | Literal["auto"] = Field(
        "auto",
        description="processes per machine; auto: processes_per_gpu per GPU, else one per core (SageMaker: per "
        "instance), at most micro_batches",
    )
    device: Device = Field("auto", description="auto: cuda if there is a GPU")
    processes_per_gpu: Positive = Field(
        1, description="processes that share a GPU, over gloo: to try a job of several processes on the one you have"
    )
    threads: Positive | Literal["auto"] = Field(
        "auto", description="threads per process; auto: cores / micro_batches if exact, else its share"
    )
    max_restarts: Steps = Field(0, description="number of restarts from the last checkpoint after a rank failed")
    on_rank_failure: Literal["restart", "continue"] = Field(
        "restart",
        description="when a rank is killed or a machine fails; continue: the others finish the step without a "
        "checkpoint and send their state to replacements (at most max_restarts ranks)",
    )
    replicate_every: Steps = Field(
        0,
        description="steps between peer checkpoints: copies of each rank's shard of the state in the memory of "
        "another rank, from which fsdp2, pipeline and ZeRO recover under on_rank_failure=continue; 0: none",
    )
    timeout_s: float = Field(600.0, gt=0, description="timeout of a collective in seconds")
    hang_timeout_s: float = Field(
        300.0,
        ge=0,
        description="seconds without a heartbeat or progress after which the job ends and names the rank, its step "
        "and its stack; 0: never",
    )
    rebalance_every: Steps = Field(
        0,
        description="steps between measurements of each rank's time per token; a rank that stays slow gives "
        "micro-batches to others; 0: never",
    )

    @model_validator(mode="after")
    def _copies_have_a_use(self) -> LaunchSection:
        if self.replicate_every and self.on_rank_failure != "continue":
            raise InvalidValue(
                "LS1134",
                "replicate_every: peer checkpoints are used only when ranks continue without a failed one; set "
                "launch.on_rank_failure=continue, or remove replicate_every",
            )
        return self


class Group(Section):
    """Parameter group: weights with their own learning rate or weight decay."""

    match: str = Field(min_length=1, description="names of the weights, with * for any part of a name")
    learning_rate: float | None = Field(None, gt=0, description="highest learning rate of the group")
    weight_decay: float | None = Field(
        None, ge=0, description="weight decay of the group; biases and norms still have none"
    )


def _optim_groups(value: Any) -> Any:
    """Validate `optim.groups`. Errors: `ValueError`, which names the group and its key."""
    if not isinstance(value, list):
        raise InvalidValue(
            "LS1075", "expected a list of groups, such as [{match: 'classifier.*', learning_rate: 1e-3}]"
        )
    for place, each in enumerate(value):
        try:
            Group.model_validate(each)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0]) if first["loc"] else ""
            mapping = first["type"].startswith(("dict", "model"))
            expectation = "a mapping with match" if mapping else first["msg"].removeprefix("Input should be ")
            wrong = {
                "extra_forbidden": f"unknown key {key!r}; known are {', '.join(Group.model_fields)}",
                "missing": f"{key} is missing: the names of its weights, with * for any part of a name",
            }.get(first["type"], f"{f'{key}: ' if key else ''}invalid value {first['input']!r}; expected {expectation}")
            raise InvalidValue("LS1076", f"group {place + 1}: {wrong}") from None
    return value


class OptimSection(PluginSection):
    name: str = Field(
        "adamw",
        description="adamw | sgd | lion | adafactor | muon | schedule_free | adamw_8bit, or your.module.Class; its "
        "other keys are the optimizer's",
    )
    learning_rate: float = Field(5e-5, gt=0, description="highest learning rate of the schedule")
    schedule: Annotated[str | list[tuple[Steps, float]], BeforeValidator(parse_schedule)] = Field(
        "linear",
        description="constant | linear | cosine | inverse_sqrt | polynomial | wsd | one_cycle, after the warm-up, or "
        "points [[step, rate], ...] with straight lines between them; the default of schedule_free is constant",
    )
    warmup_steps: Steps = Field(
        0, description="steps of linear warm-up from 0 (wsd: from min_lr_ratio; schedule_free: from 1 / warmup_steps)"
    )
    warmup_fraction: float = Field(0.0, ge=0, le=1, description="warm-up as a share of all steps")
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="final rate of linear, cosine, polynomial, wsd and one_cycle, as a share of learning_rate",
    )
    power: float = Field(1.0, gt=0, description="exponent of polynomial")
    decay_fraction: float = Field(
        0.1, gt=0, le=1, description="length of wsd's decay at the end, as a share of all steps"
    )
    decay_steps: Steps = Field(0, description="length of wsd's decay in steps, instead of decay_fraction; 0: not set")
    decay_shape: Literal["linear", "cosine", "sqrt"] = Field(
        "linear", description="shape of wsd's decay; sqrt: 1 - square root of the progress"
    )
    weight_decay: float = Field(0.01, ge=0, description="not applied to biases (also of relative positions) and norms")
    groups: Annotated[list[Group], BeforeValidator(_optim_groups)] = Field(
        default_factory=list,
        description="parameter groups with their own rate or decay, as {match, learning_rate, weight_decay}; the "
        "first match applies",
    )
    layerwise_lr_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="layer-wise decay: factor of the rate from each layer to the one below; 1: equal rates",
    )
    master_weights: bool = Field(
        True,
        description="with model.dtype bfloat16: update a float32 copy of the weights and round it into them; false: no "
        "copy, and updates below a weight's last bit are lost",
    )
    max_grad_norm: float | None = Field(1.0, ge=0, description="largest gradient norm; 0 or null: no clipping")

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if values.get("schedule") is None:
            values["schedule"] = plugins.fact("optimizers", values.get("name"), "usual_schedule", "linear")
        with suppress(ValueError):  # invalid points are refused under their own key
            if isinstance(points := parse_schedule(values["schedule"]), list):
                values.setdefault("learning_rate", max(rate for _, rate in points))
        return values

    @model_validator(mode="after")
    def _of_its_schedule(self) -> OptimSection:
        if self.warmup_steps and self.warmup_fraction:
            raise InvalidValue("LS1077", "warmup_steps and warmup_fraction are both set; remove one of them")
        points = isinstance(self.schedule, list)
        if isinstance(self.schedule, list) and self.learning_rate != (top := max(rate for _, rate in self.schedule)):
            raise InvalidValue(
                "LS1078",
                f"learning_rate is {self.learning_rate:g} but the highest point of schedule is {top:g}; remove "
                "learning_rate",
            )
        wrong = {
            "warmup_steps": points and self.warmup_steps,
            "warmup_fraction": points and self.warmup_fraction,
            "min_lr_ratio": self.schedule not in ENDING and self.min_lr_ratio,
            "power": self.schedule != "polynomial" and self.power != 1.0,
            "decay_steps": self.schedule != "wsd" and self.decay_steps,
            "decay_fraction": self.schedule != "wsd" and self.decay_fraction != 0.1,
            "decay_shape": self.schedule != "wsd" and self.decay_shape != "linear",
        }
        for key, reason in wrong.items():
            if reason:
                name = "points" if points else self.schedule
                raise InvalidValue("LS1079", f"{key} has no effect with schedule: {name}; remove it")
        return self


class CheckpointSection(Section):
    every: Interval = Field(200, description="steps between checkpoints, or epoch; 0: only at a stop and at the end")
    keep: Positive = Field(2, description="newest checkpoints to keep")
    at: list[Positive] = Field(
        default_factory=list,
        description="additional steps at which to save a checkpoint that is kept, for example to branch from",
    )
    best: str | None = Field(
        None,
        pattern=r"^-?\w+$",
        description="metric that selects the best evaluated checkpoint, which is kept too: accuracy, or -loss "
        "(lower is better); default: -loss where export or evaluate.patience needs one",
    )
    on_failure: Literal["continue", "stop"] = Field(
        "continue", description="when a checkpoint cannot be written: train on, or stop with status 1"
    )
    rescue: PathText | None = Field(
        None,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="folder on another disk for the model, if OUTPUT's disk is full at the end; default: any disk "
        "with enough space",
    )
    changed_code: Literal["refuse", "allow"] = Field(
        "refuse",
        description="when your own task or strategy was edited since the checkpoint: refuse to resume, or resume with "
        "a note",
    )


class TrackSection(OpenSection):
    to: Names = Field(
        default_factory=list,
        description="tensorboard | wandb | mlflow | trackio, or your.module.Class; console and jsonl are always on; "
        "each has its own keys under its name",
    )
    every: Positive = Field(10, description="steps between lines of metrics.jsonl")
    close_timeout_s: float = Field(
        60.0, ge=0, description="seconds to wait at the end for trackers that are still sending"
    )
    console: Literal["normal", "quiet", "verbose"] = Field(
        "normal",
        description="output on the terminal; quiet: notes and errors only; verbose: every line of the log",
    )


class ProfileSection(Section):
    steps: Steps = Field(0, description="number of steps to profile with torch.profiler, into OUTPUT/profile/; 0: none")
    after: Steps = Field(3, description="steps to skip first, counted from each start, besides one warm-up step")


class HubSection(Section):
    push_to: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*$",
        description="USER/REPO to upload the export to at the end; the token comes from HF_TOKEN",
    )
    private: bool = Field(True, description="create a private repository, and refuse a public one")
    license: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description="license of the model, as the Hub writes it: apache-2.0, mit, cc-by-4.0, other",
    )
    language: str | list[str] | None = Field(
        None,
        description="languages of the texts, as ISO codes: en, or [en, de]; default: those of a translation's columns",
    )
    tags: list[str] = Field(default_factory=list, description="tags of the model on the Hub")


class VerifySection(Section):
    plain: bool = Field(
        True,
        description="compare loss and gradient of a few examples with plain transformers before the first step, and "
        "a few predictions of the export with the run's at the end; stop if they differ by more than "
        "rounding",
    )


class FingerprintSection(Section):
    every: Interval = Field(
        100,
        description="steps between hashes of weights and optimizer state in OUTPUT/fingerprints.jsonl, or epoch; 0: "
        "only at checkpoints",
    )


class SdcCheckSection(Section):
    every: Steps = Field(
        0,
        description="steps between checks, each of which recomputes one micro-batch on another rank and compares "
        "the weights of all ranks, bit for bit; 0: never",
    )
    on_difference: Literal["stop", "retry", "evict"] = Field(
        "stop",
        description="before the update; stop: save the state before the step and end; retry: recompute the step, "
        "and stop if it differs again; evict: continue without the faulty machine (torchrun with "
        "launch.machines as fewest:most) or, on one machine, without the faulty rank "
        "(launch.on_rank_failure: continue)",
    )
