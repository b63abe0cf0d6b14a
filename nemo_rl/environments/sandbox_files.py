"""Measuring and removing a directory that somebody else has filled with whatever came to mind."""

from __future__ import annotations

import os
import stat


def disk_use(directory: str, max_files: int) -> tuple[int, int]:
    """(bytes on disk, number of entries) below a directory; counting stops beyond `max_files` entries.

    Its owner is still at work: what is gone by now counts as empty, and what is hidden as beyond `max_files`.
    """
    size = entries = 0
    waiting = [directory]
    while waiting and entries <= max_files:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    entries += 1
                    if entries > max_files:
                        break
                    status = entry.stat(follow_symlinks=False)
                    size += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # a path that is too long, a directory that cannot be read: there is no looking into it
            return size, max_files + 1
    return size, entries


def remove_tree(directory: str, *, keep: bool = False) -> None:
    """Remove a directory, or with `keep` only what is in it: neither links, nor depth, nor modes are an obstacle.

    Nobody else may be at work in it. Links are not followed. Directories inside directories are moved up and emptied
    there, so that paths stay short.
    """
    number = 0
    os.chmod(directory, 0o700)
    waiting = [directory]
    while waiting:
        inner = waiting[-1]
        found = False
        with os.scandir(inner) as entries:
            listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_directory in listed:
            path = os.path.join(inner, name)
            if not is_directory:
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            if inner != directory or len(name) > 100:
                number += 1
                moved = os.path.join(directory, f".removed-{os.getpid()}-{number}")
                while os.path.lexists(moved):
                    number += 1
                    moved = os.path.join(directory, f".removed-{os.getpid()}-{number}")
                os.rename(path, moved)
                path = moved
            waiting.append(path)
            found = True
        if not found:
            if inner != directory or not keep:
                os.rmdir(inner)
            waiting.pop()
