#!/bin/sh
# Starts MLflow with accounts. Its settings file contains the first password, so this script writes it to a volume in
# memory; it is in no image and no ConfigMap.
set -eu
umask 077
: "${MLFLOW_FLASK_SERVER_SECRET_KEY:?is empty: session_key of the secret tidemill-mlflow-accounts}"
: "${ADMIN_PASSWORD:?is empty: password of the secret tidemill-mlflow-accounts}"
password=$(printf '%s' "$ADMIN_PASSWORD" | sed 's/%/%%/g')
cat > "$MLFLOW_AUTH_CONFIG_PATH" <<EOF
[mlflow]
default_permission = READ
database_uri = sqlite:////data/accounts.db
admin_username = admin
admin_password = $password
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
EOF
exec mlflow server --app-name basic-auth "$@"
