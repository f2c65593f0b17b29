"""The training loop that the base and the adapters share: AdamW, warm-up, cosine, one progress bar."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import Optimizer

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Schedule:
    """Learning rates of a run: up linearly over `warmup_steps`, then down along a cosine to a hundredth of the peak."""

    steps: int
    warmup_steps: int

    def fraction(self, step: int) -> float:
        """What part of the peak learning rate holds at `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def device_of_choice() -> torch.device:
    """The CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats of predicting `labels[:, t + 1]` from `logits[:, t]`; ignored labels do not count.

    logits [rows, tokens, vocab], labels [rows, tokens]
    """
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL
    )


def fit(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizers: Sequence[Optimizer],
    schedule: Schedule,
    title: str,
) -> float:
    """Train `model` in place on (token ids, labels) batches, one step each; returns the mean loss of the last tenth.

    The learning rates that `optimizers` were made with are the peaks of the schedule.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    losses: list[float] = []
    model.train()
    for step, (ids, labels) in enumerate(with_progress(batches, schedule.steps, title, losses)):
        loss = next_token_loss(model(input_ids=ids, use_cache=False).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group, peak in groups:
            group["lr"] = peak * schedule.fraction(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach().item())
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def with_progress(
    batches: Iterable[tuple[Tensor, Tensor]], steps: int, title: str, losses: list[float]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `steps` of `batches` behind a progress bar that shows the newest of `losses`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}")) as progress:
        task = progress.add_task(title, total=steps, loss="-")
        for step, batch in zip(range(steps), batches, strict=False):
            yield batch
            progress.update(task, advance=1, loss=f"{losses[-1]:.3f}")
            if step % 100 == 99 and not progress.console.is_terminal:
                recent = sum(losses[-100:]) / 100
                print(f"{title}: step {step + 1} of {steps}, loss {recent:.4f}", flush=True)


class Stopwatch:
    """Wall time and processor time (all threads) since it was made, for the model card."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), self._used()

    @staticmethod
    def _used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def __str__(self) -> str:
        wall, cpu = time.monotonic() - self._wall, self._used() - self._cpu
        return f"{wall / 60:.1f} minutes of wall time, {cpu / 60:.1f} core-minutes"
