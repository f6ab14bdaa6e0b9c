"""The two folders that engines load, and the strict way back in: config.json and one safetensors file.

    zlab         z-lab's `dflash`, SGLang and vLLM; `DrafterConfig.to_dict` is its config.json
    speculators  vLLM, and the `speculators` library; the same tensors under another config.json

Tables of both are in docs/checkpoints.md. Reading refuses, by name, whatever would be dropped in silence: missing,
extra and misshapen tensors, and settings of a drafter that is not plain DFlash.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common.errors import ConfigError
from .checkpoint import MODEL
from .drafter import FULL, SLIDING, Drafter, DrafterConfig

FORMATS = ("zlab", "speculators")
CONFIG = "config.json"
SHARDS = "model-*-of-*.safetensors"
KIND = "speculators_model_type"

_OF_THE_FORMAT = ("architectures", "auto_map", "block_size", "num_target_layers", "dflash_config")
"""Keys of z-lab's config.json that say nothing about a decoder layer."""

_VERIFIERS = frozenset(
    ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")
)
"""Tensors of the target that a speculators folder may carry along. At full vocabulary they are the target's own, which
every engine has already; a reduced one is refused before."""

_DFLASH_KEYS = frozenset(("mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "causal"))


@dataclass(frozen=True)
class Verifier:
    """The target as a speculators config names it: hub id or folder, and the architectures of its config.json."""

    name: str
    architectures: tuple[str, ...]


# Writing


def config_values(format: str, config: DrafterConfig, verifier: Verifier | None = None) -> dict[str, Any]:
    """config.json of a format. `verifier` is for speculators, which cannot do without.

    Raises:
        ConfigError: the format cannot say what the drafter was trained with.
    """
    if format == "zlab":
        return config.to_dict()
    if verifier is None:
        raise ValueError("a speculators config names its target")
    return speculators_config(config, verifier)


def speculators_config(config: DrafterConfig, verifier: Verifier) -> dict[str, Any]:
    """config.json of speculators' `DFlashSpeculatorConfig`, every key written out.

    aux_hidden_state_layer_ids counts the embedding as 0, so it is target_layer_ids + 1. Its default draft_vocab_size
    (32,000) would ask for a reduced vocabulary. sliding_window_non_causal is of sliding layers alone in speculators,
    but vLLM reads false as causal in every layer: so it is true without sliding layers, and a drafter with layers of
    both kinds has no right value.
    """
    kinds = set(config.layer_types)
    if kinds == {FULL, SLIDING}:
        raise ConfigError(
            "the speculators format has one sliding_window_non_causal for all layers in vLLM, and this drafter has "
            "full and sliding layers: use --format zlab, which vLLM reads layer by layer"
        )
    layer = {key: value for key, value in config.to_dict().items() if key not in _OF_THE_FORMAT}
    return {
        "architectures": ["DFlashDraftModel"],
        KIND: "dflash",
        "dtype": config.dtype,
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": SLIDING not in kinds,
        "num_target_layers": config.num_target_layers,  # not a key of speculators, which keeps it
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": layer,
    }


# Reading the config


def read_config(folder: Path, num_target_layers: int | None = None) -> DrafterConfig:
    """The config of an exported folder, z-lab's or speculators'.

    num_target_layers: of the target, for speculators folders of others, which do not say it.

    Raises:
        ConfigError: it is none, or of a drafter that is not plain DFlash; names file and key.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no readable drafter config ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    try:
        values = _from_speculators(values, num_target_layers) if KIND in values else _from_zlab(values)
        config = DrafterConfig.from_dict(values)
        _check_causality(values, config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


def is_speculators(folder: Path) -> bool:
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and KIND in values


def _from_zlab(values: dict[str, Any]) -> dict[str, Any]:
    kinds = values.get("architectures") or ["DFlashDraftModel"]
    if kinds != ["DFlashDraftModel"]:
        raise ConfigError(f"architectures is {kinds}, not a plain DFlash drafter's ['DFlashDraftModel']")
    nested = values.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"dflash_config is {nested!r}, not an object")
    foreign = {key: value for key, value in nested.items() if key not in _DFLASH_KEYS and not _neutral(value)}
    if foreign:
        raise ConfigError(f"dflash_config has {_listed(foreign)}, which a plain DFlash drafter does not do")
    _check_rope(values)
    return {"dtype": values.get("torch_dtype", "bfloat16"), **values}


def _neutral(value: Any) -> bool:
    """Whether a setting unknown here (output_multiplier, final_logit_softcapping, use_swa, …) changes nothing."""
    return value is None or value is False or (not isinstance(value, bool) and value in (0, 1))


def _from_speculators(values: dict[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    """As z-lab's config.json would say it."""
    layer = values.get("transformer_layer_config")
    if values[KIND] != "dflash" or not isinstance(layer, dict):
        raise ConfigError(f"{KIND} is {values[KIND]!r}; only dflash with a transformer_layer_config is DFlash")
    if values.get("sample_from_anchor"):
        raise ConfigError("sample_from_anchor is true: this drafter also drafts at the anchor, which DFlash does not")
    drafted, whole = values.get("draft_vocab_size", 32000), layer.get("vocab_size")
    if drafted != whole:
        raise ConfigError(f"draft_vocab_size is {drafted} of {whole}: a reduced vocabulary is not supported")
    layers = values.get("num_target_layers", num_target_layers)
    if layers is None:
        raise ConfigError("it does not say how many layers its target has: name the target")
    sliding = SLIDING in (layer.get("layer_types") or ())
    if sliding and values.get("sliding_window_non_causal"):
        raise ConfigError("sliding_window_non_causal is true: sliding layers here are causal inside the block")
    _check_rope(layer)
    nested = {
        "mask_token_id": values.get("mask_token_id"),
        "target_layer_ids": [layer_id - 1 for layer_id in values.get("aux_hidden_state_layer_ids") or ()],
    }
    dtype = values.get("dtype") or values.get("torch_dtype") or layer.get("dtype") or "bfloat16"
    own = {"block_size": values.get("block_size", 8), "num_target_layers": layers, "dtype": dtype}
    return layer | own | {"dflash_config": nested}


def _check_rope(values: Mapping[str, Any]) -> None:
    """A drafter's RoPE is plain, as engines disagree about the rest; and said twice, it is said alike."""
    for where in ("rope_parameters", "rope_scaling"):
        rope = values.get(where) or {}
        odd = {k: v for k, v in rope.items() if k == "mrope_section" or (k == "partial_rotary_factor" and v != 1)}
        if odd:
            raise ConfigError(f"{where} has {_listed(odd)}; a drafter's RoPE turns whole heads by one position")
    if values.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"partial_rotary_factor is {values['partial_rotary_factor']}, not 1")
    old, new = values.get("rope_theta"), (values.get("rope_parameters") or {}).get("rope_theta")
    if old is not None and new is not None and old != new:
        raise ConfigError(f"rope_theta is {old} and rope_parameters.rope_theta {new}: engines read one or the other")


def _check_causality(values: Mapping[str, Any], config: DrafterConfig) -> None:
    """An explicit in-block causality, which vLLM and z-lab put above layer_types, must say the same as they do."""
    nested = values.get("dflash_config") or {}
    for key, said in (("is_causal", values.get("is_causal")), ("dflash_config.causal", nested.get("causal"))):
        wanted = {kind == SLIDING for kind in config.layer_types}
        if said is not None and wanted != {bool(said)}:
            raise ConfigError(f"{key} is {said} for all layers; trained here are sliding layers causal, full ones not")


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in sorted(values.items()))


# Reading the tensors


def read_tensors(folder: Path, config: DrafterConfig, *, verifiers: bool = False) -> dict[str, Tensor]:
    """The folder's drafter tensors, once their names and shapes are exactly the config's.

    verifiers: whether tensors of the target may lie beside them, which are left out.

    Raises:
        ConfigError: names every tensor that is missing, unexpected or misshapen.
    """
    tensors: dict[str, Tensor] = {}
    try:
        for path in _files(folder):
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if not (verifiers and name in _VERIFIERS)]  # noqa: SIM118
                tensors |= {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder / MODEL}: unreadable drafter weights: {error}") from error
    wrong = sorted(misfits({name: tensor.shape for name, tensor in tensors.items()}, config))
    if wrong:
        raise ConfigError(f"{folder / MODEL} does not fit its config: {'; '.join(wrong)}")
    return tensors


def _files(folder: Path) -> list[Path]:
    shards = sorted(folder.glob(SHARDS))
    return shards if shards and not (folder / MODEL).exists() else [folder / MODEL]


def misfits(shapes: Mapping[str, torch.Size], config: DrafterConfig) -> Iterator[str]:
    """What is wrong with tensors of these names and shapes for a drafter of this config."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in Drafter(config).state_dict().items()}
    yield from (f"{name} is missing" for name in expected.keys() - shapes.keys())
    yield from (f"{name} is unexpected" for name in shapes.keys() - expected.keys())
    for name in expected.keys() & shapes.keys():
        if shapes[name] != expected[name]:
            yield f"{name} has shape {list(shapes[name])}, not {list(expected[name])}"
