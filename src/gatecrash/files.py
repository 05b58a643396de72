"""Files written so that a killed process leaves the old one or the new one, never half of one."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes its place when the block ends well and is removed when it does not.

    Raises:
        OSError: the file cannot be written, a full disk for one; it names `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.chmod(0o644)
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from error
    finally:
        draft.unlink(missing_ok=True)


def cannot_write(path: Path, error: Exception) -> OSError:
    """The error for a file that could not be written; safetensors gives the system's error in words only."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, os.strerror(error.errno), str(path))
    text = " ".join(str(error).split())
    number = re.search(r"\(os error (\d+)\)", text)
    if number is None:
        return OSError(errno.EIO, text, str(path))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def at_home(folder: str | Path, path: str | Path) -> Path:
    """A path relative to a folder, `~` meaning a home.

    Raises:
        ValueError: the path starts with the home of somebody who is not there.
    """
    try:
        return Path(folder) / Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error
