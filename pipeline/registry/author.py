"""Who is at work, for the record."""

import getpass
import os
import socket
from collections.abc import Mapping


def who(env: Mapping[str, str] = os.environ) -> str:
    """`user@host`, with the id of the AWS Batch job where there is one."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user id has no name
        user = str(os.getuid())
    job = env.get("AWS_BATCH_JOB_ID", "")
    return f"{user}@{socket.gethostname()}{f' (Batch job {job})' if job else ''}"
