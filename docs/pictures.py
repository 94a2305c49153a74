"""Pictures of every page of the site, as a browser shows it: `python docs/pictures.py [PAGE ...]`.

`make docs` first. A headless Chromium draws each page of site/ at 1280 and 390 px, light and dark,
in pieces of 2000 px: site-pictures/quickstart-390-dark-1.png is the upper end of one. What makes a
page wider than its window is named, and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS, SCHEMES, PIECE = (1280, 390), ("light", "dark"), 2000
# Elements that are wider than the window, and do not lie in one that scrolls; the innermost alone.
WIDE = """
(() => {
  const scrolls = e =>
    e && (getComputedStyle(e).overflowX != 'visible' || scrolls(e.parentElement));
  const wide = [...document.querySelectorAll('.md-content *')].filter(
    e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement));
  return wide.filter(e => !wide.some(o => o != e && e.contains(o)))
    .map(e => e.tagName.toLowerCase() + ': ' + e.textContent.trim().slice(0, 60));
})()
"""


class Browser:
    """A Chromium that takes commands of the DevTools protocol through a pipe."""

    def __init__(self, program: str, profile: str) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # Chromium reads descriptor 3 and writes 4; neither may be one of the pipe's own.
        read, write = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out))

        def connect() -> None:
            os.dup2(read, 3)
            os.dup2(write, 4)

        command = [program, "--headless", "--remote-debugging-pipe", "--hide-scrollbars"]
        command += ["--no-first-run", "--disable-gpu", f"--user-data-dir={profile}"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses root otherwise
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=connect,
        )
        for end in (theirs_in, theirs_out, read, write):
            os.close(end)
        self.to, self.replies = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        self.number, self.session, self.events = 0, {}, set()
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        self.do("Page.enable")
        # The theme keeps the first scheme that it meets.
        self.do("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **self.session}
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while (reply := self._next()).get("id") != self.number:
            self.events.add(reply["method"])
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def open(self, url: str) -> None:
        """Load a page, and wait for its end."""
        self.events.clear()
        self.do("Page.navigate", url=url)
        while "Page.loadEventFired" not in self.events:
            self.events.add(self._next().get("method"))

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        return self.do("Runtime.evaluate", **asked)["result"].get("value")

    def close(self) -> None:
        self.do("Browser.close")
        self.process.wait(timeout=20)

    def _next(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self.replies.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            message += byte
        return json.loads(message)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(folder: Path) -> str:
    """The address of a server of the site: some of its scripts do not run on files."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def draw(browser: Browser, url: str, name: str, folder: Path) -> list[str]:
    """Pictures of one page in all widths and schemes; what is too wide in it."""
    wide = []
    for width in WIDTHS:
        size = {"width": width, "height": PIECE, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.do("Emulation.setDeviceMetricsOverride", **size)
        for scheme in SCHEMES:
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.do("Emulation.setEmulatedMedia", features=media)
            browser.open(url)
            browser.ask("new Promise(done => setTimeout(done, 200))")  # scripts wrap tables
            height = int(browser.ask("document.documentElement.scrollHeight"))
            for piece, top in enumerate(range(0, height, PIECE), 1):
                browser.ask(f"scrollTo(0, {top})")
                shot = browser.do("Page.captureScreenshot")
                path = folder / f"{name}-{width}-{scheme}-{piece}.png"
                path.write_bytes(base64.b64decode(shot["data"]))
        wide += [f"{name} at {width} px: {what}" for what in browser.ask(WIDE)]
    return wide


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pictures of every page of the site.")
    parser.add_argument("pages", nargs="*", help="e.g. quickstart integrations/trl; default: all")
    parser.add_argument("--browser", default=next(filter(shutil.which, NAMES), None))
    parser.add_argument("--site", type=Path, default=ROOT / "site")
    parser.add_argument("--out", type=Path, default=ROOT / "site-pictures")
    arguments = parser.parse_args(argv)
    if arguments.browser is None:
        parser.error(f"--browser: none of {', '.join(NAMES)} is on the path")
    found = (path.parent for path in arguments.site.rglob("index.html"))
    every = {str(folder.relative_to(arguments.site)) for folder in found}
    if unknown := [page for page in arguments.pages if page not in every]:
        parser.error(f"pages: {', '.join(unknown)}: not in {arguments.site}; `make docs` makes it")
    arguments.out.mkdir(parents=True, exist_ok=True)
    address, wide = serve(arguments.site), []
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(arguments.browser, profile)
        for page in arguments.pages or sorted(every):
            name = "home" if page == "." else page.replace("/", "-")
            wide += draw(browser, f"{address}/{page}/", name, arguments.out)
        browser.close()
    print("\n".join(wide) or f"{len(arguments.pages or every)} pages, none wider than its window")
    return bool(wide)


if __name__ == "__main__":
    sys.exit(main())
