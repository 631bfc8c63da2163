"""All of vLLM: engines, their settings and requests, and how they load new weights."""
