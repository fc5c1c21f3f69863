"""From what attention was seen to do to the tables of the policies. Knows tensors, not models."""
