"""The reference of all keys, as Markdown, made from the schema. Pure; `python -m resilient.config.reference` prints it."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from resilient.config.annotations import allowed
from resilient.config.fields import Section
from resilient.config.schema import Config
from resilient.config.sections.fault_tolerance import Tier
from resilient.config.sections.machines import Container
from resilient.config.sections.training import Guard, Rampup, WeightedPath
from resilient.config.sinks import SINKS, Sinks
from resilient.identity.classes import CLASSES, Kind

_HEAD = """# The config

One YAML file says all of a campaign. Every key has a default, so a working config can be a few lines. Unknown keys are errors.
`KEY=VALUE` on the command line overrides a key, dotted: `train.steps=200`, `checkpoint.tiers.0.keep_last=5`. In paths, `~`,
environment variables (`$SCRATCH`, `${USER}`), `${name}` and `${run_dir}` are replaced; paths that are not absolute start where the
command is run. `010` and `1:30`, which YAML 1.1 reads as 8 and 90, are refused. Where they are text, as an
account that is called 0123, put them in quotes: `account: '0123'`, and on the command line `slurm.account="'0123'"`.

What `auto` of `train.precision` and `train.compile` comes to stands in the run directory's `config.yaml`. A resume goes on with
that, on other hardware too; to change it, name a value.

The command line wins over the file. So `train.steps` there takes the place of the file's `train.samples`, and a warm-up of the
file for which the shorter run has no room shrinks, to the same share of the run; `resilient run` and `resilient plan` say so.
Numbers that contradict each other in the file alone are refused, and so is a warm-up on the command line that does not fit.

The learning rate is a function of the samples consumed and of the config of the command that runs. With `optimizer.decay_samples:
auto` a shortened run goes through the whole schedule, down to `optimizer.min_lr`. The same command without `train.steps=15` then
goes on from the last checkpoint at the rate that the full schedule has there, which is usually higher. For a run that only ends
early, set `optimizer.decay_samples` to the samples of the full run: then the number of steps does not change the rate.

## What may change between two jobs

A campaign that goes on is compared with what it began as ([run-directory.md](run-directory.md), *Identity*). Each key has a class:

"""

_CLASSES: Mapping[Kind, str] = {
    "free": "nothing is said: the numbers do not depend on it",
    "told": "it is logged: a line on the terminal, and `config_changed` in the ledger",
    "refused": "exit 78 before anything starts, unless the key is accepted: `--accept KEY`",
}

_CLASSES_END = """
A default that an upgrade has changed is not taken over: a key that the config does not name keeps the value that the campaign began
with, and a line says so. `auto` is compared by what it comes to, files by what is in them, and keys that are not in effect, such as
`optimizer.beta3` without `adan`, are not compared. Of a script, only its arguments, its file and the number of ranks are. Versions
of Python, torch, numpy and other packages that compute have the class `told`.
"""


_RECOMPUTATION = """## What recomputation keeps

Values that a layer keeps of a token for its backward pass, in units of the hidden size, with k = `kv_heads` / `heads` and
f = `ffn_hidden` / `hidden`, without tensor parallelism and dropout; times 2 for bytes in bf16, 4 in fp32. `resilient plan` does the
sum.

| `train.recompute` | what is kept | SwiGLU | GELU |
|---|---|---|---|
| `none` | all that is needed: inputs of norms, products, attention and activations | 7 + 2k + 4f | 7 + 2k + 2f |
| `selective` | what the layer is given, and the results of products and of flash attention | 4 + 2k + 2f | 4 + 2k + f |
| `full` | what the layer is given | 1 | 1 |

`selective` computes norms, rotations and activations again, and costs no matrix product. Explicit attention (`model.attention:
math`), whose scores would be kept, `heads` × `seq_len` of them, is computed again; so is that of a kernel that drops scores. With
tensor parallelism ranks keep what they have sent each other. Compiled layers keep of this what the compiler finds is needed.
"""


def markdown() -> str:
    """The whole reference."""
    parts = [_HEAD + _classes(), _table("top level", Config)]
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            parts.append(_table(name, section))
            if name == "train":
                parts += [_table("train.guard", Guard), _table("train.batch_rampup", Rampup), _RECOMPUTATION]
            if name == "data":
                parts.append(_table("data.tokenizer", type(section().tokenizer)))  # type: ignore[attr-defined]
                parts.append(_table("entries of data.path", WeightedPath))
            if name == "slurm":
                parts.append(_table("slurm.container", Container))
            if name == "logging":
                parts.append(_table("logging.sinks", Sinks))
                parts += [_table(f"logging.sinks.{sink}", kind) for sink, kind in SINKS.items()]
    parts.append(_table("entries of checkpoint.tiers", Tier))
    return "\n".join(parts)


def _classes() -> str:
    """Which keys may change between two jobs."""
    rows = ["| class | keys | when it has changed |", "|---|---|---|"]
    for kind, words in _CLASSES.items():
        sections: dict[str, list[str]] = {}
        for key in (key for key, each in CLASSES.items() if each == kind):
            section, _, name = key.rpartition(".")
            sections.setdefault(section or ("" if key not in Config.model_fields or not _is_whole(key) else key), []).append(name)
        parts = [f"`{section}`: all" if names == [section] else _listed(section, names) for section, names in sections.items()]
        rows.append(f"| {kind} | {'; '.join(parts)} | {words} |")
    return "\n".join([*rows, _CLASSES_END])


def _is_whole(key: str) -> bool:
    return _is_section(Config.model_fields[key])


def _listed(section: str, names: list[str]) -> str:
    words = ", ".join(f"`{name}`" for name in names)
    return f"`{section}`: {words}" if section else words


def _table(title: str, section: type[BaseModel]) -> str:
    about = f"\n{section.__doc__.strip()}\n" if section.__doc__ and section is not Config else ""
    rows = [_row(name, field) for name, field in section.model_fields.items() if not _is_section(field)]
    return "\n".join([f"## {title}", about, "| key | allowed | default | |", "|---|---|---|---|", *rows, ""])


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _row(name: str, field: FieldInfo) -> str:
    words = allowed(field.annotation, field).replace("|", "\\|")
    return f"| `{name}` | {words} | {_default(field)} | {field.description or ''} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{json.dumps(_plain(field.default), ensure_ascii=False)}`"


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    sys.stdout.write(markdown())
