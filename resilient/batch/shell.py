"""A shell script as its commands, each with its line: as much of bash's grammar as batch scripts have.

Whether a script is one at all is bash's own question (`bash -n`); here words are told from operators, quotes, comments and
here-documents. Substitutions stay as they are written. Pure.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

DEEPEST = 100  # quotes and brackets in each other
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_RESERVED = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "time", "fi", "done", "esac"})
_DECLARES = frozenset({"export", "declare", "typeset", "readonly", "local", "env"})
_CLOSES = {"(": ")", "{": "}"}
_BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)"  # three deep
_ARITHMETIC = re.compile(rf"\(\((?:[^()]|{_BRACKETS})*+\)\)")
_END = re.compile(r"[ \t]*(['\"\\]?)([^\s'\";&|<>()]+)['\"]?")  # of a here-document, in quotes or without


class NestedTooDeep(ValueError):
    """Quotes and brackets stand deeper in each other than in any script that somebody has written."""

    def __init__(self) -> None:
        super().__init__(f"quotes and brackets stand more than {DEEPEST} deep in each other")


@dataclass(frozen=True)
class Word:
    """Without its quotes; a line that goes on behind a backslash leaves a line's end in it."""

    text: str
    line: int


@dataclass
class Command:
    """One simple command.

    Attributes:
        words: without redirections; a program and its arguments.
        assigned: NAME=VALUE, before the program or as words of `export` and its like; `added`: by `+=`.
        background: its list is followed by an `&`.
    """

    line: int
    words: list[Word] = field(default_factory=list)
    assigned: list[tuple[str, Word]] = field(default_factory=list)
    added: set[int] = field(default_factory=set)
    background: bool = False

    @property
    def program(self) -> str:
        return self.words[0].text if self.words else ""


@dataclass
class Script:
    """What was read.

    Attributes:
        comments: text from its # on, with the line.
        unclosed: quotes and brackets that are opened and never closed, with the line.
    """

    commands: list[Command] = field(default_factory=list)
    comments: list[tuple[int, str]] = field(default_factory=list)
    unclosed: list[tuple[int, str]] = field(default_factory=list)


def parse(text: str) -> Script:
    """Read a script; what is no shell at all comes out as some words. Raises NestedTooDeep."""
    return _Parser(text).run()


class _Parser:
    """Args: depth: of what it stands in."""

    def __init__(self, text: str, depth: int = 0) -> None:
        self._text = text
        self._depth = depth
        self._at = 0
        self._line = 1
        self._script = Script()
        self._command = Command(1)
        self._word: list[str] | None = None
        self._word_line = 1
        self._list: list[Command] = []  # commands of the list that is read, which an & behind it all puts into the background
        self._drop = False  # the next word is where something is redirected to
        self._ends: list[tuple[str, bool]] = []  # of here-documents that begin with the next line; whether tabs come before them

    def run(self) -> Script:
        while self._at < len(self._text):
            self._step(self._text[self._at])
        self._end_command()
        return self._script

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _take(self, count: int = 1) -> str:
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        self._line += taken.count("\n")
        return taken

    def _add(self, text: str, line: int | None = None) -> None:
        if self._word is None:
            self._word, self._word_line = [], self._line if line is None else line
        self._word.append(text)

    def _step(self, char: str) -> None:
        line = self._line
        if char == "\\":
            taken = self._take(2)
            if taken == "\\\n":
                self._end_word()
            else:
                self._add(taken[1:], line)
        elif char == "'":
            self._add(self._single(), line)
        elif char == '"':
            self._add(self._double(), line)
        elif char == "$" or char == "`":
            self._add(self._substitution(), line)
        elif char in " \t\r":
            self._take()
            self._end_word()
        elif char == "\n":
            self._take()
            self._end_command()
            self._here_documents()
        elif char == "#" and self._word is None:
            end = self._text.find("\n", self._at)
            self._script.comments.append((line, self._take((end if end >= 0 else len(self._text)) - self._at)))
        elif char in "<>" or self._peek(2) in ("&>",):
            self._redirection()
        elif char == "(" and self._word is not None and "".join(self._word).endswith("="):
            self._array()
        elif char == "(" and self._in_front() and (found := _ARITHMETIC.match(self._text, self._at)):
            self._add(self._take(len(found[0])), line)
        elif char in ";&|()":
            self._operator()
        else:
            self._add(self._take(), line)

    def _in_front(self) -> bool:
        """Whether a command begins here, or what a `for` counts by."""
        return self._word is None and [word.text for word in self._command.words] in ([], ["for"]) and not self._command.assigned

    def _single(self) -> str:
        line = self._line
        self._take()
        end = self._text.find("'", self._at)
        if end < 0:
            self._script.unclosed.append((line, "'"))
            end = len(self._text)
        inner = self._take(end - self._at)
        self._take()
        return inner

    def _within(self, read: Callable[[], str]) -> str:
        """What is read one level deeper."""
        if self._depth == DEEPEST:
            raise NestedTooDeep
        self._depth += 1
        found = read()
        self._depth -= 1
        return found

    def _double(self) -> str:
        return self._within(self._to_double)

    def _bracketed(self, opened: str) -> str:
        return self._within(lambda: self._to_bracket(opened))

    def _to_double(self) -> str:
        """From a double quote to the next one."""
        line = self._line
        self._take()
        parts: list[str] = []
        while self._at < len(self._text):
            char = self._peek()
            if char == '"':
                self._take()
                return "".join(parts)
            if char == "\\":
                taken = self._take(2)
                parts.append("\n" if taken == "\\\n" else taken[1:] if taken[1:] in '"\\`' else taken)
            elif char in "$`":
                parts.append(self._substitution())
            else:
                parts.append(self._take())
        self._script.unclosed.append((line, '"'))
        return "".join(parts)

    def _substitution(self) -> str:
        """A variable, a command or an expression that stands for its value, as it is written."""
        line = self._line
        if self._peek() == "`":
            taken = self._take()
            end = self._text.find("`", self._at)
            if end < 0:
                self._script.unclosed.append((line, "`"))
                end = len(self._text)
            return taken + self._take(end + 1 - self._at)
        opened = self._peek(2)[1:]
        if opened == "'":
            self._take()
            return self._single()
        if opened not in _CLOSES:
            return self._take()
        if (found := _ARITHMETIC.match(self._text, self._at + 1)) is not None:
            return self._take(1 + len(found[0]))
        return self._take() + self._bracketed(opened)

    def _to_bracket(self, opened: str) -> str:
        """From a bracket to the one that closes it."""
        line, parts, depth = self._line, [self._take()], 1
        while self._at < len(self._text):
            char = self._peek()
            if char == "'" and opened == "(":
                parts.append(f"'{self._single()}'")
            elif char == '"':
                parts.append(f'"{self._double()}"')
            elif char == "\\":
                parts.append(self._take(2))
            elif char == "<" and opened == "(":
                found = re.match("<<<|<<-?|<", self._peek(3))
                operator = found[0] if found is not None else char
                parts.append(self._here(operator) if operator in ("<<", "<<-") else self._take(len(operator)))
            elif char == "\n" and self._ends:
                parts.append(self._take() + self._here_documents())
            elif char == "#" and opened == "(" and parts[-1][-1] in " \t\n":
                end = self._text.find("\n", self._at)
                parts.append(self._take((end if end >= 0 else len(self._text)) - self._at))
            else:
                depth += (char == opened) - (char == _CLOSES[opened])
                parts.append(self._take())
                if not depth:
                    return "".join(parts)
        self._script.unclosed.append((line, opened))
        return "".join(parts)

    def _array(self) -> None:
        """Words in brackets behind a NAME=, joined as one."""
        inner = self._bracketed("(")[1:-1]
        if self._depth == DEEPEST:
            raise NestedTooDeep
        found = _Parser(inner, self._depth + 1).run()
        self._script.comments += [(self._word_line + line - 1, text) for line, text in found.comments]
        words = [word for command in found.commands for word in (*(value for _, value in command.assigned), *command.words)]
        at = 1
        for word in words:  # with the ends of lines that are between them
            self._add("\n" * (word.line - at) + " " + word.text)
            at = word.line + word.text.count("\n")

    def _redirection(self) -> None:
        if self._word is not None and "".join(self._word).isdigit():
            self._word = None
        self._end_word()
        found = re.match(r"&>>?|<<<|<<-?|>>|[<>]&|>\||<>|[<>]\(|[<>]", self._text[self._at :])
        operator = found[0] if found is not None else self._peek()
        if operator in ("<(", ">("):
            line = self._line
            self._add(self._take() + self._bracketed("("), line)
            return
        if operator in ("<<", "<<-"):
            self._here(operator)
            return
        self._take(len(operator))
        self._drop = True

    def _here(self, operator: str) -> str:
        """What announces a here-document, as it is written."""
        taken = self._take(len(operator))
        end = _END.match(self._text, self._at)
        if end is None:
            return taken
        self._ends.append((end[2], operator == "<<-"))
        return taken + self._take(len(end[0]))

    def _here_documents(self) -> str:
        """Those that begin on this line, as they are written."""
        begin = self._at
        for end, tabs in self._ends:
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at)
                row = self._take((stop if stop >= 0 else len(self._text)) - self._at)
                self._take()
                if (row.lstrip("\t") if tabs else row) == end:
                    break
        self._ends.clear()
        return self._text[begin : self._at]

    def _operator(self) -> None:
        operator = next(each for each in (";;", "&&", "||", "|&", self._peek()) if self._text.startswith(each, self._at))
        self._end_word()
        self._take(len(operator))
        self._end_command(operator)

    def _end_word(self) -> None:
        if self._word is None:
            return
        word, self._word = Word("".join(self._word), self._word_line), None
        if self._drop:
            self._drop = False
            return
        command = self._command
        if not command.words and not command.assigned:
            if word.text in _RESERVED:
                return
            command.line = word.line
        found = ASSIGNMENT.match(word.text)
        if found is not None and (not command.words or command.program in _DECLARES):
            if found[2] == "+=":
                command.added.add(len(command.assigned))
            command.assigned.append((found[1], Word(word.text[found.end() :], word.line)))
        else:
            command.words.append(word)

    def _end_command(self, operator: str = "") -> None:
        self._end_word()
        self._drop = False
        if self._command.words or self._command.assigned:
            self._script.commands.append(self._command)
            self._list.append(self._command)
        if operator == "&":
            for each in self._list:
                each.background = True
        if operator not in ("|", "|&", "&&", "||"):
            self._list.clear()
        self._command = Command(self._line)


def pieces(word: Word) -> Iterator[Word]:
    """What a word comes to where its value is split at blanks, each with its line."""
    for found in re.finditer(r"\S+", word.text):
        yield Word(found[0], word.line + word.text.count("\n", 0, found.start()))
