"""Changes: floods of them of own adapters, and attempts at what is another tenant's or needs another key."""

from __future__ import annotations

from bench.hostile.target import Attack, Target, in_turn, spread
from bench.hostile.uploads import Uploads

OTHERS = ("client-0/own-0", "client-1/own-1", "own-0", "default/shout", "default/../client-0/own-0", "DEFAULT/SHOUT")
_LOOPS = 25


def attacks(target: Target) -> dict[str, Attack]:
    """By what is told of them."""
    uploads = Uploads(target)

    def flood(name: str) -> Attack:
        path = f"/v1/adapters/{name}"

        def of_versions() -> None:
            for number in range(_LOOPS):
                uploads.put(name, keep=True, lora_alpha=number + 1)()
                target.request("POST", f"{path}/rollback", json={})
                visibility = {"visibility": "shared", "shared_with": ["client-0"]} if number % 2 else None
                target.request("PATCH", path, json=visibility or {"visibility": "public"})
                target.request("GET", f"{path}/history")
            target.request("DELETE", path)

        return of_versions

    def of_deletions() -> None:
        for _ in range(_LOOPS):
            uploads.put("hostile-gone", keep=True)()
            target.request("POST", "/v1/completions", json={"model": "hostile-gone", "prompt": "a", "max_tokens": 1})
            target.request("DELETE", "/v1/adapters/hostile-gone")

    return {
        "25 replacements, rollbacks and changes of visibility of each of 4 names at once": spread(
            [flood(f"hostile-{number}") for number in range(4)], 4
        ),
        "25 uploads and deletions of each of 4 clients, of one name": spread([of_deletions] * 4, 4),
        "one upload 32 times at once": in_turn(
            spread([uploads.put("hostile-same", keep=True)] * 32, 32),
            lambda: target.request("DELETE", "/v1/adapters/hostile-same"),
        ),
        "500 attempts at what is another's": spread([_attempts(target, uploads, name) for name in OTHERS] * 8, 8),
        "500 requests with keys that are none": spread([_wrong_key(target, number) for number in range(500)], 8),
    }


def _attempts(target: Target, uploads: Uploads, name: str) -> Attack:
    """Everything that one can do with a name."""
    path, if_other = f"/v1/adapters/{name}", {"If-Match": '"1", "2", ' + '"9", ' * 500 + '"3"'}
    # `default` is the namespace of those without a tenant: all may use what is there, none here may change it.
    return in_turn(
        lambda: target.request("GET", f"{path}/history"),
        lambda: target.request("DELETE", path),
        lambda: target.request("DELETE", path, headers=if_other),
        lambda: target.request("PATCH", path, json={"visibility": "public"}),
        lambda: target.request("POST", f"{path}/rollback", json={"version": 10**30}),
        lambda: target.request("POST", f"{path}/rollback", json={"version": "9" * 60}),
        lambda: target.request("PUT", f"{path}/pin"),
        lambda: target.request("POST", "/v1/unload_lora_adapter", json={"lora_name": name}),
        lambda: target.request("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "/etc"}),
        *([uploads.put(name)] if "/" in name and not name.startswith(("d", "D")) else []),
    )


def _wrong_key(target: Target, number: int) -> Attack:
    key = ("x" * 9_000) if number % 2 else f"key-{number}"
    body = {"model": "base", "prompt": "a", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"}
    return lambda: target.request("POST", "/v1/completions", json=body, headers=headers)
