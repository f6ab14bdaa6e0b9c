"""What the trainer must know of a run before it starts: its prepared rows, recorded layers and fingerprint.

Reading a target's config and tokenizer takes transformers, which brings torch. So the main process, which lives for
days beside its ranks, asks a process of its own (`python -m paceline.consumer.describe`) that is gone a moment later.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ..common.errors import ConfigError, PacelineError
from ..common.runfile import RunFile

_ALIVE_SECONDS = 5.0


@dataclass(frozen=True)
class RunFacts:
    """`rows`: folder of the prepared rows. `fingerprint`: its fields. `hidden_size`: of the recorded states."""

    rows: str
    fingerprint: dict[str, str | int]
    layer_ids: list[int]
    hidden_size: int


def describe(run: RunFile) -> RunFacts:
    """Prepare the rows if need be, and look at the target. Imports transformers.

    Raises:
        ConfigError: data or target do not fit the run file.
    """
    from ..common.dataset import prepared_rows
    from ..common.fingerprint import run_fingerprint
    from ..common.target_info import check_run_mask_token, no_mask_token, resolve_layer_ids, target_info

    if run.drafter.needs_mask_token:  # before all that takes time
        raise no_mask_token()
    rows = prepared_rows(run)
    info = target_info(run.target.path, run.target.trust_remote_code)
    layer_ids = list(resolve_layer_ids(run, info))
    check_run_mask_token(run, info, rows.used_token)
    fingerprint = run_fingerprint(run, rows, info, layer_ids)
    return RunFacts(str(rows.folder), dict(fingerprint.fields), layer_ids, info.hidden_size)


def describe_apart(run: RunFile, alive: Callable[[], object] = lambda: None) -> RunFacts:
    """`describe` in another process, which a signal handler that raises ends. `alive` is called every few seconds:
    preparing the rows of a large dataset takes many minutes.

    Raises:
        ConfigError, PacelineError: as it raises them.
    """
    command = [sys.executable, "-m", __spec__.name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            output = _talk(process, run.model_dump_json(), alive)
        except BaseException:
            process.kill()
            raise
    if process.returncode == ConfigError.exit_code:
        raise ConfigError(json.loads(output)["error"])
    if process.returncode:
        found = json.loads(output)["error"] if output else f"exit code {process.returncode}"
        raise PacelineError(f"the run's data and target could not be looked at: {found}")
    return RunFacts(**json.loads(output))


def _talk(process: "subprocess.Popen[str]", question: str, alive: Callable[[], object]) -> str:
    unsent: str | None = question
    while True:
        try:
            return process.communicate(unsent, timeout=_ALIVE_SECONDS)[0]
        except subprocess.TimeoutExpired:  # another call goes on where this one was
            unsent = None
            alive()


def main() -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the answer is all that may be on it
            facts = describe(RunFile.model_validate_json(sys.stdin.read()))
    except PacelineError as error:
        print(json.dumps({"error": str(error)}))
        return error.exit_code
    print(json.dumps(asdict(facts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
