"""adapter_config.json as PEFT writes it: understood, or refused by the name of the setting."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adapters.errors import Malformed, Unsupported
from adapters.files.safetensors_header import parse_json_object

MAX_CONFIG_BYTES = 1 << 20
MAX_INVOCATION_TOKENS = 1024
MAX_RANK = 1 << 16
MAX_PATTERNS = 4096
MAX_LAYERS_PATTERNS = 16  # each is looked for in each module's path

# Settings that only matter during training or name where something came from: any value means the same adapter.
INERT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",  # PEFT resets it for linear layers; it concerns how a base weight is stored
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_dtype",
        "lora_ga_config",
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_core",
        "merge_weights",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "unsloth_fixed",
    }
)
# Settings that change the computation. Off (null, false, empty) they are accepted.
NOT_SUPPORTED = {
    "arrow_config": "Arrow routing",
    "enable_lora": "partial LoRA of fused projections",
    "kasa_config": "KaSA",
    "layer_replication": "layer replication",
    "megatron_config": "Megatron layers",
    "monteclora_config": "Monte Carlo LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QA-LoRA",
    "velora_config": "VeLoRA",
}
CLASSIFICATION = "SEQ_CLS"
TASK_TYPES = frozenset({None, "CAUSAL_LM", "FEATURE_EXTRACTION", CLASSIFICATION})
# Names of score heads, which PEFT adds to `modules_to_save` of such an adapter.
HEADS = ("classifier", "score")
MAX_LABELS = 4096
MAX_LABEL_CHARS = 256
ALL_LINEAR = "all-linear"
EXPERT_ORDERS = ("rank_major", "grouped_by_expert")
HARMLESS_INITS = frozenset({"eva", "gaussian", "mica", "orthogonal"})
KNOWN = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "bias",
        "classifier_from_token",
        "ensure_weight_tying",
        "exclude_modules",
        "id2label",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_B_layout",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "problem_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)


class HeadFacts(NamedTuple):
    """The meaning of a score head's outputs.

    labels        their names in order; () = LABEL_0 and so on
    problem_type  transformers' word; "" = none is said
    """

    labels: tuple[str, ...] = ()
    problem_type: str = ""

    @classmethod
    def of(cls, fields: dict[str, Any], file_name: str) -> HeadFacts:
        """Those that a configuration holds. Raises Malformed."""
        return cls(_labels(fields.get("id2label"), file_name), _problem_type(fields.get("problem_type"), file_name))


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of a PEFT LoRA configuration that change the computation.

    target_modules, exclude_modules  names (or path endings), or one regular expression / "all-linear"
    target_parameters                names (or path endings) of adapted parameters: a router's weight, or all experts'
    has_grouped_experts              lora_B of experts has its columns expert after expert, and not rank after rank;
                                     None: nobody says
    is_of_unsloth                    it names Unsloth, as its maker or that of its base
    layers_to_transform              None = all; only with a list of target_modules
    has_biases                       biases of the base's own projections were trained (`bias` "all" or "lora_only")
    use_dora, lora_bias              each adapted projection has a magnitude, or a bias beside lora_B
    modules_to_save                  modules that were trained whole
    ties_head                        a head that is the base's embedding was adapted or trained with it
    trained_tokens                   module (or the end of its path; "" is the embedding) to the ids of its trained
                                     tokens
    invocation                       tokens at whose last place in a prompt the adapter begins (aLoRA); () = everywhere
    needs_head                       it was trained for sequence classification
    head_facts                       `id2label` and `problem_type`
    classifier_from_token            the two tokens ("no", "yes") whose logits score a pair of texts; () = none
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    use_dora: bool = False
    has_biases: bool = False
    lora_bias: bool = False
    modules_to_save: tuple[str, ...] = ()
    ties_head: bool = False
    invocation: tuple[int, ...] = ()
    trained_tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    has_grouped_experts: bool | None = None
    is_of_unsloth: bool = field(default=False, compare=False)
    peft_version: str | None = None
    needs_head: bool = False
    head_facts: HeadFacts = field(default_factory=lambda: HeadFacts())
    classifier_from_token: tuple[str, ...] = ()

    @property
    def is_all_linear(self) -> bool:
        """Whether target_modules is the word that stands for all linear modules of a model's layers."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR


def parse_config(text: bytes) -> AdapterConfig:
    """Raises Malformed for what is no PEFT configuration, Unsupported naming a setting that cannot be done."""
    if len(text) > MAX_CONFIG_BYTES:
        raise Malformed(f"adapter_config.json has {len(text)} bytes; the limit is {MAX_CONFIG_BYTES}.")
    fields = parse_json_object(text, "adapter_config.json")
    _refuse_unsupported(fields)
    config = AdapterConfig(
        rank=_rank(fields.get("r", 8), "r"),
        alpha=_number(fields.get("lora_alpha", 8), "lora_alpha"),
        use_rslora=_bool(fields.get("use_rslora"), "use_rslora"),
        rank_pattern={key: _rank(value, f"rank_pattern[{key!r}]") for key, value in _pattern(fields, "rank_pattern")},
        alpha_pattern={
            key: _number(value, f"alpha_pattern[{key!r}]") for key, value in _pattern(fields, "alpha_pattern")
        },
        target_modules=_names(fields.get("target_modules") or [], "target_modules"),
        exclude_modules=_names(fields.get("exclude_modules"), "exclude_modules"),
        layers_to_transform=_layers(fields.get("layers_to_transform")),
        layers_pattern=_layers_pattern(fields.get("layers_pattern")),
        use_dora=_bool(fields.get("use_dora"), "use_dora"),
        has_biases=_has_biases(fields.get("bias", "none")),
        lora_bias=_bool(fields.get("lora_bias"), "lora_bias"),
        ties_head=_bool(fields.get("ensure_weight_tying"), "ensure_weight_tying"),
        trained_tokens=_trained_tokens(fields.get("trainable_token_indices")),
        invocation=_invocation(fields.get("alora_invocation_tokens")),
        modules_to_save=_saved(fields),
        target_parameters=_parameters(fields.get("target_parameters")),
        has_grouped_experts=_has_grouped_experts(fields.get("lora_B_layout")),
        is_of_unsloth=_names_unsloth(fields),
        peft_version=_version(fields.get("peft_version")),
        needs_head=fields.get("task_type") == CLASSIFICATION,
        head_facts=HeadFacts.of(fields, "adapter_config.json"),
        classifier_from_token=_token_pair(fields.get("classifier_from_token")),
    )
    if config.use_dora and config.lora_bias:
        raise Unsupported("adapter_config.json: use_dora together with lora_bias is not supported; train with either.")
    if config.invocation and (config.use_dora or config.has_biases or config.modules_to_save or config.trained_tokens):
        raise Unsupported(
            "adapter_config.json: alora_invocation_tokens is not supported together with use_dora, bias, "
            "modules_to_save or trainable_token_indices, which would change the base before the invocation; train "
            "without these."
        )
    if not config.target_modules and not config.target_parameters:
        raise Malformed("adapter_config.json: target_modules must name the adapted modules; add them.")
    if isinstance(config.target_modules, str) and (config.layers_to_transform is not None or config.layers_pattern):
        raise Malformed(
            "adapter_config.json: layers_to_transform and layers_pattern need a list of target_modules, not a string."
        )
    return config


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    peft_type = fields.get("peft_type")
    if peft_type is None and not _is_off(fields.get("lora_parameters")):
        raise Unsupported(
            "adapter_config.json has no peft_type: it is of MLX (mlx_lm.lora), whose tensors have other names and are "
            "transposed. Convert the adapter to PEFT's form: lora_a and lora_b of adapters.safetensors transposed, as "
            "base_model.model.<module>.lora_A.weight and .lora_B.weight in adapter_model.safetensors; r is MLX's rank, "
            "lora_alpha its scale * rank."
        )
    if peft_type != "LORA":
        raise Unsupported(f"adapter_config.json: peft_type {_show(peft_type)} is not supported; only LORA is.")
    for key, meaning in NOT_SUPPORTED.items():
        value = fields.get(key)
        if not _is_off(value):
            raise Unsupported(f"adapter_config.json: {key} ({meaning}) is not supported; train without it.")
    task = fields.get("task_type")
    if not isinstance(task, str | None) or task not in TASK_TYPES:
        raise Unsupported(
            f"adapter_config.json: task_type {_show(task)} is not served; CAUSAL_LM, SEQ_CLS and "
            "FEATURE_EXTRACTION are."
        )
    init = fields.get("init_lora_weights", True)
    if init == "loftq":
        raise Unsupported(
            "adapter_config.json: init_lora_weights 'loftq' rounds the base weights, which no adapter can make up for; "
            "serve the base that LoftQ has made, saved without its adapter, and set init_lora_weights to true."
        )
    if not isinstance(init, bool) and not (isinstance(init, str) and init.lower() in HARMLESS_INITS):
        raise Unsupported(
            f"adapter_config.json: init_lora_weights {_show(init)} changes the base weights; convert the adapter first "
            "(PEFT: save_pretrained with path_initial_model_for_weight_conversion)."
        )
    for key, value in fields.items():
        if key not in KNOWN and key not in INERT and key not in NOT_SUPPORTED and not _is_off(value):
            raise Unsupported(
                f"adapter_config.json: the setting {key[:100]!r} is not known here, so it is not known whether it "
                "changes the computation; remove it if it does not."
            )


def _has_biases(value: Any) -> bool:
    if value not in ("none", "all", "lora_only"):
        raise Unsupported(f"adapter_config.json: bias {_show(value)} is not known; it is 'none', 'all' or 'lora_only'.")
    return bool(value != "none")


def _trained_tokens(value: Any) -> dict[str, tuple[int, ...]]:
    by_module = value if isinstance(value, dict) else {"": value} if value else {}
    for ids in by_module.values():
        is_ids = isinstance(ids, list) and all(type(one) is int and 0 <= one < 1 << 31 for one in ids)
        if not is_ids or not 1 <= len(ids) <= MAX_RANK or len(set(ids)) < len(ids):
            raise Malformed(
                f"adapter_config.json: trainable_token_indices is {_show(value)}; it must hold token ids, each once."
            )
    return {str(module): tuple(ids) for module, ids in by_module.items()}


def _invocation(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    is_tokens = isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    if not is_tokens or not 1 <= len(value) <= MAX_INVOCATION_TOKENS:
        raise Malformed(
            f"adapter_config.json: alora_invocation_tokens is {_show(value)}; it must be a list of 1 to "
            f"{MAX_INVOCATION_TOKENS} token ids."
        )
    return tuple(value)


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _show(value: Any) -> str:
    return repr(value)[:100]


def _rank(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise Malformed(
            f"adapter_config.json: {what[:200]} is {_show(value)}; a rank is an integer from 1 to {MAX_RANK}."
        )
    return value


def _number(value: Any, what: str) -> float:
    # Compared as given first: an enormous integer cannot even become a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e30 < value < 1e30:
        raise Malformed(f"adapter_config.json: {what[:200]} is {_show(value)}; it must be a number.")
    if not math.isfinite(value):
        raise Malformed(f"adapter_config.json: {what[:200]} is not finite.")
    return float(value)


def _bool(value: Any, what: str) -> bool:
    if not isinstance(value, bool | None):
        raise Malformed(f"adapter_config.json: {what} is {_show(value)}; it must be true or false.")
    return bool(value)


def _pattern(fields: dict[str, Any], what: str) -> list[tuple[str, Any]]:
    value = fields.get(what)
    if not isinstance(value, dict | None):
        raise Malformed(f"adapter_config.json: {what} is {_show(value)}; it must map module names to numbers.")
    if len(value or ()) > MAX_PATTERNS:
        raise Malformed(f"adapter_config.json: {what} has more than {MAX_PATTERNS} entries.")
    return list((value or {}).items())


def _names(value: Any, what: str) -> tuple[str, ...] | str:
    """A list of names, sorted and without repetition, or one string."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | None) or not all(isinstance(name, str) and name for name in value or ()):
        raise Malformed(f"adapter_config.json: {what} is {_show(value)}; it must be a list of names or a string.")
    return tuple(sorted(set(value or ())))


def _saved(fields: dict[str, Any]) -> tuple[str, ...]:
    names = tuple(_names(fields.get("modules_to_save") or [], "modules_to_save"))
    return tuple(sorted({*names, *HEADS})) if fields.get("task_type") == CLASSIFICATION else names


def _labels(value: Any, file_name: str) -> tuple[str, ...]:
    if value is None or value == {}:
        return ()
    by_index = {str(index): label for index, label in value.items()} if isinstance(value, dict) else {}
    labels = [by_index.get(str(index)) for index in range(min(len(by_index), MAX_LABELS))]
    if not by_index or len(by_index) > MAX_LABELS or not all(isinstance(label, str) for label in labels):
        raise Malformed(
            f"{file_name}: id2label is {_show(value)}; it must map the indices from 0 on, at most {MAX_LABELS}, to "
            "texts."
        )
    if any(len(label) > MAX_LABEL_CHARS for label in labels if label):
        raise Malformed(f"{file_name}: a label in id2label is longer than {MAX_LABEL_CHARS} characters.")
    return tuple(str(label) for label in labels)


def _problem_type(value: Any, file_name: str) -> str:
    known = (None, "regression", "single_label_classification", "multi_label_classification")
    if not isinstance(value, str | None) or value not in known:
        names = ", ".join(str(one) for one in known[1:])
        raise Unsupported(f"{file_name}: problem_type {_show(value)} is not known; it is one of {names}.")
    return value or ""


def _token_pair(value: Any) -> tuple[str, ...]:
    if value is None or value == []:
        return ()
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) and one for one in value)
    if not is_pair or max(map(len, value)) > MAX_LABEL_CHARS:
        raise Malformed(
            f'adapter_config.json: classifier_from_token is {_show(value)}; it must hold two tokens, as ["no", "yes"].'
        )
    return tuple(value)


def _parameters(value: Any) -> tuple[str, ...]:
    names = _names(value or [], "target_parameters")
    return (names,) if isinstance(names, str) else names


def _has_grouped_experts(value: Any) -> bool | None:
    if value not in (None, *EXPERT_ORDERS):
        raise Unsupported(
            f"adapter_config.json: lora_B_layout {_show(value)} is not known; it is 'rank_major' or "
            "'grouped_by_expert'."
        )
    return None if value is None else bool(value == "grouped_by_expert")


def _names_unsloth(fields: dict[str, Any]) -> bool:
    """Its configurations have `unsloth_fixed`, beside or in auto_mapping, and many bases are its own."""
    origins = fields.get("auto_mapping"), fields.get("base_model_name_or_path")
    return "unsloth_fixed" in fields or any("unsloth" in str(one)[:4096].lower() for one in origins)


def _version(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _layers(value: Any) -> tuple[int, ...] | None:
    """PEFT takes an empty list for "all layers"."""
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise Malformed(f"adapter_config.json: layers_to_transform is {_show(value)}; it must hold layer indices.")
    return tuple(sorted(set(layers)))


def _layers_pattern(value: Any) -> tuple[str, ...]:
    names = _names(value, "layers_pattern")
    names = (names,) if isinstance(names, str) and names else tuple(names)
    if len(names) > MAX_LAYERS_PATTERNS:
        raise Malformed(f"adapter_config.json: layers_pattern has more than {MAX_LAYERS_PATTERNS} entries.")
    if not all(name.replace("_", "").isalnum() for name in names):
        raise Unsupported("adapter_config.json: layers_pattern must be plain names such as 'layers'.")
    return names


def invocation_start(token_ids: Sequence[int], invocation: Sequence[int]) -> int | None:
    """The start of an activated LoRA (Greenewald et al., 2025): index in `token_ids` at which the last whole occurrence
    of `invocation` begins; None without one, and then the base alone answers. All tokens from there on use the
    adapter, as in PEFT."""
    assert invocation, "an empty invocation is nowhere"
    text, wanted = array("q", token_ids), array("q", invocation).tobytes()
    size, end = text.itemsize, len(text) * text.itemsize
    held = text.tobytes()
    while (at := held.rfind(wanted, 0, end)) >= 0:
        if at % size == 0:
            return at // size
        end = at + len(wanted) - 1  # across the bytes of two tokens
    return None
