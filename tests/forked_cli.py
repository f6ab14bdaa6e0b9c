"""`paceline producer` and `paceline consumer` with the real target and drafter, each process forked (forking.py).

What a command, its worker, trainer and ranks import is imported here already. The trainer looks at data and target in
its own process. Fresh processes of the same commands are the demo's test's, and that on a real systemd.
"""

import os

import torch.distributed
import transformers.models.llama.modeling_llama  # noqa: F401  (they are imported for the processes)
from forking import fork_ranks_from_here, serve
from paceline.common import cli
from paceline.common.faults import VARIABLE
from paceline.consumer import rank, trainer
from paceline.consumer.describe import describe
from paceline.producer import worker  # noqa: F401


def command(*arguments: str) -> int:
    """Both a trainer and its ranks die at the point that the environment says, as in fresh processes."""
    fork_ranks_from_here(rank.main, lambda number: os.environ.get(VARIABLE, ""))
    assert trainer.main.__kwdefaults__ is not None
    trainer.main.__kwdefaults__["describe"] = lambda run, alive: describe(run)
    return cli.main(list(arguments))


if __name__ == "__main__":
    assert not torch.cuda.is_initialized()
    serve({"command": command})
