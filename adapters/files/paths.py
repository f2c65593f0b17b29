"""Paths below the store's root; both processes compute them from the same layout.

<root>/<layout fingerprint>/lock
                            staging/<random>/        uploads in progress and files on their way out
                            adapters/<digest>/       adapter_config.json, adapter_model.safetensors, manifest.json
                            names/<name>             the record of a name, `/` as %2F (`adapters.files.name_versions`)
                            retired/<name>           the last record of a deleted name: its numbers go on

Where several servers share the store (`adapters.store.shared_log`), beside these:
                            staging/<server>/        each server's own
                            changes, change-lock     the log of changes, and the lock held during one
                            members/<server>         signs of life, and what each server's requests hold
<root>/tenants/<server>     what tenants have taken on each server (`service.tenants.limits`)
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import asdict
from pathlib import Path

import msgspec

from adapters.layout import BaseLayout

CONFIG_FILE = "adapter_config.json"
MODEL_CONFIG_FILE = "config.json"
TENSOR_FILE = "adapter_model.safetensors"
MANIFEST_FILE = "manifest.json"
TEMPLATE_FILE = "chat_template.jinja"
# The templates of other names than DEFAULT_TEMPLATE, as one JSON object.
NAMED_TEMPLATES_FILE = "named_chat_templates.json"
DEFAULT_TEMPLATE = "default"

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
# `name`, or `org/name` as repositories are called; the lengths leave room for an owner in the name of a file.
NAME = re.compile(rf"(?=.{{1,128}}\Z){_PART}(?:/{_PART}){{0,7}}")
# A tenant, whose name and a `/` stand before the names of its adapters.
OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Suffixes of a name in URLs: `org/history` would be the history of the adapter `org`.
RESERVED = frozenset({"history", "rollback", "pin", "archive"})
# Prefix of names without an owner, as other callers write them.
OWNERLESS = "default"
DIGEST = re.compile(r"[0-9a-f]{64}")


def is_name(name: str, owner: str = "") -> bool:
    """Whether `name` is a valid stored name of this owner, see `join`. RESERVED names are refused where they are
    given."""
    found, rest = separate(name)
    return (
        found == owner
        and name == join(owner, rest)
        and (NAME.fullmatch(rest) is not None and (not owner or OWNER.fullmatch(owner) is not None))
    )


def join(owner: str, name: str) -> str:
    """The stored name of an owner's adapter: `<owner>/<name>`. For the owner "" the `/` is left out of names without
    one, so each owner's names are distinct: `/org/name` is not the `name` of the owner `org`."""
    return f"{owner}/{name}" if owner or "/" in name else name


def separate(full_name: str) -> tuple[str, str]:
    """Owner and name of a stored name, the reverse of `join`."""
    owner, slash, name = full_name.partition("/")
    return (owner, name) if slash else ("", full_name)


def without_root(full_name: str) -> str:
    """A name that `join` returned, as people read it: without the leading `/` of names without an owner."""
    return full_name.removeprefix("/")


@functools.lru_cache(maxsize=8)
def layout_fingerprint(layout: BaseLayout) -> str:
    """16 hex digits that change with the base: its weights, or how an adapter binds to it. Kept, since each read of an
    adapter asks for it, beside the steps, and a large base has hundreds of modules."""
    fields = asdict(layout)
    # These follow from the rest, and stores are older than they.
    for name in ("norms", "splits", "ties_head", "fixed", "experts"):
        del fields[name]
    later = {name for one in layout.experts for name in (one.router, one.gate_up, one.down)}
    fields["projections"] = [one for one in fields["projections"] if one["name"] not in later]
    fields["unadapted"] = [name for one in layout.experts for name in (one.router, one.module)]
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:16]


def layout_root(root: Path, layout: BaseLayout) -> Path:
    return root / layout_fingerprint(layout)


def adapter_dir(root: Path, layout: BaseLayout, digest: str) -> Path:
    """Directory of a published adapter. `digest` never comes unchecked from a client."""
    assert DIGEST.fullmatch(digest), digest
    return layout_root(root, layout) / "adapters" / digest


LINEAR_SIDES = ("lora_A.weight", "lora_B.weight")
EMBEDDING_SIDES = ("lora_embedding_A", "lora_embedding_B")


def stored_name(module: str, side: str) -> str:
    """PEFT's name of a stored tensor; `side` is one of LINEAR_SIDES or EMBEDDING_SIDES."""
    return f"base_model.model.{module}.{side}"
