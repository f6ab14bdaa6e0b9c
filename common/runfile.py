"""The run file: every setting of a training job, typed and validated once, then passed down as values.

`load()` reads TOML, applies `--set key=value` overrides, and refuses unknown keys with a suggestion. The key
reference in docs/runfile.md is generated from the field descriptions below (`python -m paceline.common.runfile`).
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16", "float16"]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSettings(Section):
    """The frozen target model."""

    path: str = Field(description="Local folder, GGUF file or hub id of a causal language model")
    dtype: Dtype = Field("bfloat16", description="Compute dtype of the target and dtype of the recorded states")
    layer_ids: list[NonNegativeInt] | None = Field(
        None,
        description="Decoder layers whose outputs are recorded, counted from 0. Default: spread evenly over the "
        "target, one per draft layer",
    )
    last_hidden: bool = Field(False, description="Also record the last layer's output (soft-label objectives need it)")
    trust_remote_code: bool = Field(False, description="Let transformers run code that comes with the model")


class DataSettings(Section):
    """The conversations to train on. Exactly one of `files` and `rows`."""

    files: list[str] = Field(
        default_factory=list,
        description="Chat files (.jsonl, .jsonl.gz, .parquet); prepared into the cache on first use",
    )
    rows: str | None = Field(None, description="Folder written by `paceline prepare --out`")
    max_length: PositiveInt = Field(3072, description="Longest row in tokens; longer ones are cut")
    supervise: Literal["all", "last"] = Field(
        "all", description="Which assistant turns are supervised: every one, or the last only"
    )
    held_out: NonNegativeInt = Field(64, description="Rows set aside for evaluation, drawn by seed, never trained on")


class StreamSettings(Section):
    """Batches, rings and the order of work."""

    token_budget: PositiveInt = Field(16384, description="Most tokens in a batch (and in a record)")
    packer: Literal["first-fit", "sequential"] = Field(
        "first-fit",
        description="How rows are packed into batches: first-fit over shuffled rows, or one after another",
    )
    order: Literal["arrival", "strict"] = Field(
        "arrival",
        description="arrival: train records as they come, within an epoch. strict: in plan order, so the same "
        "run file gives the same weights whatever the number of workers and kills",
    )
    slots: PositiveInt = Field(4, description="Slots in each worker's ring")
    prefetch: PositiveInt = Field(4, description="Tokenised batches each worker holds ready (q_pre)")
    ring_dir: str = Field("/dev/shm/paceline", description="Where the runs' ring folders are")


class WorkerSettings(Section):
    """The target side."""

    count: PositiveInt = Field(1, description="Target workers")
    devices: list[str] = Field(
        default_factory=list,
        description='Device of each worker ("cuda:0", "cpu"), repeated in turn. Default: GPUs in order, else cpu',
    )
    threads: NonNegativeInt = Field(0, description="CPU threads of a worker; 0 leaves torch's default")
    pack: Literal["auto", "never"] = Field(
        "auto", description="auto: pack rows when the start-up self-check proves that none sees another"
    )


class TrainerSettings(Section):
    """The drafter side."""

    ranks: PositiveInt = Field(1, description="Trainer ranks")
    devices: list[str] = Field(
        default_factory=list,
        description="Device of each rank, repeated in turn. Default: the GPUs after the workers', else cpu",
    )
    threads: NonNegativeInt = Field(0, description="CPU threads of a rank; 0 leaves torch's default")
    dtype: Dtype = Field("bfloat16", description="Compute dtype of the drafter; masters and optimiser are float32")
    batches_per_step: PositiveInt = Field(1, description="Whole batches in an optimiser step, over all ranks (G)")
    micro_tokens: PositiveInt = Field(8192, description="Most context tokens in a micro-batch (one row at least)")
    epochs: PositiveInt = Field(6, description="Passes over the data")
    max_steps: PositiveInt | None = Field(None, description="Stop after so many steps")
    max_tokens: PositiveInt | None = Field(None, description="Stop after the step that reaches so many context tokens")
    max_hours: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Stop, with a checkpoint, after so many hours of this run's training time"
    )
    seed: NonNegativeInt = Field(0, description="Seed of packing, anchors and initial weights")
    skip_limit: PositiveInt = Field(
        5, description="Stop the run after so many skipped steps or refused records in a row"
    )
    hang_seconds: Annotated[float, Field(gt=0)] = Field(
        600, description="A rank without progress for so long, with work at hand, ends the trainer"
    )


class DrafterSettings(Section):
    """The DFlash drafter."""

    layers: PositiveInt = Field(5, description="Draft layers")
    block_size: Annotated[int, Field(ge=2)] = Field(16, description="Slots in a block, the anchor included (B)")
    mask_token_id: NonNegativeInt | None = Field(
        None,
        description="Row of the target's embedding that marks a masked slot; a token that data never uses",
    )
    hidden_act: str = Field("silu", description="Activation of the draft layers")
    intermediate_size: PositiveInt | None = Field(None, description="MLP width; default: the target's")
    init_from: Literal["random", "target"] = Field(
        "random", description="Draft layers start at random, or from target layers of equal shape"
    )


class ObjectiveSettings(Section):
    """Anchors and loss."""

    anchors_per_token: Annotated[float, Field(gt=0, le=1)] = Field(
        0.25, description="Anchors drawn per supervised token of a row"
    )
    max_anchors: PositiveInt = Field(512, description="Most anchors drawn in a row")
    gamma: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Decay of slot weights, exp(-(k-1)/gamma). Default: 7, 5, 4 for block sizes 16, 10, 8",
    )


class OptimizerSettings(Section):
    """AdamW on float32 masters."""

    lr: Annotated[float, Field(gt=0)] = Field(6e-4, description="Peak learning rate")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW's first beta")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="AdamW's second beta")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Decoupled weight decay")
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="Largest gradient norm")
    schedule: Literal["cosine", "wsd", "constant"] = Field("cosine", description="Learning-rate schedule")
    warmup: Annotated[float, Field(ge=0, lt=1)] = Field(0.04, description="Share of the steps that warm up")
    decay: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="Share of the steps that decay (wsd)")
    final_lr: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="Last learning rate as a share of the peak")


class CheckpointSettings(Section):
    """When checkpoints are written and which are kept."""

    every_steps: PositiveInt | None = Field(500, description="Steps between checkpoints")
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(30, description="Minutes between checkpoints")
    keep_last: PositiveInt = Field(3, description="Newest checkpoints kept")
    keep_best: bool = Field(True, description="Also keep the one with the best tau_chain on the held-out rows")


class EvaluationSettings(Section):
    """tau and tau_chain on the held-out rows, through the same stream."""

    every_steps: NonNegativeInt = Field(500, description="Steps between evaluations; 0 turns them off")
    at_end: bool = Field(True, description="Evaluate after the last step")


class LoggingSettings(Section):
    """What the trainer reports. JSONL metrics are always written."""

    log_every: PositiveInt = Field(10, description="Steps between log lines")
    tensorboard: bool = Field(False, description="Write TensorBoard event files under the output folder")
    wandb: str | None = Field(None, description="Weights & Biases project to log to")


class RunFile(Section):
    """One training job."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,47}$")] = Field(
        description="The run's name, in paths and units: lower-case letters, digits, - and _"
    )
    output: str = Field(description="Folder of checkpoints, metrics and logs")
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

    @model_validator(mode="after")
    def _data_source(self) -> "RunFile":
        if bool(self.data.files) == bool(self.data.rows):
            raise ValueError("data: give exactly one of data.files and data.rows")
        if self.data.max_length > self.stream.token_budget:
            budget, longest = self.stream.token_budget, self.data.max_length
            raise ValueError(f"stream.token_budget ({budget}) is less than data.max_length ({longest})")
        return self
