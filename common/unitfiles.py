"""`paceline install-units` and `uninstall-units`: the files of systemd/, filled in and put where systemd looks.

What was written is kept in /etc/paceline/.installed.json with checksums, and uninstalling undoes exactly that: a file
changed by hand is neither overwritten nor removed. Run files and what workers and trainers wrote are never touched.
Everything below a `root` other than "/" is written for an image: no command is run then. Imports no torch.
"""

import grp
import hashlib
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from . import units
from .errors import ConfigError, PacelineError, UsageError

MANIFEST = Path("etc/paceline/.installed.json")
_UNITS = Path("etc/systemd/system")
_TARGETS = {
    "paceline-producer@.service": _UNITS,
    "paceline-consumer@.service": _UNITS,
    "paceline@.target": _UNITS,
    "paceline.slice": _UNITS,
    "sysusers.conf": Path("etc/sysusers.d"),
    "tmpfiles.conf": Path("etc/tmpfiles.d"),
}
_STATE = (Path("var/lib/paceline"), Path("var/cache/paceline"), Path("var/lib/private/paceline"))
_HIDDEN = (Path("/tmp"), Path("/var/tmp"))  # PrivateTmp gives the units their own
_LOGIN_UID = 1000  # systemd's default SYSTEM_UID_MAX is 999
_WORD_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")

Say = Callable[[str], None]


@dataclass
class Manifest:
    """What one installation made: files with the SHA-256 of what was written, folders, and whether the user is new."""

    files: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    user: str = ""
    new_user: bool = False
    group: str = ""
    new_group: bool = False

    @classmethod
    def read(cls, root: Path) -> "Manifest | None":
        """The manifest below `root`; None if nothing is installed there."""
        try:
            return cls(**json.loads((root / MANIFEST).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise PacelineError(f"{root / MANIFEST}: cannot be read ({error})") from None

    def write(self, root: Path) -> None:
        (root / MANIFEST).write_text(json.dumps(self.__dict__, indent=1) + "\n")


def unit_texts(user: str, group: str, command: str, writable: Iterable[str] = ()) -> dict[Path, str]:
    """The text of each file, by its path below the root. `command` runs paceline, `writable` are further folders."""
    values = {
        "@user@": user,
        "@group@": group,
        "@paceline@": command,
        "@writable@": " ".join(f"-{path}" for path in writable),
    }
    texts: dict[Path, str] = {}
    source = resources.files("paceline.systemd")
    for name, folder in _TARGETS.items():
        text = (source / name).read_text(encoding="utf-8")
        for mark, value in values.items():
            text = text.replace(mark, value)
        texts[folder / (f"paceline.{name.partition('.')[2]}" if folder != _UNITS else name)] = text
    return texts


# Installing


def install(
    *,
    user: str = "paceline",
    group: str | None = None,
    python: Path | None = None,
    writable: Iterable[Path] = (),
    root: Path = Path("/"),
    dry_run: bool = False,
    say: Say = print,
) -> None:
    """Writes the units and makes user, group and /dev/shm/paceline.

    user, group: whom the units run as (group: default like the user). python: of the environment that has paceline
    (default: this one). writable: folders outside /var/lib/paceline that runs write their output to.

    Raises:
        ConfigError: the user could not run that Python. UsageError: a name or path that no unit can hold.
        PacelineError: no root rights, no systemd, or a file that is in the way.
    """
    group = group or user
    for name in (user, group):
        if not name or not _WORD_CHARACTERS.issuperset(name) or name[0] in "0123456789-":
            raise UsageError(f"{name!r} is no name for a user or group")
    folders = [_plain(path) for path in writable]
    texts = unit_texts(user, group, _command(python or Path(sys.executable)), folders)
    live = root == Path("/")
    if live:
        _check_reachable(python or Path(sys.executable), user)
    old = Manifest.read(root) or Manifest()
    _refuse_foreign(root, texts, old)
    if dry_run:
        for path, text in texts.items():
            say(f"# {root / path}\n{text}")
        return
    if live:
        units.need_systemd()
        units.need_root("install-units")
    _write(root, texts, old, user, group, say)
    if live:
        _make_live(old, user, group, say)
    old.write(root)
    say("next: put a run file at /etc/paceline/RUN.toml, then: systemctl enable --now paceline@RUN.target")


def _plain(path: Path) -> str:
    """A path as units hold it. UsageError if it would need quoting there."""
    text = str(path)
    if not path.is_absolute() or set(text) & set(" \t\n\"'\\%:"):
        raise UsageError(f"{text!r}: a unit takes absolute paths without spaces, quotes, colons, % or backslashes")
    return text


def _command(python: Path) -> str:
    """How ExecStart calls paceline: the environment's console script, else its Python with the module."""
    python = python.absolute()  # not resolved: a venv is known by the link
    if not python.is_file():
        raise UsageError(f"--python: there is no {python}")
    script = python.with_name("paceline")
    return _plain(script) if os.access(script, os.X_OK) else f"{_plain(python)} -m paceline.common.cli"


def _check_reachable(python: Path, user: str) -> None:
    """Refuse an environment that the unit's user could not enter: it would end in 203/EXEC, which says little."""
    needed = [python.absolute(), python.resolve()]
    if python.absolute() == Path(sys.executable).absolute():
        needed += [Path(sys.base_prefix).resolve(), Path(__file__).resolve()]
    for path in needed:
        for folder in reversed(path.parents):
            if folder in _HIDDEN:
                raise ConfigError(f"{path} is in {folder}, which units do not see: {_ELSEWHERE}")
            if not _may_enter(folder, user):
                raise ConfigError(f"{path}: user {user} may not enter {folder}: {_ELSEWHERE}")


_ELSEWHERE = "install paceline where others can read, for example: python3 -m venv /opt/paceline"


def _may_enter(folder: Path, user: str) -> bool:
    found = folder.stat()
    try:
        account = pwd.getpwnam(user)
    except KeyError:  # it is made later, and owns nothing yet
        return bool(found.st_mode & stat.S_IXOTH)
    if account.pw_uid == found.st_uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid in os.getgrouplist(user, account.pw_gid):
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH) or account.pw_uid == 0


def _refuse_foreign(root: Path, texts: dict[Path, str], old: Manifest) -> None:
    """Never write over a file that was not installed, or was changed by hand since."""
    for path, text in texts.items():
        found = _digest(root / path)
        if found is not None and found not in (old.files.get(str(path)), _sha(text.encode())):
            raise PacelineError(
                f"{root / path} is not as `paceline install-units` writes it: move it away, and keep changes in "
                "drop-ins (systemctl edit)"
            )


def _write(root: Path, texts: dict[Path, str], manifest: Manifest, user: str, group: str, say: Say) -> None:
    manifest.user, manifest.group = user, group
    try:
        for folder in (MANIFEST.parent, *(path.parent for path in texts)):
            missing = [one for one in (*reversed(folder.parents), folder) if not (root / one).exists()]
            for one in missing:
                (root / one).mkdir(mode=0o755)
                manifest.folders.append(str(one))
        for path, text in texts.items():
            manifest.files[str(path)] = _sha(text.encode())
            manifest.write(root)  # first, so that an installation cut short can be undone
            (root / path).write_text(text, encoding="utf-8")
            (root / path).chmod(0o644)
            say(f"wrote {root / path}")
    except OSError as error:
        raise PacelineError(f"{error.filename}: {error.strerror}") from None


def _make_live(manifest: Manifest, user: str, group: str, say: Say) -> None:
    new_user, new_group = not _known(pwd.getpwnam, user), not _known(grp.getgrnam, group)
    manifest.new_user |= new_user
    manifest.new_group |= new_group
    manifest.write(Path("/"))
    _run("systemd-sysusers", "/etc/sysusers.d/paceline.conf")
    _run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/paceline.conf")
    units.systemctl("daemon-reload")
    say(f"{'made' if new_user else 'runs as'} user {user}, group {group}")
    if pwd.getpwnam(user).pw_uid >= _LOGIN_UID:
        say(
            f"user {user} is one that logs in: at its last logout systemd removes its files in /dev/shm, rings too, "
            "unless RemoveIPC=no in /etc/systemd/logind.conf"
        )


def _known(look_up: Callable[[str], object], name: str) -> bool:
    try:
        look_up(name)
    except KeyError:
        return False
    return True


# Uninstalling


def uninstall(*, root: Path = Path("/"), dry_run: bool = False, say: Say = print) -> None:
    """Removes what `install` and `units.scale_units` made; user and group only if they own no more data.

    Raises:
        PacelineError: nothing is installed, or a unit is running.
    """
    manifest = Manifest.read(root)
    if manifest is None:
        raise PacelineError(f"nothing is installed: there is no {root / MANIFEST}")
    live = root == Path("/")
    if live and not dry_run:
        units.need_root("uninstall-units")
    if live and (running := units.running_units()):
        raise PacelineError(f"still running: {', '.join(running)}; stop each run first (paceline stop RUN)")
    if live:
        units.forget_instances(dry_run=dry_run, say=say)
    _remove_files(root, manifest, dry_run, say)
    if dry_run:
        return
    if live:
        units.systemctl("daemon-reload")
        _remove_account(manifest, say)
        for folder in (Path("/dev/shm/paceline"), Path("/run/paceline")):
            _remove_empty(folder, say)
    (root / MANIFEST).unlink()
    for name in reversed(manifest.folders):
        _remove_empty(root / name, say)


def _remove_files(root: Path, manifest: Manifest, dry_run: bool, say: Say) -> None:
    for name, written in manifest.files.items():
        found = _digest(root / name)
        if found is None:
            continue
        if found != written:
            say(f"kept {root / name}: it was changed by hand")
            continue
        if not dry_run:
            (root / name).unlink()
        say(f"{'would remove' if dry_run else 'removed'} {root / name}")


def _remove_account(manifest: Manifest, say: Say) -> None:
    """The user that the installation made, unless it still has data: files of a uid that is given away are nobody's."""
    kept = [Path("/") / folder for folder in _STATE if _has_files(Path("/") / folder)]
    kept += [folder for folder in (Path("/dev/shm/paceline"), Path("/run/paceline")) if _has_files(folder)]
    if kept:
        say(f"kept user {manifest.user} and its files in {', '.join(map(str, kept))}")
        return
    for folder in _STATE:
        _remove_empty(Path("/") / folder, say)
    if manifest.new_user and _known(pwd.getpwnam, manifest.user):
        _run("userdel", manifest.user)
        say(f"removed user {manifest.user}")
    if manifest.new_group and _known(grp.getgrnam, manifest.group):
        _run("groupdel", manifest.group)


def _has_files(folder: Path) -> bool:
    return any(names for _, _, names in os.walk(folder))


def _remove_empty(folder: Path, say: Say) -> None:
    """Removes a folder that holds no files; empty folders within go with it."""
    if folder.is_dir() and not _has_files(folder) and not folder.is_symlink():
        shutil.rmtree(folder)
        say(f"removed {folder}")


# Tools


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(path: Path) -> str | None:
    try:
        return _sha(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PacelineError(f"{path}: {error.strerror}") from None


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise PacelineError(f"{command[0]} is missing: it comes with systemd or the base system") from None
    if done.returncode:
        raise PacelineError(f"{' '.join(command)} failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
