"""`multilora merge`: an adapter into its base's directory, for servers that take no adapters."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path

from adapters.errors import AdapterError
from adapters.files.durable_files import whole_directory
from adapters.files.manifest import Manifest
from service.cli.client import ClientError

_NUM_CHECKED = 32
# Of the log probabilities that the adapter changes, so much may be lost by rounding weights to the base's dtype.
_MOST_LOST, _NOISE = 0.5, 1e-3


def merge(arguments: argparse.Namespace) -> int:
    """Write the directory, whole or not at all."""
    from service.models.merging import merge as merge_into
    from service.models.spec.config_json import ModelError

    base: Path = arguments.base
    adapter: Path = arguments.adapter
    for path, file in ((base, "config.json"), (adapter, "adapter_config.json")):
        if not (path / file).is_file():
            raise ClientError(f"{path} has no {file}; give the directory that holds it.")
        if arguments.out.resolve().is_relative_to(path.resolve()):
            raise ClientError(f"{arguments.out} lies in {path}, which stays as it is; give a directory elsewhere.")
    checked = "not compared with both: --check does that"
    try:
        with whole_directory(arguments.out) as directory:
            scratch = directory.parent / "adapter"
            merged = merge_into(base, adapter, directory, scratch, dequantise=arguments.dequantise)
            if arguments.check:
                checked = _check(base, directory, scratch, merged.adapter)
    except FileExistsError as error:
        raise ClientError(f"{arguments.out} is there already; give another directory.") from error
    except (AdapterError, ModelError) as error:
        problems = "".join(f"\n  {name}: {reason}" for name, reason in getattr(error, "problems", ()))
        raise ClientError(f"{error}{problems}") from error
    except OSError as error:
        raise ClientError(f"{error.filename or arguments.out}: {error.strerror or error}.") from error
    print(f"{arguments.out} is {base} with {adapter}: {merged.num_changed} tensors changed; {checked}")
    if merged.is_untied:
        print("  The head is no longer the embedding; config.json says so (tie_word_embeddings).")
    for note in merged.adapter.notes:
        print(f"  {note}")
    return 0


def _check(base: Path, merged: Path, store_root: Path, adapter: Manifest) -> str:
    """How the merged model's log probabilities compare with those of the base with the adapter beside it. ClientError
    where they are as far from these as the adapter is from the base."""
    own: dict[str, Mapping[str, int] | None] = {"": None, adapter.digest: adapter.rows}
    (plain, beside), (found,) = _logprobs(base, store_root, own), _logprobs(merged, store_root, {"": None})
    effect, lost = (max(abs(a - b) for a, b in zip(one, beside, strict=True)) for one in (plain, found))
    sentence = (
        f"log probabilities of {_NUM_CHECKED} tokens differ by at most {lost:.2g} from the base's with the adapter "
        f"beside it, which changes them by up to {effect:.2g}"
    )
    if not lost <= max(_MOST_LOST * effect, _NOISE):
        raise ClientError(f"The merged model is not the base with the adapter: {sentence}. Nothing is written.")
    return sentence


def _logprobs(model_dir: Path, store_root: Path, adapters: Mapping[str, Mapping[str, int] | None]) -> list[list[float]]:
    """The log probabilities of some tokens, computed in float32 on the CPU as the server does, by each adapter: its
    digest and rows; "" for none. ClientError where the engine cannot."""
    from service.engine.ipc.config import EngineOptions
    from service.engine.ipc.messages import Finished, Sampling, Submit, Tokens
    from service.engine.startup.build import build_engine

    options = EngineOptions(
        model_dir=str(model_dir),
        store_root=str(store_root),
        dtype="float32",
        device="cpu",
        max_sequences=len(adapters),
        max_model_len_tokens=2 * _NUM_CHECKED,
        row_bytes=None if len(adapters) > 1 else 0,
    )
    try:
        engine = build_engine(options)
    except ValueError as error:
        raise ClientError(f"The merged model cannot be checked: {error}") from error
    draw = random.Random(0)
    prompt = tuple(draw.randrange(engine.capacity.vocab_size) for _ in range(_NUM_CHECKED + 1))
    found: dict[str, list[float]] = {}
    for digest, rows in adapters.items():
        engine.submit(
            Submit(digest, prompt, Sampling(prompt_logprobs=0, max_tokens=1), digest or None, dict(rows or {}))
        )
    while engine.num_requests:
        for event in engine.step():
            if isinstance(event, Tokens) and event.prompt_logprobs:
                found[event.request_id] = [one.logprob for one in event.prompt_logprobs if one is not None]
            if isinstance(event, Finished) and event.error:
                raise ClientError(f"The merged model cannot be checked: {event.error}")
    engine.close()
    return [found[digest] for digest in adapters]
