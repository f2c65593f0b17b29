"""Models around a text model that is served: what config.json wraps around its own, and which tensors are left.

Text models are read by their own families' files. What sees or hears beside them is not served: its tensors are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from service.models.spec.config_json import Config, ModelError
from service.models.spec.model_spec import ModelSpec

PREFIX = "model.language_model."
# Beginnings of names, as checkpoints have them and as modules are called now; the last are layers for multi-token
# prediction, which text models alone may have too.
UNUSED = (
    *("model.visual.", "visual.", "model.vision_tower.", "vision_tower."),
    *("model.multi_modal_projector.", "multi_modal_projector.", "mtp."),
)
# Fields of the part that is served which the whole may give too.
_OF_THE_WHOLE = ("tie_word_embeddings", "tie_embedding", "bos_token_id", "eos_token_id", "dtype", "torch_dtype")


def text_part(
    config: Config,
    read: Callable[[Config], ModelSpec],
    text_type: str,
    *,
    is_tied: bool | None = None,
    may_be_flat: bool = False,
    unused: tuple[str, ...] = (),
) -> ModelSpec:
    """The text model of a config.json that describes more. Raises ModelError.

    text_type    the model_type of the text_config that `read` reads
    is_tied      whether the head is the token embedding where config.json is silent; None: as `read` has it
    may_be_flat  without a text_config, the text model's fields stand beside those of the rest
    unused       beginnings of further names that are left
    """
    family, text = config["model_type"], config.get("text_config")
    if text is None and may_be_flat:
        text = config
    elif not isinstance(text, dict):
        raise ModelError(f"config.json of the model_type {family!r} must have a text_config, and has none")
    elif text.get("model_type", text_type) not in (text_type, family):
        raise ModelError(
            f"config.json of the model_type {family!r} has a text_config of the model_type {text['model_type']!r}; "
            f"served is {text_type}"
        )
    silent = {} if is_tied is None else {"tie_word_embeddings": is_tied}
    whole = {name: config[name] for name in _OF_THE_WHOLE if config.get(name) is not None}
    given = {name: value for name, value in text.items() if value is not None or name not in silent}
    return replace(read({**silent, **given, **whole, "model_type": family}), prefix=PREFIX, unused=(*UNUSED, *unused))
