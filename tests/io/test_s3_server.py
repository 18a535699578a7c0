"""Servers of S3 for tests."""

import boto3

from tests.kit.s3 import MotoServer, empty_account


def test_an_account_in_this_process_leaves_the_buckets_of_servers() -> None:
    with MotoServer("kept") as server:
        server.client.put_object(Bucket="kept", Key="a", Body=b"1")
        with empty_account():
            client = boto3.client("s3", region_name="us-east-1")
            assert client.list_buckets()["Buckets"] == []
            client.create_bucket(Bucket="other")
        assert server.client.get_object(Bucket="kept", Key="a")["Body"].read() == b"1"
        assert "other" not in [one["Name"] for one in server.client.list_buckets()["Buckets"]]
