"""YAML documents from files that may be anything: regular, small, shallow, without loops, or refused in one line.

Owns the limits. YAML as such has none: an alias may contain itself, a few lines of aliases may stand for billions of nodes, and a
document that is nested deeply enough exhausts the stack. What is refused here costs little more than the reading of it.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

LIMIT_BYTES = 1 << 20
LIMIT_DEPTH = 32
LIMIT_NODES = 50_000  # aliases counted with all that they stand for
LIMIT_NUMBER = 100  # characters; a date is a number here

_TEXT = "tag:yaml.org,2002:str"
_UNPRINTABLE = re.compile("[\x00\ud800-\udfff]")  # that no path and no terminal takes

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_AMBIGUOUS = re.compile(r"[-+]?0[0-7_]+|.*:.*")  # octal, sexagesimal

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotADocument(Exception):
    """A file or a text is no YAML document that is read here.

    Attributes:
        message: what is wrong, and what is allowed, in one line.
        line: where, from 1; None where it is the whole.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message, self.line = message, line


class AmbiguousNumber(NotADocument):
    """A number that YAML 1.1 reads otherwise than a person writes it: 010 is 8 there, and 1:30 is 90."""


def read(path: Path) -> Any:
    """The plain values of a file; None where it is empty. A key that stands twice is refused. Raises NotADocument."""
    node = compose(text_of(path))
    _must_be_once(node)
    return construct(node)


def _must_be_once(node: yaml.Node | None) -> None:
    """Raises NotADocument where one key of a mapping would silently take the place of another."""
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise NotADocument(f"{key.value} stands twice; it was set in line {lines[key.value]} already", line)
                lines[key.value] = line
            _must_be_once(value)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _must_be_once(each)


def value_at(path: Path, *key: str) -> object:
    """What a document, such as the config that a run directory keeps, has at a key; None where there is none to be read."""
    try:
        found = read(path)
    except NotADocument:
        return None
    for part in key:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def text_of(path: Path) -> str:
    """The text of a file; of the null device, none. What is no regular file is not waited for. Raises NotADocument."""
    if str(path) == os.devnull:
        return ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotADocument("there is no such file") from None
    except OSError as error:
        raise NotADocument(f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise NotADocument("there is no such file: its name holds a NUL") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
            raise NotADocument(f"is {kind}; allowed: a regular file with YAML")
        if found.st_size > LIMIT_BYTES:
            raise NotADocument(f"has {found.st_size:,} bytes; allowed: at most {LIMIT_BYTES:,}")
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(LIMIT_BYTES + 1)  # the files of /proc have no size
    except OSError as error:
        raise NotADocument(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(data) > LIMIT_BYTES:
        raise NotADocument(f"has more than {LIMIT_BYTES:,} bytes, which is all that is allowed")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotADocument(f"is not UTF-8 text (byte {error.start})") from None


def compose(text: str) -> yaml.Node | None:
    """The nodes of a document, a tree once aliases are followed; None where it is empty. Raises NotADocument."""
    try:
        node: yaml.Node | None = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        raise _refused(error) from None
    return node


def construct(node: yaml.Node | None) -> Any:
    """The plain values of a document. Raises NotADocument."""
    if node is None:
        return None
    try:
        return _apart(yaml.SafeLoader("").construct_document(node))
    except yaml.YAMLError as error:
        raise _refused(error) from None
    except (ValueError, OverflowError) as error:  # a day that is in no calendar
        raise NotADocument(f"not valid YAML: {error}") from None


def _apart(value: Any) -> Any:
    """The same, but what an alias stands for is a value of its own: whoever changes one does not change the others."""
    if isinstance(value, dict):
        return {key: _apart(each) for key, each in value.items()}
    return [_apart(each) for each in value] if isinstance(value, list) else value


def as_text(value: object) -> str:
    """A plain value as the `VALUE` of `KEY=VALUE` that is read as the same; bytes that are no characters stay what they are."""
    if isinstance(value, str) and _UNPRINTABLE.search(value):
        return value
    style = '"' if isinstance(value, str) else None
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, allow_unicode=True, width=LIMIT_BYTES)
    return text.removesuffix("...\n").rstrip("\n")


def is_number(node: yaml.Node) -> bool:
    """Whether it is a number, whose `value` is as it is written."""
    return node.tag in _NUMBERS


def is_cut_short(node: yaml.Node | None, text: str) -> bool:
    """Whether YAML takes a part of a text, as of a word of the command line, for a comment: `#5`, and the end of `Issue #5`."""
    if text.lstrip().startswith("#"):
        return True
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return False
    return text[node.end_mark.index :].lstrip().startswith("#")


def written(node: yaml.Node) -> str:
    """The text that a node of `compose` was read from."""
    begin, end = node.start_mark, node.end_mark
    return (begin.buffer or "")[begin.pointer : end.pointer]


def _refused(error: yaml.YAMLError) -> NotADocument:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return NotADocument(f"not valid YAML: {what}", mark.line + 1 if mark is not None else None)


class _Loader(yaml.SafeLoader):
    """Counts while it composes.

    Invariant: `_count` is the number of nodes so far, aliases written out; `_sizes` has the nodes under each anchor that is closed.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors and event.anchor not in self._sizes:
                raise NotADocument(f"not valid YAML here: *{event.anchor} stands within what it stands for", line)
            self._add(self._sizes.get(event.anchor or "", 0), line)
            return super().compose_node(parent, index)
        if self._depth >= LIMIT_DEPTH:
            raise NotADocument(f"is nested more than {LIMIT_DEPTH} deep, which is all that is allowed", line)
        before = self._count
        self._add(1, line)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._sizes[event.anchor] = self._count - before
        return node

    def _add(self, nodes: int, line: int) -> None:
        self._count += nodes
        if self._count > LIMIT_NODES:
            raise NotADocument(f"has more than {LIMIT_NODES:,} values, aliases written out, which is all that is allowed", line)

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        line = node.start_mark.line + 1
        if node.tag != _TEXT:
            if len(node.value) > LIMIT_NUMBER:
                raise NotADocument(f"a number of {len(node.value):,} characters; allowed: at most {LIMIT_NUMBER}", line)
            if self.resolve(yaml.ScalarNode, node.value, (True, False)) != node.tag:  # type: ignore[no-untyped-call]
                name = node.tag.rpartition(":")[2]
                raise NotADocument(f"not valid YAML: {node.value[:40]!r} cannot be tagged {name!r}", line)
            if node.tag in _NUMBERS and _AMBIGUOUS.fullmatch(node.value):
                what = "a leading zero makes a number octal" if ":" not in node.value else "a colon makes a number sexagesimal"
                number = construct(yaml.ScalarNode(node.tag, node.value))
                message = f"{node.value} is {number} in YAML, where {what}; allowed: a number in plain decimal, or text in quotes"
                raise AmbiguousNumber(message, line)
        elif _UNPRINTABLE.search(node.value):
            raise NotADocument("a text with a NUL or half a character, which is in no name and no path", line)
        return node
