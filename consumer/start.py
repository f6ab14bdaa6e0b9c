"""Where a run's drafter starts: `drafter.init_from`.

    random   from the seed
    target   the target's last layers (first_weights.py)
    NAME     another drafter: a folder of z-lab's or speculators' format, a hub id of one, or a run's checkpoint
             (`FOLDER/best` and `FOLDER/newest` too). Its weights become the float32 masters; its optimiser is not taken

What such a drafter brings along that no run file says (heads, MLP width, RoPE base, norms' epsilon) it keeps. What the
run file or the target says too must be the same: a mismatch is refused by name, before anything is trained.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..common.errors import ConfigError, PacelineError
from ..common.runfile import INIT_KINDS, RunFile
from ..common.target_info import TargetInfo, hub_folder
from .checkpoint import find_checkpoint, load_state
from .drafter import SLIDING, Drafter, DrafterConfig, blank_drafter
from .export import read_drafter
from .first_weights import init_drafter, read_target_tensors


def first_drafter(run: RunFile, info: TargetInfo, layer_ids: Sequence[int], resumed: Path | None = None) -> Drafter:
    """A float32 drafter on the CPU with the run's first weights; the same on every rank.

    resumed: the checkpoint whose weights will replace all of them at once; until then they are zero. Its config then
    stands for that of the drafter that the run started from, which may be gone by now.

    Raises:
        ConfigError: mask token, shape, target and the drafter to start from do not fit each other.
    """
    name, seed = run.drafter.init_from, run.trainer.seed
    if name in INIT_KINDS:
        config = DrafterConfig.from_target(info, run, layer_ids)
        if resumed is not None:
            return _zeros(config)
        tensors = read_target_tensors(info, config) if name == "target" else None
        return init_drafter(config, seed=seed, init_from=name, target_tensors=tensors)
    if resumed is not None:
        config = DrafterConfig.from_dict(load_state(resumed).drafter)
        return _zeros(fitted(config, run, info, layer_ids))
    config, weights = read_start(name, run, info, layer_ids)
    drafter = blank_drafter(config)
    drafter.load_state_dict(weights)
    return drafter


@torch.no_grad()
def _zeros(config: DrafterConfig) -> Drafter:
    drafter = blank_drafter(config)
    for parameter in drafter.parameters():
        parameter.zero_()
    return drafter


def read_start(
    name: str, run: RunFile, info: TargetInfo, layer_ids: Sequence[int]
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors of the drafter that `init_from` names, once they fit the run."""
    try:
        config, tensors = read_drafter(_folder(name), info.num_layers)
        return fitted(config, run, info, layer_ids), tensors
    except PacelineError as error:
        raise ConfigError(f'drafter.init_from = "{name}": {error}') from error


def _folder(name: str) -> Path:
    path = find_checkpoint(Path(name).expanduser())
    return path if path.exists() else hub_folder(name, "there is no folder")


def fitted(config: DrafterConfig, run: RunFile, info: TargetInfo, layer_ids: Sequence[int]) -> DrafterConfig:
    """`config` in the run's dtype. ConfigError names everything in which it does not fit run file and target."""
    wrong = list(_mismatches(config, run, info, layer_ids))
    if wrong:
        raise ConfigError(f"that drafter does not fit this run: {'; '.join(wrong)}")
    return dataclasses.replace(config, dtype=run.trainer.dtype)


def _mismatches(config: DrafterConfig, run: RunFile, info: TargetInfo, layer_ids: Sequence[int]) -> Iterator[str]:
    settings = run.drafter
    sliding = [i for i, kind in enumerate(config.layer_types) if kind == SLIDING]
    slides = [i for i, one in enumerate(settings.slides) if one]
    asked = (
        ("layers", config.num_hidden_layers, "drafter.layers", settings.layers),
        ("block size", config.block_size, "drafter.block_size", settings.block_size),
        ("mask token", config.mask_token_id, "drafter.mask_token_id", settings.mask_token_id),
        ("target layers read", list(config.target_layer_ids), "target.layer_ids", list(layer_ids)),
        ("activation", config.hidden_act, "drafter.hidden_act", settings.hidden_act),
        ("MLP width", config.intermediate_size, "drafter.intermediate_size", settings.intermediate_size),
        ("sliding layers", sliding, "drafter.sliding_layers", slides),
        ("window", config.sliding_window, "drafter.sliding_window", settings.sliding_window if slides else None),
    )
    for what, its, key, ours in asked:
        if ours is not None and its != ours:
            yield f"its {what} {its}, {key} = {ours}"
    given = (
        ("hidden size", config.hidden_size, info.hidden_size),
        ("target layers", config.num_target_layers, info.num_layers),
        ("vocabulary rows", config.vocab_size, info.vocab_size),
    )
    for what, its, ours in given:
        if its != ours:
            yield f"its {what} {its}, the target has {ours}"
