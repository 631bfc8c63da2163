"""The client keeps the contract on a real API server, with administrator permissions."""

from __future__ import annotations

import pytest
from cluster_contract import ClusterContract

from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import Cluster

pytestmark = pytest.mark.cluster


class TestKubernetesCluster(ClusterContract):
    @pytest.fixture
    def cluster(self, admin: KubernetesCluster) -> Cluster:
        return admin
