"""Tensor parallelism: one model over several processes of a machine. See docs/architecture.md."""
