"""Named points at which a test kills the process, to prove that what is left behind can be picked up.

`PACELINE_FAULT=name` makes the first arrival at point `name` end in SIGKILL; `name:3` the third. A name that is not in
`POINTS` is a ConfigError at start. Unset, a point costs one comparison. A process that dies at a point says so on
standard error first, so that a test can tell its death from any other.
"""

import difflib
import os
import signal
from typing import NamedTuple

from .errors import ConfigError

VARIABLE = "PACELINE_FAULT"


class Point(NamedTuple):
    """`sides`: which processes reach it, of worker, trainer (the main process with the feed), rank, prepare."""

    sides: tuple[str, ...]
    what: str


_WORKER, _TRAINER, _RANK, _PREPARE = ("worker",), ("trainer",), ("rank",), ("prepare",)

POINTS: dict[str, Point] = {
    # Files that both sides use
    "lock.taken": Point(("trainer", "rank", "prepare"), "a lock file is locked, its holder's name is not written yet"),
    "rows.half-written": Point(_PREPARE, "prepared rows are in the scratch folder, their meta.json is not"),
    "rows.before-rename": Point(_PREPARE, "prepared rows are complete under the scratch folder's name"),
    "rows.between-renames": Point(_PREPARE, "the earlier rows have stepped aside, the new ones are not in place"),
    "rows.renamed": Point(_PREPARE, "prepared rows are in place, the earlier ones are not removed"),
    # The ring, by its owner
    "ring.lock-taken": Point(_WORKER, "the lock of an existing ring is held, nothing is written yet"),
    "ring.adopted": Point(_WORKER, "the new incarnation is written, half-written slots are not given back"),
    "ring.temporary": Point(_WORKER, "a new ring's temporary file is there, empty and locked"),
    "ring.allocated": Point(_WORKER, "a new ring's bytes are reserved, its header is not written"),
    "ring.half-made": Point(_WORKER, "a new ring's header is written, its words are not"),
    "ring.before-rename": Point(_WORKER, "a new ring is complete under its temporary name"),
    "ring.renamed": Point(_WORKER, "a new ring has its name"),
    "ring.numbered": Point(_WORKER, "a sequence number is drawn, the slot does not have it yet"),
    "ring.writing": Point(_WORKER, "the slot is WRITING"),
    "ring.described": Point(_WORKER, "the record's words are written, the commit word is not"),
    "ring.committed": Point(_WORKER, "the record is READY, the count of records is not written"),
    # The ring, by its readers
    "ring.taking": Point(_RANK, "who takes the record is written, what is taken is not"),
    "ring.taken": Point(_RANK, "the record is taken"),
    "ring.released": Point(("trainer", "rank"), "the slot is free again, by its rank or by the feed"),
    "ring.removing": Point(_TRAINER, "the lock of a retired, drained ring is held, its file is there"),
    "ring.removed": Point(_TRAINER, "the file of a retired ring is gone, its lock is held"),
    # The worker
    "worker.loading": Point(_WORKER, "the ring is owned, the target is not loaded"),
    "worker.before-hello": Point(_WORKER, "connected, nothing said"),
    "worker.hello": Point(_WORKER, "hello is sent, no answer heard"),
    "worker.work-received": Point(_WORKER, "batches are in the queue, none is started"),
    "worker.filled": Point(_WORKER, "meta and states are in the slot, nothing is committed"),
    "worker.committed-not-sent": Point(_WORKER, "the record is committed, ready is not sent"),
    "worker.sent": Point(_WORKER, "ready is sent, want is not"),
    "worker.told-to-stop": Point(_WORKER, "told that the run is finished; everything is still open"),
    "worker.closed-not-told": Point(_WORKER, "the ring's lock is released, bye is not sent"),
    "worker.bye": Point(_WORKER, "bye is sent"),
    # The feed
    "feed.before-bind": Point(_TRAINER, "a dead trainer's sockets are removed, this one's are not bound"),
    "feed.bound": Point(_TRAINER, "both sockets are bound, the thread does not run"),
    "feed.hello-heard": Point(_TRAINER, "a worker's hello is heard, no work is sent"),
    "feed.assigned-not-sent": Point(_TRAINER, "a batch is assigned, its work is not sent"),
    "feed.work-sent": Point(_TRAINER, "work is sent"),
    "feed.given-not-sent": Point(_TRAINER, "a record is given to a rank, take is not sent"),
    "feed.given": Point(_TRAINER, "take is sent"),
    "feed.refusal-heard": Point(_TRAINER, "a rank's refusal is noted"),
    "feed.exhausted-not-sent": Point(_TRAINER, "a phase has no more records for a rank, which is not told"),
    "feed.done-heard": Point(_TRAINER, "a phase is reported as done, the ledger is as before"),
    "feed.done-recorded": Point(_TRAINER, "the feed's ledger has the phase"),
    "feed.finished-not-told": Point(_TRAINER, "every phase is done, workers are not told"),
    "feed.finished-told": Point(_TRAINER, "a worker is told that the run is finished"),
    # The trainer's main process
    "trainer.locked": Point(_TRAINER, "consumer.lock and the output folder's lock are held"),
    "trainer.resumed": Point(_TRAINER, "checkpoint and plan are read, nothing is started"),
    "trainer.marker-removed": Point(_TRAINER, "the marker of a finished run is removed"),
    "trainer.ranks-started": Point(_TRAINER, "the ranks' processes are started"),
    "trainer.status-half-written": Point(_TRAINER, "status.json is written under its temporary name"),
    "trainer.before-finished": Point(_TRAINER, "the ranks have ended, the finished marker is not written"),
    "trainer.finished": Point(_TRAINER, "the finished marker is written"),
    # A rank
    "rank.locked": Point(_RANK, "the rank's lock is held, nothing is loaded"),
    "rank.restored": Point(_RANK, "weights, optimiser and ledger are as in the checkpoint"),
    "rank.before-hello": Point(_RANK, "connected, nothing said"),
    "rank.hello": Point(_RANK, "hello is sent"),
    "rank.asked": Point(_RANK, "a record is asked for"),
    "rank.take-received": Point(_RANK, "a record is given, not looked at"),
    "rank.refusing": Point(_RANK, "a record does not check out, its slot is not released"),
    "rank.refused": Point(_RANK, "a refused record's slot is released, the feed is not told"),
    "rank.copied-not-released": Point(_RANK, "the record is trained on, its slot is not released"),
    "rank.released-not-told": Point(_RANK, "the slot is released, the next record is not asked for"),
    "rank.collected-not-gathered": Point(_RANK, "all records of the phase are trained on, the other ranks do not know"),
    "rank.gathered-not-stepped": Point(_RANK, "all ranks know what the step holds, the weights are as before"),
    "rank.stepped-not-recorded": Point(_RANK, "the weights have moved, the ledger has not"),
    "rank.stepped-not-told": Point(_RANK, "weights and ledger have moved, feed and main process are not told"),
    "rank.told": Point(_RANK, "the feed is about to be told of the step, no checkpoint has it"),
    "rank.safe-not-told": Point(_RANK, "the last checkpoint is on disk, the feed does not know that the run is over"),
    # A checkpoint, by rank 0
    "checkpoint.begun": Point(_RANK, "the temporary folder is there, empty"),
    "checkpoint.before-manifest": Point(_RANK, "weights, optimiser and state are written and synced"),
    "checkpoint.after-manifest": Point(_RANK, "the manifest is written, the folder is not synced"),
    "checkpoint.before-rename": Point(_RANK, "the checkpoint is complete under its temporary name"),
    "checkpoint.between-renames": Point(_RANK, "what had its name has stepped aside, the new one is not in place"),
    "checkpoint.after-rename": Point(_RANK, "the checkpoint has its name"),
    "checkpoint.before-removal": Point(_RANK, "a new checkpoint is complete, no old one is removed"),
    "checkpoint.removing": Point(_RANK, "an old checkpoint has lost its name, its files are there"),
}

_name, _left = "", 0


def arm(text: str) -> None:
    """Sets where this process dies: "name", "name:n" or "" for nowhere. Raises ConfigError."""
    global _name, _left
    name, _, count = text.partition(":")
    if name and name not in POINTS:
        close = difflib.get_close_matches(name, POINTS, 1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"{VARIABLE}: there is no fault point {name!r}{guess}; there are {', '.join(POINTS)}")
    if count and not (count.isascii() and count.isdigit() and int(count)):
        raise ConfigError(f"{VARIABLE}: {text!r} is not NAME or NAME:N with N from 1")
    _name, _left = name, int(count or 1)


def point(name: str) -> None:
    """Kills this process if it was told to die here."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.write(2, f"paceline: killed at fault point {name}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get(VARIABLE, ""))
