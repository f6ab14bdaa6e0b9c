"""A systemd of its own for a test: booted in about a second by systemd-nspawn, on an overlay of this machine's root.

What is installed here is there too, and nothing written there comes back: the overlay's upper layer is a tmpfs that
goes with the box. It has its own /run, /tmp, /dev/shm, processes and network (loopback alone). Needs root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

BOOT_SECONDS = 60.0
STOP_SECONDS = 20.0
# Nothing of these works, or is wanted, in a box; without them it is "running", not "degraded".
_MASKED = (
    "console-getty.service",
    "e2scrub_reap.service",
    "getty.target",
    "remote-fs.target",
    "systemd-firstboot.service",
    "systemd-logind.service",
    "systemd-networkd.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
    "systemd-update-utmp.service",
    "systemd-update-utmp-runlevel.service",
    "tmp.mount",
)
_CONTROLLERS = ("systemd", "unified", "memory")  # of cgroup v1, that systemd or nspawn make groups in


class NoBox(Exception):
    """A box cannot be had here, and why."""


def check() -> None:
    """Raises NoBox if it is plain that no box can boot."""
    if os.geteuid() != 0:
        raise NoBox("a systemd in a box needs root")
    for tool in ("systemd-nspawn", "nsenter", "setpriv", "mount"):
        if shutil.which(tool) is None:
            raise NoBox(f"{tool} is missing (apt-get install systemd systemd-container dbus)")


class Box:
    """A booted systemd. `root` is its root folder as seen from here; before the boot too, to put files in."""

    def __init__(self, folder: Path) -> None:
        """Mounts the overlay below `folder`, which is empty."""
        self.folder = folder
        self.name = f"box-{uuid.uuid4().hex[:12]}"
        self.root = folder / "layers" / "root"
        self.leader = 0
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._groups: list[Path] = []
        self._binds: list[str] = []
        layers = folder / "layers"
        layers.mkdir()
        _mount("-t", "tmpfs", "-o", "mode=0755", self.name, str(layers))
        for name in ("upper", "work", "root"):
            (layers / name).mkdir()
        options = f"lowerdir=/,upperdir={layers / 'upper'},workdir={layers / 'work'}"
        try:
            _mount("-t", "overlay", "-o", options, "overlay", str(self.root))
            self._strip()
        except BaseException:
            self.down()
            raise

    def _strip(self) -> None:
        """Leaves journal, bus, sysusers and tmpfiles of what this machine would start."""
        units = self.root / "etc/systemd/system"
        units.mkdir(parents=True, exist_ok=True)
        for link in [*units.glob("*.wants/*"), *units.glob("*.timer")]:
            link.unlink()
        for name in _MASKED:
            _link(units / name, "/dev/null")
        _link(units / "default.target", "/lib/systemd/system/multi-user.target")
        (self.root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
        journal = self.root / "etc/systemd/journald.conf.d/box.conf"
        journal.parent.mkdir(exist_ok=True)
        journal.write_text("[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n")

    def open_to_all(self, path: Path) -> None:
        """Makes `path` of this machine readable in the box for every user that its own modes let read it: the folders
        above are opened, and what is on a file system of its own, which the overlay does not show, is bound."""
        for folder in reversed(path.parents):
            inside = self.root / folder.relative_to("/")
            if inside.is_dir() and not inside.stat().st_mode & 0o001:
                inside.chmod(inside.stat().st_mode | 0o011)
        if path.stat().st_dev != Path("/").stat().st_dev:
            self._binds.append(f"--bind-ro={path}")

    def boot(self) -> None:
        """Raises NoBox with the console's last lines if it does not come up."""
        Path("/run/systemd/nspawn/propagate").mkdir(parents=True, exist_ok=True)
        self._groups = _own_groups(self.name)
        # Into its groups first: nspawn makes others below the one that it is in.
        join = "".join(f"echo $$ > {group}/cgroup.procs && " for group in self._groups)
        command = [
            *("setpriv", "--pdeathsig", "KILL"),  # a killed test leaves no systemd behind
            *("systemd-nspawn", "--boot", "--register=no", "--keep-unit", "--console=pipe", "--link-journal=no"),
            *("--directory", str(self.root), f"--machine={self.name}", "--private-network"),
            *("--capability=CAP_IPC_LOCK", "--tmpfs=/dev/shm:mode=1777,size=1G", *self._binds),
        ]
        with (self.folder / "console.log").open("wb") as console:
            self._nspawn = subprocess.Popen(
                ["sh", "-c", f'{join}exec "$@"', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + BOOT_SECONDS
        while not self._is_up():
            if self._nspawn.poll() is not None or time.monotonic() > deadline:
                said = (self.folder / "console.log").read_text(errors="replace").splitlines()[-8:]
                raise NoBox(f"no systemd boots in a box here: {' / '.join(said)}")
            time.sleep(0.05)

    def _is_up(self) -> bool:
        assert self._nspawn is not None
        self.leader = next(_children(self._nspawn.pid, "systemd"), 0)
        if not self.leader:
            return False
        state = self.run("systemctl", "is-system-running", check=False)
        return state.strip() in ("running", "degraded")

    def run(self, *command: str, check: bool = True, timeout: float = 120.0) -> str:
        """Runs a command in the box as root; its output and errors together. AssertionError if it fails."""
        enter = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-p", "-C", "-n", "-r", "-w", "--"]
        # Of the environment only the path: what a shell has at its start.
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        done = subprocess.run(
            [*enter, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=timeout,
        )
        output = done.stdout.decode(errors="replace")
        assert not check or done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{output}"
        return output

    def shown(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).strip()

    def journal(self) -> str:
        """All that was logged."""
        return self.run("journalctl", "--no-pager", "--boot", "--output=short-monotonic", check=False)

    def down(self) -> None:
        """Kills what runs in the box, and removes it."""
        if self._nspawn is not None:
            if self._nspawn.poll() is None:
                self._nspawn.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._nspawn.wait(STOP_SECONDS)
            if self._nspawn.poll() is None:
                for child in _children(self._nspawn.pid, "systemd"):
                    os.kill(child, signal.SIGKILL)
                self._nspawn.kill()
                self._nspawn.wait()
        for place in (self.root, self.root.parent):
            subprocess.run(["umount", "--lazy", str(place)], stderr=subprocess.DEVNULL)
        with contextlib.suppress(OSError):
            Path("/run/systemd/nspawn/propagate", self.name).rmdir()
        _remove_groups(self._groups)


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoBox(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def _link(path: Path, to: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def _children(parent: int, name: str) -> Iterator[int]:
    """Processes of `parent` that are called `name`."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # pid (name) state ppid ...; the name may hold anything
            before, _, after = (entry / "stat").read_text().rpartition(")")
            if int(after.split()[1]) == parent and before.partition("(")[2] == name:
                yield int(entry.name)


def _own_groups(name: str) -> list[Path]:
    """New control groups below this process's own, one in each hierarchy that matters."""
    made: list[Path] = []
    top = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        for mounted in _hierarchies(top, controllers):
            group = mounted / own.lstrip("/") / name
            with contextlib.suppress(OSError):
                group.mkdir()
                made.append(group)
    return made


def _hierarchies(top: Path, controllers: str) -> Iterable[Path]:
    if controllers:  # cgroup v1
        name = controllers.removeprefix("name=").split(",")[0]
        return [top / name] if name in _CONTROLLERS and (top / name).is_dir() else []
    if (top / "cgroup.procs").exists():
        return [top]
    return [top / "unified"] if (top / "unified").is_dir() else []


def _remove_groups(groups: Iterable[Path]) -> None:
    """Removes groups and those within; ended processes leave theirs a moment later."""
    deadline = time.monotonic() + 5.0
    for group in groups:
        while group.is_dir() and time.monotonic() < deadline:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
            if group.is_dir():
                time.sleep(0.1)
