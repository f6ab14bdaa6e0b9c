"""The exactly-once proof: what a checkpoint says is done, against the plan rebuilt from the prepared rows.

    trained and listed are disjoint, each batch in one of them at most once     (the ledger's format, read strictly)
    every one of them is of the plan
    nothing is missing before the front: earlier epochs are complete, and the epoch under way holds exactly the
    records of the steps done (in strict order: the first ones)

Then for every schedule of kills that led here, trained ∪ listed is what the steps done must hold, and the rest is still
to come. Reads a checkpoint's state.json and the rows; imports no torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..common.batch import BatchId
from ..common.dataset import prepared_rows
from ..common.errors import ConfigError
from ..common.plan import Plan, plan_from
from ..common.rows import Rows
from ..common.runfile import RunFile
from .checkpoint import load_state, whole_checkpoint
from .ledger import Ledger, LedgerInvalid

_SHOWN = 12  # listed batches on the screen; `--json` has all


@dataclass(frozen=True)
class ListedBatch:
    """A batch that was left out of training, and why. `rows` are indices of the prepared rows."""

    batch: str
    rows: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class AuditReport:
    """`problems` is empty in a clean audit. Batches are counted over the whole run."""

    checkpoint: str
    run: str
    step: int
    total_steps: int
    planned: int
    trained: int
    listed: tuple[ListedBatch, ...]
    problems: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.problems

    @property
    def remaining(self) -> int:
        return self.planned - self.trained - len(self.listed)

    @property
    def finished(self) -> bool:
        return self.clean and self.remaining == 0

    def to_json(self) -> dict[str, Any]:
        listed = [{"batch": one.batch, "rows": list(one.rows), "reason": one.reason} for one in self.listed]
        return {
            "checkpoint": self.checkpoint,
            "run": self.run,
            "step": self.step,
            "total_steps": self.total_steps,
            "planned": self.planned,
            "trained": self.trained,
            "listed": listed,
            "remaining": self.remaining,
            "problems": list(self.problems),
            "clean": self.clean,
            "finished": self.finished,
        }

    def json(self) -> str:
        return json.dumps(self.to_json())

    def text(self) -> str:
        """One screen."""
        lines = [
            f"checkpoint  {self.checkpoint}",
            f"run         {self.run}, step {self.step} of {self.total_steps}",
            f"batches     {self.planned} planned = {self.trained} trained + {len(self.listed)} listed "
            f"+ {self.remaining} to come",
        ]
        for one in self.listed[:_SHOWN]:
            rows = ", ".join(map(str, one.rows[:8])) + (f" and {len(one.rows) - 8} more" if len(one.rows) > 8 else "")
            lines.append(f"  listed    {one.batch} (rows {rows}): {one.reason}")
        if len(self.listed) > _SHOWN:
            lines.append(f"  and {len(self.listed) - _SHOWN} more (--json names all)")
        lines += [f"PROBLEM     {problem}" for problem in self.problems]
        verdict = "every batch is trained once, listed, or still to come" if self.clean else "not exactly once"
        lines.append(f"{'clean' if self.clean else 'NOT CLEAN'}: {verdict}")
        return "\n".join(lines)


def audit(checkpoint: str | Path, rows: Rows | None = None) -> AuditReport:
    """Audit a checkpoint folder; `rows` are the run's prepared rows, else found as its run file says.

    Raises:
        ConfigError: there is no complete checkpoint, or one of another version; the prepared rows are not there any
            more, or are others.
    """
    path = whole_checkpoint(Path(checkpoint))
    state = load_state(path)
    run = _run_file(path, state.run)
    rows = rows if rows is not None else _rows_of(run)
    _check_dataset(path, rows, state.fingerprint)
    plan = plan_from(run, rows)
    try:
        ledger = Ledger.from_json(state.ledger)
        problems = check_ledger(ledger, plan, state.step, strict=run.stream.order == "strict")
    except LedgerInvalid as error:
        ledger, problems = Ledger(), [str(error)]
    if state.phase is None and state.step == plan.total_steps and not ledger.complete(plan):
        problems.append("the run is marked finished, but batches of its plan are neither trained nor listed")
    return AuditReport(
        checkpoint=str(path),
        run=state.name,
        step=state.step,
        total_steps=plan.total_steps,
        planned=plan.total_batches,
        trained=ledger.trained_count(),
        listed=tuple(_listed(batch, reason, plan) for batch, reason in ledger.listed.items()),
        problems=tuple(problems),
    )


def _run_file(path: Path, fields: dict[str, Any]) -> RunFile:
    try:
        return RunFile.model_validate(fields)
    except ValidationError:
        raise ConfigError(f"{path}: its run file is of another version of paceline: audit it with that one") from None


def _rows_of(run: RunFile) -> Rows:
    """The rows alone: no tokenizer is asked whether it is still the same."""
    return Rows.open(run.data.rows) if run.data.rows is not None else prepared_rows(run)


def _check_dataset(path: Path, rows: Rows, fingerprint: dict[str, str | int]) -> None:
    wanted = fingerprint.get("dataset")
    if wanted != rows.digest:
        raise ConfigError(f"{path} was trained on other rows than {rows.folder} (digest {wanted}, not {rows.digest})")


def check_ledger(ledger: Ledger, plan: Plan, step: int, *, strict: bool) -> list[str]:
    """What is wrong with a ledger after `step` steps of `plan`; [] if nothing is."""
    if not 0 <= step <= plan.total_steps:
        return [f"{step} steps are done, the plan has {plan.total_steps}"]
    problems: list[str] = []
    strangers = [b for b in ledger.listed if b not in plan]
    epochs = sorted({*ledger.trained_epochs(), *(b.number for b in ledger.listed), *range(plan.epochs)})
    for epoch in epochs:
        if epoch >= plan.epochs:
            strangers += ledger.trained_ids(epoch)
            continue
        problems += _check_epoch(ledger, plan, step, epoch, strict)
    if strangers:
        problems.append(f"not of the plan: {_names(strangers)}")
    return problems


def _check_epoch(ledger: Ledger, plan: Plan, step: int, epoch: int, strict: bool) -> list[str]:
    """An epoch before the front is whole, one after it untouched; the one under way holds its steps' records."""
    batches, done = plan.batches(epoch), ledger.done_count(epoch)
    undone = list(ledger.undone(epoch, batches))
    outside = done - (batches - len(undone))
    if outside:
        return [f"epoch {epoch}: {outside} batches that are done are not among its {batches}"]
    steps = min(max(step - plan.first_step(epoch), 0), plan.first_step(epoch + 1) - plan.first_step(epoch))
    wanted = min(batches, steps * plan.batches_per_step)
    if done != wanted:
        few = [f"{index}" for index in undone[:8]]
        missing = f"; undone: {', '.join(few)}{', ...' if len(undone) > 8 else ''}" if undone else ""
        return [f"epoch {epoch}: {done} batches are done, {steps} of its steps hold {wanted}{missing}"]
    if strict and undone and undone[0] != done:
        return [f"epoch {epoch}: batch {undone[0]} is not done, though {done} are, in strict order"]
    return []


def _listed(batch: BatchId, reason: str, plan: Plan) -> ListedBatch:
    rows = tuple(plan.indices(batch).tolist()) if batch in plan else ()
    return ListedBatch(str(batch), rows, reason)


def _names(batches: list[BatchId]) -> str:
    return ", ".join(map(str, batches[:8])) + (f" and {len(batches) - 8} more" if len(batches) > 8 else "")
