"""The client keeps the contract on a real API server, with administrator permissions."""

from __future__ import annotations

import pytest
from cluster_contract import ClusterContract, suspended

from tidemill.errors import ClusterError
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import RAY_JOBS, Cluster

pytestmark = pytest.mark.cluster


class TestKubernetesCluster(ClusterContract):
    @pytest.fixture
    def cluster(self, admin: KubernetesCluster) -> Cluster:
        return admin

    def test_an_unknown_field_is_refused(self, cluster: Cluster) -> None:
        job = suspended("typo")
        job["spec"] |= {"entryPoint": "true"}
        for create in (cluster.create, cluster.dry_run_create):
            with pytest.raises(
                ClusterError, match=r'refuses rayjobs\.ray\.io typo: .*unknown field "spec\.entryPoint"'
            ):
                create(RAY_JOBS, job)
        assert cluster.get(RAY_JOBS, "typo") is None

    def test_a_dry_run_stores_nothing(self, cluster: Cluster) -> None:
        cluster.dry_run_create(RAY_JOBS, suspended("dry"))
        assert cluster.get(RAY_JOBS, "dry") is None
