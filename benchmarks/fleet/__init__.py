"""A simulation of a large fleet: which part of Bishop saturates first, and what failures cost.

`python -m benchmarks.simulate_fleet` runs it. It is the design that is simulated, with the real
choice of a replica (`engine.replicas.choice`): nothing here was measured on a thousand GPUs.
"""
