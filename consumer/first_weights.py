"""A drafter's first weights: drawn from the seed, or copied from its target's last layers.

Owned here: which tensor comes from where. Not here: which of these a run starts from, or another drafter (start.py).
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..common.errors import ConfigError
from ..common.runfile import COPYABLE
from ..common.target_info import TargetInfo
from .drafter import Drafter, DrafterConfig, blank_drafter


def init_drafter(
    config: DrafterConfig,
    *,
    seed: int,
    init_from: str = "random",
    target_tensors: Mapping[str, Tensor] | None = None,
) -> Drafter:
    """A float32 drafter on the CPU with its first weights.

    random: matrices normal(0, initializer_range), norms one. A weight depends on the seed, its parameter's name and its
    place in it alone: not on the number of threads, of which it takes as many as torch does.
    target: see `copy_from_target`; target_tensors then holds the tensors of `target_tensor_names`.
    """
    drafter = blank_drafter(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    if init_from != "target":
        _draw_matrices(drafter, seed, config.initializer_range)
        return drafter
    if target_tensors is None:
        raise ValueError('init_from="target" needs the target\'s tensors')
    copy_from_target(drafter, target_tensors)
    return drafter


PIECE = 2**20  # weights that one generator draws: many pieces to a large matrix, each small enough for a cache


def _draw_matrices(drafter: Drafter, seed: int, deviation: float) -> None:
    """Draws normal(0, deviation), piece by piece in parallel; each piece has a generator of its own."""
    pieces = [
        (f"{seed} {name} {place}", piece)
        for name, parameter in drafter.named_parameters()
        if parameter.ndim == 2
        for place, piece in enumerate(parameter.detach().view(-1).split(PIECE))
    ]

    def draw(key: str, piece: Tensor) -> None:
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        piece.normal_(0.0, deviation, generator=generator)  # on one thread, without Python's lock

    with ThreadPoolExecutor(torch.get_num_threads(), "draw") as threads:
        for done in [threads.submit(draw, *piece) for piece in pieces]:
            done.result()


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")  # absent in Llama and others without them


def target_tensor_names(config: DrafterConfig) -> list[str]:
    """Names, without any prefix, of the target tensors that `copy_from_target` reads; the head norms may be missing."""
    last = range(config.num_target_layers - config.num_hidden_layers, config.num_target_layers)
    return ["norm.weight", *(f"layers.{i}.{name}" for i in last for name in LAYER_TENSORS + HEAD_NORMS)]


def read_target_tensors(info: TargetInfo, config: DrafterConfig) -> dict[str, Tensor]:
    """The tensors of `target_tensor_names` from the target's safetensors files; nothing else is read.

    Raises ConfigError for a target whose layers are not Qwen3's in all but the head norms (Gemma's norms scale by
    1 + w, Qwen2's projections have biases), and for one without safetensors files.
    """
    how = 'use drafter.init_from = "random"'
    if info.model_type not in COPYABLE:
        raise ConfigError(
            f'drafter.init_from = "target": layers of a {info.model_type} target are of another kind; {how}'
        )
    names = target_tensor_names(config)
    found: dict[str, Tensor] = {}
    for file in sorted(Path(info.path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (no mapping)
                name = key.removeprefix("model.")
                if name in names:
                    found[name] = tensors.get_tensor(key)
    if not found:
        raise ConfigError(f'drafter.init_from = "target": no decoder layers in {info.path}/*.safetensors; {how}')
    return found


@torch.no_grad()
def copy_from_target(drafter: Drafter, tensors: Mapping[str, Tensor]) -> None:
    """Starts a drafter from its target: the last n decoder layers, the final norm, and features of the last tap alone.

    tensors: by `target_tensor_names`, in any float dtype. fc starts as the identity on the last recorded layer.
    hidden_norm starts as the mean of the copied layers' input norms: in the target k_proj and v_proj read states after
    that norm, which the drafter's context skips. ConfigError names a tensor that is missing or of another shape.
    """
    config = drafter.config
    if config.num_hidden_layers > config.num_target_layers:
        raise ConfigError(
            f"drafter.layers ({config.num_hidden_layers}) exceeds the target's {config.num_target_layers}"
        )
    parameters = dict(drafter.named_parameters())
    first = config.num_target_layers - config.num_hidden_layers
    for i in range(config.num_hidden_layers):
        for name in LAYER_TENSORS:
            _copy(parameters[f"layers.{i}.{name}"], tensors, f"layers.{first + i}.{name}")
        for name in HEAD_NORMS:
            if f"layers.{first + i}.{name}" in tensors:
                _copy(parameters[f"layers.{i}.{name}"], tensors, f"layers.{first + i}.{name}")
    _copy(drafter.norm.weight, tensors, "norm.weight")
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
    input_norms: list[Tensor] = [
        parameters[f"layers.{i}.input_layernorm.weight"] for i in range(config.num_hidden_layers)
    ]
    drafter.hidden_norm.weight.copy_(torch.stack(input_norms).mean(0))


def _copy(parameter: Tensor, tensors: Mapping[str, Tensor], name: str) -> None:
    source = tensors.get(name)
    if source is None or source.shape != parameter.shape or source.dtype not in FLOATS:
        found = (
            "is missing" if source is None else f"is {list(source.shape)} {source.dtype}, not {list(parameter.shape)}"
        )
        raise ConfigError(f'drafter.init_from = "target": the target\'s {name} {found}; use init_from = "random"')
    parameter.copy_(source)
