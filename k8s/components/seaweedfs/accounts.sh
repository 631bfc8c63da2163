#!/bin/sh
# Writes the accounts of the S3 server to a volume in memory: the owner, and for each bucket a user with access to it
# only.
set -eu
umask 077
# The keys are written into JSON without escaping; an empty key would create a user without a password.
for key in "$ADMIN_ACCESS_KEY" "$ADMIN_SECRET_KEY" "$TIDEMILL_ACCESS_KEY" "$TIDEMILL_SECRET_KEY" \
    "$MLFLOW_ACCESS_KEY" "$MLFLOW_SECRET_KEY"; do
    case $key in
    '' | *[!A-Za-z0-9+/=_.-]*)
        echo 'a key of the store is empty, or has more than letters, digits and + / = _ . -: see k8s/secrets' >&2
        exit 1
        ;;
    esac
done
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
