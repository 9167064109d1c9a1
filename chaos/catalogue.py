"""What of docs/chaos.md is made from the code: the table of all faults, and the keys of an experiment.

`python -m chaos.catalogue docs/chaos.md` writes both anew between their markers; the rest of the file is written by hand.
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from chaos import experiment, faults
from chaos.fault import Fault, Inside, parameters
from chaos.orchestration.volumes import Volume
from resilient.config.annotations import allowed

_SECTIONS: dict[str, type[BaseModel]] = {
    "the whole": experiment.Experiment,
    "campaign": experiment.Campaign,
    "entries of campaign.volumes": Volume,
    "entries of faults": experiment.Scheduled,
    "at": experiment.When,
    "random": experiment.Mix,
    "entries of random.kinds": experiment.Kind,
    "limits": experiment.Limits,
    "lab": experiment.LabSpec,
}


def renewed(text: str) -> str:
    """The document with what is generated made anew.

    Raises:
        ValueError: a marker is missing.
    """
    for name, part in (("faults", "\n".join(_faults())), ("keys", "\n".join(_keys()))):
        pattern = re.compile(rf"(<!-- {name}: .*? -->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, part=part: f"{found[1]}\n{part}\n{found[2]}", text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"there are {count} pairs of the markers `<!-- {name}: ... -->` and `<!-- end of {name} -->`")
    return text


# -- faults ------------------------------------------------------------------------------------------------------------


def _faults() -> Iterator[str]:
    yield from _table("fault", "what happens", "aimed at", "needs", "parameters", "how it is undone", "what should come of it")
    for name in faults.names():
        kind = faults.kind(name)
        needs = ", ".join(sorted(kind.needs)) or "nothing"
        own = "<br>".join(_parameter(*each) for each in parameters(kind)) or "none"
        where = f"{kind.aim}, from inside" if issubclass(kind, Inside) else str(kind.aim)
        yield _row(f"`{name}`", " ".join((kind.__doc__ or "").split()), where, needs, own, kind.undone, _expected(kind))


def _parameter(name: str, kind: str, default: object, about: str) -> str:
    given = "required" if default is PydanticUndefined else f"{default!r}"
    return f"`{name}` ({given}): {about}" if about else f"`{name}` ({given})"


def _expected(kind: type[Fault]) -> str:
    """With the parameters' defaults."""
    try:
        expected = kind().expects()
    except ValidationError:
        return "depends on its parameters"
    reported = [f"reported as {' or '.join(f'`{each}`' for each in sorted(expected.kinds))}"] if expected.kinds else []
    reported += ["which names the target"] if expected.culprit else []
    reported += ["or not reported"] if expected.may_pass and expected.kinds else []
    done = [" or ".join(f"`{each}`" for each in sorted(expected.actions))] if expected.actions else []
    ends = [f"the job may end with {', '.join(map(str, sorted(expected.exits)))}"] if expected.exits else []
    refused = ["a checkpoint is passed over"] if expected.rejected else []
    close = [] if expected.exact else ["numbers may differ from then on"]
    return "; ".join([*([", ".join(reported)] if reported else []), *done, *ends, *refused, *close]) or "nothing: training goes on"


# -- keys --------------------------------------------------------------------------------------------------------------


def _keys() -> Iterator[str]:
    for title, section in _SECTIONS.items():
        yield f"### {title}\n"
        about = textwrap.dedent(f"    {section.__doc__ or ''}").strip()
        yield f"{about}\n"
        yield from _table("key", "allowed", "default", "")
        for name, field in section.model_fields.items():
            default = "required" if field.is_required() else f"`{_plain(field.default)}`"
            yield _row(f"`{field.alias or name}`", allowed(field.annotation, field), default, field.description or "")
        yield ""


def _plain(value: object) -> str:
    """As it stands in YAML."""
    if isinstance(value, BaseModel):
        return "{}"
    return json.dumps(value, default=list) if value != "" else '""'


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(*head: str) -> Iterator[str]:
    yield _row(*head)
    yield f"|{'---|' * len(head)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    """Renew a file in place."""
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    main()
