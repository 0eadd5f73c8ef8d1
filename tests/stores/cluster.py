"""Three servers on loopback that are one cluster, for tests of stores."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.stores.conftest import Server

__all__ = ["cluster_of_three", "wait_for"]

SLOTS = 16_384
BUS = 10_000


@contextmanager
def cluster_of_three(kind: str, folder: Path, *options: str) -> Iterator[list[Server]]:
    """Start three primaries that share the slots among them."""
    nodes: list[Server] = []
    try:
        for index in range(3):
            own = folder / str(index)
            own.mkdir()
            nodes.append(node(kind, own, *options))
            first, last = SLOTS * index // 3, SLOTS * (index + 1) // 3 - 1
            with nodes[-1].admin as admin:
                admin.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        with nodes[0].admin as admin:
            for other in nodes[1:]:
                admin.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        for each in nodes:
            with each.admin as admin:
                wait_for(lambda admin=admin: is_whole(admin), "the cluster")  # type: ignore[misc]  # typed by use
        yield nodes
    finally:
        for each in nodes:
            each.close()


def node(kind: str, folder: Path, *options: str) -> Server:
    """Start one, on a port whose bus (10,000 above) is free too."""
    options += (
        "--cluster-enabled",
        "yes",
        "--cluster-config-file",
        "nodes.conf",
        "--cluster-node-timeout",
        "5000",
    )
    for _ in range(20):
        server = Server(kind, folder, *options)
        if server.port <= 65_535 - BUS and is_free(server.port + BUS):
            try:
                server.start()
            except RuntimeError:
                pass  # somebody has taken a port meanwhile
            else:
                return server
        server.close()
    raise RuntimeError(f"{kind} did not start on any of 20 ports")


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def is_whole(admin: Any) -> bool:
    info = admin.execute_command("CLUSTER", "INFO").decode()
    return all(each in info for each in ("cluster_state:ok", f"cluster_slots_ok:{SLOTS}", "cluster_size:3"))


def wait_for(happened: Callable[[], bool], what: str, *, within: float = 60) -> None:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {within:g} s")
