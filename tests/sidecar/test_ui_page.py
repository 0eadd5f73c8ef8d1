"""Who may see the page, what it is served with, and the stream of what it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from resilient_llm import Telemetry
from resilient_llm.message import Headers
from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.sidecar.admin import Admin
from resilient_llm.sidecar.crew_desk import CrewDesk
from resilient_llm.sidecar.desk import OneProcess
from resilient_llm.sidecar.exchange import CutShortError
from resilient_llm.sidecar.ui import Live, Page, Recent, taking_from
from resilient_llm.sidecar.ui import page as page_module
from resilient_llm.sidecar.ui.session import COOKIE, Sessions
from resilient_llm.testing import FakeProvider
from tests.asgi.server import Connection
from tests.sidecar.support import MemoryEngine, ask

pytestmark = pytest.mark.anyio

TOKEN = "token-of-operators-0123"
BEARER: Headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
HERE = (b"host", b"127.0.0.1:8081")
TOML = '[targets.main]\nurl = "http://provider.example/v1"\n'
STATIC = files("resilient_llm.sidecar.ui") / "static"
HOSTILE = "</script><script>alert(1)</script>\n\ndata: {}\r\n\r\n"


def sidecar_of(provider: FakeProvider | None = None) -> Sidecar:
    engine = MemoryEngine(provider or FakeProvider())
    return Sidecar(parse(TOML), engine, telemetry=Telemetry(listener=Recent()))


def admin_of(sidecar: Sidecar | None = None, token: str | None = TOKEN) -> Admin:
    return Admin(OneProcess(sidecar or sidecar_of(), None), token=token)


async def get(
    admin: Admin | Page, path: str, headers: Headers | None = None, method: str = "GET", body: bytes = b""
) -> Connection:
    connection = Connection(body, method=method, path=path, headers=headers or [])
    connection.scope["query_string"] = b""
    return await connection.run(admin)


async def log_in(admin: Admin, token: str = TOKEN, *more: tuple[bytes, bytes]) -> Connection:
    form = f"token={token}".encode()
    return await get(admin, "/admin/ui/login", [HERE, *more], "POST", form)


def shown(connection: Connection) -> Headers:
    cookie = connection.headers[b"set-cookie"].partition(b";")[0]
    return [HERE, (b"cookie", b"other=1; " + cookie)]


async def test_without_a_session_the_page_asks_for_the_token() -> None:
    admin = admin_of()
    for headers in ([], [(b"authorization", b"Bearer no")], [(b"cookie", b"resilient_llm_session=9.9")]):
        answered = await get(admin, "/admin/ui", headers)
        assert (answered.status, answered.headers[b"location"]) == (303, b"/admin/ui/login")
        for path in ("/admin/ui/events", "/admin/ui/session"):
            assert (await get(admin, path, headers)).status == 401
    form = await get(admin, "/admin/ui/login")
    assert form.status == 200
    assert b'<input type="password"' in form.body
    assert (await get(admin, "/admin/ui", BEARER)).status == 200


async def test_a_session_opens_the_page_and_nothing_else() -> None:
    admin = admin_of()
    opened = await log_in(admin)
    assert (opened.status, opened.headers[b"location"]) == (303, b"/admin/ui")
    given = opened.headers[b"set-cookie"].split(b"; ")
    assert given[1:] == [b"Max-Age=28800", b"Path=/admin/ui", b"HttpOnly", b"SameSite=Strict"]
    assert TOKEN.encode() not in opened.headers[b"set-cookie"]
    page = await get(admin, "/admin/ui", shown(opened))
    assert (page.status, page.headers[b"content-type"]) == (200, b"text/html; charset=utf-8")
    assert 28_790 <= (await get(admin, "/admin/ui/session", shown(opened))).json["ends_in"] <= 28_800
    for path in ("/admin/health", "/admin/config", "/admin/snapshot", "/metrics"):
        assert (await get(admin, path, shown(opened))).status == 401
    for path in ("/admin/reload", "/admin/circuits/main/isolate"):
        assert (await get(admin, path, shown(opened), "POST")).status == 401


async def test_a_wrong_token_opens_nothing_and_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    admin = admin_of()
    for token in ("wrong-token", "", f"{TOKEN}&token=wrong", "%00", "x" * 5000):
        refused = await log_in(admin, token)
        assert refused.status == 401
        assert b"set-cookie" not in refused.headers
        assert b"That is not the admin token." in refused.body
        assert b"wrong" not in refused.body
    assert "wrong-token" not in caplog.text


async def test_a_form_of_another_site_is_refused() -> None:
    admin = admin_of()
    elsewhere = (b"origin", b"http://evil.example")
    for more in (elsewhere, (b"sec-fetch-site", b"cross-site"), (b"origin", b"null")):
        assert (await log_in(admin, TOKEN, more)).status == 403
    for more in ((b"origin", b"https://127.0.0.1:8081"), (b"sec-fetch-site", b"same-origin")):
        assert (await log_in(admin, TOKEN, more)).status == 303


async def test_behind_https_the_cookie_is_for_https_only() -> None:
    assert (
        (await log_in(admin_of(), TOKEN, (b"x-forwarded-proto", b"https")))
        .headers[b"set-cookie"]
        .endswith(b"; Secure")
    )


async def test_who_signs_out_is_out() -> None:
    admin = admin_of()
    left = await get(admin, "/admin/ui/logout", [HERE], "POST")
    assert (left.status, left.headers[b"location"]) == (303, b"/admin/ui/login")
    assert left.headers[b"set-cookie"].startswith(COOKIE.encode() + b"=; Max-Age=0; Path=/admin/ui")


def test_a_session_outlives_a_restart_and_ends_with_its_time_or_the_token() -> None:
    def sent(cookie: bytes) -> Headers:
        return [(b"cookie", cookie.partition(b";")[0])]

    cookie = Sessions(TOKEN).cookie(secure=False)
    assert 28_790 <= Sessions(TOKEN).remaining(sent(cookie)) <= 28_800
    assert Sessions("another-token-0123456").remaining(sent(cookie)) == 0.0
    assert Sessions(TOKEN, lasts=-1).remaining(sent(Sessions(TOKEN, lasts=-1).cookie(secure=False))) == 0.0
    value = cookie.partition(b";")[0]
    end, _, proof = value.partition(b"=")[2].partition(b".")
    for forged in (
        str(int(end) + 9999).encode() + b"." + proof,
        end + b".",
        b"." + proof,
        b"1e9." + proof,
        "²".encode() + b"." + proof,
        b'"',
        b"",
    ):
        assert Sessions(TOKEN).remaining([(b"cookie", COOKIE.encode() + b"=" + forged)]) == 0.0


async def test_without_a_token_the_page_is_for_browsers_on_this_machine() -> None:
    admin = admin_of(token=None)
    mine = (b"origin", b"http://127.0.0.1:8081")
    for headers in ([HERE], [HERE, mine], [(b"host", b"localhost:1")], [(b"host", b"[::1]:8081")]):
        assert (await get(admin, "/admin/ui", headers)).status == 200
    elsewhere = (b"origin", b"http://evil.example")
    for headers in ([], [(b"host", b"evil.example")], [HERE, elsewhere], [(b"host", b"localhost:1"), mine]):
        for path in ("/admin/ui", "/admin/ui/events", "/admin/ui/session", "/admin/ui/page.js"):
            assert (await get(admin, path, headers)).status == 403
    # What can change something still has nothing to do with browsers.
    assert (await get(admin, "/admin/reload", [HERE, mine], "POST")).status == 403
    assert (await get(admin, "/admin/ui/session", [HERE])).json == {"ends_in": None}


async def test_everything_is_guarded() -> None:
    admin = admin_of()
    paths = ["/admin/ui", "/admin/ui/login", "/admin/ui/session", "/admin/ui/nothing", *page_module._FILES]
    for path in paths:
        for method in ("GET", "HEAD", "POST", "DELETE"):
            answered = await get(admin, path, [HERE, *BEARER], method)
            policy = answered.headers[b"content-security-policy"].decode()
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answered.headers[b"x-content-type-options"] == b"nosniff"
            assert answered.headers[b"cache-control"] == b"no-store"
            assert method != "HEAD" or answered.body == b""
    assert (await get(admin, "/admin/ui", BEARER, "POST")).status == 405
    assert (await get(admin, "/admin/ui/nothing", BEARER)).status == 404
    assert (await get(admin, "/admin/ui/../config", BEARER)).status == 404


async def test_the_files_ask_for_nothing_that_is_not_here() -> None:
    admin = admin_of()
    names = {entry.name for entry in STATIC.iterdir()}
    served = {path.rpartition("/")[2] for path in page_module._FILES}
    assert names == served | {"page.html", "login.html", "refused.html"}
    for name in names:
        text = (STATIC / name).read_text("utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", text), name
            for asked in re.findall(r"(?:href|src)=\"([^\"#]+)\"", text):
                assert (await get(admin, asked, BEARER)).status == 200
        if name.endswith(".js"):
            assert set(re.findall(r"from \"\./([^\"]+)\"", text)) <= served


class Viewer:
    """A browser that has the stream open."""

    def __init__(self, page: Callable[..., Any], query: bytes = b"") -> None:
        self._page = page
        self.connection = Connection(path="/admin/ui/events", headers=[HERE, *BEARER])
        self.connection.scope["query_string"] = query

    async def run(self) -> None:
        await self.connection.run(self._page)

    @property
    def events(self) -> list[tuple[str, Any]]:
        found = []
        for block in self.connection.body.decode().split("\n\n")[:-1]:
            name, number, data = block.split("\n")
            assert number.startswith("id: ")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return found


async def test_the_stream_begins_with_everything_and_goes_on() -> None:
    sidecar = sidecar_of()
    viewer = Viewer(admin_of(sidecar))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(viewer.run)
        await anyio.sleep(0.5)
        assert viewer.connection.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
        ((name, told),) = viewer.events
        assert (name, told["totals"]["requests"], told["calls"]) == ("state", 0, [])
        assert [target["name"] for target in told["targets"]] == ["main"]
        await ask(sidecar)
        await anyio.sleep(1)
        _, told = viewer.events[-1]
        assert (len(viewer.events), told["totals"]["requests"], told["calls"][0]["target"]) == (2, 1, "main")
        viewer.connection.disconnect()
    assert viewer.connection.error is None


async def test_names_from_outside_stay_names() -> None:
    sidecar = sidecar_of()
    await ask(sidecar, {"model": HOSTILE, "messages": []})
    viewer = Viewer(admin_of(sidecar))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(viewer.run)
        await anyio.sleep(0.5)
        viewer.connection.disconnect()
    ((_, told),) = viewer.events
    assert told["calls"][0]["model"] == HOSTILE
    assert viewer.connection.body.count(b"\n\n") == 1


async def test_a_viewer_gets_what_it_looks_for() -> None:
    sidecar = sidecar_of()
    for model in ("gpt-4o", "claude"):
        await ask(sidecar, {"model": model, "messages": []})
    viewers = [Viewer(admin_of(sidecar), query) for query in (b"call=claude", b"call=GPT", b"target=zzz")]
    async with anyio.create_task_group() as tasks:
        for viewer in viewers:
            tasks.start_soon(viewer.run)
        await anyio.sleep(0.5)
        for viewer in viewers:
            viewer.connection.disconnect()
    told = [viewer.events[0][1] for viewer in viewers]
    assert [[call["model"] for call in one["calls"]] for one in told] == [
        ["claude"],
        ["gpt-4o"],
        ["claude", "gpt-4o"],
    ]
    assert (told[2]["targets"], told[2]["targets_all"]) == ([], 1)


async def test_the_stream_ends_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(Live(taking_from(OneProcess(sidecar_of(), None))), TOKEN)
    monkeypatch.setattr(page, "_remaining", lambda _headers: 2.5)
    viewer = Viewer(page)
    await viewer.run()
    assert [name for name, _ in viewer.events] == ["state", "state", "state", "expired"]
    assert viewer.connection.complete


async def test_the_stream_ends_when_nothing_more_will_come() -> None:
    sidecar = sidecar_of()
    viewer = Viewer(admin_of(sidecar))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(viewer.run)
        await anyio.sleep(0.5)
        sidecar.draining, sidecar.setup.running = True, 1
        await anyio.sleep(5)
        assert not viewer.connection.complete
        assert viewer.events[-1][1]["draining"]
        sidecar.setup.running = 0
        await anyio.sleep(2)
        assert viewer.connection.complete


async def test_a_viewer_that_takes_nothing_is_left(caplog: pytest.LogCaptureFixture) -> None:
    sidecar = sidecar_of()
    admin = admin_of(sidecar)
    slow, quick = Viewer(admin), Viewer(admin)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slow.run)
        tasks.start_soon(quick.run)
        await anyio.sleep(0.5)
        slow.connection.stalled = True
        await anyio.sleep(20)
        assert isinstance(slow.connection.error, CutShortError)
        assert admin._page._live.viewers == 1
        assert len(quick.events) == 21
        quick.connection.disconnect()
    assert admin._page._live.viewers == 0
    assert admin._page._live.number == 21  # for both of them together


async def test_only_so_many_look_and_who_leaves_makes_room() -> None:
    admin = admin_of()
    viewers = [Viewer(admin) for _ in range(17)]
    async with anyio.create_task_group() as tasks:
        for viewer in viewers:
            tasks.start_soon(viewer.run)
        await anyio.sleep(0.5)
        refused = [viewer for viewer in viewers if viewer.connection.status == 503]
        assert len(refused) == 1
        assert (await get(admin, "/admin/ui/session", BEARER)).status == 503
        next(viewer for viewer in viewers if viewer.connection.status == 200).connection.disconnect()
        await anyio.sleep(0.5)
        assert (await get(admin, "/admin/ui/session", BEARER)).status == 200
        for viewer in viewers:
            viewer.connection.disconnect()


async def test_nothing_is_worked_out_while_nobody_looks() -> None:
    sidecar = sidecar_of()
    admin = admin_of(sidecar)
    await anyio.sleep(100)
    for path in ("/admin/ui", "/admin/ui/session", "/admin/ui/page.js"):
        await get(admin, path, BEARER)
    assert admin._page._live.number == 0


async def test_the_stream_ends_while_no_worker_answers() -> None:
    class Nobody:
        not_ready: str | None = None

        async def answer(self, _method: str, _path: str, _body: bytes) -> tuple[int, Headers, bytes]:
            return 503, [], b"No worker answers.\n"

    viewer = Viewer(Admin(Nobody(), token=TOKEN))
    await viewer.run()
    assert (viewer.events, viewer.connection.complete, viewer.connection.error) == ([], True, None)


@pytest.mark.realtime
async def test_workers_are_seen_as_one() -> None:
    sidecars = [sidecar_of(), sidecar_of()]
    for sidecar in sidecars:
        await ask(sidecar)

    class WorkerHandle:
        pid = 1

        def __init__(self, number: int) -> None:
            self.number = number

        async def ask(self, method: str, path: str, body: str) -> Any:
            return await OneProcess(sidecars[self.number], None).answer(method, path, body.encode())

    crew: Any = SimpleNamespace(
        workers=[WorkerHandle(0), WorkerHandle(1)], draining=False, restarts={0: 0, 1: 0}
    )
    viewer = Viewer(Admin(CrewDesk(crew, SimpleNamespace(config=None)), token=TOKEN))  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(viewer.run)
        with anyio.fail_after(10):
            while not viewer.events:  # noqa: ASYNC110 - what is waited for tells nobody
                await anyio.sleep(0.01)
        viewer.connection.disconnect()
    _, told = viewer.events[0]
    assert (told["workers"], told["totals"]["requests"], len(told["calls"])) == (2, 2, 2)
    assert (told["targets"][0]["attempts"], len({call["id"] for call in told["calls"]})) == (2, 2)
