"""A driver that hangs: nobody else on the host is held up, and the cause is named."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from hosts import Host, Member

from simulated_nvml import Gpu
from world import wait_until

HostWith = Callable[..., Host]
MEMORY = "nvmlDeviceGetMemoryInfo_v2"


def sentence(member: Member) -> str:
    return (member.heard("waiting") or {}).get("sentence", "")


def hangs(member: Member) -> bool:
    return "has not answered" in sentence(member)


def test_a_waiter_whose_driver_hangs_holds_nobody_up_and_gets_its_turn_later(host_with):
    host = host_with(Gpu(total_mib=40000), Gpu(total_mib=40000))
    running = [host.start(30000) for _ in range(2)]
    for member in running:
        member.wait_for("granted")
    head = host.start(30000, interval=1)
    head.waits_at(1)
    behind = host.start(30000, interval=600)
    behind.waits_at(2)
    host.machine.hang(MEMORY, 0, pid=head.process.pid)
    wait_until(lambda: hangs(head), "the head says that its driver hangs")
    running[0].end()
    behind.wait_for("granted")
    assert head.heard("granted") is None
    assert len(host.jobs()) == 3
    running[1].end()
    host.machine.heal()
    head.wait_for("granted")
    head.end()
    assert head.errors.count("has not answered") == 1


def test_a_driver_that_hangs_for_all_stops_no_command_and_no_job(host_with: HostWith) -> None:
    host = host_with(Gpu(total_mib=40000), Gpu(total_mib=40000))
    running = host.start(30000)
    gpu = running.wait_for("granted")["gpu"]
    other = next(uuid for uuid in map(host.machine.uuid, range(2)) if uuid != gpu)
    waiting = host.start(30000, only=gpu, interval=1)
    waiting.waits_at(1)
    host.machine.hang(MEMORY, 0)
    assert running.tell("open", "open")["gpus"] == {}
    wait_until(lambda: hangs(waiting), "the waiting job reports it")
    assert running.tell(f"move {other}", "moved")["done"] is False
    seen = host.machine.python(
        """
        import contextlib, io, json
        from robust_train.gpu import inventory
        inventory.OPENING_SECONDS = 0.5
        from robust_train.cli.main import main
        seen = {}
        for command in ("doctor", "gpus", "queue"):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main([command])
            seen[command] = [code, out.getvalue() + err.getvalue()]
        print(json.dumps(seen))
        """
    )
    for name, (code, text) in seen.items():
        assert "has not answered" in text, (name, text)
        assert code == (name == "doctor"), (name, code, text)
    assert "waiting" in seen["queue"][1]
    assert "running" in seen["queue"][1]
    host.machine.heal()
    wait_until(lambda: running.tell(f"move {other}", "moved")["done"], "it moves")


@pytest.mark.parametrize(
    "function", ["nvmlInit", pytest.param("nvmlDeviceGetCount", marks=pytest.mark.slow)]
)
def test_a_driver_that_hangs_from_the_start_is_named(host_with: HostWith, function: str) -> None:
    host = host_with(Gpu())
    host.machine.hang(function)
    told = host.machine.python(
        """
        import json
        from robust_train.gpu import inventory
        inventory.OPENING_SECONDS = 0.5
        first = inventory.read_inventory()
        # nobody else is sent where the first has not come back
        inventory.OPENING_SECONDS = 1e6
        second = inventory.read_inventory()
        print(json.dumps([first.answered, first.problem, second.answered]))
        """
    )
    assert told[0] is told[2] is False
    assert "dmesg" in told[1]


def test_ctrl_c_is_heard_while_the_driver_hangs(host_with: HostWith) -> None:
    host = host_with(Gpu())
    host.machine.hang("nvmlInit")
    process = host.machine.start(
        """
        from robust_train.gpu import inventory
        inventory.OPENING_SECONDS = 1e6
        try:
            inventory.read_inventory()
        except KeyboardInterrupt:
            print("heard")
        """
    )
    wait_until(lambda: host.machine.calls("nvmlInit"), "it asks")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120) == ("heard\n", "")
