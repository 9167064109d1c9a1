"""The reference of all keys, as Markdown, made from the schema. Pure; `python -m resilient.config.reference` prints it."""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from resilient.config.schema import Config, Container, Section, Tier, WeightedPath
from resilient.config.source import allowed

_HEAD = """# The config

One YAML file says all of a campaign. Every key has a default, so a working config can be a few lines. Unknown keys are errors.
`KEY=VALUE` on the command line overrides a key, dotted: `train.steps=200`, `checkpoint.tiers.0.keep_last=5`. In paths, `~`,
environment variables (`$SCRATCH`, `${USER}`), `${name}` and `${run_dir}` are replaced; paths that are not absolute start where the
command is run.

What `auto` of `train.precision` comes to stands in the run directory's `config.yaml`. A resume goes on in that precision, on other
hardware too; to change it, name one.

The command line wins over the file. So `train.steps` there takes the place of the file's `train.samples`, and a warm-up of the
file for which the shorter run has no room shrinks, to the same share of the run; `resilient run` and `resilient plan` say so.
Numbers that contradict each other in the file alone are refused, and so is a warm-up on the command line that does not fit.

The learning rate is a function of the samples consumed and of the config of the command that runs. With `optimizer.decay_samples:
auto` a shortened run goes through the whole schedule, down to `optimizer.min_lr`. The same command without `train.steps=15` then
goes on from the last checkpoint at the rate that the full schedule has there, which is usually higher. For a run that only ends
early, set `optimizer.decay_samples` to the samples of the full run: then the number of steps does not change the rate.
"""


def markdown() -> str:
    """The whole reference."""
    parts = [_HEAD, _table("top level", Config)]
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            parts.append(_table(name, section))
            if name == "data":
                parts.append(_table("data.tokenizer", type(section().tokenizer)))  # type: ignore[attr-defined]
                parts.append(_table("entries of data.path", WeightedPath))
            if name == "slurm":
                parts.append(_table("slurm.container", Container))
    parts.append(_table("entries of checkpoint.tiers", Tier))
    return "\n".join(parts)


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
