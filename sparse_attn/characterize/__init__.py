"""What attention does while a picture is drawn, gathered query by query. Knows tensors, no models.

Rows of attention come in as they are computed and are folded into sums of fixed size; no map of a
whole picture is ever held, but for the last few rows that the similarity over distance needs.
"""
