"""A run on Kubernetes: its RayJobs of the KubeRay operator, from creation to deletion."""
