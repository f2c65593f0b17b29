"""Train the five bundled adapters with PEFT on the saved base: `python -m examples.train_adapters`.

Four of them see the same kind of prompt, a bare list of words, and their own job's answers; the fifth sees sums and
calls a tool. Only the answer counts in the loss. The base is read back from its float16 files, so that the adapters fit
the weights that are served.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Lfm2ForCausalLM

from examples.bundled_calculator import CALCULATOR, CHAT_TEMPLATE, talks
from examples.bundled_data import EOS_ID, PAD_ID, chat_prompt, encode
from examples.bundled_jobs import JOBS, Job, Recipe, prompts
from examples.train_base import BASE_DIR
from examples.training import IGNORED_LABEL, Schedule, Stopwatch, device_of_choice, fit

ADAPTERS_DIR = BASE_DIR.parent / "adapters"
BATCH_ROWS = 32
WARMUP_STEPS = 20
Batch = Callable[[Sequence[tuple[str, str]]], tuple[Tensor, Tensor]]


def pair_batch(pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """(ids, labels) of (message, answer) pairs, see `text_batch`."""
    return text_batch([(chat_prompt(message), answer) for message, answer in pairs])


def text_batch(pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """(ids, labels) of (prompt, answer) pairs, padded on the right: only the answer and its end carry labels.

    Both int64 [pairs, tokens of the longest pair]. Padding stands after everything that counts, and the model is
    causal, so it needs no mask.
    """
    coded = [(encode(prompt), [*encode(answer), EOS_ID]) for prompt, answer in pairs]
    longest = max(len(prompt) + len(answer) for prompt, answer in coded)
    ids = torch.full((len(coded), longest), PAD_ID)
    labels = torch.full((len(coded), longest), IGNORED_LABEL)
    for row, (prompt, answer) in enumerate(coded):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def job_batches(job: Job, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of a job's training pairs, none of them held out."""
    source = prompts(f"training {job.name}", held_out=False)
    while True:
        chosen = [next(source) for _ in range(BATCH_ROWS)]
        ids, labels = pair_batch([(prompt, job.answer(prompt.split())) for prompt in chosen])
        yield ids.to(device), labels.to(device)


def talk_batches(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of the calculator's training pairs, none of them held out."""
    source = talks("training", held_out=False)
    while True:
        ids, labels = text_batch([next(source) for _ in range(BATCH_ROWS)])
        yield ids.to(device), labels.to(device)


def load_base(directory: Path, device: torch.device) -> Lfm2ForCausalLM:
    """The saved base, computing in float32."""
    model: Lfm2ForCausalLM = Lfm2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.to(device)  # type: ignore[arg-type]
    return model


def adapted(base: Lfm2ForCausalLM, recipe: Recipe, seed: int = 1) -> PeftModel:
    """`base` with a fresh adapter (B is zero, A comes from `seed`)."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        use_rslora=recipe.rank_stabilized,
        target_modules=list(recipe.targets),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def exact_matches(
    model: torch.nn.Module, cases: Sequence[tuple[str, str]], device: torch.device, batch: Batch = pair_batch
) -> list[bool]:
    """Whether greedy decoding answers each case of `batch` exactly, its end included.

    Greedy decoding gives the answer if and only if every token of it is the most likely one after the prompt and the
    answer so far, so one forward pass over prompt + answer decides.
    """
    outcome: list[bool] = []
    for start in range(0, len(cases), 50):
        ids, labels = batch(cases[start : start + 50])
        with torch.inference_mode():
            best = model(input_ids=ids.to(device), use_cache=False).logits.argmax(-1).cpu()
        wanted = labels[:, 1:]
        outcome += ((best[:, :-1] == wanted) | (wanted == IGNORED_LABEL)).all(1).tolist()
    return outcome


def save(model: PeftModel, directory: Path) -> None:
    """Write the adapter as PEFT does, its tensors in float16, the base's own precision.

    PEFT's model card is a form to fill in, and its config holds the base's path on this machine and an unordered set:
    the first goes, the others are made the same on every machine.
    """
    model.save_pretrained(str(directory))
    (directory / "README.md").unlink()
    config_path, tensors_path = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    config = json.loads(config_path.read_text())
    config["base_model_name_or_path"] = "multilora-bundled-base"
    config["target_modules"].sort()
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.to(torch.float16) for name, tensor in load_file(tensors_path).items()}
    save_file(tensors, tensors_path, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=BASE_DIR, help="the base's directory (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ADAPTERS_DIR, help="directory to write (default: %(default)s)")
    parser.add_argument("--only", metavar="NAME", help="train this adapter alone")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, total = device_of_choice(), Stopwatch()
    lessons = [(job, job_batches(job, device)) for job in JOBS] + [(CALCULATOR, talk_batches(device))]
    for recipe, batches in lessons:
        if arguments.only not in (None, recipe.name):
            continue
        watch = Stopwatch()
        model = adapted(load_base(arguments.base, device), recipe)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=recipe.peak_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
        loss = fit(model, batches, (optimizer,), Schedule(recipe.steps, WARMUP_STEPS), recipe.name)
        save(model, arguments.out / recipe.name)
        print(f"{recipe.name}: rank {recipe.rank}, last loss {loss:.4f}, {watch}")
    if arguments.only in (None, CALCULATOR.name):
        (arguments.out / CALCULATOR.name / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    print(f"in all: {total}, written to {arguments.out}")


if __name__ == "__main__":
    main()
