"""A run on Kubernetes: a RayJob of the KubeRay operator, made, watched and given back."""
