"""Run the steps of the Dockerfile one by one in a folder that holds a bare Linux, where no Docker daemon runs.

    debootstrap --variant=minbase bookworm /tmp/root
    python tools/prove_dockerfile.py /tmp/root --arg EXTRA=cpu

Needs the rights of root (chroot, mount). ARG, ENV, COPY, WORKDIR and USER mean what they mean to Docker, as far as the
Dockerfile uses them; anything else is an error. Prints the seconds of each step and by how much the folder grew, which
is the size of the layer. Exit status 1: the step that failed.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest of the line) in order; comments dropped, continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


@dataclass
class Build:
    """The settings that earlier instructions left for the next one."""

    root: Path
    variables: dict[str, str]
    """ARG and ENV together: both are in the environment of RUN."""
    cache: Path
    ignored: list[str] = field(default_factory=list)
    user: str = "0"
    folder: str = "/"

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda match: self.variables.get(match[1], ""), text)

    def run(self, text: str) -> int:
        """The exit status of a RUN, in a mount namespace of its own."""
        root = str(self.root)
        mounts = [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev", f"mount --rbind /sys {root}/sys"]
        while match := re.match(r"--mount=(\S+)\s+", text):
            options = dict(part.split("=", 1) for part in match[1].split(","))
            assert options["type"] == "cache", match[0]
            target = root + options["target"]
            mounts += [f"mkdir -p {target}", f"mount --bind {self.cache} {target}"]
            text = text[match.end() :]
        words = ["env", "-i", *(f"{name}={value}" for name, value in self.variables.items())]
        words += ["/bin/sh", "-c", f"cd {self.folder} && {text}"]
        home = "/root" if self.user == "0" else self._home()
        words.insert(2, f"HOME={home}")
        inside = shlex.join(["chroot", f"--userspec={self.user}:{self.user}", root, *words])
        return subprocess.run(["unshare", "--mount", "sh", "-ec", "\n".join([*mounts, inside])]).returncode

    def _home(self) -> str:
        passwd = (self.root / "etc/passwd").read_text()
        return next(line.split(":")[5] for line in passwd.splitlines() if line.split(":")[2] == self.user)

    def copy(self, text: str) -> None:
        """COPY of files that git tracks or does not ignore, without those of .dockerignore."""
        words = self.filled(text).split()
        owner = int(words.pop(0).removeprefix("--chown=").split(":")[0]) if words[0].startswith("--chown=") else 0
        *sources, target = words
        listed = subprocess.check_output(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
        ).splitlines()
        destination = self.root / self.folder.lstrip("/") / target
        for source in sources:
            files = [name for name in listed if source == "." or name == source]
            assert files, f"COPY {source}: no such file"
            for name in files:
                if not any(fnmatch(part, pattern) for part in Path(name).parts for pattern in self.ignored):
                    path = destination / (name if source == "." else Path(name).name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, path)
        subprocess.run(["chown", "-R", f"{owner}:{owner}", destination], check=True)


def build(root: Path, cache: Path, arguments: dict[str, str]) -> int:
    """Run every instruction; the exit status of the first RUN that fails, or 0."""
    ignored = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()]
    state = Build(
        root, {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **arguments}, cache, ignored
    )
    size = _size_mb(root)
    for instruction, text in instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        start, status = time.monotonic(), 0
        match instruction:
            case "FROM" | "CMD":
                pass
            case "ARG":
                name, _, default = text.partition("=")
                state.variables.setdefault(name, default)
            case "ENV":
                for word in shlex.split(text):
                    name, _, value = word.partition("=")
                    state.variables[name] = state.filled(value)
            case "USER":
                state.user = text
            case "WORKDIR":
                state.folder = text
                (root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                state.copy(text)
            case "RUN":
                status = state.run(text)
            case _:
                raise ValueError(f"{instruction} is not known to this script")
        if instruction in ("COPY", "RUN"):
            before, size = size, _size_mb(root)
            print(f"{time.monotonic() - start:6.0f} s {size - before:+7.0f} MB  {instruction} {text[:90]}", flush=True)
        if status != 0:
            print(f"failed with status {status}: RUN {text}")
            return status
    return 0


def _size_mb(root: Path) -> float:
    kilobytes = subprocess.check_output(["du", "-skx", root], text=True).split()[0]
    return int(kilobytes) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="folder of a bare Debian or Ubuntu")
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help="as --build-arg of docker build"
    )
    parser.add_argument("--cache", type=Path, default=Path("/tmp/uv-cache"), help="folder that stands for cache mounts")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    subprocess.run(["chown", "1000:1000", args.cache], check=True)
    raise SystemExit(min(1, build(args.root.resolve(), args.cache.resolve(), dict(a.split("=", 1) for a in args.arg))))


if __name__ == "__main__":
    main()
