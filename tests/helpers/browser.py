"""Opening a page in a real browser without a window."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

WATCH = """\
<script>
const seen = { errors: [] };
addEventListener("error", event => seen.errors.push(event.message));
addEventListener("unhandledrejection", event => seen.errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", event => seen.errors.push(`refused: ${event.blockedURI}`));
console.error = console.warn = (...words) => seen.errors.push(words.join(" "));
</script>
"""
TELL = """\
<script>
addEventListener("load", () => {
  const ask = () => { %s };
  try { seen.answer = ask(); } catch (error) { seen.errors.push(String(error)); }
  const names = performance.getEntriesByType("resource").map(entry => entry.name);
  seen.requests = names.filter(name => !name.startsWith("data:"));
  const place = document.createElement("pre");
  place.id = "seen";
  place.textContent = JSON.stringify(seen);
  document.body.append(place);
});
</script>
"""


def ask_page(page: Path, script: str, width: int, folder: Path) -> dict[str, Any]:
    """Open a copy of a page in a browser, and return what a script in it returns.

    Args:
        page: The page.
        script: Body of a function in JavaScript.
        width: Width of the window in pixels.
        folder: Folder for the copy and the browser's own files.

    Returns:
        ``answer``, what the script returned; ``errors`` of the page; ``requests``, all that it asked of others.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"there is no browser: none of {', '.join(NAMES)}")
    text = page.read_text(encoding="utf-8")
    copy = folder / "page.html"
    copy.write_text(text.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{TELL % script}</body>", 1))
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--disable-background-networking", "--disable-component-update",
               "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
               f"--window-size={width},900", "--dump-dom", copy.resolve().as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    return json.loads(unescape(found[1]))
