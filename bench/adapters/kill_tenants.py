"""Tenants of a server that is killed: their keys, what they make of their names, and what a server has of each."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.support.limits import LIMIT_SECONDS
from tests.support.name_changes import Change, after, changes

NAMES = ("one", "two", "three")
NUM_CONTENTS = 4
_TENANTS = ("acme", "beta", "zeta")
_SCOPES = "infer,upload,delete"
_PART_OF_VISIBILITY = 0.2  # of the changes


class Held(NamedTuple):
    """What a name stands for: the contents of its versions, oldest first, and who may use it."""

    versions: tuple[int, ...]
    visibility: str
    shared_with: frozenset[str]


Names = dict[str, Held]  # those of one tenant


@dataclass
class Tenant:
    """One whose key is sent; without a name nobody in particular, at a server that asks for no key."""

    name: str = ""
    key: str = ""
    others: tuple[str, ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """Of each of its requests."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def sharings(self) -> Sequence[tuple[str, tuple[str, ...]]]:
        """What it may say of who uses a name, by the content of a change."""
        return (("private", ()), ("shared", self.others[:1]), ("shared", self.others), ("public", ()))

    def changes(self, seed: int) -> Iterator[Change]:
        """Changes without end, the same for the same seed: with a name also those of visibility."""
        generator, others = random.Random(seed), changes(seed, NAMES, NUM_CONTENTS)
        while True:
            if self.name and generator.random() < _PART_OF_VISIBILITY:
                yield "visibility", generator.choice(NAMES), generator.randrange(len(self.sharings))
            else:
                yield next(others)

    def after(self, names: Names, change: Change, max_versions: int) -> Names:
        """What a change makes of its names. A new name is private, where there are tenants."""
        what, name, content = change
        if what == "visibility":
            visibility, shared_with = self.sharings[content]
            one = names.get(name)
            return names if one is None else {**names, name: Held(one.versions, visibility, frozenset(shared_with))}
        new = Held((), "private" if self.name else "public", frozenset())
        kept = after({one: held.versions for one, held in names.items()}, change, max_versions)
        return {one: names.get(one, new)._replace(versions=versions) for one, versions in kept.items()}

    def found(self, url: str, digests: Mapping[str, int]) -> Names:
        """What a server tells of its names, each version of which answers a request, with its own content."""
        names: Names = {}
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS, headers=self.headers) as http:
            for name in (one for one in self.listed(http) if "/" not in one):
                history = http.get(f"/v1/adapters/{name}/history").raise_for_status().json()
                assert history["owner"] == self.name, history
                for version in history["data"]:
                    body = {"model": f"{name}@{version['number']}", "prompt": "the", "max_tokens": 1}
                    answer = http.post("/v1/completions", json=body).raise_for_status()
                    assert version["digest"] in answer.headers["x-multilora-adapter"]
                versions = tuple(digests[version["digest"]] for version in reversed(history["data"]))
                names[name] = Held(versions, history["visibility"], frozenset(history["shared_with"]))
        return names

    def listed(self, http: httpx.Client) -> set[str]:
        """The names that it sees, those of others with their owner."""
        return {one["name"] for one in http.get("/v1/adapters", headers=self.headers).raise_for_status().json()["data"]}

    def sees(self, held: Mapping[str, Names]) -> set[str]:
        """The names that it must see where each tenant holds that."""
        return {
            name if owner == self.name else f"{owner}/{name}"
            for owner, names in held.items()
            for name, one in names.items()
            if owner == self.name or one.visibility == "public" or self.name in one.shared_with
        }


@dataclass
class Keys:
    """A keys file with three tenants, changed by `multilora keys`.

    added    keys that count, beside the first one of each tenant
    revoked  keys that do not any more
    """

    path: Path
    tenants: tuple[Tenant, ...] = ()
    added: list[str] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    _ids: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tenants = tuple(
            Tenant(name, self._add(name), tuple(other for other in _TENANTS if other != name)) for name in _TENANTS
        )

    def change(self, chosen: random.Random) -> None:
        """Add a key of a tenant, and revoke one that was added earlier."""
        self.added.append(self._add(chosen.choice(_TENANTS)))
        if len(self.added) > 1:
            key = self.added.pop(chosen.randrange(len(self.added) - 1))
            self._run("revoke", self._ids[key])
            self.revoked.append(key)

    def check(self, url: str) -> None:
        """Whether a server takes the keys that count, and no others."""
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as http:
            for status, keys in (
                (200, (*(one.key for one in self.tenants), *self.added)),
                (401, (*self.revoked, "never-a-key")),
            ):
                for key in keys:
                    answer = http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
                    assert answer.status_code == status, (status, answer.status_code, answer.text)

    def _add(self, tenant: str) -> str:
        done = self._run("add", tenant, "--scopes", _SCOPES)
        found = re.search(r"This is the key (\S+) of", done.stderr)
        assert found is not None, done.stderr
        key = done.stdout.strip()
        self._ids[key] = found.group(1)
        return key

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "service.cli.main", "keys", *arguments, "--keys-file", str(self.path))
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_SECONDS)
