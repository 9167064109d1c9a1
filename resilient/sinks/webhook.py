"""A webhook: JSON by POST on what a person should hear of, and a dead man's beat."""

import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import Message
from typing import IO, Any

from resilient import clock, strict_json
from resilient.config.sinks import Webhook
from resilient.driver.display import describe
from resilient.exits import Exit
from resilient.ledger import EVENTS
from resilient.sinks.base import Campaign, Line, NotTaken, Refused, Sink
from resilient.sinks.in_time import in_time

TEXT_CHARACTERS = 1500  # of a text that is shortened: what chats show
FIELD_CHARACTERS = 200  # of a field of an event that is shortened
# Answers from 400 to 499 that are not about the content of a request, but about its address, permission or time.
_NOT_OF_THE_CONTENT = frozenset({401, 402, 403, 404, 405, 407, 408, 409, 410, 421, 423, 425, 426, 429, 451})


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would arrive as a GET without its body, and a token where it does not belong."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def type_of(entry: Mapping[str, Any]) -> str | None:
    """What an event is called in `events`; None for those that nobody can ask for."""
    match entry["event"]:
        case "run_started":
            return "started"
        case "fault" | "recovered" as name:
            return str(name)
        case "run_finished":
            return "gave_up" if entry["exit_code"] == Exit.GAVE_UP else "finished"
    return None


def sentence(entry: Mapping[str, Any]) -> str:
    """An event in words."""
    match entry["event"]:
        case "run_started":
            return "started"
        case "run_finished":
            at = f" at step {entry['step']}" if entry["step"] is not None else ""
            what = {Exit.OK: "has reached its target", Exit.STOPPED: "stopped, to go on later", Exit.GAVE_UP: "gave up"}
            return what.get(entry["exit_code"], f"ended with exit code {entry['exit_code']}") + at
    return describe(entry) or str(entry["event"])


def is_for_good(status: int) -> bool:
    """Whether a server that answers this will never take a request of that content."""
    return 400 <= status < 500 and status not in _NOT_OF_THE_CONTENT


def shortened(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event with its long fields cut, of which what is no text becomes one."""
    return {name: _cut(value, FIELD_CHARACTERS) for name, value in event.items()}


def _cut(value: Any, most: int) -> Any:
    text = value if isinstance(value, str) else strict_json.dumps(value, default=str)
    return value if len(text) <= most else text[: most - 1] + "…"


class WebhookSink(Sink):
    """Args: settings: of `resilient.config.sinks.Webhook`."""

    files = (EVENTS,)
    history = False

    def __init__(self, campaign: Campaign, settings: Mapping[str, Any]) -> None:
        self._wanted = wanted = Webhook(**settings)
        self._campaign = campaign
        self.pause_s, self.most = wanted.pause_s, wanted.most
        url = wanted.url if wanted.url_file is None else wanted.url_file.read_text().strip()
        if url is None:
            raise ValueError("neither url nor url_file is given")
        self._url = url
        self._headers = {"Content-Type": "application/json", "User-Agent": "resilient"}
        if wanted.token_file is not None:
            self._headers["Authorization"] = f"Bearer {wanted.token_file.read_text().strip()}"
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._beat_t = -float("inf")

    def wants(self, line: Line) -> bool:
        return type_of(line.entry) in self._wanted.events

    def take(self, lines: Sequence[Line]) -> None:
        """Send them in one request; one that is refused by itself once more, shortened. Raises Refused, NotTaken or OSError."""
        name = self._campaign.name
        identity = self._campaign.identity
        events = [{**line.entry, "id": f"{identity}-{line.end_bytes}", "type": type_of(line.entry)} for line in lines]
        text = "\n".join(f"{name}: {sentence(line.entry)}" for line in lines)
        try:
            self._post(self._url, {**self._about(), "text": text, "events": events})
        except Refused:
            if len(lines) > 1:
                raise
            less = {"text": _cut(text, TEXT_CHARACTERS), "events": [shortened(event) for event in events]}
            self._post(self._url, {**self._about(), **less})

    def refresh(self) -> None:
        """A beat, if it is time for one and the driver gets on. Raises Refused, NotTaken or OSError."""
        every_s = self._wanted.beat_s
        if every_s is None or time.monotonic() - self._beat_t < every_s or not self._campaign.alive():
            return
        self._beat_t = time.monotonic()
        totals = self._campaign.totals()
        since_s = None if totals.step_t is None else max(0.0, clock.now() - totals.step_t)
        beat = {"step": totals.step, "target_step": totals.target_step, "since_step_s": since_s, "generation": totals.generation}
        text = f"{self._campaign.name}: alive at step {totals.step}"
        self._post(self._wanted.beat_url or self._url, {**self._about(), "text": text, "beat": beat})

    def _about(self) -> dict[str, Any]:
        return {"run": self._campaign.name, "run_dir": str(self._campaign.run_dir), "t": clock.now()}

    def _post(self, url: str, body: Mapping[str, Any]) -> None:
        data = strict_json.dumps(body, default=str).encode()
        request = urllib.request.Request(url, data, self._headers, method="POST")
        try:
            with in_time(self._wanted.timeout_s), self._opener.open(request, timeout=self._wanted.timeout_s):
                return
        except urllib.error.HTTPError as error:
            with error:
                kind = Refused if is_for_good(error.code) else NotTaken
                raise kind(f"the server answers {error.code} {error.reason}") from None
