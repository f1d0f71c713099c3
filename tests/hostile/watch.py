"""Watch on the file system: it shows what a child process creates, changes or removes outside its own folder.

As root, the child runs in a namespace of its own. An overlay lies over the file system, so the upper layer holds each change, and nothing
is changed in fact. The child has device files of its own and no network. Elsewhere, an audit hook of Python in the child notes what it
opens for writing, renames or removes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

_NAMESPACE, _NETWORK = 0x00020000, 0x40000000
_BIND, _PRIVATE = 0x1000 | 0x4000, 0x40000 | 0x4000
_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "f2fs", "zfs", "nfs", "nfs4", "9p", "virtiofs")
_KERNEL = ("/proc", "/sys", "/dev")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.utime": 1,
    "os.setxattr": 1,
}
State = dict[Path, tuple[object, ...]]


class Watch:
    """Watch over the children of this process.

    Attributes:
        complete: Whether every change is seen; else only what Python's own functions change.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare the watch.

        Args:
            folder: Folder that does not exist; it becomes a file system in memory, which this process alone sees.
        """
        folder.mkdir(parents=True)
        self._folder, self._place = folder, folder
        self.complete = os.geteuid() == 0 and sys.platform == "linux" and self._works()

    def _works(self) -> bool:
        try:
            _call("unshare", _NAMESPACE)
            _call("mount", b"none", b"/", None, _PRIVATE, None)
            _call("mount", b"none", bytes(self._folder), b"tmpfs", 0, b"size=512m,mode=755")
            self._mounts = ["/", *_other_mounts(self._folder)]
            self.begin(self._folder / "trial")
        except OSError:
            return False
        child = os.fork()
        if child == 0:
            try:
                self._separate(Path("/"))
                os._exit(0)
            except OSError:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def __enter__(self) -> Self:
        """Return the watch itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file system in memory."""
        with suppress(OSError):
            _call("umount2", bytes(self._folder), 2)

    def begin(self, place: Path) -> None:
        """Make the layers for a child that runs in a folder."""
        self._place = self._folder / place.name
        self._place.mkdir()
        self._devices: State = {}
        if not hasattr(self, "_mounts"):
            return
        for number in range(len(self._mounts)):
            for name in ("upper", "spare"):
                (self._place / f"{name}{number}").mkdir()
        (self._place / "root").mkdir()
        devices = self._place / "dev"
        (devices / "shm").mkdir(parents=True)
        for name, numbers in _NODES.items():
            os.mknod(devices / name, 0o666 | stat.S_IFCHR, os.makedev(*numbers))
            (devices / name).chmod(0o666)
        for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
            (devices / name).symlink_to(f"/proc/self/{target}")
        self._devices = state(devices)

    def enter(self, place: Path) -> None:
        """Put this process, a child, under the watch; changes below `place` are made in fact."""
        if self.complete:
            self._separate(place)
        else:
            _note_in(os.open(self._place / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND))

    def _separate(self, place: Path) -> None:
        _call("unshare", _NAMESPACE | _NETWORK)
        _loopback()
        root = self._place / "root"
        for number, mount in enumerate(self._mounts):
            layers = f"lowerdir={mount},upperdir={self._place}/upper{number},workdir={self._place}/spare{number}"
            _call("mount", b"overlay", bytes(root) + mount.encode(), b"overlay", 0, layers.encode())
        binds = [
            ("/proc", "/proc"),
            ("/sys", "/sys"),
            (self._place / "dev", "/dev"),
            *([] if place == Path("/") else [(place, place)]),
        ]
        for source, target in binds:
            _call("mount", str(source).encode(), f"{root}{target}".encode(), None, _BIND, None)
        os.chroot(root)
        os.chdir("/")

    def changes(self, place: Path) -> list[str]:
        """Describe what the child has created, changed or removed outside `place`, and forget it."""
        try:
            return self._changes(place)
        finally:
            shutil.rmtree(self._place, ignore_errors=True)

    def _changes(self, place: Path) -> list[str]:
        if not self.complete:
            return sorted(set(_noted(self._place / "events", place)))
        told = [change for number, mount in enumerate(self._mounts) for change in _layer(self._place / f"upper{number}", mount)]
        after = state(self._place / "dev")
        told += [
            f"changed /dev/{path.relative_to(self._place / 'dev')}"
            for path in {*self._devices, *after}
            if self._devices.get(path) != after.get(path)
        ]
        return sorted(told)


def state(folder: Path) -> State:
    """Return what decides whether anything below a folder was changed: kind, mode, inode and owner, and the size and time of files."""
    found: State = {}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            facts = path.lstat()
            same: tuple[object, ...] = (facts.st_mode, facts.st_dev, facts.st_ino, facts.st_uid, facts.st_gid, facts.st_rdev)
            if stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode):
                same += (facts.st_size, facts.st_mtime_ns)  # st_ctime also changes if another name of the file is removed
            found[path] = same
    return found


def _layer(upper: Path, mount: str) -> Iterator[str]:
    for place, folders, files in os.walk(upper):
        for name in (*folders, *files):
            path = Path(place, name)
            real, facts = Path(mount) / path.relative_to(upper), path.lstat()
            if stat.S_ISCHR(facts.st_mode) and not facts.st_rdev:
                yield f"removed {real}"
            elif not os.path.lexists(real):
                yield f"made {real}"
            elif not stat.S_ISDIR(facts.st_mode):
                yield f"wrote {real}"
            elif (facts.st_mode, facts.st_uid, facts.st_gid) != (real.lstat().st_mode, real.lstat().st_uid, real.lstat().st_gid):
                yield f"changed {real}"


def _other_mounts(mine: Path) -> Iterator[str]:
    """Yield the other file systems that can be written."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind in _DISKS and "rw" in options.split(",") and not place.startswith(_KERNEL) and place not in ("/", str(mine)):
            yield place


def _note_in(stream: int) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        paths: tuple[Any, ...] = ()
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            paths = arguments[:1]
        elif event in _EVENTS:
            paths = arguments[: _EVENTS[event]]
        for path in paths:
            if isinstance(path, (str, bytes, os.PathLike)):
                os.write(stream, f"{event} {os.path.abspath(os.fsdecode(path))!a}\n".encode())  # noqa: PTH100 - resolves no links

    sys.addaudithook(hook)


def _noted(events: Path, place: Path) -> Iterator[str]:
    for line in events.read_text().splitlines() if events.exists() else ():
        event, _, text = line.partition(" ")
        path = text[1:-1]
        if not path.startswith((f"{place}/", "/dev/null", "/proc/")) and path != str(place):
            yield f"{event} {path}"


def _loopback() -> None:
    """Start the network of this machine alone, so that a port without a server refuses at once."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    given = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    if getattr(libc, name)(*given):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
