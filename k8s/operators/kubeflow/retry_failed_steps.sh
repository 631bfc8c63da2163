#!/bin/sh
# Lets KFP retry steps that fail, besides those whose pod is lost. Usage: retry_failed_steps.sh [NAMESPACE OF KFP]
#
# Argo adds the defaults of this ConfigMap to every step: the policy to those with retries, and two retries to all others,
# in all pipelines of the cluster. Applying KFP again takes the change back.
set -eu
namespace=${1:-kubeflow}
found=$(kubectl --namespace "$namespace" get configmap workflow-controller-configmap --output yaml)
case $found in
  *'retryPolicy: OnError'*) ;;
  *) echo "workflow-controller-configmap of namespace $namespace has no retryPolicy: OnError: nothing to change" && exit ;;
esac
printf '%s\n' "$found" | sed 's/retryPolicy: OnError/retryPolicy: Always/' | kubectl replace --filename -
