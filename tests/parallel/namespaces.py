"""Two tasks of Amazon ECS as network namespaces of this machine, with the interfaces that the agent gives them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

MAIN_ADDRESS, OTHER_ADDRESS = "10.0.0.212", "10.0.0.213"
# The link to the agent comes first, as in a real task; the tasks reach each other through eth0.
_SCRIPT = f"""
unshare --net sleep 600 &
other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
in_other="nsenter --net=/proc/$other/ns/net"
task() {{
    $1 ip link set lo up
    $1 ip link add ecs-eth0 type veth peer name agent
    $1 ip address add $2/22 dev ecs-eth0
    $1 ip link set ecs-eth0 up
    $1 ip link set agent up
}}
task "" 169.254.172.8
task "$in_other" 169.254.172.9
ip link add eth0 type veth peer name eth0 netns $other
ip address add {MAIN_ADDRESS}/24 dev eth0
ip link set eth0 up
ip route add default via 10.0.0.1 dev eth0
$in_other ip address add {OTHER_ADDRESS}/24 dev eth0
$in_other ip link set eth0 up
$in_other ip route add default via 10.0.0.1 dev eth0
echo $$ $other
read -r _ || true
"""


@contextmanager
def ecs_tasks() -> Iterator[tuple[list[str], list[str]]]:
    """What to put before a command to run it in the main task, and in the other one. Skips where it is not allowed."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    try:
        holder = subprocess.Popen(
            ["unshare", "--net", *user, "sh", "-e", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("no unshare here (util-linux)")
    with holder:
        assert holder.stdout is not None and holder.stderr is not None
        pids = holder.stdout.readline().split()
        if not pids:
            pytest.skip(f"network namespaces are not allowed here, or iproute2 is missing: {holder.stderr.read()}")
        into = ["--preserve-credentials", "--user"] if user else []
        main, other = (["nsenter", "--target", pid, *into, "--net"] for pid in pids)
        yield main, other
