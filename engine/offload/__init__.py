"""Offloading: weights and KV beyond the memory of the device that computes."""
