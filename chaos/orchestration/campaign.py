"""The campaign under fire: its config in a directory of its own, and the command that runs it, again and again if need be.

Owns what a person would do who starts a campaign, or a chain of jobs: `resilient run`, and the same again when it ended early.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from chaos.experiment import Campaign as Wanted
from chaos.experiment import ExperimentError
from chaos.orchestration.names import RUN
from chaos.orchestration.sites import Site, Started
from chaos.orchestration.volumes import filled_in, paths
from chaos.verdict.observation import JobRun
from resilient.config import Config, ConfigError, attribute, document, dump, load, spans
from resilient.config.document import NotADocument
from resilient.config.errors import Problem
from resilient.decided import decided

REFERENCE, CONFIG, OUTPUT = "reference", "config.yaml", "output"


def resolve(wanted: Wanted, experiment: Path, directory: Path, *, allow: bool, changes: Mapping[str, Any] | None = None) -> Config:
    """The config of a campaign in a directory, written there.

    Args:
        experiment: the file of the experiment, from which a config's file is looked for.
        directory: gets `config.yaml`, and becomes the parent of the run directory.
        changes: made last.

    Raises:
        ExperimentError: it cannot be, or there is no such file.
    """
    values: dict[str, Any] = {}
    if wanted.file is not None:
        path = experiment.parent / wanted.file
        try:
            values = document.read(path) or {}
        except NotADocument as error:
            at = path if error.line is None else f"{path}:{error.line}"
            raise ExperimentError([Problem("campaign.file", wanted.file, f"{at}: {error.message}")]) from None
        if not isinstance(values, dict):
            raise ExperimentError([Problem("campaign.file", wanted.file, f"{path}: a config is a mapping of keys to values")])
    for each in (wanted.config, changes or {}, {"run_dir": str(directory.absolute() / RUN), "chaos": {"allow": allow}}):
        values = merged(values, each)
    values = filled_in(values, paths(wanted.volumes, directory))
    path = directory / CONFIG
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    try:
        config, _ = decided(load(path, []))  # once for all runs of the experiment, in a lab or on this machine
    except ConfigError as error:
        raise ExperimentError([_where_it_stands(wanted, experiment, each) for each in error.problems]) from None
    path.write_text(dump(config))
    return config


def _where_it_stands(wanted: Wanted, experiment: Path, problem: Problem) -> Problem:
    """A problem of a campaign's config as one of the experiment, or of the config's file where it stands there."""
    if wanted.file is not None and not _has(wanted.config, problem.key.split(".")):
        file = experiment.parent / wanted.file
        return attribute(ConfigError([replace(problem, file=None, line=None)]), file).problems[0]
    return Problem(f"campaign.config.{problem.key}".rstrip("."), problem.value, problem.message)


def _has(values: object, key: Sequence[str]) -> bool:
    """Whether what changes a config has a key; of a list all, since it is taken as a whole."""
    return not key or not isinstance(values, Mapping) or (key[0] in values and _has(values[key[0]], key[1:]))


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings, of which the second one wins; mappings inside of both are merged in the same way."""
    found = dict(below)
    for key, value in above.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def shortened(config: Config, steps: int) -> dict[str, dict[str, object]]:
    """Changes of a config with which its training ends earlier, and computes until then what it would have computed."""
    warmup, decay = spans(config)
    samples: dict[str, object] = {"warmup_samples": warmup, "decay_samples": decay, "warmup_tokens": None, "decay_tokens": None}
    return {"train": {"steps": steps}, "optimizer": samples}


class Campaign:
    """One run directory and the command that is run on it.

    Args:
        directory: with the config.
        environ: added to the environment of all that is started.
    """

    def __init__(self, config: Config, directory: Path, site: Site, environ: Mapping[str, str]) -> None:
        self.config, self.directory = config, directory
        self.run_dir = config.run_dir
        self.jobs: list[JobRun] = []
        self._began_t = 0.0
        self._site, self._environ = site, environ
        self._started: Started | None = None

    def start(self, *overrides: str) -> None:
        """Run it, or go on with it."""
        words = [sys.executable, "-m", "resilient", "run", str((self.directory / CONFIG).absolute()), *overrides]
        self._began_t = time.time()
        self._started = self._site.run(words, self._environ, (self.directory / OUTPUT).absolute(), self.config.cluster.slots)

    def ended(self) -> int | None:
        """The exit code of the command that was started last; None while it runs."""
        if self._started is not None and (code := self._started.poll()) is not None:
            self.jobs.append(JobRun(self._began_t, time.time(), code))
            self._started = None
        return self.jobs[-1].code if self._started is None and self.jobs else None

    def conclude(self, step: int) -> None:
        """It was stopped, and what it has is its target now; the same command must find that it is reached. Both are one job."""
        stopped = self.jobs.pop()
        self.start(f"train.steps={step}")
        self._began_t = stopped.began_t

    def stop(self) -> None:
        """Ask it to stop at its next step, with its state made durable."""
        if self._started is not None:
            self._started.stop()

    def last_words(self) -> str:
        """The end of what it printed."""
        path = self.directory / OUTPUT
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""


def is_one_of(code: int, exits: frozenset[int]) -> bool:
    """Whether a command ended in one of these ways; a signal may be written as a shell does, or with a minus."""
    return code in exits or (code < 0 and 128 - code in exits) or (code > 128 and 128 - code in exits)


def by_signal(code: int) -> str:
    """How a command ended, in words."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
