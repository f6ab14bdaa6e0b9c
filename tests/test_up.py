"""The supervisor, with shell scripts in place of trainer and workers.

A script can signal the supervisor as its parent (`kill -INT $PPID`), so no test waits for a clock to do so.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from paceline.common import paths, scale
from paceline.common.errors import ConfigError, PacelineError
from paceline.common.inspect import read_rings
from paceline.common.locks import FileLock
from paceline.common.progress import PlainView
from paceline.common.runfile import RunFile, load
from paceline.common.status import run_states
from paceline.common.telemetry import write_status
from paceline.common.up import Child, Policy, Supervisor, Tail, up

QUICK = Policy(limit=3, window=60, first_pause=0.05, longest_pause=0.1, leave=5, stop=20)
FOREVER = "while :; do sleep 0.02; done"
SERVE = f"trap 'echo saved; exit 0' TERM; echo up; {FOREVER}"


@pytest.fixture
def run_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "t"\noutput = "out"\n[target]\npath = "org/m"\n[data]\nfiles = ["d.jsonl"]\n[workers]\ncount = 2\n'
        "[drafter]\nmask_token_id = 3\n"
    )
    return path


class Scripts:
    """A command factory; keeps what it was asked for."""

    def __init__(self, consumer: str = SERVE, producer: str = SERVE, prepare: str = "echo 10 rows") -> None:
        self.scripts = {"consumer": consumer, "producer": producer, "prepare": prepare}
        self.asked: list[tuple[str, list[str]]] = []

    def __call__(self, verb: str, arguments: Sequence[str]) -> list[str]:
        self.asked.append((verb, list(arguments)))
        return ["/bin/sh", "-c", self.scripts[verb], verb, *arguments]


def log(run_path: Path, name: str) -> str:
    return (run_path.parent / "out/logs" / f"{name}.log").read_text()


def finished(run_path: Path) -> Path:
    return paths.finished_path(load(run_path))


def wait_for(text: str, file: Path) -> str:
    """Shell that waits until `file` holds `text`."""
    return f"until grep -q '{text}' {file} 2>/dev/null; do sleep 0.02; done"


def test_a_mask_token_left_out_is_said_before_anything_starts(run_path: Path) -> None:
    run_path.write_text(run_path.read_text().partition("[drafter]")[0])
    scripts = Scripts()
    with pytest.raises(ConfigError, match=rf"mask_token_id is not set: `paceline prepare {run_path}` names tokens"):
        up(run_path, command=scripts)
    assert scripts.asked == []


def test_a_run_to_its_end(run_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    marker = finished(run_path)
    scripts = Scripts(
        consumer=f"echo training; touch {marker}",
        producer=f"until test -e {marker}; do sleep 0.02; done; echo bye",
    )
    assert up(run_path, ["trainer.epochs=1"], command=scripts, policy=QUICK) == 0
    shown = capfd.readouterr().out
    for line in ("prepare | 10 rows", "trainer | training", "w0      | bye", "w1      | bye", "the run is finished"):
        assert line in shown
    assert log(run_path, "w1") == "bye\n"
    arguments = [str(run_path), "--set", "trainer.epochs=1"]
    assert scripts.asked == [
        ("consumer", arguments),
        ("producer", [*arguments, "--worker", "0"]),
        ("producer", [*arguments, "--worker", "1"]),
        ("prepare", arguments),
    ]


def test_workers_that_miss_the_end_are_told(run_path: Path) -> None:
    marker = finished(run_path)
    scripts = Scripts(consumer=f"{wait_for('up', run_path.parent / 'out/logs/w0.log')}; touch {marker}")
    assert up(run_path, command=scripts, policy=Policy(leave=0.1)) == 0
    assert log(run_path, "w0") == "up\nsaved\n"


def test_a_worker_that_does_not_leave_a_finished_run_is_killed(
    run_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scripts = Scripts(
        consumer=f"{wait_for('deaf', run_path.parent / 'out/logs/w0.log')}; touch {finished(run_path)}",
        producer=f"trap '' TERM; echo deaf; {FOREVER}",
    )
    assert up(run_path, command=scripts, policy=Policy(leave=0.1, stop=0.2)) == 1
    assert "w0 did not stop within 0 s: killed" in capfd.readouterr().out


class Noting(PlainView):
    """Touches a file once an event holds a text, so that a script can go on from there."""

    def __init__(self, text: str, file: Path) -> None:
        super().__init__()
        self.text, self.file = text, file

    def event(self, text: str, urgent: bool = False) -> None:
        super().event(text, urgent)
        if self.text in text:
            self.file.touch()


def test_the_files_of_a_run_stay_fresh(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths.Freshness, "SECONDS", 0.0)
    folder = paths.run_dir("t")
    old = f"touch -d @0 {folder}/up.lock; until test {folder}/up.lock -nt {run_path}; do sleep 0.02; done"
    scripts = Scripts(consumer=f"{old}; touch {finished(run_path)}", producer="exit 0")
    assert up(run_path, command=scripts, policy=QUICK) == 0


def test_a_trainer_without_workers_is_pointed_out(run_path: Path, tmp_path: Path) -> None:
    run, said = load(run_path), tmp_path / "said"
    script = f"until test -e {said}; do sleep 0.02; done; touch {finished(run_path)}"
    trainer = Child("trainer", ["/bin/sh", "-c", script], tmp_path / "trainer.log")
    worker = Child("w0", ["/bin/sh", "-c", "exit 0"], tmp_path / "w0.log")
    view = Noting("no workers are left", said)
    assert Supervisor(run, trainer, [worker], view, policy=Policy(leave=0.1)).run() == 0


def test_a_marker_of_an_earlier_run_is_removed(run_path: Path) -> None:
    marker = finished(run_path)
    marker.touch()
    scripts = Scripts(consumer=f"test -e {marker} && exit 78; touch {marker}", producer="exit 0")
    assert up(run_path, command=scripts, policy=QUICK) == 0


@pytest.mark.parametrize(("number", "code"), [("INT", 130), ("TERM", 0), ("HUP", 0)])
def test_signals_stop_all_with_a_checkpoint(
    run_path: Path, capfd: pytest.CaptureFixture[str], number: str, code: int
) -> None:
    w0 = run_path.parent / "out/logs/w0.log"
    scripts = Scripts(
        consumer=f"trap 'echo checkpoint; exit 0' TERM; {wait_for('up', w0)}; kill -{number} $PPID; {FOREVER}"
    )
    assert up(run_path, command=scripts, policy=QUICK) == code
    assert log(run_path, "trainer") == "checkpoint\n"
    assert log(run_path, "w0") == "up\nsaved\n"
    assert "stopping: the trainer writes a checkpoint" in capfd.readouterr().out


def test_a_second_interrupt_kills(run_path: Path) -> None:
    stubborn = f"trap 'kill -INT $PPID' TERM; kill -INT $PPID; {FOREVER}"
    assert up(run_path, command=Scripts(consumer=stubborn), policy=QUICK) == 130


def test_a_stop_that_takes_too_long_ends_in_a_kill(run_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stubborn = f"trap '' TERM; kill -TERM $PPID; {FOREVER}"
    assert up(run_path, command=Scripts(consumer=stubborn), policy=Policy(stop=0.3)) == 1
    assert "trainer did not stop within 0 s: killed" in capfd.readouterr().out


def test_a_failed_checkpoint_while_stopping_shows(run_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failing = f"trap 'echo disk full; exit 1' TERM; kill -TERM $PPID; {FOREVER}"
    assert up(run_path, command=Scripts(consumer=failing), policy=QUICK) == 1
    assert "trainer ended with exit code 1 while stopping" in capfd.readouterr().out


@pytest.mark.parametrize("ending", ["kill -9 $$", "exit 3"])
def test_a_child_that_dies_is_started_again(run_path: Path, capfd: pytest.CaptureFixture[str], ending: str) -> None:
    marker = finished(run_path)
    once = run_path.parent / "once"
    scripts = Scripts(
        consumer=f"{wait_for('second', run_path.parent / 'out/logs/w0.log')}; touch {marker}",
        producer=f"test $3 = 1 && exit 0; test -e {once} && echo second && exit 0; touch {once}; echo oh no; {ending}",
    )
    assert up(run_path, command=scripts, policy=QUICK) == 0
    shown = capfd.readouterr().out
    died = "was killed by SIGKILL" if "kill" in ending else "ended with exit code 3"
    assert f"w0 {died}; starting it again in 0 s" in shown
    assert shown.count("oh no") == 1 and "w0 started again" in shown


@pytest.mark.parametrize("ready", [False, True])
def test_a_chosen_checkpoint_is_for_starts_until_one_comes_up(run_path: Path, tmp_path: Path, ready: bool) -> None:
    """A trainer that is killed before that may not have set the newer checkpoints aside yet."""
    run, once = load(run_path), tmp_path / "once"
    again = f"echo $*; if test -e {once}; then touch {finished(run_path)}; exit 0; fi; touch {once}; kill -9 $$"
    command = ["/bin/sh", "-c", again, "consumer", "--resume", "ck/step-7"]
    trainer = Child("trainer", command, tmp_path / "trainer.log", was_ready=ready)
    policy = Policy(first_pause=0.05, leave=0)
    assert Supervisor(run, trainer, [], PlainView(), policy=policy).run() == 0
    first, *second = trainer.log.read_text().splitlines()
    assert first == "--resume ck/step-7" and second == ["" if ready else "--resume ck/step-7"]


class Broken(PlainView):
    """Of a terminal that is gone, or of another fault."""

    def __init__(self, error: Exception, after: str = "") -> None:
        super().__init__()
        self.error, self.after = error, after

    def line(self, child: str, text: str) -> None:
        if self.after in text:
            raise self.error

    def refresh(self, children: Sequence[Child], status: object) -> None:
        self.line("", "")


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_a_run_that_cannot_be_shown_goes_on(run_path: Path, capfd: pytest.CaptureFixture[str], error: OSError) -> None:
    w0 = run_path.parent / "out/logs/w0.log"
    interrupted = f"trap 'echo checkpoint; exit 0' TERM; {wait_for('up', w0)}; kill -INT $PPID; {FOREVER}"
    assert up(run_path, command=Scripts(consumer=interrupted), policy=QUICK, view=Broken(error)) == 130
    assert log(run_path, "trainer") == "checkpoint\n"
    [line] = capfd.readouterr().err.splitlines()
    assert line == f"paceline: the run goes on unseen: {error.strerror}; its logs are in {w0.parent}"


class Seeing(PlainView):
    """Touches a file once the screen is given a status of this step."""

    def __init__(self, step: int, file: Path) -> None:
        super().__init__()
        self.step, self.file = step, file
        self.steps: list[object] = []

    def refresh(self, children: Sequence[Child], status: Mapping[str, object] | None) -> None:
        self.steps.append((status or {}).get("step"))
        if self.steps[-1] == self.step:
            self.file.touch()


@pytest.mark.parametrize("now", [1.0, 4e9])
def test_figures_stay_on_the_screen_whatever_the_clock_is_set_to(run_path: Path, tmp_path: Path, now: float) -> None:
    """It was set back, or forward, since the trainer started; and what an earlier trainer said is not this one's."""
    status, seen = paths.status_path(load(run_path)), tmp_path / "seen"
    write_status(status, {"step": 7, "updated": time.time()})
    new = json.dumps({"step": 8, "updated": now})
    script = f"echo '{new}' > {status}.new; mv {status}.new {status}; until test -e {seen}; do sleep 0.02; done"
    view = Seeing(8, seen)
    up(run_path, command=Scripts(consumer=f"{script}; touch {finished(run_path)}"), policy=QUICK, view=view)
    assert 7 not in view.steps and 8 in view.steps


def test_a_fault_of_the_supervisor_leaves_the_trainer_time_for_its_checkpoint(run_path: Path) -> None:
    slow = f"trap 'sleep 0.5; echo checkpoint; exit 0' TERM; echo up; {FOREVER}"
    with pytest.raises(ZeroDivisionError):
        up(run_path, command=Scripts(consumer=slow), policy=QUICK, view=Broken(ZeroDivisionError(), "up"))
    assert log(run_path, "trainer") == "up\ncheckpoint\n"


@pytest.mark.parametrize("back", [True, False])
def test_a_child_that_the_system_does_not_start(
    run_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], back: bool
) -> None:
    """Tried again like one that ends, and where that does not help the trainer still gets its checkpoint."""
    program, again, w0, said = (tmp_path / name for name in ("program", "again", "w0.log", "said"))
    program.write_text(f"#!/bin/sh\necho first; rm {program}; kill -9 $$\n")
    again.write_text("#!/bin/sh\necho second\n")
    script = f"trap 'echo saved; exit 0' TERM; {FOREVER}"
    if back:
        mended = f"until test -e {said}; do sleep 0.02; done; mv {again} {program}"
        script = f"{mended}; {wait_for('second', w0)}; touch {finished(run_path)}"
    for file in (program, again):
        file.chmod(0o755)
    trainer = Child("trainer", ["/bin/sh", "-c", script], tmp_path / "trainer.log")
    policy = Policy(limit=1000 if back else 6, first_pause=0.05, longest_pause=0.05, leave=0)
    view = Noting("cannot be started", said)
    run = load(run_path)
    assert Supervisor(run, trainer, [Child("w0", [str(program)], w0)], view, policy=policy).run() == int(not back)
    assert f"w0 cannot be started ({program}: No such file or directory); starting it again" in capfd.readouterr().out
    assert trainer.log.read_text() == ("" if back else "saved\n")


def test_a_request_that_the_system_refuses_does_not_end_the_run(run_path: Path, tmp_path: Path) -> None:
    run, answers = load(run_path), []
    children = [Child(name, ["/bin/sh", "-c", SERVE], tmp_path / f"{name}.log") for name in ("trainer", "w0")]
    paths.wanted_path(paths.run_dir(run.name)).mkdir()  # where nothing can be written then

    class Asking(PlainView):
        def refresh(self, children: Sequence[Child], status: object) -> None:
            if not answers and all("up" in child.last_line for child in children):
                answers.append(ask(b'{"do": "scale", "count": 1, "gpus": []}'))
                os.kill(os.getpid(), signal.SIGTERM)

    supervisor = Supervisor(run, children[0], [children[1]], Asking(), make_worker=lambda index, device: children[1])
    ask = lambda request: supervisor._control._reply(request)  # noqa: E731 - there once it runs
    assert supervisor.run() == 0
    assert "Is a directory" in str(answers[0]["error"])
    assert children[0].log.read_text() == "up\nsaved\n"


def test_a_child_that_keeps_dying_ends_the_run(run_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert up(run_path, command=Scripts(producer="echo again; exit 1"), policy=QUICK) == 1
    shown = capfd.readouterr().out
    assert "does not stay up" in shown and "w0      | again" in shown and "    again" not in shown
    assert log(run_path, "trainer").endswith("saved\n")


@pytest.mark.parametrize("code", [78, 2])
def test_a_bad_configuration_stops_all_at_once(run_path: Path, capfd: pytest.CaptureFixture[str], code: int) -> None:
    bad = f"{wait_for('up', run_path.parent / 'out/logs/trainer.log')}; echo 'paceline: no such layer' >&2; exit {code}"
    assert up(run_path, command=Scripts(producer=bad), policy=QUICK) == code
    shown = capfd.readouterr().out
    assert shown.count("no such layer") == 1 and "would not help" in shown
    assert log(run_path, "trainer") == "up\nsaved\n"


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("mended", [True, False])
def test_a_worker_that_dies_while_the_run_file_is_edited(
    run_path: Path, tmp_path: Path, mended: bool, valid: bool
) -> None:
    """It was up, and finds a file that is not valid or another run's: this one does not end for that, unless it stays
    so."""
    run, file, w0 = load(run_path), tmp_path / "edited", tmp_path / "w0.log"

    def reload() -> RunFile:
        if not file.exists():
            return run
        if not valid:
            raise ConfigError("not TOML")
        return run.model_copy(update={"stream": run.stream.model_copy(update={"token_budget": 77})})

    file.touch()
    worker = f"echo up; test -e {file} && exit 78; echo mended; exit 0"
    trainer = f"trap 'echo saved; exit 0' TERM; {wait_for('up', w0)}; {FOREVER}"
    if mended:
        trainer = f"{wait_for('up', w0)}; rm {file}; {wait_for('mended', w0)}; touch {finished(run_path)}"
    children = [
        Child("trainer", ["/bin/sh", "-c", trainer], tmp_path / "trainer.log"),
        Child("w0", ["/bin/sh", "-c", worker], w0, was_ready=True),
    ]
    policy = Policy(limit=1000 if mended else 4, first_pause=0.05, longest_pause=0.1, leave=0)
    supervisor = Supervisor(
        run, children[0], children[1:], PlainView(), policy=policy, reload=reload, stamp=file.exists
    )
    assert supervisor.run() == int(not mended)
    assert mended or children[0].log.read_text() == "saved\n"


def test_a_run_file_that_is_whole_again_when_its_reader_has_died(run_path: Path, tmp_path: Path) -> None:
    """An editor empties the file and writes it: who reads it between dies of that a little later."""
    run, written, w0 = load(run_path), tmp_path / "written", tmp_path / "w0.log"
    children = [
        Child("trainer", ["/bin/sh", "-c", f"{wait_for('whole', w0)}; touch {finished(run_path)}"], tmp_path / "t.log"),
        Child(
            "w0",
            ["/bin/sh", "-c", f"test -e {written} || {{ touch {written}; exit 78; }}; echo whole"],
            w0,
            was_ready=True,
        ),
    ]
    supervisor = Supervisor(run, children[0], children[1:], PlainView(), policy=QUICK, stamp=written.exists)
    assert supervisor.run() == 0


def test_a_child_that_never_was_up_ends_the_run_though_the_file_is_not_valid(run_path: Path, tmp_path: Path) -> None:
    def reload() -> RunFile:
        raise ConfigError("not TOML")

    trainer = Child("trainer", ["/bin/sh", "-c", SERVE], tmp_path / "trainer.log")
    worker = Child("w0", ["/bin/sh", "-c", "exit 78"], tmp_path / "w0.log")
    assert Supervisor(load(run_path), trainer, [worker], PlainView(), policy=QUICK, reload=reload).run() == 78


def test_nothing_starts_if_the_data_cannot_be_prepared(run_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scripts = Scripts(prepare="echo 'paceline: d.jsonl: no such file'; exit 78")
    assert up(run_path, command=scripts, policy=QUICK) == 78
    assert "no such file" in capfd.readouterr().out
    assert not (run_path.parent / "out/logs/trainer.log").exists()
    assert up(run_path, command=Scripts(prepare="exit 5"), policy=QUICK) == 1


def looked_at(run_path: Path, until: str, **scripts: str) -> tuple[str, dict[str, object], str]:
    """What `status` (text, JSON) and then `stop` say of a run that is up, once shell command `until` has ended."""
    command = f"{sys.executable} -m paceline.common.cli"
    asks = " && echo === && ".join(f"{command} {verb}" for verb in ("status t", "status t --json", "stop t"))
    looker = subprocess.Popen(
        ["/bin/sh", "-c", f"{until}; {asks}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert up(run_path, command=Scripts(**scripts), policy=QUICK) == 0
        shown, _ = looker.communicate(timeout=30)
    finally:
        looker.kill()
    assert looker.returncode == 0, shown
    text, found, stopped = shown.split("===\n")
    return text, json.loads(found), stopped


@pytest.mark.parametrize("before", [{}, {"state": "finished", "step": 7, "updated": 1.0}])
def test_a_run_whose_data_are_prepared_is_shown_and_stopped_as_that(run_path: Path, before: dict[str, object]) -> None:
    if before:
        write_status(paths.status_path(load(run_path)), before)
    logged = wait_for("at it", run_path.parent / "out/logs/prepare.log")
    text, found, stopped = looked_at(run_path, logged, prepare=f"echo at it; {FOREVER}")
    assert text.startswith("t  preparing the data; the trainer starts after that\n")
    assert (found["state"], found["up"], found["alive"]) == ("preparing", True, False)
    assert stopped == "stopping t\nt has stopped\n"


@pytest.mark.parametrize(
    ("checkpoint", "message", "words"),
    [
        ("ck/step-00000007", "stopping (SIGTERM)", ""),
        ("ck/step-00000005", "disk full", "of step 7, and ck/step-00000005 stands: disk full"),
        ("", "disk full", "of step 7, and there is none: disk full"),
    ],
)
def test_stop_says_whether_the_last_steps_are_in_a_checkpoint(
    run_path: Path, capfd: pytest.CaptureFixture[str], checkpoint: str, message: str, words: str
) -> None:
    code = (
        "import sys, time; from pathlib import Path; from paceline.common.telemetry import write_status; "
        "status = dict(state='stopped', step=7, message=sys.argv[2], updated=time.time()); "
        "write_status(Path(sys.argv[1]), status | ({'checkpoint': sys.argv[3]} if sys.argv[3] else {}))"
    )
    writes = f'{sys.executable} -c "{code}" {paths.status_path(load(run_path))} "{message}" "{checkpoint}"'
    script = run_path.parent / "consumer.sh"
    script.write_text(f"stop() {{ {writes}; exit {int(bool(words))}; }}; trap stop TERM; echo up; {FOREVER}\n")
    stop = f"{wait_for('up', run_path.parent / 'out/logs/trainer.log')}; {sys.executable} -m paceline.common.cli stop t"
    looker = subprocess.Popen(["/bin/sh", "-c", stop], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        code = up(run_path, command=Scripts(consumer=f"exec sh {script}"), policy=QUICK)
        shown, _ = looker.communicate(timeout=30)
    finally:
        looker.kill()
    assert code == looker.returncode == int(bool(words)), shown
    last = shown.splitlines()[-1]
    assert last == (f"paceline: t has stopped, but without a checkpoint {words}" if words else "t has stopped")
    assert not words or message in capfd.readouterr().out


def test_stop_does_not_wait_for_the_next_supervisor(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = iter(["paceline up (pid 7)"] * 3 + ["paceline up (pid 8)"] * 20)
    monkeypatch.setattr(scale, "held_by", lambda path: next(holders))
    monkeypatch.setattr(scale, "ask", lambda path, request: {"said": "stopping t"})
    paths.run_dir("t")
    said: list[str] = []
    scale.stop("t", said.append)
    assert said == ["stopping t", "t has stopped"] and next(holders).endswith("8)")


def test_a_run_whose_trainer_has_said_nothing_yet_is_starting(run_path: Path) -> None:
    logged = wait_for("up", run_path.parent / "out/logs/trainer.log")
    text, found, stopped = looked_at(run_path, logged)
    assert text.startswith("t  starting; 0 workers up\n") and found["state"] == "starting"
    assert stopped == "stopping t: the trainer writes a checkpoint\nt has stopped\n"


def test_a_supervisor_that_does_not_answer_is_shown_as_up(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with FileLock(paths.up_lock(load(run_path)), "paceline up of run t") as lock:
        assert lock.acquire()
        [state] = run_states(None, tmp_path / "rings")
    assert (state.name, state.state, state.up) == ("t", "starting", True)
    assert run_states(None, tmp_path / "rings") == []


def test_descendants_of_a_dead_trainer_go_with_it(run_path: Path) -> None:
    marker = finished(run_path)
    once = run_path.parent / "once"
    rank = run_path.parent / "rank"
    scripts = Scripts(
        consumer=f"if test -e {once}; then grep -q 'State:.[RS]' /proc/$(cat {rank})/status && exit 78; "
        f"touch {marker}; exit 0; fi; "
        f"touch {once}; sleep 1000 & echo $! >{rank}; kill -9 $$"
    )
    assert up(run_path, command=scripts, policy=Policy(first_pause=0.1, leave=0)) == 0


def test_no_orphans_when_the_supervisor_is_killed(run_path: Path) -> None:
    script = f"""
import sys
from paceline.common.up import up
up({str(run_path)!r}, command=lambda verb, arguments: ["/bin/sh", "-c",
   "true" if verb == "prepare" else "echo $$; trap 'echo saved; exit 0' TERM; while :; do sleep 0.02; done"])
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    logs = [run_path.parent / "out/logs" / f"{name}.log" for name in ("trainer", "w0", "w1")]
    eventually(lambda: all(file.exists() and file.read_text() for file in logs))
    supervisor.kill()
    supervisor.wait()
    eventually(lambda: all(file.read_text().endswith("saved\n") for file in logs))


def eventually(true) -> None:
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_one_supervisor_and_one_trainer_a_run(run_path: Path) -> None:
    run = load(run_path)
    with FileLock(paths.up_lock(run), "paceline up of run t") as lock:
        assert lock.acquire()
        with pytest.raises(PacelineError, match=rf"run t is already up: paceline up of run t \(pid {os.getpid()}\)"):
            up(run_path, command=Scripts(), policy=QUICK)
    with FileLock(paths.consumer_lock(run), "trainer of run t") as lock:
        assert lock.acquire()
        with pytest.raises(PacelineError, match="already has a trainer: trainer of run t"):
            up(run_path, command=Scripts(), policy=QUICK)


def test_one_run_an_output_folder_whatever_it_is_called(run_path: Path, tmp_path: Path) -> None:
    """Else its trainer is refused after all is prepared, and its lines stand in the other run's logs."""
    other = run_path.with_name("other.toml")
    other.write_text(run_path.read_text().replace('name = "t"', 'name = "other"'))
    run, logs = load(run_path), paths.log_dir(load(run_path))
    for path, who in ((paths.output_lock(run), "paceline up of run t"), (paths.trainer_lock(run), "trainer of run t")):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path, who) as lock:
            assert lock.acquire()
            with pytest.raises(PacelineError, match=rf"out.* already .*: {who} \(pid {os.getpid()}\)"):
                up(other, command=Scripts(), policy=QUICK)
    assert not list(logs.glob("*.log"))


def test_an_output_folder_that_cannot_be(run_path: Path) -> None:
    (run_path.parent / "out").write_text("a file")
    with pytest.raises(ConfigError, match="output: cannot make folder"):
        up(run_path, command=Scripts(), policy=QUICK)


def test_a_supervisor_with_more_than_a_thousand_files(run_path: Path) -> None:
    """One for each worker's log is enough for that, with as many workers as `scale` takes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2048:
        pytest.skip("so many files may not be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, before[1]))
    files: list[int] = []
    try:
        while not files or files[-1] < 1100:  # beyond what select(2) takes
            files.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        scripts = Scripts(consumer=f"sleep 0.1; touch {finished(run_path)}", producer="exit 0")
        assert up(run_path, command=scripts, policy=QUICK) == 0
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Restarting(PlainView):
    """Asks for a restart of the trainer once it says that it is up."""

    supervisor: Supervisor

    def line(self, child: str, text: str) -> None:
        super().line(child, text)
        if (child, text) == ("trainer", "up"):
            self.supervisor._restart()


def test_a_trainer_that_finishes_as_it_is_asked_to_restart_has_finished(run_path: Path, tmp_path: Path) -> None:
    log, script = tmp_path / "trainer.log", f"trap 'touch {finished(run_path)}; exit 0' TERM; echo up; {FOREVER}"
    view = Restarting()
    view.supervisor = Supervisor(load(run_path), Child("trainer", ["/bin/sh", "-c", script], log), [], view)
    assert view.supervisor.run() == 0
    assert log.read_text() == "up\n"


class Removing(Noting):
    """Asks for no workers once w0 says that it is up."""

    supervisor: Supervisor

    def line(self, child: str, text: str) -> None:
        super().line(child, text)
        if (child, text) == ("w0", "up"):
            self.supervisor._scale(0, [])


def test_the_ring_of_a_removed_worker_is_retired_whoever_had_it_last(run_path: Path, tmp_path: Path) -> None:
    """It may take its ring after the word to it: the feed removes none whose last owner is not retired."""
    run_path.write_text(run_path.read_text() + f'[stream]\nring_dir = "{tmp_path}/rings"\n')
    run, removed = load(run_path), tmp_path / "removed"
    ring = paths.ring_dir(run) / "w0.ring"
    takes = f"{sys.executable} {Path(__file__).with_name('ring_peer.py')} write {ring} 1 4096 0"
    script = f"trap '{takes}; exit 0' TERM; echo up; {FOREVER}"
    worker = Child("w0", ["/bin/sh", "-c", script], tmp_path / "w0.log")
    done = f"until test -e {removed}; do sleep 0.02; done; touch {finished(run_path)}"
    trainer = Child("trainer", ["/bin/sh", "-c", done], tmp_path / "trainer.log")
    view = Removing("w0 is removed", removed)
    view.supervisor = Supervisor(run, trainer, [worker], view, policy=QUICK, make_worker=lambda *_: worker)
    assert view.supervisor.run() == 0
    (info,) = read_rings(ring.parent)
    assert info.retired and not info.alive


def test_signal_handlers_are_put_back(run_path: Path) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    assert up(run_path, command=Scripts(consumer="exit 78"), policy=QUICK) == 78
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]


def test_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = Tail(path)
    with open(path, "ab") as file:
        for data, lines in ((b"one\ntw", ["one"]), (b"o\r\n 10%\r 20%", ["two", " 10%"]), (b"\xff\n", [" 20%\ufffd"])):
            file.write(data)
            file.flush()
            assert tail.lines() == lines
        file.write(b"end")
        file.flush()
        assert tail.lines() == [] and tail.lines(last=True) == ["end"]
    tail.close()


@pytest.mark.parametrize("after", ["new\n", "a line that is longer than all that was there before it\n"])
def test_a_log_that_is_rotated_by_copy_is_read_on(tmp_path: Path, after: str) -> None:
    """As logrotate's copytruncate does it, or a person who makes room."""
    path = tmp_path / "log"
    path.touch()
    tail = Tail(path)
    with open(path, "ab", buffering=0) as file:  # as the child's
        file.write(b"a line\nhalf of an")
        assert tail.lines() == ["a line"]
        path.write_text("")
        assert tail.lines() == []
        file.write(after.encode())
        assert tail.lines() == [after.strip()]
    tail.close()


def test_quick_failures_end_the_run_soon_but_not_after_it_was_up(run_path: Path, tmp_path: Path) -> None:
    """Three times right after its start, by itself: it will not come up. Signals and healthy lives are different."""
    policy = Policy(limit=6, first_pause=0.01, longest_pause=0.02)
    count = tmp_path / "count"
    for script, ready, starts in (("exit 1", False, 3), ("kill -9 $$", False, 6), ("exit 1", True, 6)):
        count.write_text("")
        trainer = Child("trainer", ["/bin/sh", "-c", SERVE], tmp_path / "trainer.log")
        worker = Child("w0", ["/bin/sh", "-c", f"echo x >>{count}; {script}"], tmp_path / "w0.log", was_ready=ready)
        assert Supervisor(load(run_path), trainer, [worker], PlainView(), policy=policy).run() == 1
        assert count.read_text().count("x") == starts


def test_gpus_of_added_workers(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--gpu` reaches the worker's command line, and again when the supervisor starts anew."""
    monkeypatch.setattr("paceline.common.up.gpu_count", lambda: 8)
    ask = "from paceline.common.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    started = [run_path.parent / "out/logs" / f"w{index}.log" for index in (2, 3, 4)]
    shown = "; ".join(f"until grep -q cuda {file}; do sleep 0.02; done" for file in started)
    scale = f"{sys.executable} -c '{ask}' scale {run_path}"
    say = f"echo $*; {SERVE}"
    asks = (
        f"({scale} 2 --gpu 1; echo code $?; {scale} 3 --gpu 8; echo code $?; {scale} 5 --gpu 6 --gpu 7) 2>&1 & "
        f"{shown}; kill -INT $PPID; {FOREVER}"
    )
    scripts = Scripts(consumer=f"trap 'exit 0' TERM; {asks}", producer=say)
    assert up(run_path, command=scripts, policy=QUICK) == 130
    said = log(run_path, "trainer")
    assert "--gpu places new workers, and 2 would add none to the 2 there are" in said
    assert "--gpu 8: the supervisor sees 8 GPUs" in said and said.count("code 2") == 2
    expected = ["cuda:6", "cuda:7", "cuda:6"]
    for file, device in zip(started, expected, strict=True):
        assert f"--device {device}" in file.read_text()
    again = Scripts(consumer=f"{wait_for('up', started[-1])}; exit 78")
    assert up(run_path, command=again, policy=QUICK) == 78
    workers = [arguments for verb, arguments in again.asked if verb == "producer"]
    assert [arguments[3:] for arguments in workers] == [[], [], *(["--device", device] for device in expected)]
