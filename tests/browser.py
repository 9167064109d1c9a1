"""Pages as a person sees them: a headless Chromium that opens a file, and what is wrong with what it shows.

It is driven by the DevTools protocol over two pipes: messages of JSON, each ended by a zero byte. What is looked for, `AUDIT` says.
"""

import base64
import fcntl
import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

WIDE, NARROW = 1400, 390
CONTRAST = 4.5  # WCAG 2, AA: of texts that are not large
SMALLEST_PX = 9.0
PATIENCE_S = 120.0
_FREE = 10  # file descriptors from here on are not those that the browser reads and writes

AUDIT = """
(smallest, contrast) => {
  const flaws = [];
  const say = (what, element, more) => flaws.push(`${what}: ${element.textContent.trim().slice(0, 60)}${more}`);
  const colour = text => {
    const found = text.match(/^rgba?\\(([\\d.]+), ([\\d.]+), ([\\d.]+)(?:, ([\\d.]+))?\\)$/);
    return found ? [+found[1], +found[2], +found[3], found[4] === undefined ? 1 : +found[4]] : null;
  };
  const over = (top, under) => top.slice(0, 3).map((each, at) => each * top[3] + under[at] * (1 - top[3])).concat(1);
  const luminance = rgb => {
    const [r, g, b] = rgb.map(each => each / 255).map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [dark, light] = [luminance(a), luminance(b)].sort((one, other) => one - other);
    return (light + 0.05) / (dark + 0.05);
  };
  // What an element paints where it is; null: nothing.
  const paint = element => {
    const style = getComputedStyle(element);
    if (!(element instanceof SVGElement) || element.tagName === 'svg') return colour(style.backgroundColor);
    if (['text', 'g', 'tspan'].includes(element.tagName)) return null;
    const fill = colour(style.fill);
    return fill && [...fill.slice(0, 3), fill[3] * +style.fillOpacity * +style.opacity];
  };
  const canvas = () => {
    const dark = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
    return [document.documentElement, document.body].reduce((under, each) => over(paint(each) || [0, 0, 0, 0], under), dark);
  };
  const below = (element, x, y) => {
    const all = document.elementsFromPoint(x, y);
    const at = all.indexOf(element);
    if (at < 0) return null;
    const layers = all.slice(element instanceof SVGElement ? at + 1 : at).map(paint).filter(each => each);
    return layers.reverse().reduce((under, each) => over(each, under), canvas());
  };
  document.querySelectorAll('details').forEach(each => { each.open = true; });
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) flaws.push(`the page is ${root.scrollWidth} px wide, the window ${innerWidth}`);
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, range = document.createRange();
    range.selectNodeContents(node);
    const lines = range.getClientRects();
    if (node.data.trim() && lines.length && lines[0].width) texts.push([node.parentElement, range]);
  }
  const drawn = new Map();
  for (const [element, range] of texts) {
    const place = () => {
      const line = range.getClientRects()[0];
      return [line.left + Math.min(line.width / 2, 8), line.top + line.height / 2];
    };
    let ground = below(element, ...place());
    if (!ground) {
      element.scrollIntoView({block: 'nearest', inline: 'start'});
      scrollBy(0, place()[1] - innerHeight / 2);
      ground = below(element, ...place());
    }
    const style = getComputedStyle(element), svg = element.closest('svg');
    const own = colour(svg ? style.fill : style.color);
    if (!ground || !own) {
      say('covered, or of no colour', element, '');
      continue;
    }
    const found = ratio(over(own, ground), ground);
    if (found < contrast) say(`contrast of ${found.toFixed(2)}`, element, ` (${own} on ${ground.map(Math.round)})`);
    const size = parseFloat(style.fontSize) * (svg ? svg.getScreenCTM().a : 1);
    if (size < smallest) say(`${size.toFixed(1)} px`, element, '');
    if (svg) drawn.set(svg, [...(drawn.get(svg) || []), [element, element.getBoundingClientRect(), svg.getBoundingClientRect()]]);
    else if (style.overflowX === 'hidden' && element.scrollWidth > element.clientWidth + 1) say('cut', element, '');
  }
  for (const all of drawn.values()) {
    all.forEach(([element, box], at) => {
      const frame = element.closest('svg').getBoundingClientRect();
      const [a, outer] = [element.getBoundingClientRect(), frame];
      if (a.left < outer.left - 1 || a.right > outer.right + 1 || a.top < outer.top - 1 || a.bottom > outer.bottom + 1)
        say('beyond its drawing', element, '');
      for (const [other] of all.slice(at + 1)) {
        const b = other.getBoundingClientRect();
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3) say('drawn over', element, ` and ${other.textContent.trim().slice(0, 40)}`);
      }
    });
  }
  return {texts: texts.length, flaws};
}
"""
"""A text must stand out from what is painted below it, be large enough, and neither cut nor drawn over; pages fit windows."""


@dataclass(frozen=True)
class View:
    """What a page came to in one window.

    Attributes:
        texts: pieces of text that are shown.
        said: errors and warnings of the console, and requests for anything but the page.
        flaws: sentences, as `AUDIT` finds them.
    """

    texts: int
    said: list[str]
    flaws: list[str]


class Browser:
    """One Chromium. Args: profile: a folder of its own."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        read, self._write = _pipe()
        self._read, write = _pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions"]
        options += ["--remote-debugging-pipe", "--disable-dev-shm-usage", "--disable-background-networking"]
        # The browser reads from 3 and writes to 4, whatever these are here.
        words = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "browser", PROGRAM, *options, f"--user-data-dir={profile}"]
        self._said = (profile / "said").open("w+")
        self._process = subprocess.Popen(
            words,
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(read)
        os.close(write)
        self._rest = b""
        self._asked = 0
        self._heard: list[dict[str, Any]] = []

    def look(self, path: Path, *, width: int, dark: bool = False, picture: Path | None = None) -> View:
        """Open a file in a window. Args: width: px; picture: where a PNG of the whole page is put."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            return self._look(session, path, width, dark, picture)
        finally:
            self._ask("Target.closeTarget", targetId=target)

    def _look(self, session: str, path: Path, width: int, dark: bool, picture: Path | None) -> View:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable", session)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", session, features=scheme)
        window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", session, **window)
        self._heard.clear()
        address = path.absolute().as_uri()
        self._ask("Page.navigate", session, url=address)
        self._until("Page.loadEventFired")
        if picture is not None:
            picture.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", session, captureBeyondViewport=True)["data"]))
        found = self._ask(
            "Runtime.evaluate", session, expression=f"({AUDIT})({SMALLEST_PX}, {CONTRAST})", returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return View(found["result"]["value"]["texts"], list(self._complaints(address)), found["result"]["value"]["flaws"])

    def _complaints(self, address: str) -> Iterator[str]:
        for message in self._heard:
            about = message["params"]
            match message["method"]:
                case "Log.entryAdded":
                    yield f"{about['entry']['level']}: {about['entry']['text']}"
                case "Runtime.consoleAPICalled":
                    yield f"{about['type']}: {about['args']}"
                case "Runtime.exceptionThrown":
                    yield f"exception: {about['exceptionDetails']['text']}"
                case "Network.requestWillBeSent" if about["request"]["url"] != address:
                    yield f"asks for {about['request']['url']}"

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": parameters} | ({} if session is None else {"sessionId": session})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._asked:
            self._heard.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _until(self, method: str) -> None:
        while not any(each.get("method") == method for each in self._heard):
            self._heard.append(self._next())

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            with selectors.DefaultSelector() as selector:
                selector.register(self._read, selectors.EVENT_READ)
                assert selector.select(max(0.0, deadline - time.monotonic())), f"the browser is silent: {self._printed()}"
            data = os.read(self._read, 1 << 20)
            assert data, f"the browser has ended: {self._printed()}"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _printed(self) -> str:
        self._said.seek(0)
        return self._said.read()[-2000:]

    def close(self) -> None:
        os.close(self._write)  # which ends it
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._said.close()


def _pipe() -> tuple[int, int]:
    """Ends for reading and writing, with numbers that are not those of the browser."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FREE) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for the tests of a module; where there is none, they are skipped."""
    if PROGRAM is None:
        pytest.skip("NOT TESTED HERE: pages are looked at with Chromium, which is not installed")
    with chromium(tmp_path_factory.mktemp("browser")) as found:
        yield found


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser until the end of the block. Args: profile: a folder of its own."""
    found = Browser(profile)
    try:
        yield found
    finally:
        found.close()


def looked_at(*paths: Path, profile: Path) -> None:
    """Assert the same of each where there is a browser: a test of something else is not skipped for want of one."""
    if PROGRAM is not None:
        profile.mkdir()
        with chromium(profile) as found:
            for path in paths:
                looks_right(found, path)


def looks_right(browser: Browser, path: Path) -> None:
    """Assert that a page has no flaw in wide and narrow windows, light and dark."""
    for width in (WIDE, NARROW):
        for dark in (False, True):
            view = browser.look(path, width=width, dark=dark)
            where = f"{width} px, {'dark' if dark else 'light'}"
            assert view.texts, f"{where}: nothing is shown"
            assert not [*view.said, *view.flaws], f"{where}: {view}"
