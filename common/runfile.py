"""The run file: every setting of a training job, typed and validated once, then passed down as values.

`load()` reads TOML, applies `--set key=value` overrides, makes paths absolute and refuses unknown keys with a
suggestion; `to_toml()` writes a run back, every key resolved. The key reference in docs/runfile.md is generated from
the field descriptions below (`python -m paceline.common.runfile > docs/runfile.md`).
"""

import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from .errors import ConfigError, UsageError
from .paths import run_file_error

Dtype = Literal["float32", "bfloat16", "float16"]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PathName = Annotated[str, Field(pattern=r"\S")]  # an empty one would be the current folder

_DEVICE, NAME = r"^(cpu|cuda(:[0-9]+)?)$", r"^[a-z0-9][a-z0-9_-]{0,47}$"
NAME_IN_WORDS = "lower-case letters, digits, - and _, a letter or digit first, at most 48 in all"
_PATTERNS = {  # in words
    _DEVICE: '"cpu", "cuda" or "cuda:N"',
    NAME: NAME_IN_WORDS,
}
DeviceName = Annotated[str, Field(pattern=_DEVICE)]

INIT_KINDS = ("random", "target")  # of drafter.init_from; any other is the drafter to start from
COPYABLE = ("llama", "mistral", "qwen3")  # types of target whose layers init_from = "target" can take over
CHAT_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".parquet")

NONE = "none"  # how a run file says that a setting with a default is off; TOML has no null


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        off = [k for k, v in values.items() if v == NONE and k in cls.model_fields and _optional(cls.model_fields[k])]
        return {**values, **dict.fromkeys(off)}


class TargetSettings(Section):
    """The frozen target model."""

    path: PathName = Field(description="Local folder, GGUF file or hub id of a causal language model")
    dtype: Dtype = Field(default="bfloat16", description="Compute dtype of the target and dtype of the recorded states")
    layer_ids: list[NonNegativeInt] | None = Field(
        default=None,
        description="Decoder layers whose outputs are recorded, counted from 0. Default: spread evenly over the "
        "target, one per draft layer",
    )
    last_hidden: bool = Field(
        default=False, description="Also record the last layer's output (soft-label objectives need it)"
    )
    trust_remote_code: bool = Field(default=False, description="Let transformers run code that comes with the model")
    compile: Literal["auto"] | bool = Field(
        default="auto",
        description="Run the layers through torch.compile, if their states pass the start-up self-check. auto: on GPUs",
    )
    fp8: bool = Field(
        default=False,
        description="Layers' matmuls in fp8 (e4m3), on GPUs that have it. It changes the states: only right for a "
        "target that is served in fp8 as well",
    )

    @model_validator(mode="after")
    def _fp8(self) -> "TargetSettings":
        if self.fp8 and self.dtype != "bfloat16":
            raise ValueError(f'target.fp8 needs target.dtype = "bfloat16", not "{self.dtype}"')
        return self


class DataFile(Section):
    """A chat file of a mix. A path alone, as a text, stands for a file of weight 1."""

    path: PathName = Field(description="Chat file")
    weight: Annotated[float, Field(gt=0, le=100)] = Field(
        default=1.0,
        description="How often an epoch uses each row of the file: 0.25 uses a quarter of them, another one each "
        "epoch, and 2 all of them twice",
    )


class DataSettings(Section):
    """The conversations to train on (docs/data.md). Exactly one of `files` and `rows` is given."""

    files: list[DataFile] = Field(
        default_factory=list,
        description=f"Chat files ({', '.join(CHAT_SUFFIXES)}), prepared into the cache on first use. A file is a path, "
        "or a table with a path and a weight",
    )
    rows: PathName | None = Field(default=None, description="Folder written by `paceline prepare --out`")
    max_length: PositiveInt = Field(default=3072, description="Longest row in tokens; longer ones are cut")
    supervise: Literal["all", "last"] = Field(
        default="all", description="Which assistant turns are supervised: every one, or the last only"
    )
    thinking: bool | None = Field(
        default=None,
        description="Passed to the chat template as enable_thinking and thinking: the mode that will be served. "
        "Default: the template's own",
    )
    held_out: NonNegativeInt = Field(
        default=64, description="Rows set aside for evaluation, drawn by seed, never trained on"
    )

    def mix(self, meta: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
        """Number of rows and weight of each file, in the rows' order; empty if all weights are 1. `meta` is that of the
        prepared rows."""
        weights = [file.weight for file in self.files]
        if all(weight == 1 for weight in weights):
            return ()
        return tuple((file["rows"], weight) for file, weight in zip(meta["files"], weights, strict=True))

    @field_validator("files", mode="before")
    @classmethod
    def _paths(cls, files: Any) -> Any:
        return (
            [{"path": file} if isinstance(file, str) else file for file in files] if isinstance(files, list) else files
        )


class StreamSettings(Section):
    """Batches, rings and the order of work."""

    token_budget: PositiveInt = Field(default=16384, description="Most tokens in a batch (and in a record)")
    packer: Literal["first-fit", "sequential"] = Field(
        default="first-fit",
        description="How rows are packed into batches: first-fit over shuffled rows, or one after another",
    )
    order: Literal["arrival", "strict"] = Field(
        default="arrival",
        description="arrival: train records as they come, within an epoch. strict: in plan order, so the same "
        "run file gives the same weights whatever the number of workers and kills",
    )
    slots: PositiveInt = Field(default=4, description="Slots in each worker's ring")
    payload: Literal["full", "fp8"] = Field(
        default="full",
        description="How records hold states: full is target.dtype. fp8: eight bits (e4m3) and a scale for each token "
        "of each layer, which about halves rings and copies against bfloat16 and rounds the states",
    )
    prefetch: PositiveInt = Field(default=4, description="Tokenised batches each worker holds ready (q_pre)")
    ring_dir: PathName = Field(default="/dev/shm/paceline", description="Where the runs' ring folders are")
    numa: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: on a machine of several NUMA nodes workers and ranks run on the node of their GPU, and a "
        "worker's ring lies there. off: where the kernel puts them",
    )
    record_to: PathName | None = Field(
        default=None,
        description="Folder on a disk that keeps the states of every row, so that no row is computed twice",
    )
    record_limit: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="GiB that record_to may take; the disk keeps 1 GiB free in any case"
    )


class WorkerSettings(Section):
    """The target side."""

    count: PositiveInt = Field(default=1, description="Target workers")
    devices: list[DeviceName] = Field(
        default_factory=list,
        description='Device of each worker ("cuda:0", "cpu"), repeated in turn. Default: GPUs in order, else cpu',
    )
    gpus_per_worker: PositiveInt = Field(
        default=1,
        description="GPUs that share one target by transformers' tensor parallel plan: a worker's device and those "
        "after it. For a target larger than a GPU",
    )
    threads: NonNegativeInt = Field(default=0, description="CPU threads of a worker; 0 leaves torch's default")
    pack: Literal["auto", "never"] = Field(
        default="auto", description="auto: pack rows when the start-up self-check proves that none sees another"
    )


class TrainerSettings(Section):
    """The drafter side."""

    ranks: PositiveInt = Field(default=1, description="Trainer ranks")
    devices: list[DeviceName] = Field(
        default_factory=list,
        description="Device of each rank; a GPU takes one. Default: the GPUs after the workers', else cpu",
    )
    threads: NonNegativeInt = Field(default=0, description="CPU threads of a rank; 0 leaves torch's default")
    dtype: Dtype = Field(
        default="bfloat16", description="Compute dtype of the drafter; masters and optimiser are float32"
    )
    fp8: bool = Field(
        default=False,
        description="The drafter's forward and input-gradient matmuls and both of the frozen head's in fp8, on GPUs "
        "that have it; weight gradients and an evaluation's logits stay in dtype",
    )
    batches_per_step: PositiveInt = Field(
        default=1, description="Whole batches in an optimiser step, over all ranks (G)"
    )
    micro_tokens: PositiveInt = Field(
        default=8192, description="Most context tokens in a micro-batch (one row at least)"
    )
    epochs: PositiveInt = Field(default=6, description="Passes over the data")
    max_steps: PositiveInt | None = Field(default=None, description="Stop after so many steps")
    max_tokens: PositiveInt | None = Field(
        default=None, description="Stop after the step that reaches so many context tokens"
    )
    max_hours: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Stop, with a checkpoint, after so many hours of this run's training time"
    )
    seed: NonNegativeInt = Field(default=0, description="Seed of packing, anchors and initial weights")
    skip_limit: PositiveInt = Field(
        default=5, description="Stop the run after so many skipped steps or refused records in a row"
    )
    hang_seconds: Annotated[float, Field(gt=0)] = Field(
        default=600, description="A rank without progress for so long, with work at hand, ends the trainer"
    )


class DrafterSettings(Section):
    """The DFlash drafter."""

    layers: PositiveInt = Field(default=5, description="Draft layers")
    block_size: Annotated[int, Field(ge=2)] = Field(default=16, description="Slots in a block, the anchor included (B)")
    mask_token_id: NonNegativeInt | None = Field(
        default=None,
        description="Row of the target's embedding that marks a masked slot; a token that data never uses",
    )
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"] = Field(
        default="silu", description="Activation of the draft layers; engines are tried with silu alone"
    )
    intermediate_size: PositiveInt | None = Field(
        default=None, description="MLP width; default: the target's, in a mixture what a token passes"
    )
    sliding_window: PositiveInt | None = Field(
        default=None,
        description="Window of the layers that slide, which are causal inside the block, as engines serve them",
    )
    sliding_layers: list[NonNegativeInt] | None = Field(
        default=None, description="Draft layers that slide. Default with a window: all"
    )
    init_from: str = Field(
        default="random",
        description='What the drafter starts from: "random"; "target", layers of equal shape of the target; or another '
        "drafter: folder or hub id of one in z-lab's or speculators' format, or a checkpoint of another run",
    )

    @field_validator("init_from")
    @classmethod
    def _known_start(cls, value: str) -> str:
        if value not in INIT_KINDS and "/" not in value:
            raise ValueError(f'drafter.init_from = "{value}": must be "random", "target", or a folder or hub id')
        return value

    @model_validator(mode="after")
    def _sliding(self) -> "DrafterSettings":
        if self.sliding_layers is not None and self.sliding_window is None:
            raise ValueError("sliding_layers needs sliding_window")
        if any(layer >= self.layers for layer in self.sliding_layers or ()):
            raise ValueError(f"sliding_layers {self.sliding_layers} must be below layers ({self.layers})")
        return self

    @property
    def needs_mask_token(self) -> bool:
        """Whether mask_token_id is missing; a drafter to start from brings its own."""
        return self.mask_token_id is None and self.init_from in INIT_KINDS

    @property
    def slides(self) -> tuple[bool, ...]:
        """Whether each draft layer slides."""
        if self.sliding_window is None:
            return (False,) * self.layers
        chosen = range(self.layers) if self.sliding_layers is None else self.sliding_layers
        return tuple(layer in chosen for layer in range(self.layers))


Weight = Annotated[float, Field(ge=0)]
TARGET_TERMS = ("kl", "tv", "lk", "lk_hybrid")


class ObjectiveSettings(Section):
    """Anchors and loss."""

    anchors_per_token: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.25, description="Anchors drawn per supervised token of a row"
    )
    max_anchors: PositiveInt = Field(default=512, description="Most anchors drawn in a row")
    gamma: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Decay of slot weights, exp(-(k-1)/gamma). Default: 7, 5, 4 for block sizes 16, 10, 8",
    )
    ce: Weight = Field(default=1.0, description="Weight of the cross-entropy with the recorded token")
    kl: Weight = Field(default=0.0, description="Weight of KL(target, drafter); needs target.last_hidden")
    tv: Weight = Field(default=0.0, description="Weight of the total variation; needs target.last_hidden")
    lk: Weight = Field(default=0.0, description="Weight of -log of the overlap (LK); needs target.last_hidden")
    lk_hybrid: Weight = Field(
        default=0.0, description="Weight of LK's blend of kl and tv by the overlap; needs target.last_hidden"
    )
    weighting: Literal["decay", "dpace"] = Field(
        default="decay", description="Slots weigh by gamma's decay, or by how many acceptances hang on them (D-PACE)"
    )
    dpace_alpha: Annotated[float, Field(ge=0, le=1)] = Field(default=0.5, description="D-PACE's smoothing")
    confidence: Weight = Field(default=0.0, description="Weight of the entropy of slots that are right already (CAP)")
    first_error: Weight = Field(
        default=0.0, description="Weight of an extra cross-entropy at each block's first wrong slot"
    )
    noise: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Uniform noise on the features in training, falling from this to 0 over the run"
    )

    @model_validator(mode="after")
    def _some_loss(self) -> "ObjectiveSettings":
        if not (self.ce or self.target_terms):
            raise ValueError(f"give one of ce, {', '.join(TARGET_TERMS)} a positive weight")
        return self

    @property
    def target_terms(self) -> list[str]:
        """Terms in use that need the target's own distribution, and its last hidden state in the records."""
        return [term for term in TARGET_TERMS if getattr(self, term)]


class OptimizerSettings(Section):
    """AdamW or Muon on float32 masters."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw", description="The optimiser; muon is for the matrices, with AdamW for the norms' weights"
    )
    lr: Annotated[float, Field(gt=0)] = Field(default=6e-4, description="Peak learning rate")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="AdamW's first beta")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="AdamW's second beta")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="Muon's momentum")
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="Decoupled weight decay")
    clip: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Largest gradient norm")
    schedule: Literal["cosine", "wsd", "constant"] = Field(default="cosine", description="Learning-rate schedule")
    warmup: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.04, description="Share of the steps that warm up")
    decay: Annotated[float, Field(gt=0, le=1)] = Field(default=0.2, description="Share of the steps that decay (wsd)")
    final_lr: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Last learning rate as a share of the peak"
    )


class CheckpointSettings(Section):
    """When checkpoints are written and which are kept."""

    every_steps: PositiveInt | None = Field(default=500, description="Steps between checkpoints")
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(default=30, description="Minutes between checkpoints")
    keep_last: PositiveInt = Field(default=3, description="Newest checkpoints kept")
    keep_best: bool = Field(default=True, description="Also keep the one with the best tau_chain on the held-out rows")


class EvaluationSettings(Section):
    """tau and tau_chain on the held-out rows, through the same stream."""

    every_steps: NonNegativeInt = Field(default=500, description="Steps between evaluations; 0 turns them off")
    at_end: bool = Field(default=True, description="Evaluate after the last step")


class LoggingSettings(Section):
    """What the trainer reports. JSONL metrics are always written."""

    log_every: PositiveInt = Field(default=10, description="Steps between log lines")
    tensorboard: bool = Field(default=False, description="Write TensorBoard event files under the output folder")
    wandb: str | None = Field(default=None, description="Weights & Biases project to log to")


class RunFile(Section):
    """One training job."""

    name: Annotated[str, Field(pattern=NAME)] = Field(
        description="The run's name, in paths and units: lower-case letters, digits, - and _"
    )
    output: PathName = Field(description="Folder of checkpoints, metrics and logs")
    target: TargetSettings
    data: DataSettings
    stream: StreamSettings = StreamSettings()
    workers: WorkerSettings = WorkerSettings()
    trainer: TrainerSettings = TrainerSettings()
    drafter: DrafterSettings = DrafterSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    logging: LoggingSettings = LoggingSettings()

    @property
    def record_dtype(self) -> str:
        """The dtype of the states in this run's records, by its name in record.py."""
        return "float8_e4m3fn" if self.stream.payload == "fp8" else self.target.dtype

    @model_validator(mode="after")
    def _data_source(self) -> "RunFile":
        if bool(self.data.files) == bool(self.data.rows):
            raise ValueError("data: give exactly one of data.files and data.rows")
        if self.data.max_length > self.stream.token_budget:
            budget, longest = self.stream.token_budget, self.data.max_length
            raise ValueError(f"stream.token_budget ({budget}) is less than data.max_length ({longest})")
        if self.target.fp8 and self.workers.gpus_per_worker > 1:
            raise ValueError("target.fp8 and workers.gpus_per_worker above 1 do not go together")
        if self.optimizer.schedule == "wsd" and self.optimizer.warmup + self.optimizer.decay > 1:
            raise ValueError("optimizer.warmup and optimizer.decay together are more than the whole run")
        if (terms := self.objective.target_terms) and not self.target.last_hidden:
            used = " and ".join(f"objective.{term}" for term in terms)
            raise ValueError(f"{used} needs target.last_hidden = true, so that records hold it")
        return self


def _optional(field: FieldInfo) -> bool:
    return type(None) in typing.get_args(field.annotation)


def _sections() -> dict[str, type[Section]]:
    """The run file's tables by name, in order."""
    fields = RunFile.model_fields.items()
    return {n: f.annotation for n, f in fields if isinstance(f.annotation, type) and issubclass(f.annotation, Section)}


def _table_model(field: FieldInfo) -> type[Section] | None:
    """What a list of tables holds; None if the field is none."""
    for item in typing.get_args(field.annotation) if typing.get_origin(field.annotation) is list else ():
        if isinstance(item, type) and issubclass(item, Section):
            return item
    return None


def keys() -> list[str]:
    """Every key of a run file, dotted, in order."""
    sections = _sections()
    found = [name for name in RunFile.model_fields if name not in sections]
    for section, model in sections.items():
        for name, field in model.model_fields.items():
            found.append(f"{section}.{name}")
            if table := _table_model(field):
                found += [f"{section}.{name}.{key}" for key in table.model_fields]
    return found


# Loading


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Reads and validates a run file.

    `overrides` are `key=value` texts with dotted keys; a value is TOML, or else a bare string. Relative paths in the
    file are relative to the file's folder, in an override to the current one. All paths of the result are absolute.

    Raises:
        ConfigError: the file is missing, no TOML, or has an unknown key or bad value; names file, line and key.
        UsageError: an override is not of the form key=value.
    """
    return parse(_read(Path(path)), Path(path), overrides)


def parse(text: str, path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """`load` of a text that stands, or is to stand, in file `path`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else str(path)
        raise ConfigError(f"{where}: not TOML: {str(error).partition(' (at ')[0]}") from None
    _absolute(values, path.absolute().parent)
    given = dict(_parse_override(text) for text in overrides)
    for key, value in given.items():
        _put(values, key, value.parsed, Path.cwd())
    lines = _key_lines(text)
    while True:
        try:
            return RunFile.model_validate(values)
        except ValidationError as error:
            # `--set name=7` means the text "7" where a text is wanted; only the model knows where that is.
            retry = [_dotted(e["loc"]) for e in error.errors() if e["type"] == "string_type"]
            retry = [key for key in retry if key in given and not isinstance(given[key].parsed, str)]
            if not retry:
                raise ConfigError(_explain(error, path, lines, given)) from None
            for key in retry:
                given[key] = _Override(given[key].raw, given[key].raw)
                _put(values, key, given[key].raw, Path.cwd())


class _Override(typing.NamedTuple):
    raw: str
    parsed: Any


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise run_file_error(path, error) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None


def _parse_override(text: str) -> tuple[str, _Override]:
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise UsageError(f"--set {text}: give it as key=value, for example --set trainer.max_steps=100")
    try:
        parsed = tomllib.loads(f"v = {raw}")
    except tomllib.TOMLDecodeError:
        return key, _Override(raw, raw)
    return key, _Override(raw, parsed["v"] if len(parsed) == 1 else raw)


def _put(values: dict[str, Any], key: str, value: Any, folder: Path) -> None:
    """Sets a dotted key in place, its path made absolute."""
    change: Any = value
    for name in reversed(key.split(".")):
        change = {name: change}
    _absolute(change, folder)
    _merge(values, change)


def _merge(values: dict[str, Any], change: dict[str, Any]) -> None:
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def _absolute(values: dict[str, Any], folder: Path) -> None:
    """Makes the paths among `values` absolute, relative ones from `folder`. Leaves hub ids and wrong types alone."""

    def place(text: Any) -> Any:
        named = isinstance(text, str) and text.strip() and text != NONE  # an empty one is refused, not the folder
        return str(folder / Path(text).expanduser()) if named else text

    if "output" in values:
        values["output"] = place(values["output"])
    data, target, stream, drafter = (values.get(name) for name in ("data", "target", "stream", "drafter"))
    if isinstance(data, dict):
        if isinstance(data.get("files"), list):
            data["files"] = [
                {**file, "path": place(file["path"])} if isinstance(file, dict) and "path" in file else place(file)
                for file in data["files"]
            ]
        if "rows" in data:
            data["rows"] = place(data["rows"])
    if isinstance(stream, dict):
        stream |= {name: place(stream[name]) for name in ("ring_dir", "record_to") if name in stream}
    if isinstance(target, dict) and isinstance(target.get("path"), str):
        path = target["path"]
        if path.startswith(("./", "../", "~")) or path.endswith(".gguf") or (folder / path).exists():
            target["path"] = place(path)
    start = drafter.get("init_from") if isinstance(drafter, dict) else None
    if isinstance(drafter, dict) and isinstance(start, str) and start not in INIT_KINDS:
        named = start.startswith(("./", "../", "~")) or start.endswith(("/best", "/newest"))
        alone = "/" not in start and not difflib.get_close_matches(start, INIT_KINDS, 1, 0.75)  # else a slip of the pen
        drafter["init_from"] = place(start) if named or alone or (folder / start).exists() else start


# Errors


def _dotted(location: tuple[str | int, ...]) -> str:
    return ".".join(part for part in location if isinstance(part, str))


def _key_lines(text: str) -> dict[str, int]:
    """The line of each dotted key and table header: for messages only, so line by line is enough."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), 1):
        if header := re.match(r"\s*\[{1,2}\s*([\w.\s-]+?)\s*\]", line):
            table = re.sub(r"\s", "", header[1])
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w-]+(?:\s*\.\s*[\w-]+)*)\s*=", line):
            name = re.sub(r"\s", "", key[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def _where(key: str, path: Path, lines: dict[str, int], given: Mapping[str, _Override]) -> str:
    if any(key == name or name.startswith(key + ".") for name in given):
        return "--set"
    while key:
        if key in lines:
            return f"{path}:{lines[key]}"
        key = key.rpartition(".")[0]
    return str(path)


def suggest(key: str) -> str:
    """The known key most like `key`, as a phrase to append to a message; empty if none is near."""
    known = [*keys(), *_sections()]
    tail = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == tail]  # the right key in the wrong table
    near = difflib.get_close_matches(key, same, 1, 0.0) or difflib.get_close_matches(key, known, 1, 0.75)
    if not near:
        tails = difflib.get_close_matches(tail, [name.rpartition(".")[2] for name in known], 1, 0.75)
        near = [name for name in known if name.rpartition(".")[2] in tails]
    return f"; did you mean {near[0]}?" if near else ""


def _explain(error: ValidationError, path: Path, lines: dict[str, int], given: Mapping[str, _Override]) -> str:
    """One line for a failed validation: where, what, what to do; the first fault, and how many others there are."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    key = _dotted(fault["loc"])
    where = _where(key, path, lines, given)
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    match fault["type"]:
        case "extra_forbidden":
            text = f"unknown key {key}{suggest(key)}"
        case "missing":
            text = f"{key} is missing"
        case "value_error":
            text = message
        case "string_pattern_mismatch" if not fault["input"].strip():
            text = f"{key} = {json.dumps(fault['input'])}: must not be empty"
        case "string_pattern_mismatch":
            text = f"{key} = {json.dumps(fault['input'])}: must be {_PATTERNS[fault.get('ctx', {})['pattern']]}"
        case "list_type":
            value = json.dumps(fault["input"], default=str)
            text = f"{key} = {value}: must be a list, such as [{value}]"
        case "model_type" | "model_attributes_type" if isinstance(fault["loc"][-1], int):
            text = f"{key} has {json.dumps(fault['input'], default=str)}: must be a text or a table"
        case "model_type" | "model_attributes_type":
            text = f"{key} must be a table, [{key}]"
        case _:
            text = f"{key} = {json.dumps(fault['input'], default=str)}: must be {message}"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{where}: {text}{more}"


# Writing


def toml_value(value: Any) -> str:
    """A text, number, boolean, data file or list of them as TOML writes it."""
    if isinstance(value, DataFile):
        path, weight = toml_value(value.path), toml_value(value.weight)
        return path if value.weight == 1 else f"{{path = {path}, weight = {weight}}}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)


def _toml_lines(section: Section) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            continue
        if value is not None:
            yield f"{name} = {toml_value(value)}"
        elif field.default is not None:
            yield f'{name} = "{NONE}"'


def to_toml(run: RunFile) -> str:
    """The run with every setting resolved; `load()` of it gives an equal run."""
    blocks = ["\n".join(_toml_lines(run))]
    for name in _sections():
        if lines := list(_toml_lines(getattr(run, name))):
            blocks.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(blocks) + "\n"


# The key reference


def _type_name(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type as a reader of the reference should see it: `whole number > 0`, `"a" or "b"`, `list of texts`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        extra = [m for item in arguments[1:] for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _type_name(arguments[0], extra)
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin in (Union, types.UnionType):
        kinds = [_type_name(kind, metadata) for kind in arguments if kind is not type(None)]
        return " or ".join(kinds) + (f' or "{NONE}"' if type(None) in arguments else "")
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "text or table"
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [f"{signs[k]} {getattr(m, k):g}" for m in metadata for k in signs if getattr(m, k, None) is not None]
    name = {bool: "true or false", int: "whole number", float: "number", str: "text"}[annotation]
    return f"{name} {', '.join(bounds)}" if bounds else name


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{toml_value(value)}`"


def _reference_table(model: type[Section], prefix: str) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section)):
            kind = _type_name(field.annotation, field.metadata).replace("|", "\\|")
            yield f"| `{prefix}{name}` | {kind} | {_default_text(field)} | {field.description} |"


def reference_markdown() -> str:
    """The text of docs/runfile.md."""
    lines = [
        "# The run file",
        "",
        "<!-- Generated by `make reference` from common/runfile.py. -->",
        "",
        "A run file is TOML. Every key can be given on the command line as `--set key=value`, with the dotted name",
        "below; the value is TOML, or else a plain text. Relative paths in the file are relative to its folder, in",
        f'`--set` to the current one. `"{NONE}"` turns off a setting that has a default. `paceline init` writes a',
        "commented file to start from.",
        "",
        *_reference_table(RunFile, ""),
    ]
    for name, model in _sections().items():
        lines += ["", f"## [{name}]", "", (model.__doc__ or "").strip(), "", *_reference_table(model, f"{name}.")]
        for key, field in model.model_fields.items():
            if table := _table_model(field):
                what = (table.__doc__ or "").strip()
                lines += ["", f"### [[{name}.{key}]]", "", what, "", *_reference_table(table, f"{name}.{key}.")]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference_markdown(), end="")
