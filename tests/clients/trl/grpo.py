"""A few steps of TRL's asynchronous GRPO with LoRA, on a CPU: `python grpo.py URL MODEL_DIR OUTPUT_DIR`.

Prints JSON: the rewards by step, what the trainer's last adapter says of one sequence, and that adapter's name.
What TRL takes for granted is stood in for: a GPU's name, FlashAttention (by torch's own attention), and that vLLM is
installed, which training with LoRA does not import. Nothing of what it sends is touched.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from torch.nn import functional
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker, packing
from trl.experimental.async_grpo import async_grpo_trainer as trainer_module

NUM_STEPS = 20
SEQUENCE = list(range(20, 60))


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The share of tokens in the lower half of the vocabulary."""
    return [sum(token < 150 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def attention(q, k, v, starts_q, starts_k, _most_q, _most_k, *, softmax_scale, causal, window_size):
    """`flash_attn_varlen_func`: q, k, v [tokens, heads, head_dim]; queries stand at the end of their keys."""
    assert causal and window_size == (-1, -1)
    out = []
    for (first_q, last_q), (first_k, last_k) in zip(
        pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True
    ):
        num_q, num_k = last_q - first_q, last_k - first_k
        seen = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        parts = (part.transpose(0, 1)[None] for part in (q[first_q:last_q], k[first_k:last_k], v[first_k:last_k]))
        mixed = functional.scaled_dot_product_attention(*parts, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


def main() -> None:
    url, model_dir, output_dir = sys.argv[1:]
    async_rollout_worker.is_vllm_available = lambda *_: True
    trainer_module.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    # One that TRL knows.
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    questions = ["Tell me about the sea.", "Name some animals.", "What is a good breakfast?", "Say something nice."]
    config = AsyncGRPOConfig(
        output_dir=output_dir,
        vllm_server_base_url=url,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=16,
        learning_rate=2e-2,
        weight_sync_steps=1,
        max_inflight_tasks=16,
        queue_maxsize=16,
        max_staleness=0,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        dtype="float32",
        report_to=[],
        save_strategy="no",
        seed=1,
    )
    trainer = AsyncGRPOTrainer(
        model=model_dir,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in questions * 32]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([SEQUENCE])).logits[0, :-1].float().log_softmax(-1)
    said = logprobs.gather(1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0].tolist()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"rewards": rewards, "sequence": SEQUENCE, "logprobs": said, "version": trainer.model_version}))


if __name__ == "__main__":
    main()
