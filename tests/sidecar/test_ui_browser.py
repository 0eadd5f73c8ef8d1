"""The page in a real browser, in front of a real sidecar: what a person sees, by mouse and keyboard, light and dark."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest

from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.sidecar.support import ASK

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH"),
]

TOKEN = "token-of-operators-0123"
PATIENCE = 30.0
"""Seconds until a test gives up waiting for anything: a machine may be slow."""

GROUNDS: dict[Literal["light", "dark"], str] = {"light": "rgb(244, 246, 249)", "dark": "rgb(14, 19, 27)"}
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202egnp'
SHOWN = HOSTILE.replace("\u202e", r"\u{202e}")
"""What turns the order of letters around is spelled out."""


class Sidecar:
    """A sidecar in a process of its own, which may be killed and started again where it was."""

    def __init__(self, file: Path, toml: str, environ: dict[str, str]) -> None:
        self._file = file
        self._toml = toml
        self._environ = environ
        self._log = file.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = self.admin = ""
        self._ports = (0, 0)

    def start(self) -> None:
        server, admin = self._ports
        self._file.write_text(f"server.port = {server}\nadmin.port = {admin}\n{self._toml}")
        until = time.monotonic() + PATIENCE
        while not self._starts(until):  # somebody else may have had the port for a moment
            assert time.monotonic() < until, self._log.read_text()

    def _starts(self, until: float) -> bool:
        with self._log.open("w") as log:
            command = [sys.executable, "-m", "resilient_llm.cli", "serve", "--config", str(self._file)]
            environ = {**os.environ, **self._environ}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        while self._process.poll() is None and time.monotonic() < until:
            for line in self._log.read_text().splitlines():
                if '"message": "listening"' in line:
                    told = json.loads(line)
                    self.url, self.admin = told["url"], told["admin_url"]
                    self._ports = (_port(self.url), _port(self.admin))
                    return True
            time.sleep(0.02)
        return False

    def ask(self, **changes: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json={**ASK, **changes}, timeout=PATIENCE)

    def ask_in_vain(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self.ask()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextlib.contextmanager
def sidecar_of(
    folder: Path, *providers: FakeProvider, toml: str = "", environ: dict[str, str] | None = None
) -> Iterator[Sidecar]:
    with contextlib.ExitStack() as upstreams:
        targets = ""
        for number, provider in enumerate(providers):
            url = upstreams.enter_context(serve_in_thread(provider))
            targets += f'[targets.target-{number}]\nurl = "{url}/v1"\nprice = {{input = 1, output = 1000}}\n'
        sidecar = Sidecar(folder / "gateway.toml", f"{toml}\n{targets}", environ or {})
        try:
            sidecar.start()
            yield sidecar
        finally:
            sidecar.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as engine:
        launched = engine.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=60_000
        )
        yield launched
        launched.close()


class Seen:
    """A page of a browser, and everything that it said and asked for."""

    def __init__(self, context: BrowserContext) -> None:
        context.set_default_timeout(PATIENCE * 1000)
        context.add_init_script(
            "window.violations = []; document.addEventListener('securitypolicyviolation',"
            " (event) => window.violations.push(event.violatedDirective + ' ' + event.blockedURI));"
        )
        self.page: Page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, sidecar: Sidecar, query: str = "") -> Page:
        self.page.goto(f"{sidecar.admin}/admin/ui{query}")
        self.wait_for_link("live")
        return self.page

    def wait_for_link(self, state: str) -> None:
        self.page.wait_for_selector(f"#link[data-state='{state}']")

    def check(self, sidecar: Sidecar) -> None:
        """Make sure that nothing went wrong, and nothing was asked of anybody else."""
        assert self.said == []
        assert self.page.evaluate("window.violations") == []
        assert {url.partition("/admin/ui")[0] for url in self.asked} == {sidecar.admin}


@pytest.fixture
def seen(browser: Browser) -> Iterator[Seen]:
    with contextlib.closing(browser.new_context(viewport={"width": 1280, "height": 900})) as context:
        yield Seen(context)


def total(page: Page, label: str) -> str:
    shown: str = page.locator(f"#totals div:has(dt:text-is('{label}')) dd").inner_text()
    return shown


def wait_for_total(page: Page, label: str, value: str) -> None:
    page.locator(f"#totals div:has(dt:text-is('{label}')) dd:text-is('{value}')").wait_for()


def failing(*faults: Fault) -> FakeProvider:
    provider = FakeProvider()
    provider.script(None, faults)
    return provider


def test_numbers_change_while_calls_are_made(tmp_path: Path, seen: Seen) -> None:
    with sidecar_of(tmp_path, FakeProvider()) as sidecar:
        page = seen.open(sidecar)
        assert total(page, "Requests") == "0"
        assert page.locator("#calls-empty").inner_text() == "No call yet."
        page.evaluate("window.untouched = true")
        for number in range(1, 4):
            assert sidecar.ask(stream=number == 2).status_code == 200
            wait_for_total(page, "Requests", str(number))
        assert page.locator("#calls-list > li").count() == 3
        target = page.locator("#targets-table tbody tr")
        assert target.locator(".name").first.inner_text() == "target-0"
        assert target.locator("td[data-label='Circuit']").inner_text() == "closed"
        assert target.locator("td[data-label='Share']").inner_text() == "100 %"
        assert target.locator("td[data-label='Attempts']").inner_text() == "3"
        assert page.locator("#tenants-table tbody tr th").inner_text() == "(everybody)"
        assert float(total(page, "Spend").removeprefix("$")) > 0
        assert page.evaluate("window.untouched")  # the page was not loaded again
        seen.check(sidecar)


def test_a_call_is_opened_by_keyboard_and_stays_open(tmp_path: Path, seen: Seen) -> None:
    with sidecar_of(tmp_path, failing(Fault(status=503))) as sidecar:
        sidecar.ask()
        page = seen.open(sidecar)
        page.locator("#calls-list > li").wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to recent calls"
        assert page.locator(".skip").bounding_box()["y"] >= 0  # type: ignore[index]
        page.keyboard.press("Enter")
        for _ in range(3):  # past the filters, to the first call
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid"
        page.keyboard.press("Enter")
        steps = page.locator("#calls-list .steps li")
        steps.first.wait_for()
        words = [
            re.sub(r"\s+", " ", text) for text in page.locator("#calls-list .steps .label").all_inner_texts()
        ]
        assert words == ["attempt 1 target-0", "backoff", "route to target-0", "attempt 2 target-0"]
        assert "failed, may be retried · status 503" in steps.first.inner_text()
        for number in range(2, 5):  # others come, and what is being read stays where it is
            sidecar.ask()
            wait_for_total(page, "Requests", str(number))
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        assert page.locator("details[open]").count() == 1
        assert page.locator("#calls-list > li").count() == 4
        page.keyboard.press("ArrowLeft")
        assert page.locator("details[open]").count() == 0
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowRight")
        assert page.locator("#calls-list > li:nth-child(3) details[open]").count() == 1
        page.keyboard.press("Home")
        page.keyboard.press("Space")
        assert page.locator("#calls-list > li:nth-child(1) details[open]").count() == 1
        seen.check(sidecar)


def test_what_rolled_out_of_the_list_stays_while_it_is_open(tmp_path: Path, seen: Seen) -> None:
    with sidecar_of(tmp_path, failing(Fault(status=400))) as sidecar:
        sidecar.ask(model="the-first")
        page = seen.open(sidecar)
        page.locator("#calls-list summary").click()
        with httpx.Client(timeout=60) as client:
            for _ in range(60):
                client.post(f"{sidecar.url}/v1/chat/completions", json=ASK, timeout=PATIENCE)
        wait_for_total(page, "Requests", "61")
        assert page.locator("#calls-list > li").count() == 51
        assert page.locator("#calls-list > li:last-child details[open]").count() == 1
        assert page.locator("#calls-count").inner_text() == "50 of 61 calls"
        page.locator("details[open] > summary").click()
        page.keyboard.press("Home")
        sidecar.ask()
        wait_for_total(page, "Requests", "62")
        assert page.locator("#calls-list > li").count() == 50
        assert page.locator("summary:has-text('the-first')").count() == 0
        page.check("#only-notable")
        page.locator("#calls-count:text-is('1 of 1 found, 62 calls')").wait_for()
        assert page.locator("summary:has-text('the-first')").count() == 1
        seen.check(sidecar)


def test_it_finds_its_way_back_when_the_sidecar_is_killed_and_started_again(
    tmp_path: Path, seen: Seen
) -> None:
    with sidecar_of(tmp_path, FakeProvider()) as sidecar:
        page = seen.open(sidecar)
        sidecar.ask()
        wait_for_total(page, "Requests", "1")
        page.evaluate("window.untouched = true")
        seen.check(sidecar)
        sidecar.kill()
        seen.wait_for_link("lost")
        assert page.locator("#link").inner_text() == "Reconnecting"
        assert total(page, "Requests") == "1"  # what was known last is still there to be read
        sidecar.start()
        seen.wait_for_link("live")
        wait_for_total(page, "Requests", "0")
        for number in range(1, 3):
            sidecar.ask()
            wait_for_total(page, "Requests", str(number))
        assert page.locator("#calls-list > li").count() == 2
        assert page.evaluate("window.untouched")
        # Of a server that is away a browser says so; there is nothing else to be said.
        assert all("net::ERR_" in line for line in seen.said), seen.said
        assert page.evaluate("window.violations") == []


def test_a_sidecar_that_drains_says_so(tmp_path: Path, seen: Seen) -> None:
    provider = failing(Fault(delay_headers=3600))
    with sidecar_of(tmp_path, provider, toml="server.drain_timeout = 60") as sidecar:
        page = seen.open(sidecar)
        asking = threading.Thread(target=sidecar.ask_in_vain)
        asking.start()
        wait_for_total(page, "In flight", "1")
        sidecar.send(signal.SIGTERM)
        seen.wait_for_link("draining")
        sidecar.send(signal.SIGTERM)  # now
        seen.wait_for_link("lost")
        asking.join(PATIENCE)


def test_who_has_the_token_signs_in_and_out(tmp_path: Path, seen: Seen) -> None:
    toml, environ = 'admin.token_env = "ADMIN_TOKEN"', {"ADMIN_TOKEN": TOKEN}
    with sidecar_of(tmp_path, FakeProvider(), toml=toml, environ=environ) as sidecar:
        page = seen.page
        page.goto(f"{sidecar.admin}/admin/ui")
        assert page.url == f"{sidecar.admin}/admin/ui/login"
        assert page.evaluate("document.activeElement.id") == "token"
        page.keyboard.type("wrong-token-0123456789")
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        assert [one for one in seen.said if "401" not in one] == []
        seen.said.clear()
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        seen.wait_for_link("live")
        assert page.url == f"{sidecar.admin}/admin/ui"
        assert page.evaluate("document.cookie") == ""
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/admin/ui")
        sidecar.kill()
        seen.wait_for_link("lost")
        sidecar.start()
        seen.wait_for_link("live")  # the session outlives a restart
        seen.said.clear()
        page.click("text=Sign out")
        page.wait_for_url("**/login")
        page.goto(f"{sidecar.admin}/admin/ui")
        assert page.url == f"{sidecar.admin}/admin/ui/login"
        seen.check(sidecar)


def test_a_session_that_is_over_is_said_to_be(tmp_path: Path, seen: Seen) -> None:
    toml, environ = 'admin.token_env = "ADMIN_TOKEN"', {"ADMIN_TOKEN": TOKEN}
    with sidecar_of(tmp_path, FakeProvider(), toml=toml, environ=environ) as sidecar:
        page = seen.page
        page.goto(f"{sidecar.admin}/admin/ui")
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        seen.wait_for_link("live")
        page.context.clear_cookies()
        page.fill("#filter-call", "anything")  # which asks anew
        seen.wait_for_link("over")
        assert page.locator("#link").inner_text() == "The session is over. Sign in again"
        page.click("text=Sign in again")
        page.wait_for_url("**/login")


def test_names_from_outside_are_shown_as_they_are(tmp_path: Path, seen: Seen) -> None:
    with sidecar_of(tmp_path, failing(Fault(status=503))) as sidecar:
        sidecar.ask(model=HOSTILE)
        page = seen.open(sidecar)
        page.locator("#calls-list summary").click()
        page.locator(".steps li").first.wait_for()
        assert page.locator("#calls-list .model").inner_text().endswith(SHOWN)
        assert SHOWN in page.locator(".steps li").first.inner_text()
        page.fill("#filter-call", HOSTILE)
        page.wait_for_url("**/admin/ui?call=*")
        sidecar.ask(model="another")
        wait_for_total(page, "Requests", "2")
        assert page.locator("#calls-list > li").count() == 1
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script").count() == 0
        seen.check(sidecar)


def test_of_many_a_few_are_shown_and_the_rest_is_found(tmp_path: Path, seen: Seen) -> None:
    tenants = "".join(f'[tenants.t{number:04}]\nkey_sha256 = "{number:064x}"\n' for number in range(1000))
    providers = [FakeProvider()]
    more = "".join(f'[targets.more-{number:02}]\nurl = "http://127.0.0.1:1/v1"\n' for number in range(49))
    with sidecar_of(tmp_path, *providers, toml=f"{tenants}{more}") as sidecar:
        page = seen.open(sidecar)
        assert page.locator("#tenants-count").inner_text() == "50 of 1,000 tenants"
        assert page.locator("#targets-count").inner_text() == "50 targets"
        assert page.locator("#tenants-table tbody tr").count() == 50
        assert page.evaluate("document.querySelectorAll('*').length") < 5000
        page.fill("#filter-tenant", "T0777")
        page.locator("#tenants-table tbody tr th:text-is('t0777')").wait_for()
        assert page.locator("#tenants-table tbody tr").count() == 1
        assert page.locator("#tenants-count").inner_text() == "1 of 1 found, 1,000 tenants"
        assert page.url.endswith("?tenant=T0777")
        page.fill("#filter-target", "no such target")
        page.locator("#targets-empty").wait_for()
        assert page.locator("#targets-empty").inner_text() == "No target matches."
        page.reload()  # the address has what is looked for
        seen.wait_for_link("live")
        assert page.input_value("#filter-tenant") == "T0777"
        assert page.locator("#tenants-table tbody tr").count() == 1
        seen.check(sidecar)


def test_rows_come_in_the_order_that_is_wanted(tmp_path: Path, seen: Seen) -> None:
    keys = {f"KEY_{name}": f"key-of-{name}-0123456789" for name in ("A", "B", "C")}
    toml = "".join(f'[tenants.{name[-1].lower()}]\nkey_env = "{name}"\n' for name in keys)
    with sidecar_of(tmp_path, FakeProvider(), toml=toml, environ=keys) as sidecar:
        for name, times in (("A", 1), ("B", 3), ("C", 2)):
            for _ in range(times):
                headers = {"x-api-key": keys[f"KEY_{name}"]}
                httpx.post(f"{sidecar.url}/v1/chat/completions", json=ASK, headers=headers, timeout=PATIENCE)
        page = seen.open(sidecar)
        names = page.locator("#tenants-table tbody th")
        assert names.all_inner_texts() == ["a", "b", "c"]
        page.click("#tenants-table thead button:text-is('Requests')")
        page.locator("#tenants-table tbody tr:first-child th:text-is('b')").wait_for()
        assert names.all_inner_texts() == ["b", "c", "a"]
        sorted_by = page.locator("#tenants-table thead [aria-sort]")
        assert (sorted_by.inner_text(), sorted_by.get_attribute("aria-sort")) == ("Requests", "descending")
        seen.check(sidecar)


def test_what_is_paused_stands_still(tmp_path: Path, seen: Seen) -> None:
    with sidecar_of(tmp_path, FakeProvider()) as sidecar:
        page = seen.open(sidecar)
        page.click("#pause")
        assert page.locator("#link").inner_text() == "Paused"
        sidecar.ask()
        other = page.context.new_page()  # which sees it, so that it is known to be there to be seen
        other.goto(f"{sidecar.admin}/admin/ui")
        wait_for_total(other, "Requests", "1")
        other.close()
        assert total(page, "Requests") == "0"
        page.click("text=Resume")
        wait_for_total(page, "Requests", "1")
        seen.check(sidecar)


def test_it_can_be_read_by_anybody(tmp_path: Path, seen: Seen) -> None:
    provider = failing(*[Fault(status=503), Fault(status=429, headers={"retry-after": "0.1"})] * 2)
    with sidecar_of(tmp_path, provider, toml="retry.max_attempts = 2\n") as sidecar:
        for model in ("gpt-4o", "gpt-4o", "", "a-model-with-a-name-that-is-longer-than-any-column-" * 4):
            sidecar.ask(model=model)
        seen.page.emulate_media(reduced_motion="reduce")
        page = seen.open(sidecar)
        page.locator("#calls-list summary").nth(3).click()
        page.locator(".steps li").first.wait_for()
        for scheme, ground in GROUNDS.items():
            for width in (1280, 1000, 700, 360):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 900})
                check_that_it_can_be_read(page, ground)
        seen.check(sidecar)


def check_that_it_can_be_read(page: Page, ground: str) -> None:
    result = axe.Axe().run(page).response
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in result["violations"]] == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate("getComputedStyle(document.querySelector('.fill')).transitionDuration") == "0s"


def test_what_is_read_out_does_not_chatter(tmp_path: Path, seen: Seen) -> None:
    with sidecar_of(tmp_path, FakeProvider()) as sidecar:
        page = seen.open(sidecar)
        page.evaluate(
            "window.spoken = 0; for (const region of document.querySelectorAll('[role=status], [aria-live]'))"
            " new MutationObserver(() => window.spoken++).observe(region, {subtree: true, childList: true,"
            " characterData: true});"
        )
        for number in range(1, 5):
            sidecar.ask()
            wait_for_total(page, "Requests", str(number))
        assert page.evaluate("window.spoken") == 0
        httpx.post(f"{sidecar.admin}/admin/circuits/target-0/isolate", timeout=PATIENCE)
        page.locator("#changes:text-is('target-0: circuit isolated')").wait_for(state="attached")
        assert page.locator("#troubles").inner_text() == "1 of 1 targets takes no calls: target-0 (isolated)"
        assert page.locator("td[data-label='Circuit']").inner_text() == "isolated"
        seen.check(sidecar)
