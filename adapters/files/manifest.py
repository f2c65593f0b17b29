"""An adapter's manifest: plain data, written as JSON beside the tensors.

`gc=False` keeps these objects out of the garbage collector, which would otherwise walk tens of thousands of them with
Python's lock held for ten thousand names or a few hundred manifests. They are frozen, so there are no cycles.
"""

from __future__ import annotations

import msgspec

from adapters.files.name_versions import OnNewVersion, Version, Visibility
from adapters.files.paths import without_root

# Raised by msgspec for unreadable files.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)


class ModuleRecord(msgspec.Struct, frozen=True, gc=False):
    """One adapted module of the base, e.g. `model.layers.3.self_attn.q_proj`; `num_bytes` counts what is stored for it.

    rank   0 for a module without LoRA
    parts  what it has beside LoRA weights, as `adapters.peft.bound_tensors.BoundExtra` has it, or trained tokens
    token_ids  of these
    num_experts  that have the rank each
    """

    module: str
    rank: int
    scaling: float
    num_bytes: int
    parts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    num_experts: int = 1


class Manifest(msgspec.Struct, frozen=True, gc=False):
    """Everything known of one digest; the load report of an upload is made of it.

    rows          rows it needs on the device per projection group (its largest rank there, of all experts)
    notes         sentences about what was understood and left out (ignored files, training-only settings)
    has_chat_template  whether the adapter ships chat templates of its own
    invocation    tokens at whose last place in a prompt the adapter begins; () = it works on all tokens
    special_tokens  variables of chat templates that differ from the base's; None: the adapter has none
    eos_token_ids   end its answers beside the base's
    labels        of its score head, in order; () = it has none
    problem_type, classifier_from_token  as in `adapters.peft.config`
    """

    digest: str
    layout: str
    rank: int
    num_bytes: int
    rows: dict[str, int]
    modules: tuple[ModuleRecord, ...]
    notes: tuple[str, ...] = ()
    has_chat_template: bool = False
    invocation: tuple[int, ...] = ()
    special_tokens: dict[str, str | None] = {}
    eos_token_ids: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    problem_type: str = ""
    classifier_from_token: tuple[str, ...] = ()


class Summary(msgspec.Struct, frozen=True, gc=False):
    """The part of a manifest that listings show, read from its JSON without the modules."""

    rank: int
    num_bytes: int
    rows: dict[str, int]
    has_chat_template: bool = False


class AdapterRecord(msgspec.Struct, frozen=True, gc=False):
    """A version of a name, and what it stands for. is_first: the name had none before. is_ephemeral,
    on_new_version: as in `NameRecord`."""

    name: str
    version: Version
    manifest: Manifest
    owner: str = ""
    visibility: Visibility = "public"
    is_pinned: bool = False
    is_first: bool = False
    is_ephemeral: bool = False
    on_new_version: OnNewVersion | None = None

    @property
    def digest(self) -> str:
        return self.version.digest

    @property
    def reference(self) -> str:
        """`name@number`, as its owner's requests may give it where there are no tenants."""
        return f"{without_root(self.name)}@{self.version.number}"
