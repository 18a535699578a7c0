"""Storage errors, and the translation of operating system errors into the family."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import ConfigError, DataError, TransientError


class KeyNotFound(DataError):
    """A key that must exist does not."""


class DiskFull(TransientError):
    """No space, or no quota, left on the file system. What was staged has been removed."""


FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
MISSING_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
DENIED_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOLCK})
# Doing one of these, "no such file" is about the key; otherwise it is about the folder it should go to.
READING = frozenset({"reading", "looking at", "listing"})


def key_not_found(uri: str) -> KeyNotFound:
    """The one wording for a missing key."""
    return KeyNotFound(f"{uri} does not exist", expected="an object written earlier", next_command="check the URI")


def translate_os_error(error: OSError, doing: str, uri: str) -> Exception:
    """The family member for an OSError met while `doing` something with `uri`."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    if error.errno in FULL_ERRNOS:
        return DiskFull(
            f"no space left while {doing} {uri} ({name})",
            expected="free space on that file system",
            next_command=f"df -h; free space or move the folder, then run the same command again ({uri})",
        )
    if error.errno in MISSING_ERRNOS and doing in READING:
        return key_not_found(uri)
    if error.errno in DENIED_ERRNOS | MISSING_ERRNOS:
        return ConfigError(
            f"{uri}: {name} while {doing} it",
            expected="a folder this user may read and write",
            next_command="ls -ld that folder; change its permissions or choose another one",
        )
    return TransientError(
        f"{uri}: {name} ({error.strerror}) while {doing} it",
        expected="a healthy file system",
        next_command="run the same command again; if it repeats, check dmesg for disk errors",
    )


@contextmanager
def os_errors(doing: str, uri: str) -> Iterator[None]:
    """Raise DiskFull, KeyNotFound, ConfigError or TransientError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise translate_os_error(error, doing, uri) from error
