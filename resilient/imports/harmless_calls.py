"""Calls after which a program's imports find what they would have found before: none changes the environment, `sys.path`, the
working directory, or a module. One that is missing costs an import ahead of the ranks; one that does not belong here is a defect.
"""

import ast
import builtins

Names = dict[str, str | None]  # names of a file, and the origin of what each stands for, see `origin_of`; None: nobody knows
LITERAL = ("literal", "str")  # origins of what is written out in the file: a text, or any other value

_ALL_OF = (
    "logging.",
    "warnings.",
    "typing.",
    "typing_extensions.",
    "enum.",
    "abc.",
    "math.",
    "itertools.",
    "datetime.",
    "os.path.",
    "str.",
)
_NOT = ("logging.config.", "typing.get_type_hints")  # they import, or evaluate, what their argument says
_SOME_OF = {
    "argparse": "ArgumentParser",
    "argparse.ArgumentParser()": "add_argument add_argument_group add_mutually_exclusive_group set_defaults",
    "argparse.ArgumentParser().add_argument_group()": "add_argument",
    "argparse.ArgumentParser().add_mutually_exclusive_group()": "add_argument",
    "builtins": "abs all any bool bytes chr classmethod complex dict divmod enumerate float format frozenset hash hex id int "
    "isinstance issubclass len list max min object oct ord print property range repr reversed round set slice sorted staticmethod "
    "str sum super tuple type zip",
    "builtins.property()": "setter deleter",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "contextlib": "asynccontextmanager contextmanager nullcontext suppress",
    "contextvars": "ContextVar",
    "dataclasses": "dataclass field",
    "functools": "cache cached_property lru_cache partial singledispatch total_ordering wraps",
    "functools.singledispatch()": "register",
    "importlib.metadata": "version",
    "json": "dumps loads",
    "os": "cpu_count fspath getcwd getenv getpid",
    "os.environ": "copy get",
    "packaging.version": "Version parse",
    "pathlib": "Path PurePath",
    "pathlib.Path": "cwd home",
    "platform": "machine node python_version system",
    "pydantic": "ConfigDict Field",
    "re": "compile escape",
    "shutil": "which",
    "socket": "gethostname",
    "threading": "Event Lock RLock local",
    "time": "monotonic perf_counter strftime time",
    "torch": "device enable_grad finfo iinfo inference_mode no_grad tensor",
    "torch.cuda": "device_count is_available",
}
_METHODS_OF_PATHS = "absolute as_posix exists expanduser is_dir is_file joinpath relative_to resolve with_name with_suffix"
_CALLS = frozenset(f"{module}.{name}" for module, names in _SOME_OF.items() for name in names.split())
_PATHS = tuple(f"pathlib.{each}()" for each in ("Path", "PurePath", "Path.cwd", "Path.home"))
_TEXTS = ("__file__", "__name__", "__doc__")


def is_harmless(function: ast.expr, names: Names) -> bool:
    """Whether it may be called."""
    origin = origin_of(function, names)
    if origin is None or origin.startswith(_NOT) or {"os", "sys"}.intersection(origin.split(".")[1:]):
        return False
    if origin.startswith(_PATHS):
        return origin.rpartition(".")[2] in _METHODS_OF_PATHS.split()
    return origin in _CALLS or origin.startswith(_ALL_OF) or (origin.startswith("literal.") and "(" not in origin)


def origin_of(value: ast.expr, names: Names) -> str | None:
    """From where the value of an expression is, by the names of modules, with `()` for what a call gives; None if nobody knows."""
    match value:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name) if name in _TEXTS:
            return "str"
        case ast.Name(id=name):
            return f"builtins.{name}" if hasattr(builtins, name) else None
        case ast.Attribute(value=base, attr=attribute):
            origin = origin_of(base, names)
            return f"{origin}.{attribute}" if origin is not None else None
        case ast.Call(func=function):
            origin = origin_of(function, names)
            if origin in ("builtins.dict", "builtins.list", "builtins.set"):
                return "literal"
            return "str" if origin == "builtins.str" else f"{origin}()" if origin is not None else None
        case ast.Constant(value=str()) | ast.JoinedStr():
            return "str"
        case ast.Constant() | ast.List() | ast.Tuple() | ast.Set() | ast.Dict() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            return "literal"
        case _:
            return None
