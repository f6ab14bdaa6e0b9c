"""The target: running its decoder for hidden states.

With `loading.py` and the modules that only these two import, it is all of `common` that loads torch. Worker, trainer
ranks and evaluation use it; nothing that the command line, ring, wire or feed import reaches it. It owns no files and
writes to no ring: states go to the caller's `sink`.

`Target` runs the decoder up to the deepest layer asked for, in one of three ways, chosen by `self_check()`:

    packed   all rows end to end in one sequence; attention (`varlen.py`) and Gated DeltaNet (`delta_net.py`)
             are told the boundaries
    padded   rows of like length side by side, padded on the right, where causal rows never look
    alone    one row at a time

Packed rows may also run through compiled layers (`Faster`), after the same check.

A mask or a cache would turn off transformers' own packing in silence, and models with other recurrent layers leak
from row to row. So a way is used only after it reproduced what layers make of rows that run
alone by the model's own attention. No way builds a mask of T x T over a batch.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from . import delta_net
from .boundaries import Boundaries, Unpackable, boundaries, on_device
from .errors import ConfigError, first_line
from .loading import as_dtype, check_shards, compute_dtype, find_parts, load_model, quiet_loading
from .quantised import unrounded
from .reference import BESIDES, QUANTISED, Reference, run_layers, states_fault, take_alone
from .target_info import TargetInfo, target_info
from .varlen import PACKED

log = logging.getLogger(__name__)

Sink = Callable[[int, Tensor, int], None]  # (plane, states [t, H], index of the first token)
Mode = Literal["packed", "padded", "alone"]

PADDED_TOKENS = 8192  # most tokens, padding included, that run side by side
PADDED_SHARE = 0.8  # a row joins longer ones when it is at least so long, relative to the longest
# Rows of the self-check, two of a length to run side by side; one more is longer than the sliding window.
CHECK_LENGTHS: tuple[int, ...] = (23, 17, 40, 36)
CHECK_WINDOW = {"cpu": 512, "cuda": 4096}  # widest window that the self-check reaches across
_ATTENTION = {"full_attention", "sliding_attention"}  # layer types that `packed_attention` serves


class Faster(Protocol):
    """A faster way to run a target's layers with packed rows, which `Target.self_check` tries."""

    def install(self, target: "Target") -> None:
        """Changes the layers. May raise anything; ConfigError is the user's and ends the start."""
        ...

    def remove(self, target: "Target") -> None:
        """Undoes `install`, also one that raised."""
        ...


class Pass(NamedTuple):
    """One pass of the decoder, as another process with a share of the target must run it too."""

    mode: Mode
    deepest: int  # layer whose hook ends it
    input_ids: Tensor  # int64 [B, L]
    position_ids: Tensor | None  # int64 [1, T] of packed rows
    cu_seqlens: Sequence[int]  # of packed rows, else empty
    given: Mapping[int, Tensor] = MappingProxyType({})  # by layer: states [B, L, H] that it takes for its input


class _LastLayer(Exception):
    """Leaves the decoder's forward once the deepest layer asked for has run."""


# Running -----------------------------------------------------------------------------------------------------------


class Target:
    """A target's decoder on one device, without the layers that nobody asks for and without its head."""

    def __init__(
        self,
        info: TargetInfo,
        decoder: PreTrainedModel,
        layers: nn.ModuleList,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.info = info
        self.decoder = decoder
        self.layers = layers
        self.device = device
        self.dtype = dtype  # that it computes in, and states come out in
        self.mode: Mode = "alone"
        self.pad_to = 1  # packed token counts are rounded up to a multiple of it
        self.announce: Callable[[Pass], None] = lambda one: None  # told of each pass before it runs
        self._own_attention = str(decoder.config._attn_implementation)
        self._delta_nets = delta_net.delta_nets(layers) if device.type in delta_net.DEVICES else []

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str | torch.dtype = "bfloat16",
        device: str | torch.device = "cpu",
        last_layer: int | None = None,
        trust_remote_code: bool = False,
        shards: int = 1,
    ) -> "Target":
        """Loads the decoder of a folder, GGUF file or hub id, with layers 0 to `last_layer` (all of them if None).

        With `shards` above 1 only this process's share of it, by transformers' tensor parallel plan: that many
        processes are joined in torch.distributed's default group, and all of them load and run it together.

        Weights are rounded to `dtype`; it computes in `compute_dtype(dtype, device)`, which states come out in.
        The model is read whole before layers are dropped, since some depend on how many there are. Runs rows alone
        until `self_check()` finds a faster way. Raises ConfigError.
        """
        info = target_info(path, trust_remote_code)
        if shards > 1:
            check_shards(info, shards)
        model = load_model(Path(info.path), dtype, trust_remote_code, need_head=False, device=device, shards=shards)
        parts = find_parts(model)
        if shards > 1 and not any(isinstance(parameter, DTensor) for parameter in parts.layers.parameters()):
            raise ConfigError(f"workers.gpus_per_worker: {info.model_type} has no tensor parallel plan in transformers")
        if last_layer is not None:
            if not 0 <= last_layer < info.num_layers:
                raise ConfigError(
                    f"target: layer {last_layer} is out of range; it has layers 0 to {info.num_layers - 1}"
                )
            del parts.layers[last_layer + 1 :]
        device, computed = torch.device(device), compute_dtype(dtype, device)
        if computed != as_dtype(dtype):  # else never cast: it would also round what the model keeps in float32
            parts.decoder.to(computed)  # pyright: ignore[reportArgumentType]
        try:
            decoder = parts.decoder.to(device)  # pyright: ignore[reportArgumentType]
        except torch.OutOfMemoryError:
            raise ConfigError(f"target.path: {info.path} does not fit into the memory of {device}") from None
        return cls(info, decoder, parts.layers, device, computed)

    def drop_after(self, layer: int) -> None:
        """Forgets the layers after this one."""
        del self.layers[layer + 1 :]

    @property
    def can_pack(self) -> bool:
        """Whether rows run packed: true only after a `self_check()` that proved it."""
        return self.mode == "packed"

    @torch.inference_mode()
    def forward_states(
        self,
        tokens: Tensor,
        cu_seqlens: Sequence[int],
        layer_ids: Sequence[int],
        sink: Sink,
        last_hidden: bool = False,
        given: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """Runs rows and hands the asked layers' outputs to `sink(plane, states, first)` from inside each layer's hook.

        tokens int64 [T] (any device), row r at [cu_seqlens[r], cu_seqlens[r+1]). Plane i is layer_ids[i]; with
        `last_hidden` one more holds the last layer's output, before the final norm. `states` is [t, H], of tokens
        first to first+t-1: the whole batch when packed, else one row; it is the caller's to read until the call
        returns. What `sink` raises ends the forward. given: by layer, states [T, H] that it takes for its input,
        instead of what the layers before it make of the rows.
        """
        planes = self._planes(layer_ids, last_hidden)
        tokens = on_device(tokens.long(), self.device)
        hidden = self.info.hidden_size
        if self.mode == "packed":
            count, spare = len(tokens), -len(tokens) % self.pad_to
            if spare:  # a row of its own, which nobody is given
                tokens, cu_seqlens = nn.functional.pad(tokens, (0, spare)), [*cu_seqlens, count + spare]
            bounds = Boundaries(cu_seqlens, self.device)
            padded = {n: nn.functional.pad(s, (0, 0, 0, spare))[None] if spare else s[None] for n, s in given.items()}
            self._packed(
                tokens, bounds, planes, lambda plane, out: sink(plane, out.reshape(-1, hidden)[:count], 0), padded
            )
            return
        for group in _groups(cu_seqlens, self.mode):
            starts = [cu_seqlens[row] for row in group]
            lengths = [cu_seqlens[row + 1] - cu_seqlens[row] for row in group]

            def side_by_side(values: Tensor, starts: list[int] = starts, lengths: list[int] = lengths) -> Tensor:
                whole = values.new_zeros(len(starts), max(lengths), *values.shape[1:])
                for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                    whole[i, :length] = values[start : start + length]
                return whole

            def deliver(plane: int, out: Tensor, starts: list[int] = starts, lengths: list[int] = lengths) -> None:
                for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                    sink(plane, out[i, :length], start)

            padded = {layer: side_by_side(states) for layer, states in given.items()}
            self._run(planes, deliver, padded, input_ids=side_by_side(tokens))

    def _planes(self, layer_ids: Sequence[int], last_hidden: bool) -> dict[int, list[int]]:
        """Layer to its planes; ConfigError for a layer that is out of range or was dropped at load."""
        wanted = [*layer_ids, self.info.num_layers - 1] if last_hidden else list(layer_ids)
        planes: dict[int, list[int]] = defaultdict(list)
        for plane, layer in enumerate(wanted):
            if not 0 <= layer < len(self.layers):
                raise ConfigError(f"target: layer {layer} was not loaded; layers 0 to {len(self.layers) - 1} were")
            planes[layer].append(plane)
        return planes

    def _packed(
        self,
        tokens: Tensor,
        bounds: Boundaries,
        planes: dict[int, list[int]],
        deliver: Callable[[int, Tensor], None],
        given: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        lengths = [end - start for start, end in pairwise(bounds.cu_seqlens)]
        positions = on_device(torch.cat([torch.arange(length) for length in lengths]), self.device)
        token = boundaries.set(bounds)
        try:
            self._run(planes, deliver, given, input_ids=tokens[None], position_ids=positions[None])
        finally:
            boundaries.reset(token)

    def _run(
        self,
        planes: dict[int, list[int]],
        deliver: Callable[[int, Tensor], None],
        given: Mapping[int, Tensor],
        **inputs: Tensor,
    ) -> None:
        """One pass of the decoder. Hooks sit only on the layers asked for; the deepest one's ends the pass."""
        deepest = max(planes)
        bounds = boundaries.get() if self.mode == "packed" else None
        offsets = bounds.cu_seqlens if bounds else ()
        self.announce(Pass(self.mode, deepest, inputs["input_ids"], inputs.get("position_ids"), offsets, given))
        shape = (*inputs["input_ids"].shape, self.info.hidden_size)

        def hook(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            def run(module: nn.Module, args: Any, output: Any) -> None:
                states = output[0] if isinstance(output, tuple) else output
                if not isinstance(states, Tensor) or states.shape != shape:
                    raise ConfigError(
                        f"target: layer {layer} ({type(module).__name__}) gives no states of shape {shape}"
                    )
                for plane in planes[layer]:
                    deliver(plane, states)
                if layer == deepest:
                    raise _LastLayer

            return run

        handles = [self.layers[layer].register_forward_hook(hook(layer)) for layer in planes]
        handles += [
            self.layers[layer].register_forward_pre_hook(_giving(states), with_kwargs=True)
            for layer, states in given.items()
        ]
        try:
            with contextlib.suppress(_LastLayer):
                self.decoder(**inputs, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def follow(self, one: Pass) -> None:
        """Runs a pass that another process announced; its states go nowhere."""
        if self.mode != one.mode:
            self._use(one.mode)
        inputs = {"input_ids": one.input_ids}
        if one.position_ids is not None:
            inputs["position_ids"] = one.position_ids
        token = boundaries.set(Boundaries(one.cu_seqlens, self.device))
        try:
            self._run({one.deepest: []}, lambda plane, out: None, one.given, **inputs)
        finally:
            boundaries.reset(token)

    # Which way is right for this model

    @torch.inference_mode()
    def self_check(
        self,
        *,
        pack: bool = True,
        longest: int = 0,
        quantising: Callable[["Target"], object] | None = None,
        faster: Faster | None = None,
    ) -> None:
        """Chooses packed, padded or alone, and logs which: the first way that gives what rows run alone give.

        The reference is the model's own attention on one row at a time, and in it what each layer adds to its input.
        Packing must also leave later rows unmoved when the first row changes. Packed rows then run the `faster` way if
        that passes the same check.

        longest: tokens of the longest row that will come. Where the rotary embedding is another one as soon as a row is
        longer than the target's first window (longrope, dynamic), and such rows will come, only alone is right: what
        a row gives would depend on the rows beside it.

        quantising: rounds the layers' arithmetic, once the way is chosen, as some checkpoints do by themselves. Then no
        two kernels give the same states any more: what differs by one rounding in bfloat16 is now and then rounded to
        another of fp8's few values. So the reference is not quantised, and `faster` may be about QUANTISED times as far
        from it as plain layers are.
        """
        with unrounded(self.layers) as rounding:
            reference = self._choose(pack, longest)
        if quantising is not None:
            quantising(self)
        if quantising is not None or rounding:
            reference = self._quantised(reference)
        if faster is not None:
            self._speed_up(faster, reference)

    def _choose(self, pack: bool, longest: int) -> Reference:
        started = time.monotonic()
        self._use("alone")
        try:
            reference = take_alone(self, self._check_rows())
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:  # of the model's own code, whatever is installed here
            raise ConfigError(
                f"target.path: not even a single row runs on {self.device}: {first_line(error)}"
            ) from error
        ways: list[Mode] = ["packed", "padded"] if pack else ["padded"]
        if (window := self._window_of_rope()) is not None and longest > window:
            log.warning("rows run alone: rows of more than %d tokens have another rotary embedding (longrope)", window)
            ways = []
        for mode in ways:
            try:
                self._use(mode)
                fault = self._fault(reference)
            except (Unpackable, RuntimeError, ValueError, TypeError) as error:
                fault = first_line(error)
            if fault is None:
                break
            # A hybrid's rows pack where its package is there and works: worth a warning, not only a line.
            level = logging.WARNING if mode == "packed" and self._delta_nets else logging.INFO
            log.log(level, "rows do not run %s: %s", mode, fault)
            self._use("alone")
        log.info("self-check: rows run %s (%.1f s)", self.mode, time.monotonic() - started)
        return reference

    def _quantised(self, reference: Reference) -> Reference:
        """The reference with what may differ from it, by layer, now that the layers are quantised."""
        errors = reference.errors(run_layers(self, reference.rows, reference.given))
        log.info("quantised, what a layer adds is off by %.2g to %.2g", min(errors.values()), max(errors.values()))
        limits = {layer: QUANTISED * error + BESIDES * reference.limits[layer] for layer, error in errors.items()}
        return reference._replace(limits=limits)

    def _speed_up(self, faster: Faster, reference: Reference) -> None:
        if self.mode != "packed":
            log.warning("the target is not compiled, as its rows run %s", self.mode)
            return
        try:
            faster.install(self)
            fault = states_fault(self, reference)
        except ConfigError:
            raise
        except Exception as error:  # a compiler may raise anything, and the plain way is right without it
            fault = first_line(error)
        if fault is not None:
            faster.remove(self)
            log.warning("the target runs uncompiled: %s", fault)

    def _use(self, mode: Mode) -> None:
        wanted = PACKED if mode == "packed" else self._own_attention
        if str(self.decoder.config._attn_implementation) != wanted:
            with quiet_loading():
                self.decoder.set_attn_implementation(wanted)
        if str(self.decoder.config._attn_implementation) != wanted:
            raise Unpackable("its attention cannot be replaced")
        change = delta_net.pack if mode == "packed" else delta_net.unpack
        change(self._delta_nets)
        self.mode = mode

    def _check_rows(self) -> list[Tensor]:
        lengths = list(CHECK_LENGTHS)
        window = getattr(self._text, "sliding_window", None) or 0
        if 0 < window <= CHECK_WINDOW.get(self.device.type, 512):
            lengths.append(window + 33)
        if self._delta_nets:
            lengths.append(2 * delta_net.CHUNK + 33)
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(self.info.vocab_size, (length,), generator=generator) for length in lengths]

    @property
    def _text(self) -> Any:
        return self.decoder.config.get_text_config(decoder=True)

    def _window_of_rope(self) -> int | None:
        """The length beyond which a row, and all that runs beside it, has another rotary embedding; None for none."""
        config = self._text
        parameters = getattr(config, "rope_parameters", None) or {}
        for one in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
            if one.get("rope_type") in ("longrope", "dynamic"):
                window = one.get("original_max_position_embeddings")
                return window or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
        return None

    def _fault(self, reference: Reference) -> str | None:
        """Why the current mode is wrong for this model; None if it is right."""
        if self.mode == "packed":
            kinds = set(getattr(self._text, "layer_types", None) or ()) - _ATTENTION
            if self._delta_nets and kinds == {"linear_attention"}:
                if (fault := delta_net.fault(self._delta_nets[0], self.device, self.dtype)) is not None:
                    return fault
            elif kinds:
                return f"it has layers of type {', '.join(sorted(kinds))}"
            if (fault := self._window_fault(reference.rows)) is not None:
                return fault
        return states_fault(self, reference)

    def _window_fault(self, rows: list[Tensor]) -> str | None:
        """A window wider than the check's rows cannot be seen in the states, so what layers ask for is compared."""
        tokens = torch.cat(rows[:1]).to(self.device)
        bounds = Boundaries([0, len(tokens)], self.device)
        self._packed(tokens, bounds, {len(self.layers) - 1: [0]}, lambda plane, out: None)
        config = self._text
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        wanted = {window}
        if kinds:
            attentions = [kind for kind in kinds[: len(self.layers)] if kind in _ATTENTION]
            wanted = {window if kind == "sliding_attention" else None for kind in attentions}
        if wanted and not bounds.windows:
            return "its attention does not go through transformers' attention functions"
        if bounds.windows != wanted:
            return f"layers ask for sliding windows {bounds.windows}, the config for {wanted}"
        return None


def _groups(cu_seqlens: Sequence[int], mode: Mode) -> list[list[int]]:
    """Rows that run side by side: of like length, longest first, within PADDED_TOKENS; each alone in mode alone."""
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    if mode == "alone":
        return [[row] for row in range(len(lengths))]
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[groups[-1][0]] if groups else 0
        fits = groups and longest * (len(groups[-1]) + 1) <= PADDED_TOKENS
        if fits and lengths[row] >= PADDED_SHARE * longest:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _giving(states: Tensor) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    """A hook before a layer: it takes these states for its input."""

    def give(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return (states.to(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": states.to(kwargs["hidden_states"])}

    return give
