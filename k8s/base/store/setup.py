"""Makes a bucket for each user of a MinIO server, and the user with a policy for this bucket alone.

    ADMIN_ACCESS_KEY=... ADMIN_SECRET_KEY=... setup.py HOST:PORT

The users' keys are NAME_ACCESS_KEY and NAME_SECRET_KEY. Whatever is there already is brought up to date.
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
    """What the owner of a bucket may do: everything inside it, and nothing to the bucket itself."""
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


def set_up(endpoint: str, env: Mapping[str, str]) -> None:
    """Make buckets, policies and users.

    Args:
        endpoint: HOST:PORT of the server.
        env: the keys.
    """
    admin_key, admin_secret = env["ADMIN_ACCESS_KEY"], env["ADMIN_SECRET_KEY"]
    client = Minio(endpoint=endpoint, access_key=admin_key, secret_key=admin_secret, secure=False)
    admin = MinioAdmin(endpoint=endpoint, credentials=StaticProvider(admin_key, admin_secret), secure=False)
    for bucket in BUCKETS:
        if not client.bucket_exists(bucket_name=bucket):
            client.make_bucket(bucket_name=bucket)
        user = env[f"{bucket.upper()}_ACCESS_KEY"]
        admin.user_add(user, env[f"{bucket.upper()}_SECRET_KEY"])
        with TemporaryDirectory() as folder:
            file = Path(folder) / "policy.json"
            file.write_text(json.dumps(policy(bucket)), encoding="utf-8")
            admin.policy_add(bucket, str(file))
        admin.policy_set(bucket, user=user)
        sys.stdout.write(f"bucket {bucket}: ready, for its own user\n")


if __name__ == "__main__":
    set_up(sys.argv[1], os.environ)
