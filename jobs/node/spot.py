"""Stop a job when the Spot instance that it runs on is about to be reclaimed."""

import os
import threading
from collections.abc import Mapping

import urllib3

from pipeline.core.stop import StopSignal

# Instance metadata of EC2 (IMDSv2). The notice appears two minutes before the machine is reclaimed, and AWS recommends
# to check for it every 5 seconds (EC2 user guide, Spot Instance interruption notices). Jobs do not receive SIGTERM at
# that time, because draining a machine only stops tasks of services (Amazon ECS developer guide, container instance
# draining). The variables are those of the AWS SDKs.
ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DISABLED = "AWS_EC2_METADATA_DISABLED"
_DEFAULT_ENDPOINT = "http://169.254.169.254"
_TOKEN_S = 21_600
POLL_S, TIMEOUT_S, MAX_FAILURES = 5.0, 1.0, 3
SPOT_NOTICE = "SPOT_NOTICE"
"""Reason of a stop signal."""


def watch_spot_notice(stop: StopSignal, env: Mapping[str, str] = os.environ) -> None:
    """Start a thread that sets `stop` when the Spot instance of this AWS Batch job is about to be reclaimed.

    The thread ends if the instance metadata does not answer three times, as in jobs with a network of their own.
    """
    if "AWS_BATCH_JOB_ID" in env and env.get(DISABLED, "").lower() != "true":
        endpoint = (env.get(ENDPOINT) or _DEFAULT_ENDPOINT).rstrip("/")
        threading.Thread(target=_poll, args=(stop, endpoint), name="spot notice", daemon=True).start()


def _poll(stop: StopSignal, endpoint: str) -> None:
    http = urllib3.PoolManager(timeout=TIMEOUT_S, retries=False)
    token, failures, pause_s = "", 0, 0.0
    while not stop.wait(pause_s):
        pause_s = POLL_S
        try:
            if not token:
                headers = {"x-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
                answer = http.request("PUT", f"{endpoint}/latest/api/token", headers=headers)
                token = answer.data.decode() if answer.status == 200 else ""
            url = f"{endpoint}/latest/meta-data/spot/instance-action"
            answer = http.request("GET", url, headers={"x-aws-ec2-metadata-token": token})
        except urllib3.exceptions.HTTPError:
            failures += 1
            if failures >= MAX_FAILURES and not token:
                return
            continue
        failures = 0
        if answer.status == 401:  # the token has expired
            token = ""
        elif answer.status == 200:
            stop.set(SPOT_NOTICE)
