#!/usr/bin/env bash
# Creates a cluster on this machine with everything a run needs: `make cluster-up`. Keeps what exists already.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' tidemill/__init__.py)
for program in docker kind kubectl; do
    command -v "$program" > /dev/null || { echo "cluster-up needs $program on the PATH" >&2; exit 1; }
done
images=("tidemill-cpu:$version" "tidemill-python:$version")
for image in "${images[@]}"; do
    docker image inspect "$image" > /dev/null 2>&1 || { echo "no image $image: make images" >&2; exit 1; }
done

kind get clusters | grep -qx tidemill || kind create cluster --config k8s/kind/cluster.yaml
kubectl config use-context kind-tidemill
kind load docker-image --name tidemill "${images[@]}"

kubectl apply --server-side -k k8s/operators/kuberay
kubectl apply -k k8s/operators/kubeflow-crds
kubectl wait --for condition=established --timeout=60s crd/applications.app.k8s.io
kubectl apply -k k8s/operators/kubeflow

kubectl apply -f k8s/base/namespace.yaml
k8s/kind/secrets.sh
kubectl apply -k k8s/overlays/kind

kubectl -n kuberay-system rollout status --timeout=300s deployment/kuberay-operator
for deployment in minio mlflow; do
    kubectl -n tidemill rollout status --timeout=300s "deployment/$deployment"
done
kubectl -n tidemill wait --for=condition=complete --timeout=300s job/store-setup
kubectl -n kubeflow rollout status --timeout=900s deployment/ml-pipeline
kubectl -n kubeflow rollout status --timeout=300s deployment/ml-pipeline-ui
cat << 'END'
The cluster is up. In two other terminals:
  kubectl -n kubeflow port-forward service/ml-pipeline-ui 8080:80      # KFP:    http://localhost:8080
  kubectl -n tidemill port-forward service/mlflow 5000:5000            # MLflow: http://localhost:5000
`make cluster-down` removes it with all its data.
END
