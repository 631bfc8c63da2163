#!/bin/sh
# Writes the accounts of the S3 server into memory: the owner, and a user for each bucket who may use it alone.
set -eu
umask 077
user() {
    printf '{"name":"%s","credentials":[{"accessKey":"%s","secretKey":"%s"}],"actions":[%s]}' "$@"
}
inside() {
    printf '"Read:%s","List:%s","Write:%s","Tagging:%s"' "$1" "$1" "$1" "$1"
}
{
    printf '{"identities":['
    user admin "$ADMIN_ACCESS_KEY" "$ADMIN_SECRET_KEY" '"Admin","Read","List","Write","Tagging"'
    printf ','
    user tidemill "$TIDEMILL_ACCESS_KEY" "$TIDEMILL_SECRET_KEY" "$(inside tidemill)"
    printf ','
    user mlflow "$MLFLOW_ACCESS_KEY" "$MLFLOW_SECRET_KEY" "$(inside mlflow)"
    printf ']}\n'
} > /accounts/s3.json
