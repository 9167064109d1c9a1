"""What a stranger on the same machine can do to a campaign's listeners; a program of its own.

    python attacks.py DRIVER_PID HELLOS_PER_S

Attacks every address at which the driver or a process below it listens, until its input ends: connections opened and left,
garbage, lines of 16 MB, and hellos, forged ones and ones that were heard. Prints "ready" when it attacks all of them, and at the
end how often each was done, as JSON.
"""

import asyncio
import json
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from listening import descendants, listeners

from checkpoint import descriptors
from checkpoint.handshake import DAEMON_DAEMON, DRIVER_AGENT, WORKER_DAEMON, Client, derive, endpoint

LEFT_OPEN = 1500
LISTENERS = 4  # of a campaign of two nodes: the driver, a snapshot daemon for each, and the store of the generation
ATTACKS = ("leave_open", "garbage", "long_line", "forged", "replayed")
AT_LEAST = 20  # of each
AT_ONCE = 100  # of each
HELLOS_AT_ONCE = 50
CATCH_UP_S = 1.0
LINE_BYTES = 16 << 20
TOKEN = b"RESILIENT_TOKEN="
PATIENCE_S = 5.0
ANSWER_S = 0.1

Target = tuple[str, int]


class Attack:
    """Attributes: targets: that are there now; heard: handshakes of the campaign's own, by role."""

    def __init__(self, driver: int, hellos_per_s: float) -> None:
        self.driver, self.hellos_per_s = driver, hellos_per_s
        self.targets: list[Target] = []
        self.heard: dict[Target, list[bytes]] = {}
        self.done: Counter[str] = Counter()
        self.ready = False
        self.began = time.monotonic()
        self.left: deque[asyncio.StreamWriter] = deque()
        self.over = threading.Event()

    async def look(self) -> None:
        """Keep an eye on who listens."""
        while True:
            family = list(descendants(self.driver))
            ours = [pid for pid in family if not _is_rank(pid)]
            self.targets = sorted({each for pid in ours for each in listeners(pid)})
            secret = _secret(family)
            new = [target for target in self.targets if target not in self.heard] if secret is not None else []
            for target, found in zip(new, await asyncio.gather(*(_listened_in(each, secret or "") for each in new)), strict=True):
                self.heard[target] = found
            if len(self.heard) >= LISTENERS and not self.ready:
                self.ready, self.began = True, time.monotonic()
                print("ready", flush=True)
            await asyncio.sleep(0.5)

    async def leave_open(self, target: Target) -> None:
        _, writer = await asyncio.open_connection(*target)
        self.left.append(writer)
        while len(self.left) > LEFT_OPEN:
            self.left.popleft().close()

    async def garbage(self, target: Target) -> None:
        await _say(target, random.randbytes(random.randrange(1, 4000)) + b"\n")

    async def long_line(self, target: Target) -> None:
        await _say(target, b"x" * LINE_BYTES)

    def _forged(self, target: Target) -> bytes:
        role = random.choice((DRIVER_AGENT, DAEMON_DAEMON, WORKER_DAEMON))
        return Client("a guess", role, "1 of node 0", endpoint(target)).opening

    def hellos(self) -> None:
        """Forged and replayed ones by turns, on plain sockets: with streams of asyncio the attacker would be the busiest of all."""
        waiting: deque[socket.socket] = deque()
        number = 0
        while not self.over.is_set():
            ahead_s = number / self.hellos_per_s - (time.monotonic() - self.began)
            if ahead_s > 0 or not self.ready:
                time.sleep(max(ahead_s, 0.002))
                continue
            number = max(number + 1, int((time.monotonic() - self.began - CATCH_UP_S) * self.hellos_per_s))
            forged = number % 2 == 0
            try:
                target = random.choice([each for each in self.targets if forged or self.heard.get(each)])
                waiting.append(_connected(target, self._forged(target) if forged else random.choice(self.heard[target])))
            except (OSError, IndexError):  # it listens no more, or there is nobody yet
                continue
            self.done["forged" if forged else "replayed"] += 1
            if len(waiting) > HELLOS_AT_ONCE:  # by now it has been answered, or has not
                waiting.popleft().close()

    async def keep_on(self, attack: Callable[[Target], Awaitable[None]], per_s: float) -> None:
        loop, began, count = asyncio.get_running_loop(), asyncio.get_running_loop().time(), 0
        under_way: set[asyncio.Task[None]] = set()
        while True:
            while count < (loop.time() - began) * per_s and len(under_way) < AT_ONCE:
                count += 1
                if self.targets:
                    task = asyncio.create_task(self._once(attack, random.choice(self.targets)))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
            count = max(count, int((loop.time() - began - 1.0) * per_s))  # what was missed is not made up for
            await asyncio.sleep(0.005)

    async def _once(self, attack: Callable[[Target], Awaitable[None]], target: Target) -> None:
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(attack(target), PATIENCE_S)
        self.done[attack.__name__] += 1

    async def run(self) -> None:
        rates = {self.leave_open: 100.0, self.garbage: 50.0, self.long_line: 2.0}
        works = [self.look(), *(self.keep_on(attack, per_s) for attack, per_s in rates.items())]
        working = [asyncio.create_task(work) for work in [*works, asyncio.to_thread(self.hellos)]]
        over = asyncio.create_task(self._over())
        await asyncio.wait([over, *working], return_when=asyncio.FIRST_COMPLETED)
        took_s = time.monotonic() - self.began
        self.over.set()
        for each in working:
            if each.done():
                each.result()  # what has ended it
            each.cancel()
        hellos = self.done["forged"] + self.done["replayed"]
        print(json.dumps({"done": self.done, "targets": len(self.heard), "hellos_per_s": hellos / took_s}), flush=True)

    async def _over(self) -> None:
        """The input has ended, and each attack has been made a few times, however busy the machine is."""
        await asyncio.to_thread(sys.stdin.read)
        while min(self.done[name] for name in ATTACKS) < AT_LEAST:
            await asyncio.sleep(0.1)


def _is_rank(pid: int) -> bool:
    """What ranks listen to is gloo's, which believes whoever connects."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith(("rank", "standby"))
    except OSError:
        return True


def _secret(family: list[int]) -> str | None:
    """As somebody has it who could listen in to a handshake: what cannot be heard is used for what can."""
    for pid in family:
        with suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if variable.startswith(TOKEN):
                    return variable.removeprefix(TOKEN).decode().rpartition(".")[0]
    return None


async def _listened_in(target: Target, secret: str) -> list[bytes]:
    """All that an honest client of each role has said in its handshake."""
    found = []
    for role in (DRIVER_AGENT, DAEMON_DAEMON, WORKER_DAEMON):
        client = Client(derive(secret, role), role, "1 of node 1", endpoint(target))
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection(*target)
                writer.write(client.opening)
                response = client.respond((await reader.readuntil(b"\n"))[:-1])
                found.append(client.opening + response)
                writer.close()  # without the response: it is still good for a server that would take it later
    return found


def _connected(target: Target, words: bytes) -> socket.socket:
    """A connection that has said this, and that ends at once when it is closed. Raises OSError."""
    connection = socket.create_connection(target, timeout=ANSWER_S)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(words)
    except OSError:
        connection.close()
        raise
    return connection


async def _say(target: Target, words: bytes) -> None:
    reader, writer = await asyncio.open_connection(*target)
    try:
        writer.write(words)
        await writer.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1 << 12), ANSWER_S)
    finally:
        writer.transport.abort()


if __name__ == "__main__":
    descriptors.raise_limit()
    asyncio.run(Attack(int(sys.argv[1]), float(sys.argv[2])).run())
