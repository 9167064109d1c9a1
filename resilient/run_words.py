"""What `resilient run` is told: a config with keys to set, or in torchrun's place a script with its arguments.

Pure: words go in, the path of a config and the keys to set come out. A script without a config is an empty config and keys.
"""

import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from resilient.config.document import as_text
from resilient.config.errors import COMMAND_LINE, ConfigError, Problem

NO_CONFIG = Path(os.devnull)  # an empty file is a config

OPTIONS = ("--procs", "--nodes", "--run-dir", "--accept", "--module", "--help")
HELP = ("-h", "--help")

_MET = "leave it out, for the runtime has its ranks find each other"
OF_TORCHRUN = {
    "nproc-per-node": "here it is --procs N",
    "nnodes": "here it is --nodes N",
    "max-restarts": "here it is resilience.max_restarts_per_hour=N, before the script",
    "log-dir": "here it is --run-dir DIR, with the logs of all ranks in it",
    **dict.fromkeys(("standalone", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr"), _MET),
    **dict.fromkeys(("master-addr", "master-port", "node-rank"), _MET),
}
"""Options of torchrun, and what takes their place."""

_DRY_RUN = "--dry-run is of `resilient submit`, and shows its batch script; `resilient plan` checks a config"

_SETTING = re.compile(r"^[A-Za-z_][\w.]*=")
_PYTHON = re.compile(r"^python[\d.]*$")


@dataclass(frozen=True)
class Told:
    """The config's file, `KEY=VALUE` for each key that is set, and the keys whose change is accepted."""

    config: Path
    settings: tuple[str, ...]
    accept: tuple[str, ...] = ()


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether the command's own help is asked for: with nothing to run, or behind a config. Args: words: as of `understand`."""
    rest = [*itertools.dropwhile(_SETTING.match, words)]
    if not rest or rest[0] == "-m" or rest[0].endswith(".py"):
        return False
    return any(word in HELP for word in rest)


def understand(
    words: Sequence[str],
    *,
    procs: int | None,
    nodes: int | None,
    run_dir: Path | None,
    module: bool = False,
    accept: Sequence[str] = (),
) -> Told:
    """What a command line says.

    Args:
        words: after the options: settings, then a config, a script, or `-m` and a module; what follows a script or a module is
            theirs. Settings and `--accept KEY` may follow a config, too.
        procs, nodes, run_dir: as given by options; None: not given.
        module: `-m` stood before the words.
        accept: as given by options before everything else.

    Raises:
        ConfigError: nothing is named that could be run.
    """
    settings = [*itertools.takewhile(_SETTING.match, words)]
    rest = list(words[len(settings) :])
    if module:
        rest = ["-m", *rest]
    if not rest or rest == ["-m"]:
        raise ConfigError([_wrong("name a config (YAML), a script (train.py), or a module (-m package.module)")])
    if rest[0].startswith("-") and rest[0] != "-m":
        raise ConfigError([_wrong(_no_option(rest[0]))])
    asked = [
        *([f"cluster.procs_per_node={procs}"] if procs is not None else []),
        *([f"cluster.nodes={nodes}"] if nodes is not None else []),
        *([f"run_dir={as_text(str(run_dir))}"] if run_dir is not None else []),
    ]
    if rest[0] == "-m":
        return _program(rest, rest[1].rpartition(".")[2], [*asked, *settings], accept)
    if rest[0].endswith(".py"):
        return _program(rest, Path(rest[0]).stem, [*asked, *settings], accept)
    if _PYTHON.match(Path(rest[0]).name):
        raise ConfigError([_wrong(f"leave {rest[0]} out, for ranks run in the interpreter of this command: {sys.executable}")])
    behind, keys = _accepted(rest[1:])
    return Told(Path(rest[0]), (*asked, *settings, *behind), (*accept, *keys))


def _accepted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What follows a config: settings, and the keys of `--accept KEY` and `--accept=KEY`. Raises ConfigError."""
    settings, keys = [], []
    left = iter(words)
    for word in left:
        if word == "--accept":
            key = next(left, None)
            if key is None:
                raise ConfigError([_wrong("--accept names a key, as in --accept model.norm_eps")])
            keys.append(key)
        elif word.startswith("--accept="):
            keys.append(word.removeprefix("--accept="))
        elif word.startswith("-"):
            raise ConfigError([_wrong(_no_option(word))])
        else:
            settings.append(word)
    return settings, keys


def _program(words: Sequence[str], name: str, settings: Sequence[str], accept: Sequence[str]) -> Told:
    fit = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-") or "run"
    return Told(
        NO_CONFIG,
        (f"name={as_text(fit)}", f"entrypoint={as_text(shlex.join(words))}", *settings),
        tuple(accept),
    )


def _no_option(word: str) -> str:
    """What is wrong with an option that there is not, and what stands in its place."""
    name = word.partition("=")[0]
    plain = name.lstrip("-").replace("_", "-")
    if plain in OF_TORCHRUN:
        return f"{name} is torchrun's: {OF_TORCHRUN[plain]}"
    if name == "--dry-run":
        return _DRY_RUN
    if name in OPTIONS or name == "-m":
        return f"options come before everything else: write {name} right behind `resilient run`"
    near = get_close_matches(f"--{plain}", OPTIONS, 1, 0.7)
    did_you_mean = f"; did you mean {near[0]}?" if near else f": {', '.join(OPTIONS)}"
    return f"options come before everything else, and {name} is none of `resilient run`{did_you_mean}"


def _wrong(text: str) -> Problem:
    return Problem("", None, text, None, COMMAND_LINE)
