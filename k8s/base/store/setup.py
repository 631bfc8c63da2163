"""Creates a bucket for each user of an S3 server; on MinIO also the user, with a policy for this bucket only.

    ADMIN_ACCESS_KEY=... ADMIN_SECRET_KEY=... setup.py HOST:PORT [--buckets-only]

The users' keys are NAME_ACCESS_KEY and NAME_SECRET_KEY. Existing users and policies are updated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from minio import Minio, MinioAdmin
from minio.credentials import StaticProvider

BUCKETS = ("tidemill", "mlflow")


def policy(bucket: str) -> dict[str, object]:
    """Permissions of the user of a bucket: everything inside it, and nothing on the bucket itself."""
    objects = ["AbortMultipartUpload", "DeleteObject", "GetObject", "ListMultipartUploadParts", "PutObject"]
    inside = ["GetBucketLocation", "ListBucket", "ListBucketMultipartUploads"]
    return {
        "Version": "2012-10-17",
        "Statement": [allow(inside, bucket), allow(objects, f"{bucket}/*")],
    }


def allow(actions: Sequence[str], resource: str) -> dict[str, object]:
    """A statement of a policy."""
    return {
        "Effect": "Allow",
        "Action": [f"s3:{action}" for action in actions],
        "Resource": [f"arn:aws:s3:::{resource}"],
    }


def make_buckets(endpoint: str, env: Mapping[str, str]) -> None:
    """Create the buckets that are missing.

    Args:
        endpoint: HOST:PORT of the server.
        env: keys of the owner.
    """
    keys = {"access_key": env["ADMIN_ACCESS_KEY"], "secret_key": env["ADMIN_SECRET_KEY"]}
    client = Minio(endpoint=endpoint, **keys, secure=False)
    for bucket in BUCKETS:
        if not client.bucket_exists(bucket_name=bucket):
            client.make_bucket(bucket_name=bucket)


def make_users(endpoint: str, env: Mapping[str, str]) -> None:
    """Create users and policies through MinIO's own admin API.

    Args:
        endpoint: HOST:PORT of the server.
        env: keys of the owner and of the users.
    """
    owner = StaticProvider(env["ADMIN_ACCESS_KEY"], env["ADMIN_SECRET_KEY"])
    admin = MinioAdmin(endpoint=endpoint, credentials=owner, secure=False)
    for bucket in BUCKETS:
        user = env[f"{bucket.upper()}_ACCESS_KEY"]
        admin.user_add(user, env[f"{bucket.upper()}_SECRET_KEY"])
        with TemporaryDirectory() as folder:
            file = Path(folder) / "policy.json"
            file.write_text(json.dumps(policy(bucket)), encoding="utf-8")
            admin.policy_add(bucket, str(file))
        admin.policy_set(bucket, user=user)


def check_users(env: Mapping[str, str]) -> None:
    """Refuse the same access key for two users: the second would replace the policy of the first.

    Args:
        env: keys of the owner and of the users.
    """
    users = [env[f"{name.upper()}_ACCESS_KEY"] for name in ("admin", *BUCKETS)]
    if len(set(users)) < len(users):
        sys.exit("the secrets of the store have the same access_key: give each its own, see k8s/secrets")


if __name__ == "__main__":
    check_users(os.environ)
    make_buckets(sys.argv[1], os.environ)
    if "--buckets-only" not in sys.argv[2:]:
        make_users(sys.argv[1], os.environ)
