"""Files are read where nothing waits for the disk, and what may never end is not read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import anyio
import pytest

from resilient_llm.sidecar import ConfigError, parse
from resilient_llm.sidecar.check import check
from resilient_llm.sidecar.config import load
from resilient_llm.sidecar.files import aside, content
from resilient_llm.sidecar.orders import Orders
from resilient_llm.sidecar.reload import Reloader
from resilient_llm.testing import FakeProvider
from tests.sidecar.certificates import Authority
from tests.sidecar.support import OPEN, ask, memory

pytestmark = pytest.mark.anyio

TLS = OPEN + '[server]\ntls = { certificate = "server.crt", key = "server.key" }\n'


def pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def test_a_file_is_read_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"some\0thing")
    assert content(file) == b"some\0thing"
    link = tmp_path / "link"
    link.symlink_to(file)
    assert content(link) == b"some\0thing"
    with pytest.raises(OSError, match="not a regular file"):
        content(pipe(file))
    with pytest.raises(ConfigError, match="link: cannot be read: It is not a regular file"):
        load(link)
    with pytest.raises(IsADirectoryError):
        content(tmp_path)
    with pytest.raises(FileNotFoundError):
        content(tmp_path / "none")


@pytest.mark.parametrize("name", ["server.crt", "server.key"])
def test_nor_is_one_in_the_place_of_a_certificate(name: str, tmp_path: Path) -> None:
    Authority(tmp_path).sign("server")
    pipe(tmp_path / name)
    file = tmp_path / "gateway.toml"
    file.write_text(TLS)
    with pytest.raises(ConfigError, match=rf'{name}": cannot be read: It is not a regular file'):
        check(file, {})


async def test_a_reload_from_a_pipe_changes_nothing_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    sidecar = memory(FakeProvider())
    reload = Reloader(sidecar, pipe(file))
    with pytest.raises(ConfigError, match="cannot be read: It is not a regular file"):
        await reload()
    assert (await ask(sidecar)).status == 200
    file.unlink()
    file.write_text(OPEN)
    orders = Orders(file)
    pipe(file)
    with pytest.raises(ConfigError, match="cannot be read: It is not a regular file"):
        await orders.checked()
    await sidecar.aclose()


async def test_a_disk_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hung, left = threading.Event(), threading.Event()

    def hang(_path: Path) -> bytes:
        hung.wait(60)
        left.set()
        return b""

    sidecar = memory(FakeProvider())
    with monkeypatch.context() as patch:
        patch.setattr("resilient_llm.sidecar.files._PATIENCE", 0.2)
        patch.setattr("resilient_llm.sidecar.config.content", hang)
        reload = Reloader(sidecar, tmp_path / "gateway.toml")
        refused: list[str] = []

        async def give_up() -> None:
            with pytest.raises(ConfigError, match=r"the disk that they are on does not answer") as error:
                await reload()
            refused.append(str(error.value))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            assert (await ask(sidecar)).status == 200
            assert not refused  # it was answered meanwhile
    assert refused == [reload.last.error]
    (tmp_path / "gateway.toml").write_text(OPEN)
    assert (await reload()).count == 1
    hung.set()
    assert left.wait(60)
    assert sidecar.setup.config == parse(OPEN)
    await sidecar.aclose()


async def test_what_goes_wrong_aside_is_raised_where_it_is_waited_for() -> None:
    def late() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await aside(late)
    assert await aside(lambda: threading.current_thread().daemon)
