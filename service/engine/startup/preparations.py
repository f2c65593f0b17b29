"""Imports that every start needs, made in a thread while another process probes the ops."""

from __future__ import annotations

import importlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from kernels.platform import in_use
from service.grammars.matching import GrammarError, TokenTable

log = logging.getLogger(__name__)


class Preparations:
    """Begins at once: the tokens that grammars need, and on a GPU the imports of what serves its ops."""

    def __init__(self, device: str, model_dir: Path) -> None:
        thread = ThreadPoolExecutor(1, "preparations")
        if torch.device(device).type == "cuda":
            thread.submit(_import_implementations, torch.device(device))
        self._tokens: Future[TokenTable | None] = thread.submit(_token_table, model_dir)
        thread.shutdown(wait=False)

    def tokens(self) -> TokenTable | None:
        """None, with the reason in the log, for a model whose tokenizer does not tell. Waits for it."""
        return self._tokens.result()


def _import_implementations(device: torch.device) -> None:
    """Import the implementations in use; the probe reports those that cannot be. Triton hashes its own files once."""
    for op, name in in_use(device).implementations.items():
        with suppress(Exception):
            importlib.import_module(f"kernels.{op}.{name}")
    with suppress(ImportError, AttributeError):
        importlib.import_module("triton.runtime.cache").triton_key()


def _token_table(model_dir: Path) -> TokenTable | None:
    try:
        return TokenTable.load(model_dir)
    except GrammarError as error:
        log.info("no grammars: %s", error)
        return None
