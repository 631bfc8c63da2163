"""Fully asynchronous reinforcement learning of language models. See docs/architecture.md for the flow."""

__version__ = "0.1.0"
