"""Several engines behind one face: see docs/operations.md."""
