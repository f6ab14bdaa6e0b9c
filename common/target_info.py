"""What the rest of the project needs to know of a target without loading it: shapes, token ids and an identity.

`target_info()` reads the config and hashes the weight files; it imports transformers only when called. The decoder's
own config counts: for a wrapped (multimodal) model that is its text config. Loading is `loading.py`'s business.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import ConfigError, first_line
from .runfile import RunFile

EDGE = 1 << 20  # bytes hashed at either end of a weight file
CONVERTED = "paceline.json"  # what a folder that paceline made says of itself: identity, "weights": "random"
WEIGHTS = ("*.safetensors", "*.bin")
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]


@dataclass(frozen=True)
class TargetInfo:
    """A target's decoder. `path` is the local folder with its weights; `identity` changes with config or weights."""

    path: str
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of the embedding, padding included
    intermediate_size: int  # of a dense layer; what a token passes where there are narrow experts alone
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | None  # the first, where the config lists several
    tie_word_embeddings: bool
    identity: str
    experts: int = 0  # in a mixture's layer, of which a token takes experts_per_token; shared ones are not counted
    experts_per_token: int = 0
    expert_size: int = 0  # intermediate size of each
    layer_types: tuple[str, ...] = ()  # of each layer, where the config names them
    gated_attention: bool = False  # its queries' projection has a gate beside it
    linear_attention: int = 0  # weights in the projections of a "linear_attention" layer

    @property
    def expert_share(self) -> float:
        """Of the experts' weights, how much a token passes."""
        return self.experts_per_token / self.experts if self.experts else 1.0


def target_folder(path: str) -> Path:
    """The local folder of a target given as folder, GGUF file (converted once) or hub id (downloaded once)."""
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError(f"target.path: {local} has no config.json; give the folder of a transformers model")
        return local
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ConfigError(f"target.path: there is no file {local}")
        from .gguf import converted

        return converted(local)
    if local.exists():
        raise ConfigError(f"target.path: {local} is neither a model folder nor a .gguf file")
    return hub_folder(path)


def hub_folder(name: str, prefix: str = "target.path: there is no folder") -> Path:
    """The local folder of a hub id, downloaded once. ConfigError, beginning with `prefix`, where there is none."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"{prefix} {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{prefix} {name} here, and the hub did not give it: {first_line(error)}") from None


def load_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """transformers' config of a model folder; ConfigError where it is broken or of an unknown type."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ConfigError(f"target.path: {folder}/config.json: {first_line(error)}") from None


def target_info(path: str, trust_remote_code: bool = False) -> TargetInfo:
    """Shapes, token ids and identity of the target at `path` (folder, GGUF file or hub id); loads no weights."""
    folder = target_folder(path)
    config = load_config(folder, trust_remote_code)
    text = config.get_text_config(decoder=True)
    hidden, heads = _whole(text, folder, "hidden_size"), _whole(text, folder, "num_attention_heads")
    return TargetInfo(
        path=str(folder),
        model_type=str(config.model_type),
        architectures=tuple(config.architectures or ()),
        hidden_size=hidden,
        num_layers=_whole(text, folder, "num_hidden_layers"),
        vocab_size=_whole(text, folder, "vocab_size"),
        intermediate_size=_mlp_width(text, hidden),
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        rms_norm_eps=float(_first(text, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps") or 1e-6),
        rope_theta=_rope_theta(text),
        max_position_embeddings=int(getattr(text, "max_position_embeddings", None) or 0),
        bos_token_id=_token(config, text, "bos_token_id"),
        eos_token_id=_token(config, text, "eos_token_id"),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        identity=identity(str(folder)),
        **_mixture(text),
        layer_types=tuple(getattr(text, "layer_types", None) or ()),
        gated_attention=bool(getattr(text, "attn_output_gate", False)),
        linear_attention=hidden * _delta_net_columns(text),
    )


def _mixture(text: Any) -> dict[str, int]:
    """A mixture's experts, whatever its config calls them; none where there is no choice between them."""
    experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") or 0
    chosen = _first(text, "num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k") or 0
    size = _first(text, "moe_intermediate_size", "expert_intermediate_size") or getattr(text, "intermediate_size", None)
    numbers = [number for number in map(_widest, (experts, chosen, size)) if isinstance(number, int)]
    if len(numbers) < 3 or not 0 < numbers[1] < numbers[0]:
        return {}
    return {"experts": numbers[0], "experts_per_token": numbers[1], "expert_size": numbers[2]}


def _mlp_width(text: Any, hidden: int) -> int:
    """Of a dense layer. A mixture may have none and call an expert's width so, as gpt-oss, whose tokens pass four."""
    width = _widest(getattr(text, "intermediate_size", None)) or 4 * hidden
    mixture = _mixture(text)
    if mixture and width == mixture["expert_size"] < 2 * hidden:
        return min(width * mixture["experts_per_token"], 4 * hidden)
    return width


def _delta_net_columns(text: Any) -> int:
    """Of a Gated DeltaNet's projections, the sizes beside the hidden one: q, k, v, gate, output, decay and rate."""
    fields = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    sizes = [size for field in fields if isinstance(size := getattr(text, field, None), int)]
    if len(sizes) < len(fields):
        return 0
    key_heads, key_dim, value_heads, value_dim = sizes
    return 2 * key_heads * key_dim + 3 * value_heads * value_dim + 2 * value_heads


def _whole(config: Any, folder: Path, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"target.path: {folder}/config.json gives no {key}; is it a decoder-only language model?")
    return value


def _widest(value: Any) -> int | None:
    return max(value) if isinstance(value, list | tuple) else value


def _first(config: Any, *keys: str) -> Any:
    return next((value for key in keys if (value := getattr(config, key, None)) is not None), None)


def _token(config: Any, text: Any, key: str) -> int | None:
    value = _first(text, key)
    if value is None:
        value = _first(config, key)
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return value


def _rope_theta(text: Any) -> float:
    """The base of full-attention layers; 10,000 where the target has no rotary embedding."""
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention") or parameters
    return float(parameters.get("rope_theta") or getattr(text, "rope_theta", None) or 10_000.0)


@lru_cache(maxsize=8)
def identity(folder: str) -> str:
    """A hash of the config and of the weight files' names, sizes, safetensors headers and first and last MB.

    Reads at most a few MB a file, so a changed tensor in the middle of an equal-sized file with equal edges is missed.
    """
    root = Path(folder)
    source = root / CONVERTED
    if source.is_file():
        return str(json.loads(source.read_text())["identity"])
    files = sorted(path for pattern in WEIGHTS for path in root.glob(pattern))
    if not files:
        raise ConfigError(f"target.path: {root} has a config.json but no weights (*.safetensors or *.bin)")
    config = json.loads((root / "config.json").read_text())
    config.pop("_name_or_path", None)
    config.pop("transformers_version", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in files:
        digest.update(path.name.encode())
        _hash_edges(digest, path)
    return digest.hexdigest()[:32]


def random_weights(folder: Path) -> bool:
    """Whether a folder says that its weights are to be random: a benchmark's, which has the shape of a model alone."""
    source = folder / CONVERTED
    return source.is_file() and json.loads(source.read_text()).get("weights") == "random"


def file_identity(path: Path) -> str:
    """The identity of a target in one file (GGUF), whatever the file is called."""
    digest = hashlib.sha256(b"gguf")
    _hash_edges(digest, path)
    return digest.hexdigest()[:32]


def _hash_edges(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(EDGE)
        digest.update(size.to_bytes(8, "little") + head)
        header = int.from_bytes(head[:8], "little") if path.suffix == ".safetensors" else 0
        if EDGE < header < size:
            digest.update(file.read(header + 8 - EDGE))
        file.seek(max(file.tell(), size - EDGE))
        digest.update(file.read())


def default_layer_ids(num_layers: int, draft_layers: int) -> list[int]:
    """Layers spread over the target, one per draft layer: round(1 + i (L-4)/(n-1)), and L//2 for one draft layer.

    Half rounds to even. Source: z-lab's released drafters (arXiv 2602.06036): 36 layers give [1, 9, 17, 25, 33].
    """
    if draft_layers == 1:
        return [num_layers // 2]
    ids = [round(1 + i * (num_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]
    if len(set(ids)) < len(ids) or min(ids) < 0:
        raise ConfigError(
            f"target.layer_ids: the target's {num_layers} layers are too few to spread {draft_layers} over; "
            "name the layers in target.layer_ids"
        )
    return ids


def deepest_layer(run: RunFile, info: TargetInfo, layer_ids: Sequence[int]) -> int:
    """The last layer that a worker runs."""
    return info.num_layers - 1 if run.target.last_hidden else max(layer_ids)


def resolve_layer_ids(run: RunFile, info: TargetInfo) -> list[int]:
    """The run's recorded layers in ascending order; ConfigError when out of range, repeated or out of order."""
    ids = run.target.layer_ids
    if ids is None:
        return default_layer_ids(info.num_layers, run.drafter.layers)
    if not ids:
        raise ConfigError("target.layer_ids: give at least one layer, or leave the key out")
    for layer in ids:
        if not 0 <= layer < info.num_layers:
            raise ConfigError(
                f"target.layer_ids: {layer} is out of range; the target has layers 0 to {info.num_layers - 1}"
            )
    if len(set(ids)) < len(ids):
        raise ConfigError(f"target.layer_ids: {ids} names a layer twice")
    if sorted(ids) != ids:
        raise ConfigError(f"target.layer_ids: {ids} must ascend, as engines that serve the drafter capture in order")
    return list(ids)


# The mask token


def no_mask_token(run_file: str = "RUN.toml") -> ConfigError:
    told = f"`paceline prepare {run_file}` names tokens that the data never use"
    return ConfigError(f"drafter.mask_token_id is not set: {told}")


def check_mask_token(
    mask_token_id: int | None,
    info: TargetInfo,
    *,
    pad_token_id: int | None = None,
    end_token_ids: Collection[int] = (),
    used_token: Callable[[int], bool] | None = None,
) -> int:
    """The mask token's id, once it is one that can serve; ConfigError says what is wrong and how to choose.

    It must be a row of the target's embedding that data never uses, and never a pad, bos or eos token: the
    drafter learns "fill in this slot" from it, and those carry a meaning of their own.
    end_token_ids: the target's, beside the one that `info` names.
    used_token(id): whether the prepared rows contain the token (`common.rows.Rows.used_token`).
    """
    advice = "choose a reserved or unused token of the tokenizer, one that the chat template never writes"
    if mask_token_id is None:
        raise no_mask_token()
    what = f"drafter.mask_token_id = {mask_token_id}"
    if not 0 <= mask_token_id < info.vocab_size:
        raise ConfigError(f"{what} is outside the target's {info.vocab_size} embedding rows: {advice}")
    taken = {"bos": {info.bos_token_id}, "eos": {info.eos_token_id, *end_token_ids}, "pad": {pad_token_id}}
    for name, special in taken.items():
        if mask_token_id in special:
            raise ConfigError(f"{what} is the target's {name} token: {advice}")
    if used_token is not None and used_token(mask_token_id):
        raise ConfigError(f"{what} occurs in the data: {advice}")
    return mask_token_id


def check_target_mask_token(
    mask_token_id: int | None, info: TargetInfo, used_token: Callable[[int], bool] | None
) -> int:
    """`check_mask_token` by the tokens that the target's folder names."""
    pad, end = pad_token_id(Path(info.path)), end_token_ids(Path(info.path))
    return check_mask_token(mask_token_id, info, pad_token_id=pad, end_token_ids=end, used_token=used_token)


def check_run_mask_token(run: RunFile, info: TargetInfo, used_token: Callable[[int], bool]) -> None:
    """`check_target_mask_token` of a run's setting, which may be left out where a drafter to start from has its own."""
    if run.drafter.mask_token_id is not None or run.drafter.needs_mask_token:
        check_target_mask_token(run.drafter.mask_token_id, info, used_token)


def pad_token_id(folder: Path) -> int | None:
    """The pad token of a target's folder: its config's, else its tokenizer's; None when neither names one."""
    config = _json(folder / "config.json")
    found = config.get("pad_token_id", (config.get("text_config") or {}).get("pad_token_id"))
    token = _json(folder / "tokenizer_config.json").get("pad_token")
    if found is None and token is not None:
        text = token.get("content") if isinstance(token, dict) else token
        added = _json(folder / "tokenizer.json").get("added_tokens", [])
        found = next((entry["id"] for entry in added if entry["content"] == text), None)
    return found


def end_token_ids(folder: Path) -> set[int]:
    """All end tokens of a target's folder: those of its config and of its generation config, which may name several."""
    config = _json(folder / "config.json")
    named = (config, config.get("text_config") or {}, _json(folder / "generation_config.json"))
    found = [values.get("eos_token_id") for values in named]
    return {token for one in found for token in (one if isinstance(one, list) else [one]) if token is not None}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
