"""Who this machine is: instance id and type on EC2, else its host name."""

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

DMI = Path("/sys/devices/virtual/dmi/id")
IMDS = "http://169.254.169.254/latest"
IMDS_LIMIT_S = 1.0
INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
INSTANCE_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")
AWS_VARIABLES = ("AWS_BATCH_JOB_ID", "ECS_CONTAINER_METADATA_URI_V4")

Reader = Callable[[str], str]


@dataclass(frozen=True)
class Identity:
    """`host` names the machine in reports; `instance_type` is empty where nobody knows it."""

    host: str
    instance_type: str = ""


def read_dmi(name: str) -> str:
    """A line the firmware has left; empty where there is none. No network needed, and containers see it."""
    try:
        return (DMI / name).read_text(errors="replace").strip()
    except OSError:
        return ""


def ask_imds(path: str) -> str:
    """An answer of the instance metadata service (version 2); empty when none comes in time. Never through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    token = urllib.request.Request(  # noqa: S310 - a constant address
        f"{IMDS}/api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    )
    try:
        with opener.open(token, timeout=IMDS_LIMIT_S) as answer:
            headers = {"X-aws-ec2-metadata-token": answer.read().decode("ascii", "replace")}
        wanted = urllib.request.Request(f"{IMDS}/meta-data/{path}", headers=headers)  # noqa: S310 - a constant address
        with opener.open(wanted, timeout=IMDS_LIMIT_S) as answer:
            found: str = answer.read().decode("ascii", "replace")
            return found.strip()
    except (OSError, HTTPException):  # no answer is an answer: the host name will do
        return ""


def read_identity(
    env: Mapping[str, str],
    *,
    dmi: Reader = read_dmi,
    imds: Reader = ask_imds,
    host_name: Callable[[], str] = socket.gethostname,
) -> Identity:
    """Instance id and type from the firmware of a Nitro machine, else from the metadata service, else the host name.

    The metadata service is asked only on EC2, where it answers at once or (a container one hop too far) not at all:
    at most two answers that do not come, of 1 s each.
    """
    on_ec2 = dmi("sys_vendor") == "Amazon EC2"
    instance, kind = (dmi("board_asset_tag"), dmi("product_name")) if on_ec2 else ("", "")
    may_ask = env.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true"
    if may_ask and (on_ec2 or any(name in env for name in AWS_VARIABLES)):
        instance = instance if INSTANCE_ID.fullmatch(instance) else imds("instance-id")
        kind = kind if INSTANCE_TYPE.fullmatch(kind) else imds("instance-type")
    return Identity(
        host=instance if INSTANCE_ID.fullmatch(instance) else host_name() or "unknown",
        instance_type=kind if INSTANCE_TYPE.fullmatch(kind) else "",
    )
