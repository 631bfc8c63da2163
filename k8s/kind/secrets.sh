#!/usr/bin/env bash
# Creates random keys for the object store, in the namespaces that read them. Keeps existing keys.
set -euo pipefail

keys() { # NAMESPACE NAME ACCESS_KEY SECRET_KEY
    kubectl -n "$1" get secret "$2" > /dev/null 2>&1 ||
        kubectl -n "$1" create secret generic "$2" --from-literal=access_key="$3" --from-literal=secret_key="$4"
}

random() { openssl rand -hex 20; }

keys tidemill tidemill-store-admin admin "$(random)"
keys tidemill tidemill-mlflow-store mlflow "$(random)"
keys tidemill tidemill-store tidemill "$(random)"
# The steps of a pipeline run in the namespace of KFP and read the same keys there.
secret=$(kubectl -n tidemill get secret tidemill-store -o 'jsonpath={.data.secret_key}' | base64 --decode)
if kubectl get namespace kubeflow > /dev/null 2>&1; then
    keys kubeflow tidemill-store tidemill "$secret"
fi
