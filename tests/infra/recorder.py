"""A moto server that lets each role do only what its policies allow, and notes everything that is asked of it.

Who asks is told by the access key: a role's name. Other keys are those of the test itself, which may do anything.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree

import botocore.session

from tests.infra.iam import Decision, Request, decide
from tests.infra.policies import JOB_ROLES, Fleet
from tests.s3 import MotoServer

_KEY = re.compile(r"Credential=([^/]+)/\d+/[^/]+/(\w+)/aws4_request")
_MULTIPART = frozenset({"uploads", "uploadId", "partNumber"})
_OTHER_SUBJECTS = frozenset({"versionId", "acl", "tagging", "policy", "lifecycle", "versioning"})
_DENIED_S3 = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass(frozen=True)
class Call:
    """One HTTP request of a role."""

    role: str
    method: str
    path: str
    query: str
    asked: tuple[Request, ...]
    """What IAM is asked before it is carried out."""
    refused: tuple[Request, ...] = ()

    def __str__(self) -> str:
        return f"{self.role}: {self.method} {self.path}{self.query and '?'}{self.query}"


@dataclass
class Recorder(MotoServer):
    """Serves while inside `with`; `calls` in the order of coming."""

    fleet: Fleet
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.fleet.bucket)
        self._policies = {role: self.fleet.policies(role) for role in JOB_ROLES}
        self._tags: dict[str, Mapping[str, str]] = {}
        self._lock = Lock()

    def refused(self) -> list[Call]:
        return [call for call in self.calls if call.refused]

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        role, service = _who(environ)
        if role not in self._policies:
            return super()._serve(environ, start_response)
        body = _body(environ)
        asked = tuple(self._asked(service, environ, body))
        refused = tuple(one for one in asked if not self._may(role, one))
        call = Call(role, environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], asked, refused)
        with self._lock:
            self.calls.append(call)
        if refused:
            return _deny(service, start_response)
        return self._carried_out(call, service, environ, start_response, body)

    def _carried_out(
        self, call: Call, service: str, environ: dict[str, Any], start_response: Any, body: bytes
    ) -> Iterable[bytes]:
        status: list[str] = []

        def begin(line: str, *rest: Any) -> Any:
            status.append(line)
            return start_response(line, *rest)

        if service == "s3" and call.method in ("GET", "HEAD") and not self._may_know(call):
            return _deny(service, start_response)
        answer = b"".join(super()._serve(environ, begin))
        if call.path == "/v1/submitjob" and status[0].startswith("200"):
            self._tags[json.loads(answer)["jobId"]] = json.loads(body).get("tags", {})
        return [answer]

    def _may_know(self, call: Call) -> bool:
        """S3 tells that a key is missing (404) only to who may list it; to others it says 403."""
        bucket, _, key = call.path.lstrip("/").partition("/")
        listing = Request("s3:ListBucket", f"arn:aws:s3:::{bucket}", {"s3:prefix": unquote(key)})
        if not key or self._may(call.role, listing):
            return True
        found = self.client.list_objects_v2(Bucket=bucket, Prefix=unquote(key)).get("Contents", ())
        return any(one["Key"] == unquote(key) for one in found)

    def _may(self, role: str, request: Request) -> bool:
        return decide(self._policies[role], request) == Decision.ALLOWED

    def _asked(self, service: str, environ: Mapping[str, Any], body: bytes) -> Iterator[Request]:
        if service == "s3":
            yield from self._asked_of_s3(environ, body)
        elif service == "batch":
            yield from self._asked_of_batch(environ["PATH_INFO"], json.loads(body or b"{}"))
        else:
            raise AssertionError(f"{service} is asked for {environ['PATH_INFO']}: no role was meant to use it")

    def _asked_of_s3(self, environ: Mapping[str, Any], body: bytes) -> Iterator[Request]:
        method, query = environ["REQUEST_METHOD"], parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        arn = f"arn:aws:s3:::{bucket}"
        if unknown := _OTHER_SUBJECTS & set(query) or {name for name in environ if "COPY_SOURCE" in name}:
            raise AssertionError(f"{method} {environ['PATH_INFO']} with {unknown}: say here what it asks of IAM")
        if not key:
            yield from _asked_of_bucket(method, arn, query, body)
            return
        match method:
            case "GET" | "HEAD":
                yield Request("s3:GetObject", f"{arn}/{key}")
                if method == "GET":
                    yield from self._key_use(bucket, "Decrypt")
            case "PUT" | "POST":
                named = {"s3:if-match": "HTTP_IF_MATCH", "s3:if-none-match": "HTTP_IF_NONE_MATCH"}
                context = {name: environ[header] for name, header in named.items() if header in environ}
                yield Request("s3:PutObject", f"{arn}/{key}", context)
                if "HTTP_IF_MATCH" in environ:  # conditional writes, S3 user guide: to compare is to read
                    yield Request("s3:GetObject", f"{arn}/{key}")
                yield from self._key_use(bucket, "GenerateDataKey", *(["Decrypt"] if _MULTIPART & set(query) else []))
            case "DELETE":
                action = "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
                yield Request(f"s3:{action}", f"{arn}/{key}")
            case _:
                raise AssertionError(f"{method} {environ['PATH_INFO']}")

    def _key_use(self, bucket: str, *actions: str) -> Iterator[Request]:
        """The key that S3 uses in the name of who asks."""
        keys = {one.bucket: one.kms_key_arn for one in self.fleet.data} | {self.fleet.bucket: self.fleet.key_arn}
        context = {"kms:ViaService": f"s3.{self.fleet.region}.amazonaws.com"}
        yield from (Request(f"kms:{action}", keys[bucket], context) for action in actions if keys[bucket])

    def _asked_of_batch(self, path: str, body: Mapping[str, Any]) -> Iterator[Request]:
        name = _operations()[path]
        action = f"batch:{name}"
        tags = {f"aws:RequestTag/{key}": value for key, value in body.get("tags", {}).items()}
        match name:
            case "SubmitJob":
                context = tags | {"batch:ShareIdentifier": body["shareIdentifier"]}
                yield Request(action, self.fleet.batch_arn(f"job-definition/{body['jobDefinition']}"), context)
                yield Request(action, self.fleet.batch_arn(f"job-queue/{body['jobQueue']}"), context)
                yield Request("batch:TagResource", self.fleet.batch_arn("job/new"), tags)
            case "RegisterJobDefinition":
                definition = self.fleet.batch_arn(f"job-definition/{body['jobDefinitionName']}")
                for container in _containers(body):
                    yield Request(action, definition, tags | {"batch:Privileged": str(container["privileged"])})
                    for service in ("batch", "ecs-tasks"):  # AWS does not say which of the two it names
                        passed = {"iam:PassedToService": f"{service}.amazonaws.com"}
                        yield Request("iam:PassRole", container["jobRoleArn"], passed)
                yield Request("batch:TagResource", definition, tags)
            case "TerminateJob":
                tagged = {f"aws:ResourceTag/{key}": value for key, value in self._tags[body["jobId"]].items()}
                yield Request(action, self.fleet.batch_arn(f"job/{body['jobId']}"), tagged)
            case _ if name.startswith(("Describe", "List")):
                yield Request(action)
            case _:
                raise AssertionError(f"{name}: say here what it asks of IAM")


def _asked_of_bucket(method: str, arn: str, query: Mapping[str, list[str]], body: bytes) -> Iterator[Request]:
    if method == "HEAD":
        yield Request("s3:ListBucket", arn)
    elif method == "GET" and "list-type" in query:
        context = {f"s3:{name}": values[0] for name, values in query.items() if name in ("prefix", "delimiter")}
        yield Request("s3:ListBucket", arn, context)
    elif method == "POST" and "delete" in query:
        keys = (one.text for one in ElementTree.fromstring(body).iter() if one.tag.endswith("Key"))  # noqa: S314
        yield from (Request("s3:DeleteObject", f"{arn}/{key}") for key in keys)
    else:
        raise AssertionError(f"{method} {arn} {dict(query)}: say here what it asks of IAM")


def _containers(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nodes = body.get("nodeProperties", {}).get("nodeRangeProperties", ())
    return [one["container"] for one in nodes] or [body["containerProperties"]]


@cache
def _operations() -> dict[str, str]:
    """Operations of AWS Batch by path."""
    model = botocore.session.get_session().get_service_model("batch")
    return {model.operation_model(name).http["requestUri"]: name for name in model.operation_names}


def _who(environ: Mapping[str, Any]) -> tuple[str, str]:
    """(access key, service) that a request was signed with."""
    found = _KEY.search(environ.get("HTTP_AUTHORIZATION", ""))
    return (found[1], found[2]) if found else ("", "")


def _body(environ: dict[str, Any]) -> bytes:
    """All of it, and put back for who is next."""
    if environ.get("wsgi.input_terminated"):
        data = environ["wsgi.input"].read()
    else:
        data = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = BytesIO(data)
    return bytes(data)


def _deny(service: str, start_response: Callable[..., Any]) -> Iterable[bytes]:
    if service == "s3":
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [_DENIED_S3]
    header = ("x-amzn-ErrorType", "AccessDeniedException")
    start_response("403 Forbidden", [("Content-Type", "application/json"), header])
    return [b'{"message": "not authorized"}']
