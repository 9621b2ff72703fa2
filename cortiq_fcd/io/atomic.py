"""A file that is either the old one or the whole new one, whatever happens in between.

The new file grows under a temporary name in the target's directory, `.NAME.<16 hex digits>.partial`. Every failure
removes it. Only a killed process can leave one behind: it is harmless, and the next success at the same target
removes it, unless its writer is still alive (it holds a lock on the file).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

from cortiq_fcd.errors import ConfigError, ResourceError

try:
    import fcntl
except ImportError:  # Windows, where an open file can't be deleted anyway
    fcntl = None  # type: ignore[assignment]

_Result = TypeVar("_Result")

_MOST_NAME_BYTES = 255  # of one path component, on all common file systems


def check_output_path(source_paths: Iterable[Path], out: Path, force: bool) -> Path:
    """Whether `out` can be written, as far as can be known without writing; returns its path behind symbolic links.

    ConfigError: exists without `force`, is one of the sources by any link (those need not exist), is a directory or a
    device, its directory is missing, its name too long. ResourceError: its directory can't be written to.
    """
    out = Path(out)
    target = Path(os.path.realpath(out))
    try:
        _check_place(out, target)
        for source in source_paths:
            if _is_same_file(Path(source), target):
                raise ConfigError(f"{out}: is the same file as {source}", hint="no input is ever changed: name another")
        if os.path.lexists(out) and not force:
            raise ConfigError(f"{out}: exists already", hint="give --force to replace it, or name another file")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise ResourceError(f"{out}: the directory {target.parent} can't be written to", hint="name another one")
    except OSError as error:  # a name that is too long, a directory that must not be searched
        raise _explained(error, out) from error
    return target


def _check_place(out: Path, target: Path) -> None:
    if target.is_dir():
        raise ConfigError(f"{out}: is a directory", hint=f"name a file, such as {out / 'model.cmf'}")
    if not target.parent.is_dir():
        raise ConfigError(f"{out}: there is no directory {target.parent}", hint=f"mkdir -p {target.parent}")
    if target.exists() and not target.is_file():
        raise ConfigError(f"{out}: is not a regular file", hint="name a file")
    if len(os.fsencode(_partial_of(target).name)) > _MOST_NAME_BYTES:
        raise _too_long(out)


def _is_same_file(source: Path, target: Path) -> bool:
    """By any link; of files that do not exist yet, by name. A source that can't be looked at is its reader's to refuse:
    its faults must not be blamed on the target.
    """
    try:
        if source.exists() and target.exists():
            return source.samefile(target)
    except (OSError, ValueError):
        pass
    return os.path.realpath(source) == os.fspath(target)


def check_free_space(out: Path, nbytes: int) -> None:
    """ResourceError unless the file system of `out` has room for `nbytes` more: a replaced file goes only later."""
    try:
        free = shutil.disk_usage(Path(os.path.realpath(out)).parent).free
    except OSError as error:
        raise _explained(error, out) from error
    if free < nbytes:
        raise ResourceError(
            f"{out}: needs {nbytes:,} bytes, and only {free:,} are free there",
            hint="free some space, or name an output on another disk",
        )


def write_atomically(
    target: Path, write: Callable[[BinaryIO], _Result], verify: Callable[[Path], None] = lambda _: None
) -> _Result:
    """Let `write` fill a new file and `verify` inspect it on disk; then it takes the place of `target`.

    Any exception, KeyboardInterrupt included, leaves `target` as it was and no temporary file. OSErrors come out as
    ResourceError (ConfigError for a name that is too long).
    """
    partial = _partial_of(target)
    file: BinaryIO | None = None
    try:
        file = _create(partial)
        result = write(file)
        file.flush()
        os.fsync(file.fileno())
        if fcntl is None:
            file.close()  # an open file can't be renamed there
        verify(partial)
        partial.replace(target)
    except OSError as error:
        raise _explained(error, target) from error
    finally:
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk may refuse the last buffer once more
                file.close()
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    _sync_directory(target.parent)
    remove_leftovers(target)
    return result


def remove_leftovers(target: Path) -> None:
    """Delete the partial files of killed writers of `target`; what can't be deleted stays."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.partial")
    with contextlib.suppress(OSError):
        for path in list(target.parent.iterdir()):
            if pattern.fullmatch(path.name):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    _lock(file)  # fails while the writer lives
                    path.unlink()


def _partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")


def _create(path: Path) -> BinaryIO:
    """A new file with the usual permissions (those that the umask leaves), locked."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), "w+b")
    with contextlib.suppress(OSError):  # some network file systems know no locks
        _lock(file)
    return file


def _lock(file: BinaryIO) -> None:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_directory(directory: Path) -> None:
    """Make the rename durable. Where directories can't be synced the file is whole all the same."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _explained(error: OSError, target: Path) -> ConfigError | ResourceError:
    reason = error.strerror or str(error)
    if error.errno == errno.ENAMETOOLONG:
        return _too_long(target)
    hint = "the previous file, if there was one, is untouched"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"free some space, or name an output on another disk; {hint}"
    return ResourceError(f"{target}: can't be written ({reason})", hint=hint)


def _too_long(out: Path) -> ConfigError:
    return ConfigError(f"{out}: the name is too long for a temporary file beside it", hint="name a shorter one")
