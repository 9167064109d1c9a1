"""What a file of Python imports while it is executed, in that order, up to the first statement that may change what the imports
after it find.

The file is read and never executed. A statement changes nothing if all that it calls is listed in
`resilient.imports.harmless_calls`, and all that it assigns to is its own; of any other it is taken for granted that it changes the
environment, `sys.path`, the working directory or another module. So what is found here is imported by the program too, under the
circumstances of its first statement.
"""

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from resilient.imports.harmless_calls import LITERAL, Names, is_harmless, origin_of

_KEEP_THEIR_METHODS = ("builtins.property", "functools.singledispatch")


class Unknown(Exception):
    """From here on imports may find something else than before."""


class _Missing(Unknown):
    """An import of what does not exist: it raises."""


class Place(Enum):
    """Where a module is found."""

    PROGRAM = auto()
    STANDARD_LIBRARY = auto()
    INSTALLED = auto()
    NOWHERE = auto()


class Imported(NamedTuple):
    """Attributes: name: that is taken from the module; empty for the module itself."""

    module: str
    name: str = ""


class ImportOrder:
    """Of one file.

    Args:
        package: that it belongs to; empty: none.
        is_program: it is executed as `__main__`.
        place_of: where a module is found, by its name.
    """

    def __init__(self, path: Path, package: str, *, is_program: bool, place_of: Callable[[str], Place]) -> None:
        self._path, self._package, self._is_program, self._place_of = path, package, is_program, place_of
        self._taken = set[str]()

    def __iter__(self) -> Iterator[Imported]:
        """Raises Unknown at the statement after which nothing is sure; whoever asks has read what was imported before, by then."""
        try:
            body = ast.parse(self._path.read_bytes()).body
            yield from self._block(body, {}, certain=True)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the ranks will say so
            raise Unknown(str(error)) from None

    def _block(self, body: Iterable[ast.stmt], names: Names, *, certain: bool) -> Iterator[Imported]:
        """Args: certain: whether it is executed at all is sure."""
        for each in body:
            match each:
                case ast.Import() | ast.ImportFrom():
                    yield from self._import(each, names, certain=certain)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    yield from self._definition(each, names, certain=certain)
                case ast.Assign(targets=targets, value=value):
                    self._assign(targets, value, names, certain=certain)
                case ast.AnnAssign(target=target, annotation=annotation, value=value):
                    _check(annotation, names)
                    if value is not None:
                        self._assign([target], value, names, certain=certain)
                case ast.AugAssign(target=target, value=value):
                    for part in (*ast.iter_child_nodes(target), value):
                        _check(part, names)
                    _must_be_its_own(target.value if isinstance(target, ast.Subscript) else target, names)
                case ast.Delete(targets=targets):
                    self._assign(targets, None, names, certain=certain)
                case ast.Expr(value=value):
                    _check(value, names)
                case ast.Assert(test=test):
                    _check(test, names)
                case ast.Raise():
                    if certain:
                        raise Unknown
                    return
                case ast.Pass() | ast.Global() | ast.Break() | ast.Continue():
                    pass
                case ast.If(test=test, orelse=orelse) if self._is_false(test, names):
                    yield from self._block(orelse, names, certain=certain)
                case ast.Try() | ast.TryStar() | ast.With():
                    yield from self._beginning(each, names, certain=certain)
                case ast.If() | ast.For() | ast.While() | ast.Match():
                    _forget([each], names)
                    yield from self._perhaps(each, names)
                case _:
                    raise Unknown

    def _beginning(self, statement: ast.Try | ast.TryStar | ast.With, names: Names, *, certain: bool) -> Iterator[Imported]:
        """A block that is executed as far as the first import that raises, and what may come after that."""
        for item in statement.items if isinstance(statement, ast.With) else ():
            _check(item.context_expr, names)
            if not isinstance(item.context_expr, ast.Call) or not isinstance(item.optional_vars, ast.Name | None):
                raise Unknown
        with suppress(_Missing):
            yield from self._block(statement.body, names, certain=certain)
        _forget([statement], names)
        if not isinstance(statement, ast.With):
            for handler in statement.handlers:
                yield from self._perhaps(handler, names)
            yield from self._block([*statement.orelse, *statement.finalbody], names, certain=False)

    def _perhaps(self, node: ast.AST, names: Names) -> Iterator[Imported]:
        """What it holds may be executed, or not, or more than once."""
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt):
                yield from self._block([part], names, certain=False)
            elif isinstance(part, ast.match_case):
                yield from self._perhaps(part, names)
            else:
                _check(part, names)

    def _is_false(self, test: ast.expr, names: Names) -> bool:
        """Whether a condition is known not to hold: `TYPE_CHECKING`, or `__name__ == "__main__"` in what is imported."""
        if origin_of(test, names) in ("typing.TYPE_CHECKING", "typing_extensions.TYPE_CHECKING"):
            return True
        return not self._is_program and ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")

    def _import(self, statement: ast.Import | ast.ImportFrom, names: Names, *, certain: bool) -> Iterator[Imported]:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield from self._take(Imported(alias.name), certain=certain)
                bound = alias.name if alias.asname else alias.name.partition(".")[0]
                self._bind(names, alias.asname or bound, bound, certain=certain)
            return
        package = self._package.split(".") if self._package else []
        if statement.level > len(package):
            raise _Missing
        above = package[: len(package) + 1 - statement.level] if statement.level else []
        module = ".".join(filter(None, [*above, statement.module]))
        yield from self._take(Imported(module), certain=certain)
        for alias in statement.names:
            if alias.name == "*":
                _forget_all(names)
            else:
                yield from self._take(Imported(module, alias.name), certain=certain)
                self._bind(names, alias.asname or alias.name, f"{module}.{alias.name}", certain=certain)

    def _take(self, imported: Imported, *, certain: bool) -> Iterator[Imported]:
        place = self._place_of(imported.module)
        if certain:
            if place is Place.NOWHERE:
                raise _Missing
            self._taken.add(imported.module)
            yield imported
        elif place in (Place.PROGRAM, Place.INSTALLED) and imported.module not in self._taken:
            raise Unknown

    def _bind(self, names: Names, name: str, origin: str, *, certain: bool) -> None:
        """A module of the program may have any name, also one that is listed."""
        known = certain and self._place_of(origin.partition(".")[0]) is not Place.PROGRAM
        names[name] = origin if known else None

    def _definition(
        self, statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, names: Names, *, certain: bool
    ) -> Iterator[Imported]:
        """Decorators are called, and what a class holds is executed; what a function holds is not."""
        for each in statement.decorator_list:
            _check(each, names)
            if not is_harmless(each.func if isinstance(each, ast.Call) else each, names):
                raise Unknown
        if isinstance(statement, ast.ClassDef):
            for part in (*statement.bases, *statement.keywords):
                _check(part, names)
            yield from self._block(statement.body, dict(names), certain=certain)
        else:
            _check(statement.args, names)
            if statement.returns is not None:
                _check(statement.returns, names)
        outermost = origin_of(statement.decorator_list[0], names) if statement.decorator_list else None
        names[statement.name] = f"{outermost}()" if certain and outermost in _KEEP_THEIR_METHODS else None

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr | None, names: Names, *, certain: bool) -> None:
        """Args: value: None where the targets are deleted."""
        origin = None
        if value is not None:
            _check(value, names)
            origin = origin_of(value, names) if certain else None
        for target in targets:
            match target:
                case ast.Name(id=name):
                    names[name] = origin
                case ast.Tuple(elts=parts) | ast.List(elts=parts):
                    self._assign(parts, None, names, certain=certain)
                case ast.Starred(value=part):
                    self._assign([part], None, names, certain=certain)
                case ast.Subscript(value=base, slice=index):
                    _check(index, names)
                    _must_be_its_own(base, names)
                case _:
                    raise Unknown


def _must_be_its_own(base: ast.expr, names: Names) -> None:
    """What is changed in place was written out in the file."""
    if not isinstance(base, ast.Name) or origin_of(base, names) not in LITERAL:
        raise Unknown


def _check(part: ast.AST, names: Names) -> None:
    """Raises Unknown unless an expression calls nothing but what changes nothing."""
    if isinstance(part, ast.Lambda):
        _check(part.args, names)
        return
    if isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
        raise Unknown
    if isinstance(part, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        names = dict(names)
        _forget([part], names)
    elif isinstance(part, ast.NamedExpr):
        names[part.target.id] = None
    elif isinstance(part, ast.Call):
        chooses = any(each.arg == "key" for each in part.keywords)  # of `max` and `sorted`: a function of the file, which they call
        if chooses or not is_harmless(part.func, names):
            raise Unknown
    for each in ast.iter_child_nodes(part):
        _check(each, names)


def _forget_all(names: Names) -> None:
    """After a `*` import any name may be another's, also that of a builtin."""
    names.update(dict.fromkeys((*names, *dir(builtins))))


def _forget(parts: Iterable[ast.AST], names: Names) -> None:
    """Of what is bound anywhere in them nothing is known any more."""
    for part in parts:
        for each in ast.walk(part):
            match each:
                case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.ExceptHandler(name=str(name)):
                    names[name] = None
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names[name] = None
                case ast.alias(name=name, asname=asname):
                    names[asname or name.partition(".")[0]] = None
                    if name == "*":
                        _forget_all(names)
                case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                    names[name] = None
