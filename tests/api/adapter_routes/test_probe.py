"""The prompt that an upload is probed with."""

from __future__ import annotations

from adapters.files.manifest import Manifest, ModuleRecord
from adapters.peft.config import invocation_start
from service.api.adapter_routes.probe import NUM_TOKENS, prompt_for


def manifest_of(*token_ids: tuple[int, ...], invocation: tuple[int, ...] = ()) -> Manifest:
    modules = tuple(ModuleRecord("model.embed_tokens", 0, 1.0, 0, (), tokens) for tokens in token_ids)
    return Manifest("sha256:0", "", 4, 0, {}, modules, invocation=invocation)


def test_trained_tokens_are_in_it_and_the_adapter_s() -> None:
    plain = prompt_for(manifest_of(), 65_536, 1000)
    assert len(plain) == NUM_TOKENS
    prompt = prompt_for(manifest_of((9, 5), (5, 7), invocation=(1, 2)), 65_536, 1000)
    assert prompt == (*plain[:12], 1, 2, 9, 5, 7, *plain[12:])
    assert invocation_start(prompt, (1, 2)) == 12


def test_it_fits_the_context() -> None:
    trained = tuple(range(100, 356))
    assert len(prompt_for(manifest_of(trained), 65_536, 64)) == 64
    assert len(prompt_for(manifest_of(trained), 65_536, 1000)) == NUM_TOKENS + len(trained)
    assert len(prompt_for(manifest_of(trained, invocation=(1,) * 50), 65_536, 64)) == NUM_TOKENS + 50
