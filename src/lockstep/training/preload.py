"""What ranks fork from: importing this module imports what every rank needs, once for all of them."""

import gc

from lockstep.config.plugins import importing

with importing():
    import transformers.modeling_utils
    import transformers.models.auto.tokenization_auto  # noqa: F401

    import lockstep.training.rank  # noqa: F401

gc.freeze()  # ranks that collect garbage would look through all of this, and copy it to do so
