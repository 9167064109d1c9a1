"""Types that several threads decode to for the first time at once."""

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3]

AT_ONCE = """
import sys, threading
import msgspec
from checkpoint.typed import built

THREADS = 8
sys.setswitchinterval(1e-6)
meet = threading.Barrier(THREADS)

def kinds(number):
    inner = msgspec.defstruct(f"Inner{number}", [(f"field{at}", list[dict[str, int]]) for at in range(8)])
    return msgspec.defstruct(f"Outer{number}", [("inner", inner), ("others", dict[str, inner])])

fresh = [kinds(number) for number in range(100)]
fields = {f"field{at}": [{"a": 1}] for at in range(8)}
found = []

def decode():
    for kind in fresh:
        meet.wait()
        found.append(msgspec.convert({"inner": fields, "others": {"a": fields}}, BUILT))

threads = [threading.Thread(target=decode) for _ in range(THREADS)]
[each.start() for each in threads]
[each.join() for each in threads]
print(len(found))
"""


def test_a_type_that_several_threads_ask_for_at_once_is_built_once():
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE.replace("BUILT", "built(kind)")], cwd=SOURCE, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "800\n"), done.stderr


def test_all_that_msgspec_decodes_to_is_built_one_at_a_time():
    missing = []
    for path in (each for top in ("resilient", "checkpoint", "trainer", "chaos") for each in (SOURCE / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (kind := _decoded_to(node)) and not ast.unparse(kind).startswith("built("):
                missing.append(str(path.relative_to(SOURCE)))
    assert missing == ["checkpoint/typed.py"]  # where they are


def _decoded_to(call: ast.Call) -> ast.expr | None:
    """The type in a call of msgspec's, if it is one that decodes to a type."""
    match ast.unparse(call.func):
        case "msgspec.convert":
            return call.args[1]
        case "msgspec.json.Decoder" | "msgspec.msgpack.Decoder":
            return call.args[0]
        case "msgspec.json.decode" | "msgspec.msgpack.decode" | "msgspec.yaml.decode":
            return next((each.value for each in call.keywords if each.arg == "type"), None)
    return None
