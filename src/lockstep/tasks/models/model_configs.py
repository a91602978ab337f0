"""The config of a run's model: read from where the model is, with the entries that the run file sets.

In: the `model` section. Out: a config of transformers, or a `RunError` that names the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from lockstep.config.run import Run, RunError
from lockstep.data.hub_errors import explained
from lockstep.data.origin import model_folder
from lockstep.tasks.models import adapters, config_entries

FROM_FIRST_TOKEN = ("t5gemma", "t5gemma2")  # families whose decoder starts from the first token of texts


def load_config(run: Run) -> Any:
    """The model's config with the run's entries set. Errors: `RunError`."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if run.model.type is not None:
        if run.model.type not in CONFIG_MAPPING:
            import difflib

            near = difflib.get_close_matches(run.model.type, list(CONFIG_MAPPING), 3)
            raise RunError(
                f"model.type: transformers knows no type {run.model.type!r}; near are {', '.join(near) or 'none'}"
            )
        return config_entries.from_scratch(CONFIG_MAPPING[run.model.type], run.model.config)
    source = local_or_id(run)
    try:
        config = AutoConfig.from_pretrained(
            source, revision=run.model.revision, trust_remote_code=run.model.trust_remote_code
        )
    except Exception as error:  # not a model folder, no such Hub id, no network: all are the user's to mend
        said = explained(error, run.model.revision)
        raise RunError(f"model.source: cannot load a model from {source!r}: {said}") from error
    config_entries.set_entries(config, run.model.config)
    return config


def derives(run: Run) -> bool:
    """Whether entries of a model from scratch decide about others. Errors: `RunError`."""
    from transformers import CONFIG_MAPPING

    family = str(run.model.type)
    return family in CONFIG_MAPPING and config_entries.derives(CONFIG_MAPPING[family], run.model.config)


def causal_entries(run: Run) -> dict[str, Any]:
    """Entries of a causal language model's config: no cache in training, and an encoder's family looks back only.
    Errors: `RunError`."""
    return {"use_cache": False} | ({"is_decoder": True} if needs_decoder(run) else {})


def needs_decoder(run: Run) -> bool:
    """Whether a causal language model of this family reads ahead until its config says that it decodes. Errors:
    `RunError`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = load_config(run)
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


def texts(config: Any) -> list[Any]:
    """A config and those within it that are of text: of an encoder, of a decoder, of the text of a model of images."""
    parts = [entry(config, name) for name in ("encoder", "decoder", "text_config")]
    return [config] + [t for part in parts if isinstance(part, PreTrainedConfig) for t in texts(part)]


def entry(config: Any, name: str, otherwise: Any = None) -> Any:
    """An entry of a config. XLNet has no limit of positions, and its config raises an error of its own where it is
    asked for one."""
    try:
        return getattr(config, name, otherwise)
    except NotImplementedError:
        return otherwise


LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # entries of configs: how often a layer is left out


def leaves_out_layers(config: Any) -> str | None:
    """The entry of a config by which training leaves out layers at random, micro-batch by micro-batch; None: it does
    not."""
    return next((entry for entry in LAYERDROP if (getattr(config, entry, None) or 0) > 0), None)


def local_or_id(run: Run) -> str:
    """The folder, checked to be a model's, or the Hub id. Errors: `RunError`."""
    source = model_folder(str(run.model.source))
    path = Path(source).expanduser()
    if adapters.is_adapter(path):
        raise RunError(f"model.source: {path} holds an adapter alone; name the model it is of, or export: merged")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RunError(f"model.source: the folder {path} is not a model's: it has no config.json")
        return str(path)
    if source.startswith((".", "/", "~")):
        raise RunError(f"model.source: there is no folder {path}")
    return source
