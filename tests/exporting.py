"""Checkpoints, taught drafters and targets for the tests of exports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from drafting import make_run
from paceline.common.batch import Kind
from paceline.common.loading import find_parts
from paceline.common.target_info import TargetInfo
from paceline.consumer.checkpoint import CheckpointState, write_checkpoint
from paceline.consumer.drafter import Drafter, DrafterConfig, attend_one_block
from paceline.consumer.first_weights import init_drafter
from safetensors.torch import save_file
from torch.nn import functional
from transformers import PreTrainedModel

VOCAB = 61


def config(**changes) -> DrafterConfig:
    values: dict[str, Any] = {
        "block_size": 5,
        "mask_token_id": 1,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 256,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    return DrafterConfig(**values | changes)


def config_for(info: TargetInfo, **changes) -> DrafterConfig:
    """A drafter of two layers for a tiny target of conftest.py, whose token 3 is <|mask|>."""
    own: dict[str, Any] = {
        "mask_token_id": 3,
        "target_layer_ids": (0, 2),
        "num_target_layers": info.num_layers,
        "hidden_size": info.hidden_size,
        "num_attention_heads": info.num_heads,
        "num_key_value_heads": info.num_kv_heads,
        "head_dim": info.head_dim,
        "vocab_size": info.vocab_size,
        "max_position_embeddings": info.max_position_embeddings,
    }
    return config(**own | changes)


def checkpoint(root: Path, drafter: Drafter, step: int = 3, *, target: str = "/models/tiny", **changes) -> Path:
    """A complete checkpoint of a drafter that a run on `target` trained."""
    data = {"files": ["/secret/place/chats.jsonl"], "rows": None, "max_length": 64, "held_out": 7}
    shape = drafter.config
    settings = {
        "layers": shape.num_hidden_layers,
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
    }
    run = make_run(target={"path": target}, data=data, drafter=settings)
    fields: dict[str, Any] = {
        "name": "tiny",
        "run_id": "tiny-0123",
        "step": step,
        "phase": (Kind.TRAIN, step),
        "seconds": 5400.0,
        "tokens": 123_456,
        "evaluated": None,
        "ledger": {},
        "rng": {"seed": 0},
        "fingerprint": {"dataset": "d1ge57"},
        "drafter": shape.to_dict(),
        "run": run.model_dump(mode="json"),
        "versions": {"torch": "2.0"},
        "metrics": {"loss": 1.5},
    }

    def write(folder: Path) -> None:
        save_file(drafter.state_dict(), folder / "model.safetensors")
        save_file({}, folder / "optimizer.safetensors")

    return write_checkpoint(root, CheckpointState(**fields | changes), write)


def taught(
    model: PreTrainedModel, steps: int, shape: DrafterConfig, prompts: Sequence[Sequence[int]], answer: int
) -> Drafter:
    """A drafter overfitted to the target's greedy answers of `answer` tokens, with every anchor in each step."""
    parts = find_parts(model)
    table, head = parts.embedding.weight.detach(), parts.head.weight.detach()
    rows = []
    for prompt in prompts:
        with torch.no_grad():
            tokens = cast(Any, model).generate(
                torch.tensor([prompt]), max_new_tokens=answer, do_sample=False, eos_token_id=None
            )
            hidden = model(tokens, output_hidden_states=True).hidden_states
        rows.append((tokens[0], torch.cat([hidden[i + 1][0] for i in shape.target_layer_ids], -1), len(prompt)))
    drafter = init_drafter(shape, seed=2)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0)
    for _ in range(steps):
        loss = torch.zeros(())
        for tokens, features, start in rows:
            context = drafter.project_context(features, torch.arange(len(tokens)))
            for anchor in range(start, len(tokens) - 1):
                slots = min(shape.block_size, len(tokens) - anchor)
                block = torch.tensor([int(tokens[anchor]), *[shape.mask_token_id] * (slots - 1)])
                before = [(keys[:, :anchor], values[:, :anchor]) for keys, values in context]
                places = torch.arange(anchor, anchor + slots)
                found = drafter.decode(table[block], places, before, attend_one_block)
                loss = loss + functional.cross_entropy(found[1:] @ head.T, tokens[anchor + 1 : anchor + slots])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter
