"""Two network namespaces with host names of their own, joined by one cable, run pp=2 like two hosts."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import spec_compile as sc
from tests.ranks import run_processes

from .prepared import batch_of, good_step, oracle, prepare

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
CABLE = "10.213.77"


@dataclass(frozen=True)
class Host:
    """One end of the cable."""

    namespace: str
    interface: str
    address: str


def ip(*words: str) -> None:
    """Run the ip command."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two namespaces with one end of a cable each; skips where this process may not make them."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command")
    token = f"{os.getpid() % 100000}"
    ends = [Host(f"sc{token}{c}", f"v{token}{c}", f"{CABLE}.{i + 1}") for i, c in enumerate("ab")]
    try:
        try:
            for host in ends:
                ip("netns", "add", host.namespace)
            ip("link", "add", ends[0].interface, "type", "veth", "peer", "name", ends[1].interface)
            for host in ends:
                ip("link", "set", host.interface, "netns", host.namespace)
                ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
                for name in ("lo", host.interface):
                    ip("-n", host.namespace, "link", "set", name, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces: {error.stderr.strip()}")
        yield ends
    finally:
        for host in ends:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)


def enter(host: Host, master: Host) -> None:
    """Move this process to a host; with a /sys of its own, where UCX looks for interfaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{host.namespace}", os.O_RDONLY)
    for call, arguments in (
        (libc.setns, (handle, CLONE_NEWNET)),
        (libc.unshare, (CLONE_NEWUTS | CLONE_NEWNS,)),
        (libc.mount, (b"none", b"/", None, MS_REC | MS_PRIVATE, None)),
        (libc.mount, (b"sysfs", b"/sys", b"sysfs", 0, None)),
    ):
        if call(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter a namespace")
    os.close(handle)
    socket.sethostname(host.namespace)
    os.environ.update(
        MASTER_ADDR=master.address,
        GLOO_SOCKET_IFNAME=host.interface,
        UCX_TLS="tcp,self",
        UCX_NET_DEVICES=host.interface,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["c10d", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_two_hosts_run_a_pipeline_like_the_dense_step(hosts: list[Host], transport: str) -> None:
    asked = "auto" if transport == "nixl" else transport
    plan = sc.Plan(pp=2, micro_batches=3, timeout_s=30.0, tap_transport=asked)
    prepared = prepare(plan)
    expected = oracle(prepared)

    def body(rank: int) -> tuple[str, str]:
        enter(hosts[rank], hosts[0])
        model = prepared.parallelize()
        for _ in range(2):
            good_step(model, expected)
        model.evaluate(batch_of(0))
        taps = model._caller.taps
        assert taps is not None
        model.close()
        return socket.gethostname(), taps.agreed.transports["dp0 cp0 0->1"]

    names = [host.namespace for host in hosts]
    assert run_processes(2, body, timeout=200) == [(name, transport) for name in names]
